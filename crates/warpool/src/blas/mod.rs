//! cuBLAS: the calling thread's handle, on the right stream, with memory to work in and the right precision.
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::Instance;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::driver::{BlasMatrix, Copies as _, Sgemm};
//! # use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, Settings};
//! use warpool::blas::{Blas, BlasSettings, forbid_tf32};
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let blas = Blas::new(&allocator, BlasSettings::default());
//! let stream = device.pool_stream()?;
//! let block = allocator.allocate(3 * 4, &stream)?;
//! instance.driver().upload(device.id(), block.ptr(), &[2.0f32, 3.0, 0.0].map(f32::to_ne_bytes).concat())?;
//!
//! let matrix = |at: u64| BlasMatrix { ptr: block.ptr().offset(4 * at), stride: 1, transposed: false };
//! let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix(0), b: matrix(1), beta: 0.0, c: matrix(2) };
//! let handle = blas.handle_on(&stream)?; // this thread's; the second time without a library call
//! handle.sgemm(&product)?;
//!
//! blas.set_tf32(true);
//! let exact = forbid_tf32(); // not in this scope
//! handle.sgemm(&product)?;
//! # drop(exact);
//! let raw = handle.raw()?; // for all else that cuBLAS can do
//! # stream.synchronize()?;
//! # let mut out = [0; 4];
//! # instance.driver().download(device.id(), block.ptr().offset(8), &mut out)?;
//! # assert_eq!(f32::from_ne_bytes(out), 6.0);
//! # drop((handle, raw));
//! # blas.close()
//! # }
//! ```
//!
//! # Workspaces
//! cuBLAS works in a block of our allocator, one per handle and stream, made at the first fetch and kept for the next.
//! Its size goes by the device, by [`BlasSettings`] or by [`Blas::set_workspace_bytes`]. It is counted in
//! [`Stats::workspace_bytes`](crate::memory::Stats::workspace_bytes), and a history shows it as "cuBLAS workspace". It
//! goes by [`Blas::clear_workspaces`]; when the allocator is trimmed and nobody has a [`BlasHandle`] that uses it; and,
//! once its thread has ended, when the allocator finds nothing cached for a request. Never while somebody uses it.
//!
//! While a stream captures for a graph, the workspace comes from the graph's pool and belongs to the graph: replays
//! find it, and it goes when the graph does.
//!
//! # Where it differs from PyTorch
//! - Stream, workspace, math mode and atomics are set when they differ from what the handle last had, not at every
//!   fetch.
//! - Workspaces come from the default pool, also where the thread is routed to a [`MemPool`](crate::memory::MemPool),
//!   which could not die otherwise.
//! - A graph's workspaces are the graph's own; PyTorch keeps them in its map, and has to clear them there for the
//!   graph's pool to die.
//! - A workspace that another thread clears stays until its user is done.
//! - Atomic operations are forbidden unless [`Blas::set_deterministic`] allows them, as in cuBLAS itself.
//! - cuBLASLt has handles of its own; PyTorch passes those of cuBLAS to it.
//!
//! # Determinism
//! The same product gives the same bits every time if atomic operations are forbidden (the default), and if the library
//! works in one workspace of one size on each stream, which is always so here; cuBLAS's own workspaces, of a
//! [bare](Blas::bare) handle, are shared between streams. And it must be the same library on the same kind of device,
//! with the same precision.

mod handles;
mod pooled;
mod precision;
mod settings;
mod workspace;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use warpool_driver::{DeviceId, HandleId, Library, StreamId};

use self::pooled::{BlasKind, PooledHandle};
use self::workspace::Lender;
use crate::handle::{HandlePool, ThreadHandle};
use crate::memory::{DeviceAllocator, ObserverId};
use crate::{Device, Instance, Result, Stream};

pub use handles::{BareHandle, BlasHandle, LtHandle};
pub use precision::{Tf32Guard, forbid_tf32, is_tf32_forbidden};
pub use settings::BlasSettings;

/// cuBLAS and cuBLASLt on all devices of an allocator. Cheap to clone; clones are the same.
#[derive(Clone)]
pub struct Blas {
    shared: Arc<Shared>,
}

struct Shared {
    instance: Instance,
    lender: Arc<Lender>,
    handles: HandlePool<BlasKind>,
    lt_handles: HandlePool<BlasKind>,
    observers: [ObserverId; 2],
    warned_of_context: AtomicBool,
    warned_of_lt: AtomicBool,
}

