//! Pinned memory in captures: what a graph uses is its own until it is gone.

use std::sync::Arc;

use warpool::driver::{CaptureMode, Captures as _, Copies as _, Graphs as _};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{BlockState, CachingAllocator, DeviceAllocator, Settings};
use warpool::{Error, Stream};

use super::lab::{HostLab, KIB, MIB};

struct GraphLab {
    lab: HostLab,
    stream: Stream,
    allocator: Arc<dyn DeviceAllocator>,
}

impl GraphLab {
    fn new() -> Self {
        let lab = HostLab::new("");
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&lab.instance, Settings::default()));
        let stream = lab.stream();
        Self { lab, stream, allocator }
    }

    fn graph(&self) -> Graph {
        Graph::new(&self.allocator, &self.lab.device(), GraphOptions::default()).unwrap()
    }
}

/// TestCachingHostAllocatorCudaGraph: unused, a block serves the next request of the capture; used, it serves nobody.
#[test]
fn a_capture_has_its_own_blocks() {
    let made = GraphLab::new();
    let mut graph = made.graph();
    let (lab, stream) = (&made.lab, &made.stream);
    let (unused, used) = graph
        .capture(stream, CaptureOptions::default(), |_| {
            let block = lab.pinned.allocate_on(KIB, stream)?;
            let unused = block.ptr();
            block.free()?;
            let block = lab.pinned.allocate_on(KIB, stream)?;
            assert_eq!(block.ptr(), unused);
            // Not for those outside.
            drop(block);
            assert_ne!(lab.pinned.allocate(KIB)?.ptr(), unused);
            let block = lab.pinned.allocate_on(KIB, stream)?;
            assert_eq!(block.ptr(), unused);
            let to = lab.pinned.allocate_on(2 * KIB, stream)?;
            lab.sim.copy(to.ptr().into(), block.ptr().into(), 8, stream.id())?;
            to.record_use(stream)?;
            let used = to.ptr();
            drop(block);
            to.free()?;
            assert_ne!(lab.pinned.allocate_on(2 * KIB, stream)?.ptr(), used);
            Ok((unused, used))
        })
        .unwrap();
    assert_eq!(lab.state_at(used), BlockState::ActivePendingFree);
    assert_ne!(lab.alloc(2 * KIB).ptr(), used);
    assert_ne!(lab.alloc(KIB).ptr(), unused);
    graph.replay(stream).unwrap();
    stream.synchronize().unwrap();
    lab.pinned.process_pending().unwrap();
    assert_eq!(lab.state_at(used), BlockState::ActivePendingFree);
    // With the graph goes the pool.
    drop(graph);
    lab.pinned.process_pending().unwrap();
    assert_eq!(lab.state_at(used), BlockState::Inactive);
    lab.pinned.check();
    made.lab.finish();
}

/// Any block that a capture uses is the graph's, and replays that are under way when it goes are waited for.
#[test]
fn a_graph_keeps_what_it_uses_and_its_replays_are_waited_for() {
    let made = GraphLab::new();
    let (lab, stream) = (&made.lab, &made.stream);
    let replays = lab.stream();
    let [freed, kept] = [lab.alloc(MIB), lab.alloc(2 * MIB)];
    let [a, b] = [freed.ptr(), kept.ptr()];
    freed.write(0, &[7; 64]).unwrap();
    let mut graph = made.graph();
    graph
        .capture(stream, CaptureOptions::default(), |_| {
            lab.sim.copy(kept.ptr().into(), freed.ptr().into(), 64, stream.id())?;
            freed.record_use(stream)?;
            kept.record_use(stream)
        })
        .unwrap();
    lab.free(freed);
    graph.replay(&replays).unwrap();
    replays.synchronize().unwrap();
    let mut back = [0; 64];
    kept.read(0, &mut back).unwrap();
    assert_eq!(back, [7; 64]);
    // One more is on its way when the graph goes.
    lab.pause_stream(&replays);
    graph.replay(&replays).unwrap();
    lab.counting.reset();
    drop(graph);
    drop(kept);
    assert_eq!(lab.counting.counts(), [], "no destructor calls the driver");
    lab.pinned.process_pending().unwrap();
    assert_eq!([lab.state_at(a), lab.state_at(b)], [BlockState::ActivePendingFree; 2]);
    assert_ne!(lab.alloc(MIB).ptr(), a);
    lab.let_go(&replays);
    lab.pinned.process_pending().unwrap();
    assert_eq!([lab.state_at(a), lab.state_at(b)], [BlockState::Inactive; 2]);
    let again = lab.alloc(MIB);
    again.write(0, &[1; 64]).unwrap();
    drop(again);
    made.lab.finish();
}

