//! The driver's stream-ordered pool as a source: the driver caches, and orders frees by streams.
//!
//! A device's pool is configured at its first use: it keeps freed memory (the release threshold is the largest number)
//! and may reuse memory across streams in every way that the driver supports. Other users of the device's default pool
//! share that configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, OnceLock};

use warpool_driver::{Access, DeviceId, DevicePtr, Driver, PoolAttribute, PoolId, StreamId};

use super::UncachedAllocator;
use super::source::{Reserved, Source};
use crate::capture::RelaxedMode;
use crate::memory::stream_fence::{record_outside_captures, synchronize, wait_for_devices};
use crate::memory::{OomCause, RawStream, Settings};
use crate::{Device, Instance, PooledEvent, Result, StreamLease, lock};

/// Memory from the driver's stream-ordered pools, as PyTorch's `cudaMallocAsync` backend uses them. See the
/// [module](crate::memory) for how allocators are used.
///
/// It has no private pools: [`pools`](crate::memory::DeviceAllocator::pools) is
/// [`Error::Unsupported`](crate::Error::Unsupported).
///
/// # Captures
/// Memory allocated on a capturing stream is a node of the graph. It is freed by a node if its capture is still active.
/// Any other block that a capturing stream used is freed after that capture.
///
/// # Where it differs from PyTorch's backend
/// - Several captures may be active at once, on one or several threads.
/// - Frees in a capture are joined into the block's own stream, so nothing has to be joined when the capture ends.
/// - A free that has to wait is made by the next call of any kind, not only by an allocation.
/// - A retry waits for all streams that hold frees, not only for the request's stream.
/// - A fraction outside of [0, 1] is an error, and the default is 1.
/// - There are snapshots, a history, and all counters that have a meaning here. Every block is a segment of its own;
///   memory that the pool holds beyond the blocks is shown as one free segment at address 0.
/// - Pressure callbacks run only when a request would fail, since the amount of cached memory is not known before.
pub type DriverPoolAllocator = UncachedAllocator<DriverPool>;

/// The maximum number of streams, and of events, to wait for one by one. With more, as in a program that creates a
/// stream per request, the allocator waits for the devices instead.
const FREES_MAX: usize = 1024;

/// The default pools of all devices.
pub struct DriverPool {
    instance: Instance,
    devices: Box<[PoolState]>,
}

#[derive(Default)]
struct PoolState {
    /// Configured at the first use, since that creates a context.
    ready: OnceLock<ReadyPool>,
    /// Frees that were put into streams since they were last waited for.
    frees: Mutex<Frees>,
}

/// Frees in streams.
#[derive(Default)]
struct Frees {
    /// Streams that live as long as the instance.
    streams: BTreeSet<StreamId>,
    /// Events after the last free in each stream that its owner may destroy.
    events: BTreeMap<StreamId, PooledEvent>,
    /// Whether there are frees in more streams than are recorded.
    others: bool,
}

struct ReadyPool {
    id: PoolId,
    /// Frees of blocks that several streams used are joined here.
    release_stream: StreamLease,
}

impl UncachedAllocator<DriverPool> {
    /// An allocator for all devices of `instance`, without limits. Makes no driver call.
    #[must_use]
    pub fn new(instance: &Instance) -> Self {
        Self::with_settings(instance, Settings::default())
    }

    /// As `new`, with settings. Only the memory fraction and the cap have an effect; the others are shown in snapshots.
    #[must_use]
    pub fn with_settings(instance: &Instance, settings: Settings) -> Self {
        let devices = instance.devices().map(|_| PoolState::default()).collect();
        Self::over(instance, DriverPool { instance: instance.clone(), devices }, settings)
    }
}

impl DriverPool {
    fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    fn state(&self, device: DeviceId) -> &PoolState {
        &self.devices[device.0 as usize]
    }

    /// The device's pool, configured. Two threads may both configure it, with the same result.
    fn ready(&self, device: DeviceId) -> Result<&ReadyPool> {
        let state = self.state(device);
        if let Some(ready) = state.ready.get() {
            return Ok(ready);
        }
        let id = self.driver().pool_default(device)?;
        let relaxed = self.relaxed()?;
        for (attribute, value) in [
            (PoolAttribute::ReleaseThreshold, u64::MAX),
            (PoolAttribute::ReuseFollowEvents, 1),
            (PoolAttribute::ReuseOpportunistic, 1),
            (PoolAttribute::ReuseInternalDependencies, 1),
        ] {
            self.driver().pool_set(id, attribute, value)?;
        }
        drop(relaxed);
        let release_stream = Device::from_id(&self.instance, device).lease_stream()?;
        Ok(state.ready.get_or_init(|| ReadyPool { id, release_stream }))
    }

