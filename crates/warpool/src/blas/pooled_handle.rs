//! A handle with the settings that were applied to it, so that nothing is set twice.
//!
//! [`PooledHandle::set_up`] is the hot path: if nothing has changed it makes no library call, no driver call, and takes
//! no lock.

use std::cell::{Cell, OnceCell, RefCell};
use std::sync::{Arc, Weak};

use warpool_driver::{BlasMath, CaptureId, DeviceId, DevicePtr, Driver, HandleId, Library, RawHandle, StreamId};

use super::workspace::{BlasState, CapturedWorkspaces, Workspace, WorkspaceRef};
use crate::capture::CaptureRecord;
use crate::defect::Defect;
use crate::handle::LibraryKind;
use crate::memory::{CaptureMemory, Request};
use crate::{Device, Instance, Result, Stream};

/// Handles of cuBLAS or cuBLASLt, with the workspaces of a [`BlasState`].
pub(super) struct BlasKind {
    pub(super) library: Library,
    pub(super) state: Arc<BlasState>,
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
            state: Arc::clone(&self.state),
            raw: OnceCell::new(),
            last: RefCell::new(LastWorkspace {
                epoch: WorkspaceRef::NEVER_CURRENT,
                stream: StreamId(0),
                workspace: None,
                bytes: 0,
            }),
            applied: Applied::default(),
        })
    }

    fn destroy(&self, device: &Device, handle: &PooledHandle) -> Result<()> {
        Ok(device.driver().library_destroy(handle.id)?)
    }
}

/// One handle. Dropping it drops its cached workspaces, and makes no library call.
pub(super) struct PooledHandle {
    instance: Instance,
    device: DeviceId,
    library: Library,
    id: HandleId,
    state: Arc<BlasState>,
    raw: OnceCell<RawHandle>,
    last: RefCell<LastWorkspace>,
    applied: Applied,
}

/// The workspace that was used last, outside of captures. A weak reference: an idle handle must not keep a workspace
/// from being trimmed.
struct LastWorkspace {
    epoch: u64,
    stream: StreamId,
    /// `None` is no workspace.
    workspace: Option<Weak<Workspace>>,
    bytes: u64,
}

/// The settings that were last set in the library; `None` is unknown.
struct Applied {
    stream: Cell<Option<StreamId>>,
    workspace: Cell<Option<(DevicePtr, u64)>>,
    math: Cell<Option<BlasMath>>,
    atomics: Cell<Option<bool>>,
}

impl Default for Applied {
    /// The state of a new handle.
    fn default() -> Self {
        Self {
            stream: Cell::new(None),
            workspace: Cell::new(None),
            math: Cell::new(Some(BlasMath::Default)),
            atomics: Cell::new(Some(false)),
        }
    }
}

impl Applied {
    #[inline]
    fn is(&self, stream: StreamId, workspace: &WorkspaceRef, state: &BlasState) -> bool {
        self.stream.get() == Some(stream)
            && self.workspace.get() == Some((workspace.ptr(), workspace.bytes))
            && self.math.get() == Some(state.math())
            && self.atomics.get() == Some(state.atomics())
    }
}

