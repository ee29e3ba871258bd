//! What a broken device says. These checks break it, for the rest of the process; they run last, and only when asked
//! for.

use super::Check;
use super::bench::Bench;
use super::owned::Owned;
use crate::expect::{Checked, expect, expect_code, expect_eq, expect_same};
use warpool_driver::ErrorCode::IllegalAddress;
use warpool_driver::{DevicePtr, EventOptions, HostOptions, KernelArg, StreamOptions};

pub(super) const CHECKS: &[Check] = super::checks![
    ; provoking:
    an_illegal_access_is_reported_when_waited_for,
    a_broken_device_stays_broken,
    a_broken_device_is_broken_for_every_thread,
    a_broken_device_still_says_what_it_is,
    other_devices_go_on,
];

fn an_illegal_access_is_reported_when_waited_for(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let nowhere = DevicePtr(0x1234_5000);
    let args = [nowhere.into(), KernelArg::U32(1), KernelArg::U32(1)];
    // The launch itself knows nothing of it.
    bench.launch_one(bench.kernels()?.add_u32, &args, stream)?;
    let error = match bench.driver.stream_synchronize(stream) {
        Err(error) => error,
        Ok(()) => return expect(false, "a failure"),
    };
    expect_eq("the code", error.code, IllegalAddress)?;
    expect(error.is_sticky(), "an error that says that it stays")
}

fn a_broken_device_stays_broken(bench: &Bench<'_>) -> Checked {
    let (driver, device) = (bench.driver, bench.device);
    expect_code(driver.mem_alloc(device, 512), IllegalAddress)?;
    expect_code(driver.mem_info(device), IllegalAddress)?;
    expect_code(driver.stream_create(device, StreamOptions::default()), IllegalAddress)?;
    expect_code(driver.event_create(device, EventOptions::default()), IllegalAddress)?;
    expect_code(driver.host_alloc(device, 64, HostOptions::default()), IllegalAddress)?;
    expect_code(driver.device_synchronize(device), IllegalAddress)?;
    expect_code(driver.stream_default(device).and_then(|stream| driver.stream_synchronize(stream)), IllegalAddress)
}

fn a_broken_device_is_broken_for_every_thread(bench: &Bench<'_>) -> Checked {
    let (driver, device) = (bench.driver, bench.device);
    expect_code(bench.elsewhere(|| driver.mem_alloc(device, 512)), IllegalAddress)?;
    expect_code(bench.elsewhere(|| driver.device_synchronize(device)), IllegalAddress)
}

fn a_broken_device_still_says_what_it_is(bench: &Bench<'_>) -> Checked {
    expect(bench.driver.device_count()? > bench.device.0, "a device to be counted still")?;
    expect(!bench.properties()?.name.is_empty(), "its properties")
}

fn other_devices_go_on(bench: &Bench<'_>) -> Checked {
    let other = bench.second_device()?;
    let bytes = bench.random_bytes(1000);
    let ptr = bench.driver.mem_alloc(other, 1000)?;
    bench.own(Owned::Memory(ptr));
    bench.driver.upload(other, ptr, &bytes)?;
    let mut seen = vec![0; 1000];
    bench.driver.download(other, ptr, &mut seen)?;
    expect_same("memory of another device", &seen, &bytes)
}
