//! Allocators around allocators, each of which adds one thing: [`Limited`], [`Traced`], [`Counted`],
//! [`FailureCallback`].
//!
//! The rule: a layer says what it does about a request, about memory that comes back, and after every call; all else
//! goes through unchanged, and every method of [`DeviceAllocator`] stands here once. They nest:
//! `Traced::new(Limited::new(caching, cap), sink)`.
//!
//! Blocks remember the outermost allocator, the one that they were asked of: freed, they pass through all layers again.
//! Private pools belong to the innermost one, and calls about them go straight there.

mod counted;
mod failure;
mod held;
mod limited;
mod traced;

use std::fmt;
use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{
    Allocation, DeviceAllocator, HistoryOptions, MemPoolId, Observers, PoolKeeper, Request, Snapshot, SnapshotOptions,
    Stats,
};
use crate::{Error, Instance, Result};

pub use counted::{Counted, Counts};
pub use failure::FailureCallback;
pub use limited::Limited;
pub use traced::{CallSink, Traced, TracingSink};

/// One thing to add to an allocator. Whatever implements it is a [`DeviceAllocator`].
///
/// Its methods are called in the place of the inner allocator's, and call those. As destructors free memory too,
/// [`take_back`](Self::take_back) must not call the driver for [`GivenBack::Later`].
pub trait Layer: fmt::Debug + Send + Sync {
    /// What [`DeviceAllocator::name`] says.
    fn title(&self) -> &'static str;

    /// What it is around.
    fn inner(&self) -> &Arc<dyn DeviceAllocator>;

    /// Meets a request.
    fn give(&self, request: Request) -> Result<Allocation> {
        self.inner().allocate_raw(request)
    }

    /// Takes memory back.
    fn take_back(&self, what: GivenBack) -> Result<()> {
        what.pass_to(&**self.inner())
    }

    /// A call was made, of any kind, and failed or not.
    fn after(&self, call: &AllocatorCall, error: Option<&Error>) {
        let _ = (call, error);
    }
}

/// Memory on its way back, as its owner names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBack {
    /// By where it starts.
    At(DevicePtr),
    /// By where it starts, and its device.
    On(DeviceId, DevicePtr),
    /// By what the allocator gave.
    Owned(Allocation),
    /// The same, by a destructor: nothing may call the driver, and nobody hears of a failure.
    Later(Allocation),
}

impl GivenBack {
    /// Where it starts.
    #[must_use]
    pub const fn ptr(self) -> DevicePtr {
        match self {
            Self::At(ptr) | Self::On(_, ptr) => ptr,
            Self::Owned(allocation) | Self::Later(allocation) => allocation.ptr,
        }
    }

    /// Gives it to `allocator`, the same way.
    pub fn pass_to(self, allocator: &dyn DeviceAllocator) -> Result<()> {
        match self {
            Self::At(ptr) => allocator.free_raw(ptr),
            Self::On(device, ptr) => allocator.free_on(device, ptr),
            Self::Owned(allocation) => allocator.free(allocation),
            Self::Later(allocation) => {
                allocator.free_later(allocation);
                Ok(())
            }
        }
    }
}

/// A call of [`DeviceAllocator`], as layers see it.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "they are the arguments of the methods of the same names")]
#[non_exhaustive]
pub enum AllocatorCall {
    /// [`allocate_raw`](DeviceAllocator::allocate_raw), and what it gave.
    Allocate { request: Request, given: Option<Allocation> },
    /// [`free_raw`](DeviceAllocator::free_raw), [`free_on`](DeviceAllocator::free_on), [`free`](DeviceAllocator::free),
    /// [`free_later`](DeviceAllocator::free_later).
    Free { what: GivenBack },
    /// [`record_use_raw`](DeviceAllocator::record_use_raw), [`record_use`](DeviceAllocator::record_use).
    RecordUse { ptr: DevicePtr, stream: StreamId },
    /// [`find`](DeviceAllocator::find).
    Find { ptr: DevicePtr },
    /// [`trim`](DeviceAllocator::trim), and how many bytes it gave back.
    Trim { device: DeviceId, pool: MemPoolId, bytes: u64 },
    /// [`largest_available`](DeviceAllocator::largest_available).
    LargestAvailable { device: DeviceId },
    /// [`set_memory_fraction`](DeviceAllocator::set_memory_fraction).
    SetMemoryFraction { device: DeviceId, fraction: f64 },
    /// [`memory_fraction`](DeviceAllocator::memory_fraction).
    MemoryFraction { device: DeviceId },
    /// [`stats`](DeviceAllocator::stats).
    Stats { device: DeviceId },
    /// [`reset_peak_stats`](DeviceAllocator::reset_peak_stats).
    ResetPeakStats { device: DeviceId },
    /// [`reset_accumulated_stats`](DeviceAllocator::reset_accumulated_stats).
    ResetAccumulatedStats { device: DeviceId },
    /// [`snapshot`](DeviceAllocator::snapshot).
    Snapshot { options: SnapshotOptions },
    /// [`record_history`](DeviceAllocator::record_history).
    RecordHistory { on: bool },
}

