//! Library handles and the log of the calls made on them.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::sgemm::Workspace;
use crate::sim::table::{Missing, Table};
use crate::{BlasMath, DeviceId, DevicePtr, HandleId, Library, Sgemm, StreamId};

/// How many calls of a handle are kept, and of how many destroyed handles.
const CALLS_KEPT: usize = 1024;
const DESTROYED_KEPT: usize = 256;

/// A call on a library handle.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum LibraryCall {
    /// The handle was created.
    Created {
        /// The library.
        library: Library,
        /// The device.
        device: DeviceId,
    },
    /// The stream was set.
    SetStream(StreamId),
    /// The workspace was set.
    SetWorkspace {
        /// Its address.
        ptr: DevicePtr,
        /// Its size.
        bytes: u64,
    },
    /// The math mode was set.
    SetMath(BlasMath),
    /// Atomic operations were allowed or forbidden.
    SetAtomics(bool),
    /// A matrix product was queued.
    Sgemm(Sgemm),
    /// The handle was destroyed.
    Destroyed,
}

#[derive(Clone, Copy, Debug)]
pub struct Handle {
    pub library: Library,
    pub device: DeviceId,
    /// As it was set: a per-thread default stream is resolved when work is queued.
    pub stream: StreamId,
    /// `None` for cuBLAS's own, or none at all: the difference has no effect here.
    pub workspace: Workspace,
    pub math: BlasMath,
}

/// All handles.
#[derive(Debug, Default)]
pub struct Libraries {
    handles: Table<Handle>,
    calls: FxHashMap<HandleId, VecDeque<LibraryCall>>,
    /// Destroyed handles whose calls are kept, oldest first.
    destroyed: VecDeque<HandleId>,
}

impl Libraries {
    pub fn create(&mut self, library: Library, device: DeviceId, stream: StreamId) -> HandleId {
        let handle = Handle { library, device, stream, workspace: None, math: BlasMath::Default };
        let id = HandleId(self.handles.insert(handle));
        self.log(id, LibraryCall::Created { library, device });
        id
    }

    pub fn destroy(&mut self, handle: HandleId) {
        self.log(handle, LibraryCall::Destroyed);
        self.handles.remove(handle.0);
        self.destroyed.push_back(handle);
        if self.destroyed.len() > DESTROYED_KEPT {
            let oldest = self.destroyed.pop_front().expect("more than none");
            self.calls.remove(&oldest);
        }
    }

    pub fn get(&self, handle: HandleId) -> Result<&Handle, Missing> {
        self.handles.get(handle.0).ok_or_else(|| self.handles.why_missing(handle.0))
    }

    /// A handle that was looked up.
    pub fn get_mut(&mut self, handle: HandleId) -> &mut Handle {
        self.handles.get_mut(handle.0).expect("a handle that was looked up")
    }

    /// Logs a call, unless the handle was destroyed while the call waited.
    pub fn log(&mut self, handle: HandleId, call: LibraryCall) {
        if self.handles.get(handle.0).is_none() {
            return;
        }
        let calls = self.calls.entry(handle).or_default();
        if calls.len() == CALLS_KEPT {
            calls.pop_front();
        }
        calls.push_back(call);
    }

    /// The calls that were logged for a handle, oldest first.
    pub fn calls(&self, handle: HandleId) -> Vec<LibraryCall> {
        self.calls.get(&handle).map_or_else(Vec::new, |calls| calls.iter().copied().collect())
    }

    pub fn len(&self) -> usize {
        self.handles.len()
    }
}
