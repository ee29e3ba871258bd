//! Small programs that an earlier version handled wrongly.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::fixture::{BYTES, DEVICE, Fixture};
use warpool_driver::sim::{HazardKind, SimConfig, SimDriver};
use warpool_driver::*;

fn new_fixture() -> Result<Fixture> {
    Fixture::new(SimConfig::default())
}

static SPECIAL: KernelSource = KernelSource {
    name: "special",
    cuda: "",
    host_kernels: &[
        HostKernel::new("assert", |_| panic!("a failed assertion of the device, on purpose")),
        HostKernel { name: "slow", run: |_| Ok(()), nanos: Some(|_, _| 10_000_000) },
    ],
};

fn launch(fixture: &Fixture, name: &str) -> Result<()> {
    let function = fixture.gpu.function_get(fixture.gpu.module_load(DEVICE, &SPECIAL)?, name)?;
    fixture.gpu.kernel_launch(function, LaunchShape::ONE, &[], fixture.one)
}

fn log(fixture: &Fixture) -> Vec<String> {
    fixture.gpu.hazards().iter().map(ToString::to_string).collect()
}

#[test]
fn a_wait_of_the_default_stream_for_a_reached_event_orders_blocking_streams() -> Result<()> {
    let fixture = new_fixture()?;
    let legacy = fixture.gpu.stream_default(DEVICE)?;
    let blocking = fixture.gpu.stream_create(DEVICE, StreamOptions { non_blocking: false, priority: 0 })?;
    fixture.fill(1, fixture.one)?;
    fixture.gpu.event_record(fixture.event, fixture.one, EventScope::Plain)?;
    // Time passes without a wait: 200 us are enough for the fill.
    for _ in 0..10 {
        fixture.gpu.stream_destroy(fixture.gpu.stream_create(DEVICE, StreamOptions::default())?)?;
    }
    fixture.gpu.stream_wait_event(legacy, fixture.event, EventScope::Plain)?;
    fixture.fill(2, blocking)?;
    fixture.gpu.device_synchronize(DEVICE)?;
    assert!(log(&fixture).is_empty(), "{:#?}", log(&fixture));
    Ok(())
}

#[test]
fn a_wait_for_the_device_covers_destroyed_streams() -> Result<()> {
    let fixture = new_fixture()?;
    fixture.fill(1, fixture.one)?;
    fixture.gpu.stream_destroy(fixture.one)?;
    fixture.gpu.device_synchronize(DEVICE)?;
    fixture.fill(2, fixture.two)?;
    fixture.gpu.stream_destroy(fixture.two)?;
    fixture.gpu.device_synchronize(DEVICE)?;
    assert!(log(&fixture).is_empty(), "{:#?}", log(&fixture));
    Ok(())
}

#[test]
fn a_suballocation_is_ordered_by_the_default_stream_rules() -> Result<()> {
    let fixture = new_fixture()?;
    let legacy = fixture.gpu.stream_default(DEVICE)?;
    let blocking = fixture.gpu.stream_create(DEVICE, StreamOptions { non_blocking: false, priority: 0 })?;
    fixture.fill(1, legacy)?;
    fixture.gpu.suballocated(fixture.memory, BYTES, blocking);
    fixture.fill(2, blocking)?;
    fixture.gpu.device_synchronize(DEVICE)?;
    assert!(log(&fixture).is_empty(), "{:#?}", log(&fixture));
    Ok(())
}

#[test]
fn a_conflict_over_two_allocations_gives_two_entries() -> Result<()> {
    let fixture = new_fixture()?;
    let far = fixture.gpu.mem_alloc(DEVICE, 64 << 20)?;
    fixture.gpu.copy(far.into(), fixture.memory.into(), 64, fixture.one)?;
    fixture.gpu.copy(fixture.memory.into(), far.into(), 64, fixture.two)?;
    fixture.gpu.device_synchronize(DEVICE)?;
    let ranges: Vec<u64> =
        fixture.gpu.hazards().iter().filter_map(|hazard| hazard.range).map(|range| range.bytes).collect();
    assert_eq!(ranges, [64, 64]);
    Ok(())
}

