//! cuBLAS in captures: a graph's workspaces come from its pool, and are owned by it.

use crate::common::blas::{BlasFixture, HOPPER, Matrices};
use crate::common::memory::{FIRST, MIB};
use warpool::blas::BlasHandle;
use warpool::driver::sim::{HazardKind, LibraryCall};
use warpool::driver::{CaptureMode, Captures as _, DevicePtr, Graphs as _, Pattern};
use warpool::graph::{CaptureOptions, Flag, Graph, GraphError, GraphOptions};
use warpool::memory::MemPoolId;
use warpool::memory::report::{BlockState, SnapshotOptions};
use warpool::{Error, Result};

fn graph(fixture: &BlasFixture) -> Graph {
    Graph::new(&fixture.allocator, &fixture.device, GraphOptions::default()).unwrap()
}

/// The live allocations of a pool.
fn live_in(fixture: &BlasFixture, pool: MemPoolId) -> Vec<DevicePtr> {
    let snapshot = fixture.allocator.snapshot(SnapshotOptions { pool: Some(pool), traces: false }).unwrap();
    let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
    let live = blocks.filter(|block| block.state == BlockState::ActiveAllocated);
    live.map(|block| DevicePtr(block.address)).collect()
}

#[test]
fn a_capture_has_its_own_workspace_from_the_graphs_pool() {
    let fixture = BlasFixture::new();
    let (stream, other) = (fixture.stream(), fixture.stream());
    let matrices = Matrices::new(&fixture.allocator, &stream, 1).unwrap();
    let before = fixture.blas.handle_on(&stream).unwrap();
    let eager = before.workspace();

    let mut graph = graph(&fixture);
    let capture = |fixture: &BlasFixture| -> Result<BlasHandle> {
        let inside = fixture.blas.handle_on(&stream)?;
        assert_ne!(inside.workspace().0, eager.0);
        inside.sgemm(&matrices.product)?;
        assert_eq!(fixture.blas.handle(&fixture.device)?.workspace(), inside.workspace(), "the second call shares it");
        // A handle that was fetched before uses it too, and so does cuBLASLt.
        before.sgemm(&matrices.product)?;
        assert_eq!(before.workspace(), inside.workspace());
        assert_eq!(fixture.blas.lt_on(&stream)?.workspace(), (inside.workspace().0, MIB));
        // A stream that is not capturing has its own workspace.
        assert_ne!(fixture.blas.handle_on(&other)?.workspace().0, inside.workspace().0);
        Ok(inside)
    };
    let inside = graph.capture(&stream, CaptureOptions::default(), |_| capture(&fixture)).unwrap();
    let captured = inside.workspace().0;
    assert_eq!(live_in(&fixture, graph.pool().unwrap().id()), [captured]);
    assert_eq!(fixture.workspaces().current, 3 * HOPPER);

    // No handle uses the graph's workspace any more.
    let calls = fixture.sim.library_calls(before.id()).len();
    assert_eq!(fixture.blas.handle_on(&stream).unwrap().workspace(), eager);
    let calls_since = [LibraryCall::SetStream(stream.id()), LibraryCall::SetWorkspace { ptr: eager.0, bytes: eager.1 }];
    assert_eq!(fixture.calls_since(before.id(), calls), calls_since);
    inside.sgemm(&matrices.product).unwrap();
    assert_eq!(inside.workspace(), eager);

    // Clearing workspaces does not free the graph's: replays use it.
    drop((before, inside));
    fixture.blas.clear_workspaces();
    fixture.trim();
    assert_eq!(fixture.workspaces().current, HOPPER);
    for _ in 0..3 {
        graph.replay(&stream).unwrap();
    }
    matrices.check(&stream).unwrap();
    let pool = graph.pool().unwrap().id();
    graph.reset().unwrap();
    fixture.trim();
    assert_eq!(fixture.workspaces().current, 0);
    let uses = fixture.allocator.pools().unwrap().pool_uses(FIRST, pool);
    assert!(matches!(uses, Err(Error::UnknownPool { .. })), "the pool is still there: {uses:?}");
    drop((graph, matrices));
    fixture.finish();
}

/// Mirrors test_repeat_graph_capture_cublas_workspace_memory.
#[test]
fn repeated_captures_with_gemms_do_not_grow_memory() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let matrices = Matrices::new(&fixture.allocator, &stream, 2).unwrap();
    let mut graph = graph(&fixture);
    let mut reserved = Vec::new();
    for _ in 0..100 {
        let products = || (0..3).try_for_each(|_| fixture.blas.handle_on(&stream)?.sgemm(&matrices.product));
        graph.capture(&stream, CaptureOptions::default(), |_| products()).unwrap();
        assert_eq!(live_in(&fixture, graph.pool().unwrap().id()).len(), 1);
        graph.replay(&stream).unwrap();
        matrices.check(&stream).unwrap();
        graph.reset().unwrap();
        fixture.trim();
        reserved.push(fixture.allocator.stats(FIRST).unwrap().reserved_bytes.all.current);
    }
    assert_eq!(reserved, [reserved[0]; 100]);
    assert_eq!(fixture.workspaces().current, 0);
    drop((graph, matrices));
    fixture.finish();
}

