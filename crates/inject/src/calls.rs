//! The driver's functions that stand in for the driver's own. Each makes the driver's call once with its arguments, and
//! returns its result.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::caller::owner;
use crate::ledger::{self, Key, Kind, measure};
use crate::loader::Function;
use crate::versions::exported_name;
use crate::{driver, forked, report};

/// CUDA_ERROR_NOT_FOUND: there is no driver, or it lacks the function.
const NOT_FOUND: u32 = 500;

type Pointer = *mut c_void;

/// Declares functions: `name(real; arguments) { … }`, where `real` is the driver's.
macro_rules! functions {
    ($($name:ident($real:ident; $($argument:ident: $type:ty),*) $body:block)*) => {
        $(
            #[doc = concat!("The driver's `", stringify!($name), "`.\n\n# Safety\nAs the driver's.")]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
                static FUNCTION: Function = Function::new(
                    match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("a name"),
                    },
                );
                let address = FUNCTION.address();
                if address.is_null() {
                    return NOT_FOUND;
                }
                // SAFETY: the driver's function of that name has this type.
                let function = unsafe {
                    std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> u32>(address)
                };
                // SAFETY: what the caller promises for its arguments.
                let $real = || unsafe { function($($argument),*) };
                if forked::is_forked() {
                    return $real();
                }
                $body
            }
        )*

        /// The names, with the functions that replace the driver's.
        static ALL: &[(&[u8], Address)] = &[$((stringify!($name).as_bytes(), Address($name as *const c_void)),)*];
    };
}

struct Address(*const c_void);
// SAFETY: addresses of functions.
unsafe impl Sync for Address {}

/// The function that replaces the driver's of that name.
pub(crate) fn replacement(name: &[u8]) -> Option<*mut c_void> {
    if !name.starts_with(b"cu") {
        return None;
    }
    ALL.iter().find(|entry| entry.0 == name).map(|entry| entry.1.0.cast_mut())
}

/// The driver is ready.
fn started() {
    static STARTED: AtomicBool = AtomicBool::new(false);
    if !STARTED.swap(true, Ordering::Relaxed) {
        forked::watch();
        ledger::started();
        report::write_at_exit();
    }
}

/// What the driver takes for an allocation of its own address: pages of 2 MiB, in which small ones share.
fn taken(bytes: usize) -> u64 {
    const PAGE: u64 = 2 << 20;
    let bytes = bytes as u64;
    if bytes >= PAGE / 2 { bytes.next_multiple_of(PAGE) } else { bytes.next_multiple_of(512) }
}

/// Handles that were used in a call for the first time, among so many: enough for the kernels of a training.
const HANDLES: usize = 1 << 16;

static SEEN: [AtomicU64; HANDLES] = [const { AtomicU64::new(0) }; HANDLES];

/// Whether a handle was used in that call before. If not, the place where that is to be noted.
fn find_use(key: u64) -> Result<(), Option<&'static AtomicU64>> {
    let first = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as usize;
    for at in first..first + 64 {
        let slot = &SEEN[at % HANDLES];
        match slot.load(Ordering::Relaxed) {
            found if found == key => return Ok(()),
            0 => return Err(Some(slot)),
            _ => {}
        }
    }
    Err(None)
}

/// A call that may load a kernel, or prepare a graph, the first time that its handle is used. Later ones take nothing.
fn first_use(call: u64, handle: Pointer, kind: Kind, real: impl FnOnce() -> u32) -> u32 {
    // Handles are addresses of less than 56 bits.
    let key = (handle.addr() as u64) | (call << 56);
    let Err(place) = find_use(key) else { return real() };
    let result = measured(kind, real);
    // Noted after the call: another thread's use at the same time is measured too. Whoever takes the place first has
    // it; another is found at its next use.
    if let Some(place) = place {
        let _ = place.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed);
    }
    result
}

/// A call that may take memory of the current device.
fn measured(kind: Kind, real: impl FnOnce() -> u32) -> u32 {
    during(None, owner(), kind, real)
}

