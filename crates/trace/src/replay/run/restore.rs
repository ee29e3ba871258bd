//! Brings an allocator into the initial state of a recording: the same segments at the same addresses, split into the
//! same blocks. This is done before anything is counted, with settings under which every block is split, so that any
//! state can be made; the settings of the run are set at the end.

use warpool::driver::{DevicePtr, DriverError, ErrorCode};
use warpool::memory::raw::Allocation;
use warpool::memory::report::SegmentKind;
use warpool::memory::settings::FreeBlockOrder;
use warpool::memory::{CachingAllocator, DeviceAllocator as _, Settings, SizeRules};
use warpool::{Error, Result};

use super::device::{DEVICE, ReplayDevice};
use crate::replay::infer::{DEFAULT_POOL, Inference, InitialState, RecordedSegment, SegmentId};
use crate::replay::plan::{InitialBlock, Plan, StreamIndex};

/// The initial state and where it belongs.
#[derive(Clone, Copy)]
pub(super) struct Restore<'a> {
    pub initial: &'a InitialState,
    pub inference: &'a Inference,
    pub plan: &'a Plan,
    /// The settings of the run.
    pub settings: &'a Settings,
}

impl Restore<'_> {
    /// Restores segments and blocks, and puts allocated blocks into their slots. Allocators other than the caching one
    /// have no segments: there only the blocks are allocated.
    pub fn exactly(&self, device: &mut ReplayDevice, slots: &mut [Option<Allocation>]) -> Result<()> {
        let Some(caching) = device.caching() else { return self.blocks_only(device, slots) };
        let filled = self.restore_segments(caching, device)?;
        let mut in_use: Vec<Vec<&InitialBlock>> = vec![Vec::new(); self.initial.heap.segments().len()];
        for block in &self.plan.initial_blocks {
            in_use[self.segment_of(block) as usize].push(block);
        }
        caching.set_settings(Settings { expandable_segments: true, ..self.splitting_settings() })?;
        let (mut pending, mut free) = (Vec::new(), Vec::new());
        for (id, allocations) in filled {
            allocations.into_iter().try_for_each(|block| device.free(block))?;
            let mut in_use = in_use[id as usize].iter().peekable();
            // Blocks are allocated by address. Free pieces in between are allocated too until the end, so that the only
            // free block that is large enough is the rest of this segment, however many pieces there are.
            for (addr, bytes) in self.blocks_of(id) {
                let Some(block) = in_use.next_if(|block| block.addr == addr) else {
                    free.extend(self.allocate_free_piece(device, id, addr, bytes)?);
                    continue;
                };
                let allocation = self.allocate_at(device, id, block.addr, block.bytes)?;
                let allocation = Allocation { bytes_requested: block.requested, ..allocation };
                match block.paused {
                    None => slots[block.slot as usize] = Some(allocation),
                    Some(paused) => pending.push((allocation, paused)),
                }
            }
            if let Some(block) = in_use.next() {
                return Err(wrong_address(block.addr, DevicePtr(self.initial.heap.segment(id).base)));
            }
        }
        free.into_iter().try_for_each(|block| device.free(block))?;
        caching.set_settings(self.settings.clone())?;
        // Uses of a paused stream are numbered in the order of addresses.
        pending.sort_unstable_by_key(|(allocation, _)| allocation.ptr.0);
        pending.into_iter().try_for_each(|(allocation, paused)| device.free_in_use(allocation, paused))
    }

    /// Allocates the blocks that were in use, at any address: for settings under which the recorded segments would not
    /// have been allocated.
    pub fn blocks_only(&self, device: &mut ReplayDevice, slots: &mut [Option<Allocation>]) -> Result<()> {
        for block in &self.plan.initial_blocks {
            let segment = self.segment_of(block);
            let stream = self.stream_index(self.initial.heap.segment(segment).stream);
            let pool = self.inference.pools.of_segment(segment);
            let allocation = device.allocate(stream, pool, block.requested)?;
            match block.paused {
                None => slots[block.slot as usize] = Some(allocation),
                Some(paused) => device.free_in_use(allocation, paused)?,
            }
        }
        Ok(())
    }

    /// Allocates all segments at their addresses, with the recorded gaps, and returns allocations that fill them.
    fn restore_segments(
        &self,
        caching: &CachingAllocator,
        device: &ReplayDevice,
    ) -> Result<Vec<(SegmentId, Vec<Allocation>)>> {
        let mut restored = Vec::new();
        let (mut has_gaps, mut expandable) = (false, None);
        let ids = 0..SegmentId::try_from(self.initial.heap.segments().len()).expect("numbered so");
        for (id, segment) in ids.map(|id| (id, self.initial.heap.segment(id))).filter(|(_, it)| it.bytes > 0) {
            // Other settings are applied to all blocks that exist, so only where they change.
            if expandable.replace(segment.expandable) != Some(segment.expandable) {
                let expandable_segments = segment.expandable;
                caching.set_settings(Settings { expandable_segments, ..self.splitting_settings() })?;
            }
            let filled = self.allocate_segment(device, id, segment)?;
            let ranges = self.mapped_ranges(id);
            if ranges.iter().map(|&(_, bytes)| bytes).fold(0, u64::saturating_add) == segment.end - segment.base {
                restored.push((id, filled));
                continue;
            }
            has_gaps = true;
            filled.into_iter().try_for_each(|block| device.free(block))?;
            let requests = ranges.into_iter().flat_map(|(addr, bytes)| requests(addr, bytes, segment.kind));
            let allocated = requests.map(|(addr, bytes)| self.allocate_at(device, id, addr, bytes));
            restored.push((id, allocated.collect::<Result<_>>()?));
        }
        if has_gaps {
            device.trim(DEFAULT_POOL)?;
        }
        Ok(restored)
    }

    /// Allocates a segment at its address and fills it. All other memory is allocated too, so nothing else can serve
    /// these requests.
    fn allocate_segment(
        &self,
        device: &ReplayDevice,
        id: SegmentId,
        segment: &RecordedSegment,
    ) -> Result<Vec<Allocation>> {
        let base = DevicePtr(segment.base);
        if segment.expandable {
            device.driver().place_next_reserve(base)?;
        } else {
            device.driver().place_next_alloc(DEVICE, base)?;
        }
        let (stream, pool) = (self.stream_index(segment.stream), self.inference.pools.of_segment(id));
        let filled = requests(segment.base, segment.end - segment.base, segment.kind)
            .map(|(addr, bytes)| {
                let block = device.allocate(stream, pool, bytes)?;
                if block.ptr.0 == addr { Ok(block) } else { Err(wrong_address(addr, block.ptr)) }
            })
            .collect();
        device.driver().clear_placements();
        filled
    }

    /// The blocks of a segment, in use or free: address and length.
    fn blocks_of(&self, id: SegmentId) -> impl Iterator<Item = (u64, u64)> {
        let heap = &self.initial.heap;
        let segment = heap.segment(id);
        let blocks = heap.blocks().range(segment.base..segment.end);
        blocks.filter(move |(_, block)| block.segment == id).map(|(addr, block)| (addr, block.bytes))
    }

    /// Allocates a free piece of a segment. A piece that is smaller than the requests of its segment stays free, since
    /// it cannot serve a request meanwhile.
    fn allocate_free_piece(
        &self,
        device: &ReplayDevice,
        id: SegmentId,
        addr: u64,
        bytes: u64,
    ) -> Result<Vec<Allocation>> {
        let kind = self.initial.heap.segment(id).kind;
        if SizeRules::kind(bytes) == SegmentKind::Small && kind == SegmentKind::Large {
            return Ok(Vec::new());
        }
        let requests = requests(addr, bytes, kind);
        requests.map(|(addr, bytes)| self.allocate_at(device, id, addr, bytes)).collect()
    }

    /// The mapped ranges of a segment: address and length.
    fn mapped_ranges(&self, id: SegmentId) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for (addr, length) in self.blocks_of(id) {
            match ranges.last_mut() {
                Some((start, bytes)) if *start + *bytes == addr => *bytes += length,
                _ => ranges.push((addr, length)),
            }
        }
        ranges
    }

    fn allocate_at(&self, device: &ReplayDevice, id: SegmentId, addr: u64, bytes: u64) -> Result<Allocation> {
        let stream = self.stream_index(self.initial.heap.segment(id).stream);
        let request = device.request(stream, self.inference.pools.of_segment(id), bytes);
        let caching = device.caching().expect("only the caching allocator has segments to restore");
        caching.allocate_at(request, DevicePtr(addr))
    }

    /// Settings under which every block is split, in address ranges as long as those of the run.
    fn splitting_settings(&self) -> Settings {
        let expandable_segments_reserve = self.settings.expandable_segments_reserve;
        Settings { free_block_order: FreeBlockOrder::Address, expandable_segments_reserve, ..Settings::default() }
    }

    fn segment_of(&self, block: &InitialBlock) -> SegmentId {
        self.initial.heap.blocks()[block.addr].segment
    }

    fn stream_index(&self, stream: u64) -> StreamIndex {
        let at = self.plan.streams.binary_search(&stream).expect("the plan has all streams");
        StreamIndex::try_from(at).expect("the plan numbers them so")
    }
}

