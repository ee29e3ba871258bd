//! Pinned host memory for PyTorch's allocator class.

use std::ffi::{c_int, c_void};

use warpool::Stream;
use warpool::memory::HostBlock;
use warpool::memory::host::HostTime;
use warpool_driver::HostPtr;

use super::device_stats::{StatValues, signed, values};
use super::foreign_stream;
use super::pools::{Delete, PoolFilter};
use crate::backend::Filter;
use crate::boundary::{self, FailureLog};
use crate::error::Error;
use crate::runtime;
use crate::torch_pool::TorchPoolId;

/// Pinned memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PinnedBlock {
    /// Its address.
    pub ptr: *mut c_void,
    /// The argument of `warpool_pinned_free`.
    pub block: *mut c_void,
}

impl PinnedBlock {
    #[inline]
    fn new(block: HostBlock) -> Self {
        let ptr = std::ptr::with_exposed_provenance_mut(block.ptr().0 as usize);
        Self { ptr, block: block.into_raw().cast_mut().cast() }
    }
}

/// Allocates pinned memory and writes it to `pinned`; 0 bytes are NULL. `stream` is what the filters of open pools get:
/// it stands for the current stream of the calling thread.
///
/// # Safety
/// `pinned` is NULL, which is an error, or writable. `stream` is what filters of open pools expect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_pinned_allocate(
    bytes: usize,
    stream: *const c_void,
    pinned: *mut PinnedBlock,
) -> c_int {
    if !pinned.is_null()
        && let Ok(Some(block)) = boundary::attempt(|| runtime::allocate_pinned_cached(bytes))
    {
        // SAFETY: not null, and writable by this function's contract.
        unsafe { pinned.write(PinnedBlock::new(block)) };
        return 0;
    }
    boundary::status(|| {
        if pinned.is_null() {
            return Err(Error::Null { argument: "pinned" });
        }
        let block = runtime::get()?.pinned.allocate(bytes as u64, stream)?;
        // SAFETY: not null, and writable by this function's contract.
        unsafe { pinned.write(PinnedBlock::new(block)) };
        Ok(())
    })
}

/// Frees pinned memory; NULL is ignored. In a forked child nothing happens.
///
/// # Safety
/// `block` came from `warpool_pinned_allocate`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_pinned_free(block: *mut c_void) {
    // SAFETY: it came from `into_raw` by this function's contract.
    let block = unsafe { HostBlock::from_raw(block.cast_const().cast()) };
    // After a panic it may be freed already: not a second time.
    if let Ok(Some(block)) = boundary::attempt(|| runtime::free_pinned_cached(block).err()) {
        free(block);
    }
}

/// Frees in every other case.
#[inline(never)]
fn free(block: HostBlock) {
    static LOG: FailureLog = FailureLog::new("warpool_pinned_free");
    boundary::run_logged(&LOG, || {
        match runtime::get() {
            Ok(runtime) => Ok(runtime.pinned.allocator().free(block)?),
            // In a forked child, where it does nothing.
            Err(_) => Ok(block.free()?),
        }
    });
}

/// Records that work on `stream` of `device` uses the pinned memory that contains `ptr`, and writes to `found` whether
/// there is such memory. `filtered` is what filters of open pools get for the stream.
///
/// # Safety
/// `stream` is NULL or a stream of the driver, and stays alive as long as the memory. `found` is NULL, which is an
/// error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_pinned_record_use(
    ptr: *mut c_void,
    device: c_int,
    stream: *mut c_void,
    filtered: *const c_void,
    found: *mut c_int,
) -> c_int {
    // SAFETY: a live stream by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    boundary::status(|| {
        let runtime = runtime::get()?;
        let stream = Stream::external(&runtime.device(device)?, stream)?;
        let used = runtime.pinned.record_use(HostPtr(ptr.addr() as u64), &stream, filtered)?;
        // SAFETY: null or writable by this function's contract.
        unsafe { boundary::write_output(found, "found", c_int::from(used)) }
    })
}

/// Unpins cached memory, and memory that destroyed graphs used.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pinned_empty_cache() -> c_int {
    boundary::status(|| runtime::get()?.pinned.empty_cache())
}

/// A capture is about to begin: requests and uses that `filter` accepts belong to the pool, until
/// `warpool_pinned_pool_end`. Adds a use of the pool. `delete_user` is called when `filter` is not needed any more,
/// also if this call fails.
///
/// # Safety
/// Until `delete_user` is called, any thread may call `filter` with `user`, also several at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_pinned_pool_begin(
    pool: TorchPoolId,
    filter: PoolFilter,
    user: *mut c_void,
    delete_user: Delete,
) -> c_int {
    // SAFETY: by this function's contract.
    let filter = unsafe { Filter::new(filter, delete_user, user) };
    boundary::status(|| runtime::get()?.pinned.begin(pool, filter))
}

/// The capture has ended.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pinned_pool_end(pool: TorchPoolId) -> c_int {
    boundary::status(|| runtime::get()?.pinned.end(pool))
}

/// Ends a use of the pool: a graph was destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pinned_pool_release(pool: TorchPoolId) -> c_int {
    boundary::status(|| runtime::get()?.pinned.release(pool))
}

/// The duration of driver calls, in microseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DurationValues {
    /// The sum.
    pub total: i64,
    /// The longest.
    pub max: i64,
    /// The shortest.
    pub min: i64,
    /// How many.
    pub count: i64,
}

/// The statistics of pinned memory, by their names in `torch.cuda.host_memory_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "the names are PyTorch's, documented there and at `warpool::memory::host::HostStats`")]
pub struct PinnedStats {
    pub allocations: StatValues,
    pub allocated_bytes: StatValues,
    pub active_requests: StatValues,
    pub active_bytes: StatValues,
    pub num_host_alloc: i64,
    pub num_host_free: i64,
    pub host_alloc_time: DurationValues,
    pub host_free_time: DurationValues,
}

/// Writes the statistics of pinned memory.
///
/// # Safety
/// `stats` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_pinned_stats(stats: *mut PinnedStats) -> c_int {
    boundary::status(|| {
        let found = runtime::get()?.pinned.allocator().stats();
        let plain = PinnedStats {
            allocations: values(found.allocations),
            allocated_bytes: values(found.allocated_bytes),
            active_requests: values(found.active_requests),
            active_bytes: values(found.active_bytes),
            num_host_alloc: signed(found.num_host_alloc),
            num_host_free: signed(found.num_host_free),
            host_alloc_time: durations(found.host_alloc_time),
            host_free_time: durations(found.host_free_time),
        };
        // SAFETY: null or writable by this function's contract.
        unsafe { boundary::write_output(stats, "stats", plain) }
    })
}

/// Sets every peak of pinned memory to the current value.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pinned_reset_peak_stats() -> c_int {
    boundary::status(|| {
        runtime::get()?.pinned.allocator().reset_peak_stats();
        Ok(())
    })
}

/// Sets every accumulated count of pinned memory to 0.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_pinned_reset_accumulated_stats() -> c_int {
    boundary::status(|| {
        runtime::get()?.pinned.allocator().reset_accumulated_stats();
        Ok(())
    })
}

fn durations(time: HostTime) -> DurationValues {
    let HostTime { total_us, max_us, min_us, count } = time;
    DurationValues { total: signed(total_us), max: signed(max_us), min: signed(min_us), count: signed(count) }
}
