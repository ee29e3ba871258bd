//! Turns a failed allocation into a C++ exception for PyTorch, which does not check for null.
//!
//! If PyTorch's libraries are loaded, out of memory becomes a `c10::OutOfMemoryError`, built and thrown through the
//! Itanium C++ ABI, so that Python raises `torch.OutOfMemoryError`. Any other failure, and out of memory if a symbol is
//! missing, becomes what `TORCH_CHECK` throws, a `RuntimeError`. Without PyTorch nothing is thrown and the caller gets
//! null.
//!
//! The rule: a frame that an exception passes owns nothing. So the error arrives here as plain pointers.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY};
use warpool_driver::fork;

/// A failed allocation as plain data, without a destructor.
#[derive(Clone, Copy)]
pub(crate) struct Failure {
    out_of_memory: bool,
    /// Null-terminated.
    text: *const c_char,
}

impl Failure {
    /// A failure with a null-terminated text.
    ///
    /// # Safety
    /// `text` stays valid until the failure is thrown or dropped.
    pub(crate) unsafe fn new(out_of_memory: bool, text: *const c_char) -> Self {
        Self { out_of_memory, text }
    }
}

/// Throws `failure` if PyTorch is loaded; returns null if not.
///
/// # Safety
/// No frame between here and the C++ caller has anything to drop: the exception passes them all.
pub(crate) unsafe fn throw(failure: Failure) -> *mut c_void {
    let Some(torch) = torch() else { return std::ptr::null_mut() };
    if failure.out_of_memory
        && let Some(exception) = torch.out_of_memory
    {
        // SAFETY: the symbols come from the libraries that PyTorch itself uses, the text is null-terminated, and
        // neither this frame nor, by the caller's promise, those above own anything.
        unsafe { exception.throw(failure.text) }
    }
    if let Some(check_fail) = torch.check_fail {
        // SAFETY: as above.
        unsafe { check_fail(FUNCTION.as_ptr(), FILE.as_ptr(), 0, failure.text) }
    }
    std::ptr::null_mut()
}

/// The source location in the exception, shown in C++ stacks.
const FUNCTION: &CStr = c"warpool_malloc";
const FILE: &CStr = c"libwarpool_torch.so";

/// The symbols for throwing PyTorch's exceptions.
#[derive(Clone, Copy)]
struct Torch {
    out_of_memory: Option<OutOfMemory>,
    check_fail: Option<CheckFail>,
}

/// `c10::detail::torchCheckFail(const char* function, const char* file, uint32_t line, const char* text)`.
type CheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

/// The symbols for a `c10::OutOfMemoryError`: a `c10::Error` with its own vtable and type.
#[derive(Clone, Copy)]
struct OutOfMemory {
    type_info: *mut c_void,
    /// The start of the object; its functions follow after two entries, destructor first.
    vtable: *mut c_void,
    /// `c10::Error::Error(SourceLocation, std::string)`, the base object constructor.
    error_constructor: unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut StdString),
    /// `std::string::string(const char*, const std::allocator<char>&)`.
    string_constructor: unsafe extern "C-unwind" fn(*mut StdString, *const c_char, *const u8),
    string_destructor: unsafe extern "C-unwind" fn(*mut StdString),
    allocate_exception: unsafe extern "C-unwind" fn(usize) -> *mut c_void,
    throw: unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !,
}

// SAFETY: functions and constants of libraries that are never unloaded; none is tied to a thread.
unsafe impl Send for Torch {}
// SAFETY: as above, and everything is immutable.
unsafe impl Sync for Torch {}

/// `c10::SourceLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// Storage for a `std::string`: 32 bytes in libstdc++.
#[repr(C, align(8))]
struct StdString([u8; 32]);

/// More than the size of a `c10::Error`, which no symbol contains: 128 bytes in PyTorch 2.11.
const EXCEPTION_BYTES: usize = 512;

