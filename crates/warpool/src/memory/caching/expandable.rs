//! Expandable segments: one growing range of addresses per stream and kind, with memory mapped behind it chunk by
//! chunk.
//!
//! A block of such a segment is either mapped or not. Growing prefers the lowest hole; shrinking unmaps the whole
//! chunks of free blocks. Blocks that the driver is at work on are `Moving`: neighbours that become free meanwhile stay
//! apart, and are joined at the end. Whoever is here holds the device's `slow` lock.

use warpool_driver::{Access, DeviceAccess, DevicePtr, ErrorCode, PhysicalId, PhysicalOptions, StreamId};

use super::block::{Block, BlockKey, Standing};
use super::segment::Fetched;
use super::state::{BinKey, LaneKey, Source, State, Want};
use super::{CachingAllocator, Cell};
use crate::Result;
use crate::memory::journal::Cause;
use crate::memory::settings::Reserve;
use crate::memory::stream_fence;
use crate::memory::{Action, OomCause};

/// The driver's side of an expandable segment.
pub(super) struct Growing {
    base: u64,
    chunk: u64,
    /// What is mapped, by chunk, up to the last one that ever was: a segment reserves far more than it uses.
    handles: Vec<Option<PhysicalId>>,
}

impl Growing {
    fn new(base: u64, chunk: u64) -> Self {
        Self { base, chunk, handles: Vec::new() }
    }

    fn chunk_at(&self, ptr: u64) -> usize {
        usize::try_from((ptr - self.base) / self.chunk).expect("addresses fit")
    }

    /// Mapped ranges without holes, for access changes.
    pub(super) fn mapped_ranges(&self) -> Vec<(DevicePtr, u64)> {
        let mut ranges: Vec<(DevicePtr, u64)> = Vec::new();
        for (at, handle) in self.handles.iter().enumerate() {
            let ptr = self.base + at as u64 * self.chunk;
            match (handle, ranges.last_mut()) {
                (None, _) => {}
                (Some(_), Some((start, bytes))) if start.0 + *bytes == ptr => *bytes += self.chunk,
                (Some(_), _) => ranges.push((DevicePtr(ptr), self.chunk)),
            }
        }
        ranges
    }

    pub(super) fn bytes_mapped(&self) -> u64 {
        self.handles.iter().flatten().count() as u64 * self.chunk
    }
}

impl State {
    pub(super) fn growing_mut(&mut self, block: BlockKey) -> &mut Growing {
        match &mut self.segments[self.blocks[block].segment].source {
            Source::Growing(growing) => growing,
            Source::Plain | Source::Upstream(_) => unreachable!("only expandable segments have unmapped parts"),
        }
    }

    /// The lowest place of a lane with room for `size`, part of it mapped and free, part of it unmapped.
    fn find_room(&self, lane: LaneKey, size: u64) -> Option<BlockKey> {
        let usable = |block: BlockKey| matches!(self.blocks[block].standing, Standing::Free | Standing::Unmapped);
        self.lanes[lane].unmapped.values().find_map(|&unmapped| {
            let start = self.blocks[unmapped].prev.filter(|&prev| usable(prev)).unwrap_or(unmapped);
            let (mut room, mut next) = (0, Some(start));
            while let Some(block) = next.filter(|&block| room < size && usable(block)) {
                room += self.blocks[block].size;
                next = self.blocks[block].next;
            }
            (room >= size).then_some(start)
        })
    }

    /// Takes the first two parts of the lowest place with room for a request out of their sets: what is mapped of it,
    /// if it starts so, and the unmapped part behind, which stays in its set: only holders of the `slow` lock touch
    /// those.
    fn take_room(&mut self, want: &Want) -> Option<(Option<BlockKey>, Option<BlockKey>)> {
        let lane = self.bins[want.bin].lane(want.stream)?;
        let start = self.find_room(lane, want.size)?;
        if self.blocks[start].standing == Standing::Free {
            self.take_free(start);
            Some((Some(start), self.blocks[start].next))
        } else {
            Some((None, Some(start)))
        }
    }

