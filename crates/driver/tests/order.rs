//! Small programs that once were judged wrongly, found by the swarm and by reading: what each must show.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use common::{BYTES, DEVICE, Lab};
use warpool_driver::sim::{HazardKind, SimConfig, SimDriver};
use warpool_driver::*;

fn lab() -> Result<Lab> {
    Lab::new(SimConfig::default())
}

static ODD: KernelSource = KernelSource {
    name: "odd",
    cuda: "",
    mirrors: &[
        KernelMirror { name: "assert", run: |_| panic!("an assert of the device, on purpose"), nanos: None },
        KernelMirror { name: "slow", run: |_| Ok(()), nanos: Some(|_, _| 10_000_000) },
    ],
};

fn launch(lab: &Lab, name: &str) -> Result<()> {
    let function = lab.gpu.function_get(lab.gpu.module_load(DEVICE, &ODD)?, name)?;
    lab.gpu.kernel_launch(function, LaunchShape::ONE, &[], lab.one)
}

fn log(lab: &Lab) -> Vec<String> {
    lab.gpu.hazards().iter().map(ToString::to_string).collect()
}

#[test]
fn a_wait_of_the_default_stream_for_a_mark_already_reached_is_handed_on() -> Result<()> {
    let lab = lab()?;
    let legacy = lab.gpu.stream_default(DEVICE)?;
    let blocking = lab.gpu.stream_create(DEVICE, StreamOptions { non_blocking: false, priority: 0 })?;
    lab.fill(1, lab.one)?;
    lab.gpu.event_record(lab.event, lab.one, EventScope::Plain)?;
    // Time passes, but nobody waits: 200 us are enough for the fill.
    for _ in 0..10 {
        lab.gpu.stream_destroy(lab.gpu.stream_create(DEVICE, StreamOptions::default())?)?;
    }
    lab.gpu.stream_wait_event(legacy, lab.event, EventScope::Plain)?;
    lab.fill(2, blocking)?;
    lab.gpu.device_synchronize(DEVICE)?;
    assert!(log(&lab).is_empty(), "{:#?}", log(&lab));
    Ok(())
}

#[test]
fn waiting_for_the_device_covers_streams_that_are_gone() -> Result<()> {
    let lab = lab()?;
    lab.fill(1, lab.one)?;
    lab.gpu.stream_destroy(lab.one)?;
    lab.gpu.device_synchronize(DEVICE)?;
    lab.fill(2, lab.two)?;
    lab.gpu.stream_destroy(lab.two)?;
    lab.gpu.device_synchronize(DEVICE)?;
    assert!(log(&lab).is_empty(), "{:#?}", log(&lab));
    Ok(())
}

#[test]
fn a_hand_out_counts_what_the_default_stream_rules_put_first() -> Result<()> {
    let lab = lab()?;
    let legacy = lab.gpu.stream_default(DEVICE)?;
    let blocking = lab.gpu.stream_create(DEVICE, StreamOptions { non_blocking: false, priority: 0 })?;
    lab.fill(1, legacy)?;
    lab.gpu.suballocated(lab.memory, BYTES, blocking);
    lab.fill(2, blocking)?;
    lab.gpu.device_synchronize(DEVICE)?;
    assert!(log(&lab).is_empty(), "{:#?}", log(&lab));
    Ok(())
}

#[test]
fn a_clash_over_two_pieces_of_memory_gives_an_entry_for_each() -> Result<()> {
    let lab = lab()?;
    let far = lab.gpu.mem_alloc(DEVICE, 64 << 20)?;
    lab.gpu.copy(far.into(), lab.memory.into(), 64, lab.one)?;
    lab.gpu.copy(lab.memory.into(), far.into(), 64, lab.two)?;
    lab.gpu.device_synchronize(DEVICE)?;
    let ranges: Vec<u64> =
        lab.gpu.hazards().iter().filter_map(|hazard| hazard.range).map(|range| range.bytes).collect();
    assert_eq!(ranges, [64, 64]);
    Ok(())
}

#[test]
fn a_thousand_empty_graphs_in_a_row_do_not_nest() -> Result<()> {
    let lab = lab()?;
    let exec = lab.capture(|| Ok(()))?;
    launch(&lab, "slow")?;
    for _ in 0..1000 {
        lab.gpu.graph_launch(exec, lab.one)?;
    }
    lab.gpu.stream_destroy(lab.one)?;
    lab.gpu.device_synchronize(DEVICE)
}

