//! Tests of the backend over the fake driver: lifetimes, and threads that destroy what others use.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cudarc::driver::sys::CUstream;
use warpool_driver::{
    BlasMatrix, Call, CaptureMode, CaptureState, Captures, ConditionalId, ConditionalKind, DriverError, ErrorCode,
    EventId, EventOptions, EventScope, Events, ForeignStream, GraphExecId, GraphId, Graphs, HandleId,
    InstantiateOptions, LaunchShape, Libraries, Library, Memory, NodeId, Result, Sgemm, StreamId, StreamOptions,
    Streams,
};

use super::{
    CURRENT, DESTROYED, DEVICE, RACED, api, driver, driver_with, guarded, kernel, launch, launch_graph, object,
    set_kernel,
};
use crate::CudaDriver;

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
fn a_call_restores_the_threads_context() -> Result<()> {
    let driver = driver();
    driver.stream_create(DEVICE, StreamOptions::default())?;
    assert!(CURRENT.get().is_null());
    Ok(())
}

/// For streams of a framework whose capture began elsewhere. A query of CUDA would invalidate it.
#[test]
fn a_stream_adopted_while_it_captures_is_not_queried() -> Result<()> {
    let maker = driver();
    let stream = maker.stream_create(DEVICE, StreamOptions::default())?;
    let handle = maker.stream_handle(stream)?;
    assert_eq!(handle.device, DEVICE);
    // SAFETY: the fake driver never frees the memory behind a handle.
    let foreign = unsafe { ForeignStream::new(handle.raw) };
    let mut api = api();
    (api.stream_get_priority, api.stream_get_flags) = (get_priority, get_flags);
    let driver = driver_with(api);
    maker.capture_begin(stream, CaptureMode::Global)?;
    let adopted = driver.stream_adopt(DEVICE, foreign)?;
    assert_eq!(driver.stream_handle(adopted)?, handle);
    assert_eq!(code(driver.stream_info(adopted)), Some(ErrorCode::StreamCaptureUnsupported));
    maker.capture_end(stream)?;
    assert_eq!(driver.stream_info(adopted)?.raw, handle.raw);
    driver.stream_destroy(adopted)?;
    assert_eq!(code(driver.stream_handle(adopted)), Some(ErrorCode::InvalidHandle));
    Ok(())
}

/// Invalidates the captures of this thread, as CUDA's function does.
unsafe extern "C" fn get_priority(_: CUstream, _: *mut c_int) -> u32 {
    guarded()
}

unsafe extern "C" fn get_flags(_: CUstream, _: *mut c_uint) -> u32 {
    guarded()
}

#[test]
fn an_event_of_a_graph_outlives_its_id() -> Result<()> {
    let driver = driver();
    let stream = driver.stream_create(DEVICE, StreamOptions::default())?;
    for (scope, outlives) in [(EventScope::Plain, false), (EventScope::External, true)] {
        let event = driver.event_create(DEVICE, EventOptions::default())?;
        let raw = object(driver.event(driver.site(Call::EventQuery), event)?.raw.raw());
        driver.event_record(event, stream, scope)?;
        driver.event_destroy(event)?;
        assert_eq!(code(driver.event_query(event)), Some(ErrorCode::InvalidHandle));
        assert_eq!(raw.exists.load(Ordering::SeqCst), outlives, "{scope:?}");
    }
    Ok(())
}

#[test]
fn a_body_capture_ends_with_the_capture_around_it() -> Result<()> {
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
fn a_nested_body_is_destroyed_with_the_outermost_graph() -> Result<()> {
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

/// Six threads create, use and destroy the same few objects. Calls may be refused, but none may use a destroyed object
/// or a graph that another call uses, none may ask for a capture while it begins or ends, and none may wait forever.
#[test]
fn no_call_uses_a_destroyed_object_or_races_on_a_graph() {
    let (rounds, threads) = if cfg!(miri) { (100, 3) } else { (5_000, 6) };
    let driver = driver();
    let ids = || -> [AtomicU64; 4] { Default::default() };
    let (streams, events, graphs, execs, flags, handles, nodes) = (ids(), ids(), ids(), ids(), ids(), ids(), ids());
    let function = kernel(&driver, &[]);
    let memory = driver.mem_alloc(DEVICE, 4096).expect("memory");
    let matrix = BlasMatrix { ptr: memory, stride: 1, transposed: false };
    let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix, b: matrix, beta: 0.0, c: matrix };
    let work = |seed: u64| -> std::result::Result<(), (u64, DriverError)> {
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..rounds {
            let [a, b] = [rng.usize(..4), rng.usize(..4)];
            let now = |ids: &[AtomicU64; 4], at: usize| ids[at].load(Ordering::Relaxed);
            let put = |ids: &[AtomicU64; 4], id: u64| ids[a].swap(id, Ordering::Relaxed);
            let (stream, event) = (StreamId(now(&streams, a)), EventId(now(&events, b)));
            let (graph, exec) = (GraphId(now(&graphs, a)), GraphExecId(now(&execs, b)));
            let (handle, node) = (HandleId(now(&handles, b)), NodeId(now(&nodes, b)));
            let done = match rng.u32(..29) {
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
                12 => launch_graph(&driver, exec, stream),
                13 => driver.graph_topology(graph).map(|shape| {
                    if let Some(node) = shape.nodes.first() {
                        put(&nodes, node.id.0);
                    }
                }),
                16 => driver
                    .library_create(Library::ALL[rng.usize(..5)], DEVICE)
                    .and_then(|new| driver.library_destroy(HandleId(put(&handles, new.0)))),
                17 | 18 => driver.library_set_stream(handle, stream),
                19 => driver.blas_sgemm(handle, &product),
                20 => driver.blas_set_workspace(handle, memory, 0x100),
                21 => set_kernel(&driver, exec, node, function, LaunchShape::ONE, &[]),
                22 | 23 => launch(&driver, function, LaunchShape::ONE, &[], stream),
                24 | 25 => driver.capture_topology(stream).map(drop),
                26 => driver.capture_dependencies(stream).map(drop),
                27 => driver.stream_host_callback(stream, Arc::new(|| ())),
                28 => driver.capture_state(stream).map(drop),
                14 => driver.conditional_create(stream, 1).map(|new| _ = put(&flags, new.0)),
                _ => {
                    let (flag, body) = (ConditionalId(now(&flags, a)), StreamId(now(&streams, b)));
                    driver.conditional_begin(stream, flag, ConditionalKind::While, body, CaptureMode::Relaxed)
                }
            };
            match done {
                // Libraries return it as a status.
                Err(error)
                    if [DESTROYED, RACED].contains(&error.code)
                        || error.to_string().contains("returned the status 999") =>
                {
                    return Err((seed, error));
                }
                _ => {}
            }
        }
        Ok(())
    };
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = (1..=threads).map(|seed| scope.spawn(move || work(seed))).collect();
        for thread in threads {
            assert_eq!(thread.join().expect("no panic"), Ok(()));
        }
    });
}
