//! Decorators: allocators that wrap another allocator and add one thing, as RMM's resource adaptors do. [`Limited`]
//! caps the allocated bytes, [`Traced`] passes every call to a function.
//!
//! They nest: `Traced::new(&Arc::new(Limited::new(&caching, cap)), log)`. A block keeps the outermost allocator, the
//! one that it was requested from, so its free passes through all decorators. Private pools belong to the innermost
//! allocator, and calls about them go directly there. Allocation at a given address, checkpoints and the hot path would
//! bypass the decorator, and are not forwarded.
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use std::sync::atomic::{AtomicU64, Ordering};
//! use warpool::memory::OomCause;
//! use warpool::memory::decorate::{AllocatorCall, Limited, Traced};
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let stream = device.lease_stream()?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let limited = Arc::new(Limited::new(&allocator, 1 << 20));
//! let frees = Arc::new(AtomicU64::new(0));
//! let counter = frees.clone();
//! let traced = Arc::new(Traced::new(&limited, move |call, _error| {
//!     if let AllocatorCall::Free(_) = call {
//!         counter.fetch_add(1, Ordering::Relaxed);
//!     }
//! }));
//!
//! drop(traced.allocate(1 << 20, &stream)?);
//! assert_eq!(frees.load(Ordering::Relaxed), 1);
//! match traced.allocate(2 << 20, &stream) {
//!     Err(warpool::Error::OutOfMemory(report)) => assert!(matches!(report.cause, OomCause::Cap { .. })),
//!     other => panic!("{other:?}"),
//! }
//! # Ok(())
//! # }
//! ```

mod limited;
mod traced;

use std::fmt;
use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{
    Allocation, DeviceAllocator, GraphKey, HistoryOptions, MappedPart, MemPoolId, Observers, PageStats, PrivatePools,
    Request, Settings, Snapshot, SnapshotOptions, Stats, Usage,
};
use crate::ledger::LedgerPages;
use crate::unwind::{OnUnwind, call_each};
use crate::{Error, Instance, Result};

pub use limited::Limited;
pub use traced::Traced;

/// An allocator that wraps another one. Every implementation is a [`DeviceAllocator`]: methods that are not listed here
/// are forwarded.
///
/// # Safety
/// The result of [`on_allocate`](Self::on_allocate) must satisfy the contract of [`DeviceAllocator`]. The inner
/// allocator's result for the same request does.
#[expect(unsafe_code, reason = "nothing can check what an implementation returns")]
pub unsafe trait Decorator: fmt::Debug + Send + Sync {
    /// What [`DeviceAllocator::name`] returns.
    fn decorator_name(&self) -> &'static str;

    /// The wrapped allocator.
    fn inner(&self) -> &Arc<dyn DeviceAllocator>;

    /// Replaces [`allocate_raw`](DeviceAllocator::allocate_raw).
    fn on_allocate(&self, request: Request) -> Result<Allocation> {
        self.inner().allocate_raw(request)
    }

    /// Replaces all frees. Must not call the driver for [`FreeCall::Dropped`].
    fn on_free(&self, free: FreeCall) -> Result<()> {
        free.forward(&**self.inner())
    }

    /// Runs after each call that [`AllocatorCall`] lists, with its error if it failed. If it panics, a block that was
    /// just allocated is freed, and a free stays done.
    fn after(&self, call: &AllocatorCall, error: Option<&Error>) {
        let _ = (call, error);
    }
}

/// Which of the frees was called, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeCall {
    /// [`free_raw`](DeviceAllocator::free_raw).
    Raw(DevicePtr),
    /// [`free`](DeviceAllocator::free).
    Owned(Allocation),
    /// [`free_later`](DeviceAllocator::free_later): a destructor, so no driver call, and errors are ignored.
    Dropped(Allocation),
}

impl FreeCall {
    /// The address.
    #[must_use]
    pub const fn ptr(self) -> DevicePtr {
        match self {
            Self::Raw(ptr) => ptr,
            Self::Owned(allocation) | Self::Dropped(allocation) => allocation.ptr,
        }
    }

    /// The allocation, if the caller passed it.
    #[must_use]
    pub const fn allocation(self) -> Option<Allocation> {
        match self {
            Self::Raw(_) => None,
            Self::Owned(allocation) | Self::Dropped(allocation) => Some(allocation),
        }
    }

    /// Makes the same call on `allocator`.
    pub fn forward(self, allocator: &dyn DeviceAllocator) -> Result<()> {
        match self {
            Self::Raw(ptr) => allocator.free_raw(ptr),
            Self::Owned(allocation) => allocator.free(allocation),
            Self::Dropped(allocation) => {
                allocator.free_later(allocation);
                Ok(())
            }
        }
    }
}

