//! Simulated memory costs host memory only once it is written. In a process of its own, since it measures that.

use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::*;

/// The resident memory of this process, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a line VmRSS");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number");
    kib << 10
}

#[test]
fn a_terabyte_reserved_and_a_whole_device_allocated_cost_less_than_100_mb() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default());
    let device = DeviceId(0);
    let before = resident();
    let range = gpu.vm_reserve(1 << 40, 0, None)?;
    let half = 70 << 30;
    let plain = gpu.mem_alloc(device, 69 << 30)?;
    let physical = gpu.vm_create(device, half, PhysicalOptions::default())?;
    gpu.vm_map(range, physical)?;
    gpu.vm_set_access(range, half, &[DeviceAccess { device, access: Access::ReadWrite }])?;
    let pinned = gpu.host_alloc(device, 16 << 30, HostOptions::default())?;
    // Only the pages written here cost memory.
    gpu.upload(device, range.offset(half - 4), &[1, 2, 3, 4])?;
    gpu.upload(device, plain, &[5])?;
    gpu.host_write(pinned.offset(1 << 33), &[6])?;
    let mut back = [0; 4];
    gpu.download(device, range.offset(half - 4), &mut back)?;
    assert_eq!(back, [1, 2, 3, 4]);
    let cost = resident().saturating_sub(before);
    assert!(cost < 100 << 20, "{} MiB", cost >> 20);
    Ok(())
}
