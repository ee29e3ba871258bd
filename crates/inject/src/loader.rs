//! What the loader knows: the driver's own functions, the C library's `dlsym`, and which shared object an address is
//! in.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

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
pub(crate) extern "C" fn real_dlsym() -> Dlsym {
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
