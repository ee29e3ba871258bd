//! How a program finds the driver's functions: as symbols that it is linked to, by `dlsym`, or by `cuGetProcAddress`.
//! All three lead to the functions of `calls.rs`; these find the driver's own here.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::calls;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// A function of the driver, looked up when it is first used.
pub(crate) struct Function {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Function {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Its address; null if there is no driver, or the driver lacks it.
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let driver = driver_library();
        if driver.is_null() {
            return ptr::null_mut();
        }
        // SAFETY: a loaded library and a null-terminated name.
        let found = unsafe { real_dlsym()(driver, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// The driver's library, which is loaded unless it is.
fn driver_library() -> *mut c_void {
    static LIBRARY: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let known = LIBRARY.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: a null-terminated name. The library is never closed.
    let found = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY) };
    LIBRARY.store(found, Ordering::Relaxed);
    found
}

/// The C library's `dlsym`.
extern "C" fn real_dlsym() -> Dlsym {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let mut real = REAL.load(Ordering::Relaxed);
    if real.is_null() {
        // In libc since glibc 2.34, before in libdl, which has another version of it.
        for version in [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"] {
            // SAFETY: null-terminated texts.
            real = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
            if !real.is_null() {
                break;
            }
        }
        REAL.store(real, Ordering::Relaxed);
    }
    if real.is_null() {
        // Without it the program cannot find a function, and would crash at another place.
        std::process::abort();
    }
    // SAFETY: it is the function of that name, which the C library keeps.
    unsafe { std::mem::transmute::<*mut c_void, Dlsym>(real) }
}

/// Replaces the C library's function. `RTLD_DEFAULT` (0) and `RTLD_NEXT` (-1) mean the library of the caller, by the
/// return address: these calls are passed on by a jump, which leaves it as it is.
///
/// # Safety
/// As the C library's.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "lea rax, [rdi + 1]",
        "cmp rax, 1",
        "jbe 2f",
        "jmp {find}",
        "2:",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {real}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        find = sym find,
        real = sym real_dlsym,
    )
}

/// Replaces the C library's function. `RTLD_DEFAULT` (0) and `RTLD_NEXT` (-1) mean the library of the caller, by the
/// return address: these calls are passed on by a jump, which leaves it as it is.
///
/// # Safety
/// As the C library's.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "cmn x0, #1",
        "b.eq 2f",
        "cbz x0, 2f",
        "b {find}",
        "2:",
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "bl {real}",
        "mov x9, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x9",
        find = sym find,
        real = sym real_dlsym,
    )
}

/// `dlsym` in one library. Memory is not allocated here: allocators look their functions up while they start.
unsafe extern "C" fn find(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's arguments.
    let found = unsafe { real_dlsym()(handle, name) };
    if found.is_null() {
        return found;
    }
    // SAFETY: the function read it as a null-terminated text.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    match calls::replacement(name) {
        Some(ours) if is_of_driver(found) => ours,
        _ => found,
    }
}

/// Whether the address is in the driver's library.
fn is_of_driver(address: *mut c_void) -> bool {
    object_of(address).is_some_and(|object| file_name(object.path).starts_with(b"libcuda.so"))
}

/// The shared object that an address is in.
#[derive(Clone, Copy)]
pub(crate) struct Object {
    pub(crate) base: usize,
    /// Empty for the program itself.
    pub(crate) path: &'static [u8],
}

