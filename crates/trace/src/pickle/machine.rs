//! The stack machine: opcodes in, calls of the builder out.
//! Limits on stack, memo and texts hold before memory is taken, so a small file cannot ask for a large machine.

use std::collections::BTreeMap;

use warpool::memory::MemPoolId;

use super::opcode as op;
use super::value::{DictKind, ListKind, Value};
use crate::error::{Checked, ReadError};
use crate::input::Input;
use crate::snapshot::{Builder, Wrong};

/// Values on the stack. Writers that do not batch put a whole trace there: 2^25 events are a pickle of 2 GB.
const STACK_MAX: usize = 1 << 25;
/// Slots of the memo: one per event and a few more.
const MEMO_MAX: usize = 1 << 27;
/// Bytes of a text. Names and settings are short; user metadata may be a page.
const TEXT_MAX: u64 = 16 << 20;
/// Bytes of the pickle per container that is kept. A whole entry takes more than twice as many, so what opens them
/// faster never fills them, and well compressed it could ask for any amount of memory.
const BYTES_PER_CONTAINER: u64 = 8;
/// Containers that may be kept before that counts.
const CONTAINERS_FREE: u64 = 1 << 10;
/// Bytes of an integer.
const LONG_MAX: usize = 1 << 10;

/// The state of one reading.
pub(crate) struct Machine<'i, 'a> {
    pub(super) input: &'i mut Input<'a>,
    pub(super) builder: Builder,
    pub(super) stack: Vec<Value>,
    /// Heights of the stack at which something was begun.
    pub(super) marks: Vec<usize>,
    memo: Memo,
    scratch: Vec<u8>,
    /// Containers that are kept.
    containers: u64,
    /// Where the opcode that is being carried out starts.
    pub(super) at: u64,
}

impl<'i, 'a> Machine<'i, 'a> {
    pub(crate) fn new(input: &'i mut Input<'a>, builder: Builder) -> Self {
        let (stack, marks, scratch) = (Vec::new(), Vec::new(), Vec::new());
        Self { input, builder, stack, marks, memo: Memo::default(), scratch, containers: 0, at: 0 }
    }

    /// Runs to the end of the pickle. Returns the builder and what the pickle says it is.
    pub(crate) fn run(mut self) -> Checked<(Builder, Value)> {
        loop {
            self.at = self.input.offset();
            let code = self.input.byte("the pickle")?;
            match code {
                op::BINGET => {
                    let index = usize::from(self.input.byte("BINGET")?);
                    self.get(index)?;
                }
                op::LONG_BINGET => {
                    let index = u32::from_le_bytes(self.input.array("LONG_BINGET")?);
                    self.get(index as usize)?;
                }
                op::MEMOIZE => self.put(self.memo.dense.len())?,
                op::BINPUT => {
                    let index = usize::from(self.input.byte("BINPUT")?);
                    self.put(index)?;
                }
                op::LONG_BINPUT => {
                    let index = u32::from_le_bytes(self.input.array("LONG_BINPUT")?);
                    self.put(index as usize)?;
                }
                op::MARK => {
                    if self.marks.len() >= STACK_MAX {
                        return Err(self.damaged("too much is begun and not ended"));
                    }
                    self.marks.push(self.stack.len());
                }
                op::EMPTY_DICT => self.open_dict()?,
                op::EMPTY_LIST => self.open_list()?,
                op::SETITEM => self.set_items(3)?,
                op::SETITEMS => self.set_items(0)?,
                op::APPEND => self.append(2)?,
                op::APPENDS => self.append(0)?,
                op::EMPTY_TUPLE => self.push(Value::Tuple)?,
                op::TUPLE1 => self.tuple(1)?,
                op::TUPLE2 => self.tuple(2)?,
                op::TUPLE3 => self.tuple(3)?,
                op::TUPLE => {
                    let Some(mark) = self.marks.pop() else { return Err(self.damaged("TUPLE without MARK")) };
                    self.tuple(self.stack.len() - mark)?;
                }
                op::FRAME => {
                    // How the writer grouped its output; it says nothing that the opcodes do not.
                    self.input.array::<8>("FRAME")?;
                }
                op::PROTO => {
                    let protocol = self.input.byte("PROTO")?;
                    if !(2..=5).contains(&protocol) {
                        return Err(self.damaged(&format!("protocol {protocol}; 2 to 5 can be read")));
                    }
                }
                op::STOP => return self.stop(),
                _ => {
                    let value = self.scalar(code)?;
                    self.push(value)?;
                }
            }
        }
    }

