//! Sticky errors. These checks make the device unusable for the rest of the process; they run last, and only with
//! [`Options::destructive`](crate::Options::destructive).

use warpool_driver::ErrorCode::IllegalAddress;
use warpool_driver::{DevicePtr, EventOptions, HostOptions, KernelArg, StreamOptions};

use crate::check::Check;
use crate::context::{Resource, TestContext};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_slice_eq};

pub(crate) const CHECKS: &[Check] = crate::checks![
    ; provoking hazards:
    illegal_access_is_reported_at_synchronization,
    sticky_error_is_returned_by_later_calls,
    sticky_error_is_returned_on_every_thread,
    properties_are_available_after_a_sticky_error,
    other_devices_are_not_affected,
];

fn illegal_access_is_reported_at_synchronization(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let nowhere = DevicePtr(0x1234_5000);
    let args = [nowhere.into(), KernelArg::U32(1), KernelArg::U32(1)];
    // The launch itself succeeds: the kernel fails when it runs.
    context.launch_single(context.kernels()?.add_u32, &args, stream)?;
    let error = match context.driver.stream_synchronize(stream) {
        Err(error) => error,
        Ok(()) => return expect(false, "the synchronization fails"),
    };
    expect_eq("the code", error.code, IllegalAddress)?;
    expect(error.is_sticky(), "the error is sticky")
}

fn sticky_error_is_returned_by_later_calls(context: &TestContext) -> CheckResult {
    let (driver, device) = (&context.driver, context.device_id);
    expect_error(driver.mem_alloc(device, 512), IllegalAddress)?;
    expect_error(driver.mem_info(device), IllegalAddress)?;
    expect_error(driver.stream_create(device, StreamOptions::default()), IllegalAddress)?;
    expect_error(driver.event_create(device, EventOptions::default()), IllegalAddress)?;
    expect_error(driver.host_alloc(device, 64, HostOptions::default()), IllegalAddress)?;
    expect_error(driver.device_synchronize(device), IllegalAddress)?;
    expect_error(driver.stream_default(device).and_then(|stream| driver.stream_synchronize(stream)), IllegalAddress)
}

fn sticky_error_is_returned_on_every_thread(context: &TestContext) -> CheckResult {
    let (driver, device) = (&context.driver, context.device_id);
    expect_error(context.on_new_thread(|| driver.mem_alloc(device, 512)), IllegalAddress)?;
    expect_error(context.on_new_thread(|| driver.device_synchronize(device)), IllegalAddress)
}

fn properties_are_available_after_a_sticky_error(context: &TestContext) -> CheckResult {
    expect(context.driver.device_count()? > context.device_id.0, "the device is still counted")?;
    expect(!context.properties()?.name.is_empty(), "the device still has properties")
}

fn other_devices_are_not_affected(context: &TestContext) -> CheckResult {
    let other = context.second_device_id()?;
    let bytes = context.random_bytes(1000);
    let ptr = context.driver.mem_alloc(other, 1000)?;
    context.track(Resource::Memory(ptr));
    context.driver.upload(other, ptr, &bytes)?;
    let mut seen = vec![0; 1000];
    context.driver.download(other, ptr, &mut seen)?;
    expect_slice_eq("the memory of another device", &seen, &bytes)
}