    /// Segments of a bin of which nothing is mapped.
    pub(super) fn unmapped_segments(&self, bin: BinKey) -> Vec<BlockKey> {
        let lanes = self.bins[bin].lanes.iter().map(|&(_, lane)| &self.lanes[lane]);
        lanes.flat_map(|lane| lane.unmapped.values().copied()).filter(|&block| !self.blocks[block].is_split()).collect()
    }

    /// Whether that block is there and unmapped. What another thread has may go at any moment, joined into its
    /// neighbour.
    fn is_unmapped(&self, block: BlockKey) -> bool {
        self.blocks.get(block).is_some_and(|entry| entry.standing == Standing::Unmapped)
    }

    fn take_unmapped(&mut self, block: BlockKey) {
        let (lane, ptr) = (self.segments[self.blocks[block].segment].lane, self.blocks[block].ptr);
        let removed = self.lanes[lane].unmapped.remove(&ptr);
        assert!(removed == Some(block), "no unmapped block at {ptr:#x}");
        self.blocks[block].standing = Standing::Moving;
    }

    /// Makes a block in no set an unmapped one, joined with unmapped neighbours.
    fn put_unmapped(&mut self, block: BlockKey) {
        for neighbour in [self.blocks[block].prev, self.blocks[block].next].into_iter().flatten() {
            if self.blocks[neighbour].standing == Standing::Unmapped {
                self.take_unmapped(neighbour);
                self.absorb(block, neighbour);
            }
        }
        let (lane, ptr) = (self.segments[self.blocks[block].segment].lane, self.blocks[block].ptr);
        self.blocks[block].standing = Standing::Unmapped;
        self.lanes[lane].unmapped.insert(ptr, block);
    }

    /// Makes a mapped block in no set a free one, joined with free neighbours.
    fn put_mapped(&mut self, block: BlockKey) {
        self.merge_free_neighbours(block);
        self.put_free(block);
    }

    /// Chunks were mapped at the start of `unmapped`, a block in no set. It keeps what is mapped and joins what is free
    /// beside it, and `with`, the block that is to grow; the rest is unmapped again.
    fn grow(&mut self, unmapped: BlockKey, with: Option<BlockKey>, handles: &[PhysicalId], cause: &Cause) -> BlockKey {
        let (ptr, segment) = (self.blocks[unmapped].ptr, self.blocks[unmapped].segment);
        let growing = self.growing_mut(unmapped);
        let first = growing.chunk_at(ptr);
        let bytes = growing.chunk * handles.len() as u64;
        if growing.handles.len() < first + handles.len() {
            growing.handles.resize(first + handles.len(), None);
        }
        for (slot, &handle) in growing.handles[first..].iter_mut().zip(handles) {
            *slot = Some(handle);
        }
        let mapped = if bytes < self.blocks[unmapped].size {
            let mapped = self.cut_front(unmapped, bytes);
            self.put_unmapped(unmapped);
            mapped
        } else {
            unmapped
        };
        if let Some(with) = with {
            self.absorb(mapped, with);
        }
        self.merge_free_neighbours(mapped);
        let bin = self.lanes[self.segments[segment].lane].bin;
        self.count_fetched(bin, bytes);
        self.record(Action::SegmentMap, ptr, bytes, segment, cause);
        mapped
    }

    /// The whole chunks inside a free block: where, how much, and their handles.
    fn whole_chunks(&mut self, block: BlockKey) -> Option<(u64, u64, Vec<PhysicalId>)> {
        let (start, end) = (self.blocks[block].ptr, self.blocks[block].end());
        let growing = self.growing_mut(block);
        let offset = |ptr: u64| ptr - growing.base;
        let first = offset(start).next_multiple_of(growing.chunk);
        let last = offset(end) / growing.chunk * growing.chunk;
        if first >= last {
            return None;
        }
        let (ptr, bytes) = (growing.base + first, last - first);
        let chunks = growing.chunk_at(ptr)..growing.chunk_at(ptr + bytes);
        let handles = growing.handles[chunks].iter().map(|handle| handle.expect("a free block is mapped")).collect();
        Some((ptr, bytes, handles))
    }

