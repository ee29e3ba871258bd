//! cuBLAS: the calling thread's handle, with its stream, workspace and precision set.
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::Instance;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::driver::{BlasMatrix, Copies as _, Sgemm};
//! # use warpool::memory::{Allocate, CachingAllocator, Settings};
//! use warpool::blas::{Blas, BlasSettings, forbid_tf32};
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let blas = Blas::new(&allocator, BlasSettings::default());
//! let stream = device.pool_stream()?;
//! let block = allocator.allocate(3 * 4, &stream)?;
//! instance.driver().upload(device.id(), block.ptr(), &[2.0f32, 3.0, 0.0].map(f32::to_ne_bytes).concat())?;
//!
//! let matrix = |at: u64| BlasMatrix { ptr: block.ptr().offset(4 * at), stride: 1, transposed: false };
//! let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix(0), b: matrix(1), beta: 0.0, c: matrix(2) };
//! let handle = blas.handle_on(&stream)?; // this thread's; from the second call on without a library call
//! handle.sgemm(&product)?;
//!
//! blas.set_tf32(true);
//! let exact = forbid_tf32(); // not in this scope
//! handle.sgemm(&product)?;
//! # drop(exact);
//! let raw = handle.raw()?; // for all other functions of cuBLAS
//! # stream.synchronize()?;
//! # let mut out = [0; 4];
//! # instance.driver().download(device.id(), block.ptr().offset(8), &mut out)?;
//! # assert_eq!(f32::from_ne_bytes(out), 6.0);
//! # drop((handle, raw));
//! # blas.close()
//! # }
//! ```
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::blas::{BareHandle, Blas, BlasSettings, LtHandle, forbid_tf32, is_tf32_forbidden};
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let stream = device.lease_stream()?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let blas = Blas::new(&allocator, BlasSettings::default());
//! let bare: BareHandle = blas.bare(&device)?; // without a workspace of Warpool's
//! let lt: LtHandle = blas.lt_on(&stream)?; // of cuBLASLt, whose workspace is an argument
//! let (_address, bytes) = lt.workspace();
//! assert!(bytes > 0);
//! {
//!     let _guard = forbid_tf32(); // this thread, until it is dropped
//!     assert!(is_tf32_forbidden());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Workspaces
//! The workspace of cuBLAS is a block of the allocator, one per handle and stream, allocated at the first fetch and
//! cached. Its size depends on the device, on [`BlasSettings`] and on [`Blas::set_workspace_bytes`]. It is counted in
//! [`Stats::workspace_bytes`](crate::memory::Stats::workspace_bytes), and a history shows it as "cuBLAS workspace". It
//! is freed by [`Blas::clear_workspaces`]; when the allocator is trimmed and no [`BlasHandle`] uses it; and, once its
//! thread has ended, when the allocator has no cached block for a request. It is never freed while it is in use.
//!
//! For a capturing stream, the workspace comes from the graph's pool and belongs to the graph, for its replays.
//!
//! # Differences from PyTorch
//! - Stream, workspace, math mode and atomics mode are set when they change, not at every fetch.
//! - Workspaces come from the default pool, even if the thread is routed to a [`MemPool`](crate::memory::MemPool): that
//!   pool could not be released otherwise.
//! - A graph owns its workspaces; PyTorch keeps them in its global map, and has to clear them there before the graph's
//!   pool can be freed.
//! - A workspace that another thread clears stays until its user is done.
//! - Atomic operations are forbidden unless [`Blas::set_deterministic`] allows them, as in cuBLAS itself.
//! - cuBLASLt has handles of its own; PyTorch passes those of cuBLAS to it.
//!
//! # Determinism
//! The same call gives the same bits every time under three conditions: atomic operations are forbidden (the default);
//! the library has one workspace of one size per stream, which is always the case here (cuBLAS's own workspaces, of a
//! [bare](Blas::bare) handle, are shared between streams); and it is the same library on the same kind of device, with
//! the same precision.

mod handles;
mod pooled_handle;
mod precision;
mod settings;
mod workspace;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use warpool_driver::{DeviceId, HandleId, Library, StreamId};

use self::pooled_handle::{BlasKind, PooledHandle};
use self::workspace::BlasState;
use crate::handle::{HandlePool, ThreadHandle};
use crate::memory::{ObserverId, SharedAllocator};
use crate::{Device, Instance, Result, Stream};

pub use handles::{BareHandle, BlasHandle, LtHandle};
pub use precision::{Tf32Guard, forbid_tf32, is_tf32_forbidden};
pub use settings::BlasSettings;

/// cuBLAS and cuBLASLt on all devices of an allocator. Cheap to clone; clones share one object.
#[derive(Clone)]
pub struct Blas {
    shared: Arc<Shared>,
}

