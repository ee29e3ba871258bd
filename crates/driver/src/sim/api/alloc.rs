//! Plain device memory of the simulated machine, and the suballocations that allocators report.

use std::sync::Arc;

use crate::sim::SimDriver;
use crate::sim::memory::{Bytes, Gone, Region, Tomb, Toucher};
use crate::sim::order::{Actor, Label, Order, Stamp};
use crate::{Call, DeviceId, DevicePtr, ErrorCode, Memory, MemoryInfo, Result, StreamId, Suballocations};

/// What allocations take is rounded up to this; what is beyond the bytes that were asked for cannot be touched.
pub const GRAIN: u64 = 512;

impl Memory for SimDriver {
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        self.call(Call::MemAlloc, |world| {
            world.device(device)?;
            if bytes == 0 {
                return world.fail(ErrorCode::InvalidValue, "0 bytes cannot be allocated");
            }
            world.spend(bytes);
            let Some(rounded) = bytes.checked_next_multiple_of(GRAIN) else {
                return Err(world.error(ErrorCode::OutOfMemory));
            };
            world.take_bytes(device, rounded)?;
            // Large ones get whole pages, as real ones do.
            let align = if rounded >= 2 << 20 { 2 << 20 } else { GRAIN };
            let start =
                world.address_for_alloc(device, rounded, align).inspect_err(|_| world.give_bytes(device, rounded))?;
            let piece = world.memory.add_piece(bytes, Some(device), Bytes::device());
            world.memory.space.insert(start, bytes, Region::Plain { piece });
            Ok(DevicePtr(start))
        })
    }

    fn mem_free(&self, ptr: DevicePtr) -> Result<()> {
        let mut world = self.enter(Call::MemFree)?;
        if ptr.is_null() {
            return Ok(());
        }
        // The memory of a graph is there only once its launch has run; what counts is that it was launched.
        let (start, piece, device) = match world.memory.space.region_at(ptr.0) {
            Some((start, _, Region::Plain { piece } | Region::Pooled { piece, freed: false, .. })) => {
                (start, Some(*piece), world.memory.piece(*piece).device)
            }
            Some((start, _, Region::OfGraph { pool, held: true, .. })) => {
                (start, None, world.pools.get(pool.0).map(|pool| pool.device))
            }
            _ => return world.fail(ErrorCode::InvalidValue, format!("{ptr} starts no live allocation")),
        };
        if start != ptr.0 {
            return world.fail(ErrorCode::InvalidValue, format!("{ptr} lies inside the allocation at {start:#x}"));
        }
        let Some(device) = device else {
            return world.fail(ErrorCode::InvalidValue, format!("the pool of {ptr} is gone"));
        };
        world.device(device)?;
        let mut world = self.wait_for_device(world, device);
        // The wait may have shown that the device is broken, or another thread may have been faster.
        world.device(device)?;
        let mut of_graph = None;
        let bytes = world.memory.space.regions.get(&start).map_or(0, |(bytes, _)| *bytes);
        world.spend(bytes);
        match world.memory.space.regions.get_mut(&start) {
            Some((bytes, Region::Plain { piece: now })) if Some(*now) == piece => {
                let bytes = *bytes;
                world.memory.space.regions.remove(&start);
                world.bury(start, bytes, Gone::Freed);
                world.give_bytes(device, bytes.next_multiple_of(GRAIN));
            }
            Some((bytes, Region::Pooled { piece: now, pool, freed: false })) if Some(*now) == piece => {
                let (bytes, pool) = (*bytes, *pool);
                world.memory.space.regions.remove(&start);
                world.bury(start, bytes, Gone::PoolFreed);
                world.return_to_pool(pool, bytes);
            }
            Some((bytes, Region::OfGraph { piece: now, pool, held })) if *held => {
                // The addresses stay the graph's.
                let (bytes, pool) = (*bytes, *pool);
                *held = false;
                of_graph = now.take();
                world.bury(start, bytes, Gone::PoolFreed);
                world.return_to_pool(pool, bytes);
            }
            _ => return world.fail(ErrorCode::InvalidValue, format!("{ptr} was freed by another thread meanwhile")),
        }
        if let Some(piece) = piece.or(of_graph) {
            world.memory.drop_piece(piece);
        }
        Ok(())
    }

    fn mem_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.call(Call::MemInfo, |world| {
            let used = world.device(device)?.bytes_used;
            let config = &world.config.devices[device.0 as usize];
            let bytes_total = config.properties.bytes_total;
            Ok(MemoryInfo { bytes_free: bytes_total.saturating_sub(config.bytes_context + used), bytes_total })
        })
    }
}

impl Suballocations for SimDriver {
    fn tracks_suballocations(&self) -> bool {
        self.track_suballocations
    }

    fn suballocated(&self, ptr: DevicePtr, bytes: u64, stream: StreamId) {
        if !self.track_suballocations {
            return;
        }
        let Ok(mut world) = self.enter(Call::Suballocated) else { return };
        let Ok(stream) = world.live_stream(stream) else { return };
        let state = world.stream(stream);
        if state.capture.is_some() {
            // The order is that of the graph, which is not known before it is done. But it is no longer taken back.
            world.memory.unmark(ptr, bytes);
            return;
        }
        let (device, stamp) = (state.device, Stamp { lane: state.lane, seq: state.tail });
        let frontier = Arc::new(world.knowledge(stream));
        let (at, now) = (world.calls, world.clock);
        let who = Actor { label: Label::PoolAlloc, stamp, point: None, stream, at };
        let order = Order { stamp, base: &frontier, graph: None };
        let by = Toucher { device, who, order, now, everywhere: true };
        world.memory.hand_out(ptr, bytes, &frontier, &by);
    }

    fn suballocation_freed(&self, ptr: DevicePtr, bytes: u64) {
        if !self.track_suballocations {
            return;
        }
        let Ok(mut world) = self.enter(Call::SuballocationFreed) else { return };
        let at = world.calls;
        world.memory.take_back(ptr, bytes, at);
    }
}

impl crate::sim::world::World {
    /// Remembers that a range is gone, by the call that is under way.
    pub fn bury(&mut self, start: u64, bytes: u64, gone: Gone) {
        self.memory.space.bury(Tomb { start, bytes, gone, at: self.calls, pinned_by: None });
    }
}
