//! The lists of a pickle while it is read. A list becomes part of one container only: a pickle that refers to one list
//! from many containers could otherwise expand to any amount of memory. Empty lists and call stacks may be shared.

use std::ops::Range;

use warpool::memory::MemPoolId;
use warpool::memory::report::{BlockInfo, SegmentInfo, StackId};

use super::invalid::Invalid;
use super::stacks::StackTable;
use crate::budget::{Budget, Exceeded};
use crate::pickle::{ListKind, Value};

/// All lists, by kind and number.
pub(super) struct Lists {
    pub(super) stacks: StackTable,
    pub(super) segments: Vec<OwnedList<SegmentInfo>>,
    pub(super) blocks: Vec<OwnedList<BlockInfo>>,
    /// The first entry of each, which is about the block as it is now.
    pub(super) block_histories: Vec<Option<u32>>,
    /// Lists of traces, as numbers in `traces`.
    pub(super) trace_lists: Vec<OwnedList<u32>>,
    pub(super) traces: Vec<EntryList>,
    pub(super) annotations: Vec<OwnedList<u32>>,
    pub(super) accounts: Vec<OwnedList<u32>>,
    pub(super) pools: Vec<PoolList>,
    pub(super) budget: Budget,
}

impl Lists {
    pub(super) fn new(keeps_stacks: bool, budget: &Budget) -> Self {
        Self {
            stacks: StackTable::new(keeps_stacks, budget),
            segments: Vec::new(),
            blocks: Vec::new(),
            block_histories: Vec::new(),
            trace_lists: Vec::new(),
            traces: Vec::new(),
            annotations: Vec::new(),
            accounts: Vec::new(),
            pools: Vec::new(),
            budget: budget.clone(),
        }
    }

    /// A new, empty list. Returns its number.
    pub(super) fn open(&mut self, kind: ListKind) -> Result<u32, Invalid> {
        let budget = &self.budget;
        match kind {
            ListKind::Segments => add(budget, &mut self.segments, OwnedList::new()),
            ListKind::Blocks => add(budget, &mut self.blocks, OwnedList::new()),
            ListKind::BlockHistory => add(budget, &mut self.block_histories, None),
            ListKind::Traces => add(budget, &mut self.trace_lists, OwnedList::new()),
            ListKind::Trace => add(budget, &mut self.traces, EntryList::default()),
            ListKind::Frames => self.stacks.open_list(),
            ListKind::Annotations => add(budget, &mut self.annotations, OwnedList::new()),
            ListKind::Account => add(budget, &mut self.accounts, OwnedList::new()),
            ListKind::Pool => add(budget, &mut self.pools, PoolList::default()),
            ListKind::Skipped => Ok(0),
        }
    }

    pub(super) fn length(&self, kind: ListKind, number: u32) -> usize {
        let index = number as usize;
        match kind {
            ListKind::Segments => self.segments[index].items.len(),
            ListKind::Blocks => self.blocks[index].items.len(),
            ListKind::BlockHistory => usize::from(self.block_histories[index].is_some()),
            ListKind::Traces => self.trace_lists[index].items.len(),
            ListKind::Trace => self.traces[index].length,
            ListKind::Frames => self.stacks.list_length(number),
            ListKind::Annotations => self.annotations[index].items.len(),
            ListKind::Account => self.accounts[index].items.len(),
            ListKind::Pool => self.pools[index].length,
            ListKind::Skipped => 0,
        }
    }

    /// Whether the value is an empty list, which can be of any kind.
    pub(super) fn is_empty_list(&self, value: Value) -> bool {
        match value {
            Value::List(ListKind::Skipped, _) => false,
            Value::List(kind, number) => self.length(kind, number) == 0,
            _ => false,
        }
    }

    /// The stack of a list of frames.
    pub(super) fn stack(&mut self, value: Value) -> Result<Option<StackId>, Invalid> {
        match value {
            _ if !self.stacks.is_kept() => Ok(None),
            Value::None => Ok(None),
            Value::List(ListKind::Frames, list) => self.stacks.close(list),
            _ if self.is_empty_list(value) => Ok(None),
            _ => Err(Invalid::container(value)),
        }
    }

