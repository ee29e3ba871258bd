//! A handle with what it was last told, so that nothing is told twice.
//!
//! [`PooledHandle::set_up`] is the hot path: for a stream that the handle is on already it makes no library call, no
//! driver call, and takes no lock.

use std::cell::{Cell, OnceCell, RefCell};
use std::sync::{Arc, Weak};

use warpool_driver::{BlasMath, CaptureId, DeviceId, DevicePtr, Driver, HandleId, Library, RawHandle, StreamId};

use super::workspace::{Lender, Lent, Workspace};
use crate::capture::CaptureRecord;
use crate::handle::LibraryKind;
use crate::memory::Request;
use crate::{Device, Instance, Result, Stream, lock};

/// Handles of cuBLAS or cuBLASLt, with the workspaces of a lender.
pub(super) struct BlasKind {
    pub(super) library: Library,
    pub(super) lender: Arc<Lender>,
}

impl LibraryKind for BlasKind {
    type Handle = PooledHandle;

    fn name(&self) -> &'static str {
        self.library.name()
    }

    fn create(&self, device: &Device) -> Result<PooledHandle> {
        Ok(PooledHandle {
            instance: device.instance().clone(),
            device: device.id(),
            library: self.library,
            id: device.driver().library_create(self.library, device.id())?,
            lender: Arc::clone(&self.lender),
            raw: OnceCell::new(),
            last: RefCell::new(Last { epoch: Lent::FOR_ONCE, stream: StreamId(0), workspace: None, bytes: 0 }),
            had: Had::default(),
        })
    }

    fn destroy(&self, device: &Device, handle: &PooledHandle) -> Result<()> {
        Ok(device.driver().library_destroy(handle.id)?)
    }
}

/// One handle. Dropping it lets go of its workspaces, and makes no library call.
pub(super) struct PooledHandle {
    instance: Instance,
    device: DeviceId,
    library: Library,
    id: HandleId,
    lender: Arc<Lender>,
    raw: OnceCell<RawHandle>,
    last: RefCell<Last>,
    had: Had,
}

/// The workspace that was lent last, outside of captures. Not held: an idle handle should keep nothing from being
/// trimmed.
struct Last {
    epoch: u64,
    stream: StreamId,
    /// `None` is none at all.
    workspace: Option<Weak<Workspace>>,
    bytes: u64,
}

/// What the library was last told; `None` is unknown.
struct Had {
    stream: Cell<Option<StreamId>>,
    workspace: Cell<Option<(DevicePtr, u64)>>,
    math: Cell<Option<BlasMath>>,
    atomics: Cell<Option<bool>>,
}

impl Default for Had {
    /// As handles are made.
    fn default() -> Self {
        Self {
            stream: Cell::new(None),
            workspace: Cell::new(None),
            math: Cell::new(Some(BlasMath::Default)),
            atomics: Cell::new(Some(false)),
        }
    }
}

impl Had {
    #[inline]
    fn is(&self, stream: StreamId, lent: &Lent, lender: &Lender) -> bool {
        self.stream.get() == Some(stream)
            && self.workspace.get() == Some((lent.ptr(), lent.bytes))
            && self.math.get() == Some(lender.math())
            && self.atomics.get() == Some(lender.atomics())
    }
}

