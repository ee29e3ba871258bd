//! Makes a failed allocation an exception in PyTorch, which does not look for null.
//!
//! If PyTorch's libraries are in the process, lack of memory becomes a `c10::OutOfMemoryError`, made and thrown by the
//! C++ ABI of Linux, so that Python sees `torch.OutOfMemoryError`. Everything else, and lack of memory where a symbol
//! is missing, becomes what `TORCH_CHECK` throws, a `RuntimeError`. Without PyTorch there is no exception, and the
//! caller gets null.
//!
//! The rule: a frame that an exception passes owns nothing. So what is thrown is prepared elsewhere and comes here as
//! plain pointers.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY};

/// A failure as plain data: nothing of it has to be dropped.
#[derive(Clone, Copy)]
pub(crate) struct Failure {
    pub(crate) out_of_memory: bool,
    /// The thread's last error, which stays until its next one.
    pub(crate) text: *const c_char,
}

/// Throws, if there is anybody to catch it.
pub(crate) fn raise(failure: Failure) -> *mut c_void {
    let Some(torch) = torch() else { return std::ptr::null_mut() };
    if failure.out_of_memory
        && let Some(exception) = torch.out_of_memory
    {
        // SAFETY: the functions are those of the C++ library that PyTorch itself uses, the text ends with a zero, and
        // this frame owns nothing.
        unsafe { exception.throw(failure.text) }
    }
    if let Some(check_fail) = torch.check_fail {
        // SAFETY: as above.
        unsafe { check_fail(FUNCTION.as_ptr(), FILE.as_ptr(), 0, failure.text) }
    }
    std::ptr::null_mut()
}

/// What the exception says about where it comes from, for those who ask for C++ stacks.
const FUNCTION: &CStr = c"warpool_malloc";
const FILE: &CStr = c"libwarpool_torch.so";

/// How to throw in PyTorch.
#[derive(Clone, Copy)]
struct Torch {
    out_of_memory: Option<OutOfMemory>,
    check_fail: Option<CheckFail>,
}

/// `c10::detail::torchCheckFail(const char* function, const char* file, uint32_t line, const char* text)`.
type CheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

/// What it takes to make a `c10::OutOfMemoryError`: a `c10::Error` with another table of functions and another type.
#[derive(Clone, Copy)]
struct OutOfMemory {
    type_info: *mut c_void,
    /// The start of the object; the functions begin behind two entries, with the destructor.
    vtable: *mut c_void,
    /// `c10::Error::Error(SourceLocation, std::string)`, for base classes.
    make_error: unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut StdString),
    /// `std::string::string(const char*, const std::allocator<char>&)`.
    make_string: unsafe extern "C-unwind" fn(*mut StdString, *const c_char, *const u8),
    drop_string: unsafe extern "C-unwind" fn(*mut StdString),
    allocate: unsafe extern "C-unwind" fn(usize) -> *mut c_void,
    throw: unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !,
}

// SAFETY: functions and constants of libraries that are never unloaded; none belongs to a thread.
unsafe impl Send for Torch {}
// SAFETY: as above, and nothing here changes.
unsafe impl Sync for Torch {}

/// `c10::SourceLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// Room for a `std::string`, which has 32 bytes in the C++ library of Linux.
#[repr(C, align(8))]
struct StdString([u8; 32]);

/// More than a `c10::Error` takes, which is 128 bytes in PyTorch 2.11 and stands in no symbol.
const EXCEPTION_BYTES: usize = 512;

