//! Pinned memory in captures: a graph keeps the blocks that it uses.

use std::sync::Arc;

use warpool::driver::{CaptureMode, Captures as _, Copies as _, Graphs as _};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::report::BlockState;
use warpool::memory::{CachingAllocator, DeviceAllocator, Settings};
use warpool::{Error, Stream};

use super::context::{KIB, MIB, TestContext};

struct GraphContext {
    host: TestContext,
    stream: Stream,
    allocator: Arc<dyn DeviceAllocator>,
}

impl GraphContext {
    fn new() -> Self {
        let context = TestContext::new("");
        let allocator: Arc<dyn DeviceAllocator> =
            Arc::new(CachingAllocator::new(&context.instance, Settings::default()));
        let stream = context.stream();
        Self { host: context, stream, allocator }
    }

    fn graph(&self) -> Graph {
        Graph::new(&self.allocator, &self.host.device(), GraphOptions::default()).unwrap()
    }
}

/// TestCachingHostAllocatorCudaGraph: an unused block serves the next request of the capture, a used one does not.
#[test]
fn a_capture_reuses_its_unused_blocks_only() {
    let graphs = GraphContext::new();
    let mut graph = graphs.graph();
    let (context, stream) = (&graphs.host, &graphs.stream);
    let (unused, used) = graph
        .capture(stream, CaptureOptions::default(), |_| {
            let block = context.pinned.allocate_on(KIB, stream)?;
            let unused = block.ptr();
            block.free()?;
            let block = context.pinned.allocate_on(KIB, stream)?;
            assert_eq!(block.ptr(), unused);
            // Requests outside of the capture do not get it.
            drop(block);
            assert_ne!(context.pinned.allocate(KIB)?.ptr(), unused);
            let block = context.pinned.allocate_on(KIB, stream)?;
            assert_eq!(block.ptr(), unused);
            let to = context.pinned.allocate_on(2 * KIB, stream)?;
            context.sim.copy(to.ptr().into(), block.ptr().into(), 8, stream.id())?;
            to.record_use(stream)?;
            let used = to.ptr();
            drop(block);
            to.free()?;
            assert_ne!(context.pinned.allocate_on(2 * KIB, stream)?.ptr(), used);
            Ok((unused, used))
        })
        .unwrap();
    assert_eq!(context.state_at(used), BlockState::ActivePendingFree);
    assert_ne!(context.alloc(2 * KIB).ptr(), used);
    assert_ne!(context.alloc(KIB).ptr(), unused);
    graph.replay(stream).unwrap();
    stream.synchronize().unwrap();
    context.pinned.process_pending().unwrap();
    assert_eq!(context.state_at(used), BlockState::ActivePendingFree);
    // The pool is dropped with the graph.
    drop(graph);
    context.pinned.process_pending().unwrap();
    assert_eq!(context.state_at(used), BlockState::Inactive);
    context.pinned.check();
    graphs.host.finish();
}

/// A graph keeps every block that its capture used. A replay under way when it is dropped delays their reuse.
#[test]
fn blocks_of_a_dropped_graph_wait_for_its_replays() {
    let graphs = GraphContext::new();
    let (context, stream) = (&graphs.host, &graphs.stream);
    let replays = context.stream();
    let [freed, kept] = [context.alloc(MIB), context.alloc(2 * MIB)];
    let [a, b] = [freed.ptr(), kept.ptr()];
    freed.write(0, &[7; 64]).unwrap();
    let mut graph = graphs.graph();
    graph
        .capture(stream, CaptureOptions::default(), |_| {
            context.sim.copy(kept.ptr().into(), freed.ptr().into(), 64, stream.id())?;
            freed.record_use(stream)?;
            kept.record_use(stream)
        })
        .unwrap();
    context.free(freed);
    graph.replay(&replays).unwrap();
    replays.synchronize().unwrap();
    let mut read = [0; 64];
    kept.read(0, &mut read).unwrap();
    assert_eq!(read, [7; 64]);
    // Another replay is under way when the graph is dropped.
    context.pause_stream(&replays);
    graph.replay(&replays).unwrap();
    context.counting.reset();
    drop(graph);
    drop(kept);
    assert_eq!(context.counting.counts(), [], "destructors make no driver call");
    context.pinned.process_pending().unwrap();
    assert_eq!([context.state_at(a), context.state_at(b)], [BlockState::ActivePendingFree; 2]);
    assert_ne!(context.alloc(MIB).ptr(), a);
    context.finish_stream(&replays);
    context.pinned.process_pending().unwrap();
    assert_eq!([context.state_at(a), context.state_at(b)], [BlockState::Inactive; 2]);
    let again = context.alloc(MIB);
    again.write(0, &[1; 64]).unwrap();
    drop(again);
    graphs.host.finish();
}

/// Unused blocks of a graph's pool are kept, whatever their size, until the graph is dropped.
#[test]
fn blocks_above_the_cached_limit_are_unpinned_with_the_graph() {
    let graphs = GraphContext::new();
    let (context, stream) = (&graphs.host, &graphs.stream);
    context.set("pinned_max_cached_size_mb:1");
    let mut graph = graphs.graph();
    graph.capture(stream, CaptureOptions::default(), |_| context.pinned.allocate_on(2 * MIB, stream)?.free()).unwrap();
    context.pinned.process_pending().unwrap();
    assert_eq!((context.pinned_bytes(), context.stats().cached_bytes), (2 * MIB, 0));
    drop(graph);
    context.pinned.process_pending().unwrap();
    assert_eq!(context.pinned_bytes(), 0);
    graphs.host.finish();
}