impl OutOfMemory {
    /// # Safety
    /// Each symbol has the type that its name says, `text` is null-terminated, and no frame that the exception passes
    /// has anything to drop.
    unsafe fn throw(self, text: *const c_char) -> ! {
        let mut string = StdString([0; 32]);
        let allocator = 0_u8;
        // SAFETY: `string` has room for a string, and `text` is null-terminated. A `std::allocator` is an empty object.
        unsafe { (self.string_constructor)(&raw mut string, text, &raw const allocator) };
        // SAFETY: takes a size. Without host memory it terminates the program, as every throw would.
        let exception = unsafe { (self.allocate_exception)(EXCEPTION_BYTES) };
        let location = SourceLocation { function: FUNCTION.as_ptr(), file: FILE.as_ptr(), line: 0 };
        // SAFETY: `exception` has room for an error. In this ABI a string passed by value is passed by address, and the
        // caller destroys it.
        unsafe { (self.error_constructor)(exception, location, &raw mut string) };
        // SAFETY: constructed above; if it was moved from, it is still a string.
        unsafe { (self.string_destructor)(&raw mut string) };
        // SAFETY: a vtable starts with an offset and the type; the functions follow.
        let functions = unsafe { self.vtable.cast::<*mut c_void>().add(2) };
        // SAFETY: an object with virtual functions starts with a pointer to them. The derived class has no other state.
        unsafe { exception.cast::<*mut *mut c_void>().write(functions) };
        // SAFETY: the first function is the complete object destructor, which does not free, as a throw requires.
        let destructor = unsafe { functions.read() };
        // SAFETY: object, type and destructor are those of one class.
        unsafe { (self.throw)(exception, self.type_info, destructor) }
    }
}

/// PyTorch's symbols, if it is loaded. It may be loaded later, so only a complete find is cached.
fn torch() -> Option<Torch> {
    static FOUND: OnceLock<Torch> = OnceLock::new();
    if let Some(&found) = FOUND.get() {
        return Some(found);
    }
    let c10 = loaded(&C10, "libc10.so")?;
    // SAFETY: the mangled name contains the argument types; the function does not return.
    let check_fail = unsafe { find::<CheckFail>(c10, "_ZN3c106detail14torchCheckFailEPKcS2_jS2_") };
    let torch = Torch { out_of_memory: out_of_memory(c10), check_fail };
    if torch.out_of_memory.is_none() || fork::is_child() {
        // The library that has the type may still be loaded. In a child, another thread may have been about to store
        // what it found when the process was forked.
        return Some(torch);
    }
    Some(*FOUND.get_or_init(|| torch))
}

fn out_of_memory(c10: &'static Library) -> Option<OutOfMemory> {
    let cuda = loaded(&C10_CUDA, "libc10_cuda.so")?;
    const STRING: &str = "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE";
    const ERROR: &str = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    // The C++ runtime is looked up through libc10, so it is the one that PyTorch throws with.
    // SAFETY: the address of a constant, by its mangled name.
    let type_info = unsafe { find(cuda, "_ZTIN3c1016OutOfMemoryErrorE") }?;
    // SAFETY: the same.
    let vtable = unsafe { find(cuda, "_ZTVN3c1016OutOfMemoryErrorE") }?;
    // SAFETY: the mangled name contains the argument types; the structure is passed by value, the string by address.
    let error_constructor = unsafe { find(c10, ERROR) }?;
    // SAFETY: the mangled name contains the argument types.
    let string_constructor = unsafe { find(c10, &format!("{STRING}C1EPKcRKS3_")) }?;
    // SAFETY: a destructor takes the object.
    let string_destructor = unsafe { find(c10, &format!("{STRING}D1Ev")) }?;
    // SAFETY: as the C++ ABI declares it.
    let allocate_exception = unsafe { find(c10, "__cxa_allocate_exception") }?;
    // SAFETY: as the C++ ABI declares it.
    let throw = unsafe { find(c10, "__cxa_throw") }?;
    Some(OutOfMemory {
        type_info,
        vtable,
        error_constructor,
        string_constructor,
        string_destructor,
        allocate_exception,
        throw,
    })
}

/// Libraries stay open once found: thrown exceptions need them.
static C10: OnceLock<Library> = OnceLock::new();
static C10_CUDA: OnceLock<Library> = OnceLock::new();

/// The library, if it is already loaded in this process.
fn loaded(cache: &'static OnceLock<Library>, name: &str) -> Option<&'static Library> {
    /// Do not load the library; the same value on every Linux.
    const RTLD_NOLOAD: c_int = 4;
    if let Some(library) = cache.get() {
        return Some(library);
    }
    // SAFETY: nothing is loaded, so no initializer runs.
    let library = unsafe { Library::open(Some(name), RTLD_LAZY | RTLD_NOLOAD) }.ok()?;
    if fork::is_child() {
        return Some(Box::leak(Box::new(library)));
    }
    Some(cache.get_or_init(|| library))
}

/// The symbol `name` in the library or its dependencies.
///
/// # Safety
/// `T` is a pointer to what the symbol names.
unsafe fn find<T: Copy>(library: &'static Library, name: &str) -> Option<T> {
    // SAFETY: the type is right by this function's contract, and the library is never closed.
    unsafe { library.get::<T>(name) }.ok().map(|found| *found)
}
