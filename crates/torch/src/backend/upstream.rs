//! The upstream of a pool over C functions: the allocator that the program passed to `torch.cuda.MemPool`.

use std::ffi::{c_int, c_void};

use warpool::memory::pools::Upstream;
use warpool::{Error, Instance, Result};
use warpool_driver::{DeviceId, DevicePtr, StreamId};

/// Allocates `bytes` for `stream`; NULL is out of memory.
pub(super) type UpstreamAllocate =
    unsafe extern "C" fn(user: *mut c_void, bytes: usize, device: c_int, stream: *mut c_void) -> *mut c_void;

/// Frees what the upstream allocated. Returns 0, or 1 if it failed.
pub(super) type UpstreamFree = unsafe extern "C" fn(user: *mut c_void, ptr: *mut c_void, device: c_int) -> c_int;

/// An upstream over C functions.
pub(crate) struct CallbackUpstream {
    pub(crate) instance: Instance,
    pub(crate) allocate: UpstreamAllocate,
    pub(crate) free: UpstreamFree,
    pub(crate) delete: Option<unsafe extern "C" fn(user: *mut c_void)>,
    pub(crate) user: *mut c_void,
}

// SAFETY: who makes one promises that any thread may call the functions with the argument, also several at once.
unsafe impl Send for CallbackUpstream {}
// SAFETY: as above.
unsafe impl Sync for CallbackUpstream {}

impl Upstream for CallbackUpstream {
    fn allocate(&self, device: DeviceId, bytes: u64, stream: StreamId) -> Result<Option<DevicePtr>> {
        let raw = self.instance.driver().stream_handle(stream)?.raw;
        let stream = std::ptr::without_provenance_mut(raw.0 as usize);
        // SAFETY: callable by the promise of the maker; the stream is the driver's.
        let ptr = unsafe { (self.allocate)(self.user, bytes as usize, device.0 as c_int, stream) };
        Ok((!ptr.is_null()).then(|| DevicePtr(ptr.addr() as u64)))
    }

    fn free(&self, ptr: DevicePtr, _bytes: u64, device: DeviceId, _stream: StreamId) -> Result<()> {
        let memory = std::ptr::without_provenance_mut(ptr.0 as usize);
        // SAFETY: callable by the promise of the maker, and it allocated the memory.
        match unsafe { (self.free)(self.user, memory, device.0 as c_int) } {
            0 => Ok(()),
            _ => Err(Error::ExternalAllocator { why: "it failed to free a segment of its pool".to_owned() }),
        }
    }
}

impl Drop for CallbackUpstream {
    fn drop(&mut self) {
        if let Some(delete) = self.delete {
            // SAFETY: called once, here, by the promise of the maker.
            unsafe { delete(self.user) };
        }
    }
}
