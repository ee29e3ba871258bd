//! Which calls a capture forbids: every call, in every mode, on the capturing thread and on another.
//! [`Call::capture_rule`] says what is expected; running on CUDA shows that it is right.

use std::sync::Arc;

use warpool_driver::ErrorCode::{StreamCaptureInvalidated, StreamCaptureUnsupported};
use warpool_driver::{
    Access, BlasMath, BlasMatrix, Call, CaptureMode, CaptureRule, DeviceAccess, DevicePtr, EventId, EventOptions,
    EventScope, ForeignStream, Granularity, GraphId, HostOptions, InstantiateOptions, KernelArg, LaunchShape, Library,
    ModuleId, Pattern, PhysicalId, PhysicalOptions, PoolAttribute, Sgemm, StreamOptions,
};

use crate::check::Check;
use crate::context::{Capture, Resource, SOURCE, TestContext};
use crate::expect::{CheckError, CheckResult, expect, expect_eq, expect_error};

pub(crate) const CHECKS: &[Check] = crate::checks![
    mode_exchange_returns_the_previous_mode,
    every_thread_starts_in_global_mode,
    ; provoking hazards:
    global_capture_restricts_its_own_thread,
    global_capture_restricts_other_threads,
    thread_local_capture_restricts_its_own_thread,
    thread_local_capture_does_not_restrict_other_threads,
    relaxed_capture_does_not_restrict_its_own_thread,
    relaxed_capture_does_not_restrict_other_threads,
    forbidden_call_invalidates_only_captures_that_forbid_it,
    relaxed_thread_mode_allows_forbidden_calls,
];

/// A call with its arguments, to be made once.
type PreparedCall<'b> = Box<dyn FnOnce() -> warpool_driver::Result<()> + Send + 'b>;

/// Creates what a call needs.
type Prepare = for<'b> fn(&'b TestContext) -> CheckResult<PreparedCall<'b>>;

fn global_capture_restricts_its_own_thread(context: &TestContext) -> CheckResult {
    check_rules(context, CaptureMode::Global, true)
}

fn global_capture_restricts_other_threads(context: &TestContext) -> CheckResult {
    check_rules(context, CaptureMode::Global, false)
}

fn thread_local_capture_restricts_its_own_thread(context: &TestContext) -> CheckResult {
    check_rules(context, CaptureMode::ThreadLocal, true)
}

fn thread_local_capture_does_not_restrict_other_threads(context: &TestContext) -> CheckResult {
    check_rules(context, CaptureMode::ThreadLocal, false)
}

fn relaxed_capture_does_not_restrict_its_own_thread(context: &TestContext) -> CheckResult {
    check_rules(context, CaptureMode::Relaxed, true)
}

fn relaxed_capture_does_not_restrict_other_threads(context: &TestContext) -> CheckResult {
    check_rules(context, CaptureMode::Relaxed, false)
}

/// Makes every call of the table during a capture in `mode`: exactly the forbidden ones must fail and invalidate it.
fn check_rules(context: &TestContext, mode: CaptureMode, same_thread: bool) -> CheckResult {
    let properties = context.properties()?;
    context.kernels()?;
    let stream = context.stream()?;
    let blas = context.library_handle_if_installed(Library::Blas)?.is_some();
    let mut wrong = Vec::new();
    for &(call, prepare) in CALLS {
        let (name, can) = (call.name(), &properties);
        let unsupported = (name.starts_with("vm_") && !can.virtual_memory)
            || (name.starts_with("pool_") && !can.async_pools)
            || (name.ends_with("register") && !can.host_registration)
            || (name == "event_export" && !can.ipc_events)
            || (name == "event_record_context" && !context.records_contexts()?)
            || ((name.starts_with("library_") || name.starts_with("blas_")) && !blas);
        if unsupported {
            continue;
        }
        let act = prepare(context)?;
        context.driver.device_synchronize(context.device_id)?;
        context.driver.capture_begin(stream, mode)?;
        let answer = if same_thread { act() } else { context.on_new_thread(act) };
        let ended = context.driver.capture_end(stream);
        let ended = ended.map(|graph| context.track(Resource::Graph(graph))).map_err(|error| error.code);
        let forbidden = match call.capture_rule() {
            CaptureRule::Free | CaptureRule::Stream => false,
            CaptureRule::Guarded => mode == CaptureMode::Global || (mode == CaptureMode::ThreadLocal && same_thread),
            CaptureRule::Never | CaptureRule::Refused => true,
        };
        let answer = answer.map_err(|error| error.code);
        let want = match (forbidden, call.capture_rule()) {
            (true, CaptureRule::Refused) => (Err(StreamCaptureUnsupported), Ok(())),
            (true, _) => (Err(StreamCaptureUnsupported), Err(StreamCaptureInvalidated)),
            (false, _) => (Ok(()), Ok(())),
        };
        if (answer, ended) != want {
            wrong.push(format!("{call} returned {answer:?} and the end of the capture {ended:?}, expected {want:?}"));
        }
    }
    expect(wrong.is_empty(), &format!("the rules hold; but in a {mode:?} capture {}", wrong.join("; ")))
}