#[test]
fn a_panic_in_a_kernels_double_is_the_devices_assert() -> Result<()> {
    let lab = lab()?;
    launch(&lab, "assert")?;
    lab.fill(1, lab.one)?;
    for _ in 0..2 {
        let error = lab.gpu.stream_synchronize(lab.one).expect_err("the device is broken");
        assert!(error.is_sticky() && error.code == ErrorCode::Assert, "{error}");
    }
    Ok(())
}

/// A graph that allocates, and frees if asked to; with the address.
fn allocating(lab: &Lab, frees: bool) -> Result<(GraphExecId, DevicePtr)> {
    let pool = lab.gpu.pool_default(DEVICE)?;
    lab.gpu.capture_begin(lab.one, CaptureMode::Relaxed)?;
    let ptr = lab.gpu.pool_alloc(pool, BYTES, lab.one)?;
    lab.gpu.fill(ptr, Pattern::U8(1), BYTES, lab.one)?;
    if frees {
        lab.gpu.pool_free(ptr, lab.one)?;
    }
    let graph = lab.gpu.capture_end(lab.one)?;
    let exec = lab.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    lab.gpu.graph_destroy(graph)?;
    Ok((exec, ptr))
}

#[test]
fn memory_of_a_graph_counts_from_its_launch_whether_or_not_that_has_run() -> Result<()> {
    let lab = lab()?;
    launch(&lab, "slow")?;
    let before = lab.gpu.object_counts();
    let (exec, ptr) = allocating(&lab, false)?;
    lab.gpu.graph_launch(exec, lab.one)?;
    let error = lab.gpu.graph_launch(exec, lab.one).expect_err("what the first allocated was not freed");
    assert_eq!(error.code, ErrorCode::InvalidValue, "{error}");
    lab.gpu.pool_free(ptr, lab.one)?;
    lab.gpu.pool_free(ptr, lab.one).expect_err("freed already");
    lab.gpu.graph_launch(exec, lab.one)?;
    lab.gpu.mem_free(ptr)?;
    lab.gpu.graph_exec_destroy(exec)?;
    assert_eq!(lab.gpu.object_counts(), before);
    assert!(log(&lab).is_empty(), "{:#?}", log(&lab));
    Ok(())
}

#[test]
fn a_launch_under_way_keeps_its_memory_when_the_executable_goes() -> Result<()> {
    let lab = lab()?;
    launch(&lab, "slow")?;
    let before = lab.gpu.object_counts();
    let (exec, _) = allocating(&lab, true)?;
    lab.gpu.graph_launch(exec, lab.one)?;
    lab.gpu.graph_launch(exec, lab.two)?;
    lab.gpu.graph_exec_destroy(exec)?;
    lab.gpu.device_synchronize(DEVICE)?;
    assert!(log(&lab).is_empty(), "{:#?}", log(&lab));
    assert_eq!(lab.gpu.object_counts(), before);
    Ok(())
}

#[test]
fn sizes_beyond_all_memory_are_refused() -> Result<()> {
    let lab = lab()?;
    let pool = lab.gpu.pool_default(DEVICE)?;
    lab.gpu.pool_alloc(pool, BYTES, lab.one)?;
    let pinned = lab.gpu.host_alloc(DEVICE, BYTES, HostOptions::default())?;
    for bytes in [u64::MAX, u64::MAX - 511, 1 << 62] {
        let codes = [
            lab.gpu.pool_alloc(pool, bytes, lab.one).map(drop),
            lab.gpu.mem_alloc(DEVICE, bytes).map(drop),
            lab.gpu.host_alloc(DEVICE, bytes, HostOptions::default()).map(drop),
        ];
        for outcome in codes {
            assert!(outcome.expect_err("too much").is_out_of_memory(), "{bytes}");
        }
        let error = lab.gpu.copy(lab.memory.into(), pinned.into(), bytes, lab.one).expect_err("too much");
        assert_eq!(error.code, ErrorCode::InvalidValue, "{error}");
        let error = lab.gpu.copy(pinned.into(), lab.memory.into(), bytes, lab.one).expect_err("too much");
        assert_eq!(error.code, ErrorCode::InvalidValue, "{error}");
    }
    Ok(())
}

