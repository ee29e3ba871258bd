//! Settings of the simulated driver have their effect.

use std::sync::Arc;
use std::time::Duration;

use crate::fixture::{BYTES, DEVICE, Fixture, KERNELS};
use warpool_driver::decorate::{Counting, Recording};
use warpool_driver::sim::{HazardKind, Latencies, Latency, SimConfig, SimDriver, Timing};
use warpool_driver::*;

const OTHER: DeviceId = DeviceId(1);
const SIZE: u64 = 2 << 20;

/// Adds 1 to the first word at `ptr` with a kernel of `device`, and waits.
fn touch(gpu: &SimDriver, device: DeviceId, ptr: DevicePtr) -> Result<()> {
    let stream = gpu.stream_create(device, StreamOptions::default())?;
    let module = gpu.module_load(device, &KERNELS)?;
    let add = gpu.function_get(module, "add")?;
    gpu.kernel_launch(add, LaunchShape::ONE, &[ptr.into(), 1_u32.into(), 1_u32.into()], stream)?;
    gpu.stream_synchronize(stream)
}

fn mapped(gpu: &SimDriver, access: &[DeviceAccess]) -> Result<DevicePtr> {
    let ptr = gpu.vm_reserve(SIZE, 0, None)?;
    gpu.vm_map(ptr, gpu.vm_create(DEVICE, SIZE, PhysicalOptions::default())?)?;
    gpu.vm_set_access(ptr, SIZE, access)?;
    Ok(ptr)
}

const fn allow(device: DeviceId, access: Access) -> DeviceAccess {
    DeviceAccess { device, access }
}

#[test]
fn latencies_are_as_set() -> Result<()> {
    let by_size = Latency::BySize(vec![(0, 1_000), (1 << 20, 101_000)]);
    let sized = [Call::MemAlloc, Call::MemFree, Call::VmReserve, Call::VmCreate, Call::VmMap, Call::Copy, Call::Fill];
    let flat = Latencies::flat(7).with(Call::StreamInfo, by_size.clone());
    let latencies = sized.iter().fold(flat, |latencies, &call| latencies.with(call, by_size.clone()));
    let config = SimConfig { latencies, ..SimConfig::default() };
    let gpu = Counting::new(Arc::new(SimDriver::new(config)));
    let stream = gpu.stream_create(DEVICE, StreamOptions::default())?;
    gpu.stream_info(stream)?;
    let ptr = gpu.mem_alloc(DEVICE, 1 << 20)?;
    gpu.fill(ptr, Pattern::U8(1), 1 << 19, stream)?;
    gpu.copy(ptr.into(), ptr.offset(1 << 19).into(), 1 << 19, stream)?;
    gpu.vm_map(gpu.vm_reserve(SIZE, 0, None)?, gpu.vm_create(DEVICE, SIZE, PhysicalOptions::default())?)?;
    gpu.device_synchronize(DEVICE)?;
    gpu.mem_free(ptr)?;
    let nanos = |call| gpu.count(call).time.as_nanos();
    assert_eq!(nanos(Call::StreamCreate), 7);
    assert_eq!(nanos(Call::StreamInfo), 1_000, "without a size");
    assert_eq!((nanos(Call::MemAlloc), nanos(Call::MemFree)), (101_000, 101_000));
    assert_eq!((nanos(Call::Fill), nanos(Call::Copy)), (51_000, 51_000));
    // Extrapolated beyond the last point.
    assert_eq!((nanos(Call::VmReserve), nanos(Call::VmCreate), nanos(Call::VmMap)), (201_000, 201_000, 201_000));
    Ok(())
}

#[test]
fn work_costs_are_as_set() -> Result<()> {
    let mut config = SimConfig::default().with_timing(Timing::Model);
    config.latencies = Latencies::flat(0);
    (config.work.copy_start, config.work.copy_host) = (5_000, 1_000);
    let gpu = SimDriver::new(config);
    let ptr = gpu.mem_alloc(DEVICE, 1_000_000)?;
    for upload in [true, false] {
        let start = gpu.now();
        if upload {
            gpu.upload(DEVICE, ptr, &[1; 1_000_000])?;
        } else {
            gpu.download(DEVICE, ptr, &mut [0; 1_000_000])?;
        }
        assert_eq!(gpu.now() - start, Duration::from_micros(1_005), "a megabyte at a gigabyte a second");
    }
    Ok(())
}

#[test]
fn mapped_memory_is_accessible_to_devices_with_access() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default().with_devices(2));
    let both = mapped(&gpu, &[allow(DEVICE, Access::ReadWrite), allow(OTHER, Access::ReadWrite)])?;
    touch(&gpu, DEVICE, both)?;
    touch(&gpu, OTHER, both)?;
    let mut word = [0; 4];
    gpu.download(DEVICE, both, &mut word)?;
    assert_eq!((u32::from_le_bytes(word), gpu.hazards()), (2, vec![]));

    let readable = mapped(&gpu, &[allow(DEVICE, Access::ReadWrite), allow(OTHER, Access::Read)])?;
    touch(&gpu, DEVICE, readable)?;
    assert_eq!(touch(&gpu, OTHER, readable).map_err(|error| error.code), Err(ErrorCode::IllegalAddress));
    assert_eq!(gpu.hazards()[0].kind, HazardKind::IllegalAccess);
    Ok(())
}