struct Shared {
    instance: Instance,
    state: Arc<BlasState>,
    handles: HandlePool<BlasKind>,
    lt_handles: HandlePool<BlasKind>,
    observers: [ObserverId; 2],
    warned_of_context: AtomicBool,
    warned_of_lt: AtomicBool,
}

impl Blas {
    /// cuBLAS with workspaces from `allocator`. Loads nothing yet.
    #[must_use]
    pub fn new(allocator: &impl SharedAllocator, settings: BlasSettings) -> Self {
        let allocator = allocator.to_dyn();
        let state = Arc::new(BlasState::new(&allocator, &settings));
        let pool = |library| HandlePool::new(allocator.instance(), BlasKind { library, state: Arc::clone(&state) });
        let (handles, lt_handles) = (pool(Library::Blas), pool(Library::BlasLt));
        let shared = Arc::new_cyclic(|shared: &Weak<Shared>| {
            let observers = allocator.observers();
            let weak_state = Arc::downgrade(&state);
            let on_trim = observers.attach_trim_hook(Arc::new(move |device| {
                if let Some(state) = weak_state.upgrade() {
                    state.clear_unused(device);
                }
            }));
            // Called for every request without a cached block, so it frees only workspaces of idle handles: a live
            // thread would allocate its workspace again at its next call.
            let weak_shared = Weak::clone(shared);
            let under_pressure = observers.attach_pressure_callback(Arc::new(move |device| {
                weak_shared.upgrade().is_some_and(|shared| shared.release_idle(device))
            }));
            Shared {
                instance: allocator.instance().clone(),
                state: Arc::clone(&state),
                handles,
                lt_handles,
                observers: [on_trim, under_pressure],
                warned_of_context: AtomicBool::new(false),
                warned_of_lt: AtomicBool::new(false),
            }
        });
        Self { shared }
    }

    /// The calling thread's handle for `device`, set up for calls on the thread's current stream there.
    pub fn handle(&self, device: &Device) -> Result<BlasHandle> {
        self.shared.instance.expect_same(device.instance(), "the device")?;
        self.shared.fetch(device.id(), device.current_stream_id()?)
    }

    /// The calling thread's handle, set up for calls on `stream`.
    pub fn handle_on(&self, stream: &Stream) -> Result<BlasHandle> {
        self.shared.instance.expect_same(stream.instance(), "the stream")?;
        self.shared.fetch(stream.device_id(), stream.id())
    }

    /// The calling thread's handle for `device` without any set-up, for code that sets everything itself.
    pub fn bare(&self, device: &Device) -> Result<BareHandle> {
        self.shared.instance.expect_same(device.instance(), "the device")?;
        let handle = self.shared.of_thread(&self.shared.handles, device.id())?;
        handle.invalidate();
        Ok(BareHandle { handle })
    }

    /// The calling thread's cuBLASLt handle for `device`, with a workspace for the thread's current stream there.
    pub fn lt(&self, device: &Device) -> Result<LtHandle> {
        self.shared.instance.expect_same(device.instance(), "the device")?;
        self.shared.fetch_lt(device.id(), device.current_stream_id()?)
    }

    /// The calling thread's cuBLASLt handle, with a workspace for `stream`.
    pub fn lt_on(&self, stream: &Stream) -> Result<LtHandle> {
        self.shared.instance.expect_same(stream.instance(), "the stream")?;
        self.shared.fetch_lt(stream.device_id(), stream.id())
    }

    /// The size of a cuBLAS workspace on `device`.
    #[must_use]
    pub fn workspace_bytes(&self, device: &Device) -> u64 {
        self.shared.state.bytes(Library::Blas, device.id())
    }

    /// Sets the size of cuBLAS workspaces on all devices, or resets it to the initial size (`None`). A larger workspace
    /// is allocated at the next fetch of each handle and stream. For a smaller size the memory stays, and less of it is
    /// used.
    pub fn set_workspace_bytes(&self, bytes: Option<u64>) {
        self.shared.state.set_bytes(bytes);
    }

    /// Frees all workspaces except those of graphs, and returns how many. Those in use are freed when their users are
    /// done.
    pub fn clear_workspaces(&self) -> usize {
        self.shared.state.clear(|_, _| true)
    }

    /// Frees the workspaces of one stream, and returns how many.
    pub fn clear_workspaces_of(&self, stream: &Stream) -> Result<usize> {
        self.shared.instance.expect_same(stream.instance(), "the stream")?;
        Ok(self.shared.state.clear(|_, of| of == stream.id()))
    }

