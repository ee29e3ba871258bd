//! Requests while caching is off, and the frees of their blocks: each is a driver call.
//!
//! A capturing stream is still served from the cache: its memory comes from the graph's pool, which keeps it for the
//! replays. A block that is freed in a capture that used it stays allocated until the graph is gone (`bypass.rs`).

use warpool_driver::{DevicePtr, ErrorCode, StreamId};

use crate::memory::caching::CachingAllocator;
use crate::memory::caching::bypass::DirectBlock;
use crate::memory::caching::device::CachingDevice;
use crate::memory::caching::pending::PendingFrees;
use crate::memory::shortage::Shortage;
use crate::memory::stream_fence::{PENDING_PER_CALL, wait_for_stream};
use crate::memory::{Allocation, MemPoolId, OomCause, Request, StackLevel};
use crate::unwind::OnUnwind;
use crate::{Error, Result};

impl CachingAllocator {
    /// Allocates from the driver.
    pub(super) fn allocate_direct(&self, device: &CachingDevice, request: Request) -> Result<Allocation> {
        let Request { stream, bytes, .. } = request;
        // Failures are retried later; they must not fail this request.
        let _ = self.free_direct_pending(PENDING_PER_CALL);
        let allocated = device.capture_safe().map(|_safe| self.driver().mem_alloc(device.id, bytes))?;
        let ptr = match allocated {
            Ok(ptr) => ptr,
            Err(error) if error.code == ErrorCode::OutOfMemory => return Err(self.out_of_memory(device, &request)),
            Err(error) => return Err(error.into()),
        };
        let (captured_for, peer_uses) = (Vec::new(), Vec::new());
        self.bypass.insert(DirectBlock { ptr, device: device.id, stream, captured_for, peer_uses, holds: 0 });
        Ok(Allocation { ptr, bytes, bytes_requested: bytes, device: device.id, stream, slot: 0, generation: 0 })
    }

    /// Counts a failed request, calls the observers, and builds the error.
    fn out_of_memory(&self, device: &CachingDevice, request: &Request) -> Error {
        let memory = device.memory_info();
        let stats = device.change(|state| {
            state.counters.stats.num_ooms += 1;
            state.counters.stats.clone()
        });
        let (why, bytes_segment) = (OomCause::Device, request.bytes);
        let shortage = Shortage { request, why, bytes_segment, memory, limit: None, stats: &stats, capturing: false };
        device.out_of_memory(shortage.report())
    }

    /// Frees the block that starts at `ptr`, if it was allocated directly from the driver. Returns whether it was. A
    /// free that fails is retried by later calls.
    pub(super) fn free_direct(&self, ptr: DevicePtr) -> Result<bool> {
        let Some(block) = self.bypass.remove(ptr)? else { return Ok(false) };
        let unwinds = OnUnwind::new(|| self.bypass.free_later(block.clone()));
        let pools = self.pools_of_captures(&block);
        unwinds.disarm();
        match pools {
            Ok(pools) => self.free_or_keep(block, pools),
            Err(error) => {
                tracing::warn!(%error, %ptr, "it is not known whether a capture uses freed memory; it is kept");
                self.bypass.keep(block, Vec::new());
            }
        }
        let _ = self.free_direct_pending(PENDING_PER_CALL);
        Ok(true)
    }

    /// As `free_direct`, for destructors: makes no driver call. The capture status of its stream is unknown then, so
    /// the block is kept for all active captures.
    pub(super) fn free_direct_later(&self, ptr: DevicePtr) {
        let Ok(Some(block)) = self.bypass.remove(ptr) else { return };
        let Ok(device) = self.device(block.device) else { return };
        let mut pools = block.captured_for.clone();
        if device.has_captures() {
            // Of a capture without a pool nothing is known.
            pools.extend(device.scopes.pools_of_captures().into_iter().chain([MemPoolId::DEFAULT]));
        }
        self.free_or_keep(block, pools);
    }

    /// The pools of captures that use a block: the default pool for captures without one.
    fn pools_of_captures(&self, block: &DirectBlock) -> Result<Vec<MemPoolId>> {
        let device = self.device(block.device)?;
        let mut pools = block.captured_for.clone();
        if device.is_capturing(block.stream)? {
            pools.push(device.routed(block.stream)?);
        }
        Ok(pools)
    }

