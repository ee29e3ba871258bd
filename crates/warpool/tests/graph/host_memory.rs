//! Pinned host memory in graphs: how long it is kept, and that replays read it. Counterparts of PyTorch's tests name
//! them. At the end of every test nothing is pinned, and there was no hazard.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common::graphs::{GraphFixture, graph_error};
use crate::common::memory::KIB;
use warpool::driver::sim::HazardKind;
use warpool::driver::{Captures as _, Copies as _, DevicePtr, HostPtr, Streams as _};
use warpool::graph::{BufferKey, CaptureOptions, Flag, Graph, GraphError, HostKey};
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings};
use warpool::{Error, Result, Stream};

const PLAIN: CaptureOptions<'_> =
    CaptureOptions { pool: None, mode: warpool::driver::CaptureMode::Global, poller_timeout: None };

const BYTES: u64 = 64 * KIB;

/// With an allocator of pinned memory.
struct HostFixture {
    graphs: GraphFixture,
    host: HostAllocator,
}

impl HostFixture {
    fn new() -> Self {
        let graphs = GraphFixture::new("");
        let host = HostAllocator::new(&graphs.context.instance, PinnedSettings::default());
        Self { graphs, host }
    }

    fn graph(&self) -> Graph {
        self.graphs.graph()
    }

    fn side(&self) -> &Stream {
        &self.graphs.side
    }

    fn block(&self) -> HostBlock {
        self.host.allocate(BYTES).unwrap()
    }

    /// All blocks of this size that the host allocator can allocate now without pinning more, allocated one after
    /// another. Each is written to: a stream that still uses one would be a hazard.
    fn reusable_blocks(&self) -> Vec<HostPtr> {
        let mut taken = Vec::new();
        let pinned = self.host.stats().allocated_bytes.current;
        loop {
            let block = self.block();
            if self.host.stats().allocated_bytes.current > pinned {
                break;
            }
            block.write(0, &[0xEE; 16]).unwrap();
            taken.push(block);
        }
        self.host.check();
        taken.iter().map(HostBlock::ptr).collect()
    }

    fn can_reuse(&self, ptr: HostPtr) -> bool {
        self.reusable_blocks().contains(&ptr)
    }

    /// Captures a copy without the scope, as a library would, which records its use.
    fn upload(&self, to: DevicePtr, from: &HostBlock, stream: &Stream) -> Result<()> {
        from.record_use(stream)?;
        Ok(self.graphs.context.sim.copy(to.into(), from.ptr().into(), 4, stream.id())?)
    }

    fn device_word(&self, graph: &Graph, key: BufferKey) -> u32 {
        self.graphs.word(self.graphs.at(graph, key))
    }

    /// After all graphs and blocks are dropped.
    fn finish(self) {
        self.graphs.context.device().synchronize().unwrap();
        self.host.process_pending().unwrap();
        self.host.check();
        let stats = self.host.stats();
        assert_eq!((stats.active_requests.current, stats.active_bytes.current), (0, 0), "blocks leaked");
        self.host.trim(0).unwrap();
        assert_eq!(self.host.stats().allocated_bytes.current, 0, "all of it can be freed");
        self.host.close().unwrap();
        assert_eq!(self.graphs.context.sim.object_counts().pinned, 0, "memory left pinned");
        self.graphs.finish();
    }
}

fn put(block: &HostBlock, value: u32) {
    block.write(0, &value.to_le_bytes()).unwrap();
}

