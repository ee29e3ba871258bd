//! Devices, contexts, current device, peer access, clock.

use warpool_driver::ErrorCode::{
    InvalidContext, InvalidDevice, PeerAccessAlreadyEnabled, PeerAccessNotEnabled, PeerAccessUnsupported,
};
use warpool_driver::{
    Access, DeviceId, EventOptions, ForeignStream, Granularity, HostOptions, IpcEventHandle, PhysicalOptions,
    RawHandle, StreamOptions,
};

use crate::check::Check;
use crate::context::{SOURCE, TestContext};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, skip};

pub(crate) const CHECKS: &[Check] = crate::checks![
    queries_create_no_context,
    device_count_includes_the_device,
    properties_are_plausible,
    peer_list_matches_peer_queries,
    invalid_device_is_rejected_by_every_call,
    context_stays_active_until_last_release,
    new_thread_has_no_current_device_but_can_work,
    current_device_is_per_thread,
    calls_do_not_change_the_current_device,
    every_device_can_be_made_current,
    device_synchronize_waits_for_all_streams,
    device_is_not_its_own_peer,
    peer_access_is_enabled_and_disabled_once,
    clock_advances_with_work,
];

fn queries_create_no_context(context: &TestContext) -> CheckResult {
    let driver = &context.driver;
    let count = driver.device_count()?;
    let mut inactive = None;
    for device in (0..count).map(DeviceId) {
        if !driver.context_is_active(device)? {
            inactive = Some(device);
        }
    }
    let Some(device) = inactive else {
        return skip("every device already has a context");
    };
    driver.device_properties(device)?;
    driver.peer_can_access(device, DeviceId(0))?;
    driver.peer_can_access(DeviceId(0), device)?;
    driver.current_device()?;
    expect(!driver.context_is_active(device)?, "the device has no context after queries")
}

fn device_count_includes_the_device(context: &TestContext) -> CheckResult {
    let count = context.driver.device_count()?;
    expect(context.device_id.0 < count, "the device under test is counted")?;
    expect_eq("the count in a second query", context.driver.device_count()?, count)
}

fn properties_are_plausible(context: &TestContext) -> CheckResult {
    let first = context.properties()?;
    expect(!first.name.is_empty(), "the device has a name")?;
    for other in (0..context.driver.device_count()?).map(DeviceId).filter(|&other| other != context.device_id) {
        let other = context.driver.device_properties(other)?.uuid;
        expect(other != first.uuid, "no two devices have one UUID")?;
    }
    expect(first.compute_capability.0 >= 1, "the device has a compute capability")?;
    expect(first.multiprocessors > 0, "the device has multiprocessors")?;
    expect(
        first.granularity.is_power_of_two() == first.virtual_memory,
        "a granularity if and only if there is virtual memory",
    )?;
    expect(!first.peers.contains(&context.device_id), "a device is not its own peer")?;
    let count = context.driver.device_count()?;
    expect(first.peers.iter().all(|peer| peer.0 < count), "all peers exist")?;
    let info = context.driver.mem_info(context.device_id)?;
    expect(info.bytes_total <= first.bytes_total, "total memory is at most that of the properties")?;
    expect(info.bytes_free <= info.bytes_total, "free memory is at most total memory")?;
    expect_eq("the properties in a second query", context.properties()?, first)
}

fn peer_list_matches_peer_queries(context: &TestContext) -> CheckResult {
    let count = context.driver.device_count()?;
    for device in (0..count).map(DeviceId) {
        let listed = context.driver.device_properties(device)?.peers;
        for peer in (0..count).map(DeviceId) {
            let can = context.driver.peer_can_access(device, peer)?;
            expect_eq(&format!("whether {device} lists {peer} as a peer"), listed.contains(&peer), can)?;
        }
    }
    Ok(())
}