/// What lies unused in a graph's pool is kept for the graph, whatever its size, and goes with it.
#[test]
fn what_is_not_to_be_kept_goes_with_the_graph() {
    let made = GraphLab::new();
    let (lab, stream) = (&made.lab, &made.stream);
    lab.set("pinned_max_cached_size_mb:1");
    let mut graph = made.graph();
    graph.capture(stream, CaptureOptions::default(), |_| lab.pinned.allocate_on(2 * MIB, stream)?.free()).unwrap();
    lab.pinned.process_pending().unwrap();
    assert_eq!((lab.pinned_bytes(), lab.stats().cached_bytes), (2 * MIB, 0));
    drop(graph);
    lab.pinned.process_pending().unwrap();
    assert_eq!(lab.pinned_bytes(), 0);
    made.lab.finish();
}

/// A capture that comes to nothing gives back what it used.
#[test]
fn a_failed_capture_keeps_nothing() {
    let made = GraphLab::new();
    let (lab, stream) = (&made.lab, &made.stream);
    let mut graph = made.graph();
    let failed = graph.capture(stream, CaptureOptions::default(), |_| {
        let block = lab.pinned.allocate_on(KIB, stream)?;
        block.record_use(stream)?;
        Err::<(), _>(Error::ThreadEnding)
    });
    assert_eq!(failed, Err(Error::ThreadEnding));
    lab.pinned.process_pending().unwrap();
    assert_eq!(lab.stats().active_requests.current, 0);
    drop(graph);
    made.lab.finish();
}

/// No mark is put into a stream that captures, and nothing that others do here breaks a capture.
#[test]
fn captures_are_left_alone() {
    let made = GraphLab::new();
    let (lab, stream) = (&made.lab, &made.stream);
    let other = lab.stream();
    let [before, beside, dropped] = [lab.alloc(MIB), lab.alloc(2 * MIB), lab.alloc(3 * MIB)];
    let ptr = before.ptr();
    lab.upload(&before, stream);
    lab.upload(&beside, &other);
    lab.upload(&dropped, &other);
    let mut graph = made.graph();
    let mut handed = Some((before, beside, dropped));
    graph
        .capture(stream, CaptureOptions::default(), |_| {
            let (before, beside, dropped) = handed.take().expect("once");
            before.free()?;
            beside.free()?;
            drop(dropped);
            lab.pinned.process_pending()?;
            assert_eq!(lab.state_at(ptr), BlockState::ActivePendingFree, "its stream captures");
            // More is pinned, and given back.
            drop(lab.pinned.allocate(50 * MIB)?);
            lab.pinned.trim(0)?;
            Ok(())
        })
        .unwrap();
    drop(graph);
    stream.synchronize().unwrap();
    lab.pinned.process_pending().unwrap();
    stream.synchronize().unwrap();
    lab.pinned.process_pending().unwrap();
    assert_eq!(lab.stats().active_requests.current, 0);
    made.lab.finish();
}

/// A capture that began past Warpool makes a graph of which nothing is known: its blocks serve nobody else.
#[test]
fn a_foreign_capture_keeps_its_blocks_for_good() {
    let lab = HostLab::new("");
    let stream = lab.stream();
    let block = lab.alloc(MIB);
    let ptr = block.ptr();
    let to = lab.device_bytes(&[0; 8]);
    lab.sim.capture_begin(stream.id(), CaptureMode::Global).unwrap();
    lab.sim.copy(to.into(), block.ptr().into(), 8, stream.id()).unwrap();
    block.record_use(&stream).unwrap();
    let own = lab.pinned.allocate_on(KIB, &stream).unwrap();
    lab.free(block);
    lab.free(own);
    lab.pinned.process_pending().unwrap();
    let graph = lab.sim.capture_end(stream.id()).unwrap();
    lab.pinned.process_pending().unwrap();
    assert_eq!(lab.state_at(ptr), BlockState::ActivePendingFree);
    assert_ne!(lab.alloc(MIB).ptr(), ptr);
    lab.sim.graph_destroy(graph).unwrap();
    // Only closing gives them up.
    lab.finish();
}
