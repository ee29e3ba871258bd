//! The entries of all traces while a pickle is read, in one arena in the order of the file.

use warpool::memory::report::{Action, TraceEntry};

use super::convert::{optional_text, signed, text, unsigned};
use super::invalid::Invalid;
use super::lists::{EntryList, Lists, add};
use super::schema::{self, Keyword};
use super::texts::TextTable;
use crate::budget::{Budget, bytes_of};
use crate::pickle::Value;

const BLANK: TraceEntry = TraceEntry::new(Action::Alloc, 0, 0, 0, 0);

/// Bits of `keys`: the keys that every entry has.
const HAS_ACTION: u8 = 1;
const HAS_ADDR: u8 = 2;
const HAS_SIZE: u8 = 4;
const HAS_STREAM: u8 = 8;
const HAS_ALL: u8 = HAS_ACTION | HAS_ADDR | HAS_SIZE | HAS_STREAM;
const REQUIRED: [(u8, Keyword); 4] = [
    (HAS_ACTION, Keyword::Action),
    (HAS_ADDR, Keyword::Addr),
    (HAS_SIZE, Keyword::Size),
    (HAS_STREAM, Keyword::Stream),
];
/// A key that older versions do not write.
const HAS_TIME: u8 = 16;

/// Entries, and which keys each has.
pub(super) struct Entries {
    entries: Vec<TraceEntry>,
    keys: Vec<u8>,
    budget: Budget,
}

impl Entries {
    pub(super) fn new(budget: &Budget) -> Self {
        Self { entries: Vec::new(), keys: Vec::new(), budget: budget.clone() }
    }

    /// A new entry without keys. Returns its number.
    #[inline]
    pub(super) fn open(&mut self) -> Result<u32, Invalid> {
        self.budget.reserve_one(&mut self.keys)?;
        self.keys.push(0);
        add(&self.budget, &mut self.entries, BLANK)
    }

    /// Sets keys of an entry, given as keys and values in turn: the innermost loop of reading.
    #[inline]
    pub(super) fn set(
        &mut self,
        number: u32,
        pairs: &[Value],
        texts: &TextTable,
        lists: &mut Lists,
    ) -> Result<(), Invalid> {
        let entry = &mut self.entries[number as usize];
        let keys = &mut self.keys[number as usize];
        for pair in pairs.chunks_exact(2) {
            let (Value::Text(key), value) = (pair[0], pair[1]) else { continue };
            let Some(key) = Keyword::of(key) else { continue };
            let of_key = |invalid: Invalid| invalid.of_key(key.text());
            match key {
                Keyword::Action => {
                    entry.action = action(value, texts).map_err(of_key)?;
                    *keys |= HAS_ACTION;
                }
                Keyword::Addr | Keyword::DeviceFree => {
                    entry.addr = unsigned(value).map_err(of_key)?;
                    *keys |= HAS_ADDR;
                }
                Keyword::Size => {
                    entry.size = unsigned(value).map_err(of_key)?;
                    *keys |= HAS_SIZE;
                }
                Keyword::Stream => {
                    entry.stream = unsigned(value).map_err(of_key)?;
                    *keys |= HAS_STREAM;
                }
                Keyword::TimeUs => {
                    entry.time_us = signed(value).map_err(of_key)?;
                    *keys |= HAS_TIME;
                }
                Keyword::PoolId => entry.pool = Some(lists.pool(value).map_err(of_key)?),
                Keyword::CompileContext => {
                    entry.compile_context = optional_text(value, Keyword::NotApplicable).map_err(of_key)?;
                }
                Keyword::UserMetadata => {
                    entry.user_metadata = optional_text(value, Keyword::Empty).map_err(of_key)?;
                }
                Keyword::Frames => entry.stack = lists.stack(value).map_err(of_key)?,
                Keyword::ForwardFrames => entry.forward_stack = lists.stack(value).map_err(of_key)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Fails if the entry lacks a required key.
    #[inline]
    pub(super) fn check(&self, number: u32) -> Result<(), Invalid> {
        let keys = self.keys[number as usize];
        if keys & HAS_ALL == HAS_ALL {
            return Ok(());
        }
        let missing = REQUIRED.iter().find(|(bit, _)| keys & bit == 0).map_or("action", |(_, key)| key.text());
        Err(Invalid::missing(missing))
    }

    /// Whether every entry has a time.
    pub(super) fn all_have_time(&self) -> bool {
        self.keys.iter().all(|keys| keys & HAS_TIME != 0)
    }

    /// The entries of each trace.
    pub(super) fn into_traces(self, lists: &[&EntryList]) -> Result<Vec<Vec<TraceEntry>>, Invalid> {
        let Self { mut entries, keys, budget } = self;
        drop(keys);
        let mut traces = Vec::with_capacity(lists.len());
        // Where the runs of the lists before each one end.
        let mut ends_before = Vec::with_capacity(lists.len());
        let mut end_max = 0;
        for list in lists {
            ends_before.push(end_max);
            end_max = list.runs().iter().map(|run| run.end).fold(end_max, u32::max);
        }
        // From the last to the first: a trace at the end of the arena is split off, and the first is then the arena
        // itself. Only if traces share entries are these copied.
        for (index, list) in lists.iter().enumerate().rev() {
            let is_at_end = match list.runs() {
                [run] => run.end as usize == entries.len() && ends_before[index] <= run.start,
                _ => false,
            };
            if !(is_at_end && list.runs()[0].start == 0) {
                budget.take(bytes_of::<TraceEntry>(list.len()))?;
            }
            traces.push(match list.runs() {
                [run] if is_at_end && run.start == 0 => std::mem::take(&mut entries),
                [run] if is_at_end => entries.split_off(run.start as usize),
                runs => {
                    let mut trace = Vec::with_capacity(list.len());
                    for run in runs {
                        trace.extend_from_slice(&entries[run.start as usize..run.end as usize]);
                    }
                    trace
                }
            });
        }
        traces.reverse();
        Ok(traces)
    }
}

fn action(value: Value, texts: &TextTable) -> Result<Action, Invalid> {
    let name = text(value)?;
    let unknown = || Invalid::new(format!("`{}` is not a known action", texts.shortened(name)));
    schema::action(name).ok_or_else(unknown)
}
