//! NVIDIA's management library, as far as it says who uses a device's memory: in use by all processes, and by each.
//! Neither needs a context.

use std::ffi::{CString, c_char, c_uint, c_void};

use warpool_driver::DeviceUuid;

use crate::shared_library::{MissingLibrary, MissingSymbol, SharedLibrary};

type Device = *mut c_void;
type Processes = unsafe extern "C" fn(Device, *mut c_uint, *mut ProcessInfo) -> c_uint;

/// The library, which stays open.
pub struct Nvml {
    device_by_uuid: unsafe extern "C" fn(*const c_char, *mut Device) -> c_uint,
    memory: Option<unsafe extern "C" fn(Device, *mut Memory2) -> c_uint>,
    compute: Processes,
    graphics: Option<Processes>,
}

/// A device of the library.
#[derive(Clone, Copy, Debug)]
pub struct NvmlDevice(Device);

// SAFETY: a handle, which any thread may use.
unsafe impl Send for NvmlDevice {}
// SAFETY: as above.
unsafe impl Sync for NvmlDevice {}

/// A process that uses a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceProcess {
    /// Its id, as the driver knows it: in a container maybe not as the processes there do.
    pub pid: u32,
    /// Memory of the device; `None` if the driver does not say.
    pub bytes: Option<u64>,
}

/// Why the library cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvmlError {
    /// It is not there.
    #[error(transparent)]
    Library(#[from] MissingLibrary),
    /// It lacks a function.
    #[error(transparent)]
    Symbol(#[from] MissingSymbol),
    /// It refuses to start, with this code.
    #[error("NVIDIA's management library does not start (nvmlInit_v2: {0})")]
    Start(u32),
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Default)]
struct Memory2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// More processes on one device than there are anywhere.
const PROCESSES_MAX: usize = 1024;

impl Nvml {
    /// Opens and starts the library, which comes with the driver.
    ///
    /// # Errors
    /// If it is missing, too old, or does not start.
    pub fn open() -> Result<Self, NvmlError> {
        let library = SharedLibrary::open("NVIDIA's management library", &["libnvidia-ml.so.1".to_owned()])?;
        // SAFETY: the types are those of NVIDIA's header.
        let start: unsafe extern "C" fn() -> c_uint = unsafe { library.require("nvmlInit_v2") }?;
        // SAFETY: as above.
        let device_by_uuid = unsafe { library.require("nvmlDeviceGetHandleByUUID") }?;
        // SAFETY: as above.
        let memory = unsafe { library.find("nvmlDeviceGetMemoryInfo_v2") };
        // SAFETY: as above.
        let compute = unsafe { library.require("nvmlDeviceGetComputeRunningProcesses_v3") }?;
        // SAFETY: as above.
        let graphics = unsafe { library.find("nvmlDeviceGetGraphicsRunningProcesses_v3") };
        // SAFETY: it may be called at any time, and more than once.
        match unsafe { start() } {
            0 => Ok(Self { device_by_uuid, memory, compute, graphics }),
            code => Err(NvmlError::Start(code)),
        }
    }

    /// The device with the UUID that CUDA reports.
    #[must_use]
    pub fn device(&self, uuid: &DeviceUuid) -> Option<NvmlDevice> {
        let (text, mut device) = (CString::new(uuid.to_string()).ok()?, std::ptr::null_mut());
        // SAFETY: a null-terminated text and a place for the handle.
        let result = unsafe { (self.device_by_uuid)(text.as_ptr(), &raw mut device) };
        (result == 0).then_some(NvmlDevice(device))
    }

    /// Bytes of the device that are in use, without what the driver keeps of every device for itself.
    #[must_use]
    pub fn used(&self, device: NvmlDevice) -> Option<u64> {
        let version = (size_of::<Memory2>() | 2 << 24) as c_uint;
        let mut memory = Memory2 { version, ..Memory2::default() };
        // SAFETY: a device of the library, and the structure of the version that it names.
        let result = unsafe { (self.memory?)(device.0, &raw mut memory) };
        (result == 0).then_some(memory.used)
    }

    /// The processes that use the device, as far as this one may see them.
    #[must_use]
    pub fn processes(&self, device: NvmlDevice) -> Option<Vec<DeviceProcess>> {
        let mut found = Self::listed(self.compute, device)?;
        // A process may do both.
        for process in self.graphics.and_then(|list| Self::listed(list, device)).unwrap_or_default() {
            if !found.iter().any(|known| known.pid == process.pid) {
                found.push(process);
            }
        }
        Some(found)
    }

    fn listed(list: Processes, device: NvmlDevice) -> Option<Vec<DeviceProcess>> {
        let mut infos = vec![ProcessInfo::default(); PROCESSES_MAX];
        let mut count = PROCESSES_MAX as c_uint;
        // SAFETY: a device of the library, and a list of `count` entries.
        let result = unsafe { list(device.0, &raw mut count, infos.as_mut_ptr()) };
        let process = |info: &ProcessInfo| DeviceProcess {
            pid: info.pid,
            bytes: Some(info.used).filter(|&used| used != u64::MAX),
        };
        (result == 0).then(|| infos.iter().take(count as usize).map(process).collect())
    }
}