    /// Whether matrix multiplications may round their inputs to TF32, with 10 bits of mantissa. A thread can forbid it
    /// for a scope with [`forbid_tf32`].
    #[must_use]
    pub fn tf32(&self) -> bool {
        self.shared.state.tf32().load(Ordering::Relaxed)
    }

    /// Allows or forbids TF32. It takes effect at every thread's next fetch or call.
    pub fn set_tf32(&self, allowed: bool) {
        self.shared.state.tf32().store(allowed, Ordering::Relaxed);
    }

    /// Whether atomic operations are forbidden.
    #[must_use]
    pub fn deterministic(&self) -> bool {
        self.shared.state.deterministic().load(Ordering::Relaxed)
    }

    /// If on (the initial setting), atomic operations are forbidden. If off, cuBLAS may use them if they are faster,
    /// and results may differ from run to run. See the [module](self#determinism) for the other conditions.
    pub fn set_deterministic(&self, on: bool) {
        self.shared.state.deterministic().store(on, Ordering::Relaxed);
    }

    /// How many cuBLAS handles there are on `device`, in use and idle.
    #[must_use]
    pub fn handles_alive(&self, device: &Device) -> usize {
        self.shared.handles.alive(device)
    }

    /// Frees all workspaces and destroys the idle handles and the calling thread's own. From now on every fetch, also
    /// of a clone, fails with [`Error::HandlePoolClosed`](crate::Error::HandlePoolClosed). Handles of other threads are
    /// leaked when those end, and until then keep the [`Instance`] from being [closed](crate::Instance::close).
    pub fn close(self) -> Result<()> {
        self.shared.state.close();
        let outcome = self.shared.handles.clone().close();
        outcome.and(self.shared.lt_handles.clone().close())
    }
}

impl Shared {
    #[inline]
    fn fetch(&self, device: DeviceId, stream: StreamId) -> Result<BlasHandle> {
        let handle = self.of_thread(&self.handles, device)?;
        let workspace = handle.set_up(stream)?;
        Ok(BlasHandle { handle, stream, workspace: workspace.into() })
    }

    fn fetch_lt(&self, device: DeviceId, stream: StreamId) -> Result<LtHandle> {
        let handle = self.of_thread(&self.lt_handles, device)?;
        if !self.state.unified {
            let workspace = handle.workspace(stream)?;
            return Ok(LtHandle { handle, stream, workspace });
        }
        let mut workspace = self.of_thread(&self.handles, device)?.workspace(stream)?;
        let wanted = self.state.lt_bytes;
        if wanted > workspace.bytes && !self.warned_of_lt.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                wanted,
                bytes = workspace.bytes,
                "the workspace of cuBLASLt is limited to that of cuBLAS, which it shares; \
                 enlarge that one, or turn unified workspaces off"
            );
        }
        workspace.bytes = workspace.bytes.min(wanted);
        if workspace.bytes == 0 {
            workspace.workspace = None;
        }
        Ok(LtHandle { handle, stream, workspace })
    }

    /// The calling thread's handle. From the second call on, this takes no lock and makes no driver call.
    #[inline]
    fn of_thread(&self, pool: &HandlePool<BlasKind>, device: DeviceId) -> Result<ThreadHandle<PooledHandle>> {
        match pool.owned(device) {
            Some(handle) => Ok(handle),
            None => self.first_of_thread(pool, device),
        }
    }

    /// The calling thread's first handle for a device. Binds the device's primary context to a thread without one: the
    /// user's own calls of cuBLAS need it.
    fn first_of_thread(&self, pool: &HandlePool<BlasKind>, device: DeviceId) -> Result<ThreadHandle<PooledHandle>> {
        let driver = self.instance.driver();
        if driver.current_device()?.is_none() {
            driver.set_current_device(device)?;
            if !self.warned_of_context.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    %device,
                    "a thread without a context fetches a cuBLAS handle; the device's primary context is bound to it"
                );
            }
        }
        pool.current(&Device::from_id(&self.instance, device))
    }

    /// Frees the workspaces of idle handles; returns whether there were any.
    fn release_idle(&self, device: DeviceId) -> bool {
        let mut idle: Vec<HandleId> = Vec::new();
        for pool in [&self.handles, &self.lt_handles] {
            pool.for_each_idle(&Device::from_id(&self.instance, device), |handle| idle.push(handle.id()));
        }
        !idle.is_empty() && self.state.clear(|handle, _| idle.contains(&handle)) > 0
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.instance.is_inherited() {
            return;
        }
        for id in self.observers {
            self.state.allocator.observers().detach(id);
        }
        // Threads own their handles, and thereby this state, until they end.
        self.state.clear(|_, _| true);
    }
}

impl fmt::Debug for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blas").field("instance", &self.shared.instance).finish_non_exhaustive()
    }
}
