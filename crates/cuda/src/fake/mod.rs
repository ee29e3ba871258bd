//! A CUDA driver for tests: it does no work, but knows which of its objects are alive, and says [`DEAD`] to those who
//! use one that is not. Nothing is freed, so that asking is safe.
//!
//! Captures note kernels, callbacks and products as nodes. Those that are not relaxed are broken by calls that CUDA
//! would forbid on the thread that captures, as if all were thread-local: other tests run beside.

mod library;
mod tests;

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{ptr, thread};

use cudarc::driver::sys::*;
use warpool_driver::{
    DeviceId, ErrorCode, FunctionId, GraphExecId, Graphs, KernelArg, Kernels, LaunchShape, Library, NodeId, Result,
    StreamId,
};

use crate::api::Api;
use crate::kernel::Function;
use crate::table::lock;
use crate::{CudaDriver, OLDEST};

pub(crate) use library::{Given, given_here, stream_of};

/// What the driver says to the user of an object that is gone. CUDA would say nothing and follow the pointer.
pub(crate) const DEAD: ErrorCode = ErrorCode::Unknown(9999);

/// Anything that has a handle, which is its address.
struct Object {
    live: AtomicBool,
    serial: u64,
    /// Of a stream: the graph that it captures into.
    capture: Mutex<Option<&'static Self>>,
    /// Of a graph: the bodies of its conditional nodes.
    bodies: Mutex<Vec<&'static Self>>,
    is_body: bool,
    /// Of a graph: its nodes.
    nodes: Mutex<Vec<&'static Self>>,
    /// Of a node: what it does.
    kind: u32,
    /// Of a graph: whether its capture is broken.
    broken: AtomicBool,
    /// Of a library's handle: the stream that it points at, but for default streams.
    stream: Mutex<Option<&'static Self>>,
}

fn make(is_body: bool) -> &'static Object {
    make_node(is_body, 0)
}

fn make_node(is_body: bool, kind: u32) -> &'static Object {
    static NEXT: AtomicU64 = AtomicU64::new(100);
    let serial = NEXT.fetch_add(1, Ordering::Relaxed);
    Box::leak(Box::new(Object {
        live: AtomicBool::new(true),
        serial,
        capture: Mutex::default(),
        bodies: Mutex::default(),
        is_body,
        nodes: Mutex::default(),
        kind,
        broken: AtomicBool::new(false),
        stream: Mutex::default(),
    }))
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
    let nodes = lock(&graph.nodes).iter().map(|node| kill(node)).fold(kill(graph), u32::max);
    lock(&graph.bodies).iter().map(|body| kill_graph(body)).fold(nodes, u32::max)
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
    /// How often this thread asked for the nodes of a graph.
    pub(crate) static LISTED: Cell<u32> = const { Cell::new(0) };
    static MODE: Cell<u32> = const { Cell::new(0) };
    /// The captures of this thread that forbid something.
    static STRICT: RefCell<Vec<&'static Object>> = const { RefCell::new(Vec::new()) };
}

/// What a call that captures forbid says first. A forbidden one breaks them.
fn guarded() -> u32 {
    let refused = MODE.get() != CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32
        && STRICT.with_borrow(|captures| {
            captures.iter().for_each(|graph| graph.broken.store(true, Ordering::SeqCst));
            !captures.is_empty()
        });
    if refused { ErrorCode::StreamCaptureUnsupported.number() } else { 0 }
}

/// Breaks this thread's captures as somebody would who does not go through the backend.
pub(crate) fn break_captures() {
    guarded();
}

/// Work for a stream: noted if it captures.
fn work(stream: &'static Object, kind: u32) -> u32 {
    match *lock(&stream.capture) {
        Some(graph) if graph.broken.load(Ordering::SeqCst) => ErrorCode::StreamCaptureInvalidated.number(),
        Some(graph) => {
            lock(&graph.nodes).push(make_node(false, kind));
            alive(&[stream, graph])
        }
        None => used(&[stream]),
    }
}