impl PooledHandle {
    pub(super) fn id(&self) -> HandleId {
        self.id
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    /// The library's own handle, asked for once.
    pub(super) fn raw(&self) -> Result<RawHandle> {
        if let Some(&raw) = self.raw.get() {
            return Ok(raw);
        }
        let raw = self.driver().library_raw(self.id)?;
        Ok(*self.raw.get_or_init(|| raw))
    }

    /// Somebody else may tell it things from here on: the next set-up tells it everything again.
    pub(super) fn forget(&self) {
        self.had.stream.set(None);
        self.had.workspace.set(None);
        self.had.math.set(None);
        self.had.atomics.set(None);
    }

    /// Makes it ready for products on `stream`, with the workspace that is returned.
    #[inline]
    pub(super) fn set_up(&self, stream: StreamId) -> Result<Lent> {
        let lent = self.lend(stream)?;
        self.tell(stream, &lent)?;
        Ok(lent)
    }

    /// Whether it still is as [`set_up`](Self::set_up) left it when it lent `lent`. Cheaper than another one, since
    /// `lent` is held.
    #[inline]
    pub(super) fn is_set_up(&self, stream: StreamId, lent: &Lent) -> bool {
        self.instance.captures().none() && lent.epoch == self.lender.epoch() && self.had.is(stream, lent, &self.lender)
    }

    /// The workspace for `stream`, of which the library is told nothing.
    #[inline]
    pub(super) fn lend(&self, stream: StreamId) -> Result<Lent> {
        if !self.instance.captures().none()
            && let Some((id, site)) = self.instance.captures().find_with_id(&self.stream(stream))?
        {
            return self.lend_in_capture(id, &site.record, stream);
        }
        match self.lent_last(stream) {
            Some(lent) => Ok(lent),
            None => self.lend_again(stream),
        }
    }

    /// What was lent last, if that is still what it should be.
    #[inline]
    fn lent_last(&self, stream: StreamId) -> Option<Lent> {
        let last = self.last.borrow();
        if last.stream != stream || last.epoch != self.lender.epoch() {
            return None;
        }
        let workspace = match &last.workspace {
            None => None,
            Some(workspace) => Some(workspace.upgrade()?),
        };
        Some(Lent { workspace, bytes: last.bytes, epoch: last.epoch })
    }

    fn lend_again(&self, stream: StreamId) -> Result<Lent> {
        let lent = self.lender.lend(self.library, self.id, stream, self.device)?;
        let workspace = lent.workspace.as_ref().map(Arc::downgrade);
        *self.last.borrow_mut() = Last { epoch: lent.epoch, stream, workspace, bytes: lent.bytes };
        Ok(lent)
    }

    /// A workspace that the graph owns, from the graph's pool: one for each handle and stream of a capture. A body of a
    /// conditional node has its own: what the same stream does in the graph around it need not be behind the body.
    /// Nobody else keeps it, so it goes with the graph.
    fn lend_in_capture(&self, capture: CaptureId, record: &CaptureRecord, stream: StreamId) -> Result<Lent> {
        let (bytes, epoch) = (self.lender.bytes(self.library, self.device), Lent::FOR_ONCE);
        if bytes == 0 {
            return Ok(Lent { workspace: None, bytes, epoch });
        }
        let whose = (Some(capture), self.id, stream);
        let is_ours = |kept: &Arc<Workspace>| kept.whose == whose && kept.bytes() >= bytes;
        let kept = lock(&record.used).kept.iter().find_map(|kept| Arc::clone(kept).downcast().ok().filter(is_ours));
        if let Some(kept) = kept {
            return Ok(Lent { workspace: Some(kept), bytes, epoch });
        }
        // Pools are per device; for a stream of another device the allocator's routing decides.
        let mut request = Request::new(self.device, stream, bytes);
        request.pool = (record.device == self.device).then_some(record.pool);
        let workspace = Arc::new(Workspace::allocate(&record.allocator, whose, request)?);
        record.keep(Arc::<Workspace>::clone(&workspace));
        Ok(Lent { workspace: Some(workspace), bytes, epoch })
    }

    fn stream(&self, id: StreamId) -> Stream {
        Stream::known(&Device::known(&self.instance, self.device), id)
    }

    /// Tells the library what it does not know yet. Unknown while a call is under way: a failure leaves the next caller
    /// to tell it.
    #[inline]
    fn tell(&self, stream: StreamId, lent: &Lent) -> Result<()> {
        let (had, lender) = (&self.had, &self.lender);
        if had.is(stream, lent, lender) {
            return Ok(());
        }
        if had.stream.get() != Some(stream) {
            had.stream.set(None);
            // The library goes back to its own memory thereby.
            had.workspace.set(None);
            self.driver().library_set_stream(self.id, stream)?;
            had.stream.set(Some(stream));
        }
        let workspace = (lent.ptr(), lent.bytes);
        if had.workspace.get() != Some(workspace) {
            had.workspace.set(None);
            self.driver().blas_set_workspace(self.id, workspace.0, workspace.1)?;
            had.workspace.set(Some(workspace));
        }
        let math = lender.math();
        if had.math.get() != Some(math) {
            had.math.set(None);
            self.driver().blas_set_math(self.id, math)?;
            had.math.set(Some(math));
        }
        let atomics = lender.atomics();
        if had.atomics.get() != Some(atomics) {
            had.atomics.set(None);
            self.driver().blas_set_atomics(self.id, atomics)?;
            had.atomics.set(Some(atomics));
        }
        Ok(())
    }
}

impl Drop for PooledHandle {
    fn drop(&mut self) {
        self.lender.clear(|handle, _| handle == self.id);
    }
}