    /// Chunks of `block`, which is in no set, were unmapped; what lies before and behind them in it is free.
    fn shrink(&mut self, block: BlockKey, ptr: u64, bytes: u64, cause: &Cause) {
        let segment = self.blocks[block].segment;
        let growing = self.growing_mut(block);
        let chunks = growing.chunk_at(ptr)..growing.chunk_at(ptr + bytes);
        growing.handles[chunks].fill(None);
        let before = ptr - self.blocks[block].ptr;
        if before > 0 {
            let front = self.cut_front(block, before);
            self.put_mapped(front);
        }
        let mut unmapped = block;
        if self.blocks[block].size > bytes {
            unmapped = self.cut_front(block, bytes);
            self.put_mapped(block);
        }
        self.put_unmapped(unmapped);
        let bin = self.lanes[self.segments[segment].lane].bin;
        self.count_returned(bin, bytes);
        self.record(Action::SegmentUnmap, ptr, bytes, segment, cause);
    }
}

/// What came of mapping memory.
enum Mapped {
    All(Vec<PhysicalId>),
    Nothing,
}

impl CachingAllocator {
    /// Room for a request in an expandable segment: the lowest hole with room, or a new segment.
    pub(super) fn fetch_growing(&self, cell: &Cell, want: &Want, cause: &Cause) -> Result<Fetched> {
        self.release_orphans(cell);
        let found = match self.with(cell, |state| state.take_room(want)) {
            Some(found) => found,
            None => match self.new_growing(cell, want, cause)? {
                Some(()) => self.with(cell, |state| state.take_room(want)).expect("a new segment has room"),
                None => return Ok(Fetched::Nothing(OomCause::Device)),
            },
        };
        let (mut grown, mut next) = found;
        loop {
            let have = grown.map_or(0, |block| self.with(cell, |state| state.blocks[block].size));
            if let Some(block) = grown.filter(|_| have >= want.size) {
                return Ok(Fetched::Block(block));
            }
            // A neighbour behind may have been free already and was joined; what is next is unmapped, or somebody
            // else's by now.
            let part = self.with(cell, |state| {
                let part = next.filter(|&next| state.is_unmapped(next))?;
                state.take_unmapped(part);
                let (ptr, size) = (state.blocks[part].ptr, state.blocks[part].size);
                let chunk = state.growing_mut(part).chunk;
                Some((part, ptr, chunk, (want.size - have).min(size).next_multiple_of(chunk)))
            });
            let Some((part, ptr, chunk, bytes)) = part else {
                self.abandon(cell, grown);
                return self.fetch_growing(cell, want, cause);
            };
            match self.map(cell, ptr, chunk, bytes) {
                Ok(Mapped::All(handles)) => {
                    (grown, next) = self.with(cell, |state| {
                        let block = state.grow(part, grown, &handles, cause);
                        (Some(block), state.blocks[block].next)
                    });
                }
                refused => {
                    self.with(cell, |state| state.put_unmapped(part));
                    self.abandon(cell, grown);
                    return match refused {
                        Err(error) => Err(error),
                        Ok(_) => Ok(Fetched::Nothing(OomCause::Device)),
                    };
                }
            }
        }
    }

    /// Makes what was grown so far free.
    fn abandon(&self, cell: &Cell, grown: Option<BlockKey>) {
        if let Some(block) = grown {
            self.with(cell, |state| state.put_mapped(block));
        }
    }