impl Blas {
    /// cuBLAS with workspaces from `allocator`. Loads nothing yet.
    #[must_use]
    pub fn new(allocator: &Arc<dyn DeviceAllocator>, settings: BlasSettings) -> Self {
        let lender = Arc::new(Lender::new(allocator, &settings));
        let pool = |library| HandlePool::new(allocator.instance(), BlasKind { library, lender: Arc::clone(&lender) });
        let (handles, lt_handles) = (pool(Library::Blas), pool(Library::BlasLt));
        let shared = Arc::new_cyclic(|shared: &Weak<Shared>| {
            let observers = allocator.observers();
            let trimmed = Arc::downgrade(&lender);
            let on_trim = observers.attach_trim_hook(Arc::new(move |device| {
                if let Some(lender) = trimmed.upgrade() {
                    lender.clear_unused(device);
                }
            }));
            // Asked at every request that finds nothing cached, so it takes only what is not missed: the next product
            // of a thread would be the next such request.
            let short = Weak::clone(shared);
            let under_pressure = observers.attach_pressure_callback(Arc::new(move |device| {
                short.upgrade().is_some_and(|shared| shared.release_idle(device))
            }));
            Shared {
                instance: allocator.instance().clone(),
                lender: Arc::clone(&lender),
                handles,
                lt_handles,
                observers: [on_trim, under_pressure],
                warned_of_context: AtomicBool::new(false),
                warned_of_lt: AtomicBool::new(false),
            }
        });
        Self { shared }
    }

    /// The calling thread's handle for `device`, ready for products on the thread's current stream there.
    pub fn handle(&self, device: &Device) -> Result<BlasHandle> {
        self.shared.instance.expect_same(device.instance(), "the device")?;
        self.shared.fetch(device.id(), device.current_stream_id()?)
    }

    /// The same for products on `stream`.
    pub fn handle_on(&self, stream: &Stream) -> Result<BlasHandle> {
        self.shared.instance.expect_same(stream.instance(), "the stream")?;
        self.shared.fetch(stream.device_id(), stream.id())
    }

    /// The calling thread's handle for `device` without any setup, for code that sets everything by itself.
    pub fn bare(&self, device: &Device) -> Result<BareHandle> {
        self.shared.instance.expect_same(device.instance(), "the device")?;
        let handle = self.shared.of_thread(&self.shared.handles, device.id())?;
        handle.forget();
        Ok(BareHandle { handle })
    }

    /// The calling thread's cuBLASLt handle for `device`, with memory for the thread's current stream there.
    pub fn lt(&self, device: &Device) -> Result<LtHandle> {
        self.shared.instance.expect_same(device.instance(), "the device")?;
        self.shared.fetch_lt(device.id(), device.current_stream_id()?)
    }

    /// The same with memory for `stream`.
    pub fn lt_on(&self, stream: &Stream) -> Result<LtHandle> {
        self.shared.instance.expect_same(stream.instance(), "the stream")?;
        self.shared.fetch_lt(stream.device_id(), stream.id())
    }

    /// How large a workspace of cuBLAS is on `device`.
    #[must_use]
    pub fn workspace_bytes(&self, device: &Device) -> u64 {
        self.shared.lender.bytes(Library::Blas, device.id())
    }

    /// Makes workspaces of cuBLAS this large on all devices, or as large as they were at the start (`None`). Larger
    /// ones are made at the next fetch of each handle and stream; for a smaller size the memory stays, and less of it
    /// is used.
    pub fn set_workspace_bytes(&self, bytes: Option<u64>) {
        self.shared.lender.set_bytes(bytes);
    }

    /// Gives back all workspaces, but for those of graphs; how many. Those that are in use go when their users are
    /// done.
    pub fn clear_workspaces(&self) -> usize {
        self.shared.lender.clear(|_, _| true)
    }

    /// The same for one stream.
    pub fn clear_workspaces_of(&self, stream: &Stream) -> Result<usize> {
        self.shared.instance.expect_same(stream.instance(), "the stream")?;
        Ok(self.shared.lender.clear(|_, of| of == stream.id()))
    }

    /// Whether products may round their numbers to TF32, with 10 bits of mantissa. A thread can forbid it for a while
    /// with [`forbid_tf32`].
    #[must_use]
    pub fn tf32(&self) -> bool {
        self.shared.lender.tf32().load(Ordering::Relaxed)
    }