/// A call that may take memory of a device, or of the current one.
fn during(device: Option<c_int>, owner: &'static str, kind: Kind, real: impl FnOnce() -> u32) -> u32 {
    let measured = measure(device, owner, kind);
    let result = real();
    if measured.end() {
        report::changed();
    }
    result
}

/// A call that has to do with tracked memory, of which the rest is how the driver rounds, and its page tables.
fn tracked(device: Option<c_int>, real: impl FnOnce() -> u32) -> u32 {
    during(device, ledger::CUDA, Kind::Overhead, real)
}

/// What `out` points to, after a call that succeeded.
fn read<T: Copy>(out: *const T) -> T {
    // SAFETY: the driver has written it.
    unsafe { out.read() }
}

/// The device in `CUmemAllocationProp`, if the memory is a device's: after two words come the place's type and number.
fn device_in(properties: *const c_int) -> Option<c_int> {
    // SAFETY: the driver has read this structure, which begins with more than four words.
    let [_, _, kind, device] = unsafe { properties.cast::<[c_int; 4]>().read() };
    // CU_MEM_LOCATION_TYPE_DEVICE.
    (kind == 1).then_some(device)
}

/// The driver's function that was found for `symbol`, or the one here that replaces it.
fn replace_found(symbol: *const c_char, found: *mut Pointer, version: c_int, flags: c_ulonglong) {
    if symbol.is_null() || found.is_null() || read(found).is_null() {
        return;
    }
    // SAFETY: the driver has read it as a null-terminated text.
    let symbol = unsafe { CStr::from_ptr(symbol) }.to_bytes();
    // CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
    let name = exported_name(symbol, version, flags & 2 != 0);
    if let Some(ours) = name.and_then(replacement) {
        // SAFETY: the driver has written there.
        unsafe { found.write(ours) };
    }
}

/// An allocation of `bytes`, of which the address is written to `out`.
fn allocate(out: *mut u64, bytes: impl FnOnce() -> usize, real: impl FnOnce() -> u32) -> u32 {
    let owner = owner();
    tracked(None, || {
        let result = real();
        if result == 0
            && let Some(device) = driver::current_device()
        {
            ledger::allocated(device, owner, Key::Pointer(read(out)), taken(bytes()));
        }
        result
    })
}

/// Frees what is known by `key`.
fn free(key: Key, real: impl FnOnce() -> u32) -> u32 {
    tracked(ledger::device_of(key), || {
        let result = real();
        if result == 0 {
            ledger::freed(key);
        }
        result
    })
}

