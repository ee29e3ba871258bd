//! A CUDA driver for unit tests. It does no work, but tracks which of its objects exist, and returns [`DESTROYED`] for
//! a call that uses a destroyed one, and [`RACED`] for one that uses a graph at the same time as another call. Nothing
//! is freed, so that the check is safe.
//!
//! Captures record kernels, callbacks and products as nodes. Those that are not relaxed are invalidated by calls that
//! CUDA would forbid on the capturing thread, as if all were thread-local: other tests run in parallel.

mod libraries;
mod tests;

use std::alloc::{Layout, alloc_zeroed};
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::{ptr, thread};

use cudarc::driver::sys::*;
use warpool_driver::{
    Call, DeviceId, DevicePtr, ErrorCode, FunctionId, GraphExecId, Graphs, KernelArg, Kernels, LaunchShape, Library,
    ModuleId, NodeId, Result, StreamId,
};

use crate::api::Api;
use crate::kernel::{Function, Module};
use crate::sync::lock;
use crate::{CudaDriver, OLDEST};

pub(crate) use libraries::{LibraryCall, library_calls, stream_of};

/// Returned for a call that uses a destroyed object. CUDA would dereference the handle.
pub(crate) const DESTROYED: ErrorCode = ErrorCode::Unknown(9999);

/// Returned for a call that uses a graph while another does. CUDA would corrupt it.
pub(crate) const RACED: ErrorCode = ErrorCode::Unknown(9998);

/// Anything that has a handle, which is its address.
struct Object {
    exists: AtomicBool,
    serial: u64,
    /// For a stream: the graph that it captures into.
    capture: Mutex<Option<&'static Self>>,
    /// For a stream: how many calls are asking for its capture.
    asked: AtomicUsize,
    /// For a graph: the bodies of its conditional nodes.
    bodies: Mutex<Vec<&'static Self>>,
    is_body: bool,
    /// For a graph: its nodes.
    nodes: Mutex<Vec<&'static Self>>,
    /// For a node: its type.
    kind: u32,
    /// For a graph: whether its capture is invalid.
    invalid: AtomicBool,
    /// For a graph: whether a call uses it.
    in_use: AtomicBool,
    /// For a library's handle: its stream, except default streams.
    stream: Mutex<Option<&'static Self>>,
}

fn make(is_body: bool) -> &'static Object {
    make_node(is_body, 0)
}

fn make_node(is_body: bool, kind: u32) -> &'static Object {
    static NEXT: AtomicU64 = AtomicU64::new(100);
    /// Never freed, so that a stale handle is found. Kept here, so that they do not count as leaks.
    static ALL: Mutex<Vec<&'static Object>> = Mutex::new(Vec::new());
    let serial = NEXT.fetch_add(1, Ordering::Relaxed);
    let object: &Object = Box::leak(Box::new(Object {
        exists: AtomicBool::new(true),
        serial,
        capture: Mutex::default(),
        asked: AtomicUsize::new(0),
        bodies: Mutex::default(),
        is_body,
        nodes: Mutex::default(),
        kind,
        invalid: AtomicBool::new(false),
        in_use: AtomicBool::new(false),
        stream: Mutex::default(),
    }));
    ALL.lock().unwrap().push(object);
    object
}

/// Memory that is never freed, as the backend may still have its address. Kept here, so that it does not count as
/// leaked.
fn keep(address: usize) {
    static ALL: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    lock(&ALL).push(address);
}

fn handle<T>(object: &'static Object) -> *mut T {
    ptr::from_ref(object).cast_mut().cast()
}

/// The object of a handle: one that `make` returned, or that of a default stream.
fn object<T>(handle: *mut T) -> &'static Object {
    thread_local! {
        static DEFAULT_STREAMS: [&'static Object; 3] = [(); 3].map(|()| make(false));
    }
    match handle.addr() {
        default @ 0..=2 => DEFAULT_STREAMS.with(|streams| streams[default]),
        // SAFETY: every other handle that the tests use came from `make`, whose objects are never freed.
        _ => unsafe { &*handle.cast::<Object>() },
    }
}

fn exist(objects: &[&Object]) -> u32 {
    let all = objects.iter().all(|object| object.exists.load(Ordering::SeqCst));
    if all { 0 } else { DESTROYED.number() }
}

/// Uses objects for a while: they must exist the whole time.
fn used(objects: &[&Object]) -> u32 {
    let before = exist(objects);
    thread::yield_now();
    before.max(exist(objects))
}

/// Uses a graph for a while, as calls do that CUDA does not synchronize.
fn used_alone(graph: &Object) -> u32 {
    if graph.in_use.swap(true, Ordering::SeqCst) {
        return RACED.number();
    }
    let used = used(&[graph]);
    graph.in_use.store(false, Ordering::SeqCst);
    used
}

fn destroy(object: &Object) -> u32 {
    if object.exists.swap(false, Ordering::SeqCst) { 0 } else { DESTROYED.number() }
}