/// A call of [`DeviceAllocator`] that decorators see.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum AllocatorCall {
    /// [`allocate_raw`](DeviceAllocator::allocate_raw).
    Allocate {
        /// The argument.
        request: Request,
        /// The result, unless it failed.
        allocation: Option<Allocation>,
    },
    /// One of the frees.
    Free(FreeCall),
    /// [`record_use_raw`](DeviceAllocator::record_use_raw) or [`record_use`](DeviceAllocator::record_use).
    RecordUse {
        /// The block.
        ptr: DevicePtr,
        /// The stream that uses it.
        stream: StreamId,
    },
    /// [`trim`](DeviceAllocator::trim).
    Trim {
        /// Which device.
        device: DeviceId,
        /// Which pool.
        pool: MemPoolId,
        /// How many bytes were returned to the driver.
        bytes: u64,
    },
}

/// If the thread is already unwinding, a panic of [`after`](Decorator::after) is caught here.
fn finish<T>(decorator: &impl Decorator, call: &AllocatorCall, outcome: Result<T>) -> Result<T> {
    let error = outcome.as_ref().err();
    if std::thread::panicking() {
        call_each([call], |call| decorator.after(call, error));
    } else {
        decorator.after(call, error);
    }
    outcome
}

fn free(decorator: &impl Decorator, free: FreeCall) -> Result<()> {
    if decorator.inner().instance().is_inherited() {
        return Ok(());
    }
    finish(decorator, &AllocatorCall::Free(free), decorator.on_free(free))
}

/// Methods that are forwarded to the inner allocator.
macro_rules! forward {
    ($($method:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        fn $method(&self, $($arg: $ty),*) -> $ret {
            self.inner().$method($($arg),*)
        }
    )*};
}

#[expect(unsafe_code, reason = "the promise of `DeviceAllocator`")]
// SAFETY: that is what a `Decorator` promises.
unsafe impl<D: Decorator> DeviceAllocator for D {
    fn name(&self) -> &'static str {
        self.decorator_name()
    }

    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        self.instance().expect_own_process("allocate")?;
        let outcome = self.on_allocate(request);
        let allocation = outcome.as_ref().ok().copied();
        // After a panic no caller owns the block.
        let unwinds = OnUnwind::new(|| {
            call_each(allocation, |allocation| drop(self.on_free(FreeCall::Dropped(allocation))));
        });
        let outcome = finish(self, &AllocatorCall::Allocate { request, allocation }, outcome);
        unwinds.disarm();
        outcome
    }

    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        free(self, FreeCall::Raw(ptr))
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        free(self, FreeCall::Owned(allocation))
    }

    fn free_later(&self, allocation: Allocation) {
        // A destructor cannot report an error.
        let _ = free(self, FreeCall::Dropped(allocation));
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        finish(self, &AllocatorCall::RecordUse { ptr, stream }, self.inner().record_use_raw(ptr, stream))
    }

    fn record_use(&self, allocation: Allocation, stream: StreamId) -> Result<()> {
        let call = AllocatorCall::RecordUse { ptr: allocation.ptr, stream };
        finish(self, &call, self.inner().record_use(allocation, stream))
    }

    fn record_uses_later(&self, allocation: Allocation, streams: &[StreamId]) {
        if self.instance().is_inherited() {
            return;
        }
        self.inner().record_uses_later(allocation, streams);
        call_each(streams, |&stream| {
            let _ = finish(self, &AllocatorCall::RecordUse { ptr: allocation.ptr, stream }, Ok(()));
        });
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let outcome = self.inner().trim(device, pool);
        let bytes = outcome.as_ref().map_or(0, |&bytes| bytes);
        finish(self, &AllocatorCall::Trim { device, pool, bytes }, outcome)
    }

    forward! {
        find(ptr: DevicePtr) -> Result<Allocation>;
        release_idle(device: DeviceId) -> Result<u64>;
        share(pages: &Arc<dyn LedgerPages>) -> Result<()>;
        largest_available(device: DeviceId) -> Result<u64>;
        set_memory_fraction(device: DeviceId, fraction: f64) -> Result<()>;
        memory_fraction(device: DeviceId) -> Result<f64>;
        annotate(ptr: DevicePtr, text: &str) -> Result<()>;
        mapped_parts(ptr: DevicePtr) -> Result<Vec<MappedPart>>;
        maps_memory() -> bool;
        enable_peer_access(device: DeviceId, owner: DeviceId) -> Result<()>;
        set_memory_cap(device: DeviceId, bytes: Option<u64>) -> Result<()>;
        settings() -> Arc<Settings>;
        set_settings(settings: Settings) -> Result<()>;
        set_caching(on: bool) -> Result<()>;
        page_stats(device: DeviceId) -> Result<PageStats>;
        stats(device: DeviceId) -> Result<Stats>;
        usage(device: DeviceId) -> Result<Usage>;
        reset_peak_stats(device: DeviceId) -> Result<()>;
        reset_accumulated_stats(device: DeviceId) -> Result<()>;
        snapshot(options: SnapshotOptions) -> Result<Snapshot>;
        record_history(options: Option<HistoryOptions>) -> Result<()>;
        instance() -> &Instance;
        observers() -> &Observers;
        pools() -> Result<&dyn PrivatePools>;
        hold(allocation: Allocation, key: GraphKey) -> Result<()>;
        end_hold(allocation: Allocation, key: GraphKey) -> ();
    }
}
