//! Every driver call of a long scenario fails once: each time the scenario returns that error, cleans up, and leaks
//! nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::fixture::{DEVICE, KERNELS};
use warpool_driver::decorate::{Counting, FaultPlan, Faulty};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::*;

/// Cleans up, last step first. A step that fails is retried once.
#[derive(Default)]
struct Undo<'a>(Vec<Box<dyn Fn() -> Result<()> + 'a>>);

impl<'a> Undo<'a> {
    fn push(&mut self, step: impl Fn() -> Result<()> + 'a) {
        self.0.push(Box::new(step));
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        while let Some(step) = self.0.pop() {
            step().or_else(|_| step()).expect("only one call fails");
        }
    }
}

/// Makes calls of every subject.
fn scenario(driver: &dyn Driver) -> Result<()> {
    let mut undo = Undo::default();
    let plain = EventScope::Plain;

    // Devices.
    assert_eq!(driver.device_count()?, 2);
    driver.device_properties(DEVICE)?;
    driver.context_retain(DEVICE)?;
    undo.push(|| driver.context_release(DEVICE));
    driver.context_is_active(DEVICE)?;
    driver.set_current_device(DEVICE)?;
    driver.current_device()?;
    let other = DeviceId(1);
    if driver.peer_can_access(DEVICE, other)? {
        driver.peer_enable(DEVICE, other)?;
        undo.push(move || driver.peer_disable(DEVICE, other));
    }

    // Streams and events.
    driver.stream_priority_range(DEVICE)?;
    let default = driver.stream_default(DEVICE)?;
    driver.stream_per_thread(DEVICE)?;
    let stream = driver.stream_create(DEVICE, StreamOptions::default())?;
    undo.push(move || driver.stream_destroy(stream));
    let side = driver.stream_create(DEVICE, StreamOptions { non_blocking: false, priority: -1 })?;
    undo.push(move || driver.stream_destroy(side));
    // SAFETY: the stream lives as long as this scenario.
    let foreign = unsafe { ForeignStream::new(driver.stream_handle(stream)?.raw) };
    assert_eq!(driver.stream_adopt(DEVICE, foreign)?, stream);
    driver.stream_info(stream)?;
    let timed = EventOptions { timing: true, ..EventOptions::default() };
    let start = driver.event_create(DEVICE, timed)?;
    undo.push(move || driver.event_destroy(start));
    let end = driver.event_create(DEVICE, timed)?;
    undo.push(move || driver.event_destroy(end));
    let shared = driver.event_create(DEVICE, EventOptions { interprocess: true, ..EventOptions::default() })?;
    undo.push(move || driver.event_destroy(shared));
    let name = driver.event_export(shared)?;
    match driver.event_import(DEVICE, &name) {
        // Not in the process that exported it.
        Err(error) if error.code == ErrorCode::InvalidContext => {}
        other => return other.map(drop),
    }
    driver.event_record(start, stream, plain)?;
    driver.event_record(end, stream, plain)?;
    driver.event_record_context(end)?;
    driver.event_synchronize(end)?;
    driver.event_query(end)?;
    driver.event_elapsed_ms(start, end)?;
    driver.stream_wait_event(side, end, plain)?;
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    driver.stream_host_callback(stream, Arc::new(move || _ = counted.fetch_add(1, Ordering::Relaxed)))?;
    driver.stream_synchronize(stream)?;
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    driver.stream_query(stream)?;

    // Memory of every kind.
    driver.mem_info(DEVICE)?;
    let memory = driver.mem_alloc(DEVICE, 1 << 20)?;
    undo.push(move || driver.mem_free(memory));
    let name = driver.mem_export(memory)?;
    match driver.mem_import(DEVICE, &name) {
        // Not in the process that exported it.
        Err(error) if error.code == ErrorCode::InvalidContext => {}
        other => return other.map(drop),
    }
    match driver.mem_close(DEVICE, memory) {
        // It is not from another process.
        Err(error) if error.code == ErrorCode::InvalidValue => {}
        other => return other,
    }
    let far = driver.mem_alloc(other, 4096)?;
    undo.push(move || driver.mem_free(far));
    let unit = driver.vm_granularity(DEVICE, Granularity::Minimum)?;
    let range = driver.vm_reserve(2 * unit, 0, None)?;
    // SAFETY: the simulated device's addresses are never this process's.
    undo.push(move || unsafe { driver.vm_free_range(range, 2 * unit) });
    let options = PhysicalOptions { share: Some(ShareKind::PosixFd), rdma: false };
    let physical = driver.vm_create(DEVICE, unit, options)?;
    undo.push(move || driver.vm_release(physical));
    let exported = driver.vm_export(physical, ShareKind::PosixFd)?;
    let imported = driver.vm_import(DEVICE, &exported, unit)?;
    undo.push(move || driver.vm_release(imported));
    driver.vm_map(range, physical)?;
    undo.push(move || driver.vm_unmap(range, unit));
    driver.vm_map(range.offset(unit), imported)?;
    undo.push(move || driver.vm_unmap(range.offset(unit), unit));
    driver.vm_set_access(range, 2 * unit, &[DeviceAccess { device: DEVICE, access: Access::ReadWrite }])?;
    let pool = driver.pool_create(DEVICE)?;
    undo.push(move || driver.pool_destroy(pool));
    driver.pool_default(DEVICE)?;
    driver.pool_set(pool, PoolAttribute::ReleaseThreshold, u64::MAX)?;
    driver.pool_set_access(pool, other, Access::ReadWrite)?;
    let pooled = driver.pool_alloc(pool, 4096, stream)?;
    undo.push(|| driver.device_synchronize(DEVICE));
    undo.push(move || driver.pool_free(pooled, stream));
    driver.pool_get(pool, PoolAttribute::UsedCurrent)?;
    driver.pool_trim(pool, 0)?;
    let host = driver.host_alloc(DEVICE, 4096, HostOptions::default())?;
    undo.push(move || driver.host_free(host));
    let own = HostPages::map(8192, false).expect("two pages");
    driver.host_register(DEVICE, HostRange::of_pages(&own), HostOptions::default())?;
    undo.push(move || driver.host_unregister(own.ptr()));
    driver.host_device_ptr(DEVICE, host)?;
    driver.host_write(host, &[7; 64])?;

    // Copies.
    driver.upload(DEVICE, memory, &[1; 64])?;
    driver.copy(memory.into(), host.into(), 64, stream)?;
    driver.copy_peer(far, other, memory, DEVICE, 64, stream)?;
    driver.copy_2d(memory.into(), 32, host.into(), 32, 16, 2, stream)?;
    driver.fill(range, Pattern::U16(3), 32, stream)?;
    driver.stream_synchronize(stream)?;
    let mut back = [0; 64];
    driver.download(other, far, &mut back)?;
    assert_eq!(back, [7; 64]);
    driver.host_read(host, &mut back)?;

    // Kernels, capture, graphs.
    let module = driver.module_load(DEVICE, &KERNELS)?;
    undo.push(move || driver.module_unload(module));
    let add = driver.function_get(module, "add")?;
    driver.function_parameters(add)?;
    let args = [memory.into(), KernelArg::U32(4), KernelArg::U32(1)];
    launch(driver, add, &args, stream)?;
    driver.capture_mode_exchange(CaptureMode::Global)?;
    let graph = captured(driver, stream, side, |flag| {
        launch(driver, add, &args, stream)?;
        driver.conditional_begin(stream, flag, ConditionalKind::If, side, CaptureMode::Relaxed)?;
        let filled = driver.fill(range, Pattern::U8(1), 16, side);
        let body = driver.capture_end(side)?;
        driver.graph_destroy(body).inspect_err(|_| _ = driver.graph_destroy(body)).and(filled)
    })?;
    undo.push(move || driver.graph_destroy(graph));
    let node = driver.graph_topology(graph)?.nodes[0].id;
    driver.graph_dot(graph)?;
    driver.graph_raw(graph)?;
    let exec = driver.graph_instantiate(graph, InstantiateOptions::default())?;
    undo.push(move || driver.graph_exec_destroy(exec));
    driver.graph_exec_raw(exec)?;
    // SAFETY: the simulated device checks every access of a kernel.
    unsafe { driver.graph_exec_set_kernel(exec, node, add, LaunchShape::ONE, &args) }?;
    // SAFETY: the simulated device checks every access of a node.
    unsafe { driver.graph_launch(exec, stream) }?;

    // Libraries.
    let handle = driver.library_create(Library::Blas, DEVICE)?;
    undo.push(move || driver.library_destroy(handle));
    driver.library_raw(handle)?;
    driver.library_set_stream(handle, stream)?;
    driver.blas_set_workspace(handle, memory.offset(4096), 4096)?;
    driver.blas_set_math(handle, BlasMath::Tf32)?;
    driver.blas_set_atomics(handle, false)?;
    let matrix = BlasMatrix { ptr: memory, stride: 2, transposed: false };
    let c = BlasMatrix { ptr: memory.offset(64), ..matrix };
    driver.blas_sgemm(handle, &Sgemm { m: 2, n: 2, k: 2, alpha: 1.0, a: matrix, b: matrix, beta: 0.0, c })?;
    driver.stream_synchronize(stream)?;
    driver.stream_synchronize(default)?;
    driver.device_synchronize(DEVICE)
}

