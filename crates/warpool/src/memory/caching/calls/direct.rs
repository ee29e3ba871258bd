//! Requests while caching is off, and the frees of their blocks: each is a driver call.
//!
//! A capturing stream is still served from the cache: its memory comes from the graph's pool, which keeps it for the
//! replays. A block that is freed in a capture that used it stays allocated until the graph is gone (`bypass.rs`).

use warpool_driver::{DevicePtr, ErrorCode, MemoryInfo, StreamId};

use crate::memory::caching::CachingAllocator;
use crate::memory::caching::bypass::{DirectBlock, Keeper};
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
        self.bypass.insert(ptr, DirectBlock { device: device.id, stream, captured_for: Vec::new(), holds: 0 });
        Ok(Allocation { ptr, bytes, bytes_requested: bytes, device: device.id, stream, slot: 0, generation: 0 })
    }

    /// Counts a failed request, calls the observers, and builds the error.
    fn out_of_memory(&self, device: &CachingDevice, request: &Request) -> Error {
        // A failure of this call must not hide the error.
        let unknown = MemoryInfo { bytes_free: 0, bytes_total: device.bytes_total };
        let memory = self.driver().mem_info(device.id).unwrap_or(unknown);
        let stats = device.change(|state| {
            state.counters_mut().oom();
            state.stats().clone()
        });
        let (why, bytes_segment) = (OomCause::Device, request.bytes);
        let shortage = Shortage { request, why, bytes_segment, memory, limit: None, stats: &stats, capturing: false };
        let report = shortage.report();
        device.observers().report_oom(&report);
        Error::OutOfMemory(Box::new(report))
    }

    /// Frees the block that starts at `ptr`, if it was allocated directly from the driver. Returns whether it was. A
    /// free that fails is retried by later calls.
    pub(super) fn free_direct(&self, ptr: DevicePtr) -> Result<bool> {
        let Some(block) = self.bypass.remove(ptr)? else { return Ok(false) };
        let unwinds = OnUnwind::new(|| self.bypass.free_later(ptr));
        let keepers = self.keepers(&block);
        unwinds.disarm();
        match keepers {
            Ok(None) => self.bypass.free_later(ptr),
            Ok(Some(keepers)) => self.keep(ptr, keepers),
            Err(error) => {
                tracing::warn!(%error, %ptr, "it is not known whether a capture uses freed memory; it is kept");
                self.bypass.keep(ptr, Vec::new());
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
        let mut pools = block.captured_for;
        let unknown = device.has_captures() || pools.iter().any(|pool| pool.is_default());
        if device.has_captures() {
            pools.extend(device.scopes.pools_of_captures());
        }
        pools.sort_unstable();
        pools.dedup();
        let in_use = pools.into_iter().filter(|&pool| is_in_use(device, pool));
        let keepers: Vec<Keeper> = in_use.map(|pool| (device.id, pool)).collect();
        if keepers.is_empty() && !unknown {
            self.bypass.free_later(ptr);
        } else {
            self.keep(ptr, keepers);
        }
    }

    /// Records that `stream` uses a block that was allocated directly from the driver. Returns whether there is one.
    /// Only captures and streams of other devices are recorded: the driver's free waits for all work of the block's own
    /// device.
    pub(super) fn record_direct_use(&self, ptr: DevicePtr, stream: StreamId) -> Result<bool> {
        let Some(block) = self.bypass.get(ptr) else { return Ok(false) };
        let device = self.device(block.device)?;
        if device.is_capturing(stream)? {
            self.bypass.record_capture(ptr, device.routed(stream)?);
        } else if self.driver().stream_handle(stream)?.device != block.device {
            self.bypass.record_peer_use(ptr, stream);
        }
        Ok(true)
    }

    /// Waits for streams of other devices that used a block, and returns it to the driver. `false` if a capture forbids
    /// waiting.
    fn return_direct(&self, ptr: DevicePtr) -> Result<bool> {
        let streams = self.bypass.take_peer_uses(ptr);
        if !streams.is_empty() {
            let put_back = || self.bypass.put_peer_uses(ptr, streams.clone());
            let unwinds = OnUnwind::new(put_back);
            let details = self.devices[0].entry_details(StackLevel::All);
            let wait = |&stream: &StreamId| wait_for_stream(&PendingFrees::new(&self.devices[0], &details), stream);
            let waited = streams.iter().map(wait).try_fold(true, |all, waited| Ok::<_, Error>(all & waited?));
            unwinds.disarm();
            if !matches!(waited, Ok(true)) {
                put_back();
                return waited;
            }
        }
        self.devices[0].capture_safe().and_then(|_safe| Ok(self.driver().mem_free(ptr)?))?;
        Ok(true)
    }

    /// Returns freed blocks to the driver, until `failures_max` calls have failed. Returns the first error.
    pub(super) fn free_direct_pending(&self, failures_max: usize) -> Result<()> {
        let (mut failures, mut outcome) = (0, Ok(()));
        for _ in 0..self.bypass.to_free() {
            let Some(ptr) = self.bypass.take_to_free() else { break };
            let put_back = || self.bypass.free_later(ptr);
            let unwinds = OnUnwind::new(put_back);
            let freed = self.return_direct(ptr);
            unwinds.disarm();
            if matches!(freed, Ok(false)) {
                put_back();
            } else if let Err(error) = freed {
                tracing::warn!(%error, %ptr, "memory that was not cached could not be freed; it is retried");
                put_back();
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
        if self.bypass.has_keeper((device.id, pool)) && !is_in_use(device, pool) {
            self.bypass.keeper_released((device.id, pool));
        }
    }

    /// The pools of captures that use a block; `None` if no capture uses it, an empty list if the captures have no
    /// pools.
    fn keepers(&self, block: &DirectBlock) -> Result<Option<Vec<Keeper>>> {
        let device = self.device(block.device)?;
        let mut pools = block.captured_for.clone();
        if device.is_capturing(block.stream)? {
            pools.push(device.routed(block.stream)?);
        }
        pools.sort_unstable();
        pools.dedup();
        if pools.is_empty() {
            return Ok(None);
        }
        let in_use = pools.iter().filter(|pool| is_in_use(device, **pool)).map(|&pool| (device.id, pool)).collect();
        // If all pools of its captures are gone, so are the graphs.
        let any_without = pools.iter().any(|pool| pool.is_default());
        Ok(Some(in_use).filter(|in_use: &Vec<Keeper>| any_without || !in_use.is_empty()))
    }

    fn keep(&self, ptr: DevicePtr, keepers: Vec<Keeper>) {
        self.bypass.keep(ptr, keepers.clone());
        // Another thread may have released one meanwhile.
        for (device, pool) in keepers {
            if let Ok(device) = self.device(device) {
                self.pool_was_released(device, pool);
            }
        }
    }
}

/// Whether a private pool has users.
fn is_in_use(device: &CachingDevice, pool: MemPoolId) -> bool {
    !pool.is_default()
        && match device.read(|state| state.pools().uses(pool)) {
            Ok(uses) => uses > 0,
            Err(Error::UnknownPool { .. }) => false,
            Err(_) => true,
        }
}
