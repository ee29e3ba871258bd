//! Memory that sleeps and wakes, by tags.

use std::ffi::{c_char, c_int};

use warpool::memory::sleep::{Keep, SleepReport, TagInfo, TagState};

use super::device_stats::signed;
use crate::boundary;
use crate::error::{Error, Result};
use crate::runtime;
use crate::tags::NAME_BYTES_MAX;

/// The maximum size of a tag's name in bytes, with the null character.
pub const WARPOOL_TAG_NAME_LENGTH: usize = 64;

const _: () = assert!(NAME_BYTES_MAX < WARPOOL_TAG_NAME_LENGTH, "a name fits, with its end");

/// Requests of the calling thread on the device carry the tag from here on, until `warpool_tag_end`: its memory can
/// sleep. Scopes may be nested and open in any number of threads; the newest of the thread counts. A pool of PyTorch's
/// that is open for the request comes first. Writes the scope for `warpool_tag_end` to `scope`.
///
/// # Safety
/// `tag` is NULL, which is an error, or a null-terminated string. `scope` is NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_tag_begin(device: c_int, tag: *const c_char, scope: *mut u64) -> c_int {
    boundary::status(|| {
        if scope.is_null() {
            return Err(Error::Null { argument: "scope" });
        }
        // SAFETY: null or a null-terminated string by this function's contract.
        let tag = unsafe { boundary::text(tag, "tag") }?;
        let begun = runtime::get()?.begin_tag(device, tag)?;
        // SAFETY: not null, and writable by this function's contract.
        unsafe { boundary::write_output(scope, "scope", begun) }
    })
}

/// Ends a scope of `warpool_tag_begin`, in any thread and any order.
#[unsafe(no_mangle)]
pub extern "C" fn warpool_tag_end(scope: u64) -> c_int {
    boundary::status(|| runtime::get()?.end_tag(scope))
}

/// What `warpool_sleep` or `warpool_wake` did.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SleepTotals {
    /// How many tags fell asleep or woke, counted once per device.
    pub changed: i64,
    /// How many were in that state already.
    pub unchanged: i64,
    /// Bytes of device memory that were returned to the driver, or taken from it.
    pub bytes_device: i64,
    /// Bytes that were copied to the host, or back.
    pub bytes_copied: i64,
    /// Bytes of device memory that the driver refused to take back; that is retried by later calls.
    pub bytes_not_returned: i64,
}

fn totals(report: &SleepReport) -> SleepTotals {
    SleepTotals {
        changed: signed(report.changed.len() as u64),
        unchanged: signed(report.unchanged.len() as u64),
        bytes_device: signed(report.bytes_device),
        bytes_copied: signed(report.bytes_copied),
        bytes_not_returned: signed(report.bytes_not_returned),
    }
}

/// Pins the host memory that the contents of tags need, and leaves it in the cache of pinned memory: the first
/// `warpool_sleep` need not pin it then, which takes several times as long as its copies. Queues no work, and may be
/// called by a thread of its own. `tags` has `count` names; NULL is all tags. Writes to `bytes`, unless it
/// is NULL, how much that is.
///
/// # Safety
/// `tags` is NULL or points to `count` null-terminated strings. `bytes` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_prepare_sleep(tags: *const *const c_char, count: usize, bytes: *mut i64) -> c_int {
    boundary::status(|| {
        // SAFETY: null or `count` strings by this function's contract.
        let tags = unsafe { names(tags, count) }?;
        let prepared = runtime::get()?.prepare_sleep(tags.as_deref())?;
        if bytes.is_null() {
            return Ok(());
        }
        // SAFETY: not null, and writable by this function's contract.
        unsafe { boundary::write_output(bytes, "bytes", signed(prepared)) }
    })
}

/// Puts the memory of tags to sleep, on all devices, all or nothing: the contents are copied to pinned host memory, or
/// dropped if `keep` is 0; the physical memory is returned to the driver; addresses stay reserved. `tags` has `count`
/// names; NULL is all tags. Waits for all work of the devices. Writes to `done`, unless it is NULL, what was done.
///
/// # Safety
/// `tags` is NULL or points to `count` null-terminated strings. `done` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_sleep(
    tags: *const *const c_char,
    count: usize,
    keep: c_int,
    done: *mut SleepTotals,
) -> c_int {
    boundary::status(|| {
        // SAFETY: null or `count` strings by this function's contract.
        let tags = unsafe { names(tags, count) }?;
        let keep = if keep == 0 { Keep::Discard } else { Keep::Host };
        let report = runtime::get()?.sleep(tags.as_deref(), keep)?;
        if done.is_null() {
            return Ok(());
        }
        // SAFETY: not null, and writable by this function's contract.
        unsafe { boundary::write_output(done, "done", totals(&report)) }
    })
}

