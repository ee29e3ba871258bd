//! Plain device memory.

use crate::sim::driver::SimDriver;
use crate::sim::refuse::refuse;
use crate::{Call, DeviceId, DevicePtr, ErrorCode, Memory, MemoryInfo, Result};

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
}