fn get(block: &HostBlock) -> u32 {
    let mut bytes = [0; 4];
    block.read(0, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

/// TestCachingHostAllocatorCudaGraph.test_pin_memory_no_use.
#[test]
fn an_unused_block_is_reused_at_once_in_the_capture() {
    let fixture = HostFixture::new();
    let mut graph = fixture.graph();
    graph
        .capture(fixture.side(), PLAIN, |_| {
            let first = fixture.host.allocate_on(BYTES, fixture.side())?;
            let ptr = first.ptr();
            drop(first);
            let second = fixture.host.allocate_on(BYTES, fixture.side())?;
            assert_eq!(second.ptr(), ptr, "dropped");
            second.free()?;
            assert_eq!(fixture.host.allocate_on(BYTES, fixture.side())?.ptr(), ptr, "freed");
            Ok(())
        })
        .unwrap();
    drop(graph);
    fixture.finish();
}

/// TestCachingHostAllocatorCudaGraph.test_pin_memory_no_use2: an unused block in a graph's pool is not used by others
/// before the graph is dropped.
#[test]
fn an_unused_block_stays_in_the_graphs_pool() {
    let fixture = HostFixture::new();
    let mut graph = fixture.graph();
    let ptr =
        graph.capture(fixture.side(), PLAIN, |_| Ok(fixture.host.allocate_on(BYTES, fixture.side())?.ptr())).unwrap();
    assert!(!fixture.can_reuse(ptr), "the graph is alive");
    // Nor by another graph, which has a pool of its own.
    let mut other = fixture.graph();
    let elsewhere =
        other.capture(fixture.side(), PLAIN, |_| Ok(fixture.host.allocate_on(BYTES, fixture.side())?.ptr())).unwrap();
    assert_ne!(elsewhere, ptr);
    drop(graph);
    assert!(fixture.can_reuse(ptr) && !fixture.can_reuse(elsewhere), "one of the graphs is dropped");
    drop(other);
    assert!(fixture.can_reuse(elsewhere));
    fixture.finish();
}

/// TestCachingHostAllocatorCudaGraph.test_pin_memory_use.
#[test]
fn a_used_block_is_not_reused_while_the_graph_lives() {
    let fixture = HostFixture::new();
    let mut graph = fixture.graph();
    let (ptr, word) = graph
        .capture(fixture.side(), PLAIN, |capture| {
            let word = capture.allocate(4)?;
            let block = fixture.host.allocate_on(BYTES, fixture.side())?;
            put(&block, 41);
            fixture.upload(capture.buffer(word)?.ptr(), &block, fixture.side())?;
            let ptr = block.ptr();
            drop(block);
            assert_ne!(fixture.host.allocate_on(BYTES, fixture.side())?.ptr(), ptr, "in the capture");
            Ok((ptr, word))
        })
        .unwrap();
    for round in 0..3 {
        assert!(!fixture.can_reuse(ptr), "round {round}");
        fixture.graphs.set(fixture.graphs.at(&graph, word), 0);
        graph.replay(&fixture.graphs.context.main).unwrap();
        assert_eq!(fixture.device_word(&graph, word), 41, "what was written in the capture is there in round {round}");
    }
    drop(graph);
    assert!(fixture.can_reuse(ptr), "the graph is dropped, and its replays are done");
    fixture.finish();
}

/// TestCachingHostAllocatorCudaGraph.test_two_graphs: graphs that share a pool share only its unused blocks.
#[test]
fn graphs_of_one_pool_share_only_unused_blocks() {
    let fixture = HostFixture::new();
    let (mut one, mut two) = (fixture.graph(), fixture.graph());
    let (used, unused, word) = one
        .capture(fixture.side(), PLAIN, |capture| {
            let word = capture.allocate(4)?;
            let (used, unused) =
                (fixture.host.allocate_on(BYTES, fixture.side())?, fixture.host.allocate_on(BYTES, fixture.side())?);
            put(&used, 1);
            fixture.upload(capture.buffer(word)?.ptr(), &used, fixture.side())?;
            Ok((used.ptr(), unused.ptr(), word))
        })
        .unwrap();
    let same = CaptureOptions { pool: Some(one.pool().unwrap()), ..PLAIN };
    let second = two
        .capture(fixture.side(), same, |capture| {
            let word = capture.allocate(4)?;
            let first = fixture.host.allocate_on(BYTES, fixture.side())?;
            assert_eq!(first.ptr(), unused);
            let second = fixture.host.allocate_on(BYTES, fixture.side())?;
            assert!(second.ptr() != used && second.ptr() != unused);
            put(&second, 2);
            fixture.upload(capture.buffer(word)?.ptr(), &second, fixture.side())?;
            Ok(second.ptr())
        })
        .unwrap();
    one.replay(fixture.side()).unwrap();
    assert_eq!(fixture.device_word(&one, word), 1);
    drop(one);
    // The pool still exists.
    assert!(![used, unused, second].into_iter().any(|ptr| fixture.can_reuse(ptr)));
    two.replay(fixture.side()).unwrap();
    drop(two);
    fixture.graphs.context.device().synchronize().unwrap();
    let reusable_blocks = fixture.reusable_blocks();
    assert!([used, unused, second].iter().all(|ptr| reusable_blocks.contains(ptr)), "{reusable_blocks:?}");
    fixture.finish();
}

/// As above, for memory that the scope allocated: blocks that copies and kernels used are not reused by a later graph
/// of the pool.
#[test]
fn a_later_graph_of_the_pool_does_not_reuse_used_blocks() {
    let fixture = HostFixture::new();
    let (mut one, mut two, mut three) = (fixture.graph(), fixture.graph(), fixture.graph());
    let [copied, counted, unused] = one
        .capture(fixture.side(), PLAIN, |capture| {
            let (stream, word) = (capture.stream().clone(), capture.allocate(4)?);
            let keys: Vec<HostKey> =
                (0..3).map(|_| capture.allocate_host(&fixture.host, BYTES)).collect::<Result<_>>()?;
            for &key in &keys {
                put(capture.host_buffer(key)?, 1);
            }
            capture.copy(word, keys[0], 4, &stream)?;
            fixture.graphs.capture_add_host(capture, keys[1], 1)?;
            let reusable_blocks =
                keys.iter().map(|&key| Ok(capture.host_buffer(key)?.ptr())).collect::<Result<Vec<_>>>()?;
            Ok(reusable_blocks.try_into().expect("three"))
        })
        .unwrap();
    let pool = one.pool().unwrap().clone();
    let same = CaptureOptions { pool: Some(&pool), ..PLAIN };
    two.capture(fixture.side(), same, |_| fixture.host.allocate_on(BYTES, fixture.side()).map(drop)).unwrap();
    drop(one);
    let given = three
        .capture(fixture.side(), same, |_| {
            let blocks: Vec<HostBlock> =
                (0..6).map(|_| fixture.host.allocate_on(BYTES, fixture.side())).collect::<Result<_>>()?;
            Ok(blocks.iter().map(HostBlock::ptr).collect::<Vec<_>>())
        })
        .unwrap();
    assert!(given.contains(&unused), "{unused:?} of {given:?}");
    assert!(!given.contains(&copied) && !given.contains(&counted), "{copied:?}, {counted:?} of {given:?}");
    drop((two, three, pool));
    let given = fixture.reusable_blocks();
    assert!([copied, counted, unused].iter().all(|ptr| given.contains(ptr)), "the pool is dropped");
    fixture.finish();
}

/// test_cond_pin_memory_cudagraphs: pinned memory that is allocated in the bodies of conditional nodes, and copied
/// from.
#[test]
fn bodies_copy_from_pinned_memory_of_their_own() {
    let fixture = HostFixture::new();
    let mut graph = fixture.graph();
    let (flags, word, reusable_blocks) = graph
        .capture(fixture.side(), PLAIN, |capture| {
            let (flags, word) = (capture.allocate(8)?, capture.allocate(4)?);
            let mut reusable_blocks = Vec::new();
            for at in 0..2 {
                reusable_blocks.push(capture.if_node(Flag::word(flags.at(4 * at)), |body| {
                    let value = body.allocate_host(&fixture.host, BYTES)?;
                    put(body.host_buffer(value)?, 10 + at as u32);
                    let stream = body.stream().clone();
                    body.copy(word, value, 4, &stream)?;
                    // One that is used and freed, as by a library.
                    let loose = fixture.host.allocate_on(BYTES, &stream)?;
                    loose.record_use(&stream)?;
                    Ok([body.host_buffer(value)?.ptr(), loose.ptr()])
                })?);
            }
            Ok((flags, word, reusable_blocks.concat()))
        })
        .unwrap();
    for (values, expected) in [([0, 0], 7), ([1, 0], 10), ([0, 1], 11), ([1, 1], 11)] {
        fixture.graphs.set(fixture.graphs.at(&graph, word), 7);
        for (at, value) in values.into_iter().enumerate() {
            fixture.graphs.set(fixture.graphs.at(&graph, flags).offset(4 * at as u64), value);
        }
        graph.replay(&fixture.graphs.context.main).unwrap();
        assert_eq!(fixture.device_word(&graph, word), expected, "{values:?}");
    }
    let given = fixture.reusable_blocks();
    assert!(!reusable_blocks.iter().any(|ptr| given.contains(ptr)), "the graph is alive");
    drop(graph);
    let given = fixture.reusable_blocks();
    assert!(reusable_blocks.iter().all(|ptr| given.contains(ptr)), "{reusable_blocks:?} of {given:?}");
    fixture.finish();
}

#[test]
fn replays_and_host_read_each_others_writes() {
    let fixture = HostFixture::new();
    let mut graph = fixture.graph();
    let input = Arc::new(fixture.block());
    let (input_key, output, doubled) = graph
        .capture(fixture.side(), PLAIN, |capture| {
            let (stream, device) = (capture.stream().clone(), capture.allocate(BYTES)?);
            let input = capture.share_host(Arc::clone(&input))?;
            let output = capture.keep_host(fixture.block())?;
            let doubled = capture.allocate_host(&fixture.host, BYTES)?;
            capture.copy(device, input, BYTES, &stream)?;
            capture.copy(output, device, BYTES - 8, &stream)?;
            capture.copy(output.at(BYTES - 8), device.at(4), 8, &stream)?;
            // From host to host, and on a second stream.
            let fork = capture.fork()?;
            capture.copy(doubled, output.at(0), 4, &fork)?;
            capture.copy(doubled.at(4), input.at(0), 4, &fork)?;
            capture.join(fork)?;
            Ok((input, output, doubled))
        })
        .unwrap();
    assert_eq!(graph.host_buffer(input_key).unwrap().ptr(), input.ptr());
    for round in 1..=3_u8 {
        let stream = if round == 2 { &fixture.graphs.context.main } else { fixture.side() };
        let bytes: Vec<u8> = (0..BYTES).map(|at| (at as u8).wrapping_mul(round)).collect();
        input.write(0, &bytes).unwrap();
        graph.replay(stream).unwrap();
        stream.synchronize().unwrap();
        let mut got = vec![0; BYTES as usize];
        graph.host_buffer(output).unwrap().read(0, &mut got).unwrap();
        assert_eq!(got[..got.len() - 8], bytes[..bytes.len() - 8], "round {round}");
        assert_eq!(got[got.len() - 8..], bytes[4..12], "round {round}");
        let mut got = [0; 8];
        graph.host_buffer(doubled).unwrap().read(0, &mut got).unwrap();
        assert_eq!(got, [&bytes[..4], &bytes[..4]].concat()[..], "round {round}");
    }
    drop((graph, input));
    fixture.finish();
}

#[test]
fn kernels_access_pinned_memory_in_place() {
    let fixture = HostFixture::new();
    let mut graph = fixture.graph();
    let (count, ptr) = graph
        .capture(fixture.side(), PLAIN, |capture| {
            let count = capture.allocate_host(&fixture.host, 8)?;
            put(capture.host_buffer(count)?, 100);
            fixture.graphs.capture_add_host(capture, count.at(4), 1)?;
            fixture.graphs.capture_add_host(capture, count, 5)?;
            Ok((count, capture.host_buffer(count)?.ptr()))
        })
        .unwrap();
    graph.host_buffer(count).unwrap().write(4, &[0; 4]).unwrap();
    for round in 1..=4 {
        graph.replay(&fixture.graphs.context.main).unwrap();
        fixture.graphs.context.main.synchronize().unwrap();
        assert_eq!(get(graph.host_buffer(count).unwrap()), 100 + 5 * round);
        let mut second = [0; 4];
        graph.host_buffer(count).unwrap().read(4, &mut second).unwrap();
        assert_eq!(u32::from_le_bytes(second), round);
    }
    // The last replay is under way when the graph is dropped.
    fixture.graphs.context.pause_stream(fixture.side());
    graph.replay(fixture.side()).unwrap();
    drop(graph);
    let eight_bytes = || fixture.host.allocate(8).unwrap();
    let early: Vec<HostBlock> = (0..20).map(|_| eight_bytes()).collect();
    assert!(!early.iter().any(|block| block.ptr() == ptr));
    early.iter().for_each(|block| put(block, 1));
    fixture.graphs.context.resume_stream(fixture.side());
    drop(early);
    fixture.finish();
}

/// A block whose use on a capturing stream is recorded is kept by the graph, whenever the program drops it.
#[test]
fn a_block_used_by_captures_is_reused_after_the_last_graph() {
    let fixture = HostFixture::new();
    let (mut one, mut two) = (fixture.graph(), fixture.graph());
    let block = fixture.block();
    let ptr = block.ptr();
    put(&block, 9);
    let capture = |graph: &mut Graph| {
        graph
            .capture(fixture.side(), PLAIN, |capture| {
                let word = capture.allocate(4)?;
                fixture.upload(capture.buffer(word)?.ptr(), &block, fixture.side())?;
                Ok(word)
            })
            .unwrap()
    };
    let words = [capture(&mut one), capture(&mut two)];
    drop(block);
    assert!(!fixture.can_reuse(ptr));
    for (graph, word) in [&one, &two].into_iter().zip(words) {
        graph.replay(fixture.side()).unwrap();
        assert_eq!(fixture.device_word(graph, word), 9, "replayed after the program has dropped it");
    }
    two.reset().unwrap();
    assert!(!fixture.can_reuse(ptr), "the other graph still reads it");
    one.replay(fixture.side()).unwrap();
    assert_eq!(fixture.device_word(&one, words[0]), 9);
    drop(one);
    assert!(fixture.can_reuse(ptr));
    fixture.finish();
}

/// How a graph comes to use pinned memory.
#[derive(Clone, Copy, Debug)]
enum UseKind {
    /// The scope allocated it.
    Allocated,
    /// The scope allocated it, and its use was not recorded.
    Unrecorded,
    /// It was moved into the graph.
    Kept,
    /// Shared with the program, which drops it first.
    Shared,
    /// A library used it, and dropped it in the capture.
    Loose,
    /// A library used memory of the graph's pool, and dropped it in the capture.
    LooseInPool,
    /// The program owns it, and drops it after the graph.
    Outlives,
    /// As `Outlives`, with memory of the graph's pool.
    OutlivesInPool,
}

const USE_KINDS: [UseKind; 8] = [
    UseKind::Allocated,
    UseKind::Unrecorded,
    UseKind::Kept,
    UseKind::Shared,
    UseKind::Loose,
    UseKind::LooseInPool,
    UseKind::Outlives,
    UseKind::OutlivesInPool,
];

/// Graphs are dropped while replays run on two streams: their pinned memory waits for both.
#[test]
fn memory_of_a_dropped_graph_waits_for_its_replays() {
    for use_kind in USE_KINDS {
        for by_reset in [false, true] {
            let fixture = HostFixture::new();
            let other = fixture.graphs.context.side_stream();
            let mut graph = fixture.graph();
            let mut outlives = None;
            let mut host_ptr = HostPtr(0);
            let word = graph
                .capture(fixture.side(), PLAIN, |capture| {
                    let (word, stream) = (capture.allocate(4)?, capture.stream().clone());
                    let ptr = capture.buffer(word)?.ptr();
                    let key = match use_kind {
                        UseKind::Allocated | UseKind::Unrecorded => Some(capture.allocate_host(&fixture.host, BYTES)?),
                        UseKind::Kept => Some(capture.keep_host(fixture.block())?),
                        UseKind::Shared => Some(capture.share_host(Arc::new(fixture.block()))?),
                        _ => None,
                    };
                    if let Some(key) = key {
                        put(capture.host_buffer(key)?, 3);
                        host_ptr = capture.host_buffer(key)?.ptr();
                        if matches!(use_kind, UseKind::Unrecorded) {
                            fixture.graphs.context.sim.copy(ptr.into(), host_ptr.into(), 4, stream.id())?;
                        } else {
                            capture.copy(word, key, 4, &stream)?;
                        }
                        return Ok(word);
                    }
                    let in_pool = matches!(use_kind, UseKind::LooseInPool | UseKind::OutlivesInPool);
                    let block = if in_pool { fixture.host.allocate_on(BYTES, &stream)? } else { fixture.block() };
                    put(&block, 3);
                    host_ptr = block.ptr();
                    fixture.upload(ptr, &block, &stream)?;
                    if matches!(use_kind, UseKind::Outlives | UseKind::OutlivesInPool) {
                        outlives = Some(block);
                    }
                    Ok(word)
                })
                .unwrap();
            graph.replay(fixture.side()).unwrap();
            assert_eq!(fixture.device_word(&graph, word), 3, "{use_kind:?}");
            for stream in [fixture.side(), &other] {
                fixture.graphs.context.pause_stream(stream);
                graph.replay(stream).unwrap();
            }
            if by_reset {
                graph.reset().unwrap();
            }
            drop(graph);
            if let Some(block) = outlives {
                assert_eq!(get(&block), 3, "{use_kind:?}: still allocated");
                drop(block);
            }
            assert!(!fixture.can_reuse(host_ptr), "{use_kind:?}: two replays under way");
            fixture.graphs.context.resume_stream(&other);
            assert!(!fixture.can_reuse(host_ptr), "{use_kind:?}: one replay under way");
            fixture.graphs.context.resume_stream(fixture.side());
            assert!(fixture.can_reuse(host_ptr), "{use_kind:?}: no replay uses it");
            fixture.finish();
        }
    }
}

#[test]
fn a_failed_capture_frees_its_blocks() {
    // By an error of the body, by a panic, by a call that invalidates the capture, and by dropping the graph.
    for how in 0..4 {
        let fixture = HostFixture::new();
        let mut graph = fixture.graph();
        let ordinary = fixture.block();
        let mut reusable_blocks = vec![ordinary.ptr()];
        let mut body = |capture: &mut warpool::graph::Capture<'_>| -> Result<()> {
            let stream = capture.stream().clone();
            let (word, key) = (capture.allocate(4)?, capture.allocate_host(&fixture.host, BYTES)?);
            capture.copy(word, key, 4, &stream)?;
            let kept = capture.keep_host(fixture.block())?;
            capture.copy(kept, word, 4, &stream)?;
            let loose = [fixture.host.allocate_on(BYTES, &stream)?, fixture.host.allocate_on(BYTES, &stream)?];
            loose[0].record_use(&stream)?;
            ordinary.record_use(&stream)?;
            reusable_blocks.extend([capture.host_buffer(key)?.ptr(), capture.host_buffer(kept)?.ptr()]);
            reusable_blocks.extend(loose.iter().map(HostBlock::ptr));
            Ok(())
        };
        match how {
            0 => {
                let error = graph
                    .capture(fixture.side(), PLAIN, |capture| {
                        body(capture).and_then(|()| Err::<(), _>(GraphError::ForeignSlot.into()))
                    })
                    .unwrap_err();
                assert_eq!(error, GraphError::ForeignSlot.into());
            }
            1 => {
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    graph.capture(fixture.side(), PLAIN, |capture| -> Result<()> {
                        body(capture)?;
                        panic!("on purpose")
                    })
                }));
                assert!(outcome.is_err());
            }
            2 => {
                let outcome = graph.capture(fixture.side(), PLAIN, |capture| {
                    body(capture)?;
                    assert!(fixture.graphs.context.sim.stream_synchronize(fixture.side().id()).is_err());
                    Ok(())
                });
                assert!(matches!(graph_error(outcome), GraphError::CaptureFailed { .. }));
                fixture.graphs.expect_hazards(HazardKind::CaptureInvalidated);
            }
            _ => {
                graph.capture_begin(fixture.side(), PLAIN).unwrap();
                body(&mut graph.scope().unwrap()).unwrap();
                drop(graph);
                graph = fixture.graph();
                // The next capture or reset on the device ends it.
                graph.reset().unwrap();
            }
        }
        drop(ordinary);
        let given = fixture.reusable_blocks();
        assert!(reusable_blocks.iter().all(|ptr| given.contains(ptr)), "case {how}: {reusable_blocks:?} of {given:?}");
        // And the graph can capture again.
        let key = graph.capture(fixture.side(), PLAIN, |capture| capture.allocate_host(&fixture.host, BYTES)).unwrap();
        put(graph.host_buffer(key).unwrap(), 1);
        drop(graph);
        fixture.finish();
    }
}