functions! {
    cuInit(real; flags: c_uint) {
        let result = real();
        if result == 0 {
            started();
        }
        result
    }
    cuGetProcAddress(real; symbol: *const c_char, found: *mut Pointer, version: c_int, flags: c_ulonglong) {
        let result = real();
        if result == 0 {
            replace_found(symbol, found, version, flags);
        }
        result
    }
    cuGetProcAddress_v2(
        real;
        symbol: *const c_char, found: *mut Pointer, version: c_int, flags: c_ulonglong, status: *mut c_int
    ) {
        let result = real();
        if result == 0 {
            replace_found(symbol, found, version, flags);
        }
        result
    }

    cuDevicePrimaryCtxRetain(real; context: *mut Pointer, device: c_int) {
        ledger::before_context(device);
        let result = real();
        if result == 0 {
            ledger::context_made(device, Some(read(context)));
        }
        result
    }
    cuDevicePrimaryCtxRelease_v2(real; device: c_int) {
        let result = real();
        ledger::context_released(device);
        result
    }
    cuDevicePrimaryCtxReset_v2(real; device: c_int) {
        let result = real();
        ledger::context_released(device);
        result
    }
    cuCtxCreate_v2(real; context: *mut Pointer, flags: c_uint, device: c_int) {
        ledger::before_context(device);
        let result = real();
        if result == 0 {
            ledger::context_made(device, None);
        }
        result
    }
    cuCtxCreate_v4(real; context: *mut Pointer, parameters: Pointer, flags: c_uint, device: c_int) {
        ledger::before_context(device);
        let result = real();
        if result == 0 {
            ledger::context_made(device, None);
        }
        result
    }
    cuCtxSetLimit(real; limit: c_int, value: usize) { measured(Kind::Context, real) }

    cuMemAlloc_v2(real; out: *mut u64, bytes: usize) { allocate(out, || bytes, real) }
    cuMemAllocPitch_v2(
        real; out: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint
    ) {
        allocate(out, || read(pitch).saturating_mul(height), real)
    }
    cuMemFree_v2(real; address: u64) { free(Key::Pointer(address), real) }
    cuMemCreate(real; handle: *mut u64, bytes: usize, properties: *const c_int, flags: c_ulonglong) {
        let device = if properties.is_null() { None } else { device_in(properties) };
        let Some(device) = device else { return real() };
        let owner = owner();
        tracked(Some(device), || {
            let result = real();
            if result == 0 {
                ledger::allocated(device, owner, Key::Handle(read(handle)), bytes as u64);
            }
            result
        })
    }
    cuMemRelease(real; handle: u64) { free(Key::Handle(handle), real) }
    cuMemMap(real; address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        tracked(ledger::device_of(Key::Handle(handle)), real)
    }
    cuMemUnmap(real; address: u64, bytes: usize) { tracked(None, real) }
    cuMemSetAccess(real; address: u64, bytes: usize, access: Pointer, count: usize) { tracked(None, real) }
    cuMemAllocAsync(real; out: *mut u64, bytes: usize, stream: Pointer) {
        ledger::pools_are_used();
        real()
    }
    cuMemAllocAsync_ptsz(real; out: *mut u64, bytes: usize, stream: Pointer) {
        ledger::pools_are_used();
        real()
    }
    cuMemAllocFromPoolAsync(real; out: *mut u64, bytes: usize, pool: Pointer, stream: Pointer) {
        ledger::pools_are_used();
        real()
    }
    cuMemAllocFromPoolAsync_ptsz(real; out: *mut u64, bytes: usize, pool: Pointer, stream: Pointer) {
        ledger::pools_are_used();
        real()
    }
    cuMemPoolCreate(real; pool: *mut usize, properties: *const c_int) {
        let result = real();
        // The place has the same offset as in `CUmemAllocationProp`.
        if result == 0 && let Some(device) = device_in(properties) {
            ledger::pool_made(read(pool), device, owner());
        }
        result
    }
    cuMemPoolDestroy(real; pool: Pointer) {
        ledger::pool_gone(pool.addr());
        real()
    }

    cuModuleLoad(real; module: *mut Pointer, file: *const c_char) { measured(Kind::Modules, real) }
    cuModuleLoadData(real; module: *mut Pointer, image: Pointer) { measured(Kind::Modules, real) }
    cuModuleLoadDataEx(
        real; module: *mut Pointer, image: Pointer, count: c_uint, options: Pointer, values: Pointer
    ) { measured(Kind::Modules, real) }
    cuModuleLoadFatBinary(real; module: *mut Pointer, image: Pointer) { measured(Kind::Modules, real) }
    cuModuleUnload(real; module: Pointer) { measured(Kind::Modules, real) }
    cuModuleGetFunction(real; function: *mut Pointer, module: Pointer, name: *const c_char) {
        measured(Kind::Modules, real)
    }
    cuModuleGetGlobal_v2(real; address: *mut u64, bytes: *mut usize, module: Pointer, name: *const c_char) {
        measured(Kind::Modules, real)
    }
    cuLibraryLoadData(
        real;
        library: *mut Pointer, code: Pointer, jit_options: Pointer, jit_values: Pointer, jit_count: c_uint,
        options: Pointer, values: Pointer, count: c_uint
    ) { measured(Kind::Modules, real) }
    cuLibraryLoadFromFile(
        real;
        library: *mut Pointer, file: *const c_char, jit_options: Pointer, jit_values: Pointer, jit_count: c_uint,
        options: Pointer, values: Pointer, count: c_uint
    ) { measured(Kind::Modules, real) }
    cuLibraryUnload(real; library: Pointer) { measured(Kind::Modules, real) }
    cuLibraryGetKernel(real; kernel: *mut Pointer, library: Pointer, name: *const c_char) {
        measured(Kind::Modules, real)
    }
    cuLibraryGetModule(real; module: *mut Pointer, library: Pointer) { measured(Kind::Modules, real) }
    cuLibraryGetGlobal(real; address: *mut u64, bytes: *mut usize, library: Pointer, name: *const c_char) {
        measured(Kind::Modules, real)
    }
    cuKernelGetFunction(real; function: *mut Pointer, kernel: Pointer) {
        first_use(1, kernel, Kind::Modules, real)
    }
    cuKernelGetAttribute(real; value: *mut c_int, attribute: c_int, kernel: Pointer, device: c_int) {
        first_use(2, kernel, Kind::Modules, real)
    }
    cuKernelSetAttribute(real; attribute: c_int, value: c_int, kernel: Pointer, device: c_int) {
        first_use(3, kernel, Kind::Modules, real)
    }
    cuFuncGetAttribute(real; value: *mut c_int, attribute: c_int, function: Pointer) {
        first_use(4, function, Kind::Modules, real)
    }
    cuFuncSetAttribute(real; function: Pointer, attribute: c_int, value: c_int) {
        first_use(5, function, Kind::Modules, real)
    }
    cuFuncLoad(real; function: Pointer) { first_use(6, function, Kind::Modules, real) }
    cuOccupancyMaxActiveBlocksPerMultiprocessor(
        real; blocks: *mut c_int, function: Pointer, threads: c_int, shared: usize
    ) { first_use(7, function, Kind::Modules, real) }
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        real; blocks: *mut c_int, function: Pointer, threads: c_int, shared: usize, flags: c_uint
    ) { first_use(7, function, Kind::Modules, real) }
    cuLaunchKernel(
        real;
        function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Pointer, parameters: Pointer, extra: Pointer
    ) { first_use(8, function, Kind::Modules, real) }
    cuLaunchKernel_ptsz(
        real;
        function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Pointer, parameters: Pointer, extra: Pointer
    ) { first_use(8, function, Kind::Modules, real) }
    cuLaunchKernelEx(real; shape: Pointer, function: Pointer, parameters: Pointer, extra: Pointer) {
        first_use(8, function, Kind::Modules, real)
    }
    cuLaunchKernelEx_ptsz(real; shape: Pointer, function: Pointer, parameters: Pointer, extra: Pointer) {
        first_use(8, function, Kind::Modules, real)
    }
    cuLaunchCooperativeKernel(
        real;
        function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Pointer, parameters: Pointer
    ) { first_use(9, function, Kind::Modules, real) }
    cuLaunchCooperativeKernel_ptsz(
        real;
        function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Pointer, parameters: Pointer
    ) { first_use(9, function, Kind::Modules, real) }

    cuGraphInstantiateWithFlags(real; exec: *mut Pointer, graph: Pointer, flags: c_ulonglong) {
        measured(Kind::Graphs, real)
    }
    cuGraphInstantiateWithParams(real; exec: *mut Pointer, graph: Pointer, parameters: Pointer) {
        measured(Kind::Graphs, real)
    }
    cuGraphInstantiateWithParams_ptsz(real; exec: *mut Pointer, graph: Pointer, parameters: Pointer) {
        measured(Kind::Graphs, real)
    }
    cuGraphUpload(real; exec: Pointer, stream: Pointer) { measured(Kind::Graphs, real) }
    cuGraphUpload_ptsz(real; exec: Pointer, stream: Pointer) { measured(Kind::Graphs, real) }
    cuGraphLaunch(real; exec: Pointer, stream: Pointer) { first_use(10, exec, Kind::Graphs, real) }
    cuGraphLaunch_ptsz(real; exec: Pointer, stream: Pointer) { first_use(10, exec, Kind::Graphs, real) }
    cuGraphExecDestroy(real; exec: Pointer) { measured(Kind::Graphs, real) }

    cuStreamCreate(real; stream: *mut Pointer, flags: c_uint) { measured(Kind::Streams, real) }
    cuStreamCreateWithPriority(real; stream: *mut Pointer, flags: c_uint, priority: c_int) {
        measured(Kind::Streams, real)
    }
    cuStreamDestroy_v2(real; stream: Pointer) { measured(Kind::Streams, real) }
}
