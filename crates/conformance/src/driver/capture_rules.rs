//! Which calls a capture forbids: every kind of call, in every mode, on the thread that captures and on another.
//! What should come is what [`Call::capture_rule`] says; a real device is the judge of that.

use std::sync::Arc;

use super::Check;
use super::bench::{Bench, Capturing};
use super::kernels::PLAIN;
use super::owned::Owned;
use crate::expect::{Checked, Stop, expect, expect_code, expect_eq};
use crate::launch::{free_range, launch_graph, launch_kernel, set_kernel};
use warpool_driver::ErrorCode::{StreamCaptureInvalidated, StreamCaptureUnsupported};
use warpool_driver::{
    Access, BlasMath, BlasMatrix, Call, CaptureMode, CaptureRule, DeviceAccess, EventOptions, EventScope,
    ForeignStream, Granularity, GraphExecId, HostOptions, InstantiateOptions, KernelArg, LaunchShape, Library, Pattern,
    PhysicalOptions, PoolAttribute, Sgemm, StreamOptions,
};

pub(super) const CHECKS: &[Check] = super::checks![
    a_thread_gives_its_mode_back,
    every_thread_starts_strict,
    ; provoking:
    global_captures_rule_their_own_thread,
    global_captures_rule_other_threads,
    thread_local_captures_rule_their_own_thread,
    thread_local_captures_leave_other_threads_alone,
    relaxed_captures_leave_their_own_thread_alone,
    relaxed_captures_leave_other_threads_alone,
    a_forbidden_call_breaks_every_capture_that_forbids_it,
    a_laxer_thread_is_allowed_more,
];

/// A call that is ready to be made, once.
type Act<'b> = Box<dyn FnOnce() -> warpool_driver::Result<()> + Send + 'b>;

/// Gets everything ready that the call needs.
type Prepare = for<'b> fn(&'b Bench<'b>) -> Checked<Act<'b>>;

fn global_captures_rule_their_own_thread(bench: &Bench<'_>) -> Checked {
    rules_hold(bench, CaptureMode::Global, true)
}

fn global_captures_rule_other_threads(bench: &Bench<'_>) -> Checked {
    rules_hold(bench, CaptureMode::Global, false)
}

fn thread_local_captures_rule_their_own_thread(bench: &Bench<'_>) -> Checked {
    rules_hold(bench, CaptureMode::ThreadLocal, true)
}

fn thread_local_captures_leave_other_threads_alone(bench: &Bench<'_>) -> Checked {
    rules_hold(bench, CaptureMode::ThreadLocal, false)
}

fn relaxed_captures_leave_their_own_thread_alone(bench: &Bench<'_>) -> Checked {
    rules_hold(bench, CaptureMode::Relaxed, true)
}

fn relaxed_captures_leave_other_threads_alone(bench: &Bench<'_>) -> Checked {
    rules_hold(bench, CaptureMode::Relaxed, false)
}

/// Makes every call of the table while a capture of `mode` is under way, and sees that exactly the forbidden ones fail
/// and break it.
fn rules_hold(bench: &Bench<'_>, mode: CaptureMode, same_thread: bool) -> Checked {
    let properties = bench.properties()?;
    bench.kernels()?;
    let stream = bench.stream()?;
    let blas = bench.handle_if_there(Library::Blas)?.is_some();
    let mut wrong = Vec::new();
    for &(call, prepare) in ROWS {
        let (name, can) = (call.name(), &properties);
        let lacking = (name.starts_with("vm_") && !can.virtual_memory)
            || (name.starts_with("pool_") && !can.async_pools)
            || (name.ends_with("register") && !can.host_registration)
            || (name == "event_export" && !can.ipc_events)
            || ((name.starts_with("library_") || name.starts_with("blas_")) && !blas);
        if lacking {
            continue;
        }
        let act = prepare(bench)?;
        bench.driver.device_synchronize(bench.device)?;
        bench.driver.capture_begin(stream, mode)?;
        let answer = if same_thread { act() } else { bench.elsewhere(act) };
        let ended = bench.driver.capture_end(stream);
        let ended = ended.map(|graph| bench.own(Owned::Graph(graph))).map_err(|error| error.code);
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
            wrong.push(format!("{call} gave {answer:?} and the capture's end {ended:?}, expected {want:?}"));
        }
    }
    expect(wrong.is_empty(), &format!("what the rules say; but in a {mode:?} capture {}", wrong.join("; ")))
}