/// A stream that used a block is capturing when the block is freed: no event can be recorded there before the capture
/// is over.
#[test]
fn frees_of_blocks_whose_stream_captures_wait_for_the_capture() {
    let fixture = HostFixture::new();
    let mut graph = fixture.graph();
    let target = fixture.graphs.block(4, fixture.side());
    let block = fixture.block();
    let ptr = block.ptr();
    put(&block, 5);
    fixture.graphs.context.pause_stream(fixture.side());
    fixture.upload(target.ptr(), &block, fixture.side()).unwrap();
    graph
        .capture(fixture.side(), PLAIN, |_| {
            block.free()?;
            assert!(!fixture.can_reuse(ptr), "in the capture");
            fixture.host.process_pending()
        })
        .unwrap();
    assert!(!fixture.can_reuse(ptr), "the copy from before the capture waits");
    fixture.graphs.context.resume_stream(fixture.side());
    assert!(fixture.can_reuse(ptr), "it is done, and the graph has nothing to do with it");
    assert_eq!(fixture.graphs.word(target.ptr()), 5);
    drop((graph, target));
    fixture.finish();
}

#[test]
fn each_wrong_use_has_its_error() {
    let fixture = HostFixture::new();
    let (mut one, mut two) = (fixture.graph(), fixture.graph());
    let key = one.capture(fixture.side(), PLAIN, |capture| capture.allocate_host(&fixture.host, 100)).unwrap();
    let elsewhere = HostAllocator::new(&crate::common::machine(1).1, PinnedSettings::default());
    let foreign = elsewhere.allocate(64).unwrap();
    let not_in_capture = fixture.graphs.context.side_stream();
    assert_eq!(graph_error(two.host_buffer(key)), GraphError::NotCaptured);
    two.capture(fixture.side(), PLAIN, |capture| {
        let stream = capture.stream().clone();
        let (device, own) = (capture.allocate(64)?, capture.allocate_host(&fixture.host, 100)?);
        assert_eq!(graph_error(capture.copy(device, key, 4, &stream)), GraphError::UnknownBuffer);
        assert_eq!(graph_error(capture.host_buffer(key)), GraphError::UnknownBuffer);
        assert_eq!(graph_error(fixture.graphs.capture_add_host(capture, key, 1)), GraphError::UnknownBuffer);
        let beyond = GraphError::OutOfBounds { offset: 98, bytes: 4, available: 100 };
        assert_eq!(graph_error(capture.copy(device, own.at(98), 4, &stream)), beyond);
        assert!(matches!(graph_error(capture.copy(own, device, 65, &stream)), GraphError::OutOfBounds { .. }));
        let outside = GraphError::StreamNotInCapture { stream: not_in_capture.id() };
        assert_eq!(graph_error(capture.copy(own, device, 4, &not_in_capture)), outside);
        assert!(matches!(capture.keep_host(foreign), Err(Error::ForeignInstance { .. })));
        assert!(matches!(capture.allocate_host(&elsewhere, 64), Err(Error::ForeignInstance { .. })));
        // None of these errors has invalidated the capture.
        capture.copy(device, own, 64, &stream)
    })
    .unwrap();
    one.reset().unwrap();
    assert_eq!(graph_error(one.host_buffer(key)), GraphError::NotCaptured);
    assert_eq!(graph_error(two.host_buffer(key)), GraphError::UnknownBuffer);
    drop((one, two));
    elsewhere.close().unwrap();
    fixture.finish();
}

