//! What happened, written into a ring: the newest entries, as many as were asked for.
//!
//! The ring holds references to call stacks and texts, so what falls out of it is freed; numbers for them are given
//! when a snapshot is made. Off, it costs one branch per call.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use super::{Action, Frame, MemPoolId, Snapshot, StackId, TraceEntry};
use crate::{Error, Result};

/// A call stack, innermost frame first.
pub type Stack = Arc<[Frame]>;

/// Where call stacks are gathered, if a hook is set: each level includes the ones before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StackLevel {
    /// Nowhere.
    #[default]
    Never,
    /// On blocks that somebody has.
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
    /// Where call stacks are gathered.
    pub stacks: StackLevel,
    /// Actions that are not written down. Trackers still see them.
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
    /// Skips actions by the names that snapshots use. [`Error::UnknownAction`] for any other.
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

/// One thing that happened, as trackers see it. [`TraceEntry`] is its form in snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    /// What.
    pub action: Action,
    /// Where; of an [`Action::Oom`], the bytes that the device had free.
    pub addr: u64,
    /// How many bytes.
    pub size: u64,
    /// For which stream, by the driver's handle.
    pub stream: u64,
    /// When, in microseconds of the driver's clock.
    pub time_us: i64,
    /// In which pool.
    pub pool: MemPoolId,
    /// Who asked for it.
    pub stack: Option<Stack>,
    /// What the program wanted written beside it.
    pub user_metadata: Option<Arc<str>>,
    /// The compiled region that it happened in.
    pub compile_context: Option<Arc<str>>,
}

thread_local! {
    static USER_METADATA: RefCell<Option<Arc<str>>> = const { RefCell::new(None) };
    static COMPILE_CONTEXTS: RefCell<Vec<Arc<str>>> = const { RefCell::new(Vec::new()) };
}

/// Sets what is written beside everything that the calling thread causes from now on; an empty text is nothing.
pub fn set_user_metadata(text: &str) {
    let text = if text.is_empty() { None } else { Some(text.into()) };
    // Where the thread's notes are gone already, at its very end, nothing is written beside anything.
    let _ = USER_METADATA.try_with(|slot| *slot.borrow_mut() = text);
}

/// What is written beside everything that the calling thread causes.
#[must_use]
pub fn user_metadata() -> Option<Arc<str>> {
    USER_METADATA.try_with(|slot| slot.borrow().clone()).ok().flatten()
}

/// Writes `text` beside what `act` causes, instead of what the program wanted there.
pub(crate) fn with_metadata<R>(text: &str, act: impl FnOnce() -> R) -> R {
    let before = user_metadata();
    set_user_metadata(text);
    let result = act();
    let _ = USER_METADATA.try_with(|slot| *slot.borrow_mut() = before);
    result
}

/// Enters a compiled region: its name is written beside everything that the calling thread causes.
pub fn push_compile_context(name: &str) {
    let _ = COMPILE_CONTEXTS.try_with(|stack| stack.borrow_mut().push(name.into()));
}

/// Leaves the compiled region entered last.
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
    /// Starts, or stops and forgets.
    pub(crate) fn set(&mut self, options: Option<HistoryOptions>) {
        match options {
            Some(mut options) => {
                options.entries_max = options.entries_max.max(1);
                self.options = Some(options);
            }
            None => *self = Self::default(),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.options.is_some()
    }

    pub(crate) fn stack_level(&self) -> StackLevel {
        self.options.as_ref().map_or(StackLevel::Never, |options| options.stacks)
    }

    pub(crate) fn epoch_us(&self) -> i64 {
        self.options.as_ref().map_or(0, |options| options.epoch_us)
    }

    pub(crate) fn write(&mut self, event: HistoryEntry) {
        let Some(options) = &self.options else { return };
        if options.skip.contains(&event.action) {
            return;
        }
        while self.ring.len() >= options.entries_max {
            self.ring.pop_front();
        }
        self.ring.push_back(event);
    }

    /// A copy of all entries, oldest first; what they refer to goes into `snapshot`.
    pub(crate) fn copy_to(&self, snapshot: &mut Snapshot, stacks: &mut StackNumbers) -> Vec<TraceEntry> {
        self.ring
            .iter()
            .map(|event| TraceEntry {
                action: event.action,
                addr: event.addr,
                size: event.size,
                stream: event.stream,
                time_us: event.time_us,
                pool: Some(event.pool),
                compile_context: event.compile_context.as_deref().map(|text| snapshot.texts.intern(text)),
                user_metadata: event.user_metadata.as_deref().map(|text| snapshot.texts.intern(text)),
                stack: event.stack.as_ref().map(|stack| stacks.number(snapshot, stack)),
                forward_stack: None,
            })
            .collect()
    }
}

/// Gives call stacks their numbers in a snapshot, the same number to the same stack.
#[derive(Debug, Default)]
pub(crate) struct StackNumbers {
    by_stack: std::collections::HashMap<Stack, StackId>,
}

impl StackNumbers {
    /// With those that the snapshot has already.
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let numbered = |(stack, at): (&Stack, u32)| (Arc::clone(stack), StackId(at));
        Self { by_stack: snapshot.stacks.iter().zip(0..).map(numbered).collect() }
    }

    pub(crate) fn number(&mut self, snapshot: &mut Snapshot, stack: &Stack) -> StackId {
        if let Some(&id) = self.by_stack.get(stack) {
            return id;
        }
        let id = StackId(u32::try_from(snapshot.stacks.len()).expect("fewer than 2^32 stacks"));
        snapshot.stacks.push(Arc::clone(stack));
        self.by_stack.insert(Arc::clone(stack), id);
        id
    }
}