/// The calls, each with what it needs. What a call makes is owned, and what it takes away is disowned, only if it
/// worked.
const ROWS: &[(Call, Prepare)] = &[
    (Call::DeviceCount, |b| Ok(Box::new(|| b.driver.device_count().map(drop)))),
    (Call::DeviceProperties, |b| Ok(Box::new(|| b.driver.device_properties(b.device).map(drop)))),
    (Call::ContextRetain, |b| {
        Ok(Box::new(|| b.driver.context_retain(b.device).and_then(|_| b.driver.context_release(b.device))))
    }),
    (Call::ContextIsActive, |b| Ok(Box::new(|| b.driver.context_is_active(b.device).map(drop)))),
    (Call::CurrentDevice, |b| Ok(Box::new(|| b.driver.current_device().map(drop)))),
    (Call::DeviceSynchronize, |b| Ok(Box::new(|| b.driver.device_synchronize(b.device)))),
    (Call::StreamDefault, |b| Ok(Box::new(|| b.driver.stream_default(b.device).map(drop)))),
    (Call::StreamPerThread, |b| Ok(Box::new(|| b.driver.stream_per_thread(b.device).map(drop)))),
    (Call::StreamPriorityRange, |b| Ok(Box::new(|| b.driver.stream_priority_range(b.device).map(drop)))),
    (Call::StreamAdopt, |b| Ok(Box::new(|| b.driver.stream_adopt(b.device, ForeignStream::NULL).map(drop)))),
    (Call::StreamCreate, |b| {
        Ok(Box::new(|| {
            b.driver.stream_create(b.device, StreamOptions::default()).map(|made| b.own(Owned::Stream(made)))
        }))
    }),
    (Call::StreamInfo, |b| {
        let other = b.stream()?;
        Ok(Box::new(move || b.driver.stream_info(other).map(drop)))
    }),
    (Call::StreamHandle, |b| {
        let other = b.stream()?;
        Ok(Box::new(move || b.driver.stream_handle(other).map(drop)))
    }),
    (Call::StreamDestroy, |b| {
        let other = b.stream()?;
        Ok(Box::new(move || b.driver.stream_destroy(other).map(|()| b.disown(Owned::Stream(other)))))
    }),
    (Call::StreamQuery, |b| {
        let other = b.stream()?;
        Ok(Box::new(move || b.driver.stream_query(other).map(drop)))
    }),
    (Call::StreamQuery, |b| {
        let legacy = b.default_stream()?;
        Ok(Box::new(move || b.driver.stream_query(legacy).map(drop)))
    }),
    (Call::StreamSynchronize, |b| {
        let other = b.stream()?;
        Ok(Box::new(move || b.driver.stream_synchronize(other)))
    }),
    (Call::StreamSynchronize, |b| {
        let legacy = b.default_stream()?;
        Ok(Box::new(move || b.driver.stream_synchronize(legacy)))
    }),
    (Call::StreamWaitEvent, |b| {
        let (other, event) = (b.stream()?, recorded(b)?);
        Ok(Box::new(move || b.driver.stream_wait_event(other, event, EventScope::Plain)))
    }),
    (Call::StreamHostCallback, |b| {
        let other = b.stream()?;
        Ok(Box::new(move || b.driver.stream_host_callback(other, Arc::new(|| ()))))
    }),
    (Call::EventCreate, |b| {
        Ok(Box::new(|| b.driver.event_create(b.device, EventOptions::default()).map(|made| b.own(Owned::Event(made)))))
    }),
    (Call::EventDestroy, |b| {
        let event = b.event()?;
        Ok(Box::new(move || b.driver.event_destroy(event).map(|()| b.disown(Owned::Event(event)))))
    }),
    (Call::EventRecord, |b| {
        let (other, event) = (b.stream()?, b.event()?);
        Ok(Box::new(move || b.driver.event_record(event, other, EventScope::Plain)))
    }),
    (Call::EventQuery, |b| {
        let event = recorded(b)?;
        Ok(Box::new(move || b.driver.event_query(event).map(drop)))
    }),
    (Call::EventSynchronize, |b| {
        let event = recorded(b)?;
        Ok(Box::new(move || b.driver.event_synchronize(event)))
    }),
    (Call::EventElapsedMs, |b| {
        let (other, event) = (b.stream()?, b.timed_event()?);
        b.record(event, other)?;
        Ok(Box::new(move || b.driver.event_elapsed_ms(event, event).map(drop)))
    }),
    (Call::EventExport, |b| {
        let event = b.event_with(EventOptions { interprocess: true, ..EventOptions::default() })?;
        Ok(Box::new(move || b.driver.event_export(event).map(drop)))
    }),
    (Call::MemInfo, |b| Ok(Box::new(|| b.driver.mem_info(b.device).map(drop)))),
    (Call::MemAlloc, |b| Ok(Box::new(|| b.driver.mem_alloc(b.device, 4096).map(|ptr| b.own(Owned::Memory(ptr)))))),
    (Call::MemFree, |b| {
        let ptr = b.memory(4096)?;
        Ok(Box::new(move || b.driver.mem_free(ptr).map(|()| b.disown(Owned::Memory(ptr)))))
    }),
    (Call::VmGranularity, |b| Ok(Box::new(|| b.driver.vm_granularity(b.device, Granularity::Minimum).map(drop)))),
    (Call::VmReserve, |b| {
        Ok(Box::new(|| b.driver.vm_reserve(PIECE, 0, None).map(|ptr| b.own(Owned::Range(ptr, PIECE)))))
    }),
    (Call::VmFreeRange, |b| {
        let ptr = b.driver.vm_reserve(PIECE, 0, None)?;
        b.own(Owned::Range(ptr, PIECE));
        Ok(Box::new(move || free_range(b.driver, ptr, PIECE).map(|()| b.disown(Owned::Range(ptr, PIECE)))))
    }),
    (Call::VmCreate, |b| {
        Ok(Box::new(|| {
            b.driver.vm_create(b.device, PIECE, PhysicalOptions::default()).map(|made| b.own(Owned::Physical(made)))
        }))
    }),
    (Call::VmMap, |b| {
        let (ptr, physical) = unmapped(b)?;
        Ok(Box::new(move || b.driver.vm_map(ptr, physical).map(|()| b.own(Owned::Mapping(ptr, PIECE)))))
    }),
    (Call::VmSetAccess, |b| {
        let ptr = mapped(b)?;
        let all = [DeviceAccess { device: b.device, access: Access::ReadWrite }];
        Ok(Box::new(move || b.driver.vm_set_access(ptr, PIECE, &all)))
    }),
    (Call::VmUnmap, |b| {
        let ptr = mapped(b)?;
        Ok(Box::new(move || b.driver.vm_unmap(ptr, PIECE).map(|()| b.disown(Owned::Mapping(ptr, PIECE)))))
    }),
    (Call::VmRelease, |b| {
        let (_, physical) = unmapped(b)?;
        Ok(Box::new(move || b.driver.vm_release(physical).map(|()| b.disown(Owned::Physical(physical)))))
    }),
    (Call::PoolDefault, |b| Ok(Box::new(|| b.driver.pool_default(b.device).map(drop)))),
    (Call::PoolCreate, |b| Ok(Box::new(|| b.driver.pool_create(b.device).map(|made| b.own(Owned::Pool(made)))))),
    (Call::PoolDestroy, |b| {
        let pool = b.pool()?;
        Ok(Box::new(move || b.driver.pool_destroy(pool).map(|()| b.disown(Owned::Pool(pool)))))
    }),
    (Call::PoolAlloc, |b| {
        let (pool, other) = (b.pool()?, b.stream()?);
        Ok(Box::new(move || b.driver.pool_alloc(pool, 4096, other).map(|ptr| b.own(Owned::Memory(ptr)))))
    }),
    (Call::PoolFree, |b| {
        let (pool, other) = (b.pool()?, b.stream()?);
        let ptr = b.pool_memory(pool, 4096, other)?;
        Ok(Box::new(move || b.driver.pool_free(ptr, other).map(|()| b.disown(Owned::Memory(ptr)))))
    }),
    (Call::PoolGet, |b| {
        let pool = b.pool()?;
        Ok(Box::new(move || b.driver.pool_get(pool, PoolAttribute::UsedCurrent).map(drop)))
    }),
    (Call::PoolSet, |b| {
        let pool = b.pool()?;
        Ok(Box::new(move || b.driver.pool_set(pool, PoolAttribute::ReleaseThreshold, 1)))
    }),
    (Call::PoolTrim, |b| {
        let pool = b.pool()?;
        Ok(Box::new(move || b.driver.pool_trim(pool, 0)))
    }),
    (Call::HostAlloc, |b| {
        Ok(Box::new(|| {
            b.driver.host_alloc(b.device, 4096, HostOptions::default()).map(|ptr| b.own(Owned::Pinned(ptr)))
        }))
    }),
    (Call::HostFree, |b| {
        let ptr = b.pinned(4096)?;
        Ok(Box::new(move || b.driver.host_free(ptr).map(|()| b.disown(Owned::Pinned(ptr)))))
    }),
    (Call::HostRegister, |b| {
        let range = b.pages(1);
        Ok(Box::new(move || {
            let ptr = range.ptr();
            let done = b.driver.host_register(b.device, range, HostOptions::default());
            done.map(|()| b.own(Owned::Registered(ptr)))
        }))
    }),
    (Call::HostUnregister, |b| {
        let ptr = b.register(b.pages(1))?;
        Ok(Box::new(move || b.driver.host_unregister(ptr).map(|()| b.disown(Owned::Registered(ptr)))))
    }),
    (Call::HostDevicePtr, |b| {
        let ptr = b.pinned(4096)?;
        Ok(Box::new(move || b.driver.host_device_ptr(b.device, ptr).map(drop)))
    }),
    (Call::HostWrite, |b| {
        let ptr = b.pinned(4096)?;
        Ok(Box::new(move || b.driver.host_write(ptr, &[1; 16])))
    }),
    (Call::HostRead, |b| {
        let ptr = b.pinned_of(&[1; 4096])?;
        Ok(Box::new(move || b.driver.host_read(ptr, &mut [1; 16])))
    }),
    (Call::Copy, |b| {
        let (other, ptr, pinned) = (b.stream()?, b.memory(64)?, b.pinned_of(&[1; 64])?);
        Ok(Box::new(move || b.driver.copy(ptr.into(), pinned.into(), 64, other)))
    }),
    (Call::Fill, |b| {
        let (other, ptr) = (b.stream()?, b.memory(64)?);
        Ok(Box::new(move || b.driver.fill(ptr, Pattern::U8(1), 64, other)))
    }),
    (Call::Fill, |b| {
        let (legacy, ptr) = (b.default_stream()?, b.memory(64)?);
        Ok(Box::new(move || b.driver.fill(ptr, Pattern::U8(1), 64, legacy)))
    }),
    (Call::Upload, |b| {
        let ptr = b.memory(64)?;
        Ok(Box::new(move || b.driver.upload(b.device, ptr, &[1; 64])))
    }),
    (Call::Download, |b| {
        let ptr = b.memory_of(&[1; 64])?;
        Ok(Box::new(move || b.driver.download(b.device, ptr, &mut [1; 64])))
    }),
    (Call::CaptureBegin, |b| {
        let other = b.stream()?;
        Ok(Box::new(move || {
            b.driver.capture_begin(other, CaptureMode::Relaxed)?;
            b.driver.capture_end(other).map(|graph| b.own(Owned::Graph(graph)))
        }))
    }),
    (Call::GraphInstantiate, |b| {
        let graph = empty(b)?;
        Ok(Box::new(move || {
            b.driver.graph_instantiate(graph, InstantiateOptions::default()).map(|made| b.own(Owned::Exec(made)))
        }))
    }),
    (Call::GraphLaunch, |b| {
        let (exec, other) = (b.instantiate(empty(b)?)?, b.stream()?);
        Ok(Box::new(move || launch_graph(b.driver, exec, other)))
    }),
    (Call::GraphTopology, |b| {
        let graph = empty(b)?;
        Ok(Box::new(move || b.driver.graph_topology(graph).map(drop)))
    }),
    (Call::GraphDot, |b| {
        let graph = empty(b)?;
        Ok(Box::new(move || b.driver.graph_dot(graph).map(drop)))
    }),
    (Call::GraphDestroy, |b| {
        let graph = empty(b)?;
        Ok(Box::new(move || b.driver.graph_destroy(graph).map(|()| b.disown(Owned::Graph(graph)))))
    }),
    (Call::GraphExecDestroy, |b| {
        let exec: GraphExecId = b.instantiate(empty(b)?)?;
        Ok(Box::new(move || b.driver.graph_exec_destroy(exec).map(|()| b.disown(Owned::Exec(exec)))))
    }),
    (Call::ModuleLoad, |b| {
        Ok(Box::new(|| b.driver.module_load(b.device, &PLAIN).map(|made| b.own(Owned::Module(made)))))
    }),
    (Call::FunctionGet, |b| {
        let module = loaded(b)?;
        Ok(Box::new(move || b.driver.function_get(module, "spin").map(drop)))
    }),
    (Call::ModuleUnload, |b| {
        let module = loaded(b)?;
        Ok(Box::new(move || b.driver.module_unload(module).map(|()| b.disown(Owned::Module(module)))))
    }),
    (Call::KernelLaunch, |b| {
        let (spin, other) = (b.kernels()?.spin, b.stream()?);
        Ok(Box::new(move || launch_kernel(b.driver, spin, LaunchShape::ONE, &[KernelArg::U64(0)], other)))
    }),
    (Call::GraphExecSetKernel, |b| {
        let (spin, other) = (b.kernels()?.spin, b.stream()?);
        let graph = b.captured(other, || b.launch_one(spin, &[KernelArg::U64(0)], other))?;
        let (exec, node) = (b.instantiate(graph)?, b.driver.graph_topology(graph)?.nodes[0].id);
        let one = LaunchShape::ONE;
        Ok(Box::new(move || set_kernel(b.driver, exec, node, spin, one, &[KernelArg::U64(1)])))
    }),
    (Call::LibraryCreate, |b| {
        Ok(Box::new(|| b.driver.library_create(Library::Blas, b.device).map(|made| b.own(Owned::Handle(made)))))
    }),
    (Call::LibraryDestroy, |b| {
        let handle = b.handle(Library::Blas)?;
        Ok(Box::new(move || b.driver.library_destroy(handle).map(|()| b.disown(Owned::Handle(handle)))))
    }),
    (Call::LibrarySetStream, |b| {
        let (handle, other) = (b.handle(Library::Blas)?, b.stream()?);
        Ok(Box::new(move || b.driver.library_set_stream(handle, other)))
    }),
    (Call::LibraryRaw, |b| {
        let handle = b.handle(Library::Blas)?;
        Ok(Box::new(move || b.driver.library_raw(handle).map(drop)))
    }),
    (Call::BlasSetWorkspace, |b| {
        let (handle, workspace) = (b.handle(Library::Blas)?, b.memory(4096)?);
        Ok(Box::new(move || b.driver.blas_set_workspace(handle, workspace, 4096)))
    }),
    (Call::BlasSetMath, |b| {
        let handle = b.handle(Library::Blas)?;
        Ok(Box::new(move || b.driver.blas_set_math(handle, BlasMath::Tf32)))
    }),
    (Call::BlasSetAtomics, |b| {
        let handle = b.handle(Library::Blas)?;
        Ok(Box::new(move || b.driver.blas_set_atomics(handle, true)))
    }),
    (Call::BlasSgemm, |b| {
        let (handle, other, memory) = (b.handle(Library::Blas)?, b.stream()?, b.words_of(&[0; 12])?);
        let at = |n: u64| BlasMatrix { ptr: memory.offset(16 * n), stride: 2, transposed: false };
        let product = Sgemm { m: 2, n: 2, k: 2, alpha: 1.0, a: at(0), b: at(1), beta: 0.0, c: at(2) };
        b.driver.library_set_stream(handle, other)?;
        // Once before, so that the library has loaded what it needs.
        b.driver.blas_sgemm(handle, &product)?;
        Ok(Box::new(move || b.driver.blas_sgemm(handle, &product)))
    }),
];