#[test]
fn empty_blocks() {
    let fixture = HostFixture::new();
    let mut graph = fixture.graph();
    let key: HostKey = graph
        .capture(fixture.side(), PLAIN, |capture| {
            let (stream, device) = (capture.stream().clone(), capture.allocate(16)?);
            let (empty, full) = (capture.allocate_host(&fixture.host, 0)?, capture.allocate_host(&fixture.host, 16)?);
            capture.copy(device, full, 16, &stream)?;
            Ok(empty)
        })
        .unwrap();
    graph.replay(fixture.side()).unwrap();
    assert_eq!((graph.host_buffer(key).unwrap().bytes(), graph.host_buffer(key).unwrap().ptr()), (0, HostPtr(0)));
    drop(graph);
    fixture.finish();
}

/// The allocator cannot be closed while a graph holds memory of it, used or not.
#[test]
fn an_allocator_cannot_be_closed_while_a_graph_has_its_memory() {
    for used in [false, true] {
        let fixture = HostFixture::new();
        let mut graph = fixture.graph();
        graph
            .capture(fixture.side(), PLAIN, |_| {
                let block = fixture.host.allocate_on(BYTES, fixture.side())?;
                if used { block.record_use(fixture.side()) } else { Ok(()) }
            })
            .unwrap();
        let second = HostAllocator::clone(&fixture.host);
        let HostFixture { graphs, host } = fixture;
        drop(second);
        assert_eq!(host.close(), Err(Error::HostMemoryInUse { handles: 0, blocks: 1 }), "used: {used}");
        drop(graph);
        graphs.finish();
    }
}

