//! NVIDIA's libraries for unit tests. A handle is an object as well; functions return [`DESTROYED`] as a status if it,
//! or its stream, is destroyed.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};

use cudarc::driver::sys::*;
use warpool_driver::{ErrorCode, Library};

use super::{CURRENT, DESTROYED, RACED, exist, guarded, handle, make, object, used, work};
use crate::libraries::{CublasFunctions, LibraryFunctions, RawLibraryHandle};
use crate::sync::lock;

/// A call of a library's function, with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum LibraryCall {
    Create,
    Destroy,
    Workspace(u64, usize),
    Math(u32),
    Atomics(u32),
    Product { operations: [u32; 2], counts: [c_int; 6], scalars: [f32; 2], addresses: [u64; 3] },
}

thread_local! {
    static CALLS: RefCell<Vec<LibraryCall>> = const { RefCell::new(Vec::new()) };
}

fn record(call: LibraryCall) {
    assert!(!CURRENT.get().is_null(), "no context is current");
    CALLS.with_borrow_mut(|calls| calls.push(call));
}

extern "C" fn create(output: *mut RawLibraryHandle) -> u32 {
    record(LibraryCall::Create);
    super::give(output, handle(make(false)));
    u32::from(guarded() != 0)
}
extern "C" fn destroy(raw: RawLibraryHandle) -> u32 {
    record(LibraryCall::Destroy);
    // Invalidates captures and returns success, as cuBLAS does.
    guarded();
    use_handle(raw).max(super::destroy(object(raw)))
}
extern "C" fn set_stream(raw: RawLibraryHandle, stream: CUstream) -> u32 {
    let before = use_handle(raw);
    // The default streams have small numbers as handles, and are no objects.
    *lock(&object(raw).stream) = (stream.addr() > 2).then(|| object(stream));
    before.max(use_handle(raw))
}
extern "C" fn set_workspace(raw: RawLibraryHandle, ptr: *mut c_void, bytes: usize) -> u32 {
    record(LibraryCall::Workspace(ptr.addr() as u64, bytes));
    use_handle(raw)
}
extern "C" fn set_math(raw: RawLibraryHandle, mode: u32) -> u32 {
    record(LibraryCall::Math(mode));
    use_handle(raw)
}
extern "C" fn set_atomics(raw: RawLibraryHandle, mode: u32) -> u32 {
    record(LibraryCall::Atomics(mode));
    use_handle(raw)
}
unsafe extern "C" fn sgemm(
    raw: RawLibraryHandle,
    operation_a: u32,
    operation_b: u32,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const f32,
    a: *const f32,
    a_stride: c_int,
    b: *const f32,
    b_stride: c_int,
    beta: *const f32,
    c: *mut f32,
    c_stride: c_int,
) -> u32 {
    record(LibraryCall::Product {
        operations: [operation_a, operation_b],
        counts: [m, n, k, a_stride, b_stride, c_stride],
        // SAFETY: the backend passes the addresses of two numbers of its own.
        scalars: [alpha, beta].map(|scalar| unsafe { *scalar }),
        addresses: [a.addr(), b.addr(), c.addr()].map(|address| address as u64),
    });
    let stream = *lock(&object(raw).stream);
    let refused = stream.map_or(0, |stream| work(stream, CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32));
    match refused {
        0 => use_handle(raw),
        bug if [DESTROYED, RACED].map(ErrorCode::number).contains(&bug) => bug,
        // CUBLAS_STATUS_EXECUTION_FAILED
        _ => 13,
    }
}

/// Uses a handle and its stream.
fn use_handle(raw: RawLibraryHandle) -> u32 {
    let stream = *lock(&object(raw).stream);
    used(&[object(raw)]).max(stream.map_or(0, |stream| exist(&[stream])))
}

/// The functions of a library.
pub(super) fn functions(library: Library) -> LibraryFunctions {
    LibraryFunctions {
        create,
        destroy,
        set_stream: (library != Library::BlasLt).then_some(set_stream as _),
        blas: (library == Library::Blas).then_some(CublasFunctions { set_workspace, set_math, set_atomics, sgemm }),
    }
}

/// This thread's calls of libraries since the last query, except those that set a stream.
pub(crate) fn library_calls() -> Vec<LibraryCall> {
    CALLS.take()
}

/// The serial of the stream that a library has set for a handle; `None` if it is a default stream.
pub(crate) fn stream_of(raw: RawLibraryHandle) -> Option<u64> {
    lock(&object(raw).stream).map(|stream| stream.serial)
}
