//! How much of each device's memory is in use.

use crate::sim::config::SimDevice;
use crate::sim::refuse::refuse;
use crate::{DeviceId, ErrorCode, Result};

/// Allocations take a multiple of this. What is beyond the requested bytes cannot be accessed.
pub const ALLOCATION_UNIT: u64 = 512;

/// The memory in use on each device: allocations, physical memory, and what pools reserve.
#[derive(Debug)]
pub struct Capacity {
    devices: Vec<DeviceCapacity>,
}

#[derive(Debug)]
struct DeviceCapacity {
    /// The device's memory without the context's.
    usable: u64,
    used: u64,
}

impl Capacity {
    pub fn new(devices: &[SimDevice]) -> Self {
        let usable = |device: &SimDevice| device.properties.bytes_total.saturating_sub(device.bytes_context);
        Self { devices: devices.iter().map(|device| DeviceCapacity { usable: usable(device), used: 0 }).collect() }
    }

    pub fn free(&self, device: DeviceId) -> u64 {
        let DeviceCapacity { usable, used } = self.devices[device.0 as usize];
        usable - used
    }

    /// Memory in use on all devices.
    pub fn total_used(&self) -> u64 {
        self.devices.iter().map(|device| device.used).sum()
    }

    /// Takes `bytes` of a device's memory; `OutOfMemory` if it does not have them.
    pub fn take(&mut self, device: DeviceId, bytes: u64) -> Result<()> {
        let free = self.free(device);
        let state = &mut self.devices[device.0 as usize];
        if bytes > free {
            let usable = state.usable;
            let why = format!("{bytes} bytes requested on {device}; {free} of {usable} bytes are free");
            return refuse(ErrorCode::OutOfMemory, why);
        }
        state.used += bytes;
        Ok(())
    }

    pub fn give_back(&mut self, device: DeviceId, bytes: u64) {
        self.devices[device.0 as usize].used -= bytes;
    }
}