    /// Lets products round their numbers to TF32, or not. Every thread's next fetch or product follows.
    pub fn set_tf32(&self, allowed: bool) {
        self.shared.lender.tf32().store(allowed, Ordering::Relaxed);
    }

    /// Whether atomic operations are forbidden.
    #[must_use]
    pub fn deterministic(&self) -> bool {
        self.shared.lender.deterministic().load(Ordering::Relaxed)
    }

    /// On, as at the start, atomic operations are forbidden; off, cuBLAS may use them where they are faster, and
    /// results may differ from run to run. See the [module](self#determinism) for what else counts.
    pub fn set_deterministic(&self, on: bool) {
        self.shared.lender.deterministic().store(on, Ordering::Relaxed);
    }

    /// How many cuBLAS handles there are on `device`, in use and idle.
    #[must_use]
    pub fn handles_alive(&self, device: &Device) -> usize {
        self.shared.handles.alive(device)
    }

    /// Gives back all workspaces and destroys the idle handles, with the calling thread's own. From here on every fetch
    /// is [`Error::HandlePoolClosed`](crate::Error::HandlePoolClosed), also that of a clone. Handles that other threads
    /// have are leaked when those end, and until then keep the [`Instance`] from being [closed](crate::Instance::close).
    pub fn close(self) -> Result<()> {
        self.shared.lender.close();
        let outcome = self.shared.handles.clone().close();
        outcome.and(self.shared.lt_handles.clone().close())
    }
}

impl Shared {
    #[inline]
    fn fetch(&self, device: DeviceId, stream: StreamId) -> Result<BlasHandle> {
        let handle = self.of_thread(&self.handles, device)?;
        let lent = handle.set_up(stream)?;
        Ok(BlasHandle { handle, stream, lent: lent.into() })
    }

    fn fetch_lt(&self, device: DeviceId, stream: StreamId) -> Result<LtHandle> {
        let handle = self.of_thread(&self.lt_handles, device)?;
        if !self.lender.unified {
            let lent = handle.lend(stream)?;
            return Ok(LtHandle { handle, stream, lent });
        }
        let mut lent = self.of_thread(&self.handles, device)?.lend(stream)?;
        let wanted = self.lender.lt_bytes;
        if wanted > lent.bytes && !self.warned_of_lt.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                wanted,
                bytes = lent.bytes,
                "cuBLASLt wants a larger workspace than cuBLAS has, and shares that one; enlarge cuBLAS's, or give cuBLASLt its own"
            );
        }
        lent.bytes = lent.bytes.min(wanted);
        if lent.bytes == 0 {
            lent.workspace = None;
        }
        Ok(LtHandle { handle, stream, lent })
    }

    /// The calling thread's handle. The second time without a lock and without a driver call.
    #[inline]
    fn of_thread(&self, pool: &HandlePool<BlasKind>, device: DeviceId) -> Result<ThreadHandle<PooledHandle>> {
        match pool.held(device) {
            Some(handle) => Ok(handle),
            None => self.first_of_thread(pool, device),
        }
    }

    /// The calling thread's first handle for a device. A thread without a context gets the device's: users' own calls
    /// of cuBLAS need one.
    fn first_of_thread(&self, pool: &HandlePool<BlasKind>, device: DeviceId) -> Result<ThreadHandle<PooledHandle>> {
        let driver = self.instance.driver();
        if driver.current_device()?.is_none() {
            driver.set_current_device(device)?;
            if !self.warned_of_context.swap(true, Ordering::Relaxed) {
                tracing::warn!(%device, "a thread without a context asks for a cuBLAS handle; it gets the device's primary context");
            }
        }
        pool.current(&Device::known(&self.instance, device))
    }

    /// Lets go of the workspaces whose handles nobody has; whether there were any.
    fn release_idle(&self, device: DeviceId) -> bool {
        let mut idle: Vec<HandleId> = Vec::new();
        for pool in [&self.handles, &self.lt_handles] {
            pool.for_each_idle(&Device::known(&self.instance, device), |handle| idle.push(handle.id()));
        }
        !idle.is_empty() && self.lender.clear(|handle, _| idle.contains(&handle)) > 0
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for id in self.observers {
            self.lender.allocator.observers().detach(id);
        }
        // Threads may hold on to their handles, and so to the lender, until they end.
        self.lender.clear(|_, _| true);
    }
}

impl fmt::Debug for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blas").field("gpu", &self.shared.instance).finish_non_exhaustive()
    }
}