/// The size of the pieces of virtual memory in the table: what every device known so far has as its granularity.
const PIECE: u64 = 2 << 20;

fn recorded(bench: &Bench<'_>) -> Checked<warpool_driver::EventId> {
    let (other, event) = (bench.stream()?, bench.event()?);
    bench.record(event, other)?;
    Ok(event)
}

fn unmapped(bench: &Bench<'_>) -> Checked<(warpool_driver::DevicePtr, warpool_driver::PhysicalId)> {
    let ptr = bench.driver.vm_reserve(PIECE, 0, None)?;
    bench.own(Owned::Range(ptr, PIECE));
    let physical = bench.driver.vm_create(bench.device, PIECE, PhysicalOptions::default())?;
    bench.own(Owned::Physical(physical));
    Ok((ptr, physical))
}

fn mapped(bench: &Bench<'_>) -> Checked<warpool_driver::DevicePtr> {
    let (ptr, physical) = unmapped(bench)?;
    bench.driver.vm_map(ptr, physical)?;
    bench.own(Owned::Mapping(ptr, PIECE));
    Ok(ptr)
}

fn empty(bench: &Bench<'_>) -> Checked<warpool_driver::GraphId> {
    let other = bench.stream()?;
    bench.captured(other, || Ok(()))
}

fn loaded(bench: &Bench<'_>) -> Checked<warpool_driver::ModuleId> {
    let module = bench.driver.module_load(bench.device, &PLAIN)?;
    bench.own(Owned::Module(module));
    Ok(module)
}

