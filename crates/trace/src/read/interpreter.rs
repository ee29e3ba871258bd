//! An interpreter for the part of pickle that memory snapshots are written in.
//!
//! It executes nothing: an opcode for a global, a call or a class is refused by name, as is every other opcode that
//! snapshots do not use. It builds no tree of objects either: the contents of a container go to the [`Builder`] as soon
//! as they are complete, and the stack and the memo hold only its kind and number.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use warpool::memory::MemPoolId;

use super::error::{Checked, ReadError};
use super::input::Input;
use super::parent;
use super::stack::PickleStack;
use crate::budget::{Budget, Exceeded};
use crate::pickle::{DictKind, ListKind, Value, opcode as op};
use crate::snapshot::{Builder, Invalid};

/// The most bytes of a text. Names and settings are short; user metadata may be a page.
const TEXT_MAX: u64 = 16 << 20;
/// Texts of more than this many bytes are dropped where nothing reads them. Shorter ones are kept, since they may be
/// referred to elsewhere, as keys are.
const SKIPPED_TEXT_MIN: u64 = 128;
/// The least bytes of the pickle per container that is kept. A complete entry takes more than twice as many, so a
/// pickle with fewer opens containers that it does not fill; well compressed, it could take any amount of memory.
const BYTES_PER_CONTAINER: u64 = 8;
/// Containers that may be kept before that limit applies.
const CONTAINERS_FREE: u64 = 1 << 10;
/// The most bytes of an integer.
const LONG_MAX: usize = 1 << 10;

/// The state of an interpretation.
pub(super) struct Interpreter<'i, 'a> {
    input: &'i mut Input<'a>,
    builder: Builder,
    stack: PickleStack,
    memo: Memo,
    scratch: Vec<u8>,
    /// Containers that are kept.
    containers: u64,
    /// The offset of the current opcode.
    offset: u64,
    budget: Budget,
}

impl<'i, 'a> Interpreter<'i, 'a> {
    pub fn new(input: &'i mut Input<'a>, builder: Builder, budget: &Budget) -> Self {
        let (stack, memo, scratch) = (PickleStack::new(budget), Memo::new(budget), Vec::new());
        Self { input, builder, stack, memo, scratch, containers: 0, offset: 0, budget: budget.clone() }
    }

    /// Runs to the end of the pickle. Returns the builder and the root value.
    pub fn run(mut self) -> Checked<(Builder, Value)> {
        loop {
            self.offset = self.input.offset();
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
                op::MARK => self.stack.mark().map_err(|Exceeded| self.memory_limit())?,
                op::EMPTY_DICT => self.open_dict()?,
                op::EMPTY_LIST => self.open_list()?,
                op::SETITEM => self.set_items(Some(2))?,
                op::SETITEMS => self.set_items(None)?,
                op::APPEND => self.append(Some(1))?,
                op::APPENDS => self.append(None)?,
                op::EMPTY_TUPLE => self.push(Value::Tuple)?,
                op::TUPLE1 => self.tuple(1)?,
                op::TUPLE2 => self.tuple(2)?,
                op::TUPLE3 => self.tuple(3)?,
                op::TUPLE => {
                    let Some(mark) = self.stack.pop_mark() else { return Err(self.damaged("TUPLE without MARK")) };
                    self.tuple(self.stack.len() - mark)?;
                }
                op::FRAME => {
                    // The framing of the writer's output, which is not needed.
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

    /// The value of an opcode that contains one.
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
            _ => return Err(Box::new(ReadError::Opcode { offset: self.offset, opcode: op::name(code) })),
        })
    }

    fn text(&mut self, length: u64) -> Checked<Value> {
        if length > TEXT_MAX {
            return Err(self.damaged(&format!("a text of {length} bytes; at most {TEXT_MAX} are read")));
        }
        if length > SKIPPED_TEXT_MIN && !parent::reads_text(&self.stack, self.builder.keeps_stacks()) {
            self.input.skip(length, "a text")?;
            return Ok(Value::SkippedText);
        }
        let bytes = self.input.bytes(length as usize, &mut self.scratch, "a text")?;
        match self.builder.intern(bytes) {
            Ok(text) => Ok(Value::Text(text)),
            Err(what) => Err(self.damaged(what)),
        }
    }

