//! NVIDIA's libraries for tests. A handle is an object as well, and says [`DEAD`] as a status if it, or the stream that
//! it points at, is gone.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};

use cudarc::driver::sys::*;
use warpool_driver::Library;

use super::{CURRENT, DEAD, alive, guarded, handle, kill, make, object, used, work};
use crate::table::lock;
use crate::vendor::{Cublas, RawLibraryHandle, Vendor};

/// What a library's function was given.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Given {
    Create,
    Destroy,
    Workspace(u64, usize),
    Math(u32),
    Atomics(u32),
    Product { operations: [u32; 2], counts: [c_int; 6], scalars: [f32; 2], addresses: [u64; 3] },
}

thread_local! {
    static GIVEN: RefCell<Vec<Given>> = const { RefCell::new(Vec::new()) };
}

fn given(what: Given) {
    assert!(!CURRENT.get().is_null(), "no context is current");
    GIVEN.with_borrow_mut(|given| given.push(what));
}

extern "C" fn create(place: *mut RawLibraryHandle) -> u32 {
    given(Given::Create);
    super::give(place, handle(make(false)));
    // All but success.
    if guarded() == 0 { 0 } else { 1 }
}
extern "C" fn destroy(raw: RawLibraryHandle) -> u32 {
    given(Given::Destroy);
    // Breaks captures and says that all went well, as cuBLAS does.
    guarded();
    use_handle(raw).max(kill(object(raw)))
}
extern "C" fn set_stream(raw: RawLibraryHandle, stream: CUstream) -> u32 {
    let before = use_handle(raw);
    // The default streams have small numbers for handles, and are no objects.
    *lock(&object(raw).stream) = (stream.addr() > 2).then(|| object(stream));
    before.max(use_handle(raw))
}
extern "C" fn set_workspace(raw: RawLibraryHandle, ptr: *mut c_void, bytes: usize) -> u32 {
    given(Given::Workspace(ptr.addr() as u64, bytes));
    use_handle(raw)
}
extern "C" fn set_math(raw: RawLibraryHandle, mode: u32) -> u32 {
    given(Given::Math(mode));
    use_handle(raw)
}
extern "C" fn set_atomics(raw: RawLibraryHandle, mode: u32) -> u32 {
    given(Given::Atomics(mode));
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
    given(Given::Product {
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
        dead if dead == DEAD.number() => dead,
        // CUBLAS_STATUS_EXECUTION_FAILED
        _ => 13,
    }
}

/// Uses a handle and its stream.
fn use_handle(raw: RawLibraryHandle) -> u32 {
    let stream = *lock(&object(raw).stream);
    used(&[object(raw)]).max(stream.map_or(0, |stream| alive(&[stream])))
}

/// The functions of a library.
pub(super) fn vendor(library: Library) -> Vendor {
    Vendor {
        create,
        destroy,
        set_stream: (library != Library::BlasLt).then_some(set_stream as _),
        blas: (library == Library::Blas).then_some(Cublas { set_workspace, set_math, set_atomics, sgemm }),
    }
}

/// What this thread gave to functions of libraries since it last asked, but for streams.
pub(crate) fn given_here() -> Vec<Given> {
    GIVEN.take()
}

/// The stream that a handle points at by its library's account, by CUDA's number; none if it is a default one.
pub(crate) fn stream_of(raw: RawLibraryHandle) -> Option<u64> {
    lock(&object(raw).stream).map(|stream| stream.serial)
}
