//! Elastic memory: addresses that never change, and memory behind the blocks that are in use.

use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use std::sync::Arc;

use warpool::memory::elastic::{ElasticLayout, ElasticMemory};

use super::device_stats::signed;
use super::{c_pointer, device_ptr, foreign_stream};
use crate::boundary::{self, FailureLog};
use crate::error::{Error, Result};
use crate::runtime;

/// What the functions that change elastic memory return for out of memory; 1 is any other failure.
pub const WARPOOL_OUT_OF_MEMORY: c_int = 2;

/// Reserves addresses for elastic memory, without memory, and writes the first one to `ptr`. A block has `block_bytes`
/// bytes in each of `rows` rows: block `b` is at `(r * blocks + b) * block_bytes` of row `r`, as in a tensor of which
/// one dimension counts the blocks. `stream` is a `cudaStream_t` that exists until `warpool_elastic_release`. It sleeps
/// and wakes with the other memory of `tag`; with NULL, of the tag whose scope the thread is in, if any. Only with
/// `backend:paged`.
///
/// # Safety
/// `stream` is NULL or a stream of the driver, and stays alive as long as the memory. `tag` is NULL or a
/// null-terminated string. `ptr` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_elastic_reserve(
    device: c_int,
    stream: *mut c_void,
    rows: u64,
    blocks: u64,
    block_bytes: u64,
    tag: *const c_char,
    ptr: *mut *mut c_void,
) -> c_int {
    boundary::status(|| {
        if ptr.is_null() {
            return Err(Error::Null { argument: "ptr" });
        }
        // SAFETY: null, or a null-terminated string by this function's contract.
        let tag = if tag.is_null() { None } else { Some(unsafe { boundary::text(tag, "tag") }?) };
        // SAFETY: a live stream by this function's contract.
        let stream = unsafe { foreign_stream(stream) };
        let layout = ElasticLayout { rows, blocks, block_bytes };
        let reserved = runtime::get()?.reserve_elastic(device, stream, layout, tag)?;
        // SAFETY: not null, and writable by this function's contract.
        unsafe { boundary::write_output(ptr, "ptr", c_pointer(reserved)) }
    })
}

/// Gives memory to those of the blocks `first` to `last`, without the last one, that have none: work that is queued in
/// `stream` from now on may use them. Their contents are undefined. All or nothing: returns `WARPOOL_OUT_OF_MEMORY` if
/// there is not enough, and `warpool_last_error` has the report.
///
/// # Safety
/// `stream` is NULL or a stream of the driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_elastic_commit(ptr: *mut c_void, first: u64, last: u64, stream: *mut c_void) -> c_int {
    // SAFETY: a live stream by this function's contract.
    unsafe { change(ptr, first..last, stream, ElasticMemory::commit) }
}

/// Takes the memory of those of the blocks `first` to `last`, without the last one, that have some, once the work that
/// `stream` holds now is done. Work in other streams that uses them must be ordered before that.
///
/// # Safety
/// `stream` is NULL or a stream of the driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_elastic_decommit(
    ptr: *mut c_void,
    first: u64,
    last: u64,
    stream: *mut c_void,
) -> c_int {
    // SAFETY: a live stream by this function's contract.
    unsafe { change(ptr, first..last, stream, ElasticMemory::decommit) }
}

/// # Safety
/// `stream` is null or a live stream of the driver.
unsafe fn change(
    ptr: *mut c_void,
    blocks: Range<u64>,
    stream: *mut c_void,
    change: impl FnOnce(&ElasticMemory, Range<u64>, &warpool::Stream) -> warpool::Result<()>,
) -> c_int {
    // SAFETY: by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    let changed = boundary::run(|| {
        let runtime = runtime::get()?;
        let memory = runtime.elastic(device_ptr(ptr))?;
        Ok(change(&memory, blocks, &runtime.stream_of(&memory, stream)?)?)
    });
    match changed {
        Ok(()) => 0,
        Err(Error::Warpool(warpool::Error::OutOfMemory(_))) => WARPOOL_OUT_OF_MEMORY,
        Err(_) => 1,
    }
}