#[test]
fn an_allocation_of_a_pool_gives_its_bytes_no_value() -> Result<()> {
    let lab = Lab::new(SimConfig::default().with_uninitialized_check())?;
    lab.fill(0, lab.one)?;
    let ptr = lab.gpu.pool_alloc(lab.gpu.pool_default(DEVICE)?, BYTES, lab.one)?;
    lab.gpu.copy(lab.memory.into(), ptr.into(), 64, lab.one)?;
    lab.gpu.device_synchronize(DEVICE)?;
    let kinds: Vec<HazardKind> = lab.gpu.hazards().iter().map(|hazard| hazard.kind).collect();
    assert_eq!(kinds, [HazardKind::UninitializedRead]);
    Ok(())
}

/// Something that uses the driver as it goes.
struct Guard {
    gpu: Arc<SimDriver>,
    event: EventId,
    gone: Arc<AtomicUsize>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.gpu.event_destroy(self.event).expect("a live event");
        self.gone.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn what_a_callback_holds_may_call_the_driver_as_it_goes() -> Result<()> {
    let gpu = Arc::new(SimDriver::new(SimConfig::default()));
    let gone = Arc::new(AtomicUsize::new(0));
    let stream = gpu.stream_create(DEVICE, StreamOptions::default())?;
    let guard = || -> Result<HostCallback> {
        let event = gpu.event_create(DEVICE, EventOptions::default())?;
        let guard = Guard { gpu: Arc::clone(&gpu), event, gone: Arc::clone(&gone) };
        Ok(Arc::new(move || assert!(guard.event.0 > 0)))
    };
    gpu.stream_host_callback(stream, guard()?)?;
    gpu.stream_synchronize(stream)?;
    assert_eq!(gone.load(Ordering::Relaxed), 1, "one that ran");

    gpu.capture_begin(stream, CaptureMode::Relaxed)?;
    gpu.stream_host_callback(stream, guard()?)?;
    let graph = gpu.capture_end(stream)?;
    let exec = gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    gpu.graph_launch(exec, stream)?;
    gpu.graph_destroy(graph)?;
    gpu.graph_exec_destroy(exec)?;
    gpu.stream_synchronize(stream)?;
    gpu.device_count()?;
    assert_eq!(gone.load(Ordering::Relaxed), 2, "one in a graph that is gone");

    gpu.stream_destroy(stream)?;
    gpu.stream_host_callback(stream, guard()?).expect_err("the stream is gone");
    assert_eq!(gone.load(Ordering::Relaxed), 3, "one that was refused");
    Ok(())
}

#[test]
fn a_kernels_double_cannot_call_the_driver() -> Result<()> {
    static GPU: OnceLock<SimDriver> = OnceLock::new();
    static CALLER: KernelSource = KernelSource {
        name: "caller",
        cuda: "",
        mirrors: &[KernelMirror {
            name: "call",
            run: |_| match GPU.get().expect("set below").device_count() {
                Err(error) if error.code == ErrorCode::NotPermitted => Ok(()),
                other => Err(KernelFault::new(format!("{other:?}"))),
            },
            nanos: None,
        }],
    };
    let gpu = GPU.get_or_init(|| SimDriver::new(SimConfig::default()));
    let stream = gpu.stream_create(DEVICE, StreamOptions::default())?;
    let module = gpu.module_load(DEVICE, &CALLER)?;
    gpu.kernel_launch(gpu.function_get(module, "call")?, LaunchShape::ONE, &[], stream)?;
    gpu.stream_synchronize(stream)?;
    assert!(gpu.hazards().is_empty(), "{:#?}", gpu.hazards());
    Ok(())
}

#[test]
fn waiting_for_a_device_again_learns_what_its_streams_have_learnt_without_new_work() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default().with_devices(2));
    let other = DeviceId(1);
    let (here, there) =
        (gpu.stream_create(DEVICE, StreamOptions::default())?, gpu.stream_create(other, StreamOptions::default())?);
    let pinned = gpu.host_alloc(DEVICE, BYTES, HostOptions::default())?;
    let memory = gpu.mem_alloc(other, BYTES)?;
    gpu.device_synchronize(DEVICE)?;
    gpu.copy(pinned.into(), memory.into(), BYTES, there)?;
    let event = gpu.event_create(other, EventOptions::default())?;
    gpu.event_record(event, there, EventScope::Plain)?;
    // Time passes, and the mark is reached, but nobody has asked.
    gpu.module_load(DEVICE, &common::KERNELS)?;
    gpu.stream_wait_event(here, event, EventScope::Plain)?;
    gpu.device_synchronize(DEVICE)?;
    gpu.host_read(pinned, &mut [0; 8])?;
    assert!(gpu.hazards().is_empty(), "{:#?}", gpu.hazards());
    Ok(())
}