/// Launches a kernel of one thread.
fn launch(driver: &dyn Driver, function: FunctionId, args: &[KernelArg], stream: StreamId) -> Result<()> {
    // SAFETY: the simulated device checks every access of a kernel.
    unsafe { driver.kernel_launch(function, LaunchShape::ONE, args, stream) }
}

/// A capture that is ended whatever happens in it, even if ending it fails the first time.
fn captured(
    driver: &dyn Driver,
    stream: StreamId,
    side: StreamId,
    body: impl FnOnce(ConditionalId) -> Result<()>,
) -> Result<GraphId> {
    driver.capture_begin(stream, CaptureMode::Relaxed)?;
    let outcome = (|| {
        driver.capture_state(stream)?;
        driver.capture_dependencies(stream)?;
        driver.capture_topology(stream)?;
        body(driver.conditional_create(stream, 1)?)
    })();
    let destroy = |graph| driver.graph_destroy(graph).or_else(|_| driver.graph_destroy(graph));
    // If something failed already, nothing else will.
    if outcome.is_err() && matches!(driver.capture_state(side), Ok(CaptureState::Active(_))) {
        driver.capture_end(side).and_then(destroy)?;
    }
    let ended = driver.capture_end(stream);
    match (outcome, ended.clone().or_else(|_| driver.capture_end(stream))) {
        (Ok(()), Ok(graph)) if ended.is_ok() => Ok(graph),
        (outcome, graph) => {
            destroy(graph?)?;
            Err(outcome.err().or(ended.err()).expect("one of the two failed"))
        }
    }
}