    /// The value of an opcode that carries one.
    #[inline]
    fn scalar(&mut self, code: u8) -> Checked<Value> {
        Ok(match code {
            op::BININT1 => Value::Int(self.input.byte("BININT1")?.into()),
            op::BININT2 => Value::Int(u16::from_le_bytes(self.input.array("BININT2")?).into()),
            op::BININT => Value::Int(i32::from_le_bytes(self.input.array("BININT")?).into()),
            op::LONG1 => {
                let length = self.input.byte("LONG1")?;
                self.long(length.into())?
            }
            op::LONG4 => match usize::try_from(i32::from_le_bytes(self.input.array("LONG4")?)) {
                Ok(length) if length <= LONG_MAX => self.long(length)?,
                _ => return Err(self.damaged("an integer of absurd length")),
            },
            op::SHORT_BINUNICODE => {
                let length = self.input.byte("SHORT_BINUNICODE")?;
                self.text(length.into())?
            }
            op::BINUNICODE => {
                let length = u32::from_le_bytes(self.input.array("BINUNICODE")?);
                self.text(length.into())?
            }
            op::BINUNICODE8 => {
                let length = u64::from_le_bytes(self.input.array("BINUNICODE8")?);
                self.text(length)?
            }
            op::BINFLOAT => Value::Float(f64::from_be_bytes(self.input.array("BINFLOAT")?)),
            op::NEWTRUE => Value::Bool(true),
            op::NEWFALSE => Value::Bool(false),
            op::NONE => Value::None,
            _ => return Err(Box::new(ReadError::Opcode { offset: self.at, opcode: op::name(code) })),
        })
    }

    fn text(&mut self, length: u64) -> Checked<Value> {
        if length > TEXT_MAX {
            return Err(self.damaged(&format!("a text of {length} bytes; {TEXT_MAX} are the most that is read")));
        }
        let bytes = self.input.bytes(length as usize, &mut self.scratch, "a text")?;
        match self.builder.texts.intern_bytes(bytes) {
            Ok(text) => Ok(Value::Text(text)),
            Err(what) => Err(self.damaged(what)),
        }
    }

    /// An integer of `length` bytes: two's complement, the lowest first.
    fn long(&mut self, length: usize) -> Checked<Value> {
        let mut digits = self.input.bytes(length, &mut self.scratch, "an integer")?;
        let fill = if digits.last().is_some_and(|&top| top >= 0x80) { 0xff } else { 0 };
        // Bytes that only repeat the sign say nothing; one stays where it is needed to show the sign.
        while let [rest @ .., top] = digits
            && digits.len() > 8
            && *top == fill
        {
            if digits.len() == 9 && (rest[7] >= 0x80) != (fill == 0xff) {
                break;
            }
            digits = rest;
        }
        Ok(match digits.len() {
            0..=8 => {
                let mut word = [fill; 8];
                word[..digits.len()].copy_from_slice(digits);
                Value::Int(i64::from_le_bytes(word))
            }
            9 if digits[8] == 0 => {
                Value::Large(u64::from_le_bytes(*digits.first_chunk().expect("nine digits start with eight")))
            }
            _ => Value::Huge,
        })
    }

    #[inline]
    pub(super) fn push(&mut self, value: Value) -> Checked<()> {
        if self.stack.len() >= STACK_MAX {
            return Err(self.damaged("too many values wait on the stack"));
        }
        self.stack.push(value);
        Ok(())
    }

    #[inline]
    fn get(&mut self, index: usize) -> Checked<()> {
        match self.memo.get(index) {
            Some(value) => self.push(value),
            None => Err(self.damaged(&format!("it refers to object {index}, which does not exist"))),
        }
    }

    #[inline]
    fn put(&mut self, index: usize) -> Checked<()> {
        if self.stack.len() == self.floor() {
            return Err(self.damaged("nothing is there to remember"));
        }
        let value = self.stack[self.stack.len() - 1];
        if self.memo.put(index, value) { Ok(()) } else { Err(self.damaged("too many objects to remember")) }
    }

    /// The height below which nothing may be taken.
    #[inline]
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn tuple(&mut self, length: usize) -> Checked<()> {
        if self.stack.len() - self.floor() < length {
            return Err(self.damaged("a tuple of more values than there are"));
        }
        let start = self.stack.len() - length;
        let tuple = match self.stack[start..] {
            [Value::Int(graph), Value::Int(user)] => match (u32::try_from(graph), u32::try_from(user)) {
                (Ok(graph), Ok(user)) => Value::Pair(MemPoolId { graph, user }),
                _ => Value::Tuple,
            },
            _ => Value::Tuple,
        };
        self.stack.truncate(start);
        self.push(tuple)
    }