/// Declares the table: `Call with what it needs => the call`.
macro_rules! calls {
    ($b:ident: $($call:ident $(with $needed:pat = $made:expr)? => $act:expr;)*) => {
        &[$((Call::$call, |$b| {
            $(let $needed = $made;)?
            Ok(Box::new(move || $act))
        })),*]
    };
}

/// The calls, each with what it needs. A call that succeeds also updates the context's list of resources.
const CALLS: &[(Call, Prepare)] = calls! { b:
    DeviceCount => b.driver.device_count().map(drop);
    DeviceProperties => b.driver.device_properties(b.device_id).map(drop);
    ContextRetain => b.driver.context_retain(b.device_id).and_then(|_| b.driver.context_release(b.device_id));
    ContextIsActive => b.driver.context_is_active(b.device_id).map(drop);
    CurrentDevice => b.driver.current_device().map(drop);
    DeviceSynchronize => b.driver.device_synchronize(b.device_id);
    StreamDefault => b.driver.stream_default(b.device_id).map(drop);
    StreamPerThread => b.driver.stream_per_thread(b.device_id).map(drop);
    StreamPriorityRange => b.driver.stream_priority_range(b.device_id).map(drop);
    StreamAdopt => b.driver.stream_adopt(b.device_id, ForeignStream::NULL).map(drop);
    StreamCreate =>
        b.driver.stream_create(b.device_id, StreamOptions::default()).map(|made| b.track(Resource::Stream(made)));
    StreamInfo with other = b.stream()? => b.driver.stream_info(other).map(drop);
    StreamHandle with other = b.stream()? => b.driver.stream_handle(other).map(drop);
    StreamDestroy with other = b.stream()? =>
        b.driver.stream_destroy(other).map(|()| b.untrack(Resource::Stream(other)));
    StreamQuery with other = b.stream()? => b.driver.stream_query(other).map(drop);
    StreamQuery with legacy = b.legacy_stream()? => b.driver.stream_query(legacy).map(drop);
    StreamSynchronize with other = b.stream()? => b.driver.stream_synchronize(other);
    StreamSynchronize with legacy = b.legacy_stream()? => b.driver.stream_synchronize(legacy);
    StreamWaitEvent with (other, event) = (b.stream()?, recorded(b)?) =>
        b.driver.stream_wait_event(other, event, EventScope::Plain);
    StreamHostCallback with other = b.stream()? => b.driver.stream_host_callback(other, Arc::new(|| ()));
    EventCreate =>
        b.driver.event_create(b.device_id, EventOptions::default()).map(|made| b.track(Resource::Event(made)));
    EventDestroy with event = b.event()? => b.driver.event_destroy(event).map(|()| b.untrack(Resource::Event(event)));
    EventRecord with (other, event) = (b.stream()?, b.event()?) =>
        b.driver.event_record(event, other, EventScope::Plain);
    EventRecordContext with event = b.event()? => b.driver.event_record_context(event);
    EventQuery with event = recorded(b)? => b.driver.event_query(event).map(drop);
    EventSynchronize with event = recorded(b)? => b.driver.event_synchronize(event);
    EventElapsedMs with event = {
        let (other, event) = (b.stream()?, b.timing_event()?);
        b.record(event, other)?;
        event
    } => b.driver.event_elapsed_ms(event, event).map(drop);
    EventExport with event = b.event_with(EventOptions { interprocess: true, ..EventOptions::default() })? =>
        b.driver.event_export(event).map(drop);
    MemInfo => b.driver.mem_info(b.device_id).map(drop);
    MemExport with ptr = b.alloc(4096)? => b.driver.mem_export(ptr).map(drop);
    MemAlloc => b.driver.mem_alloc(b.device_id, 4096).map(|ptr| b.track(Resource::Memory(ptr)));
    MemFree with ptr = b.alloc(4096)? => b.driver.mem_free(ptr).map(|()| b.untrack(Resource::Memory(ptr)));
    VmGranularity => b.driver.vm_granularity(b.device_id, Granularity::Minimum).map(drop);
    VmReserve => b.driver.vm_reserve(VM_BYTES, 0, None).map(|ptr| b.track(Resource::AddressRange(ptr, VM_BYTES)));
    VmFreeRange with ptr = reserved(b)? =>
        b.free_range(ptr, VM_BYTES).map(|()| b.untrack(Resource::AddressRange(ptr, VM_BYTES)));
    VmCreate => {
        let made = b.driver.vm_create(b.device_id, VM_BYTES, PhysicalOptions::default());
        made.map(|made| b.track(Resource::Physical(made)))
    };
    VmMap with (ptr, physical) = unmapped(b)? =>
        b.driver.vm_map(ptr, physical).map(|()| b.track(Resource::Mapping(ptr, VM_BYTES)));
    VmSetAccess with (ptr, access) = (mapped(b)?, DeviceAccess { device: b.device_id, access: Access::ReadWrite }) =>
        b.driver.vm_set_access(ptr, VM_BYTES, &[access]);
    VmUnmap with ptr = mapped(b)? =>
        b.driver.vm_unmap(ptr, VM_BYTES).map(|()| b.untrack(Resource::Mapping(ptr, VM_BYTES)));
    VmRelease with (_, physical) = unmapped(b)? =>
        b.driver.vm_release(physical).map(|()| b.untrack(Resource::Physical(physical)));
    PoolDefault => b.driver.pool_default(b.device_id).map(drop);
    PoolCreate => b.driver.pool_create(b.device_id).map(|made| b.track(Resource::Pool(made)));
    PoolDestroy with pool = b.pool()? => b.driver.pool_destroy(pool).map(|()| b.untrack(Resource::Pool(pool)));
    PoolAlloc with (pool, other) = (b.pool()?, b.stream()?) =>
        b.driver.pool_alloc(pool, 4096, other).map(|ptr| b.track(Resource::Memory(ptr)));
    PoolFree with (ptr, other) = {
        let (pool, other) = (b.pool()?, b.stream()?);
        (b.pool_alloc(pool, 4096, other)?, other)
    } => b.driver.pool_free(ptr, other).map(|()| b.untrack(Resource::Memory(ptr)));
    PoolGet with pool = b.pool()? => b.driver.pool_get(pool, PoolAttribute::UsedCurrent).map(drop);
    PoolSet with pool = b.pool()? => b.driver.pool_set(pool, PoolAttribute::ReleaseThreshold, 1);
    PoolTrim with pool = b.pool()? => b.driver.pool_trim(pool, 0);
    HostAlloc =>
        b.driver.host_alloc(b.device_id, 4096, HostOptions::default()).map(|ptr| b.track(Resource::Pinned(ptr)));
    HostFree with ptr = b.alloc_pinned(4096)? => b.driver.host_free(ptr).map(|()| b.untrack(Resource::Pinned(ptr)));
    HostRegister with range = b.host_pages(1) => {
        let ptr = range.ptr();
        let done = b.driver.host_register(b.device_id, range, HostOptions::default());
        done.map(|()| b.track(Resource::Registered(ptr)))
    };
    HostUnregister with ptr = b.register(b.host_pages(1))? =>
        b.driver.host_unregister(ptr).map(|()| b.untrack(Resource::Registered(ptr)));
    HostDevicePtr with ptr = b.alloc_pinned(4096)? => b.driver.host_device_ptr(b.device_id, ptr).map(drop);
    HostWrite with ptr = b.alloc_pinned(4096)? => b.driver.host_write(ptr, &[1; 16]);
    HostRead with ptr = b.alloc_pinned_bytes(&[1; 4096])? => b.driver.host_read(ptr, &mut [1; 16]);
    Copy with (other, ptr, pinned) = (b.stream()?, b.alloc(64)?, b.alloc_pinned_bytes(&[1; 64])?) =>
        b.driver.copy(ptr.into(), pinned.into(), 64, other);
    Fill with (other, ptr) = (b.stream()?, b.alloc(64)?) => b.driver.fill(ptr, Pattern::U8(1), 64, other);
    Fill with (legacy, ptr) = (b.legacy_stream()?, b.alloc(64)?) => b.driver.fill(ptr, Pattern::U8(1), 64, legacy);
    Upload with ptr = b.alloc(64)? => b.driver.upload(b.device_id, ptr, &[1; 64]);
    Download with ptr = b.alloc_bytes(&[1; 64])? => b.driver.download(b.device_id, ptr, &mut [1; 64]);
    CaptureBegin with other = b.stream()? => {
        b.driver.capture_begin(other, CaptureMode::Relaxed)?;
        b.driver.capture_end(other).map(|graph| b.track(Resource::Graph(graph)))
    };
    GraphInstantiate with graph = empty(b)? =>
        b.driver.graph_instantiate(graph, InstantiateOptions::default()).map(|made| b.track(Resource::GraphExec(made)));
    GraphLaunch with (exec, other) = (b.instantiate(empty(b)?)?, b.stream()?) => b.launch_graph(exec, other);
    GraphTopology with graph = empty(b)? => b.driver.graph_topology(graph).map(drop);
    GraphDot with graph = empty(b)? => b.driver.graph_dot(graph).map(drop);
    GraphDestroy with graph = empty(b)? => b.driver.graph_destroy(graph).map(|()| b.untrack(Resource::Graph(graph)));
    GraphExecDestroy with exec = b.instantiate(empty(b)?)? =>
        b.driver.graph_exec_destroy(exec).map(|()| b.untrack(Resource::GraphExec(exec)));
    ModuleLoad => b.driver.module_load(b.device_id, &SOURCE).map(|made| b.track(Resource::Module(made)));
    FunctionGet with module = loaded(b)? => b.driver.function_get(module, "spin").map(drop);
    ModuleUnload with module = loaded(b)? =>
        b.driver.module_unload(module).map(|()| b.untrack(Resource::Module(module)));
    KernelLaunch with (spin, other) = (b.kernels()?.spin, b.stream()?) =>
        b.launch_kernel(spin, LaunchShape::ONE, &[KernelArg::U64(0)], other);
    GraphExecSetKernel with (exec, node, spin) = {
        let (spin, other) = (b.kernels()?.spin, b.stream()?);
        let graph = b.capture(other, || b.launch_single(spin, &[KernelArg::U64(0)], other))?;
        (b.instantiate(graph)?, b.driver.graph_topology(graph)?.nodes[0].id, spin)
    } => b.set_exec_kernel(exec, node, spin, LaunchShape::ONE, &[KernelArg::U64(1)]);
    LibraryCreate => b.driver.library_create(Library::Blas, b.device_id).map(|made| b.track(Resource::Handle(made)));
    LibraryDestroy with handle = b.library_handle(Library::Blas)? =>
        b.driver.library_destroy(handle).map(|()| b.untrack(Resource::Handle(handle)));
    LibrarySetStream with (handle, other) = (b.library_handle(Library::Blas)?, b.stream()?) =>
        b.driver.library_set_stream(handle, other);
    LibraryRaw with handle = b.library_handle(Library::Blas)? => b.driver.library_raw(handle).map(drop);
    BlasSetWorkspace with (handle, workspace) = (b.library_handle(Library::Blas)?, b.alloc(4096)?) =>
        b.driver.blas_set_workspace(handle, workspace, 4096);
    BlasSetMath with handle = b.library_handle(Library::Blas)? => b.driver.blas_set_math(handle, BlasMath::Tf32);
    BlasSetAtomics with handle = b.library_handle(Library::Blas)? => b.driver.blas_set_atomics(handle, true);
    BlasSgemm with (handle, product) = {
        let (handle, other, memory) = (b.library_handle(Library::Blas)?, b.stream()?, b.alloc_words(&[0; 12])?);
        let at = |n: u64| BlasMatrix { ptr: memory.offset(16 * n), stride: 2, transposed: false };
        let product = Sgemm { m: 2, n: 2, k: 2, alpha: 1.0, a: at(0), b: at(1), beta: 0.0, c: at(2) };
        b.driver.library_set_stream(handle, other)?;
        // Once before the capture: the library loads its kernels at first use.
        b.driver.blas_sgemm(handle, &product)?;
        (handle, product)
    } => b.driver.blas_sgemm(handle, &product);
};