/// Records that work in `stream` uses the memory without being ordered by commits and decommits there: pages of
/// decommitted blocks, and all after the release, then serve others only after that stream's work, too.
///
/// # Safety
/// `stream` is NULL or a stream of the driver, and stays alive as long as the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_elastic_record_stream(ptr: *mut c_void, stream: *mut c_void) -> c_int {
    // SAFETY: a live stream by this function's contract.
    let stream = unsafe { foreign_stream(stream) };
    boundary::status(|| {
        let runtime = runtime::get()?;
        let memory = runtime.elastic(device_ptr(ptr))?;
        Ok(memory.record_use(&runtime.stream_of(&memory, stream)?)?)
    })
}

/// Elastic memory, as `warpool_elastic_info` describes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ElasticInfo {
    /// Blocks that there are.
    pub blocks: i64,
    /// Blocks that are committed.
    pub committed: i64,
    /// The bytes of the committed blocks, in all rows.
    pub bytes_committed: i64,
    /// The bytes of all addresses.
    pub bytes: i64,
    /// The largest page of its memory.
    pub page_bytes: i64,
    /// Ranges of blocks that begin and end at multiples of this share no page with others; 0 if there is no such
    /// number.
    pub blocks_per_page: i64,
}

/// Describes elastic memory.
///
/// # Safety
/// `info` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_elastic_info(ptr: *mut c_void, info: *mut ElasticInfo) -> c_int {
    boundary::status(|| {
        let described = describe(&*runtime::get()?.elastic(device_ptr(ptr))?);
        // SAFETY: null or writable by this function's contract.
        unsafe { boundary::write_output(info, "info", described) }
    })
}

fn describe(memory: &ElasticMemory) -> ElasticInfo {
    let layout = memory.layout();
    ElasticInfo {
        blocks: signed(layout.blocks),
        committed: signed(memory.committed()),
        bytes_committed: signed(memory.committed_bytes()),
        bytes: signed(memory.bytes()),
        page_bytes: signed(memory.page_bytes()),
        blocks_per_page: signed(layout.blocks_per_page(memory.page_bytes()).unwrap_or(0)),
    }
}

/// Writes 1 to `all` if all of the blocks `first` to `last`, without the last one, are committed, else 0.
///
/// # Safety
/// `all` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_elastic_committed(ptr: *mut c_void, first: u64, last: u64, all: *mut c_int) -> c_int {
    boundary::status(|| {
        let committed = runtime::get()?.elastic(device_ptr(ptr))?.is_committed(first..last);
        // SAFETY: null or writable by this function's contract.
        unsafe { boundary::write_output(all, "all", c_int::from(committed)) }
    })
}

/// Returns elastic memory and its addresses, without waiting: they serve others once all work in its stream, and in
/// those that were recorded, is done. In a forked child nothing happens.
///
/// # Safety
/// Nothing uses the addresses afterwards but work that was submitted before, in its stream or ordered before that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_elastic_release(ptr: *mut c_void) {
    static LOG: FailureLog = FailureLog::new("warpool_elastic_release");
    boundary::run_logged(&LOG, || match runtime::get() {
        Ok(runtime) => runtime.release_elastic(device_ptr(ptr)),
        Err(Error::Forked) => Ok(()),
        Err(error) => Err(error),
    });
}

/// Writes to `bytes` how much could be committed or allocated on a device now, in whole pages: what the driver has left
/// within the limits, and free pages of all streams. Other programs and threads may take them first.
///
/// # Safety
/// `bytes` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_headroom(device: c_int, bytes: *mut i64) -> c_int {
    boundary::status(|| {
        let room = signed(runtime::get()?.headroom(device)?);
        // SAFETY: null or writable by this function's contract.
        unsafe { boundary::write_output(bytes, "bytes", room) }
    })
}

/// A tensor of the DLPack exchange format, version 0: the layout is fixed by that standard.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    type_code: u8,
    type_bits: u8,
    type_lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// A tensor of that format with its owner.
#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

