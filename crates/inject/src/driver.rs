//! The driver's functions that are called here, for what the device has in use. A call that fails says nothing.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr;

use crate::loader::Function;

macro_rules! functions {
    ($($name:ident: $symbol:literal)*) => {
        $(static $name: Function = Function::new($symbol);)*

        /// Looks all functions up. The loader's lock is taken for it, so no lock of this library may be held.
        pub(crate) fn resolve() {
            for function in [$(&$name),*] {
                function.address();
            }
        }
    };
}

functions! {
    CTX_GET_DEVICE: c"cuCtxGetDevice"
    DEVICE_GET_COUNT: c"cuDeviceGetCount"
    DEVICE_GET_UUID: c"cuDeviceGetUuid_v2"
    MEM_GET_INFO: c"cuMemGetInfo_v2"
    CTX_PUSH_CURRENT: c"cuCtxPushCurrent_v2"
    CTX_POP_CURRENT: c"cuCtxPopCurrent_v2"
    PRIMARY_CTX_GET_STATE: c"cuDevicePrimaryCtxGetState"
    DEVICE_GET_DEFAULT_MEM_POOL: c"cuDeviceGetDefaultMemPool"
    MEM_POOL_GET_ATTRIBUTE: c"cuMemPoolGetAttribute"
    DEVICE_GET_GRAPH_MEM_ATTRIBUTE: c"cuDeviceGetGraphMemAttribute"
    THREAD_EXCHANGE_CAPTURE_MODE: c"cuThreadExchangeStreamCaptureMode"
}

/// Calls a function of the driver: `call!(NAME: fn(types)(arguments))`. `None` if it is missing or fails.
macro_rules! call {
    ($name:ident: fn($($type:ty),*) ($($argument:expr),*)) => {{
        let address = $name.address();
        if address.is_null() {
            None
        } else {
            // SAFETY: the function of that name has this type; what its arguments point to is valid during the call.
            let result = unsafe {
                transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> u32>(address)($($argument),*)
            };
            (result == 0).then_some(())
        }
    }};
}

pub(crate) type Context = *mut c_void;

/// The device of the current context.
pub(crate) fn current_device() -> Option<c_int> {
    let mut device: c_int = -1;
    call!(CTX_GET_DEVICE: fn(*mut c_int)(&raw mut device))?;
    Some(device)
}

/// How many devices there are.
pub(crate) fn device_count() -> c_int {
    let mut count: c_int = 0;
    call!(DEVICE_GET_COUNT: fn(*mut c_int)(&raw mut count)).map_or(0, |()| count)
}

/// A device's UUID.
pub(crate) fn uuid(device: c_int) -> Option<[u8; 16]> {
    let mut uuid = [0; 16];
    call!(DEVICE_GET_UUID: fn(*mut u8, c_int)(uuid.as_mut_ptr(), device))?;
    Some(uuid)
}

/// Free and total bytes of the device of the current context.
fn info_here() -> Option<(u64, u64)> {
    let (mut free, mut total) = (0usize, 0usize);
    call!(MEM_GET_INFO: fn(*mut usize, *mut usize)(&raw mut free, &raw mut total))?;
    Some((free as u64, total as u64))
}

/// Free and total bytes of a device; `context` is a context of it, or null.
pub(crate) fn info(device: c_int, context: Context) -> Option<(u64, u64)> {
    if current_device() == Some(device) {
        return info_here();
    }
    if context.is_null() {
        return None;
    }
    call!(CTX_PUSH_CURRENT: fn(Context)(context))?;
    let found = info_here();
    let mut popped = ptr::null_mut();
    let _ = call!(CTX_POP_CURRENT: fn(*mut Context)(&raw mut popped));
    found
}

/// Whether a device has its primary context.
pub(crate) fn has_primary_context(device: c_int) -> bool {
    let (mut flags, mut active) = (0, 0);
    let found = call!(
        PRIMARY_CTX_GET_STATE: fn(c_int, *mut c_uint, *mut c_int)(device, &raw mut flags, &raw mut active)
    );
    found.is_some() && active != 0
}

/// The pool of a device from which `cuMemAllocAsync` allocates unless the program chose another.
pub(crate) fn default_pool(device: c_int) -> Option<usize> {
    let mut pool = 0usize;
    call!(DEVICE_GET_DEFAULT_MEM_POOL: fn(*mut usize, c_int)(&raw mut pool, device))?;
    Some(pool)
}

/// CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT.
const POOL_RESERVED: c_int = 5;
/// CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT.
const GRAPH_RESERVED: c_int = 2;

/// What a pool has of its device.
pub(crate) fn pool_reserved(pool: usize) -> u64 {
    let mut bytes = 0u64;
    let found = call!(MEM_POOL_GET_ATTRIBUTE: fn(usize, c_int, *mut u64)(pool, POOL_RESERVED, &raw mut bytes));
    found.map_or(0, |()| bytes)
}

/// What graphs have for their own allocations.
pub(crate) fn graph_reserved(device: c_int) -> u64 {
    let mut bytes = 0u64;
    let found =
        call!(DEVICE_GET_GRAPH_MEM_ATTRIBUTE: fn(c_int, c_int, *mut u64)(device, GRAPH_RESERVED, &raw mut bytes));
    found.map_or(0, |()| bytes)
}

/// Runs `act` so that its calls are allowed while any stream captures.
pub(crate) fn relaxed<T>(act: impl FnOnce() -> T) -> T {
    // CU_STREAM_CAPTURE_MODE_RELAXED.
    let mut mode: c_int = 2;
    let changed = call!(THREAD_EXCHANGE_CAPTURE_MODE: fn(*mut c_int)(&raw mut mode));
    let result = act();
    if changed.is_some() {
        let _ = call!(THREAD_EXCHANGE_CAPTURE_MODE: fn(*mut c_int)(&raw mut mode));
    }
    result
}
