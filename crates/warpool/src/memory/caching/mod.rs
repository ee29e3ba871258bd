//! The caching allocator: places every block where PyTorch's native allocator would.
//!
//! # The life of an allocation
//! 1. The request is routed to a pool, and rounded to a block size (`size_rules.rs`).
//! 2. Pending frees are processed, if there are any (`pending.rs`).
//! 3. The smallest free block of the stream that fits is taken, and split if too much of it would be unused (`heap/`).
//!    This is the hot path: one lock, no driver call. A request like the last one, whose block was just freed, gets
//!    that block without a search (`state/recent.rs`).
//! 4. If none fits, the slow path (`slow_path.rs`) allocates memory from the driver or an upstream (`source/`).
//! 5. A freed block that only its own stream used is merged with its free neighbours at once. Other blocks wait for
//!    fences in the streams that used them (`stream_fence/`).
//!
//! User code (observers, hooks, upstreams, destructors) runs without any lock, and may panic: the panic reaches the
//! caller. A block that was being allocated is freed; a free that was under way completes.
//!
//! `heap/` has segments, blocks and free lists; `state/` has the data of one device, without driver calls;
//! `device.rs` wraps it in locks; `calls/` has the public calls.

mod bypass;
mod calls;
mod capture_order;
mod device;
mod heap;
mod pending;
mod slow_lock;
mod slow_path;
mod source;
mod state;
mod stream_classes;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use warpool_driver::{DeviceId, DevicePtr, Driver, StreamId};

use self::bypass::Bypass;
use self::device::{CachingDevice, Shared};
use self::heap::BlockKey;
use super::Settings;
use super::checkpoint::next_allocator_key;
use crate::pool_id::PoolIds;
use crate::{Error, Instance, Result};

/// PyTorch's caching allocator, over any driver. See the [module](crate::memory) for how it is used.
pub struct CachingAllocator {
    shared: Arc<Shared>,
    devices: Box<[CachingDevice]>,
    /// If false, every request is a driver call.
    caching: AtomicBool,
    bypass: Bypass,
    pool_ids: PoolIds,
    /// Identifies the allocator among all of the process.
    key: u64,
}

impl CachingAllocator {
    /// An allocator for all devices of `instance`. Makes no driver call.
    #[must_use]
    pub fn new(instance: &Instance, settings: Settings) -> Self {
        let shared = Arc::new(Shared::new(instance, settings));
        let settings = shared.settings();
        let devices = instance.devices().map(|device| CachingDevice::new(&shared, &device, &settings)).collect();
        Self {
            shared,
            devices,
            caching: AtomicBool::new(true),
            bypass: Bypass::default(),
            pool_ids: PoolIds::default(),
            key: next_allocator_key(),
        }
    }

    /// The current settings; the defaults in a forked child.
    #[must_use]
    pub fn settings(&self) -> Arc<Settings> {
        self.shared.settings()
    }

    /// Changes the settings. Cached memory stays; expandable segments serve requests only while `expandable_segments`
    /// is on. Memory fraction and cap keep their initial values, or those of the last call that set them.
    pub fn set_settings(&self, settings: Settings) {
        if self.shared.instance().is_inherited() {
            return;
        }
        self.devices.iter().for_each(|device| device.set_settings(&settings));
        self.shared.set_settings(settings);
    }

    /// Limits reserved memory on a device to `bytes`, in addition to the fraction; `None` is no limit.
    pub fn set_memory_cap(&self, device: DeviceId, bytes: Option<u64>) -> Result<()> {
        self.device(device)?.change_limits(|limits| limits.cap = bytes);
        Ok(())
    }

    /// Turns caching off or on. While it is off, every request is a driver call and appears in no statistics. Memory is
    /// freed the way it was allocated. A free whose driver call fails is retried by later frees and by
    /// [`trim`](crate::memory::DeviceAllocator::trim).
    ///
    /// A capturing stream is still served from the cache, out of the graph's pool. Other memory that a capture used and
    /// that is freed during it stays allocated until the pools of the graph are released; for a capture without a
    /// private pool, until the allocator is trimmed outside of captures.
    pub fn set_caching(&self, on: bool) {
        self.caching.store(on, Ordering::Release);
    }

    /// Assigns a stream to a class, which decides how many addresses its expandable segments reserve
    /// (`expandable_segments_reserve_by_class`); an empty name removes it. The classes of destroyed streams are removed
    /// by later calls.
    pub fn set_stream_class(&self, stream: StreamId, class: &str) {
        if self.shared.instance().is_inherited() {
            return;
        }
        self.shared.stream_classes().set(&**self.shared.instance().driver(), stream, class);
    }

    /// Checks every invariant of the state. Slow. For tests, while no other thread uses the allocator.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check(&self) {
        if self.shared.instance().is_inherited() {
            return;
        }
        self.devices.iter().for_each(|device| device.read(state::DeviceState::check));
    }

    /// How many streams and blocks have been examined so far to complete deferred frees. For tests.
    #[doc(hidden)]
    pub fn deferred_steps(&self) -> u64 {
        self.devices.iter().map(|device| device.deferred_steps.load(Ordering::Relaxed)).sum()
    }

    fn driver(&self) -> &dyn Driver {
        &**self.shared.instance().driver()
    }

    fn device(&self, device: DeviceId) -> Result<&CachingDevice> {
        let instance = self.shared.instance();
        instance.expect_own_process("allocator call")?;
        let count = instance.device_count();
        self.devices.get(device.0 as usize).ok_or(Error::DeviceOutOfRange { index: device.0, count })
    }

    /// Finds the allocated block that starts at `ptr`, on any device.
    fn locate(&self, ptr: DevicePtr) -> Result<(&CachingDevice, BlockKey)> {
        self.devices
            .iter()
            .find_map(|device| device.read(|state| state.heap().allocated_at(ptr)).map(|block| (device, block)))
            .ok_or(Error::UnknownPointer { ptr })
    }
}

impl fmt::Debug for CachingAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingAllocator").field("instance", self.shared.instance()).finish_non_exhaustive()
    }
}