#[test]
fn only_peers_can_get_access() -> Result<()> {
    let mut config = SimConfig::default().with_devices(2);
    config.devices[1].properties.peers.clear();
    let gpu = SimDriver::new(config);
    let refused = mapped(&gpu, &[allow(OTHER, Access::ReadWrite)]).expect_err("device 1 has no peers");
    assert_eq!(refused.code, ErrorCode::InvalidDevice);
    assert_eq!(gpu.peer_enable(OTHER, DEVICE).map_err(|error| error.code), Err(ErrorCode::PeerAccessUnsupported));
    Ok(())
}

#[test]
fn pool_access_of_other_devices_is_as_set() -> Result<()> {
    for (access, works) in [(Access::ReadWrite, true), (Access::Read, false), (Access::None, false)] {
        let gpu = SimDriver::new(SimConfig::default().with_devices(2));
        let (pool, stream) = (gpu.pool_create(DEVICE)?, gpu.stream_create(DEVICE, StreamOptions::default())?);
        gpu.pool_set_access(pool, OTHER, access)?;
        let ptr = gpu.pool_alloc(pool, BYTES, stream)?;
        gpu.stream_synchronize(stream)?;
        assert_eq!(touch(&gpu, OTHER, ptr).is_ok(), works, "{access:?}");
    }
    Ok(())
}

#[test]
fn unsupported_features_are_refused() {
    let mut config = SimConfig::default();
    let properties = &mut config.devices[0].properties;
    (properties.share_posix_fd, properties.rdma, properties.ipc_events) = (false, false, false);
    (properties.host_registration, properties.async_pools, properties.conditional_nodes) = (false, false, false);
    let gpu = SimDriver::new(config);
    let shared = |share, rdma| gpu.vm_create(DEVICE, SIZE, PhysicalOptions { share, rdma }).map(drop);
    let refusals = [
        shared(Some(ShareKind::PosixFd), false),
        shared(Some(ShareKind::Fabric), false),
        shared(None, true),
        gpu.event_create(DEVICE, EventOptions { interprocess: true, ..EventOptions::default() }).map(drop),
        gpu.pool_default(DEVICE).map(drop),
    ];
    for refusal in refusals {
        assert_eq!(refusal.map_err(|error| error.code), Err(ErrorCode::NotSupported));
    }
}

#[test]
fn memory_can_be_shared_over_a_fabric() -> Result<()> {
    let mut config = SimConfig::default();
    config.devices[0].properties.share_fabric = true;
    let gpu = SimDriver::new(config);
    let options = PhysicalOptions { share: Some(ShareKind::Fabric), rdma: false };
    let physical = gpu.vm_create(DEVICE, SIZE, options)?;
    let handle = gpu.vm_export(physical, ShareKind::Fabric)?;
    assert!(matches!(handle, SharedMemory::Fabric(_)));
    let imported = gpu.vm_import(DEVICE, &handle, SIZE)?;
    assert_ne!(imported, physical);
    let nothing = gpu.vm_import(DEVICE, &SharedMemory::Fabric([7; 64]), SIZE).expect_err("not a valid handle");
    assert_eq!(nothing.code, ErrorCode::InvalidValue);
    Ok(())
}

#[test]
fn granularity_can_be_smaller() -> Result<()> {
    let mut config = SimConfig::default();
    config.devices[0].properties.granularity = 64 << 10;
    let gpu = SimDriver::new(config);
    let range = gpu.vm_reserve(SIZE, 0, None)?;
    let physical = gpu.vm_create(DEVICE, 64 << 10, PhysicalOptions::default())?;
    gpu.vm_map(range.offset(64 << 10), physical)
}

#[test]
fn the_capture_of_a_body_ends_with_the_capture_around_it() -> Result<()> {
    for destroy in [false, true] {
        let fixture = Fixture::new(SimConfig::default())?;
        fixture.gpu.capture_begin(fixture.one, CaptureMode::Relaxed)?;
        let flag = fixture.gpu.conditional_create(fixture.one, 1)?;
        fixture.gpu.conditional_begin(fixture.one, flag, ConditionalKind::If, fixture.two, CaptureMode::Relaxed)?;
        if destroy {
            fixture.gpu.stream_destroy(fixture.one)?;
        } else {
            let graph = fixture.gpu.capture_end(fixture.one)?;
            let unfinished = fixture.gpu.graph_instantiate(graph, InstantiateOptions::default());
            assert_eq!(unfinished.map_err(|error| error.code), Err(ErrorCode::InvalidValue));
        }
        assert_eq!(fixture.gpu.capture_state(fixture.two)?, CaptureState::None);
        assert_eq!(fixture.gpu.object_counts().captures, 0);
    }
    Ok(())
}