/// The size of virtual memory in the table: the granularity of every device known so far.
const VM_BYTES: u64 = 2 << 20;

fn recorded(context: &TestContext) -> CheckResult<EventId> {
    let (other, event) = (context.stream()?, context.event()?);
    context.record(event, other)?;
    Ok(event)
}

fn reserved(context: &TestContext) -> CheckResult<DevicePtr> {
    let ptr = context.driver.vm_reserve(VM_BYTES, 0, None)?;
    context.track(Resource::AddressRange(ptr, VM_BYTES));
    Ok(ptr)
}

fn unmapped(context: &TestContext) -> CheckResult<(DevicePtr, PhysicalId)> {
    let ptr = reserved(context)?;
    let physical = context.driver.vm_create(context.device_id, VM_BYTES, PhysicalOptions::default())?;
    context.track(Resource::Physical(physical));
    Ok((ptr, physical))
}

fn mapped(context: &TestContext) -> CheckResult<DevicePtr> {
    let (ptr, physical) = unmapped(context)?;
    context.driver.vm_map(ptr, physical)?;
    context.track(Resource::Mapping(ptr, VM_BYTES));
    Ok(ptr)
}

fn empty(context: &TestContext) -> CheckResult<GraphId> {
    let other = context.stream()?;
    context.capture(other, || Ok(()))
}