    /// An integer of `length` bytes: two's complement, little-endian.
    fn long(&mut self, length: usize) -> Checked<Value> {
        let mut digits = self.input.bytes(length, &mut self.scratch, "an integer")?;
        let fill = if digits.last().is_some_and(|&top| top >= 0x80) { 0xff } else { 0 };
        // Bytes that only repeat the sign are dropped, but not one that is needed to show it.
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
    fn push(&mut self, value: Value) -> Checked<()> {
        self.stack.push(value).map_err(|Exceeded| self.memory_limit())
    }

    /// Pushes an object of the memo.
    #[inline]
    fn get(&mut self, index: usize) -> Checked<()> {
        match self.memo.get(index) {
            Some(value) => self.push(value),
            None => Err(self.no_object(index)),
        }
    }

    /// Puts the top of the stack into the memo.
    #[inline]
    fn put(&mut self, index: usize) -> Checked<()> {
        let Some(value) = self.stack.top() else { return Err(self.damaged("nothing on the stack to memoize")) };
        self.memo.put(index, value).map_err(|Exceeded| self.memory_limit())
    }

    fn tuple(&mut self, length: usize) -> Checked<()> {
        let Some(start) = self.stack.last(length) else {
            return Err(self.damaged("a tuple of more values than there are"));
        };
        let tuple = match *self.stack.values_from(start) {
            [Value::Int(graph), Value::Int(user)] => match (u32::try_from(graph), u32::try_from(user)) {
                (Ok(graph), Ok(user)) => Value::Pair(MemPoolId { graph, user }),
                _ => Value::Tuple,
            },
            _ => Value::Tuple,
        };
        self.stack.truncate(start);
        self.push(tuple)
    }

    /// Adds items to a dict: those from the last mark on, or the last `count` values.
    #[inline]
    fn set_items(&mut self, count: Option<usize>) -> Checked<()> {
        let (dict, start) = self.stack.container(count).map_err(|what| self.damaged(what))?;
        let Value::Dict(kind, number) = dict else {
            return Err(self.damaged("items for something that is not a dict"));
        };
        let pairs = self.stack.values_from(start);
        if !pairs.len().is_multiple_of(2) {
            return Err(self.damaged("a key without a value"));
        }
        let set = self.builder.set_items(kind, number, pairs);
        self.stack.truncate(start);
        set.map_err(|invalid| self.invalid(start - 1, invalid))
    }

    /// Appends elements to a list: those from the last mark on, or the last `count` values.
    #[inline]
    fn append(&mut self, count: Option<usize>) -> Checked<()> {
        let (list, start) = self.stack.container(count).map_err(|what| self.damaged(what))?;
        let Value::List(kind, number) = list else {
            return Err(self.damaged("elements for something that is not a list"));
        };
        let appended = self.builder.append(kind, number, self.stack.values_from(start));
        self.stack.truncate(start);
        appended.map_err(|invalid| self.invalid(start - 1, invalid))
    }

    fn open_dict(&mut self) -> Checked<()> {
        let kind = parent::kind_of_new_dict(&self.stack);
        self.count_container(kind != DictKind::Skipped)?;
        match self.builder.open_dict(kind) {
            Ok(number) => self.push(Value::Dict(kind, number)),
            Err(invalid) => Err(self.invalid(self.stack.len(), invalid)),
        }
    }

    fn open_list(&mut self) -> Checked<()> {
        let kind = parent::kind_of_new_list(&self.stack, self.builder.keeps_stacks());
        self.count_container(kind != ListKind::Skipped)?;
        match self.builder.open_list(kind) {
            Ok(number) => self.push(Value::List(kind, number)),
            Err(invalid) => Err(self.invalid(self.stack.len(), invalid)),
        }
    }

    #[inline]
    fn count_container(&mut self, is_kept: bool) -> Checked<()> {
        self.containers += u64::from(is_kept);
        if self.containers > CONTAINERS_FREE + self.offset / BYTES_PER_CONTAINER {
            return Err(self.damaged("more containers than this many bytes can fill"));
        }
        Ok(())
    }

    fn stop(self) -> Checked<(Builder, Value)> {
        let Some(root) = self.stack.only_value() else {
            return Err(self.damaged("it ends without a single root value"));
        };
        if !self.input.is_at_end()? {
            let offset = self.input.offset();
            let what = "data behind the end of the pickle; a recording is one pickle".to_owned();
            return Err(Box::new(ReadError::Pickle { offset, what }));
        }
        Ok((self.builder, root))
    }

    #[cold]
    fn no_object(&self, index: usize) -> Box<ReadError> {
        self.damaged(&format!("a reference to object {index}, which does not exist"))
    }

    #[cold]
    fn memory_limit(&self) -> Box<ReadError> {
        ReadError::memory_limit(&self.budget, self.offset)
    }

    #[cold]
    fn damaged(&self, what: &str) -> Box<ReadError> {
        if self.budget.is_exceeded() {
            return self.memory_limit();
        }
        Box::new(ReadError::Pickle { offset: self.offset, what: what.to_owned() })
    }

    /// The error that the container at index `at` of the stack is wrong.
    #[cold]
    fn invalid(&self, at: usize, invalid: Invalid) -> Box<ReadError> {
        if self.budget.is_exceeded() {
            return self.memory_limit();
        }
        ReadError::content(self.offset, &parent::path(&self.stack, &self.builder, at), invalid)
    }
}

/// The objects that a pickle can refer to again, by number. Writers number them without gaps.
struct Memo {
    dense: Vec<Value>,
    /// Numbers after a gap. Writers do not use them, and a large number must not cause a large table.
    sparse: BTreeMap<usize, Value>,
    budget: Budget,
}

impl Memo {
    fn new(budget: &Budget) -> Self {
        Self { dense: Vec::new(), sparse: BTreeMap::new(), budget: budget.clone() }
    }

    #[inline]
    fn get(&self, index: usize) -> Option<Value> {
        match self.dense.get(index) {
            Some(&value) => Some(value),
            None => self.sparse.get(&index).copied(),
        }
    }

    #[inline]
    fn put(&mut self, index: usize, value: Value) -> Result<(), Exceeded> {
        // The nodes of a B-tree that is filled in order are half empty.
        const SPARSE_BYTES: u64 = 64;
        match index.cmp(&self.dense.len()) {
            Ordering::Less => self.dense[index] = value,
            Ordering::Equal => {
                self.budget.reserve_one(&mut self.dense)?;
                self.dense.push(value);
            }
            Ordering::Greater => {
                self.budget.take(SPARSE_BYTES)?;
                self.sparse.insert(index, value);
            }
        }
        Ok(())
    }
}