/// What keeps the memory of a tensor alive. The tensor comes first: its address is that of the owner.
#[repr(C)]
struct DlOwner {
    managed: DlManagedTensor,
    shape: Vec<i64>,
    memory: Arc<ElasticMemory>,
}

/// CUDA's number in that format.
const DL_CUDA: i32 = 2;

/// A tensor over all of the elastic memory in the exchange format DLPack (a `DLManagedTensor *`), from which PyTorch
/// and other libraries make theirs: contiguous, of `ndim` dimensions `shape`, whose elements have the type `code` of
/// `bits` bits as DLPack numbers them. The tensor owns the memory from then on: its deleter releases it. Until it is
/// called, the other functions take the address as before. NULL on failure, and `warpool_last_error` has the reason.
///
/// # Safety
/// `shape` points to `ndim` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_elastic_tensor(
    ptr: *mut c_void,
    code: u8,
    bits: u8,
    ndim: c_int,
    shape: *const i64,
) -> *mut c_void {
    let made = boundary::run(|| {
        if shape.is_null() {
            return Err(Error::Null { argument: "shape" });
        }
        let ndim = usize::try_from(ndim).unwrap_or(0);
        // SAFETY: not null, and as many numbers by this function's contract.
        let shape = unsafe { std::slice::from_raw_parts(shape, ndim) }.to_vec();
        let runtime = runtime::get()?;
        check_shape(&*runtime.elastic(device_ptr(ptr))?, bits, &shape)?;
        Ok(tensor(runtime.elastic_for_tensor(device_ptr(ptr))?, (code, bits), shape))
    });
    made.map_or(std::ptr::null_mut(), |owner| Box::into_raw(owner).cast())
}

fn check_shape(memory: &ElasticMemory, bits: u8, shape: &[i64]) -> Result<()> {
    let elements = shape.iter().try_fold(1_u64, |product, &len| product.checked_mul(u64::try_from(len).ok()?));
    let bytes = elements.and_then(|elements| elements.checked_mul(u64::from(bits) / 8));
    if bytes == Some(memory.bytes()) {
        Ok(())
    } else {
        Err(Error::ElasticShape { shape: shape.to_vec(), bits, bytes: memory.bytes() })
    }
}

fn tensor(memory: Arc<ElasticMemory>, (type_code, type_bits): (u8, u8), shape: Vec<i64>) -> Box<DlOwner> {
    let tensor = DlTensor {
        data: c_pointer(memory.ptr()),
        device_type: DL_CUDA,
        device_id: i32::try_from(memory.device_id().0).expect("few devices"),
        ndim: i32::try_from(shape.len()).expect("it was one"),
        type_code,
        type_bits,
        type_lanes: 1,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = DlManagedTensor { tensor, manager: std::ptr::null_mut(), deleter: Some(delete_tensor) };
    let mut owner = Box::new(DlOwner { managed, shape, memory });
    owner.managed.tensor.shape = owner.shape.as_mut_ptr();
    owner
}

/// Frees a tensor of `warpool_elastic_tensor` that nobody has taken, with its memory. NULL is ignored.
///
/// # Safety
/// `tensor` is NULL or comes from `warpool_elastic_tensor`, and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_elastic_tensor_free(tensor: *mut c_void) {
    if !tensor.is_null() {
        // SAFETY: by this function's contract.
        unsafe { delete_tensor(tensor.cast()) }
    }
}

/// # Safety
/// `managed` comes from [`warpool_elastic_tensor`], and is not used afterwards.
unsafe extern "C" fn delete_tensor(managed: *mut DlManagedTensor) {
    static LOG: FailureLog = FailureLog::new("the deleter of an elastic tensor");
    // SAFETY: it is the first field of the owner, which was given away; by this function's contract only once.
    let owner = unsafe { Box::from_raw(managed.cast::<DlOwner>()) };
    boundary::run_logged(&LOG, || match runtime::get() {
        Ok(runtime) => runtime.release_tensor(owner.memory),
        Err(Error::Forked) => Ok(()),
        Err(error) => Err(error),
    });
}
