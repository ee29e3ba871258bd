//! A CUDA driver for tests: it does no work, but knows which of its objects are alive, and says [`DEAD`] to those who
//! use one that is not. Nothing is freed, so that asking is safe.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_ulonglong};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{ptr, thread};

use cudarc::driver::sys::*;
use warpool_driver::{
    Call, CaptureMode, CaptureState, Captures, ConditionalId, ConditionalKind, DeviceId, DriverError, ErrorCode,
    EventId, EventOptions, EventScope, Events, GraphExecId, GraphId, Graphs, InstantiateOptions, Result, StreamId,
    StreamOptions, Streams,
};

use crate::api::Api;
use crate::error::Site;
use crate::table::lock;
use crate::{CudaDriver, OLDEST};

/// What the driver says to the user of an object that is gone. CUDA would say nothing and follow the pointer.
const DEAD: ErrorCode = ErrorCode::UnknownError;

/// Anything that has a handle, which is its address.
struct Object {
    live: AtomicBool,
    serial: u64,
    /// Of a stream: the graph that it captures into.
    capture: Mutex<Option<&'static Self>>,
    /// Of a graph: the bodies of its conditional nodes.
    bodies: Mutex<Vec<&'static Self>>,
    is_body: bool,
}

fn make(is_body: bool) -> &'static Object {
    static NEXT: AtomicU64 = AtomicU64::new(100);
    let serial = NEXT.fetch_add(1, Ordering::Relaxed);
    let (capture, bodies) = (Mutex::new(None), Mutex::new(Vec::new()));
    Box::leak(Box::new(Object { live: AtomicBool::new(true), serial, capture, bodies, is_body }))
}

fn handle<T>(object: &'static Object) -> *mut T {
    ptr::from_ref(object).cast_mut().cast()
}

/// The object behind a handle that `make` gave.
fn object<T>(handle: *mut T) -> &'static Object {
    // SAFETY: every handle that the tests use came from `make`, whose objects are never freed.
    unsafe { &*handle.cast::<Object>() }
}

fn alive(objects: &[&Object]) -> u32 {
    let all = objects.iter().all(|object| object.live.load(Ordering::SeqCst));
    if all { 0 } else { DEAD.number() }
}

/// Uses objects for a while: they must be alive all along.
fn used(objects: &[&Object]) -> u32 {
    let before = alive(objects);
    thread::yield_now();
    before.max(alive(objects))
}

fn kill(object: &Object) -> u32 {
    if object.live.swap(false, Ordering::SeqCst) { 0 } else { DEAD.number() }
}

fn kill_graph(graph: &Object) -> u32 {
    lock(&graph.bodies).iter().map(|body| kill_graph(body)).fold(kill(graph), u32::max)
}

/// Writes what a function gives back.
fn give<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the backend passes the address of a variable of its own, or null where it wants nothing.
        unsafe { place.write(value) };
    }
}

thread_local! {
    static CURRENT: Cell<CUcontext> = const { Cell::new(ptr::null_mut()) };
}

