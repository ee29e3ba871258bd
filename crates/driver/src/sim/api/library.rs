//! The simulated libraries: handles that remember what they are told, and a cuBLAS that multiplies.
//!
//! A product is work like a kernel: it queues in the handle's stream, is captured, takes time, and touches its matrices
//! and its workspace when its turn comes. cuBLAS's own workspace, which a handle has unless it is given one, takes no
//! room here and is in nobody's way.

use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::sim::SimDriver;
use crate::sim::work::sgemm::{self, SGEMM, Workspace};
use crate::sim::work::{KernelWork, Work};
use crate::sim::world::World;
use crate::{
    BlasMath, Call, DeviceId, DevicePtr, ErrorCode, HandleId, Libraries, Library, RawHandle, Result, Sgemm, StreamId,
};

/// What a workspace's address must be a multiple of.
const WORKSPACE_ALIGNMENT: u64 = 256;

/// How many calls of one handle are remembered, the latest, and of how many handles that are gone.
const CALLS_KEPT: usize = 1024;
const GONE_KEPT: usize = 256;

/// One thing that a handle was told.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum LibraryCall {
    /// It was made.
    Created {
        /// By which library.
        library: Library,
        /// For which device.
        device: DeviceId,
    },
    /// It was pointed at a stream.
    SetStream(StreamId),
    /// It was given memory to work with.
    SetWorkspace {
        /// Where it lies.
        ptr: DevicePtr,
        /// How long it is.
        bytes: u64,
    },
    /// It was told how precise to be.
    SetMath(BlasMath),
    /// It was told whether atomic operations are allowed.
    SetAtomics(bool),
    /// It was told to multiply.
    Sgemm(Sgemm),
    /// It was taken away.
    Destroyed,
}

/// A handle.
#[derive(Debug)]
pub struct Handle {
    library: Library,
    device: DeviceId,
    /// As it was named: a thread's own default stream is looked up when work comes.
    stream: StreamId,
    /// None is cuBLAS's own, and also none at all: no difference that anybody could see.
    workspace: Workspace,
    math: BlasMath,
}

/// What handles were told. Those that are gone are remembered too, as long as there are not too many.
#[derive(Debug, Default)]
pub struct LibraryLog {
    calls: FxHashMap<HandleId, VecDeque<LibraryCall>>,
    gone: VecDeque<HandleId>,
}

impl LibraryLog {
    fn push(&mut self, handle: HandleId, call: LibraryCall) {
        let calls = self.calls.entry(handle).or_default();
        if calls.len() == CALLS_KEPT {
            calls.pop_front();
        }
        calls.push_back(call);
        if call == LibraryCall::Destroyed {
            self.gone.push_back(handle);
            if self.gone.len() > GONE_KEPT {
                let oldest = self.gone.pop_front().expect("more than none");
                self.calls.remove(&oldest);
            }
        }
    }
}

impl SimDriver {
    /// What a handle was told, oldest first; calls that failed are not in it. Of each handle the last 1,024 are
    /// remembered, also once it is gone; of handles that are gone, the last 256.
    #[must_use]
    pub fn library_calls(&self, handle: HandleId) -> Vec<LibraryCall> {
        self.lock().library_log.calls.get(&handle).map_or_else(Vec::new, |calls| calls.iter().copied().collect())
    }
}

impl Libraries for SimDriver {
    fn library_create(&self, library: Library, device: DeviceId) -> Result<HandleId> {
        self.call(Call::LibraryCreate, |world| {
            let stream = world.device(device)?.legacy;
            if world.config.missing_libraries.contains(&library) {
                return world.fail(ErrorCode::SharedObjectInitFailed, format!("{library} is not installed"));
            }
            let handle = Handle { library, device, stream, workspace: None, math: BlasMath::Default };
            let handle = HandleId(world.handles.insert(handle));
            world.told(handle, LibraryCall::Created { library, device });
            Ok(handle)
        })
    }

    fn library_destroy(&self, handle: HandleId) -> Result<()> {
        self.call(Call::LibraryDestroy, |world| {
            let device = world.handle(handle)?.device;
            if world
                .captures
                .ids()
                .iter()
                .any(|&id| world.captures.get(id).is_some_and(|capture| capture.device == device))
            {
                let why = format!("{handle} was to go while a stream of {device} captures");
                return world.fail(ErrorCode::StreamCaptureUnsupported, why);
            }
            world.told(handle, LibraryCall::Destroyed);
            world.handles.remove(handle.0);
            Ok(())
        })
    }

