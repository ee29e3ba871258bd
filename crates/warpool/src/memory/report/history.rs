//! The allocation history: a ring of the newest entries.
//!
//! Entries hold references to call stacks and texts, so that these are freed with the last entry that leaves the ring;
//! they get ids when a snapshot is taken. A history that is off costs one branch per call.

use std::sync::Arc;

use super::observers::ActionSet;
use super::ring::{Ring, SharedRing, StoredEntry};
use super::{Action, Snapshot, Stack, StackId, TraceEntry};
use crate::memory::MemPoolId;
use crate::{Error, Result};

/// Where call stacks are recorded, if a hook is set: each level includes the ones before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StackLevel {
    /// No call stacks.
    #[default]
    Never,
    /// For allocated blocks.
    State,
    /// Also for segments and in entries. The entries of a free have the stack of the allocation, or of a later call
    /// that completes the free.
    Alloc,
    /// Entries of frees have their own stack.
    All,
}

/// How the history is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryOptions {
    /// How many entries are kept, at least 1. The newest are kept.
    pub entries_max: usize,
    /// Where call stacks are recorded.
    pub stacks: StackLevel,
    /// Actions that are not recorded. Trackers still see them.
    pub skip: Vec<Action>,
    /// An offset that is added to the driver's clock, in microseconds, for example to get Unix times.
    pub epoch_us: i64,
}

impl Default for HistoryOptions {
    /// A million entries, no stacks, nothing skipped.
    fn default() -> Self {
        Self { entries_max: 1_000_000, stacks: StackLevel::Never, skip: Vec::new(), epoch_us: 0 }
    }
}

impl HistoryOptions {
    /// Skips actions by their names in snapshots. [`Error::UnknownAction`] for an unknown name.
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

/// The history of one device.
#[derive(Debug, Default)]
pub(crate) struct History {
    options: Option<RecordedAs>,
    ring: Ring,
}

/// The options that are needed for each entry.
#[derive(Debug)]
struct RecordedAs {
    stacks: StackLevel,
    skip: ActionSet,
    epoch_us: i64,
}

impl History {
    /// Starts recording, or stops and clears it.
    pub(crate) fn set(&mut self, options: Option<HistoryOptions>) {
        let Some(HistoryOptions { entries_max, stacks, skip, epoch_us }) = options else {
            *self = Self::default();
            return;
        };
        self.ring.resize(entries_max);
        self.options = Some(RecordedAs { stacks, skip: ActionSet::of(&skip), epoch_us });
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.options.is_some()
    }

    #[inline]
    pub(crate) fn stack_level(&self) -> StackLevel {
        self.options.as_ref().map_or(StackLevel::Never, |options| options.stacks)
    }

    #[inline]
    pub(crate) fn epoch_us(&self) -> i64 {
        self.options.as_ref().map_or(0, |options| options.epoch_us)
    }

    /// Whether entries of this action are kept.
    #[inline]
    pub(super) fn keeps(&self, action: Action) -> bool {
        self.options.as_ref().is_some_and(|options| !options.skip.has(action))
    }

    /// Writes an entry without a stack and texts, if it is kept.
    #[inline]
    pub(crate) fn write_plain(
        &mut self,
        action: Action,
        addr: u64,
        size: u64,
        stream: u64,
        pool: MemPoolId,
        time_us: i64,
    ) {
        if let Some(options) = &self.options
            && !options.skip.has(action)
        {
            let time_us = time_us.saturating_add(options.epoch_us);
            self.ring.push(StoredEntry { addr, size, stream, time_us, pool, extras: None, action, completes: false });
        }
    }

    /// As [`write_plain`](Self::write_plain), for both entries of a free that is completed at once.
    #[inline]
    pub(crate) fn write_plain_free(&mut self, addr: u64, size: u64, stream: u64, pool: MemPoolId, time_us: i64) {
        let action = Action::FreeRequested;
        if let Some(options) = &self.options
            && !options.skip.has(action)
            && !options.skip.has(Action::FreeCompleted)
        {
            let time_us = time_us.saturating_add(options.epoch_us);
            self.ring.push(StoredEntry { addr, size, stream, time_us, pool, extras: None, action, completes: true });
        } else {
            self.write_plain(action, addr, size, stream, pool, time_us);
            self.write_plain(Action::FreeCompleted, addr, size, stream, pool, time_us);
        }
    }

    #[inline]
    pub(super) fn write(&mut self, entry: StoredEntry) {
        self.ring.push(entry);
    }

    /// All entries as they are now, to be added to a snapshot without the lock.
    pub(crate) fn share(&self) -> SharedHistory {
        SharedHistory(self.ring.share())
    }
}

/// The entries of a history at one moment. Making it takes little time under a lock; what takes long is
/// [`entries`](Self::entries), which needs none.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct SharedHistory(SharedRing);

impl SharedHistory {
    /// All entries, oldest first; the stacks and texts that they refer to are added to `snapshot`.
    pub(crate) fn entries(&self, snapshot: &mut Snapshot, stacks: &mut StackIds) -> Vec<TraceEntry> {
        let entries = self.0.iter().map(|entry| TraceEntry {
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
        });
        entries.collect()
    }

    /// Adds the entries to a snapshot, as those of the next device.
    pub(crate) fn add_to(&self, snapshot: &mut Snapshot, stacks: &mut StackIds) {
        let entries = self.entries(snapshot, stacks);
        snapshot.traces.push(entries);
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
        let with_id = |(at, stack): (usize, &Stack)| Some((Arc::clone(stack), StackId::new(at)?));
        Self { by_stack: snapshot.stacks.iter().enumerate().filter_map(with_id).collect() }
    }

    /// The id of a stack, which is added to the snapshot if it is new.
    pub(crate) fn id(&mut self, snapshot: &mut Snapshot, stack: &Stack) -> StackId {
        if let Some(&id) = self.by_stack.get(stack) {
            return id;
        }
        let id = StackId::new(snapshot.stacks.len()).expect("fewer than 2^32 stacks");
        snapshot.stacks.push(Arc::clone(stack));
        self.by_stack.insert(Arc::clone(stack), id);
        id
    }
}
