//! Whose the memory of a device is.

use std::ffi::{c_char, c_int};

use warpool_driver::DeviceUuid;
use warpool_report::account::{Known, object};

use crate::error::Error;
use crate::{account, boundary};

/// Copies the account of a device to `buffer`, as JSON (docs/json.md), null-terminated and truncated if it does not
/// fit. `total` and `free` are what the driver says of the device, `reserved` is what the allocator has of it, and
/// `uuid` its id (`GPU-` and 32 digits with or without dashes), or NULL. Returns the length of the whole text without
/// the terminator; 0 on failure. Warpool need not be PyTorch's allocator, and starts nothing here.
///
/// # Safety
/// `uuid` is NULL or a null-terminated string; `buffer` is NULL or points to `length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_account(
    device: c_int,
    total: u64,
    free: u64,
    reserved: u64,
    uuid: *const c_char,
    buffer: *mut c_char,
    length: usize,
) -> usize {
    let text = boundary::run(|| {
        let device = u32::try_from(device).map_err(|_| Error::NegativeDevice { device })?;
        // SAFETY: `uuid` is not null where it is read, and null-terminated by this function's contract.
        let uuid = if uuid.is_null() { None } else { parse(unsafe { boundary::text(uuid, "uuid") }?) };
        let known = Known { device, total, free, reserved: Some(reserved), ..Known::default() };
        Ok(object(&account::of(known, uuid)).to_string())
    });
    // SAFETY: `buffer` is null or has `length` bytes by this function's contract.
    unsafe { boundary::copy_text(&text.unwrap_or_default(), buffer, length) }
}

/// A UUID as `nvidia-smi -L` or PyTorch shows it.
fn parse(text: &str) -> Option<DeviceUuid> {
    let digits: Vec<u32> = text.trim_start_matches("GPU-").chars().filter_map(|letter| letter.to_digit(16)).collect();
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect();
    Some(DeviceUuid(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_as_it_is_shown() {
        let uuid = DeviceUuid(std::array::from_fn(|at| (at * 17) as u8));
        assert_eq!(parse(&uuid.to_string()), Some(uuid));
        assert_eq!(parse("00112233-4455-6677-8899-aabbccddeeff"), Some(uuid));
        assert_eq!(parse("MIG-1"), None);
    }
}
