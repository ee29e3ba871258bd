//! cuBLAS in captures: a graph's workspaces come from its pool, belong to it, and go with it.

use crate::common::blas::{HOPPER, Lab, Matrices};
use crate::common::memory::{FIRST, MIB};
use warpool::blas::BlasHandle;
use warpool::driver::sim::{HazardKind, LibraryCall};
use warpool::driver::{CaptureMode, Captures as _, DevicePtr, Graphs as _, Pattern};
use warpool::graph::{CaptureOptions, Flag, Graph, GraphError, GraphOptions};
use warpool::memory::{BlockState, MemPoolId, SnapshotOptions};
use warpool::{Error, Result};

fn graph(lab: &Lab) -> Graph {
    Graph::new(&lab.allocator, &lab.device, GraphOptions::default()).unwrap()
}

/// What callers have in a pool.
fn live_in(lab: &Lab, pool: MemPoolId) -> Vec<DevicePtr> {
    let snapshot = lab.allocator.snapshot(SnapshotOptions { pool: Some(pool), traces: false }).unwrap();
    let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
    let live = blocks.filter(|block| block.state == BlockState::ActiveAllocated);
    live.map(|block| DevicePtr(block.address)).collect()
}

#[test]
fn a_capture_has_a_workspace_of_its_own_from_the_graphs_pool() {
    let lab = Lab::new();
    let (stream, other) = (lab.stream(), lab.stream());
    let matrices = Matrices::new(&lab.allocator, &stream, 1).unwrap();
    let before = lab.blas.handle_on(&stream).unwrap();
    let eager = before.workspace();

    let mut graph = graph(&lab);
    let capture = |lab: &Lab| -> Result<BlasHandle> {
        let inside = lab.blas.handle_on(&stream)?;
        assert_ne!(inside.workspace().0, eager.0);
        inside.sgemm(&matrices.product)?;
        assert_eq!(lab.blas.handle(&lab.device)?.workspace(), inside.workspace(), "the second product shares it");
        // A handle that was fetched before follows, and so does cuBLASLt.
        before.sgemm(&matrices.product)?;
        assert_eq!(before.workspace(), inside.workspace());
        assert_eq!(lab.blas.lt_on(&stream)?.workspace(), (inside.workspace().0, MIB));
        // A stream that does not capture has its own.
        assert_ne!(lab.blas.handle_on(&other)?.workspace().0, inside.workspace().0);
        Ok(inside)
    };
    let inside = graph.capture(&stream, CaptureOptions::default(), |_| capture(&lab)).unwrap();
    let captured = inside.workspace().0;
    assert_eq!(live_in(&lab, graph.pool().unwrap()), [captured]);
    assert_eq!(lab.workspaces().current, 3 * HOPPER);

    // The graph's own is not used any more, by no handle.
    let calls = lab.sim.library_calls(before.id()).len();
    assert_eq!(lab.blas.handle_on(&stream).unwrap().workspace(), eager);
    let told = [LibraryCall::SetStream(stream.id()), LibraryCall::SetWorkspace { ptr: eager.0, bytes: eager.1 }];
    assert_eq!(lab.told(before.id(), calls), told);
    inside.sgemm(&matrices.product).unwrap();
    assert_eq!(inside.workspace(), eager);

    // What clears workspaces leaves the graph's alone: replays find it.
    drop((before, inside));
    lab.blas.clear_workspaces();
    lab.trim();
    assert_eq!(lab.workspaces().current, HOPPER);
    for _ in 0..3 {
        graph.replay(&stream).unwrap();
    }
    matrices.check(&stream).unwrap();
    let pool = graph.pool().unwrap();
    graph.reset().unwrap();
    lab.trim();
    assert_eq!(lab.workspaces().current, 0);
    let uses = lab.allocator.pools().unwrap().pool_uses(FIRST, pool);
    assert!(matches!(uses, Err(Error::UnknownPool { .. })), "the pool is still there: {uses:?}");
    drop((graph, matrices));
    lab.finish();
}

/// Mirrors test_repeat_graph_capture_cublas_workspace_memory.
#[test]
fn a_hundred_captures_with_products_do_not_grow_memory() {
    let lab = Lab::new();
    let stream = lab.stream();
    let matrices = Matrices::new(&lab.allocator, &stream, 2).unwrap();
    let mut graph = graph(&lab);
    let mut reserved = Vec::new();
    for _ in 0..100 {
        let products = || (0..3).try_for_each(|_| lab.blas.handle_on(&stream)?.sgemm(&matrices.product));
        graph.capture(&stream, CaptureOptions::default(), |_| products()).unwrap();
        assert_eq!(live_in(&lab, graph.pool().unwrap()).len(), 1);
        graph.replay(&stream).unwrap();
        matrices.check(&stream).unwrap();
        graph.reset().unwrap();
        lab.trim();
        reserved.push(lab.allocator.stats(FIRST).unwrap().reserved_bytes.all.current);
    }
    assert_eq!(reserved, [reserved[0]; 100]);
    assert_eq!(lab.workspaces().current, 0);
    drop((graph, matrices));
    lab.finish();
}

