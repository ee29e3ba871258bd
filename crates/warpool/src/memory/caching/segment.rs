//! Memory from the driver and back to it, in whole segments. Whoever is here holds the device's `slow` lock, so
//! segments come and go one at a time; the state is locked only between the driver's calls.

use std::sync::Arc;

use warpool_driver::{DevicePtr, ErrorCode, StreamId};

use super::block::{BlockKey, Standing};
use super::state::{BinKey, Source, State, Want};
use super::{CachingAllocator, Cell};
use crate::memory::journal::Cause;
use crate::memory::{Action, MemPoolId, OomCause, SegmentKind};
use crate::{Error, Result};

/// What came of asking for memory.
pub(super) enum Fetched {
    /// A block, in no set, at least as large as wanted.
    Block(BlockKey),
    /// There is none.
    Nothing(OomCause),
}

impl State {
    /// The books of bytes that came from the driver.
    pub(super) fn count_fetched(&mut self, bin: BinKey, bytes: u64) {
        let (pool, kind) = (self.bins[bin].pool, self.bins[bin].kind);
        self.reserved += bytes;
        self.stats.reserved_bytes.increase(kind, bytes);
        self.stats.num_device_alloc += 1;
        if !pool.is_default() {
            self.stats.reserved_bytes_by_private_pools.entry(pool).or_default().increase(kind, bytes);
        }
    }

    /// The books of bytes that went back to the driver.
    pub(super) fn count_returned(&mut self, bin: BinKey, bytes: u64) {
        let (pool, kind) = (self.bins[bin].pool, self.bins[bin].kind);
        self.reserved -= bytes;
        self.stats.reserved_bytes.decrease(kind, bytes);
        self.stats.num_device_free += 1;
        if !pool.is_default() {
            self.stats.reserved_bytes_by_private_pools.entry(pool).or_default().decrease(kind, bytes);
        }
    }

    /// Takes a whole free segment out of its set, if it still is one.
    fn take_whole(&mut self, block: BlockKey) -> bool {
        let whole = self
            .blocks
            .get(block)
            .is_some_and(|entry| entry.standing == Standing::Free && !entry.growing && !entry.is_split());
        if whole {
            self.take_free(block);
        }
        whole
    }

    /// The free blocks of a bin, in the order in which they are given back: by stream, then as they stand in their
    /// lanes.
    pub(super) fn free_of(&self, bin: BinKey) -> Vec<BlockKey> {
        self.bins[bin].lanes.iter().flat_map(|&(_, lane)| self.lanes[lane].free.all()).collect()
    }
}

impl CachingAllocator {
    /// A new segment, unless a limit forbids it.
    pub(super) fn fetch(&self, cell: &Cell, want: &Want, cause: &Cause) -> Result<Fetched> {
        let over = self.with(cell, |state| {
            state.policy.limit.is_some_and(|limit| state.reserved.saturating_add(want.segment) > limit)
        });
        if over {
            return Ok(Fetched::Nothing(OomCause::Limit));
        }
        if want.expandable { self.fetch_growing(cell, want, cause) } else { self.fetch_whole(cell, want, cause) }
    }

    /// The driver's handle of a stream, which must be of the device.
    pub(super) fn stream_raw(&self, cell: &Cell, stream: StreamId) -> Result<u64> {
        // Known already, unless this is its first segment.
        let known = self
            .with(cell, |state| state.lanes.values().find(|lane| lane.stream == stream).map(|lane| lane.stream_raw));
        if let Some(raw) = known {
            return Ok(raw);
        }
        let handle = self.driver().stream_handle(stream)?;
        if handle.device != cell.device {
            return Err(Error::StreamDevice { device: cell.device, stream, owner: handle.device });
        }
        Ok(handle.raw.0)
    }

