//! How a program finds the driver's functions: as symbols that it is linked to, by `dlsym`, or by `cuGetProcAddress`.
//! All three lead to the functions of `calls.rs`; this is `dlsym`.

use std::ffi::{CStr, c_char, c_void};

use crate::calls;
use crate::loader::{file_name, object_of, real_dlsym};

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