impl OutOfMemory {
    /// # Safety
    /// The symbols are what they are named after, and no frame between here and whoever catches it minds being left.
    unsafe fn throw(self, text: *const c_char) -> ! {
        let mut string = StdString([0; 32]);
        let allocator = 0_u8;
        // SAFETY: there is room for a string, and the text ends with a zero. An allocator is an empty object.
        unsafe { (self.make_string)(&raw mut string, text, &raw const allocator) };
        // SAFETY: takes a number. If there is no memory at all it ends the program, as every throw would.
        let exception = unsafe { (self.allocate)(EXCEPTION_BYTES) };
        let location = SourceLocation { function: FUNCTION.as_ptr(), file: FILE.as_ptr(), line: 0 };
        // SAFETY: there is room for an error. The string is passed by value, which here means by its address, and its
        // maker drops it.
        unsafe { (self.make_error)(exception, location, &raw mut string) };
        // SAFETY: it was made above, and is a string still, though perhaps an empty one.
        unsafe { (self.drop_string)(&raw mut string) };
        // SAFETY: a table of functions begins with an offset and the type, and then has the destructor.
        let functions = unsafe { self.vtable.cast::<*mut c_void>().add(2) };
        // SAFETY: an object with virtual functions begins with the address of them. The derived class adds nothing
        // else.
        unsafe { exception.cast::<*mut *mut c_void>().write(functions) };
        // SAFETY: the first function is the destructor that frees nothing, which is the one that the throw wants.
        let destructor = unsafe { functions.read() };
        // SAFETY: object, type and destructor belong together.
        unsafe { (self.throw)(exception, self.type_info, destructor) }
    }
}

/// PyTorch, if it is in the process. It may come after us, so only a find is remembered.
fn torch() -> Option<Torch> {
    static FOUND: OnceLock<Torch> = OnceLock::new();
    if let Some(&found) = FOUND.get() {
        return Some(found);
    }
    let c10 = loaded(&C10, "libc10.so")?;
    // SAFETY: a function of that name has these arguments, which stand in its name; it never returns.
    let check_fail = unsafe { find::<CheckFail>(c10, "_ZN3c106detail14torchCheckFailEPKcS2_jS2_") };
    let torch = Torch { out_of_memory: out_of_memory(c10), check_fail };
    if torch.out_of_memory.is_none() {
        // The library that knows the type may still be loaded.
        return Some(torch);
    }
    Some(*FOUND.get_or_init(|| torch))
}

fn out_of_memory(c10: &'static Library) -> Option<OutOfMemory> {
    let cuda = loaded(&C10_CUDA, "libc10_cuda.so")?;
    const STRING: &str = "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE";
    const ERROR: &str = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    // The C++ library is found through the one that needs it, so it is the one that PyTorch throws with.
    // SAFETY: the address of a constant, by its name in the C++ ABI.
    let type_info = unsafe { find(cuda, "_ZTIN3c1016OutOfMemoryErrorE") }?;
    // SAFETY: the same.
    let vtable = unsafe { find(cuda, "_ZTVN3c1016OutOfMemoryErrorE") }?;
    // SAFETY: the arguments stand in the name; a large structure is passed by value, a string by its address.
    let make_error = unsafe { find(c10, ERROR) }?;
    // SAFETY: the arguments stand in the name.
    let make_string = unsafe { find(c10, &format!("{STRING}C1EPKcRKS3_")) }?;
    // SAFETY: a destructor takes the object.
    let drop_string = unsafe { find(c10, &format!("{STRING}D1Ev")) }?;
    // SAFETY: as the C++ ABI declares it.
    let allocate = unsafe { find(c10, "__cxa_allocate_exception") }?;
    // SAFETY: as the C++ ABI declares it.
    let throw = unsafe { find(c10, "__cxa_throw") }?;
    Some(OutOfMemory { type_info, vtable, make_error, make_string, drop_string, allocate, throw })
}

/// Libraries that were found stay open: what is thrown needs them.
static C10: OnceLock<Library> = OnceLock::new();
static C10_CUDA: OnceLock<Library> = OnceLock::new();

/// A library, if it is in the process already.
fn loaded(place: &'static OnceLock<Library>, name: &str) -> Option<&'static Library> {
    /// The loader's word for "only if it is there"; the same on every Linux.
    const RTLD_NOLOAD: c_int = 4;
    if let Some(library) = place.get() {
        return Some(library);
    }
    // SAFETY: nothing is loaded, so no initialiser runs.
    let library = unsafe { Library::open(Some(name), RTLD_LAZY | RTLD_NOLOAD) }.ok()?;
    Some(place.get_or_init(|| library))
}

/// The symbol of that name, in the library or one that it needs.
///
/// # Safety
/// `T` must be what a pointer to it is.
unsafe fn find<T: Copy>(library: &'static Library, name: &str) -> Option<T> {
    // SAFETY: the caller vouches for the type; the library stays.
    unsafe { library.get::<T>(name) }.ok().map(|found| *found)
}