/// Which shared object is there. The path is valid until that is unloaded, which libraries of CUDA are not. (`dladdr`
/// also looks for the nearest symbol, of which PyTorch's libraries have many.)
pub(crate) fn object_of(address: *mut c_void) -> Option<Object> {
    struct Search {
        address: usize,
        found: Option<Object>,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: libc::size_t, search: *mut c_void) -> c_int {
        // SAFETY: given below, by a call that waits.
        let search = unsafe { &mut *search.cast::<Search>() };
        // SAFETY: the loader's, during its call.
        let info = unsafe { &*info };
        if info.dlpi_phdr.is_null() {
            return 0;
        }
        // SAFETY: as many headers as it says.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let base = info.dlpi_addr as usize;
        let offset = search.address.wrapping_sub(base) as u64;
        let is_there = |header: &libc::Elf64_Phdr| {
            header.p_type == libc::PT_LOAD && offset.wrapping_sub(header.p_vaddr) < header.p_memsz
        };
        if !headers.iter().any(is_there) {
            return 0;
        }
        // SAFETY: the loader's name of the object, null-terminated.
        let path = if info.dlpi_name.is_null() { c"" } else { unsafe { CStr::from_ptr(info.dlpi_name) } };
        search.found = Some(Object { base, path: path.to_bytes() });
        1
    }
    let mut search = Search { address: address.addr(), found: None };
    // SAFETY: the function takes what is given here.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// The last part of a path.
pub(crate) fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
}

/// The exported name of the function that `cuGetProcAddress` returns for `symbol`, for those of `calls.rs`: which
/// version it is depends on the version of CUDA that was asked for.
pub(crate) fn exported_name(symbol: &[u8], version: c_int, is_per_thread: bool) -> Option<&'static [u8]> {
    /// Symbol, the version from which on it has this signature, and its exported names.
    type Entry = (&'static [u8], c_int, &'static [u8], &'static [u8]);
    const BY_VERSION: &[Entry] = &[
        (b"cuMemAlloc", 3020, b"cuMemAlloc_v2", b"cuMemAlloc_v2"),
        (b"cuMemAllocPitch", 3020, b"cuMemAllocPitch_v2", b"cuMemAllocPitch_v2"),
        (b"cuMemFree", 3020, b"cuMemFree_v2", b"cuMemFree_v2"),
        (b"cuModuleGetGlobal", 3020, b"cuModuleGetGlobal_v2", b"cuModuleGetGlobal_v2"),
        (b"cuStreamDestroy", 4000, b"cuStreamDestroy_v2", b"cuStreamDestroy_v2"),
        (b"cuDevicePrimaryCtxRelease", 11000, b"cuDevicePrimaryCtxRelease_v2", b"cuDevicePrimaryCtxRelease_v2"),
        (b"cuDevicePrimaryCtxReset", 11000, b"cuDevicePrimaryCtxReset_v2", b"cuDevicePrimaryCtxReset_v2"),
        (b"cuGraphInstantiate", 12000, b"cuGraphInstantiateWithFlags", b"cuGraphInstantiateWithFlags"),
        (b"cuGetProcAddress", 12000, b"cuGetProcAddress_v2", b"cuGetProcAddress_v2"),
        (b"cuMemAllocAsync", 0, b"cuMemAllocAsync", b"cuMemAllocAsync_ptsz"),
        (b"cuMemAllocFromPoolAsync", 0, b"cuMemAllocFromPoolAsync", b"cuMemAllocFromPoolAsync_ptsz"),
        (b"cuLaunchKernel", 0, b"cuLaunchKernel", b"cuLaunchKernel_ptsz"),
        (b"cuLaunchKernelEx", 0, b"cuLaunchKernelEx", b"cuLaunchKernelEx_ptsz"),
        (b"cuLaunchCooperativeKernel", 0, b"cuLaunchCooperativeKernel", b"cuLaunchCooperativeKernel_ptsz"),
        (b"cuGraphUpload", 0, b"cuGraphUpload", b"cuGraphUpload_ptsz"),
        (b"cuGraphLaunch", 0, b"cuGraphLaunch", b"cuGraphLaunch_ptsz"),
        (b"cuGraphInstantiateWithParams", 0, b"cuGraphInstantiateWithParams", b"cuGraphInstantiateWithParams_ptsz"),
    ];
    if let Some((_, since, legacy, per_thread)) = BY_VERSION.iter().find(|entry| entry.0 == symbol) {
        return (version >= *since).then_some(if is_per_thread { per_thread } else { legacy });
    }
    // The others have had one signature ever since.
    calls::name_of(symbol).filter(|name| !name.ends_with(b"_v2") && !name.ends_with(b"_ptsz"))
}
