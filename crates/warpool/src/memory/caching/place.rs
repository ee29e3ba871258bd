//! Where a request goes, and what giving a block out and taking it back means for the books.
//! Every method is one step under the device's lock. How blocks are cut and joined is in `cut.rs`.

use slotmap::Key;
use warpool_driver::{DevicePtr, StreamId};

use super::block::{BlockKey, Standing};
use super::free_set::Place;
use super::state::{BinKey, LaneKey, State, Want};
use crate::memory::journal::Cause;
use crate::memory::{Action, Allocation, MemPoolId, SegmentKind, SizeRules};
use crate::{Error, Result};

impl State {
    /// Makes a request out. Fails if there is no such pool, or if nobody uses it any more.
    pub(super) fn want(&self, pool: MemPoolId, stream: StreamId, requested: u64) -> Result<Want> {
        let bins = self.bins_for_use(pool)?;
        Ok(self.want_of(bins, pool, stream, requested))
    }

    /// The bins of a pool that is in use.
    #[inline]
    pub(super) fn bins_for_use(&self, pool: MemPoolId) -> Result<[BinKey; 2]> {
        if pool.is_default() {
            return Ok(self.default_bins);
        }
        let entry = self.pool(pool)?;
        if entry.uses == 0 { Err(Error::PoolReleased { pool }) } else { Ok(entry.bins) }
    }

    #[inline]
    pub(super) fn want_of(&self, bins: [BinKey; 2], pool: MemPoolId, stream: StreamId, requested: u64) -> Want {
        let size = self.policy.sizes.round(requested);
        let kind = SizeRules::kind(size);
        let bin = bins[kind as usize];
        Want {
            bin,
            pool,
            stream,
            kind,
            requested,
            size,
            segment: self.policy.sizes.segment(size),
            expandable: self.policy.expandable && !self.bins[bin].has_upstream,
        }
    }

    /// Meets a request with a free block: the smallest that fits, by the rules; what is too much of it stays free.
    pub(super) fn take_cached(&mut self, want: &Want, cause: &Cause) -> Option<Allocation> {
        let counts_ages = self.policy.collects_garbage();
        let bin = &mut self.bins[want.bin];
        if counts_ages {
            bin.searches += 1;
        }
        let searches = bin.searches;
        let lane = bin.lane(want.stream)?;
        let (place, found) = self.best_fit(lane, want)?;
        if !self.should_split(found, want) {
            self.lanes[lane].free.remove_at(place);
            self.blocks[found].standing = Standing::Moving;
            return Some(self.hand_out(found, want, cause));
        }
        // It stays in the set, as what is left of it.
        let was_split = self.blocks[found].is_split();
        let given = self.cut_front(found, want.size);
        let (_, key) = self.free_place(found);
        self.blocks[found].born = searches;
        self.lanes[lane].free.lower_at(place, key);
        self.count_split(found, was_split, want);
        Some(self.mark_taken(given, want.requested, want.stream, cause))
    }

    fn best_fit(&self, lane: LaneKey, want: &Want) -> Option<(Place, BlockKey)> {
        let mut candidates = self.lanes[lane].free.at_least(want.size);
        let mut found = candidates.next()?;
        if self.blocks[found.1].growing {
            if want.expandable {
                // The end of a segment counts as large as it can grow: what does not border on unmapped addresses is
                // used first.
                for next in candidates {
                    if !self.blocks[found.1].growing || self.size_grown(next.1) >= self.size_grown(found.1) {
                        break;
                    }
                    found = next;
                }
            } else {
                found = candidates.find(|next| !self.blocks[next.1].growing)?;
            }
        }
        self.policy.sizes.may_serve(want.size, self.blocks[found.1].size).then_some(found)
    }

    /// Its size, with the unmapped addresses behind it.
    fn size_grown(&self, block: BlockKey) -> u64 {
        let block = &self.blocks[block];
        let behind = block.next.map(|next| &self.blocks[next]).filter(|next| next.standing == Standing::Unmapped);
        block.size + behind.map_or(0, |next| next.size)
    }

    /// Gives a block, which is in no set, to a caller; what is too much of it becomes a free block of its own.
    pub(super) fn hand_out(&mut self, found: BlockKey, want: &Want, cause: &Cause) -> Allocation {
        let was_split = self.blocks[found].is_split();
        let given = if self.should_split(found, want) {
            let given = self.cut_front(found, want.size);
            self.put_free(found);
            self.count_split(found, was_split, want);
            given
        } else {
            if was_split && !self.blocks[found].growing {
                self.stats.inactive_split_bytes.decrease(want.kind, self.blocks[found].size);
                self.stats.inactive_split.decrease(want.kind, 1);
            }
            found
        };
        self.mark_taken(given, want.requested, want.stream, cause)
    }

