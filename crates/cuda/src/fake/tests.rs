//! Tests of the backend over the driver of this folder: what outlives what, and threads that take away what others use.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cudarc::driver::sys::CUstream;
use warpool_driver::{
    BlasMatrix, Call, CaptureMode, CaptureState, Captures, ConditionalId, ConditionalKind, DevicePtr, DriverError,
    ErrorCode, EventId, EventOptions, EventScope, Events, ForeignStream, GraphExecId, GraphId, Graphs, HandleId,
    InstantiateOptions, LaunchShape, Libraries, Library, NodeId, Result, Sgemm, StreamId, StreamOptions, Streams,
};

use super::{
    CURRENT, DEAD, DEVICE, api, driver, driver_with, guarded, kernel, launch, launch_graph, object, set_kernel,
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
fn the_thread_keeps_its_context() -> Result<()> {
    let driver = driver();
    driver.stream_create(DEVICE, StreamOptions::default())?;
    assert!(CURRENT.get().is_null());
    Ok(())
}

/// As a framework's stream is met whose capture began elsewhere. Asking CUDA would break that, so nobody does.
#[test]
fn a_stream_adopted_while_it_captures_has_its_handle() -> Result<()> {
    let maker = driver();
    let stream = maker.stream_create(DEVICE, StreamOptions::default())?;
    let handle = maker.stream_handle(stream)?;
    assert_eq!(handle.device, DEVICE);
    // SAFETY: the fake driver frees nothing.
    let foreign = unsafe { ForeignStream::new(handle.raw) };
    let mut api = api();
    (api.stream_get_priority, api.stream_get_flags) = (ask_priority, ask_flags);
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

/// Breaks the captures of this thread, as CUDA's would.
unsafe extern "C" fn ask_priority(_: CUstream, _: *mut c_int) -> u32 {
    guarded()
}

unsafe extern "C" fn ask_flags(_: CUstream, _: *mut c_uint) -> u32 {
    guarded()
}

#[test]
fn an_event_in_a_graph_outlives_its_id() -> Result<()> {
    let driver = driver();
    let stream = driver.stream_create(DEVICE, StreamOptions::default())?;
    for (scope, outlives) in [(EventScope::Plain, false), (EventScope::External, true)] {
        let event = driver.event_create(DEVICE, EventOptions::default())?;
        let raw = object(driver.event(driver.site(Call::EventQuery), event)?.raw.raw());
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

/// Six threads make, use and take away the same few objects. Calls may be refused, but none may reach a dead object,
/// and none may wait for ever.
#[test]
fn no_call_hands_cuda_what_another_thread_destroyed() {
    let (rounds, threads) = if cfg!(miri) { (100, 3) } else { (5_000, 6) };
    let driver = driver();
    let ids = || -> [AtomicU64; 4] { Default::default() };
    let (streams, events, graphs, execs, flags, handles, nodes) = (ids(), ids(), ids(), ids(), ids(), ids(), ids());
    let function = kernel(&driver, &[]);
    let matrix = BlasMatrix { ptr: DevicePtr(0), stride: 1, transposed: false };
    let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix, b: matrix, beta: 0.0, c: matrix };
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
            let (handle, node) = (HandleId(now(&handles, b)), NodeId(now(&nodes, b)));
            let done = match draw(24) {
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
                    .library_create(Library::ALL[draw(5) as usize], DEVICE)
                    .and_then(|new| driver.library_destroy(HandleId(put(&handles, new.0)))),
                17 | 18 => driver.library_set_stream(handle, stream),
                19 => driver.blas_sgemm(handle, &product),
                20 => driver.blas_set_workspace(handle, DevicePtr(0x100), 0x100),
                21 => set_kernel(&driver, exec, node, function, LaunchShape::ONE, &[]),
                22 | 23 => launch(&driver, function, LaunchShape::ONE, &[], stream),
                14 => driver.conditional_create(stream, 1).map(|new| _ = put(&flags, new.0)),
                _ => {
                    let (flag, body) = (ConditionalId(now(&flags, a)), StreamId(now(&streams, b)));
                    driver.conditional_begin(stream, flag, ConditionalKind::While, body, CaptureMode::Relaxed)
                }
            };
            match done {
                // Libraries pass it on as a status.
                Err(error) if error.code == DEAD || error.to_string().ends_with("gave the status 9999") => {
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
            assert_eq!(thread.join().expect("it does not panic"), Ok(()));
        }
    });
}