fn invalid_device_is_rejected_by_every_call(context: &TestContext) -> CheckResult {
    let (driver, here) = (&context.driver, context.device_id);
    let memory = context.alloc(64)?;
    let stream = context.stream()?;
    let pool = if context.properties()?.async_pools { Some(context.pool()?) } else { None };
    let pinned = context.alloc_pinned(64)?;
    let range = context.host_pages(1);
    for none in [context.invalid_device_id()?, DeviceId(4_000_000_000)] {
        let rejected = |call: &str, result: warpool_driver::Result<()>| expect_error_of(call, result, InvalidDevice);
        rejected("device_properties", driver.device_properties(none).map(drop))?;
        rejected("context_retain", driver.context_retain(none).map(drop))?;
        rejected("context_release", driver.context_release(none))?;
        rejected("context_is_active", driver.context_is_active(none).map(drop))?;
        rejected("set_current_device", driver.set_current_device(none))?;
        rejected("device_synchronize", driver.device_synchronize(none))?;
        rejected("peer_can_access (device)", driver.peer_can_access(none, here).map(drop))?;
        rejected("peer_can_access (peer)", driver.peer_can_access(here, none).map(drop))?;
        rejected("peer_enable", driver.peer_enable(here, none))?;
        rejected("peer_disable", driver.peer_disable(none, here))?;
        rejected("stream_default", driver.stream_default(none).map(drop))?;
        rejected("stream_per_thread", driver.stream_per_thread(none).map(drop))?;
        rejected("stream_priority_range", driver.stream_priority_range(none).map(drop))?;
        rejected("stream_create", driver.stream_create(none, StreamOptions::default()).map(drop))?;
        rejected("stream_adopt", driver.stream_adopt(none, ForeignStream::NULL).map(drop))?;
        rejected("event_create", driver.event_create(none, EventOptions::default()).map(drop))?;
        rejected("event_import", driver.event_import(none, &IpcEventHandle([0; 64])).map(drop))?;
        rejected("mem_alloc", driver.mem_alloc(none, 64).map(drop))?;
        rejected("mem_info", driver.mem_info(none).map(drop))?;
        rejected("vm_granularity", driver.vm_granularity(none, Granularity::Minimum).map(drop))?;
        rejected("vm_create", driver.vm_create(none, 2 << 20, PhysicalOptions::default()).map(drop))?;
        rejected("pool_default", driver.pool_default(none).map(drop))?;
        rejected("pool_create", driver.pool_create(none).map(drop))?;
        if let Some(pool) = pool {
            rejected("pool_set_access", driver.pool_set_access(pool, none, Access::ReadWrite))?;
        }
        rejected("host_alloc", driver.host_alloc(none, 64, HostOptions::default()).map(drop))?;
        rejected("host_register", driver.host_register(none, range.clone(), HostOptions::default()))?;
        rejected("host_device_ptr", driver.host_device_ptr(none, pinned).map(drop))?;
        rejected("copy_peer (destination)", driver.copy_peer(memory, none, memory.offset(32), here, 16, stream))?;
        rejected("copy_peer (source)", driver.copy_peer(memory, here, memory.offset(32), none, 16, stream))?;
        rejected("upload", driver.upload(none, memory, &[0; 16]))?;
        rejected("download", driver.download(none, memory, &mut [0; 16]))?;
        rejected("module_load", driver.module_load(none, &SOURCE).map(drop))?;
    }
    Ok(())
}

fn context_stays_active_until_last_release(context: &TestContext) -> CheckResult {
    let (driver, device) = (&context.driver, context.device_id);
    let first = driver.context_retain(device)?;
    let second = driver.context_retain(device);
    let active = driver.context_is_active(device);
    driver.context_release(device)?;
    driver.context_release(device)?;
    expect(first != RawHandle(0), "the context handle is not null")?;
    expect_eq("the handle in a second query", second?, first)?;
    expect(active?, "a retained context is active")?;
    expect_error(driver.context_release(device), InvalidContext)
}

fn new_thread_has_no_current_device_but_can_work(context: &TestContext) -> CheckResult {
    let words = context.random_words(64);
    context.kernels()?;
    context.on_new_thread(|| {
        expect_eq("the current device of a new thread", context.driver.current_device()?, None)?;
        let stream = context.stream()?;
        let data = context.alloc_words(&words)?;
        context.add_u32(data, 64, 7, stream)?;
        context.synchronize(stream)?;
        let sums: Vec<u32> = words.iter().map(|word| word.wrapping_add(7)).collect();
        expect_eq("the results of its work", context.read_words(data, 64)?, sums)?;
        context.free(data)?;
        context.destroy_stream(stream)?;
        expect_eq("its current device after work", context.driver.current_device()?, None)
    })
}

