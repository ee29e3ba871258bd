//! What callers get: a handle that is ready for products, one of cuBLASLt, and a bare one.

use std::cell::RefCell;
use std::fmt;

use warpool_driver::{DevicePtr, HandleId, RawHandle, Sgemm, StreamId};

use super::pooled::PooledHandle;
use super::workspace::Lent;
use crate::Result;
use crate::handle::ThreadHandle;

/// The calling thread's cuBLAS handle, ready for products on one stream.
///
/// It holds on to its workspace: whoever clears workspaces meanwhile does not take it away. It stays on its thread:
/// ```compile_fail,E0277
/// # fn on_another_thread(blas: &warpool::blas::Blas, device: &warpool::Device) {
/// let handle = blas.handle(device).unwrap();
/// std::thread::spawn(move || handle.raw());
/// # }
/// ```
///
/// The thread has one handle per device. A second fetch for another stream points it there; calls through the first are
/// still right, since they point it back. What was got by [`raw`](Self::raw) is not: ask for it again after a fetch for
/// another stream, after a capture began or ended, after precision, determinism or the size of workspaces was changed,
/// and in and after a scope of [`forbid_tf32`](super::forbid_tf32).
pub struct BlasHandle {
    pub(super) handle: ThreadHandle<PooledHandle>,
    pub(super) stream: StreamId,
    pub(super) lent: RefCell<Lent>,
}

impl BlasHandle {
    /// Its name for the driver.
    #[must_use]
    pub fn id(&self) -> HandleId {
        self.handle.id()
    }

    /// The stream that it multiplies on.
    #[must_use]
    pub fn stream_id(&self) -> StreamId {
        self.stream
    }

    /// Where its workspace starts, and how much of it the library may use; null and 0 if there is none.
    #[must_use]
    pub fn workspace(&self) -> (DevicePtr, u64) {
        let lent = self.lent.borrow();
        (lent.ptr(), lent.bytes)
    }

    /// cuBLAS's own handle, for its own functions. It is good as long as this is kept. Leave stream, workspace, math
    /// mode and atomics mode as they are; whoever wants to set them takes a [bare](super::Blas::bare) handle.
    pub fn raw(&self) -> Result<RawHandle> {
        self.set_up()?;
        self.handle.raw()
    }

    /// Multiplies, in the order of its stream. Scopes and captures count as they are now, not as they were at the
    /// fetch.
    pub fn sgemm(&self, product: &Sgemm) -> Result<()> {
        self.set_up()?;
        let outcome = self.handle.driver().blas_sgemm(self.id(), product);
        if outcome.is_err() {
            // What it was told may be the reason: a driver makes it leave a stream that was to go, also if that stays
            // after all.
            self.handle.forget();
        }
        Ok(outcome?)
    }

    #[inline]
    fn set_up(&self) -> Result<()> {
        if self.handle.is_set_up(self.stream, &self.lent.borrow()) {
            return Ok(());
        }
        let lent = self.handle.set_up(self.stream)?;
        // What was there before may have been cleared; it goes here, without a borrow.
        drop(self.lent.replace(lent));
        Ok(())
    }
}

impl fmt::Debug for BlasHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuBLAS {} on {}", self.id(), self.stream)
    }
}

/// The calling thread's cuBLASLt handle, with memory to work in on one stream.
///
/// cuBLASLt is told stream and workspace at every call. Fetch again for another stream, and after a capture began or
/// ended.
pub struct LtHandle {
    pub(super) handle: ThreadHandle<PooledHandle>,
    pub(super) stream: StreamId,
    pub(super) lent: Lent,
}

impl LtHandle {
    /// Its name for the driver.
    #[must_use]
    pub fn id(&self) -> HandleId {
        self.handle.id()
    }

    /// The stream that the workspace is for.
    #[must_use]
    pub fn stream_id(&self) -> StreamId {
        self.stream
    }

    /// Where its workspace starts, and how much of it is to be used; null and 0 if there is none. It is there as long
    /// as this is kept.
    #[must_use]
    pub fn workspace(&self) -> (DevicePtr, u64) {
        (self.lent.ptr(), self.lent.bytes)
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

/// The calling thread's cuBLAS handle as whoever used it last left it: with any stream, and with a workspace that may
/// be gone. Set both before the first product.
pub struct BareHandle {
    pub(super) handle: ThreadHandle<PooledHandle>,
}

impl BareHandle {
    /// Its name for the driver.
    #[must_use]
    pub fn id(&self) -> HandleId {
        self.handle.id()
    }

    /// cuBLAS's own handle. Stream, workspace, math mode and atomics mode that are set through it do not last: the
    /// thread's next fetch sets them again. Whatever else is set, such as the pointer mode, lasts, and for the next
    /// thread too: put it back.
    pub fn raw(&self) -> Result<RawHandle> {
        // Also after a fetch in between.
        self.handle.forget();
        self.handle.raw()
    }
}

impl fmt::Debug for BareHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuBLAS {}, bare", self.id())
    }
}