fn destroy_graph(graph: &Object) -> u32 {
    let nodes = lock(&graph.nodes).iter().map(|node| destroy(node)).fold(destroy(graph), u32::max);
    lock(&graph.bodies).iter().map(|body| destroy_graph(body)).fold(nodes, u32::max)
}

/// Writes an output of a function.
fn give<T>(output: *mut T, value: T) {
    if !output.is_null() {
        // SAFETY: the backend passes the address of a variable of its own, or null where it needs nothing.
        unsafe { output.write(value) };
    }
}

thread_local! {
    static CURRENT: Cell<CUcontext> = const { Cell::new(ptr::null_mut()) };
    /// How often this thread queried the nodes of a graph.
    pub(crate) static NODE_QUERIES: Cell<u32> = const { Cell::new(0) };
    static MODE: Cell<u32> = const { Cell::new(0) };
    /// The captures of this thread that forbid calls.
    static STRICT: RefCell<Vec<&'static Object>> = const { RefCell::new(Vec::new()) };
    /// The next device address of this thread: allocations of one thread are adjacent.
    static NEXT_ADDRESS: Cell<u64> = {
        static THREADS: AtomicU64 = AtomicU64::new(1);
        Cell::new(THREADS.fetch_add(1, Ordering::Relaxed) << 40)
    };
    /// Memory that other libraries allocated: start, length, type.
    static FOREIGN: RefCell<Vec<(u64, u64, u64)>> = const { RefCell::new(Vec::new()) };
}

/// The first check of a call that captures forbid. A forbidden call invalidates them.
fn guarded() -> u32 {
    let refused = MODE.get() != CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32
        && STRICT.with_borrow(|captures| {
            captures.iter().for_each(|graph| graph.invalid.store(true, Ordering::SeqCst));
            !captures.is_empty()
        });
    if refused { ErrorCode::StreamCaptureUnsupported.number() } else { 0 }
}

/// Invalidates this thread's captures, as a call would that does not go through the backend.
pub(crate) fn invalidate_captures() {
    guarded();
}

/// Memory of another library.
pub(crate) fn foreign_memory(bytes: u64, memory_type: u64) -> DevicePtr {
    let start = next_address(bytes);
    FOREIGN.with_borrow_mut(|foreign| foreign.push((start, bytes, memory_type)));
    DevicePtr(start)
}

fn next_address(bytes: u64) -> u64 {
    let start = NEXT_ADDRESS.get();
    NEXT_ADDRESS.set(start + bytes.next_multiple_of(256));
    start
}