fn loaded(context: &TestContext) -> CheckResult<ModuleId> {
    let module = context.driver.module_load(context.device_id, &SOURCE)?;
    context.track(Resource::Module(module));
    Ok(module)
}

fn forbidden_call_invalidates_only_captures_that_forbid_it(context: &TestContext) -> CheckResult {
    let (global, relaxed) = (context.stream()?, context.stream()?);
    context.driver.capture_begin(global, CaptureMode::Global)?;
    context.driver.capture_begin(relaxed, CaptureMode::Relaxed)?;
    expect_error(context.driver.mem_alloc(context.device_id, 4096), StreamCaptureUnsupported)?;
    context.expect_capture(global, Capture::Invalidated)?;
    context.expect_capture(relaxed, Capture::Active)?;
    context.end_capture(relaxed)?;
    expect_error(context.driver.capture_end(global), StreamCaptureInvalidated)
}

fn relaxed_thread_mode_allows_forbidden_calls(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let driver = &context.driver;
    context.driver.capture_begin(stream, CaptureMode::Global)?;
    // On another thread, any mode less strict than global is enough.
    context.on_new_thread(|| {
        for mode in [CaptureMode::Relaxed, CaptureMode::ThreadLocal] {
            driver.capture_mode_exchange(mode)?;
            context.alloc(4096)?;
            context.expect_capture(stream, Capture::Active)?;
        }
        Ok::<_, CheckError>(())
    })?;
    // On the capturing thread, only relaxed is.
    driver.capture_mode_exchange(CaptureMode::Relaxed)?;
    context.alloc(4096)?;
    context.expect_capture(stream, Capture::Active)?;
    driver.capture_mode_exchange(CaptureMode::Global)?;
    context.end_capture(stream)?;
    context.driver.capture_begin(stream, CaptureMode::Global)?;
    let strict = context.on_new_thread(|| driver.mem_alloc(context.device_id, 4096));
    expect_error(strict, StreamCaptureUnsupported)?;
    expect_error(driver.capture_end(stream), StreamCaptureInvalidated)
}

fn mode_exchange_returns_the_previous_mode(context: &TestContext) -> CheckResult {
    context.on_new_thread(|| {
        let exchange = |mode| context.driver.capture_mode_exchange(mode);
        expect_eq("the mode before relaxed", exchange(CaptureMode::Relaxed)?, CaptureMode::Global)?;
        expect_eq("the mode before thread-local", exchange(CaptureMode::ThreadLocal)?, CaptureMode::Relaxed)?;
        expect_eq("the mode before global", exchange(CaptureMode::Global)?, CaptureMode::ThreadLocal)
    })
}

fn every_thread_starts_in_global_mode(context: &TestContext) -> CheckResult {
    let driver = &context.driver;
    let before = driver.capture_mode_exchange(CaptureMode::Relaxed)?;
    let on_other_thread = context.on_new_thread(|| driver.capture_mode_exchange(CaptureMode::Global));
    let this_thread = driver.capture_mode_exchange(before)?;
    expect_eq("this thread's first mode", before, CaptureMode::Global)?;
    expect_eq("this thread's mode", this_thread, CaptureMode::Relaxed)?;
    expect(on_other_thread? == CaptureMode::Global, "a new thread starts in global mode")
}