#[test]
fn many_empty_graphs_in_a_row_do_not_overflow_the_stack() -> Result<()> {
    let fixture = new_fixture()?;
    let exec = fixture.capture(|| Ok(()))?;
    launch(&fixture, "slow")?;
    for _ in 0..1000 {
        fixture.gpu.graph_launch(exec, fixture.one)?;
    }
    fixture.gpu.stream_destroy(fixture.one)?;
    fixture.gpu.device_synchronize(DEVICE)
}

#[test]
fn a_panic_in_a_host_kernel_is_a_failed_assertion_of_the_device() -> Result<()> {
    let fixture = new_fixture()?;
    launch(&fixture, "assert")?;
    fixture.fill(1, fixture.one)?;
    for _ in 0..2 {
        let error = fixture.gpu.stream_synchronize(fixture.one).expect_err("the device is broken");
        assert!(error.is_sticky() && error.code == ErrorCode::Assert, "{error}");
    }
    Ok(())
}

/// A graph that allocates memory, and frees it if `frees`; with the address.
fn allocating(fixture: &Fixture, frees: bool) -> Result<(GraphExecId, DevicePtr)> {
    let pool = fixture.gpu.pool_default(DEVICE)?;
    fixture.gpu.capture_begin(fixture.one, CaptureMode::Relaxed)?;
    let ptr = fixture.gpu.pool_alloc(pool, BYTES, fixture.one)?;
    fixture.gpu.fill(ptr, Pattern::U8(1), BYTES, fixture.one)?;
    if frees {
        fixture.gpu.pool_free(ptr, fixture.one)?;
    }
    let graph = fixture.gpu.capture_end(fixture.one)?;
    let exec = fixture.gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    fixture.gpu.graph_destroy(graph)?;
    Ok((exec, ptr))
}

#[test]
fn memory_of_a_graph_is_allocated_from_its_launch_on() -> Result<()> {
    let fixture = new_fixture()?;
    launch(&fixture, "slow")?;
    let before = fixture.gpu.object_counts();
    let (exec, ptr) = allocating(&fixture, false)?;
    fixture.gpu.graph_launch(exec, fixture.one)?;
    let error = fixture.gpu.graph_launch(exec, fixture.one).expect_err("what the first allocated was not freed");
    assert_eq!(error.code, ErrorCode::InvalidValue, "{error}");
    fixture.gpu.pool_free(ptr, fixture.one)?;
    fixture.gpu.pool_free(ptr, fixture.one).expect_err("freed already");
    fixture.gpu.graph_launch(exec, fixture.one)?;
    fixture.gpu.mem_free(ptr)?;
    fixture.gpu.graph_exec_destroy(exec)?;
    assert_eq!(fixture.gpu.object_counts(), before);
    assert!(log(&fixture).is_empty(), "{:#?}", log(&fixture));
    Ok(())
}

#[test]
fn a_queued_launch_keeps_its_memory_when_the_executable_is_destroyed() -> Result<()> {
    let fixture = new_fixture()?;
    launch(&fixture, "slow")?;
    let before = fixture.gpu.object_counts();
    let (exec, _) = allocating(&fixture, true)?;
    fixture.gpu.graph_launch(exec, fixture.one)?;
    fixture.gpu.graph_launch(exec, fixture.two)?;
    fixture.gpu.graph_exec_destroy(exec)?;
    fixture.gpu.device_synchronize(DEVICE)?;
    assert!(log(&fixture).is_empty(), "{:#?}", log(&fixture));
    assert_eq!(fixture.gpu.object_counts(), before);
    Ok(())
}