    /// Keeps a freed block for the captures with these pools. If all of the pools are gone, so are the graphs.
    fn free_or_keep(&self, block: DirectBlock, mut pools: Vec<MemPoolId>) {
        let Ok(device) = self.device(block.device) else { return };
        let any_without = pools.iter().any(|pool| pool.is_default());
        pools.sort_unstable();
        pools.dedup();
        pools.retain(|&pool| is_in_use(device, pool));
        if pools.is_empty() && !any_without {
            return self.bypass.free_later(block);
        }
        self.bypass.keep(block, pools.clone());
        // Another thread may have released one meanwhile.
        pools.into_iter().for_each(|pool| self.pool_was_released(device, pool));
    }

    /// Records that `stream` uses a block that was allocated directly from the driver. Returns whether there is one.
    /// Only captures and streams of other devices are recorded: the driver's free waits for all work of the block's own
    /// device.
    pub(super) fn record_direct_use(&self, ptr: DevicePtr, stream: StreamId) -> Result<bool> {
        let Some(block) = self.bypass.get(ptr) else { return Ok(false) };
        let device = self.device(block.device)?;
        if device.is_capturing(stream)? {
            let pool = device.routed(stream)?;
            self.bypass.change(ptr, |block| add(&mut block.captured_for, pool));
        } else if self.driver().stream_handle(stream)?.device != block.device {
            self.bypass.change(ptr, |block| add(&mut block.peer_uses, stream));
        }
        Ok(true)
    }

    /// Waits for streams of other devices that used a block, and returns it to the driver. `false` if a capture forbids
    /// waiting.
    fn return_direct(&self, block: &DirectBlock) -> Result<bool> {
        let device = self.device(block.device)?;
        if !block.peer_uses.is_empty() {
            let details = device.entry_details(StackLevel::All);
            let wait = |&stream: &StreamId| wait_for_stream(&PendingFrees::new(device, &details), stream);
            let mut waited = block.peer_uses.iter().map(wait);
            if !waited.try_fold(true, |all, waited| Ok::<_, Error>(all & waited?))? {
                return Ok(false);
            }
        }
        let _safe = device.capture_safe()?;
        self.driver().mem_free(block.ptr)?;
        Ok(true)
    }

    /// Returns freed blocks to the driver, until `failures_max` calls have failed. Returns the first error.
    pub(super) fn free_direct_pending(&self, failures_max: usize) -> Result<()> {
        let (mut failures, mut outcome) = (0, Ok(()));
        for _ in 0..self.bypass.to_free() {
            let Some(block) = self.bypass.take_to_free() else { break };
            let put_back = || self.bypass.free_later(block.clone());
            let unwinds = OnUnwind::new(put_back);
            let freed = self.return_direct(&block);
            unwinds.disarm();
            if !matches!(freed, Ok(true)) {
                put_back();
            }
            if let Err(error) = freed {
                let ptr = block.ptr;
                tracing::warn!(%error, %ptr, "memory that was not cached could not be freed; it is retried");
                outcome = outcome.and(Err(error));
                failures += 1;
                if failures >= failures_max {
                    break;
                }
            }
        }
        outcome
    }

    /// Before a trim: blocks freed in captures without a pool are freed with the rest, if no capture is active.
    pub(super) fn trim_direct(&self, device: &CachingDevice) -> Result<()> {
        if !device.has_captures() {
            self.bypass.free_kept_for_trim();
        }
        self.free_direct_pending(usize::MAX)
    }

    /// Called when a pool may have been released: the blocks that it kept for graphs are freed by a later call.
    pub(super) fn pool_was_released(&self, device: &CachingDevice, pool: MemPoolId) {
        if self.bypass.keeps_any() && !is_in_use(device, pool) {
            self.bypass.keeper_released(device.id, pool);
        }
    }
}

fn add<T: PartialEq>(list: &mut Vec<T>, value: T) {
    if !list.contains(&value) {
        list.push(value);
    }
}

/// Whether a private pool has users.
fn is_in_use(device: &CachingDevice, pool: MemPoolId) -> bool {
    !pool.is_default()
        && match device.read(|state| state.pools.uses(pool)) {
            Ok(uses) => uses > 0,
            Err(Error::UnknownPool { .. }) => false,
            Err(_) => true,
        }
}