/// The blocks of a failed capture are reclaimed.
#[test]
fn a_failed_capture_keeps_nothing() {
    let graphs = GraphContext::new();
    let (context, stream) = (&graphs.host, &graphs.stream);
    let mut graph = graphs.graph();
    let failed = graph.capture(stream, CaptureOptions::default(), |_| {
        let block = context.pinned.allocate_on(KIB, stream)?;
        block.record_use(stream)?;
        Err::<(), _>(Error::ThreadEnding)
    });
    assert_eq!(failed, Err(Error::ThreadEnding));
    context.pinned.process_pending().unwrap();
    assert_eq!(context.stats().active_requests.current, 0);
    drop(graph);
    graphs.host.finish();
}

/// No event is recorded in a capturing stream, and no call of the allocator invalidates a capture.
#[test]
fn a_capture_is_not_disturbed() {
    let graphs = GraphContext::new();
    let (context, stream) = (&graphs.host, &graphs.stream);
    let other = context.stream();
    let [before, beside, dropped] = [context.alloc(MIB), context.alloc(2 * MIB), context.alloc(3 * MIB)];
    let ptr = before.ptr();
    context.upload(&before, stream);
    context.upload(&beside, &other);
    context.upload(&dropped, &other);
    let mut graph = graphs.graph();
    let mut blocks = Some((before, beside, dropped));
    graph
        .capture(stream, CaptureOptions::default(), |_| {
            let (before, beside, dropped) = blocks.take().expect("called once");
            before.free()?;
            beside.free()?;
            drop(dropped);
            context.pinned.process_pending()?;
            assert_eq!(context.state_at(ptr), BlockState::ActivePendingFree, "its stream captures");
            // Pinning and unpinning.
            drop(context.pinned.allocate(50 * MIB)?);
            context.pinned.trim(0)?;
            Ok(())
        })
        .unwrap();
    drop(graph);
    stream.synchronize().unwrap();
    context.pinned.process_pending().unwrap();
    stream.synchronize().unwrap();
    context.pinned.process_pending().unwrap();
    assert_eq!(context.stats().active_requests.current, 0);
    graphs.host.finish();
}

/// A capture begun without Warpool creates an unknown graph, so its blocks are never reused.
#[test]
fn blocks_of_a_foreign_capture_are_never_reused() {
    let context = TestContext::new("");
    let stream = context.stream();
    let block = context.alloc(MIB);
    let ptr = block.ptr();
    let to = context.device_bytes(&[0; 8]);
    context.sim.capture_begin(stream.id(), CaptureMode::Global).unwrap();
    context.sim.copy(to.into(), block.ptr().into(), 8, stream.id()).unwrap();
    block.record_use(&stream).unwrap();
    let own = context.pinned.allocate_on(KIB, &stream).unwrap();
    context.free(block);
    context.free(own);
    context.pinned.process_pending().unwrap();
    let graph = context.sim.capture_end(stream.id()).unwrap();
    context.pinned.process_pending().unwrap();
    assert_eq!(context.state_at(ptr), BlockState::ActivePendingFree);
    assert_ne!(context.alloc(MIB).ptr(), ptr);
    context.sim.graph_destroy(graph).unwrap();
    // Only closing the allocator unpins them.
    context.finish();
}

/// Graphs that a framework captures itself: blocks that a capture used stay in the pool, and are free once the pool is
/// gone.
#[test]
fn a_frameworks_graphs_keep_what_they_use() {
    let context = TestContext::new("");
    let pool = context.pinned.new_graph_pool();
    let block = context.pinned.allocate_in(KIB, &pool).unwrap();
    let unused = block.ptr();
    drop(block);
    assert_ne!(context.alloc(KIB).ptr(), unused, "requests outside of the pool do not get it");
    let block = context.pinned.allocate_in(KIB, &pool).unwrap();
    assert_eq!(block.ptr(), unused);
    // A use is recorded by any address in a block, also for memory from outside of the pool.
    assert!(context.pinned.record_graph_use_within(block.ptr().offset(100), &pool).unwrap());
    let outside = context.alloc(2 * KIB);
    let used = outside.ptr();
    assert!(context.pinned.record_graph_use_within(used, &pool).unwrap());
    assert!(!context.pinned.record_graph_use_within(used.offset(64 * MIB), &pool).unwrap());
    drop((block, outside));
    assert_ne!(context.pinned.allocate_in(KIB, &pool).unwrap().ptr(), unused);
    assert_ne!(context.alloc(2 * KIB).ptr(), used);
    drop(pool);
    context.pinned.check();
    assert_eq!(context.pinned.stats().active_requests.current, 0);
    assert_eq!((context.state_at(unused), context.state_at(used)), (BlockState::Inactive, BlockState::Inactive));
    context.finish();
}

/// A block as a plain pointer, as C callers have it.
#[test]
fn a_block_survives_as_a_plain_pointer() {
    let context = TestContext::new("");
    let block = context.alloc(KIB);
    let ptr = block.ptr();
    let raw = block.into_raw();
    assert_eq!(context.state_at(ptr), BlockState::ActiveAllocated);
    // SAFETY: it came from `into_raw` above, and is not used again.
    drop(unsafe { warpool::memory::HostBlock::from_raw(raw) });
    assert_eq!(context.alloc(KIB).ptr(), ptr);
    assert!(context.pinned.allocate(0).unwrap().into_raw().is_null());
    context.finish();
}
