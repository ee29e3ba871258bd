//! Checkpoints of pools: PyTorch's graph trees save the allocated blocks of a pool and restore them later.

use std::ffi::{c_int, c_void};

use warpool::memory::pools::PoolCheckpoint;

use super::c_pointer;
use crate::boundary;
use crate::error::Error;
use crate::runtime;
use crate::torch_pool::TorchPoolId;

/// The allocated blocks of a pool at some moment. Opaque.
pub struct Checkpoint(PoolCheckpoint);

/// Receives a block.
pub type BlockVisitor = Option<unsafe extern "C" fn(user: *mut c_void, ptr: *mut c_void)>;

/// Records the allocated blocks of a pool, and writes the record to `checkpoint`.
///
/// # Safety
/// `checkpoint` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_checkpoint(
    device: c_int,
    pool: TorchPoolId,
    checkpoint: *mut *mut Checkpoint,
) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let device = runtime.device_id(device)?;
        let pool = runtime.routing.pool(runtime.allocator(), device, pool)?;
        let recorded = Box::new(Checkpoint(runtime.checkpoints()?.checkpoint(device, pool)?));
        if checkpoint.is_null() {
            return Err(Error::Null { argument: "checkpoint" });
        }
        // SAFETY: not null, and writable by this function's contract.
        unsafe { checkpoint.write(Box::into_raw(recorded)) };
        Ok(())
    })
}

/// Frees what is allocated in the pool, and allocates what the checkpoint recorded. Calls `freed` with each block that
/// was freed, and `allocated` with each block that is allocated now and belongs to the caller; one may be both. A
/// failure changes nothing and calls neither.
///
/// # Safety
/// `checkpoint` came from `warpool_checkpoint` and was not deleted. `freed` and `allocated` are NULL, which is an
/// error, or may be called with `user` and any address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_restore(
    checkpoint: *const Checkpoint,
    freed: BlockVisitor,
    allocated: BlockVisitor,
    user: *mut c_void,
) -> c_int {
    boundary::status(|| {
        let freed = freed.ok_or(Error::Null { argument: "freed" })?;
        let allocated = allocated.ok_or(Error::Null { argument: "allocated" })?;
        // SAFETY: null or alive by this function's contract.
        let checkpoint = unsafe { checkpoint.as_ref() }.ok_or(Error::Null { argument: "checkpoint" })?;
        let restored = runtime::get()?.checkpoints()?.restore(&checkpoint.0)?;
        for ptr in restored.freed {
            // SAFETY: callable by this function's contract.
            unsafe { freed(user, c_pointer(ptr)) };
        }
        for allocation in restored.allocated {
            // SAFETY: callable by this function's contract.
            unsafe { allocated(user, c_pointer(allocation.ptr)) };
        }
        Ok(())
    })
}

/// Deletes a checkpoint; NULL is ignored.
///
/// # Safety
/// `checkpoint` came from `warpool_checkpoint`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_delete_checkpoint(checkpoint: *mut Checkpoint) {
    if !checkpoint.is_null() {
        // SAFETY: it came from `Box::into_raw` in `warpool_checkpoint`, and has no other user.
        drop(unsafe { Box::from_raw(checkpoint) });
    }
}