#[test]
fn a_block_allocated_in_a_capture_is_no_longer_freed() -> Result<()> {
    let fixture = Fixture::new(SimConfig::default())?;
    fixture.gpu.suballocated(fixture.memory, BYTES, fixture.one);
    fixture.gpu.suballocation_freed(fixture.memory, BYTES);
    let exec = fixture.capture(|| {
        fixture.gpu.suballocated(fixture.memory, BYTES, fixture.one);
        fixture.fill(1, fixture.one)
    })?;
    fixture.gpu.graph_launch(exec, fixture.one)?;
    fixture.gpu.device_synchronize(DEVICE)?;
    assert_eq!(fixture.gpu.hazards(), []);
    Ok(())
}

#[test]
fn suballocations_are_tracked_unless_switched_off_but_always_recorded() -> Result<()> {
    for (config, tracked) in
        [(SimConfig::default(), true), (SimConfig::default().without_suballocation_tracking(), false)]
    {
        let gpu = Arc::new(SimDriver::new(config));
        assert_eq!(gpu.tracks_suballocations(), tracked);
        assert_eq!(Counting::new(gpu.clone()).tracks_suballocations(), tracked);
        let recording = Recording::new(gpu.clone());
        assert!(recording.tracks_suballocations());
        let stream = recording.stream_create(DEVICE, StreamOptions::default())?;
        let ptr = recording.mem_alloc(DEVICE, BYTES)?;
        recording.suballocation_freed(ptr, BYTES);
        assert_eq!(recording.log().entries.last().map(|entry| entry.call), Some(Call::SuballocationFreed));
        // A use of freed memory: detected if the report was used.
        recording.fill(ptr, Pattern::U8(1), BYTES, stream)?;
        recording.device_synchronize(DEVICE)?;
        assert_eq!(gpu.hazards().iter().any(|hazard| hazard.kind == HazardKind::UseAfterFree), tracked);
    }
    Ok(())
}

#[test]
fn calls_are_counted_and_their_time_is_all_the_time_there_is() -> Result<()> {
    let gpu = SimDriver::new(SimConfig { latencies: Latencies::flat(100), ..SimConfig::default() });
    assert_eq!((gpu.calls_made(), gpu.time_in_calls()), (0, Duration::ZERO));
    let ptr = gpu.mem_alloc(DEVICE, BYTES)?;
    gpu.mem_alloc(DEVICE, 0).expect_err("failed calls count too");
    gpu.suballocation_freed(ptr, BYTES);
    assert_eq!((gpu.calls_made(), gpu.call_count(Call::MemAlloc), gpu.call_count(Call::MemFree)), (2, 2, 0));
    let stream = gpu.stream_create(DEVICE, StreamOptions::default())?;
    gpu.fill(ptr, Pattern::U8(1), BYTES, stream).expect("queued");
    gpu.place_next_alloc(DEVICE, ptr)?;
    gpu.pause_stream(stream)?;
    assert_eq!((gpu.calls_made(), gpu.time_in_calls()), (4, Duration::from_nanos(500)), "the report took time");
    gpu.device_synchronize(DEVICE)?;
    assert!(gpu.time_in_calls() > Duration::from_nanos(600), "waiting is time in calls");
    Ok(())
}

/// The attributes of a foreign stream cannot be read while it captures, unless they were read before.
#[test]
fn attributes_of_a_foreign_stream_are_hidden_while_it_captures() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default());
    for adopted_before in [true, false] {
        let stream = gpu.create_foreign_stream(DEVICE, StreamOptions { non_blocking: true, priority: -1 })?;
        let handle = gpu.stream_handle(stream)?;
        // SAFETY: the simulated driver dereferences no handle.
        let foreign = unsafe { ForeignStream::new(handle.raw) };
        if adopted_before {
            assert_eq!(gpu.stream_adopt(DEVICE, foreign)?, stream);
        }
        gpu.capture_begin(stream, CaptureMode::Global)?;
        assert_eq!(gpu.stream_adopt(DEVICE, foreign)?, stream);
        let info = gpu.stream_info(stream).map_err(|error| error.code);
        assert_eq!(info.is_ok(), adopted_before, "{info:?}");
        assert!(info.is_ok() || info == Err(ErrorCode::StreamCaptureUnsupported));
        assert_eq!(gpu.stream_handle(stream)?, handle);
        let graph = gpu.capture_end(stream).expect("the refusal invalidates nothing");
        gpu.graph_destroy(graph)?;
        assert_eq!(gpu.stream_info(stream)?.priority, -1);
    }
    Ok(())
}