extern "C" fn get_count(count: *mut c_int) -> u32 {
    give(count, 1);
    0
}
extern "C" fn retain(context: *mut CUcontext, _: CUdevice) -> u32 {
    give(context, ptr::without_provenance_mut(0xC0));
    0
}
extern "C" fn get_current(context: *mut CUcontext) -> u32 {
    give(context, CURRENT.get());
    0
}
extern "C" fn set_current(context: CUcontext) -> u32 {
    CURRENT.set(context);
    0
}
extern "C" fn stream_create(stream: *mut CUstream, _: c_uint, _: c_int) -> u32 {
    give(stream, handle(make(false)));
    0
}
extern "C" fn stream_destroy(stream: CUstream) -> u32 {
    match lock(&object(stream).capture).take().filter(|graph| !graph.is_body) {
        Some(graph) => kill_graph(graph).max(kill(object(stream))),
        None => kill(object(stream)),
    }
}
extern "C" fn stream_get_id(stream: CUstream, id: *mut c_ulonglong) -> u32 {
    give(id, object(stream).serial);
    alive(&[object(stream)])
}
extern "C" fn stream_use(stream: CUstream) -> u32 {
    used(&[object(stream)])
}
extern "C" fn stream_wait(stream: CUstream, event: CUevent, _: c_uint) -> u32 {
    used(&[object(stream), object(event)])
}
extern "C" fn event_create(event: *mut CUevent, _: c_uint) -> u32 {
    give(event, handle(make(false)));
    0
}
extern "C" fn event_destroy(event: CUevent) -> u32 {
    kill(object(event))
}
extern "C" fn event_record(event: CUevent, stream: CUstream, _: c_uint) -> u32 {
    used(&[object(event), object(stream)])
}
extern "C" fn event_use(event: CUevent) -> u32 {
    used(&[object(event)])
}
extern "C" fn capture_begin(stream: CUstream, _: CUstreamCaptureMode) -> u32 {
    begin(object(stream), make(false))
}
extern "C" fn capture_to(
    stream: CUstream,
    graph: CUgraph,
    _: *const CUgraphNode,
    _: *const CUgraphEdgeData,
    _: usize,
    _: CUstreamCaptureMode,
) -> u32 {
    begin(object(stream), object(graph))
}
fn begin(stream: &'static Object, graph: &'static Object) -> u32 {
    let mut capture = lock(&stream.capture);
    if capture.is_some() {
        return ErrorCode::IllegalState.number();
    }
    *capture = Some(graph);
    alive(&[stream, graph])
}
extern "C" fn capture_end(stream: CUstream, graph: *mut CUgraph) -> u32 {
    let Some(ended) = lock(&object(stream).capture).take() else { return ErrorCode::IllegalState.number() };
    give(graph, handle(ended));
    alive(&[object(stream), ended])
}
extern "C" fn capture_info(
    stream: CUstream,
    status: *mut CUstreamCaptureStatus,
    id: *mut cuuint64_t,
    graph: *mut CUgraph,
    _: *mut *const CUgraphNode,
    _: *mut usize,
) -> u32 {
    let Some(now) = *lock(&object(stream).capture) else { return alive(&[object(stream)]) };
    give(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    give(id, now.serial);
    give(graph, handle(now));
    alive(&[object(stream), now])
}
extern "C" fn add_node(
    node: *mut CUgraphNode,
    graph: CUgraph,
    _: *const CUgraphNode,
    _: usize,
    parameters: *mut CUgraphNodeParams,
) -> u32 {
    let body = make(true);
    lock(&object(graph).bodies).push(body);
    give(node, handle(make(false)));
    let bodies: &mut CUgraph = Box::leak(Box::new(handle(body)));
    // SAFETY: the backend passes a structure of its own, which nobody else uses now.
    let parameters = unsafe { &mut *parameters };
    parameters.__bindgen_anon_1.conditional.phGraph_out = bodies;
    alive(&[object(graph)])
}
extern "C" fn get_nodes(graph: CUgraph, _: *mut CUgraphNode, count: *mut usize) -> u32 {
    give(count, 0);
    used(&[object(graph)])
}
extern "C" fn instantiate(exec: *mut CUgraphExec, graph: CUgraph, _: c_ulonglong) -> u32 {
    give(exec, handle(make(false)));
    used(&[object(graph)])
}
extern "C" fn graph_destroy(graph: CUgraph) -> u32 {
    kill_graph(object(graph))
}
extern "C" fn graph_launch(exec: CUgraphExec, stream: CUstream) -> u32 {
    used(&[object(exec), object(stream)])
}
extern "C" fn exec_destroy(exec: CUgraphExec) -> u32 {
    kill(object(exec))
}

/// The driver's functions.
pub(crate) fn api() -> Api {
    Api {
        device_get_count: get_count,
        primary_ctx_retain: retain,
        ctx_get_current: get_current,
        ctx_set_current: set_current,
        stream_create_with_priority: stream_create,
        stream_destroy,
        stream_get_id,
        stream_query: stream_use,
        stream_synchronize: stream_use,
        stream_wait_event: stream_wait,
        event_create,
        event_destroy,
        event_record_with_flags: event_record,
        event_query: event_use,
        event_synchronize: event_use,
        stream_begin_capture: capture_begin,
        stream_begin_capture_to_graph: Some(capture_to),
        stream_end_capture: capture_end,
        stream_get_capture_info: capture_info,
        graph_add_node: Some(add_node),
        graph_get_nodes: get_nodes,
        graph_instantiate_with_flags: instantiate,
        graph_destroy,
        graph_launch,
        graph_exec_destroy: exec_destroy,
        ..Api::stubs()
    }
}

/// The backend over this driver, or over one with some functions more.
pub(crate) fn driver_with(api: Api) -> CudaDriver {
    CudaDriver::start(api, OLDEST).expect("it always starts")
}

fn driver() -> CudaDriver {
    driver_with(api())
}

pub(crate) const DEVICE: DeviceId = DeviceId(0);

fn code<T>(result: Result<T>) -> Option<ErrorCode> {
    result.err().map(|error| error.code)
}

/// A stream that captures a conditional node, and the stream that captures the node's body.
fn capture_with_body(driver: &CudaDriver) -> Result<(StreamId, StreamId)> {
    let stream = driver.stream_create(DEVICE, StreamOptions::default())?;
    driver.capture_begin(stream, CaptureMode::Relaxed)?;
    Ok((stream, add_body(driver, stream)?))
}

fn add_body(driver: &CudaDriver, stream: StreamId) -> Result<StreamId> {
    let body = driver.stream_create(DEVICE, StreamOptions::default())?;
    let flag = driver.conditional_create(stream, 1)?;
    driver.conditional_begin(stream, flag, ConditionalKind::If, body, CaptureMode::Relaxed)?;
    Ok(body)
}

#[test]
fn the_thread_keeps_its_context() -> Result<()> {
    let driver = driver();
    driver.stream_create(DEVICE, StreamOptions::default())?;
    assert!(CURRENT.get().is_null());
    Ok(())
}

#[test]
fn an_event_in_a_graph_outlives_its_id() -> Result<()> {
    let driver = driver();
    let stream = driver.stream_create(DEVICE, StreamOptions::default())?;
    for (scope, outlives) in [(EventScope::Plain, false), (EventScope::External, true)] {
        let event = driver.event_create(DEVICE, EventOptions::default())?;
        let raw = object(driver.event(Site::of(Call::EventQuery), event)?.raw.raw());
        driver.event_record(event, stream, scope)?;
        driver.event_destroy(event)?;
        assert_eq!(code(driver.event_query(event)), Some(ErrorCode::InvalidHandle));
        assert_eq!(raw.live.load(Ordering::SeqCst), outlives, "{scope:?}");
    }
    Ok(())
}

#[test]
fn a_body_under_way_ends_with_the_capture_around_it() -> Result<()> {
    let driver = driver();
    let (stream, body) = capture_with_body(&driver)?;
    driver.capture_end(stream)?;
    assert_eq!(driver.capture_state(body), Ok(CaptureState::None));

    let (stream, body) = capture_with_body(&driver)?;
    let inner = add_body(&driver, body)?;
    driver.stream_destroy(stream)?;
    assert_eq!(
        (driver.capture_state(body), driver.capture_state(inner)),
        (Ok(CaptureState::None), Ok(CaptureState::None))
    );
    Ok(())
}

#[test]
fn a_body_within_a_forgotten_body_goes_with_the_outermost_graph() -> Result<()> {
    let driver = driver();
    let (stream, body) = capture_with_body(&driver)?;
    let inner = add_body(&driver, body)?;
    let (inner, outer) = (driver.capture_end(inner)?, driver.capture_end(body)?);
    let graph = driver.capture_end(stream)?;
    driver.graph_destroy(outer)?;
    assert_eq!(code(driver.graph_topology(inner)), None);
    driver.graph_destroy(graph)?;
    assert_eq!(code(driver.graph_topology(inner)), Some(ErrorCode::InvalidHandle));
    driver.graph_destroy(inner)
}

/// Six threads make, use and take away the same few objects. Calls may be refused, but none may reach a dead object, and
/// none may wait for ever.
#[test]
fn no_call_hands_cuda_what_another_thread_destroyed() {
    let (rounds, threads) = if cfg!(miri) { (100, 3) } else { (5_000, 6) };
    let driver = driver();
    let ids = || -> [AtomicU64; 4] { Default::default() };
    let (streams, events, graphs, execs, flags) = (ids(), ids(), ids(), ids(), ids());
    let work = |seed: u64| -> std::result::Result<(), (u64, DriverError)> {
        let mut luck = seed;
        let mut draw = |n: u64| {
            luck = luck.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (luck >> 33) % n
        };
        for _ in 0..rounds {
            let [a, b] = [draw(4) as usize, draw(4) as usize];
            let now = |ids: &[AtomicU64; 4], at: usize| ids[at].load(Ordering::Relaxed);
            let put = |ids: &[AtomicU64; 4], id: u64| ids[a].swap(id, Ordering::Relaxed);
            let (stream, event) = (StreamId(now(&streams, a)), EventId(now(&events, b)));
            let (graph, exec) = (GraphId(now(&graphs, a)), GraphExecId(now(&execs, b)));
            let done = match draw(16) {
                0 => driver
                    .stream_create(DEVICE, StreamOptions::default())
                    .and_then(|new| driver.stream_destroy(StreamId(put(&streams, new.0)))),
                1 => driver
                    .event_create(DEVICE, EventOptions::default())
                    .and_then(|new| driver.event_destroy(EventId(put(&events, new.0)))),
                2 => driver.event_destroy(event),
                3 | 4 => driver.event_record(event, stream, EventScope::Plain),
                5 => driver.stream_wait_event(stream, event, EventScope::Plain),
                6 => driver.event_query(event).map(drop),
                7 => driver.stream_synchronize(stream),
                8 => driver.capture_begin(stream, CaptureMode::Relaxed),
                9 | 10 => driver.capture_end(stream).and_then(|new| driver.graph_destroy(GraphId(put(&graphs, new.0)))),
                11 => driver
                    .graph_instantiate(graph, InstantiateOptions::default())
                    .and_then(|new| driver.graph_exec_destroy(GraphExecId(put(&execs, new.0)))),
                12 => driver.graph_launch(exec, stream),
                13 => driver.graph_topology(graph).map(drop),
                14 => driver.conditional_create(stream, 1).map(|new| _ = put(&flags, new.0)),
                _ => {
                    let (flag, body) = (ConditionalId(now(&flags, a)), StreamId(now(&streams, b)));
                    driver.conditional_begin(stream, flag, ConditionalKind::While, body, CaptureMode::Relaxed)
                }
            };
            match done {
                Err(error) if error.code == DEAD => return Err((seed, error)),
                _ => {}
            }
        }
        Ok(())
    };
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = (1..=threads).map(|seed| scope.spawn(move || work(seed))).collect();
        for thread in threads {
            assert_eq!(thread.join().expect("it does not panic"), Ok(()));
        }
    });
}