/// A use can be recorded by address, for code that does not have the block.
#[test]
fn uses_by_address_are_recorded_in_captures() {
    let fixture = HostFixture::new();
    let mut graph = fixture.graph();
    let ptr = graph
        .capture(fixture.side(), PLAIN, |capture| {
            let word = capture.allocate(4)?;
            let block = fixture.host.allocate_on(BYTES, fixture.side())?;
            put(&block, 1);
            assert!(fixture.host.record_use_at(block.ptr(), fixture.side())?);
            assert!(!fixture.host.record_use_at(block.ptr().offset(4), fixture.side())?, "not where it starts");
            fixture.graphs.context.sim.copy(
                capture.buffer(word)?.ptr().into(),
                block.ptr().into(),
                4,
                fixture.side().id(),
            )?;
            Ok(block.ptr())
        })
        .unwrap();
    graph.replay(fixture.side()).unwrap();
    assert!(!fixture.can_reuse(ptr));
    drop(graph);
    fixture.graphs.context.device().synchronize().unwrap();
    assert!(fixture.can_reuse(ptr));
    assert_eq!(
        fixture.graphs.context.sim.capture_state(fixture.side().id()).unwrap(),
        warpool::driver::CaptureState::None
    );
    assert!(!fixture.host.record_use_at(HostPtr(64), &fixture.graphs.context.main).unwrap(), "an unknown address");
    fixture.finish();
}