/// Whether a call releases something, or is the wait before that.
fn is_cleanup(call: Call) -> bool {
    FaultPlan::CLEANUP.contains(&call) || call == Call::DeviceSynchronize
}

fn new_driver() -> Arc<SimDriver> {
    Arc::new(SimDriver::new(SimConfig::default().with_devices(2)))
}

/// How many calls the scenario makes, and of which kinds.
fn calls_of_scenario() -> (u64, Vec<Call>) {
    let counting = Counting::new(new_driver());
    scenario(&counting).expect("the scenario works");
    let counts = counting.counts();
    (counts.iter().map(|count| count.calls).sum(), counts.iter().map(|count| count.call).collect())
}

#[test]
fn the_scenario_makes_every_call_of_the_contract() {
    let (_, made) = calls_of_scenario();
    let reports = [Call::Suballocated, Call::SuballocatedInPlace, Call::SuballocationFreed];
    let missing: Vec<&Call> = Call::ALL.iter().filter(|call| !made.contains(call) && !reports.contains(call)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn each_call_failing_once_is_an_error_and_leaks_nothing() {
    let (calls, _) = calls_of_scenario();
    let sim = new_driver();
    let faulty = Faulty::new(Arc::clone(&sim) as Arc<dyn Driver>, FaultPlan::default());
    scenario(&faulty).expect("without faults it works");
    let before = sim.object_counts();
    for nth in 1..=calls {
        faulty.set_plan(FaultPlan::default().fail_nth_of_all(nth, ErrorCode::UnknownError));
        let outcome = scenario(&faulty);
        let injected = faulty.injected();
        assert_eq!(injected.len() as u64, nth, "one fault each time");
        let failed = injected.last().expect("at least one").call;
        match outcome {
            Err(error) => assert_eq!((error.call, error.code), (failed.name(), ErrorCode::UnknownError), "call {nth}"),
            // Failed cleanup is retried, so there is nothing to report.
            Ok(()) => assert!(is_cleanup(failed), "{failed} failed as call {nth}, unnoticed"),
        }
        faulty.clear_plan();
        sim.device_synchronize(DEVICE).expect("the device works");
        assert_eq!(sim.object_counts(), before, "after {failed} failed as call {nth}");
        let wrong: Vec<String> = sim.hazards().iter().map(ToString::to_string).collect();
        assert!(wrong.is_empty(), "after {failed} failed as call {nth}: {wrong:#?}");
    }
    scenario(&faulty).expect("it still works");
}