/// Wakes the memory of tags, on all devices, all or nothing: at the same addresses, with the contents, or zeroed if
/// they were dropped. `tags` has `count` names; NULL is all tags. Writes to `done`, unless it is NULL, what was done.
///
/// # Safety
/// `tags` is NULL or points to `count` null-terminated strings. `done` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_wake(tags: *const *const c_char, count: usize, done: *mut SleepTotals) -> c_int {
    boundary::status(|| {
        // SAFETY: null or `count` strings by this function's contract.
        let tags = unsafe { names(tags, count) }?;
        let report = runtime::get()?.wake(tags.as_deref())?;
        if done.is_null() {
            return Ok(());
        }
        // SAFETY: not null, and writable by this function's contract.
        unsafe { boundary::write_output(done, "done", totals(&report)) }
    })
}

/// # Safety
/// `tags` is null or points to `count` null-terminated strings, which are valid and unchanged for `'a`.
unsafe fn names<'a>(tags: *const *const c_char, count: usize) -> Result<Option<Vec<&'a str>>> {
    if tags.is_null() {
        return Ok(None);
    }
    let name = |at: usize| {
        // SAFETY: there are `count` of them by this function's contract.
        let tag = unsafe { tags.add(at) };
        // SAFETY: as above; aligned, since C made the array.
        let tag = unsafe { tag.read() };
        // SAFETY: null or a null-terminated string by this function's contract.
        unsafe { boundary::text(tag, "tags") }
    };
    (0..count).map(name).collect::<Result<_>>().map(Some)
}

/// A tag's memory on one device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TagValues {
    /// Its name, null-terminated.
    pub name: [c_char; WARPOOL_TAG_NAME_LENGTH],
    /// The device.
    pub device: c_int,
    /// Whether it sleeps.
    pub is_asleep: c_int,
    /// Whether its contents are on the host, if it sleeps.
    pub keeps_contents: c_int,
    /// How many segments it has.
    pub segments: i64,
    /// Bytes of their addresses.
    pub bytes: i64,
    /// Bytes of device memory that it has.
    pub bytes_device: i64,
    /// Bytes of pinned host memory with its contents.
    pub bytes_host: i64,
    /// Since when it sleeps, in microseconds of the history's clock; 0 if it is awake.
    pub since_us: i64,
}

fn values(info: &TagInfo) -> TagValues {
    let (is_asleep, keeps_contents, since_us) = match info.state {
        TagState::Awake => (0, 0, 0),
        TagState::Asleep { keep, since_us } => (1, c_int::from(keep == Keep::Host), since_us),
    };
    let mut name = [0; WARPOOL_TAG_NAME_LENGTH];
    // SAFETY: the buffer is our own, of that length.
    unsafe { boundary::copy_text(&info.tag, name.as_mut_ptr(), WARPOOL_TAG_NAME_LENGTH) };
    TagValues {
        name,
        device: c_int::try_from(info.device.0).unwrap_or(c_int::MAX),
        is_asleep,
        keeps_contents,
        segments: signed(info.segments),
        bytes: signed(info.bytes),
        bytes_device: signed(info.bytes_device),
        bytes_host: signed(info.bytes_host),
        since_us,
    }
}

/// Writes every tag on every device to `tags`, by name and device, at most `capacity` of them, and to `count` how many
/// there are.
///
/// # Safety
/// `tags` is NULL, if `capacity` is 0, or has room for `capacity` of them. `count` is NULL, which is an error, or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_tags(tags: *mut TagValues, capacity: usize, count: *mut usize) -> c_int {
    boundary::status(|| {
        let found = runtime::get()?.tags();
        if tags.is_null() && capacity > 0 {
            return Err(Error::Null { argument: "tags" });
        }
        for (at, info) in found.iter().take(capacity).enumerate() {
            // SAFETY: there is room for `capacity` of them by this function's contract.
            let to = unsafe { tags.add(at) };
            // SAFETY: as above.
            unsafe { to.write(values(info)) };
        }
        // SAFETY: null or writable by this function's contract.
        unsafe { boundary::write_output(count, "count", found.len()) }
    })
}