#[test]
fn the_workspace_size_can_change_within_a_capture() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let matrices = Matrices::new(&fixture.allocator, &stream, 3).unwrap();
    let mut graph = graph(&fixture);
    let products = || -> Result<()> {
        // The thread's handle is created in the capture.
        for (bytes, live) in [(0, 0), (MIB, 1), (MIB / 2, 1), (30 * MIB, 2)] {
            fixture.blas.set_workspace_bytes(Some(bytes));
            let handle = fixture.blas.handle_on(&stream)?;
            handle.sgemm(&matrices.product)?;
            assert_eq!((handle.workspace().1, fixture.workspaces().current), (bytes, [0, MIB, 31 * MIB][live]));
        }
        Ok(())
    };
    graph.capture(&stream, CaptureOptions::default(), |_| products()).unwrap();
    graph.replay(&stream).unwrap();
    matrices.check(&stream).unwrap();
    drop((graph, matrices));
    fixture.trim();
    assert_eq!(fixture.workspaces().current, 0);
    fixture.finish();
}

#[test]
fn graphs_of_one_pool_have_their_own_workspaces() {
    let fixture = BlasFixture::new();
    let streams = [fixture.stream(), fixture.stream()];
    let matrices = [0, 1].map(|i: usize| Matrices::new(&fixture.allocator, &streams[i], i as u32).unwrap());
    let (mut one, mut two) = (graph(&fixture), graph(&fixture));
    let product = |i: usize| fixture.blas.handle_on(&streams[i])?.sgemm(&matrices[i].product);
    one.capture(&streams[0], CaptureOptions::default(), |_| product(0)).unwrap();
    let shared = CaptureOptions::default().with_pool(one.pool().unwrap());
    two.capture(&streams[1], shared, |_| product(1)).unwrap();
    assert_eq!(live_in(&fixture, one.pool().unwrap().id()).len(), 2);
    // At the same time, on two streams.
    one.replay(&streams[0]).unwrap();
    two.replay(&streams[1]).unwrap();
    matrices.iter().zip(&streams).for_each(|(matrices, stream)| matrices.check(stream).unwrap());
    drop((one, two, matrices));
    fixture.trim();
    fixture.finish();
}

/// A stream that took part in a body may be used in parallel with the body afterwards: nothing in the graph orders the
/// two.
#[test]
fn a_body_and_a_parallel_branch_have_their_own_workspaces() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let [one, two] = [1, 2].map(|seed| Matrices::new(&fixture.allocator, &stream, seed).unwrap());
    let mut graph = graph(&fixture);
    graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let switch = capture.allocate(4)?;
            capture.fill(switch, Pattern::U32(1), 1, &stream)?;
            let mut before = fixture.instance.event();
            stream.record_event(&mut before)?;
            let in_body = capture.if_node(Flag::word(switch), |body| {
                let fork = body.fork()?;
                fixture.blas.handle_on(&fork)?.sgemm(&one.product)?;
                let id = fork.id();
                body.join(fork)?;
                Ok(id)
            })?;
            let side = fixture.device.lease_stream()?;
            assert_eq!(side.id(), in_body);
            side.wait_event(&before)?;
            fixture.blas.handle_on(&side)?.sgemm(&two.product)?;
            stream.wait_stream(&side)
        })
        .unwrap();
    graph.replay(&stream).unwrap();
    [&one, &two].into_iter().for_each(|matrices| matrices.check(&stream).unwrap());
    drop((graph, one, two));
    fixture.trim();
    fixture.finish();
}

#[test]
fn a_failed_capture_frees_its_workspace() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let matrices = Matrices::new(&fixture.allocator, &stream, 5).unwrap();
    let mut graph = graph(&fixture);
    let product = || fixture.blas.handle_on(&stream)?.sgemm(&matrices.product);
    let outcome = graph.capture(&stream, CaptureOptions::default(), |_| {
        product()?;
        stream.synchronize().unwrap_err(); // forbidden: invalidates the capture
        product()
    });
    assert!(matches!(outcome, Err(Error::Graph(GraphError::CaptureFailed { .. }))), "{outcome:?}");
    let broken: Vec<HazardKind> = fixture.sim.hazards().iter().map(|hazard| hazard.kind).collect();
    assert_eq!(broken, [HazardKind::CaptureInvalidated]);
    fixture.sim.clear_hazards();
    fixture.trim();
    assert_eq!(fixture.workspaces().current, 0);
    graph.capture(&stream, CaptureOptions::default(), |_| product()).unwrap();
    graph.replay(&stream).unwrap();
    matrices.check(&stream).unwrap();
    drop((graph, matrices));
    fixture.finish();
}

#[test]
fn a_foreign_capture_is_an_error() {
    let fixture = BlasFixture::new();
    let (ours, foreign) = (fixture.stream(), fixture.stream());
    let mut graph = graph(&fixture);
    graph
        .capture(&ours, CaptureOptions::default(), |_| {
            fixture.sim.capture_begin(foreign.id(), CaptureMode::Relaxed)?;
            assert_eq!(fixture.blas.handle_on(&foreign).unwrap_err(), GraphError::ForeignCapture.into());
            let template = fixture.sim.capture_end(foreign.id())?;
            Ok(fixture.sim.graph_destroy(template)?)
        })
        .unwrap();
    fixture.blas.handle_on(&foreign).unwrap();
    drop(graph);
    fixture.finish();
}
