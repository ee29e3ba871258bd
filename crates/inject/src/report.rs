//! What was counted, as JSON: for this process through a C function, and as a file for `warpool record`.

use std::env;
use std::ffi::c_char;
use std::fmt::Write as _;
use std::fs;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::forked::is_forked;
use crate::ledger::{self, Row};

/// The folder of the file.
const FOLDER: &str = "WARPOOL_ACCOUNT_DIR";

/// At most so often is the file written while the program runs.
const INTERVAL: Duration = Duration::from_secs(1);

/// Copies what was counted to `buffer`, as JSON, null-terminated and truncated if it does not fit. Returns the length
/// of the whole text without the terminator.
///
/// # Safety
/// `buffer` is NULL or points to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_injected_account(buffer: *mut c_char, length: usize) -> usize {
    let text = text(true);
    if let Some(room) = length.checked_sub(1).filter(|_| !buffer.is_null()) {
        let copied = text.len().min(room);
        // SAFETY: `buffer` has `length` bytes, of which these are the first.
        let written = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<MaybeUninit<u8>>(), copied + 1) };
        for (to, &byte) in written.iter_mut().zip(text.as_bytes()[..copied].iter().chain(&[0])) {
            to.write(byte);
        }
    }
    text.len()
}

/// What was counted. `asks` the driver for what is in use now.
fn text(asks: bool) -> String {
    let mut text = format!("{{\"version\":1,\"pid\":{},\"devices\":[", std::process::id());
    let mut is_first = true;
    ledger::each(asks, |device, rows| {
        if !std::mem::take(&mut is_first) {
            text.push(',');
        }
        let _ = write!(text, "{{\"device\":{},\"uuid\":\"", device.index);
        for byte in device.uuid.iter().flatten() {
            let _ = write!(text, "{byte:02x}");
        }
        let _ = write!(text, "\",\"total\":{},\"used\":{},\"before\":", device.total, device.used);
        match device.before {
            Some(bytes) => _ = write!(text, "{bytes}"),
            None => text.push_str("null"),
        }
        text.push_str(",\"rows\":");
        write_rows(&mut text, rows);
        let _ = write!(text, ",\"most\":{{\"used\":{},\"rows\":", device.used_most);
        write_rows(&mut text, &device.rows_most);
        text.push_str("}}");
    });
    text.push_str("]}");
    text
}

fn write_rows(text: &mut String, rows: &[Row]) {
    text.push('[');
    for (number, row) in rows.iter().enumerate() {
        let comma = if number == 0 { "" } else { "," };
        let _ = write!(text, "{comma}{{\"owner\":\"");
        // An owner may be the name of a file.
        for letter in row.owner.chars() {
            match letter {
                '"' | '\\' => text.extend(['\\', letter]),
                control if control.is_control() => text.push(' '),
                other => text.push(other),
            }
        }
        let _ = write!(text, "\",\"kind\":\"{}\",\"bytes\":{}}}", row.kind.name(), row.bytes);
    }
    text.push(']');
}

/// More is in use than ever before: writes the file, unless that was done a moment ago.
pub(crate) fn changed() {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (now, last) = (now.as_millis() as u64, LAST.load(Ordering::Relaxed));
    let is_due = now.saturating_sub(last) >= INTERVAL.as_millis() as u64;
    if is_due && LAST.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        write();
    }
}

/// Has the file written when the program ends.
pub(crate) fn write_at_exit() {
    extern "C" fn at_exit() {
        if !is_forked() {
            write();
        }
    }
    if env::var_os(FOLDER).is_some() {
        // SAFETY: the function stays loaded: this library is never closed.
        unsafe { libc::atexit(at_exit) };
    }
}

/// Writes the file, in place of an older one. Nobody can be told of a failure; the command finds no file then.
fn write() {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
    let path = folder.join(format!("account-{}.json", std::process::id()));
    let temporary = path.with_extension("part");
    let written = fs::write(&temporary, text(false)).and_then(|()| fs::rename(&temporary, &path));
    if written.is_err() {
        let _ = fs::remove_file(temporary);
    }
}
