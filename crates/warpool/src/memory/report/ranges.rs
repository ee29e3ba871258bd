//! Changes of the memory behind addresses, for those who register memory with hardware or libraries.

use std::borrow::Cow;

use warpool_driver::{DeviceId, DevicePtr};

use super::{Action, HistoryEntry};

/// What happened to a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeEvent {
    /// Memory is behind it from now on, and may be registered.
    Mapped,
    /// The memory is about to return to the driver, or to fall asleep: registrations have to end before the observer
    /// returns. If the call then fails, [`Mapped`](Self::Mapped) follows.
    Unmapping,
    /// The paged allocator has taken pages from it: no block is there, and registrations are of memory that belongs
    /// elsewhere.
    Left,
}

/// A change of the memory behind a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeChange {
    /// What happened.
    pub event: RangeEvent,
    /// The device.
    pub device: DeviceId,
    /// The first address.
    pub ptr: DevicePtr,
    /// The size.
    pub bytes: u64,
    /// The number of the change, counted over the allocator: what was registered before it and overlaps with it is
    /// stale, what was registered since is not.
    pub generation: u64,
}

/// Which changes an allocator shows range observers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ranges {
    /// None.
    #[default]
    Unknown,
    /// Segments, which it announces before they are unmapped.
    Segments,
    /// Those, and pages, whose moves are in its history.
    Pages,
}

impl Ranges {
    /// What an entry of the history means for a range.
    pub(super) fn event(self, action: Action) -> Option<RangeEvent> {
        match action {
            Action::SegmentAlloc | Action::SegmentMap if self != Self::Unknown => Some(RangeEvent::Mapped),
            Action::SegmentUnmap if self == Self::Pages => Some(RangeEvent::Left),
            _ => None,
        }
    }
}

/// The same entries, with one for each run of pages that were mapped, or taken, one after the other.
pub(super) fn merge_runs(entries: &[HistoryEntry]) -> Cow<'_, [HistoryEntry]> {
    if !entries.windows(2).any(|pair| are_neighbours(&pair[0], &pair[1])) {
        return Cow::Borrowed(entries);
    }
    let mut merged: Vec<HistoryEntry> = Vec::with_capacity(entries.len());
    for entry in entries {
        match merged.last_mut() {
            Some(last) if are_neighbours(last, entry) => {
                (last.addr, last.size) = (last.addr.min(entry.addr), last.size + entry.size);
            }
            _ => merged.push(entry.clone()),
        }
    }
    Cow::Owned(merged)
}

/// Whether two entries are of pages beside each other to which the same happened.
fn are_neighbours(one: &HistoryEntry, next: &HistoryEntry) -> bool {
    matches!(one.action, Action::SegmentMap | Action::SegmentUnmap)
        && (one.action, one.stream, one.pool) == (next.action, next.stream, next.pool)
        && (one.addr + one.size == next.addr || next.addr + next.size == one.addr)
}
