//! The handles that callers get: of cuBLAS, ready for calls; of cuBLASLt; and bare cuBLAS handles without any set-up.

use std::cell::RefCell;
use std::fmt;

use warpool_driver::{DevicePtr, HandleId, RawHandle, Sgemm, StreamId};

use super::pooled_handle::PooledHandle;
use super::workspace::WorkspaceRef;
use crate::Result;
use crate::handle::ThreadHandle;

/// The calling thread's cuBLAS handle, set up for calls on one stream.
///
/// It keeps its workspace alive, even if workspaces are cleared meanwhile. It stays on its thread:
/// ```compile_fail,E0277
/// # fn on_another_thread(blas: &warpool::blas::Blas, device: &warpool::Device) {
/// let handle = blas.handle(device).unwrap();
/// std::thread::spawn(move || handle.raw());
/// # }
/// ```
///
/// The thread has one handle per device. A second fetch for another stream sets that stream; calls through the first
/// `BlasHandle` are still correct, since they set their own stream again. Calls through [`raw`](Self::raw) are not:
/// fetch the handle again after a fetch for another stream, after a capture began or ended, after precision,
/// determinism or the size of workspaces has changed, and inside and after a scope of
/// [`forbid_tf32`](super::forbid_tf32).
pub struct BlasHandle {
    pub(super) handle: ThreadHandle<PooledHandle>,
    pub(super) stream: StreamId,
    pub(super) workspace: RefCell<WorkspaceRef>,
}

impl BlasHandle {
    /// The driver's id of it.
    #[must_use]
    pub fn id(&self) -> HandleId {
        self.handle.id()
    }

    /// The stream that its calls run on.
    #[must_use]
    pub fn stream_id(&self) -> StreamId {
        self.stream
    }

    /// Where its workspace starts, and how much of it the library may use; null and 0 if there is none.
    #[must_use]
    pub fn workspace(&self) -> (DevicePtr, u64) {
        let workspace = self.workspace.borrow();
        (workspace.ptr(), workspace.bytes)
    }

    /// cuBLAS's own handle, for its own functions. Valid while this is kept. Do not change its stream, workspace, math
    /// mode or atomics mode; for that there is a [bare](super::Blas::bare) handle.
    pub fn raw(&self) -> Result<RawHandle> {
        self.set_up()?;
        self.handle.raw()
    }

    /// Multiplies matrices in its stream. Guards and captures apply as they are at this call, not as they were at the
    /// fetch.
    pub fn sgemm(&self, product: &Sgemm) -> Result<()> {
        self.set_up()?;
        let outcome = self.handle.driver().blas_sgemm(self.id(), product);
        if outcome.is_err() {
            // The settings may be the cause: a driver resets the stream of a handle when that stream is to be
            // destroyed, even if the destruction then fails.
            self.handle.invalidate();
        }
        Ok(outcome?)
    }

    #[inline]
    fn set_up(&self) -> Result<()> {
        if self.handle.is_set_up(self.stream, &self.workspace.borrow()) {
            return Ok(());
        }
        let workspace = self.handle.set_up(self.stream)?;
        // The old workspace may have been cleared; it is then freed here, without a borrow.
        drop(self.workspace.replace(workspace));
        Ok(())
    }
}

impl fmt::Debug for BlasHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuBLAS {} on {}", self.id(), self.stream)
    }
}

/// The calling thread's cuBLASLt handle, with a workspace for one stream.
///
/// cuBLASLt takes stream and workspace at every call. Fetch again for another stream, and after a capture began or
/// ended.
pub struct LtHandle {
    pub(super) handle: ThreadHandle<PooledHandle>,
    pub(super) stream: StreamId,
    pub(super) workspace: WorkspaceRef,
}

impl LtHandle {
    /// The driver's id of it.
    #[must_use]
    pub fn id(&self) -> HandleId {
        self.handle.id()
    }

    /// The stream that the workspace is for.
    #[must_use]
    pub fn stream_id(&self) -> StreamId {
        self.stream
    }

    /// Where its workspace starts, and how much of it may be used; null and 0 if there is none. Valid while this is
    /// kept.
    #[must_use]
    pub fn workspace(&self) -> (DevicePtr, u64) {
        (self.workspace.ptr(), self.workspace.bytes)
    }

    /// cuBLASLt's own handle, for its own functions.
    pub fn raw(&self) -> Result<RawHandle> {
        self.handle.raw()
    }
}

impl fmt::Debug for LtHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuBLASLt {} for {}", self.id(), self.stream)
    }
}

/// The calling thread's cuBLAS handle as its last user left it: with any stream, and with a workspace that may already
/// be freed. Set both before the first call.
pub struct BareHandle {
    pub(super) handle: ThreadHandle<PooledHandle>,
}

impl BareHandle {
    /// The driver's id of it.
    #[must_use]
    pub fn id(&self) -> HandleId {
        self.handle.id()
    }

    /// cuBLAS's own handle. Stream, workspace, math mode and atomics mode that are set through it last until the
    /// thread's next fetch. Everything else, such as the pointer mode, stays, even for the handle's next thread:
    /// restore it.
    pub fn raw(&self) -> Result<RawHandle> {
        // Repeated, as there may have been a fetch in between.
        self.handle.invalidate();
        self.handle.raw()
    }
}

impl fmt::Debug for BareHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuBLAS {}, bare", self.id())
    }
}