#[test]
fn sizes_may_change_within_a_capture_and_be_none() {
    let lab = Lab::new();
    let stream = lab.stream();
    let matrices = Matrices::new(&lab.allocator, &stream, 3).unwrap();
    let mut graph = graph(&lab);
    let products = || -> Result<()> {
        // The thread's handle is made in here.
        for (bytes, live) in [(0, 0), (MIB, 1), (MIB / 2, 1), (30 * MIB, 2)] {
            lab.blas.set_workspace_bytes(Some(bytes));
            let handle = lab.blas.handle_on(&stream)?;
            handle.sgemm(&matrices.product)?;
            assert_eq!((handle.workspace().1, lab.workspaces().current), (bytes, [0, MIB, 31 * MIB][live]));
        }
        Ok(())
    };
    graph.capture(&stream, CaptureOptions::default(), |_| products()).unwrap();
    graph.replay(&stream).unwrap();
    matrices.check(&stream).unwrap();
    drop((graph, matrices));
    lab.trim();
    assert_eq!(lab.workspaces().current, 0);
    lab.finish();
}

#[test]
fn two_graphs_of_one_pool_have_their_own_workspaces() {
    let lab = Lab::new();
    let streams = [lab.stream(), lab.stream()];
    let matrices = [0, 1].map(|i: usize| Matrices::new(&lab.allocator, &streams[i], i as u32).unwrap());
    let (mut one, mut two) = (graph(&lab), graph(&lab));
    let product = |i: usize| lab.blas.handle_on(&streams[i])?.sgemm(&matrices[i].product);
    one.capture(&streams[0], CaptureOptions::default(), |_| product(0)).unwrap();
    let shared = CaptureOptions::default().with_pool(one.pool().unwrap());
    two.capture(&streams[1], shared, |_| product(1)).unwrap();
    assert_eq!(live_in(&lab, one.pool().unwrap()).len(), 2);
    // At the same time, on two streams.
    one.replay(&streams[0]).unwrap();
    two.replay(&streams[1]).unwrap();
    matrices.iter().zip(&streams).for_each(|(matrices, stream)| matrices.check(stream).unwrap());
    drop((one, two, matrices));
    lab.trim();
    lab.finish();
}

/// A stream that took part in a body may be used beside the body afterwards: in the graph around it nothing puts the
/// one behind the other.
#[test]
fn a_body_and_a_branch_beside_it_have_their_own_workspaces() {
    let lab = Lab::new();
    let stream = lab.stream();
    let [one, two] = [1, 2].map(|seed| Matrices::new(&lab.allocator, &stream, seed).unwrap());
    let mut graph = graph(&lab);
    graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let switch = capture.allocate(4)?;
            capture.fill(switch, Pattern::U32(1), 1, &stream)?;
            let mut before = lab.instance.event();
            stream.record_event(&mut before)?;
            let in_body = capture.if_node(Flag::word(switch), |body| {
                let fork = body.fork()?;
                lab.blas.handle_on(&fork)?.sgemm(&one.product)?;
                let id = fork.id();
                body.join(fork)?;
                Ok(id)
            })?;
            let side = lab.device.lease_stream()?;
            assert_eq!(side.id(), in_body);
            side.wait_event(&before)?;
            lab.blas.handle_on(&side)?.sgemm(&two.product)?;
            stream.wait_stream(&side)
        })
        .unwrap();
    graph.replay(&stream).unwrap();
    [&one, &two].into_iter().for_each(|matrices| matrices.check(&stream).unwrap());
    drop((graph, one, two));
    lab.trim();
    lab.finish();
}

#[test]
fn a_capture_that_fails_keeps_no_workspace() {
    let lab = Lab::new();
    let stream = lab.stream();
    let matrices = Matrices::new(&lab.allocator, &stream, 5).unwrap();
    let mut graph = graph(&lab);
    let product = || lab.blas.handle_on(&stream)?.sgemm(&matrices.product);
    let outcome = graph.capture(&stream, CaptureOptions::default(), |_| {
        product()?;
        stream.synchronize().unwrap_err(); // forbidden, and it breaks the capture
        product()
    });
    assert!(matches!(outcome, Err(Error::Graph(GraphError::CaptureFailed { .. }))), "{outcome:?}");
    let broken: Vec<HazardKind> = lab.sim.hazards().iter().map(|hazard| hazard.kind).collect();
    assert_eq!(broken, [HazardKind::CaptureInvalidated]);
    lab.sim.clear_hazards();
    lab.trim();
    assert_eq!(lab.workspaces().current, 0);
    graph.capture(&stream, CaptureOptions::default(), |_| product()).unwrap();
    graph.replay(&stream).unwrap();
    matrices.check(&stream).unwrap();
    drop((graph, matrices));
    lab.finish();
}

#[test]
fn a_capture_of_somebody_else_is_an_error() {
    let lab = Lab::new();
    let (ours, foreign) = (lab.stream(), lab.stream());
    let mut graph = graph(&lab);
    graph
        .capture(&ours, CaptureOptions::default(), |_| {
            lab.sim.capture_begin(foreign.id(), CaptureMode::Relaxed)?;
            assert_eq!(lab.blas.handle_on(&foreign).unwrap_err(), GraphError::ForeignCapture.into());
            let template = lab.sim.capture_end(foreign.id())?;
            Ok(lab.sim.graph_destroy(template)?)
        })
        .unwrap();
    lab.blas.handle_on(&foreign).unwrap();
    drop(graph);
    lab.finish();
}