#[test]
fn sizes_beyond_all_memory_are_refused() -> Result<()> {
    let fixture = new_fixture()?;
    let pool = fixture.gpu.pool_default(DEVICE)?;
    fixture.gpu.pool_alloc(pool, BYTES, fixture.one)?;
    let pinned = fixture.gpu.host_alloc(DEVICE, BYTES, HostOptions::default())?;
    for bytes in [u64::MAX, u64::MAX - 511, 1 << 62] {
        let codes = [
            fixture.gpu.pool_alloc(pool, bytes, fixture.one).map(drop),
            fixture.gpu.mem_alloc(DEVICE, bytes).map(drop),
            fixture.gpu.host_alloc(DEVICE, bytes, HostOptions::default()).map(drop),
        ];
        for outcome in codes {
            assert!(outcome.expect_err("too much").is_out_of_memory(), "{bytes}");
        }
        let error = fixture.gpu.copy(fixture.memory.into(), pinned.into(), bytes, fixture.one).expect_err("too much");
        assert_eq!(error.code, ErrorCode::InvalidValue, "{error}");
        let error = fixture.gpu.copy(pinned.into(), fixture.memory.into(), bytes, fixture.one).expect_err("too much");
        assert_eq!(error.code, ErrorCode::InvalidValue, "{error}");
    }
    Ok(())
}

#[test]
fn a_pool_allocation_does_not_initialize_its_memory() -> Result<()> {
    let fixture = Fixture::new(SimConfig::default().with_uninitialized_check())?;
    fixture.fill(0, fixture.one)?;
    let ptr = fixture.gpu.pool_alloc(fixture.gpu.pool_default(DEVICE)?, BYTES, fixture.one)?;
    fixture.gpu.copy(fixture.memory.into(), ptr.into(), 64, fixture.one)?;
    fixture.gpu.device_synchronize(DEVICE)?;
    let kinds: Vec<HazardKind> = fixture.gpu.hazards().iter().map(|hazard| hazard.kind).collect();
    assert_eq!(kinds, [HazardKind::UninitializedRead]);
    Ok(())
}

/// Calls the driver when it is dropped.
struct DropCaller {
    gpu: Arc<SimDriver>,
    event: EventId,
    dropped: Arc<AtomicUsize>,
}