impl PooledHandle {
    pub(super) fn id(&self) -> HandleId {
        self.id
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    /// The library's own handle, read once.
    pub(super) fn raw(&self) -> Result<RawHandle> {
        if let Some(&raw) = self.raw.get() {
            return Ok(raw);
        }
        let raw = self.driver().library_raw(self.id)?;
        Ok(*self.raw.get_or_init(|| raw))
    }

    /// Called when others may change the handle from now on: the next set-up sets everything again.
    pub(super) fn invalidate(&self) {
        self.applied.stream.set(None);
        self.applied.workspace.set(None);
        self.applied.math.set(None);
        self.applied.atomics.set(None);
    }

    /// Prepares it for calls on `stream`, with the workspace that is returned.
    #[inline]
    pub(super) fn set_up(&self, stream: StreamId) -> Result<WorkspaceRef> {
        let workspace = self.workspace(stream)?;
        self.apply(stream, &workspace)?;
        Ok(workspace)
    }

    /// Whether it is still as [`set_up`](Self::set_up) left it when it returned `workspace`. It is cheaper than another
    /// set-up, since `workspace` is held.
    #[inline]
    pub(super) fn is_set_up(&self, stream: StreamId, workspace: &WorkspaceRef) -> bool {
        !self.instance.has_captures()
            && workspace.epoch == self.state.epoch()
            && self.applied.is(stream, workspace, &self.state)
    }

    /// The workspace for `stream`, without setting it in the library.
    #[inline]
    pub(super) fn workspace(&self, stream: StreamId) -> Result<WorkspaceRef> {
        if self.instance.has_captures()
            && let Some(capture) = self.instance.captures().find(&self.stream(stream))?
        {
            return self.workspace_in_capture(capture.id, &capture.record, stream);
        }
        match self.last_workspace(stream) {
            Some(workspace) => Ok(workspace),
            None => self.look_up_workspace(stream),
        }
    }

    /// The workspace that was used last, if it is for `stream` and up to date.
    #[inline]
    fn last_workspace(&self, stream: StreamId) -> Option<WorkspaceRef> {
        let last = self.last.borrow();
        if last.stream != stream || last.epoch != self.state.epoch() {
            return None;
        }
        let workspace = match &last.workspace {
            None => None,
            Some(workspace) => Some(workspace.upgrade()?),
        };
        Some(WorkspaceRef { workspace, bytes: last.bytes, epoch: last.epoch })
    }

    fn look_up_workspace(&self, stream: StreamId) -> Result<WorkspaceRef> {
        let found = self.state.get(self.library, self.id, stream, self.device)?;
        let workspace = found.workspace.as_ref().map(Arc::downgrade);
        *self.last.borrow_mut() = LastWorkspace { epoch: found.epoch, stream, workspace, bytes: found.bytes };
        Ok(found)
    }

    /// A workspace that the graph owns, from the graph's pool: one per handle and stream of a capture. A body of a
    /// conditional node has its own: work of the same stream in the enclosing graph may run concurrently with the body.
    /// Only the graph keeps it, so it is freed with the graph.
    fn workspace_in_capture(
        &self,
        capture: CaptureId,
        record: &CaptureRecord,
        stream: StreamId,
    ) -> Result<WorkspaceRef> {
        let (bytes, epoch) = (self.state.bytes(self.library, self.device), WorkspaceRef::NEVER_CURRENT);
        if bytes == 0 {
            return Ok(WorkspaceRef { workspace: None, bytes, epoch });
        }
        let key = (Some(capture), self.id, stream);
        let is_same = |(of, handle, on)| {
            (of, handle) == (key.0, key.1) && (on == stream || Defect::WorkspaceForgetsStream.is_on())
        };
        let found = record.with(|CapturedWorkspaces(workspaces)| {
            workspaces.iter().find(|workspace| is_same(workspace.key) && workspace.bytes() >= bytes).cloned()
        });
        if let Some(workspace) = found {
            return Ok(WorkspaceRef { workspace: Some(workspace), bytes, epoch });
        }
        // Pools are per device; for a stream of another device the allocator's routing decides.
        let memory = CaptureMemory::of(record);
        let mut request = Request::new(self.device, stream, bytes);
        request.pool = (record.device == self.device).then_some(memory.pool);
        let workspace = Arc::new(Workspace::allocate(&memory.allocator, key, request)?);
        record.with(|CapturedWorkspaces(workspaces)| workspaces.push(Arc::clone(&workspace)));
        Ok(WorkspaceRef { workspace: Some(workspace), bytes, epoch })
    }

    fn stream(&self, id: StreamId) -> Stream {
        Stream::from_id(&Device::from_id(&self.instance, self.device), id)
    }

    /// Applies the settings that differ to the library. A setting is unknown during its call: after a failure the next
    /// caller sets it.
    #[inline]
    fn apply(&self, stream: StreamId, workspace: &WorkspaceRef) -> Result<()> {
        let (applied, state) = (&self.applied, &self.state);
        if applied.is(stream, workspace, state) {
            return Ok(());
        }
        if applied.stream.get() != Some(stream) {
            applied.stream.set(None);
            // Setting the stream resets the workspace to the library's own.
            applied.workspace.set(None);
            self.driver().library_set_stream(self.id, stream)?;
            applied.stream.set(Some(stream));
        }
        let workspace = (workspace.ptr(), workspace.bytes);
        if applied.workspace.get() != Some(workspace) {
            applied.workspace.set(None);
            self.driver().blas_set_workspace(self.id, workspace.0, workspace.1)?;
            applied.workspace.set(Some(workspace));
        }
        let math = state.math();
        if applied.math.get() != Some(math) {
            applied.math.set(None);
            self.driver().blas_set_math(self.id, math)?;
            applied.math.set(Some(math));
        }
        let atomics = state.atomics();
        if applied.atomics.get() != Some(atomics) {
            applied.atomics.set(None);
            self.driver().blas_set_atomics(self.id, atomics)?;
            applied.atomics.set(Some(atomics));
        }
        Ok(())
    }
}

impl Drop for PooledHandle {
    fn drop(&mut self) {
        self.state.clear(|handle, _| handle == self.id);
    }
}