/// A range as requests that a segment of that kind can serve.
fn requests(addr: u64, bytes: u64, kind: SegmentKind) -> impl Iterator<Item = (u64, u64)> {
    let step = request_size(bytes, kind);
    (0..bytes.div_ceil(step)).map(move |at| (addr + at * step, step.min(bytes - at * step)))
}

/// How many of `bytes` bytes one request of a segment of that kind can have.
fn request_size(bytes: u64, kind: SegmentKind) -> u64 {
    match kind {
        SegmentKind::Small => SizeRules::SMALL_REQUEST_MAX,
        SegmentKind::Large => bytes.max(1),
    }
}

/// How many calls it takes to restore a state, roughly.
pub(in crate::replay) fn calls_to_restore(initial: &InitialState) -> u64 {
    let segments = initial.heap.segments().iter().filter(|segment| segment.bytes > 0);
    let calls = segments.map(|segment| {
        let bytes = segment.end.saturating_sub(segment.base);
        2 * bytes.div_ceil(request_size(bytes, segment.kind))
    });
    calls.fold(2 * initial.heap.blocks().len() as u64, u64::saturating_add)
}

fn wrong_address(addr: u64, got: DevicePtr) -> Error {
    let error = DriverError::new("restore", ErrorCode::InvalidValue);
    error.with_detail(format!("memory for {} was allocated at {got}", DevicePtr(addr))).into()
}