    fn library_set_stream(&self, handle: HandleId, stream: StreamId) -> Result<()> {
        self.call(Call::LibrarySetStream, |world| {
            let Handle { library, device, .. } = *world.handle(handle)?;
            if library == Library::BlasLt {
                return world.fail(ErrorCode::NotSupported, format!("handles of {library} have no stream"));
            }
            let own = world.live_stream(stream)?;
            let theirs = world.stream(own).device;
            if theirs != device {
                let why = format!("{handle} is one of {device}, {stream} one of {theirs}");
                return world.fail(ErrorCode::InvalidValue, why);
            }
            let state = world.handle(handle)?;
            (state.stream, state.workspace) = (stream, None);
            world.told(handle, LibraryCall::SetStream(stream));
            Ok(())
        })
    }

    fn library_raw(&self, handle: HandleId) -> Result<RawHandle> {
        self.call(Call::LibraryRaw, |world| {
            world.handle(handle)?;
            Ok(RawHandle(0x8000_0000 + handle.0 * 0x40))
        })
    }

    fn blas_set_workspace(&self, handle: HandleId, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.call(Call::BlasSetWorkspace, |world| {
            world.blas(handle)?;
            if !ptr.0.is_multiple_of(WORKSPACE_ALIGNMENT) {
                let why = format!("{ptr} is no multiple of {WORKSPACE_ALIGNMENT}");
                return world.fail(ErrorCode::InvalidValue, why);
            }
            world.blas(handle)?.workspace = (bytes != 0).then_some((ptr, bytes));
            world.told(handle, LibraryCall::SetWorkspace { ptr, bytes });
            Ok(())
        })
    }

    fn blas_set_math(&self, handle: HandleId, math: BlasMath) -> Result<()> {
        self.call(Call::BlasSetMath, |world| {
            world.blas(handle)?.math = math;
            world.told(handle, LibraryCall::SetMath(math));
            Ok(())
        })
    }

    fn blas_set_atomics(&self, handle: HandleId, allowed: bool) -> Result<()> {
        self.call(Call::BlasSetAtomics, |world| {
            // Nothing here uses any.
            world.blas(handle)?;
            world.told(handle, LibraryCall::SetAtomics(allowed));
            Ok(())
        })
    }

    fn blas_sgemm(&self, handle: HandleId, product: &Sgemm) -> Result<()> {
        let mut world = self.enter(Call::BlasSgemm)?;
        let Handle { stream, math, workspace, .. } = *world.blas(handle)?;
        let stream = world.live_stream(stream)?;
        if let Err(why) = sgemm::refuse(product) {
            return world.fail(ErrorCode::InvalidValue, why);
        }
        if product.m != 0 && product.n != 0 {
            world.forbid_implicit(stream)?;
            let args = sgemm::arguments(product, math, workspace);
            let kernel = KernelWork { function: None, mirror: SGEMM, shape: sgemm::shape(product), args };
            let nanos = world.config.work.product_nanos(product.m, product.n, product.k);
            world = self.wait_for_room(world, stream)?;
            world.submit(stream, Work::Kernel(Arc::new(kernel)), nanos)?;
        }
        world.told(handle, LibraryCall::Sgemm(*product));
        Ok(())
    }
}

impl World {
    /// The handle of that id, on a device that works.
    fn handle(&mut self, handle: HandleId) -> Result<&mut Handle> {
        let Some(device) = self.handles.get(handle.0).map(|state| state.device) else {
            let why = self.handles.why_missing(handle.0);
            return Err(self.missing(why, handle.to_string()));
        };
        self.device(device)?;
        Ok(self.handles.get_mut(handle.0).expect("just found"))
    }

    /// The handle of that id, if it is one of cuBLAS.
    fn blas(&mut self, handle: HandleId) -> Result<&mut Handle> {
        let library = self.handle(handle)?.library;
        if library != Library::Blas {
            let why = format!("{handle} is one of {library}, and this is a call of {}", Library::Blas);
            return self.fail(ErrorCode::InvalidHandle, why);
        }
        self.handle(handle)
    }

    /// Remembers what a handle was told, unless it has gone while the call waited.
    fn told(&mut self, handle: HandleId, call: LibraryCall) {
        if self.handles.get(handle.0).is_some() {
            self.library_log.push(handle, call);
        }
    }
}