fn a_forbidden_call_breaks_every_capture_that_forbids_it(bench: &Bench<'_>) -> Checked {
    let (global, relaxed) = (bench.stream()?, bench.stream()?);
    bench.driver.capture_begin(global, CaptureMode::Global)?;
    bench.driver.capture_begin(relaxed, CaptureMode::Relaxed)?;
    expect_code(bench.driver.mem_alloc(bench.device, 4096), StreamCaptureUnsupported)?;
    bench.expect_state(global, Capturing::Broken)?;
    bench.expect_state(relaxed, Capturing::Yes)?;
    bench.end(relaxed)?;
    expect_code(bench.driver.capture_end(global), StreamCaptureInvalidated)
}

fn a_laxer_thread_is_allowed_more(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let driver = bench.driver;
    bench.driver.capture_begin(stream, CaptureMode::Global)?;
    // On another thread, a mode laxer than global is enough.
    bench.elsewhere(|| {
        for mode in [CaptureMode::Relaxed, CaptureMode::ThreadLocal] {
            driver.capture_mode_exchange(mode)?;
            bench.memory(4096)?;
            bench.expect_state(stream, Capturing::Yes)?;
        }
        Ok::<_, Stop>(())
    })?;
    // On the thread that captures, only relaxed is.
    driver.capture_mode_exchange(CaptureMode::Relaxed)?;
    bench.memory(4096)?;
    bench.expect_state(stream, Capturing::Yes)?;
    driver.capture_mode_exchange(CaptureMode::Global)?;
    bench.end(stream)?;
    bench.driver.capture_begin(stream, CaptureMode::Global)?;
    let strict = bench.elsewhere(|| driver.mem_alloc(bench.device, 4096));
    expect_code(strict, StreamCaptureUnsupported)?;
    expect_code(driver.capture_end(stream), StreamCaptureInvalidated)
}

fn a_thread_gives_its_mode_back(bench: &Bench<'_>) -> Checked {
    bench.elsewhere(|| {
        let exchange = |mode| bench.driver.capture_mode_exchange(mode);
        expect_eq("the mode before relaxed", exchange(CaptureMode::Relaxed)?, CaptureMode::Global)?;
        expect_eq("the mode before thread-local", exchange(CaptureMode::ThreadLocal)?, CaptureMode::Relaxed)?;
        expect_eq("the mode before global", exchange(CaptureMode::Global)?, CaptureMode::ThreadLocal)
    })
}

fn every_thread_starts_strict(bench: &Bench<'_>) -> Checked {
    let driver = bench.driver;
    let before = driver.capture_mode_exchange(CaptureMode::Relaxed)?;
    let beside = bench.elsewhere(|| driver.capture_mode_exchange(CaptureMode::Global));
    let ours = driver.capture_mode_exchange(before)?;
    expect_eq("this thread's mode at first", before, CaptureMode::Global)?;
    expect_eq("this thread's mode", ours, CaptureMode::Relaxed)?;
    expect(beside? == CaptureMode::Global, "a fresh thread to be strict")
}
