//! Statistics and memory limits.

use std::ffi::{CString, c_char, c_double, c_int, c_void};

use super::memory::give;
use crate::boundary::{self, Hook};
use crate::error::Error;
use crate::runtime;

/// Sees one counter. The name is valid during the call only.
pub type StatVisitor = Option<unsafe extern "C" fn(user: *mut c_void, name: *const c_char, value: i64)>;

/// Shows every counter of a device to `visit`, by the name that `torch.cuda.memory_stats` gives it, such as
/// `allocated_bytes.all.peak`. `visit` may call anything here.
///
/// # Safety
/// `visit` takes `user` and a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_stats(device: c_int, visit: StatVisitor, user: *mut c_void) -> c_int {
    boundary::status(|| {
        let visit = visit.ok_or(Error::Null { what: "visit" })?;
        let stats = runtime::get()?.stats(device)?;
        for (name, value) in stats.flattened() {
            let name = CString::new(name).expect("names of counters have no zeros");
            // SAFETY: the caller's promise; the name lives during the call.
            unsafe { visit(user, name.as_ptr(), value) };
        }
        Ok(())
    })
}

/// Makes every peak of a device what is now.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_reset_peak_stats(device: c_int) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        Ok(runtime.allocator().reset_peak_stats(runtime.device(device)?.id())?)
    })
}

/// Zeroes what was counted up on a device.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_reset_accumulated_stats(device: c_int) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        Ok(runtime.allocator().reset_accumulated_stats(runtime.device(device)?.id())?)
    })
}

/// The share of a device's memory that may be held; 1 is no limit.
///
/// # Safety
/// `fraction` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_get_memory_fraction(device: c_int, fraction: *mut c_double) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let found = runtime.allocator().memory_fraction(runtime.device(device)?.id())?;
        // SAFETY: the caller's promise.
        unsafe { give(fraction, "fraction", found) }
    })
}

/// Limits what is held from a device to a share of its memory, from 0 to 1.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_set_memory_fraction(fraction: c_double, device: c_int) -> c_int {
    boundary::status(|| set_fraction(fraction, device))
}

/// `warpool_set_memory_fraction`, as PyTorch calls it.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_memory_fraction(fraction: c_double, device: c_int) {
    static ABOUT: Hook = Hook::new("warpool_memory_fraction");
    boundary::hook(&ABOUT, || set_fraction(fraction, device));
}

fn set_fraction(fraction: f64, device: c_int) -> crate::Result<()> {
    let runtime = runtime::get()?;
    Ok(runtime.allocator().set_memory_fraction(runtime.device(device)?.id(), fraction)?)
}