    /// A segment in one piece, from the driver or from the pool's own source.
    fn fetch_whole(&self, cell: &Cell, want: &Want, cause: &Cause) -> Result<Fetched> {
        let upstream = self.try_with(cell, |state| Ok(state.pool(want.pool)?.upstream.clone()))?;
        let stream_raw = self.stream_raw(cell, want.stream)?;
        let (ptr, source) = match upstream {
            Some(upstream) => {
                let _relaxed = self.relaxed_for_others()?;
                match upstream.allocate(cell.device, want.segment, want.stream)? {
                    Some(ptr) => (ptr, Source::Upstream(Arc::clone(&upstream))),
                    None => return Ok(Fetched::Nothing(OomCause::Upstream)),
                }
            }
            None => {
                let _relaxed = self.relaxed(cell)?;
                match self.driver().mem_alloc(cell.device, want.segment) {
                    Ok(ptr) => (ptr, Source::Plain),
                    Err(error) if error.code == ErrorCode::OutOfMemory => {
                        return Ok(Fetched::Nothing(OomCause::Device));
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        };
        Ok(Fetched::Block(self.with(cell, |state| {
            let lane = state.lane_for(want.bin, want.stream, stream_raw);
            let block = state.add_segment(lane, ptr.0, want.segment, source, cause);
            state.count_fetched(want.bin, want.segment);
            state.stats.segment.increase(want.kind, 1);
            if state.policy.sizes.is_oversize(want.segment) {
                state.stats.oversize_segments.increase(1);
            }
            let segment = state.blocks[block].segment;
            state.record(Action::SegmentAlloc, ptr.0, want.segment, segment, cause);
            block
        })))
    }

    /// Gives a whole free segment back, if it still is one. Returns its bytes. On failure it stays as it was.
    pub(super) fn return_whole(&self, cell: &Cell, block: BlockKey, cause: &Cause) -> Result<u64> {
        let taken = self.with(cell, |state| {
            state.take_whole(block).then(|| {
                let entry = &state.blocks[block];
                let upstream = match &state.segments[entry.segment].source {
                    Source::Upstream(upstream) => Some(Arc::clone(upstream)),
                    Source::Plain | Source::Growing(_) => None,
                };
                (DevicePtr(entry.ptr), entry.size, state.place_of(entry.segment).1, upstream)
            })
        });
        let Some((ptr, bytes, stream, upstream)) = taken else { return Ok(0) };
        let outcome = match upstream {
            Some(upstream) => {
                self.relaxed_for_others().and_then(|_relaxed| upstream.free(ptr, bytes, cell.device, stream))
            }
            None => self.relaxed(cell).and_then(|_relaxed| Ok(self.driver().mem_free(ptr)?)),
        };
        // Where it came from is dropped without the lock: the program's destructor may be behind it.
        let source = self.with(cell, |state| {
            if outcome.is_err() {
                state.put_free(block);
                return None;
            }
            let segment = state.blocks[block].segment;
            state.record(Action::SegmentFree, ptr.0, bytes, segment, cause);
            let bin = state.lanes[state.segments[segment].lane].bin;
            let kind = state.bins[bin].kind;
            let source = state.remove_segment(block);
            state.count_returned(bin, bytes);
            state.stats.segment.decrease(kind, 1);
            if state.policy.sizes.is_oversize(bytes) {
                state.stats.oversize_segments.decrease(1);
            }
            Some(source)
        });
        drop(source);
        outcome.map(|()| bytes)
    }

    /// Gives back all that is free in a bin: whole segments, and the chunks of growing ones. Goes on after a failure
    /// and reports the first.
    pub(super) fn return_bin(&self, cell: &Cell, bin: BinKey, cause: &Cause) -> Result<u64> {
        let (whole, growing): (Vec<_>, Vec<_>) =
            self.with(cell, |state| state.free_of(bin).into_iter().partition(|&block| !state.blocks[block].growing));
        let mut bytes = 0;
        let mut outcome = Ok(());
        for block in whole {
            match self.return_whole(cell, block, cause) {
                Ok(returned) => bytes += returned,
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        for block in growing {
            match self.return_chunks(cell, block, cause) {
                Ok(returned) => bytes += returned,
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        for block in self.with(cell, |state| state.unmapped_segments(bin)) {
            outcome = outcome.and(self.drop_if_unmapped(cell, block));
        }
        outcome.map(|()| bytes)
    }

    /// Gives back all that is free in the default pool, unless `spare_default`, and in pools that nobody uses any more.
    pub(super) fn return_all(&self, cell: &Cell, spare_default: bool, cause: &Cause) -> Result<u64> {
        let mut bytes = 0;
        let mut outcome = Ok(());
        let mut count = |result: Result<u64>| match result {
            Ok(returned) => bytes += returned,
            Err(error) => outcome = std::mem::replace(&mut outcome, Ok(())).and(Err(error)),
        };
        if !spare_default {
            let [small, large] = self.with(cell, |state| state.default_bins);
            count(self.return_bin(cell, large, cause));
            count(self.return_bin(cell, small, cause));
        }
        for pool in self.with(cell, |state| state.freeable_pools()) {
            count(self.return_pool(cell, pool, cause));
        }
        outcome.map(|()| bytes)
    }

    /// Gives back all that is free in a private pool, and forgets it if nothing is left and nobody uses it.
    pub(super) fn return_pool(&self, cell: &Cell, pool: MemPoolId, cause: &Cause) -> Result<u64> {
        let Ok([small, large]) = self.with(cell, |state| state.visit(pool)) else { return Ok(0) };
        let returned = self.wait_for_users(cell, pool).and_then(|free| {
            if !free {
                return Ok(0);
            }
            let small = self.return_bin(cell, small, cause);
            let large = self.return_bin(cell, large, cause);
            Ok(small? + large?)
        });
        drop(self.with(cell, |state| state.leave(pool)));
        returned
    }

    /// With a split limit, gives back cached oversize segments of the stream: one that is large enough, or else the
    /// largest ones until they sum up. Says whether that may have made room. Only in the default pool: a private one's
    /// memory may be a graph's for as long as it is used.
    pub(super) fn return_oversize(&self, cell: &Cell, want: &Want, cause: &Cause) -> Result<bool> {
        let (needed, candidates) = self.with(cell, |state| {
            let limit = state.policy.sizes.max_split_bytes();
            if limit == u64::MAX || !want.pool.is_default() {
                return (0, Vec::new());
            }
            let needed = want.size.max(limit);
            let Some(lane) = state.bins[want.bin].lane(want.stream) else { return (needed, Vec::new()) };
            let free = &state.lanes[lane].free;
            let is_whole = |block: &BlockKey| !state.blocks[*block].growing;
            if let Some(one) = free.at_least(needed).map(|(_, block)| block).find(is_whole) {
                return (needed, vec![(one, state.blocks[one].size)]);
            }
            let oversize = free.all().rev().map(|block| (block, state.blocks[block].size));
            (needed, oversize.take_while(|&(_, size)| size >= limit).filter(|(block, _)| is_whole(block)).collect())
        });
        let mut returned = 0;
        for (block, _) in candidates {
            if returned >= needed {
                break;
            }
            returned += self.return_whole(cell, block, cause)?;
        }
        Ok(needed > 0 && returned >= needed)
    }

    /// Above the threshold, gives back whole large segments of the default pool that have not been used for long: of
    /// those at least as old as the average, until enough is gone. Waits for nothing but what the driver's free waits
    /// for.
    pub(super) fn collect_garbage(&self, cell: &Cell, cause: &Cause) -> Result<()> {
        let excess = self.with(cell, |state| {
            let Some(limit) = state.policy.limit.filter(|_| state.policy.collects_garbage()) else { return 0 };
            state.reserved.saturating_sub(state.policy.garbage_from(limit))
        });
        let mut returned = 0;
        while returned < excess {
            let old = self.with(cell, |state| state.old_segments());
            let before = returned;
            for block in old {
                returned += self.return_whole(cell, block, cause)?;
            }
            if returned == before {
                break;
            }
        }
        Ok(())
    }
}

impl State {
    /// The whole free large segments of the default pool that are at least as old as their average, in their order.
    fn old_segments(&self) -> Vec<BlockKey> {
        let bin = self.default_bins[SegmentKind::Large as usize];
        let searches = self.bins[bin].searches;
        let whole: Vec<(BlockKey, u64)> = self
            .free_of(bin)
            .into_iter()
            .filter(|&block| !self.blocks[block].growing && !self.blocks[block].is_split())
            .map(|block| (block, searches - self.blocks[block].born))
            .collect();
        let ages: u64 = whole.iter().map(|&(_, age)| age).sum();
        let count = whole.len() as u64;
        whole.into_iter().filter(|&(_, age)| age * count >= ages).map(|(block, _)| block).collect()
    }
}