    /// Reserves addresses for a new segment, all unmapped. `None` if they would not suffice.
    fn new_growing(&self, cell: &Cell, want: &Want, cause: &Cause) -> Result<Option<()>> {
        let chunk = self.with(cell, |state| state.policy.sizes.chunk(want.kind));
        let chunk = chunk.next_multiple_of(cell.granularity);
        let bytes = self.bytes_to_reserve(cell, want.stream).max(1).next_multiple_of(chunk);
        if bytes < want.size {
            return Ok(None);
        }
        let stream_raw = self.stream_raw(cell, want.stream)?;
        let base = match self.driver().vm_reserve(bytes, 0, None) {
            Ok(base) => base,
            Err(error) if error.code == ErrorCode::OutOfMemory => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        self.with(cell, |state| {
            let lane = state.lane_for(want.bin, want.stream, stream_raw);
            let source = Source::Growing(Growing::new(base.0, chunk));
            let block = state.add_segment(lane, base.0, bytes, source, cause);
            state.put_unmapped(block);
        });
        Ok(Some(()))
    }

    /// How many bytes of addresses a segment of that stream gets: by its class, by the setting, or 9/8 of the device:
    /// room to move what is unmapped in the middle to the end.
    fn bytes_to_reserve(&self, cell: &Cell, stream: StreamId) -> u64 {
        let all = cell.bytes_total + cell.bytes_total / 8;
        let settings = self.settings();
        let class = self.stream_class(stream);
        let of_class = class.and_then(|class| {
            let reserve = settings.expandable_segments_reserve_by_class.get(&class).copied();
            if reserve.is_none() {
                tracing::warn!(%stream, class, "no expandable_segments_reserve_by_class for this class; the default is used");
            }
            reserve
        });
        match of_class.or(settings.expandable_segments_reserve) {
            None => all,
            Some(Reserve::Bytes(bytes)) => bytes.min(all),
            Some(Reserve::Fraction(fraction)) => super::policy::share_of(cell.bytes_total, fraction).min(all),
        }
    }

    /// Maps chunks from `ptr` on, all or none.
    fn map(&self, cell: &Cell, ptr: u64, chunk: u64, bytes: u64) -> Result<Mapped> {
        let options = PhysicalOptions { share: None, rdma: cell.rdma };
        let mut handles = Vec::new();
        let mut mapped = 0;
        let outcome = (|| {
            for _ in 0..bytes / chunk {
                handles.push(self.driver().vm_create(cell.device, chunk, options)?);
            }
            for &handle in &handles {
                self.driver().vm_map(DevicePtr(ptr + mapped), handle)?;
                mapped += chunk;
            }
            self.driver().vm_set_access(DevicePtr(ptr), bytes, &self.access(cell))
        })();
        let Err(error) = outcome else { return Ok(Mapped::All(handles)) };
        if mapped > 0
            && let Err(error) = self.driver().vm_unmap(DevicePtr(ptr), mapped)
        {
            // Until that works the addresses cannot be mapped again, and the segment cannot go.
            tracing::warn!(%error, "memory mapped by a failed growth could not be unmapped; trying again later");
            self.with(cell, |state| state.stuck.push((DevicePtr(ptr), mapped)));
        }
        self.release(cell, handles);
        if error.code == ErrorCode::OutOfMemory { Ok(Mapped::Nothing) } else { Err(error.into()) }
    }

    /// Who may use what is mapped: the device itself, and those that asked for it.
    fn access(&self, cell: &Cell) -> Vec<DeviceAccess> {
        let peers = cell.peers();
        let devices = std::iter::once(cell.device).chain(peers.iter().copied());
        devices.map(|device| DeviceAccess { device, access: Access::ReadWrite }).collect()
    }

    /// Gives back the whole chunks inside a free block, if it still is one. Waits for the stream first: unmapping does
    /// not. Nothing goes while the stream captures.
    pub(super) fn return_chunks(&self, cell: &Cell, block: BlockKey, cause: &Cause) -> Result<u64> {
        let stream = self.with(cell, |state| {
            let entry = state.blocks.get(block)?;
            (entry.standing == Standing::Free && entry.growing).then(|| state.place_of(entry.segment).1)
        });
        let Some(stream) = stream else { return Ok(0) };
        let taken = self.with(cell, |state| {
            if state.blocks.get(block).is_none_or(|entry| entry.standing != Standing::Free) {
                return None;
            }
            let chunks = state.whole_chunks(block)?;
            state.take_free(block);
            Some(chunks)
        });
        let Some((ptr, bytes, handles)) = taken else { return Ok(0) };
        let outcome = self.wait_and_unmap(cell, stream, DevicePtr(ptr), bytes);
        if !matches!(outcome, Ok(true)) {
            self.with(cell, |state| state.put_mapped(block));
            return outcome.map(|_| 0);
        }
        self.release(cell, handles);
        let first = self.with(cell, |state| {
            let segment = state.blocks[block].segment;
            state.shrink(block, ptr, bytes, cause);
            state.segments[segment].first
        });
        self.drop_if_unmapped(cell, first)?;
        Ok(bytes)
    }

    /// Unmaps a range once the work that `stream` holds now is done; not if a capture forbids to wait for it.
    fn wait_and_unmap(&self, cell: &Cell, stream: StreamId, ptr: DevicePtr, bytes: u64) -> Result<bool> {
        let waited = stream_fence::wait_for_stream(&self.pending_frees(cell, &Cause::default()), stream)?;
        if waited {
            let _relaxed = self.relaxed(cell)?;
            self.driver().vm_unmap(ptr, bytes)?;
        }
        Ok(waited)
    }

    /// Gives the addresses of a segment back, if nothing of it is mapped. On failure it stays, unmapped, and serves
    /// again.
    #[expect(unsafe_code, reason = "the driver cannot check that no work uses the addresses")]
    pub(super) fn drop_if_unmapped(&self, cell: &Cell, block: BlockKey) -> Result<()> {
        let taken = self.with(cell, |state| {
            let entry: &Block = state.blocks.get(block)?;
            if entry.standing != Standing::Unmapped || entry.is_split() {
                return None;
            }
            state.take_unmapped(block);
            Some((DevicePtr(state.blocks[block].ptr), state.blocks[block].size))
        });
        let Some((ptr, bytes)) = taken else { return Ok(()) };
        // SAFETY: a range is unmapped only once the streams that used it have passed.
        let outcome = unsafe { self.driver().vm_free_range(ptr, bytes) };
        self.with(cell, |state| match outcome {
            Ok(()) => drop(state.remove_segment(block)),
            Err(_) => state.put_unmapped(block),
        });
        Ok(outcome?)
    }

    /// Releases physical memory; what cannot be is kept, and tried again at the next growth.
    fn release(&self, cell: &Cell, handles: Vec<PhysicalId>) {
        let stuck: Vec<PhysicalId> = handles
            .into_iter()
            .filter(|&handle| {
                let outcome = self.driver().vm_release(handle);
                if let Err(error) = &outcome {
                    tracing::warn!(%error, "physical memory could not be released; trying again later");
                }
                outcome.is_err()
            })
            .collect();
        if !stuck.is_empty() {
            self.with(cell, |state| state.orphans.extend(stuck));
        }
    }

    /// Tries once more what could not be unmapped or released.
    pub(super) fn release_orphans(&self, cell: &Cell) {
        for (ptr, bytes) in self.with(cell, |state| std::mem::take(&mut state.stuck)) {
            if let Err(error) = self.driver().vm_unmap(ptr, bytes) {
                tracing::warn!(%error, %ptr, "memory mapped by a failed growth still cannot be unmapped");
                self.with(cell, |state| state.stuck.push((ptr, bytes)));
            }
        }
        let orphans = self.with(cell, |state| std::mem::take(&mut state.orphans));
        if !orphans.is_empty() {
            self.release(cell, orphans);
        }
    }
}