extern "C" fn get_count(count: *mut c_int) -> u32 {
    give(count, 2);
    0
}
extern "C" fn get_device(device: *mut CUdevice, ordinal: c_int) -> u32 {
    give(device, ordinal);
    0
}
extern "C" fn retain(context: *mut CUcontext, device: CUdevice) -> u32 {
    give(context, ptr::without_provenance_mut(0xC0 + device as usize));
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
    if lock(&object(stream).capture).is_some() {
        // `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`; a real one breaks the capture, too.
        return 900;
    }
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
extern "C" fn exchange_mode(mode: *mut CUstreamCaptureMode) -> u32 {
    // SAFETY: the backend passes the address of a number of its own.
    let number = unsafe { mode.cast::<u32>().read() };
    give(mode.cast(), MODE.replace(number));
    0
}
extern "C" fn mem_alloc(_: *mut CUdeviceptr, _: usize) -> u32 {
    guarded()
}
extern "C" fn host_func(stream: CUstream, _: CUhostFn, _: *mut c_void) -> u32 {
    work(object(stream), CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST as u32)
}
extern "C" fn launch_kernel(
    _: CUfunction,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    stream: CUstream,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> u32 {
    work(object(stream), CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32)
}
extern "C" fn capture_begin(stream: CUstream, mode: CUstreamCaptureMode) -> u32 {
    let graph = make(false);
    let code = begin(object(stream), graph);
    if code == 0 && mode != CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED {
        STRICT.with_borrow_mut(|captures| captures.push(graph));
    }
    code
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
    STRICT.with_borrow_mut(|captures| captures.retain(|&capture| !ptr::eq(capture, ended)));
    if ended.broken.load(Ordering::SeqCst) {
        give(graph, ptr::null_mut());
        return ErrorCode::StreamCaptureInvalidated.number();
    }
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
    give(
        status,
        match now.broken.load(Ordering::SeqCst) {
            true => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
            false => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
        },
    );
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
extern "C" fn get_nodes(graph: CUgraph, place: *mut CUgraphNode, count: *mut usize) -> u32 {
    LISTED.with(|listed| listed.set(listed.get() + 1));
    let nodes = lock(&object(graph).nodes);
    for (index, &node) in nodes.iter().enumerate().take_while(|_| !place.is_null()) {
        give(place.wrapping_add(index), handle(node));
    }
    give(count, nodes.len());
    used(&[object(graph)])
}
extern "C" fn node_type(node: CUgraphNode, kind: *mut CUgraphNodeType) -> u32 {
    give(kind.cast(), object(node).kind);
    alive(&[object(node)])
}
extern "C" fn set_params(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS) -> u32 {
    // SAFETY: the backend passes a structure of its own.
    let params = unsafe { &*params };
    assert!(params.kernelParams.is_null() != params.extra.is_null());
    used(&[object(exec), object(node)])
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
        device_get: get_device,
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
        launch_host_func: host_func,
        launch_kernel,
        mem_alloc,
        thread_exchange_stream_capture_mode: exchange_mode,
        stream_begin_capture: capture_begin,
        stream_begin_capture_to_graph: Some(capture_to),
        stream_end_capture: capture_end,
        stream_get_capture_info: capture_info,
        graph_add_node: Some(add_node),
        graph_get_nodes: get_nodes,
        graph_node_get_type: node_type,
        graph_exec_kernel_node_set_params: set_params,
        graph_instantiate_with_flags: instantiate,
        graph_destroy,
        graph_launch,
        graph_exec_destroy: exec_destroy,
        ..Api::stubs()
    }
}

/// The backend over this driver, or over one with some functions more.
pub(crate) fn driver_with(api: Api) -> CudaDriver {
    let driver = CudaDriver::start(api, OLDEST).expect("it always starts");
    Library::ALL.into_iter().for_each(|which| driver.vendors.pretend(which, library::vendor(which)));
    driver
}

/// The backend over this driver.
pub(crate) fn driver() -> CudaDriver {
    driver_with(api())
}

/// Launches a kernel.
pub(crate) fn launch(
    driver: &CudaDriver,
    function: FunctionId,
    shape: LaunchShape,
    args: &[KernelArg],
    stream: StreamId,
) -> Result<()> {
    // SAFETY: this driver runs no kernels.
    unsafe { driver.kernel_launch(function, shape, args, stream) }
}

/// Gives a kernel of an executable new arguments.
pub(crate) fn set_kernel(
    driver: &CudaDriver,
    exec: GraphExecId,
    node: NodeId,
    function: FunctionId,
    shape: LaunchShape,
    args: &[KernelArg],
) -> Result<()> {
    // SAFETY: this driver runs no kernels.
    unsafe { driver.graph_exec_set_kernel(exec, node, function, shape, args) }
}

/// Launches an executable.
pub(crate) fn launch_graph(driver: &CudaDriver, exec: GraphExecId, stream: StreamId) -> Result<()> {
    // SAFETY: this driver runs no graphs.
    unsafe { driver.graph_launch(exec, stream) }
}

/// A kernel that takes such arguments.
pub(crate) fn kernel(driver: &CudaDriver, sizes: &[usize]) -> FunctionId {
    FunctionId(driver.functions.insert(Function::pretend(Some(sizes))))
}

/// The devices.
pub(crate) const DEVICE: DeviceId = DeviceId(0);
pub(crate) const OTHER_DEVICE: DeviceId = DeviceId(1);
