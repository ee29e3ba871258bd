//! Memory pools: the functions that PyTorch's pluggable allocator calls around a capture, and all that PyTorch's
//! allocator class does with pools (`warpool_pool_…`). A process uses one kind or the other.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use warpool_driver::DevicePtr;

use super::device_ptr;
use crate::backend::{CallbackUpstream, Filter};
use crate::boundary::{self, FailureLog};
use crate::runtime;
use crate::torch_pool::TorchPoolId;

/// A capture is about to begin: its allocations, and no others, come from that pool. PyTorch calls it before
/// `cudaStreamBeginCapture`. `filter` is the address of a `std::function` and is not used.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_begin_allocate_to_pool(device: c_int, id: TorchPoolId, filter: *mut c_void) {
    static LOG: FailureLog = FailureLog::new("warpool_begin_allocate_to_pool");
    let _ = filter;
    boundary::run_logged(&LOG, || runtime::get()?.begin_pool(device, id));
}

/// The capture has ended.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_end_allocate_to_pool(device: c_int, id: TorchPoolId) {
    static LOG: FailureLog = FailureLog::new("warpool_end_allocate_to_pool");
    boundary::run_logged(&LOG, || runtime::get()?.end_pool(device, id));
}

/// A graph of that pool was destroyed. After the last one, the pool's memory can be returned to the driver.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_release_pool(device: c_int, id: TorchPoolId) {
    static LOG: FailureLog = FailureLog::new("warpool_release_pool");
    boundary::run_logged(&LOG, || runtime::get()?.release_pool(device, id));
}

/// Whether the filter of an open pool accepts a stream: 0 or 1; anything else is a failure.
pub type PoolFilter = unsafe extern "C" fn(user: *mut c_void, stream: *const c_void) -> c_int;

/// Deletes the argument of a callback.
pub type Delete = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// Opens a pool and adds a use: requests whose stream, a `cudaStream_t`, `filter` accepts are served by it, until
/// `warpool_pool_end`. Of several open pools the newest counts. While it is open, captures may begin and end.
/// `delete_user` is called when `filter` is not needed any more, also if this call fails.
///
/// # Safety
/// Until `delete_user` is called, any thread may call `filter` with `user`, also several at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_pool_begin(
    device: c_int,
    pool: TorchPoolId,
    filter: PoolFilter,
    user: *mut c_void,
    delete_user: Delete,
) -> c_int {
    // SAFETY: by this function's contract.
    let filter = unsafe { Filter::new(filter, delete_user, user) };
    boundary::status(|| runtime::get()?.open_pool(device, pool, filter))
}

/// Closes the pool. Its use stays.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pool_end(device: c_int, pool: TorchPoolId) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        runtime.routing.end(runtime.allocator(), runtime.device_id(device)?, pool)
    })
}

/// Creates a pool with one use, or adds a use of one that exists.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pool_create(device: c_int, pool: TorchPoolId) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        runtime.routing.create(runtime.device_id(device)?, pool, None)
    })
}

/// Allocates `bytes` of device memory for `stream`, a `cudaStream_t`; NULL is out of memory.
pub type PoolAllocate =
    unsafe extern "C" fn(user: *mut c_void, bytes: usize, device: c_int, stream: *mut c_void) -> *mut c_void;

/// Frees what `PoolAllocate` returned. Returns 0, or 1 if it failed: then it is tried again later.
pub type PoolFree = unsafe extern "C" fn(user: *mut c_void, ptr: *mut c_void, device: c_int) -> c_int;

/// Creates a pool with one use, whose segments come from `allocate`. `delete_user` is called when the pool is gone, or
/// this call failed.
///
/// # Safety
/// Until `delete_user` is called, any thread may call `allocate` and `free` with `user`, also several at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_pool_create_from(
    device: c_int,
    pool: TorchPoolId,
    allocate: PoolAllocate,
    free: PoolFree,
    user: *mut c_void,
    delete_user: Delete,
) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let instance = runtime.instance().clone();
        let upstream = CallbackUpstream { instance, allocate, free, delete: delete_user, user };
        runtime.routing.create(runtime.device_id(device)?, pool, Some(Arc::new(upstream)))
    })
}

/// Ends a use of a pool. After the last its memory can be returned to the driver.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pool_release(device: c_int, pool: TorchPoolId) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        runtime.routing.release(runtime.allocator(), runtime.device_id(device)?, pool)
    })
}

/// The number of uses of a pool; 0 if there is no such pool.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pool_uses(device: c_int, pool: TorchPoolId) -> c_int {
    let uses = boundary::run(|| {
        let runtime = runtime::get()?;
        Ok(runtime.routing.uses(runtime.device_id(device)?, pool))
    });
    c_int::try_from(uses.unwrap_or(0)).unwrap_or(c_int::MAX)
}

/// Whether free blocks of the pool serve the default pool before that runs out of memory.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pool_use_on_oom(device: c_int, pool: TorchPoolId, on: c_int) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        runtime.routing.set_use_on_oom(runtime.allocator(), runtime.device_id(device)?, pool, on != 0)
    })
}

/// Each block of the pool is a whole segment. To be called before the pool is first used.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pool_no_split(device: c_int, pool: TorchPoolId) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        runtime.routing.set_no_split(runtime.device_id(device)?, pool)
    })
}

/// The memory of the pool can be registered with network cards and communication libraries, as long as the pool has
/// uses: each segment is one physical allocation, mapped once and never moved, and does not sleep even if the pool is
/// used in a tag's scope. Size and address are multiples of 2 MiB and of the device's granularity for multicast. To be
/// called before the pool is first used, for a pool without an allocator of its own.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pool_stable(device: c_int, pool: TorchPoolId) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        runtime.routing.set_stable(runtime.allocator(), runtime.device_id(device)?, pool)
    })
}

/// Writes to `equal` whether exactly these `count` addresses are allocated in the pool.
///
/// # Safety
/// `live` points to `count` addresses, or is anything if `count` is 0. `equal` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_pool_has_exactly(
    device: c_int,
    pool: TorchPoolId,
    live: *const *mut c_void,
    count: usize,
    equal: *mut c_int,
) -> c_int {
    boundary::status(|| {
        let live: &[*mut c_void] = if count == 0 {
            &[]
        } else {
            // SAFETY: `live` points to `count` addresses by this function's contract.
            unsafe { std::slice::from_raw_parts(live, count) }
        };
        let live: Vec<DevicePtr> = live.iter().map(|&ptr| device_ptr(ptr)).collect();
        let runtime = runtime::get()?;
        let device = runtime.device_id(device)?;
        let found = runtime.routing.has_exactly(runtime.allocator(), device, pool, &live)?;
        // SAFETY: `equal` is null or writable by this function's contract.
        unsafe { boundary::write_output(equal, "equal", c_int::from(found)) }
    })
}
