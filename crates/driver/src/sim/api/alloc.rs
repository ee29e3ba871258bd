//! Plain device memory.

use crate::platform::process_id;
use crate::sim::driver::SimDriver;
use crate::sim::refuse::refuse;
use crate::{Call, DeviceId, DevicePtr, ErrorCode, IpcMemoryHandle, Memory, MemoryInfo, Result};

/// The first bytes of an exported handle.
const IPC_MAGIC: &[u8; 8] = b"wpsimmem";

impl Memory for SimDriver {
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        self.call(Call::MemAlloc, |state| {
            state.use_device(device)?;
            if bytes == 0 {
                return refuse(ErrorCode::InvalidValue, "0 bytes cannot be allocated");
            }
            state.spend(bytes);
            state.memory.allocate(device, bytes)
        })
    }

    fn mem_free(&self, ptr: DevicePtr) -> Result<()> {
        self.waiting_call(Call::MemFree, |mut state| {
            if ptr.is_null() {
                return Ok(());
            }
            let (device, backing) = state.memory.find_allocation(ptr)?;
            state.use_device(device)?;
            let mut state = self.wait_for_device(state, device);
            // The device may have failed meanwhile.
            state.use_device(device)?;
            let bytes = state.memory.bytes_at(ptr);
            state.spend(bytes);
            let at = state.call_number();
            state.memory.free(ptr, backing, at)
        })
    }

    fn mem_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.call(Call::MemInfo, |state| {
            state.use_device(device)?;
            let bytes_total = state.config.devices[device.0 as usize].properties.bytes_total;
            Ok(MemoryInfo { bytes_free: state.memory.bytes_free(device), bytes_total })
        })
    }

    fn mem_export(&self, ptr: DevicePtr) -> Result<IpcMemoryHandle> {
        self.call(Call::MemExport, |state| {
            let (device, _) = state.memory.find_allocation(ptr)?;
            state.use_device(device)?;
            let mut handle = [0; 64];
            handle[..8].copy_from_slice(IPC_MAGIC);
            handle[8..16].copy_from_slice(&u64::from(process_id()).to_le_bytes());
            handle[16..24].copy_from_slice(&state.driver_id.to_le_bytes());
            handle[24..32].copy_from_slice(&ptr.0.to_le_bytes());
            Ok(IpcMemoryHandle(handle))
        })
    }

    fn mem_import(&self, device: DeviceId, handle: &IpcMemoryHandle) -> Result<DevicePtr> {
        self.call(Call::MemImport, |state| {
            state.use_device(device)?;
            if handle.0[..8] != *IPC_MAGIC {
                return refuse(ErrorCode::InvalidValue, "these bytes are not the handle of memory");
            }
            if handle.0[8..16] == u64::from(process_id()).to_le_bytes() {
                let why = "memory cannot be opened in the process that exported it";
                return refuse(ErrorCode::InvalidContext, why);
            }
            refuse(ErrorCode::MapFailed, "the memory belongs to a simulated driver of another process")
        })
    }

    fn mem_close(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        self.call(Call::MemClose, |state| {
            state.use_device(device)?;
            refuse(ErrorCode::InvalidValue, format!("{ptr} is not memory of another process"))
        })
    }
}