impl Drop for DropCaller {
    fn drop(&mut self) {
        self.gpu.event_destroy(self.event).expect("a live event");
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn what_a_callback_owns_may_call_the_driver_when_dropped() -> Result<()> {
    let gpu = Arc::new(SimDriver::new(SimConfig::default()));
    let dropped = Arc::new(AtomicUsize::new(0));
    let stream = gpu.stream_create(DEVICE, StreamOptions::default())?;
    let guard = || -> Result<HostCallback> {
        let event = gpu.event_create(DEVICE, EventOptions::default())?;
        let guard = DropCaller { gpu: Arc::clone(&gpu), event, dropped: Arc::clone(&dropped) };
        Ok(Arc::new(move || assert!(guard.event.0 > 0)))
    };
    gpu.stream_host_callback(stream, guard()?)?;
    gpu.stream_synchronize(stream)?;
    assert_eq!(dropped.load(Ordering::Relaxed), 1, "one that ran");

    gpu.capture_begin(stream, CaptureMode::Relaxed)?;
    gpu.stream_host_callback(stream, guard()?)?;
    let graph = gpu.capture_end(stream)?;
    let exec = gpu.graph_instantiate(graph, InstantiateOptions::default())?;
    gpu.graph_launch(exec, stream)?;
    gpu.graph_destroy(graph)?;
    gpu.graph_exec_destroy(exec)?;
    gpu.stream_synchronize(stream)?;
    gpu.device_count()?;
    assert_eq!(dropped.load(Ordering::Relaxed), 2, "one in a destroyed graph");

    gpu.stream_destroy(stream)?;
    gpu.stream_host_callback(stream, guard()?).expect_err("the stream was destroyed");
    assert_eq!(dropped.load(Ordering::Relaxed), 3, "one that was refused");
    Ok(())
}

#[test]
fn a_host_kernel_cannot_call_the_driver() -> Result<()> {
    static GPU: OnceLock<SimDriver> = OnceLock::new();
    static CALLER: KernelSource = KernelSource {
        name: "caller",
        cuda: "",
        host_kernels: &[HostKernel::new("call", |_| match GPU.get().expect("set below").device_count() {
            Err(error) if error.code == ErrorCode::NotPermitted => Ok(()),
            other => Err(KernelFault::new(format!("{other:?}"))),
        })],
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
fn a_second_wait_for_a_device_covers_waits_queued_since_the_first() -> Result<()> {
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
    // Time passes and the event is reached, without a query.
    gpu.module_load(DEVICE, &crate::fixture::KERNELS)?;
    gpu.stream_wait_event(here, event, EventScope::Plain)?;
    gpu.device_synchronize(DEVICE)?;
    gpu.host_read(pinned, &mut [0; 8])?;
    assert!(gpu.hazards().is_empty(), "{:#?}", gpu.hazards());
    Ok(())
}

/// How many pages of a range the system has provided.
#[cfg(target_os = "linux")]
fn pages_present(start: u64, bytes: u64) -> usize {
    use std::io::{Read as _, Seek as _, SeekFrom};
    // One number per page of this process; its highest bit says whether the page is present.
    let mut map = std::fs::File::open("/proc/self/pagemap").expect("Linux has it");
    map.seek(SeekFrom::Start(start / 4096 * 8)).expect("a file");
    let mut entries = vec![0; (bytes / 4096 * 8) as usize];
    map.read_exact(&mut entries).expect("every page has an entry");
    entries.chunks_exact(8).filter(|entry| entry[7] >> 7 == 1).count()
}

/// Issue 12: pinned memory was zeroed by writing to it, so 1,024 times 1 MiB took 1 GiB although nobody used it.
#[test]
#[cfg(target_os = "linux")]
fn pinned_memory_takes_no_memory_before_it_is_used() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default());
    // The second round gets memory that the first has used.
    for round in 0..2_u8 {
        let ranges: Vec<HostPtr> =
            (0..32).map(|_| gpu.host_alloc(DEVICE, 1 << 20, HostOptions::default())).collect::<Result<_>>()?;
        let present: usize = ranges.iter().map(|range| pages_present(range.0, 1 << 20)).sum();
        assert_eq!(present, 0, "round {round}: pages that nobody has accessed");
        for &range in &ranges {
            let mut content = [9; 16];
            gpu.host_read(range, &mut content)?;
            assert_eq!(content, [0; 16], "round {round}");
            gpu.host_write(range, &[round + 1; 1 << 20])?;
        }
        ranges.into_iter().try_for_each(|range| gpu.host_free(range))?;
    }
    Ok(())
}

/// Panics when it is called, or when it is dropped.
struct Panicking {
    when_dropped: bool,
    ran: Arc<AtomicUsize>,
}

impl Panicking {
    fn run(&self) {
        self.ran.fetch_add(1, Ordering::Relaxed);
        assert!(self.when_dropped, "on purpose, in a callback");
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        assert!(!self.when_dropped, "on purpose, while a callback is dropped");
    }
}

/// Issue 12: a panic in a host callback was passed on to whichever call ran it, and one while it was dropped made every
/// later wait for the stream hang.
#[test]
fn a_panic_in_a_callback_ends_the_callback_only() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default());
    let stream = gpu.stream_create(DEVICE, StreamOptions::default())?;
    let ran = Arc::new(AtomicUsize::new(0));
    let callback = |when_dropped| -> HostCallback {
        let panicking = Panicking { when_dropped, ran: Arc::clone(&ran) };
        Arc::new(move || panicking.run())
    };
    for when_dropped in [false, true] {
        gpu.stream_host_callback(stream, callback(when_dropped))?;
        gpu.stream_synchronize(stream)?;
        gpu.capture_begin(stream, CaptureMode::Relaxed)?;
        gpu.stream_host_callback(stream, callback(when_dropped))?;
        let graph = gpu.capture_end(stream)?;
        let exec = gpu.graph_instantiate(graph, InstantiateOptions::default())?;
        gpu.graph_launch(exec, stream)?;
        gpu.graph_launch(exec, stream)?;
        gpu.stream_synchronize(stream)?;
        gpu.graph_exec_destroy(exec)?;
        gpu.graph_destroy(graph)?;
        gpu.device_synchronize(DEVICE)?;
    }
    assert_eq!(ran.load(Ordering::Relaxed), 6);
    let memory = gpu.mem_alloc(DEVICE, BYTES)?;
    gpu.fill(memory, Pattern::U8(7), BYTES, stream)?;
    gpu.mem_free(memory)?;
    assert!(gpu.hazards().is_empty(), "{:#?}", gpu.hazards());
    gpu.stream_destroy(stream)
}
