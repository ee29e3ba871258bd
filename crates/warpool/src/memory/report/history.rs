//! The allocation history: a ring of the newest entries.
//!
//! Entries hold references to call stacks and texts, so that these are freed with the last entry that leaves the ring;
//! they get ids when a snapshot is taken. Off, the history costs one branch per call.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use super::{Action, Frame, Snapshot, StackId, TraceEntry};
use crate::memory::MemPoolId;
use crate::{Error, Result};

/// A call stack, innermost frame first.
pub type Stack = Arc<[Frame]>;

/// Where call stacks are recorded, if a hook is set: each level includes the ones before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StackLevel {
    /// Nowhere.
    #[default]
    Never,
    /// With allocated blocks.
    State,
    /// In entries of allocations too.
    Alloc,
    /// In entries of frees too.
    All,
}

/// How the history is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryOptions {
    /// How many entries are kept, the newest; at least 1.
    pub entries_max: usize,
    /// Where call stacks are recorded.
    pub stacks: StackLevel,
    /// Actions that are not recorded. Trackers still see them.
    pub skip: Vec<Action>,
    /// Added to the driver's clock, in microseconds: a Unix time, if entries are to carry one.
    pub epoch_us: i64,
}

impl Default for HistoryOptions {
    /// A million entries, no stacks, nothing skipped.
    fn default() -> Self {
        Self { entries_max: 1_000_000, stacks: StackLevel::Never, skip: Vec::new(), epoch_us: 0 }
    }
}

impl HistoryOptions {
    /// Skips actions by their names in snapshots. [`Error::UnknownAction`] for any other.
    pub fn skipping(mut self, names: &[&str]) -> Result<Self> {
        for &name in names {
            let action = Action::from_name(name).ok_or_else(|| Error::UnknownAction {
                name: name.to_owned(),
                known: Action::ALL.map(Action::name).to_vec(),
            })?;
            self.skip.push(action);
        }
        Ok(self)
    }
}

/// An entry of the allocation history, as trackers see it. [`TraceEntry`] is its form in snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    /// What happened.
    pub action: Action,
    /// The address; of an [`Action::Oom`], the bytes that were free on the device.
    pub addr: u64,
    /// The size in bytes.
    pub size: u64,
    /// The stream, by the driver's handle.
    pub stream: u64,
    /// The time, in microseconds of the driver's clock.
    pub time_us: i64,
    /// The pool.
    pub pool: MemPoolId,
    /// The call stack.
    pub stack: Option<Stack>,
    /// The metadata that the program had set.
    pub user_metadata: Option<Arc<str>>,
    /// The compiled region of the program.
    pub compile_context: Option<Arc<str>>,
}

thread_local! {
    static USER_METADATA: RefCell<Option<Arc<str>>> = const { RefCell::new(None) };
    static COMPILE_CONTEXTS: RefCell<Vec<Arc<str>>> = const { RefCell::new(Vec::new()) };
}

/// Sets the metadata of entries that the calling thread causes from now on; an empty text is none.
pub fn set_user_metadata(text: &str) {
    let text = if text.is_empty() { None } else { Some(text.into()) };
    // At the end of the thread its thread-locals may be destroyed already: then entries have none.
    let _ = USER_METADATA.try_with(|slot| *slot.borrow_mut() = text);
}

/// The metadata of entries that the calling thread causes.
#[must_use]
pub fn user_metadata() -> Option<Arc<str>> {
    USER_METADATA.try_with(|slot| slot.borrow().clone()).ok().flatten()
}

/// Runs `act` with `text` as metadata instead of the program's.
pub(crate) fn with_metadata<R>(text: &str, act: impl FnOnce() -> R) -> R {
    /// Dropped, also by a panic, it restores the program's.
    struct Restore(Option<Arc<str>>);

    impl Drop for Restore {
        fn drop(&mut self) {
            let _ = USER_METADATA.try_with(|slot| *slot.borrow_mut() = self.0.take());
        }
    }

    let _restore = Restore(user_metadata());
    set_user_metadata(text);
    act()
}

/// Enters a compiled region: its name is in entries that the calling thread causes.
pub fn push_compile_context(name: &str) {
    let _ = COMPILE_CONTEXTS.try_with(|stack| stack.borrow_mut().push(name.into()));
}

/// Leaves the compiled region that was entered last.
pub fn pop_compile_context() {
    let _ = COMPILE_CONTEXTS.try_with(|stack| drop(stack.borrow_mut().pop()));
}

pub(crate) fn compile_context() -> Option<Arc<str>> {
    COMPILE_CONTEXTS.try_with(|stack| stack.borrow().last().cloned()).ok().flatten()
}

/// The ring of one device.
#[derive(Debug, Default)]
pub(crate) struct History {
    options: Option<HistoryOptions>,
    ring: VecDeque<HistoryEntry>,
}

impl History {
    /// Starts recording, or stops and clears it.
    pub(crate) fn set(&mut self, options: Option<HistoryOptions>) {
        match options {
            Some(mut options) => {
                options.entries_max = options.entries_max.max(1);
                self.options = Some(options);
            }
            None => *self = Self::default(),
        }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.options.is_some()
    }

    pub(crate) fn stack_level(&self) -> StackLevel {
        self.options.as_ref().map_or(StackLevel::Never, |options| options.stacks)
    }

    pub(crate) fn epoch_us(&self) -> i64 {
        self.options.as_ref().map_or(0, |options| options.epoch_us)
    }

    pub(crate) fn write(&mut self, entry: HistoryEntry) {
        let Some(options) = &self.options else { return };
        if options.skip.contains(&entry.action) {
            return;
        }
        while self.ring.len() >= options.entries_max {
            self.ring.pop_front();
        }
        self.ring.push_back(entry);
    }

    /// A copy of all entries, oldest first; the stacks and texts that they refer to are added to `snapshot`.
    pub(crate) fn copy_to(&self, snapshot: &mut Snapshot, stacks: &mut StackIds) -> Vec<TraceEntry> {
        self.ring
            .iter()
            .map(|entry| TraceEntry {
                action: entry.action,
                addr: entry.addr,
                size: entry.size,
                stream: entry.stream,
                time_us: entry.time_us,
                pool: Some(entry.pool),
                compile_context: entry.compile_context.as_deref().map(|text| snapshot.texts.intern(text)),
                user_metadata: entry.user_metadata.as_deref().map(|text| snapshot.texts.intern(text)),
                stack: entry.stack.as_ref().map(|stack| stacks.id(snapshot, stack)),
                forward_stack: None,
            })
            .collect()
    }
}

/// The ids of call stacks in a snapshot, one for each different stack.
#[derive(Debug, Default)]
pub(crate) struct StackIds {
    by_stack: std::collections::HashMap<Stack, StackId>,
}

impl StackIds {
    /// The ids of stacks that the snapshot has already.
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let with_id = |(stack, at): (&Stack, u32)| (Arc::clone(stack), StackId(at));
        Self { by_stack: snapshot.stacks.iter().zip(0..).map(with_id).collect() }
    }

    /// The id of a stack, which is added to the snapshot if it is new.
    pub(crate) fn id(&mut self, snapshot: &mut Snapshot, stack: &Stack) -> StackId {
        if let Some(&id) = self.by_stack.get(stack) {
            return id;
        }
        let id = StackId(u32::try_from(snapshot.stacks.len()).expect("fewer than 2^32 stacks"));
        snapshot.stacks.push(Arc::clone(stack));
        self.by_stack.insert(Arc::clone(stack), id);
        id
    }
}
