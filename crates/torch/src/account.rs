//! Whose the memory of a device is: asks the shared object `warpool_inject`, if it was loaded before the program, and
//! the driver's list of processes.

use std::ffi::c_char;
use std::sync::OnceLock;

use libloading::os::unix::Library;
use warpool::memory::report::DeviceAccount;
use warpool_cuda::nvml::Nvml;
use warpool_driver::DeviceUuid;
use warpool_report::account::{Injected, Known, account};

/// The account of a device. `known` has what the caller knows of it.
pub(crate) fn of(known: Known, uuid: Option<DeviceUuid>) -> DeviceAccount {
    let injected = injected();
    let on_device = injected.as_ref().and_then(|injected| {
        // By the id, which is the same for all: a process numbers devices as it likes.
        let digits = uuid.map(|uuid| uuid.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        injected.devices().iter().find(|device| match &digits {
            Some(digits) => device.uuid == *digits,
            None => device.device == known.device,
        })
    });
    let known = Known { processes: uuid.and_then(processes), pid: std::process::id(), ..known };
    account(&known, on_device)
}

/// What `warpool_inject` counted; `None` unless it was loaded.
fn injected() -> Option<Injected> {
    type Read = unsafe extern "C" fn(*mut c_char, usize) -> usize;
    let this = Library::this();
    // SAFETY: the function of that name has this type.
    let read = unsafe { this.get::<Read>(c"warpool_injected_account") }.ok()?;
    let mut buffer = vec![0u8; 16 << 10];
    loop {
        // SAFETY: the buffer has so many bytes.
        let length = unsafe { read(buffer.as_mut_ptr().cast(), buffer.len()) };
        if length < buffer.len() {
            buffer.truncate(length);
            return Injected::parse(&String::from_utf8_lossy(&buffer)).ok();
        }
        buffer.resize(length + (4 << 10), 0);
    }
}

/// The processes that use a device, if the driver says so.
fn processes(uuid: DeviceUuid) -> Option<Vec<(u32, Option<u64>)>> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    let nvml = NVML.get_or_init(|| Nvml::open().ok()).as_ref()?;
    let found = nvml.processes(nvml.device(&uuid)?)?;
    Some(found.iter().map(|process| (process.pid, process.bytes)).collect())
}