/// Work for a stream: a node if it captures.
fn work(stream: &'static Object, kind: u32) -> u32 {
    match *lock(&stream.capture) {
        Some(graph) if graph.invalid.load(Ordering::SeqCst) => ErrorCode::StreamCaptureInvalidated.number(),
        Some(graph) => {
            lock(&graph.nodes).push(make_node(false, kind));
            used_alone(graph).max(exist(&[stream]))
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
        Some(graph) => destroy_graph(graph).max(destroy(object(stream))),
        None => destroy(object(stream)),
    }
}
extern "C" fn stream_get_id(stream: CUstream, id: *mut c_ulonglong) -> u32 {
    if lock(&object(stream).capture).is_some() {
        // CUDA invalidates the capture, too.
        return ErrorCode::StreamCaptureUnsupported.number();
    }
    give(id, object(stream).serial);
    exist(&[object(stream)])
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
    destroy(object(event))
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
extern "C" fn mem_alloc(address: *mut CUdeviceptr, bytes: usize) -> u32 {
    let refused = guarded();
    if refused == 0 {
        give(address, next_address(bytes as u64));
    }
    refused
}
extern "C" fn mem_host_alloc(address: *mut *mut c_void, bytes: usize, _: c_uint) -> u32 {
    let layout = Layout::from_size_align(bytes.max(1), 4096).expect("a small size");
    // SAFETY: the size is not 0.
    let memory = unsafe { alloc_zeroed(layout) };
    keep(memory.expose_provenance());
    give(address, memory.cast());
    guarded()
}
extern "C" fn get_attribute(value: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr) -> u32 {
    let found = FOREIGN.with_borrow(|foreign| {
        foreign.iter().copied().find(|&(start, bytes, _)| (start..start + bytes).contains(&address))
    });
    let Some((start, bytes, memory_type)) = found else { return ErrorCode::InvalidValue.number() };
    let value = value.cast::<u64>();
    match attribute {
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => give(value.cast(), memory_type as u32),
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED => give(value.cast(), 0_u32),
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => give(value, start),
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE => give(value, bytes),
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER => give(value, address),
        _ => return ErrorCode::InvalidValue.number(),
    }
    0
}
extern "C" fn module_unload(module: CUmodule) -> u32 {
    destroy(object(module))
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
    not_asked(stream).max(exist(&[stream, graph]))
}
/// CUDA crashes if a capture ends while another thread asks for it.
fn not_asked(stream: &Object) -> u32 {
    if stream.asked.load(Ordering::SeqCst) == 0 { 0 } else { RACED.number() }
}
extern "C" fn capture_end(stream: CUstream, graph: *mut CUgraph) -> u32 {
    let Some(ended) = lock(&object(stream).capture).take() else { return ErrorCode::IllegalState.number() };
    STRICT.with_borrow_mut(|captures| captures.retain(|&capture| !ptr::eq(capture, ended)));
    if ended.invalid.load(Ordering::SeqCst) {
        give(graph, ptr::null_mut());
        return ErrorCode::StreamCaptureInvalidated.number();
    }
    give(graph, handle(ended));
    not_asked(object(stream)).max(exist(&[object(stream), ended]))
}
extern "C" fn capture_info(
    stream: CUstream,
    status: *mut CUstreamCaptureStatus,
    id: *mut cuuint64_t,
    graph: *mut CUgraph,
    dependencies: *mut *const CUgraphNode,
    _: *mut usize,
) -> u32 {
    object(stream).asked.fetch_add(1, Ordering::SeqCst);
    let capture = *lock(&object(stream).capture);
    thread::yield_now();
    object(stream).asked.fetch_sub(1, Ordering::SeqCst);
    let Some(now) = capture else { return exist(&[object(stream)]) };
    give(
        status,
        match now.invalid.load(Ordering::SeqCst) {
            true => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
            false => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
        },
    );
    give(id, now.serial);
    give(graph, handle(now));
    let alone = if dependencies.is_null() { 0 } else { used_alone(now) };
    alone.max(exist(&[object(stream), now]))
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
    let bodies: *mut CUgraph = Box::into_raw(Box::new(handle(body)));
    keep(bodies.expose_provenance());
    // SAFETY: the backend passes a structure of its own, which nothing else uses.
    let parameters = unsafe { &mut *parameters };
    parameters.__bindgen_anon_1.conditional.phGraph_out = bodies;
    used_alone(object(graph))
}
extern "C" fn get_nodes(graph: CUgraph, output: *mut CUgraphNode, count: *mut usize) -> u32 {
    NODE_QUERIES.set(NODE_QUERIES.get() + 1);
    let nodes = lock(&object(graph).nodes);
    for (index, &node) in nodes.iter().enumerate().take_while(|_| !output.is_null()) {
        give(output.wrapping_add(index), handle(node));
    }
    give(count, nodes.len());
    used_alone(object(graph))
}
extern "C" fn node_type(node: CUgraphNode, kind: *mut CUgraphNodeType) -> u32 {
    give(kind.cast(), object(node).kind);
    exist(&[object(node)])
}
extern "C" fn set_params(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS) -> u32 {
    // SAFETY: the backend passes a structure of its own.
    let params = unsafe { &*params };
    assert!(params.kernelParams.is_null() != params.extra.is_null());
    used(&[object(exec), object(node)])
}
extern "C" fn instantiate(exec: *mut CUgraphExec, graph: CUgraph, _: c_ulonglong) -> u32 {
    give(exec, handle(make(false)));
    used_alone(object(graph))
}
extern "C" fn graph_destroy(graph: CUgraph) -> u32 {
    destroy_graph(object(graph))
}
extern "C" fn graph_launch(exec: CUgraphExec, stream: CUstream) -> u32 {
    used(&[object(exec), object(stream)])
}
extern "C" fn exec_destroy(exec: CUgraphExec) -> u32 {
    destroy(object(exec))
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
        mem_host_alloc,
        pointer_get_attribute: get_attribute,
        module_unload,
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

/// The backend over these functions.
pub(crate) fn driver_with(api: Api) -> CudaDriver {
    let driver = CudaDriver::start(api, OLDEST).expect("it always starts");
    Library::ALL.into_iter().for_each(|library| driver.libraries.set_fake(library, libraries::functions(library)));
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
    FunctionId(driver.functions.insert(Function::fake(ModuleId(0), Some(sizes), Default::default())))
}

/// A module with a kernel that takes nothing.
pub(crate) fn module_with_kernel(driver: &CudaDriver) -> (ModuleId, FunctionId) {
    let context = driver.context_of(driver.site(Call::ModuleLoad), DEVICE).expect("a context");
    let (module, users) = Module::fake(handle(make(false)), context);
    let module = ModuleId(driver.modules.insert(module));
    (module, FunctionId(driver.functions.insert(Function::fake(module, Some(&[]), users))))
}

/// Whether CUDA has a module loaded, even after it was unloaded by id.
pub(crate) fn is_loaded(driver: &CudaDriver, module: ModuleId) -> impl Fn() -> bool + use<> {
    let raw = object(driver.modules.get(module.0).expect("a module").raw());
    move || raw.exists.load(Ordering::SeqCst)
}

pub(crate) const DEVICE: DeviceId = DeviceId(0);
pub(crate) const OTHER_DEVICE: DeviceId = DeviceId(1);
