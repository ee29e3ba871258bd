//! Whose call it is: the first shared object on the call stack that is neither this one nor CUDA's runtime or driver.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use crate::loader::{Object, file_name, object_of};

/// Frames that are looked at.
const FRAMES_MAX: u32 = 48;

/// Objects that pass calls on for others: not the owners of memory. By the beginnings of their names.
const PASSING: &[&[u8]] = &[
    b"libcuda.so",
    b"libcudart",
    b"libnvidia-",
    b"libc.so",
    b"libc-2",
    b"libpthread",
    b"libstdc++",
    b"libgcc_s",
    b"libffi",
    b"ld-linux",
    b"linux-vdso",
];

/// Names for shared objects, by the beginnings of the names of their files.
const NAMES: &[(&[u8], &str)] = &[
    (b"libwarpool_torch", ALLOCATOR),
    (b"libwarpool_backend", ALLOCATOR),
    (b"libc10_cuda", ALLOCATOR),
    (b"libtorch", "PyTorch"),
    (b"libc10", "PyTorch"),
    (b"libcaffe2", "PyTorch"),
    (b"libcublas", "cuBLAS"),
    (b"libcudnn", "cuDNN"),
    (b"libnccl", "NCCL"),
    (b"libnvrtc", "NVRTC"),
    (b"libnvJitLink", "nvJitLink"),
    (b"libcufft", "cuFFT"),
    (b"libcusparse", "cuSPARSE"),
    (b"libcusolver", "cuSOLVER"),
    (b"libcurand", "cuRAND"),
    (b"libcupti", "CUPTI"),
    (b"libnvshmem", "NVSHMEM"),
    (b"libnvinfer", "TensorRT"),
    (b"libtriton", "Triton"),
    (b"cuda_utils", "Triton"),
    (b"__triton_launcher", "Triton"),
];

/// Who takes memory for PyTorch's tensors.
pub(crate) const ALLOCATOR: &str = "the allocator";
const UNKNOWN: &str = "unknown callers";
const PROGRAM: &str = "the program";

#[repr(C)]
struct Context {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn _Unwind_Backtrace(visit: extern "C" fn(*mut Context, *mut c_void) -> c_int, argument: *mut c_void) -> c_int;
    fn _Unwind_GetIP(context: *mut Context) -> usize;
}

struct Walk {
    own: usize,
    found: Option<Object>,
    frames: u32,
}

const GO_ON: c_int = 0;
const END: c_int = 5;

extern "C" fn visit(context: *mut Context, walk: *mut c_void) -> c_int {
    // SAFETY: `owner` gave it, and waits.
    let walk = unsafe { &mut *walk.cast::<Walk>() };
    // SAFETY: a context of the unwinder, during its call.
    let address = unsafe { _Unwind_GetIP(context) };
    walk.frames += 1;
    if walk.frames > FRAMES_MAX {
        return END;
    }
    // The return address may be the first of the next function, or of the next object.
    let Some(object) = object_of(std::ptr::without_provenance_mut(address.saturating_sub(1))) else { return GO_ON };
    let name = file_name(object.path);
    if object.base == walk.own || PASSING.iter().any(|passing| name.starts_with(passing)) {
        return GO_ON;
    }
    walk.found = Some(object);
    END
}

/// Who makes the present call of the driver.
pub(crate) fn owner() -> &'static str {
    let own = object_of(visit as *mut c_void).map_or(0, |object| object.base);
    let mut walk = Walk { own, found: None, frames: 0 };
    // SAFETY: the function takes what is given here, and does not unwind.
    unsafe { _Unwind_Backtrace(visit, (&raw mut walk).cast()) };
    walk.found.map_or(UNKNOWN, |object| name_of(file_name(object.path)))
}

/// The owner's name, of the file of a shared object.
fn name_of(file: &[u8]) -> &'static str {
    if file.is_empty() {
        return PROGRAM;
    }
    if let Some((_, name)) = NAMES.iter().find(|(begin, _)| file.starts_with(begin)) {
        return name;
    }
    // Names live as long as the process; there are as many as shared objects that use the driver.
    static OTHERS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
    let text = String::from_utf8_lossy(file);
    let text = text.split(".so").next().unwrap_or(&text);
    let mut others = OTHERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = others.iter().find(|known| **known == text) {
        return known;
    }
    let name: &'static str = Box::leak(text.to_owned().into_boxed_str());
    others.push(name);
    name
}
