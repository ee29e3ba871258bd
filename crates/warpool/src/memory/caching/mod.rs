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
use self::device::CachingDevice;
use self::heap::BlockKey;
use self::stream_classes::StreamClasses;
use super::Settings;
use super::core::AllocatorCore;
use super::report::Ranges;
use crate::{Error, Instance, Result};

/// PyTorch's caching allocator, over any driver. See the [module](crate::memory) for how it is used.
pub struct CachingAllocator {
    shared: Arc<AllocatorCore>,
    devices: Box<[CachingDevice]>,
    /// If false, every request is a driver call.
    caching: AtomicBool,
    bypass: Bypass,
    stream_classes: Arc<StreamClasses>,
}

impl CachingAllocator {
    /// An allocator for all devices of `instance`. Makes no driver call.
    #[must_use]
    pub fn new(instance: &Instance, settings: Settings) -> Self {
        let (shared, stream_classes) = (AllocatorCore::new(instance, settings), Arc::default());
        shared.observers.show_ranges(Ranges::Segments);
        let devices = instance.devices().map(|device| CachingDevice::new(&shared, &device, &stream_classes)).collect();
        Self { shared, devices, caching: AtomicBool::new(true), bypass: Bypass::default(), stream_classes }
    }

    /// Assigns a stream to a class, which decides how many addresses its expandable segments reserve
    /// (`expandable_segments_reserve_by_class`); an empty name removes it. The classes of destroyed streams are removed
    /// by later calls.
    pub fn set_stream_class(&self, stream: StreamId, class: &str) {
        if self.shared.instance.is_inherited() {
            return;
        }
        self.stream_classes.set(self.driver(), stream, class);
    }

    /// Checks every invariant of the state. Slow. For tests, while no other thread uses the allocator.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check(&self) {
        if self.shared.instance.is_inherited() {
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
        self.shared.driver()
    }

    fn device(&self, device: DeviceId) -> Result<&CachingDevice> {
        self.shared.device(&self.devices, device)
    }

    /// Finds the allocated block that starts at `ptr`, on any device.
    fn locate(&self, ptr: DevicePtr) -> Result<(&CachingDevice, BlockKey)> {
        self.devices
            .iter()
            .find_map(|device| device.read(|state| state.heap.allocated_at(ptr)).map(|block| (device, block)))
            .ok_or(Error::UnknownPointer { ptr })
    }
}

impl fmt::Debug for CachingAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingAllocator").field("instance", &self.shared.instance).finish_non_exhaustive()
    }
}