    /// The books of a free block of which a part was given out.
    fn count_split(&mut self, rest: BlockKey, was_split: bool, want: &Want) {
        if self.blocks[rest].growing {
            return;
        }
        if was_split {
            self.stats.inactive_split_bytes.decrease(want.kind, want.size);
        } else {
            self.stats.inactive_split_bytes.increase(want.kind, self.blocks[rest].size);
            self.stats.inactive_split.increase(want.kind, 1);
        }
    }

    /// The books of a block that a caller gets.
    pub(super) fn mark_taken(
        &mut self,
        given: BlockKey,
        requested: u64,
        stream: StreamId,
        cause: &Cause,
    ) -> Allocation {
        let keeps_stack = cause.stack.is_some();
        let block = &mut self.blocks[given];
        block.standing = Standing::Taken;
        block.requested = requested;
        if keeps_stack {
            block.extra().stack.clone_from(&cause.stack);
        }
        let (ptr, size, segment, kind) = (block.ptr, block.size, block.segment, block.kind);
        self.live.insert(ptr, given);
        self.record(Action::Alloc, ptr, requested, segment, cause);
        let stats = &mut self.stats;
        stats.allocation.increase(kind, 1);
        stats.allocated_bytes.increase(kind, size);
        stats.active.increase(kind, 1);
        stats.active_bytes.increase(kind, size);
        stats.requested_bytes.increase(kind, requested);
        if self.policy.sizes.is_oversize(size) {
            stats.oversize_allocations.increase(1);
        }
        Allocation {
            ptr: DevicePtr(ptr),
            bytes: size,
            bytes_requested: requested,
            device: self.device,
            stream,
            slot: given.data().as_ffi(),
        }
    }

    /// The caller's half of a free: it no longer has the block, which is no longer among the live ones. The block
    /// waits; whether for anything is the next question.
    pub(super) fn begin_free(&mut self, freed: BlockKey, cause: &Cause) {
        let block = &mut self.blocks[freed];
        assert!(block.standing == Standing::Taken, "a block that nobody has cannot be given back");
        block.standing = Standing::Waiting;
        if let Some(extra) = &mut block.extra {
            extra.uses.mark_freed();
        }
        let (ptr, size, requested, segment) = (block.ptr, block.size, block.requested, block.segment);
        let kind = block.kind;
        self.stats.allocation.decrease(kind, 1);
        self.stats.allocated_bytes.decrease(kind, size);
        if self.policy.sizes.is_oversize(size) {
            self.stats.oversize_allocations.decrease(1);
        }
        self.record(Action::FreeRequested, ptr, requested, segment, cause);
    }

    /// The other half: nothing uses it any more, and it joins the free ones.
    pub(super) fn complete_free(&mut self, freed: BlockKey, cause: &Cause) {
        let block = &mut self.blocks[freed];
        let unused = block.extra.take().is_none_or(|extra| extra.uses.is_clear());
        assert!(block.standing == Standing::Waiting && unused, "a block in use cannot become free");
        let (ptr, size, requested, segment) = (block.ptr, block.size, block.requested, block.segment);
        let (growing, kind) = (block.growing, block.kind);
        self.record(Action::FreeCompleted, ptr, requested, segment, cause);
        let (merged, merged_bytes) = self.join_free(freed);
        self.stats.active.decrease(kind, 1);
        self.stats.active_bytes.decrease(kind, size);
        self.stats.requested_bytes.decrease(kind, requested);
        if !growing {
            let block = &self.blocks[freed];
            let (is_split, size) = (block.is_split(), block.size);
            self.change_inactive_split(kind, merged, merged_bytes, is_split.then_some(size));
        }
    }

    /// Of inactive blocks, some were joined into one, which counts itself if it is a part of its segment. One step in
    /// the counters, as the peaks show.
    fn change_inactive_split(&mut self, kind: SegmentKind, merged: u64, merged_bytes: u64, now: Option<u64>) {
        let stats = &mut self.stats;
        let (blocks_now, bytes_now) = now.map_or((0, 0), |bytes| (1, bytes));
        if blocks_now >= merged {
            stats.inactive_split.increase(kind, blocks_now - merged);
        } else {
            stats.inactive_split.decrease(kind, merged - blocks_now);
        }
        if bytes_now >= merged_bytes {
            stats.inactive_split_bytes.increase(kind, bytes_now - merged_bytes);
        } else {
            stats.inactive_split_bytes.decrease(kind, merged_bytes - bytes_now);
        }
    }

    fn should_split(&self, found: BlockKey, want: &Want) -> bool {
        if self.bins[want.bin].no_split {
            return false;
        }
        let rest = self.blocks[found].size - want.size;
        self.policy.sizes.splits(want.size, rest, want.expandable)
    }
}
