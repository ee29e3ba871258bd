//! Statistics and memory limits.

use std::ffi::{CString, c_char, c_double, c_int, c_void};

use warpool::memory::report::{Stat, StatByKind, Stats};

use crate::boundary::{self, FailureLog};
use crate::error::{Error, Result};
use crate::runtime;

/// Receives one statistic. `name` is valid during the call only.
pub type StatVisitor = Option<unsafe extern "C" fn(user: *mut c_void, name: *const c_char, value: i64)>;

/// Calls `visit` with every statistic of a device, by its name in `torch.cuda.memory_stats`, for example
/// `allocated_bytes.all.peak`, and with one of our own: `asleep_bytes.all.current` and so on, the memory of tags that
/// sleep, which is not reserved. `visit` may call any function of this library.
///
/// # Safety
/// `visit` is NULL, which is an error, or may be called with `user` and any name and value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_stats(device: c_int, visit: StatVisitor, user: *mut c_void) -> c_int {
    boundary::status(|| {
        let found = runtime::get()?.stats(device)?;
        let mut stats = found.flattened();
        stats.extend(asleep(&found));
        // SAFETY: `visit` is null or callable with `user` by this function's contract.
        unsafe { visit_all(visit, user, stats.iter().map(|(name, value)| (name.as_str(), *value))) }
    })
}

/// The statistics of memory that sleeps.
fn asleep(stats: &Stats) -> Vec<(String, i64)> {
    let StatByKind { all, small_pool, large_pool } = stats.asleep_bytes;
    let mut flat = Vec::new();
    for (kind, stat) in [("all", all), ("small_pool", small_pool), ("large_pool", large_pool)] {
        let Stat { current, peak, allocated, freed } = stat;
        for (name, value) in [("current", current), ("peak", peak), ("allocated", allocated), ("freed", freed)] {
            flat.push((format!("asleep_bytes.{kind}.{name}"), i64::try_from(value).unwrap_or(i64::MAX)));
        }
    }
    flat
}

/// Calls `visit` with the statistics of a device's pages, which only the backend `paged` has: `pages`,
/// `reserved_bytes`, `active_bytes`, `free_mapped_bytes`, `spare_bytes`, `bytes_mapped_twice`, and how many pages were
/// created, released, taken from free memory, taken back without a driver call, mapped and unmapped (`pages_created` to
/// `pages_unmapped`). `visit` may call any function of this library.
///
/// # Safety
/// `visit` is NULL, which is an error, or may be called with `user` and any name and value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_page_stats(device: c_int, visit: StatVisitor, user: *mut c_void) -> c_int {
    boundary::status(|| {
        let stats = runtime::get()?.page_stats(device)?.named();
        let values = stats.into_iter().map(|(name, value)| (name, i64::try_from(value).unwrap_or(i64::MAX)));
        // SAFETY: `visit` is null or callable with `user` by this function's contract.
        unsafe { visit_all(visit, user, values) }
    })
}

/// # Safety
/// `visit` is null or may be called with `user` and any name and value.
unsafe fn visit_all<'a>(
    visit: StatVisitor,
    user: *mut c_void,
    values: impl Iterator<Item = (&'a str, i64)>,
) -> Result<()> {
    let visit = visit.ok_or(Error::Null { argument: "visit" })?;
    for (name, value) in values {
        let name = CString::new(name).expect("names of statistics have no null characters");
        // SAFETY: callable with `user` by this function's contract; the name lives during the call.
        unsafe { visit(user, name.as_ptr(), value) };
    }
    Ok(())
}

/// Sets every peak of a device to the current value.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_reset_peak_stats(device: c_int) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        Ok(runtime.allocator().reset_peak_stats(runtime.device(device)?.id())?)
    })
}

/// Sets every accumulated count of a device to 0.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_reset_accumulated_stats(device: c_int) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        Ok(runtime.allocator().reset_accumulated_stats(runtime.device(device)?.id())?)
    })
}

/// Writes the fraction of a device's memory that may be reserved; 1 is no limit.
///
/// # Safety
/// `fraction` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_get_memory_fraction(device: c_int, fraction: *mut c_double) -> c_int {
    boundary::status(|| {
        let runtime = runtime::get()?;
        let found = runtime.allocator().memory_fraction(runtime.device(device)?.id())?;
        // SAFETY: `fraction` is null or writable by this function's contract.
        unsafe { boundary::write_output(fraction, "fraction", found) }
    })
}

/// Limits the memory reserved on a device to a fraction of its memory, from 0 to 1.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_set_memory_fraction(fraction: c_double, device: c_int) -> c_int {
    boundary::status(|| set_fraction(fraction, device))
}

/// `warpool_set_memory_fraction`, with the signature that PyTorch calls.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_memory_fraction(fraction: c_double, device: c_int) {
    static LOG: FailureLog = FailureLog::new("warpool_memory_fraction");
    boundary::run_logged(&LOG, || set_fraction(fraction, device));
}

fn set_fraction(fraction: f64, device: c_int) -> Result<()> {
    let runtime = runtime::get()?;
    Ok(runtime.allocator().set_memory_fraction(runtime.device(device)?.id(), fraction)?)
}