    /// Records a free in a stream. If the owner may destroy the stream, its id must not be used later, so an event is
    /// recorded in it now.
    fn note_free(&self, device: DeviceId, stream: StreamId) {
        let is_kept = self.instance.may_name(stream);
        let event = match is_kept {
            true => Ok(None),
            false => record_outside_captures(&self.instance, stream),
        };
        let mut frees = lock(&self.state(device).frees);
        let is_full = |frees: &Frees| frees.streams.len() + frees.events.len() >= FREES_MAX;
        match event {
            _ if is_full(&frees) => frees.others = true,
            Ok(Some(event)) => drop(frees.events.insert(stream, event)),
            Ok(None) if is_kept => drop(frees.streams.insert(stream)),
            // A free in a capture is a node of its graph.
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, %stream, "no event could be recorded after a free; a trim does not wait for it");
            }
        }
    }

    fn wait_for(&self, frees: &Frees) -> Result<()> {
        for &stream in &frees.streams {
            // This does not wait for a capturing stream.
            synchronize(&self.instance, stream)?;
        }
        for event in frees.events.values() {
            let _relaxed = self.relaxed()?;
            self.driver().event_synchronize(event.id())?;
        }
        if frees.others {
            // This does not wait while a capture is active.
            wait_for_devices(&self.instance)?;
        }
        Ok(())
    }

    /// Every call that a capture elsewhere would forbid is made in the relaxed mode: this allocator is not notified of
    /// captures.
    fn relaxed(&self) -> Result<RelaxedMode<'_>> {
        RelaxedMode::begin(self.driver())
    }
}

impl Source for DriverPool {
    const NAME: &'static str = "driver-pool";
    const STREAM_ORDERED: bool = true;
    const PRIVATE_POOLS: bool = false;
    /// The granularity of the driver's pools on an H200.
    const GRANULARITY: u64 = 512;
    const OOM_CAUSE: OomCause = OomCause::Device;

    fn allocate(&self, device: DeviceId, bytes: u64, stream: RawStream) -> Result<Option<DevicePtr>> {
        let pool = self.ready(device)?.id;
        let _relaxed = self.relaxed()?;
        match self.driver().pool_alloc(pool, bytes, stream.id) {
            Ok(ptr) => Ok(Some(ptr)),
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn free(&self, ptr: DevicePtr, _bytes: u64, device: DeviceId, stream: RawStream) -> Result<()> {
        self.driver().pool_free(ptr, stream.id)?;
        self.note_free(device, stream.id);
        Ok(())
    }

    fn release_stream(&self, device: DeviceId) -> Result<StreamId> {
        Ok(self.ready(device)?.release_stream.id())
    }

    fn trim(&self, device: DeviceId, _capturing: bool) -> Result<()> {
        let Some(pool) = self.state(device).ready.get() else { return Ok(()) };
        let _relaxed = self.relaxed()?;
        Ok(self.driver().pool_trim(pool.id, 0)?)
    }

    fn wait_for_frees(&self, device: DeviceId) -> Result<bool> {
        let state = self.state(device);
        let frees = std::mem::take(&mut *lock(&state.frees));
        let had_any = !frees.streams.is_empty() || !frees.events.is_empty() || frees.others;
        let waited = self.wait_for(&frees);
        if waited.is_err() {
            let mut now = lock(&state.frees);
            now.streams.extend(frees.streams);
            // Events recorded meanwhile are later, and stay.
            for (stream, event) in frees.events {
                now.events.entry(stream).or_insert(event);
            }
            now.others |= frees.others;
        }
        waited.map(|()| had_any)
    }

    fn undo_growth(&self, device: DeviceId) -> Result<()> {
        // A pool grows until the driver fails, and keeps what it has got: all memory of an H200 (measured there).
        self.trim(device, false)
    }

    fn reserved(&self, device: DeviceId) -> Result<Option<Reserved>> {
        let Some(pool) = self.state(device).ready.get() else { return Ok(Some(Reserved::default())) };
        let _relaxed = self.relaxed()?;
        let get = |attribute| self.driver().pool_get(pool.id, attribute);
        let (current, peak) = (get(PoolAttribute::ReservedCurrent)?, get(PoolAttribute::ReservedHigh)?);
        Ok(Some(Reserved { current, peak }))
    }

    fn reset_peak(&self, device: DeviceId) -> Result<()> {
        let Some(pool) = self.state(device).ready.get() else { return Ok(()) };
        let _relaxed = self.relaxed()?;
        Ok(self.driver().pool_set(pool.id, PoolAttribute::ReservedHigh, 0)?)
    }

    fn enable_peer_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        let pool = self.ready(owner)?;
        if device == owner {
            return Ok(());
        }
        Ok(self.driver().pool_set_access(pool.id, device, Access::ReadWrite)?)
    }
}