fn current_device_is_per_thread(context: &TestContext) -> CheckResult {
    let (driver, device) = (&context.driver, context.device_id);
    let here = driver.current_device()?;
    context.on_new_thread(|| {
        driver.set_current_device(device)?;
        expect_eq("the current device after it was set", driver.current_device()?, Some(device))?;
        let on_other_thread = context.on_new_thread(|| driver.current_device());
        expect_eq("the current device of another thread", on_other_thread?, None)
    })?;
    expect_eq("the current device of this thread", driver.current_device()?, here)
}

fn calls_do_not_change_the_current_device(context: &TestContext) -> CheckResult {
    let driver = &context.driver;
    let count = driver.device_count()?;
    context.on_new_thread(|| {
        driver.set_current_device(context.device_id)?;
        for device in (0..count).map(DeviceId) {
            driver.mem_info(device)?;
            let stream = driver.stream_create(device, StreamOptions::default())?;
            let ended = driver.stream_synchronize(stream).and(driver.stream_destroy(stream));
            ended?;
            driver.device_synchronize(device)?;
            expect_eq("the current device of the thread", driver.current_device()?, Some(context.device_id))?;
        }
        expect_error(driver.set_current_device(context.invalid_device_id()?), InvalidDevice)?;
        expect_eq("the current device after a rejected call", driver.current_device()?, Some(context.device_id))
    })
}

fn every_device_can_be_made_current(context: &TestContext) -> CheckResult {
    let driver = &context.driver;
    let count = driver.device_count()?;
    context.on_new_thread(|| {
        for device in (0..count).chain([0]).map(DeviceId) {
            driver.set_current_device(device)?;
            expect_eq("the current device after it was set", driver.current_device()?, Some(device))?;
            expect(driver.context_is_active(device)?, "the current device has a context")?;
        }
        Ok(())
    })
}

fn device_synchronize_waits_for_all_streams(context: &TestContext) -> CheckResult {
    let streams =
        [context.stream()?, context.blocking_stream()?, context.legacy_stream()?, context.per_thread_stream()?];
    let logs = [context.kernel_log(4)?, context.kernel_log(4)?, context.kernel_log(4)?, context.kernel_log(4)?];
    for (at, (stream, log)) in streams.into_iter().zip(logs).enumerate() {
        context.delay(stream)?;
        context.append(log, at as u32, stream)?;
    }
    context.driver.device_synchronize(context.device_id)?;
    for (at, (stream, log)) in streams.into_iter().zip(logs).enumerate() {
        context.expect_idle("every stream", stream)?;
        context.expect_log(log, &[at as u32])?;
    }
    Ok(())
}

fn device_is_not_its_own_peer(context: &TestContext) -> CheckResult {
    let (driver, device) = (&context.driver, context.device_id);
    expect(!driver.peer_can_access(device, device)?, "a device has no peer access to itself")?;
    expect_error(driver.peer_enable(device, device), PeerAccessUnsupported)?;
    expect_error(driver.peer_disable(device, device), PeerAccessNotEnabled)
}

fn peer_access_is_enabled_and_disabled_once(context: &TestContext) -> CheckResult {
    let (driver, device, peer) = (&context.driver, context.device_id, context.peer_device_id()?);
    expect_error(driver.peer_disable(device, peer), PeerAccessNotEnabled)?;
    driver.peer_enable(device, peer)?;
    let again = driver.peer_enable(device, peer);
    driver.peer_disable(device, peer)?;
    expect_error(again, PeerAccessAlreadyEnabled)?;
    expect_error(driver.peer_disable(device, peer), PeerAccessNotEnabled)
}

fn clock_advances_with_work(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    context.kernels()?;
    let begun = context.driver.now();
    context.delay(stream)?;
    context.synchronize(stream)?;
    expect(context.driver.now() > begun, "the time after work is later")
}