    /// The pool of a tuple or list.
    #[inline]
    pub(super) fn pool(&self, value: Value) -> Result<MemPoolId, Invalid> {
        match value {
            Value::Pair(pool) => Ok(pool),
            Value::List(ListKind::Pool, list) if self.pools[list as usize].length == 2 => {
                let [graph, user] = self.pools[list as usize].numbers;
                Ok(MemPoolId { graph, user })
            }
            _ => Err(Invalid::unexpected(POOL, value)),
        }
    }
}

/// A pool id as a list.
#[derive(Clone, Copy, Default)]
pub(super) struct PoolList {
    numbers: [u32; 2],
    length: usize,
}

impl PoolList {
    pub(super) fn push(&mut self, value: Value) -> Result<(), Invalid> {
        match (self.numbers.get_mut(self.length), value) {
            (Some(number), Value::Int(value)) if u32::try_from(value).is_ok() => *number = value as u32,
            _ => return Err(Invalid::unexpected(POOL, value)),
        }
        self.length += 1;
        Ok(())
    }
}

/// What a pool id is, for messages.
const POOL: &str = "a tuple or list of two small numbers";

/// A list that becomes part of one container.
pub(super) struct OwnedList<T> {
    items: Vec<T>,
    is_taken: bool,
}

impl<T> OwnedList<T> {
    fn new() -> Self {
        Self { items: Vec::new(), is_taken: false }
    }

    pub(super) fn push(&mut self, budget: &Budget, item: T) -> Result<(), Invalid> {
        if self.is_taken {
            return Err(Invalid::appended("list"));
        }
        budget.reserve_one(&mut self.items)?;
        self.items.push(item);
        Ok(())
    }

    /// Takes the items for a container. An empty list may be taken again.
    pub(super) fn take(&mut self) -> Result<Vec<T>, Invalid> {
        if self.is_taken {
            return Err(Invalid::shared("list"));
        }
        self.is_taken = !self.items.is_empty();
        Ok(std::mem::take(&mut self.items))
    }
}

/// A trace: numbers of entries, nearly always one run of them.
#[derive(Default)]
pub(super) struct EntryList {
    runs: Vec<Range<u32>>,
    length: usize,
    is_taken: bool,
}

impl EntryList {
    pub(super) fn push(&mut self, budget: &Budget, entry: u32) -> Result<(), Invalid> {
        if self.is_taken {
            return Err(Invalid::appended("trace"));
        }
        self.append(budget, entry..entry + 1)?;
        Ok(())
    }

    /// Appends entries, also to a trace that is in use already.
    pub(super) fn append(&mut self, budget: &Budget, run: Range<u32>) -> Result<(), Exceeded> {
        self.length += run.len();
        match self.runs.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => {
                budget.reserve_one(&mut self.runs)?;
                self.runs.push(run);
            }
        }
        Ok(())
    }

    /// Marks the trace as part of a container. An empty one may be used again.
    pub(super) fn claim(&mut self) -> Result<(), Invalid> {
        if self.is_taken {
            return Err(Invalid::shared("trace"));
        }
        self.is_taken = self.length > 0;
        Ok(())
    }

    /// Takes its entries for another trace.
    pub(super) fn take(&mut self) -> Result<Vec<Range<u32>>, Invalid> {
        self.claim()?;
        Ok(std::mem::take(&mut self.runs))
    }

    pub(super) fn runs(&self) -> &[Range<u32>] {
        &self.runs
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }
}

/// Adds an item to an arena. Returns its number.
pub(super) fn add<T>(budget: &Budget, arena: &mut Vec<T>, item: T) -> Result<u32, Invalid> {
    // The last number is not used, so that a run can end after any entry.
    let number = u32::try_from(arena.len()).ok().filter(|&number| number < u32::MAX);
    let number = number.ok_or_else(|| Invalid::new("too many objects for one recording"))?;
    budget.reserve_one(arena)?;
    arena.push(item);
    Ok(number)
}