/// Tells a layer of a call that was made.
fn told<T>(layer: &impl Layer, call: AllocatorCall, outcome: Result<T>) -> Result<T> {
    layer.after(&call, outcome.as_ref().err());
    outcome
}

impl<L: Layer> DeviceAllocator for L {
    fn name(&self) -> &'static str {
        self.title()
    }

    fn instance(&self) -> &Instance {
        self.inner().instance()
    }

    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        let outcome = self.give(request);
        told(self, AllocatorCall::Allocate { request, given: outcome.as_ref().ok().copied() }, outcome)
    }

    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        let what = GivenBack::At(ptr);
        told(self, AllocatorCall::Free { what }, self.take_back(what))
    }

    fn free_on(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        let what = GivenBack::On(device, ptr);
        told(self, AllocatorCall::Free { what }, self.take_back(what))
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        let what = GivenBack::Owned(allocation);
        told(self, AllocatorCall::Free { what }, self.take_back(what))
    }

    fn free_later(&self, allocation: Allocation) {
        let what = GivenBack::Later(allocation);
        // Nobody hears of it but the layer.
        let _ = told(self, AllocatorCall::Free { what }, self.take_back(what));
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        told(self, AllocatorCall::RecordUse { ptr, stream }, self.inner().record_use_raw(ptr, stream))
    }

    fn record_use(&self, allocation: Allocation, stream: StreamId) -> Result<()> {
        let call = AllocatorCall::RecordUse { ptr: allocation.ptr, stream };
        told(self, call, self.inner().record_use(allocation, stream))
    }

    fn find(&self, ptr: DevicePtr) -> Result<Allocation> {
        told(self, AllocatorCall::Find { ptr }, self.inner().find(ptr))
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let outcome = self.inner().trim(device, pool);
        told(self, AllocatorCall::Trim { device, pool, bytes: outcome.as_ref().map_or(0, |&bytes| bytes) }, outcome)
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        told(self, AllocatorCall::LargestAvailable { device }, self.inner().largest_available(device))
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        let outcome = self.inner().set_memory_fraction(device, fraction);
        told(self, AllocatorCall::SetMemoryFraction { device, fraction }, outcome)
    }

    fn memory_fraction(&self, device: DeviceId) -> Result<f64> {
        told(self, AllocatorCall::MemoryFraction { device }, self.inner().memory_fraction(device))
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        told(self, AllocatorCall::Stats { device }, self.inner().stats(device))
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        told(self, AllocatorCall::ResetPeakStats { device }, self.inner().reset_peak_stats(device))
    }

    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()> {
        told(self, AllocatorCall::ResetAccumulatedStats { device }, self.inner().reset_accumulated_stats(device))
    }

    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot> {
        told(self, AllocatorCall::Snapshot { options }, self.inner().snapshot(options))
    }

    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()> {
        told(self, AllocatorCall::RecordHistory { on: options.is_some() }, self.inner().record_history(options))
    }

    fn observers(&self) -> &Observers {
        self.inner().observers()
    }

    fn pools(&self) -> Result<&dyn PoolKeeper> {
        self.inner().pools()
    }
}

/// What a layer can be put around: an allocator, or a shared one.
pub trait IntoAllocator {
    /// The allocator, shared.
    fn into_allocator(self) -> Arc<dyn DeviceAllocator>;
}

impl<A: DeviceAllocator + 'static> IntoAllocator for A {
    fn into_allocator(self) -> Arc<dyn DeviceAllocator> {
        Arc::new(self)
    }
}

impl IntoAllocator for Arc<dyn DeviceAllocator> {
    fn into_allocator(self) -> Arc<dyn DeviceAllocator> {
        self
    }
}

impl<A: DeviceAllocator + 'static> IntoAllocator for Arc<A> {
    fn into_allocator(self) -> Arc<dyn DeviceAllocator> {
        self
    }
}