    /// Takes off the stack where the values for a container start: from the last mark, or, of a single one, from the
    /// top, where with the container `single` values lie.
    #[inline]
    fn contents(&mut self, single: usize) -> Checked<usize> {
        let start = if single == 0 {
            match self.marks.pop() {
                Some(mark) => mark,
                None => return Err(self.damaged("a container is filled without MARK")),
            }
        } else {
            (self.stack.len() + 1).saturating_sub(single)
        };
        if start <= self.floor() || start > self.stack.len() {
            return Err(self.damaged("a container is filled that is not there"));
        }
        Ok(start)
    }

    #[inline]
    fn set_items(&mut self, single: usize) -> Checked<()> {
        let start = self.contents(single)?;
        let (below, pairs) = self.stack.split_at(start);
        let Value::Dict(kind, number) = below[start - 1] else {
            return Err(self.damaged("items are set in something that is no dict"));
        };
        if pairs.len() % 2 != 0 {
            return Err(self.damaged("a key without a value"));
        }
        let set = self.builder.set_items(kind, number, pairs);
        self.stack.truncate(start);
        set.map_err(|wrong| self.content(start - 1, &wrong))
    }

    #[inline]
    fn append(&mut self, single: usize) -> Checked<()> {
        let start = self.contents(single)?;
        let (below, values) = self.stack.split_at(start);
        let Value::List(kind, number) = below[start - 1] else {
            return Err(self.damaged("something is appended to what is no list"));
        };
        let appended = self.builder.append(kind, number, values);
        self.stack.truncate(start);
        appended.map_err(|wrong| self.content(start - 1, &wrong))
    }

    fn open_dict(&mut self) -> Checked<()> {
        let kind = self.kind_of_dict();
        self.count_container(kind != DictKind::Skipped)?;
        self.open(|builder| builder.open_dict(kind).map(|number| Value::Dict(kind, number)))
    }

    fn open_list(&mut self) -> Checked<()> {
        let kind = self.kind_of_list();
        self.count_container(kind != ListKind::Skipped)?;
        self.open(|builder| builder.open_list(kind).map(|number| Value::List(kind, number)))
    }

    #[inline]
    fn count_container(&mut self, is_kept: bool) -> Checked<()> {
        self.containers += u64::from(is_kept);
        if self.containers > CONTAINERS_FREE + self.at / BYTES_PER_CONTAINER {
            return Err(self.damaged("more is begun than so few bytes can fill"));
        }
        Ok(())
    }

    fn open(&mut self, container: impl FnOnce(&mut Builder) -> Result<Value, Wrong>) -> Checked<()> {
        match container(&mut self.builder) {
            Ok(value) => self.push(value),
            Err(wrong) => Err(self.content(self.stack.len(), &wrong)),
        }
    }

    fn stop(self) -> Checked<(Builder, Value)> {
        match self.stack[..] {
            [value] if self.marks.is_empty() => {
                if !self.input.is_at_end()? {
                    let offset = self.input.offset();
                    let what = "data follows after its end; a recording is one pickle".to_owned();
                    return Err(Box::new(ReadError::Pickle { offset, what }));
                }
                Ok((self.builder, value))
            }
            _ => Err(self.damaged("it ends in the middle")),
        }
    }

    #[cold]
    pub(super) fn damaged(&self, what: &str) -> Box<ReadError> {
        Box::new(ReadError::Pickle { offset: self.at, what: what.to_owned() })
    }
}

/// The objects that a pickle may refer to again, by number. Writers number them without gaps.
#[derive(Default)]
struct Memo {
    dense: Vec<Value>,
    /// Numbers with gaps before them: nobody writes such, and a large number must not mean a large table.
    sparse: BTreeMap<usize, Value>,
}

impl Memo {
    #[inline]
    fn get(&self, index: usize) -> Option<Value> {
        match self.dense.get(index) {
            Some(&value) => Some(value),
            None => self.sparse.get(&index).copied(),
        }
    }

    /// False if it is full.
    #[inline]
    fn put(&mut self, index: usize, value: Value) -> bool {
        if self.dense.len() + self.sparse.len() >= MEMO_MAX {
            return false;
        }
        match index.cmp(&self.dense.len()) {
            std::cmp::Ordering::Less => self.dense[index] = value,
            std::cmp::Ordering::Equal => self.dense.push(value),
            std::cmp::Ordering::Greater => {
                self.sparse.insert(index, value);
            }
        }
        true
    }
}
