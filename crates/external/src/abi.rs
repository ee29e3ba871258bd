//! The C types of the functions.
//!
//! All are `C-unwind`, so that a C++ exception that leaves one is not undefined behaviour here.

use std::ffi::{c_int, c_void};

pub(crate) type Alloc = unsafe extern "C-unwind" fn(isize, c_int, *mut c_void) -> *mut c_void;
pub(crate) type Free = unsafe extern "C-unwind" fn(*mut c_void, isize, c_int, *mut c_void);
pub(crate) type Init = unsafe extern "C-unwind" fn(c_int);
pub(crate) type Reset = unsafe extern "C-unwind" fn();
pub(crate) type MemoryFraction = unsafe extern "C-unwind" fn(f64, c_int);
pub(crate) type BaseAlloc = unsafe extern "C-unwind" fn(*mut c_void, *mut usize) -> *mut c_void;
pub(crate) type RecordStream = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void);
pub(crate) type BeginPool = unsafe extern "C-unwind" fn(c_int, PoolId, *mut c_void);
pub(crate) type PoolHook = unsafe extern "C-unwind" fn(c_int, PoolId);

/// A pool id: `std::pair<uint64_t, uint64_t>`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct PoolId {
    pub(crate) graph: u64,
    pub(crate) user: u64,
}

/// An empty `std::function` of any standard library: 32 bytes in libstdc++, 48 in some libc++, 64 elsewhere.
#[repr(C, align(16))]
pub(crate) struct EmptyFunction([u8; 64]);

impl EmptyFunction {
    pub(crate) const fn new() -> Self {
        Self([0; 64])
    }
}
