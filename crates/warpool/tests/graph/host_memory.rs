//! Pinned host memory in graphs: who has it when, and that replays find it. Tests that stand for one of PyTorch's name
//! it. The rule of every test: in the end nothing is pinned, and nothing was used that nobody had.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common::graphs::{GraphLab, graph_error};
use crate::common::memory::KIB;
use warpool::driver::sim::HazardKind;
use warpool::driver::{Captures as _, Copies as _, DevicePtr, HostPtr, Streams as _};
use warpool::graph::{BufferKey, CaptureOptions, Flag, Graph, GraphError, HostKey};
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings};
use warpool::{Error, Result, Stream};

const PLAIN: CaptureOptions =
    CaptureOptions { pool: None, mode: warpool::driver::CaptureMode::Global, poller_timeout: None };

const BYTES: u64 = 64 * KIB;

/// A lab for graphs with an allocator of pinned memory.
struct Lab {
    graphs: GraphLab,
    host: HostAllocator,
}

impl Lab {
    fn new() -> Self {
        let graphs = GraphLab::new("");
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

    /// Every place of the size that the host allocator gives out now without pinning more than it has, taken one after
    /// another. Each is written to: a stream that still uses one would be seen.
    fn places(&self) -> Vec<HostPtr> {
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

    fn gives(&self, place: HostPtr) -> bool {
        self.places().contains(&place)
    }

    /// Captures a copy past the scope, as a library would, which notes its use.
    fn upload(&self, to: DevicePtr, from: &HostBlock, stream: &Stream) -> Result<()> {
        from.record_use(stream)?;
        Ok(self.graphs.context.sim.copy(to.into(), from.ptr().into(), 4, stream.id())?)
    }

    fn device_word(&self, graph: &Graph, key: BufferKey) -> u32 {
        self.graphs.word(self.graphs.at(graph, key))
    }

    /// With all graphs and blocks gone.
    fn finish(self) {
        self.graphs.context.device().synchronize().unwrap();
        self.host.process_pending().unwrap();
        self.host.check();
        let stats = self.host.stats();
        assert_eq!((stats.active_requests.current, stats.active_bytes.current), (0, 0), "blocks left behind");
        self.host.trim(0).unwrap();
        assert_eq!(self.host.stats().allocated_bytes.current, 0, "all of it can go");
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
fn what_a_capture_never_used_serves_the_next_request_at_once() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    graph
        .capture(lab.side(), PLAIN, |_| {
            let first = lab.host.allocate_on(BYTES, lab.side())?;
            let place = first.ptr();
            drop(first);
            let second = lab.host.allocate_on(BYTES, lab.side())?;
            assert_eq!(second.ptr(), place, "dropped");
            second.free()?;
            assert_eq!(lab.host.allocate_on(BYTES, lab.side())?.ptr(), place, "freed");
            Ok(())
        })
        .unwrap();
    drop(graph);
    lab.finish();
}

/// TestCachingHostAllocatorCudaGraph.test_pin_memory_no_use2: what lies unused in a graph's pool is nobody else's,
/// before the graph is gone.
#[test]
fn an_unused_block_stays_in_the_graphs_pool() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let place = graph.capture(lab.side(), PLAIN, |_| Ok(lab.host.allocate_on(BYTES, lab.side())?.ptr())).unwrap();
    assert!(!lab.gives(place), "the graph is there");
    // Also not for another graph, which has a pool of its own.
    let mut other = lab.graph();
    let elsewhere = other.capture(lab.side(), PLAIN, |_| Ok(lab.host.allocate_on(BYTES, lab.side())?.ptr())).unwrap();
    assert_ne!(elsewhere, place);
    drop(graph);
    assert!(lab.gives(place) && !lab.gives(elsewhere), "one of the graphs is gone");
    drop(other);
    assert!(lab.gives(elsewhere));
    lab.finish();
}

/// TestCachingHostAllocatorCudaGraph.test_pin_memory_use.
#[test]
fn what_a_capture_used_goes_to_nobody_while_the_graph_lives() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let (place, word) = graph
        .capture(lab.side(), PLAIN, |capture| {
            let word = capture.allocate(4)?;
            let block = lab.host.allocate_on(BYTES, lab.side())?;
            put(&block, 41);
            lab.upload(capture.buffer(word)?.ptr(), &block, lab.side())?;
            let place = block.ptr();
            drop(block);
            assert_ne!(lab.host.allocate_on(BYTES, lab.side())?.ptr(), place, "in the capture");
            Ok((place, word))
        })
        .unwrap();
    for round in 0..3 {
        assert!(!lab.gives(place), "round {round}");
        lab.graphs.set(lab.graphs.at(&graph, word), 0);
        graph.replay(&lab.graphs.context.main).unwrap();
        assert_eq!(lab.device_word(&graph, word), 41, "what was written in the capture is there in round {round}");
    }
    drop(graph);
    assert!(lab.gives(place), "the graph is gone, and so are its replays");
    lab.finish();
}

/// TestCachingHostAllocatorCudaGraph.test_two_graphs: graphs that share a pool share what was never used in it, and
/// only that.
#[test]
fn two_graphs_of_one_pool_share_only_what_neither_used() {
    let lab = Lab::new();
    let (mut one, mut two) = (lab.graph(), lab.graph());
    let (used, unused, word) = one
        .capture(lab.side(), PLAIN, |capture| {
            let word = capture.allocate(4)?;
            let (used, unused) = (lab.host.allocate_on(BYTES, lab.side())?, lab.host.allocate_on(BYTES, lab.side())?);
            put(&used, 1);
            lab.upload(capture.buffer(word)?.ptr(), &used, lab.side())?;
            Ok((used.ptr(), unused.ptr(), word))
        })
        .unwrap();
    let same = CaptureOptions { pool: Some(one.pool().unwrap()), ..PLAIN };
    let second = two
        .capture(lab.side(), same, |capture| {
            let word = capture.allocate(4)?;
            let first = lab.host.allocate_on(BYTES, lab.side())?;
            assert_eq!(first.ptr(), unused);
            let second = lab.host.allocate_on(BYTES, lab.side())?;
            assert!(second.ptr() != used && second.ptr() != unused);
            put(&second, 2);
            lab.upload(capture.buffer(word)?.ptr(), &second, lab.side())?;
            Ok(second.ptr())
        })
        .unwrap();
    one.replay(lab.side()).unwrap();
    assert_eq!(lab.device_word(&one, word), 1);
    drop(one);
    // The pool is still there.
    assert!(![used, unused, second].into_iter().any(|place| lab.gives(place)));
    two.replay(lab.side()).unwrap();
    drop(two);
    lab.graphs.context.device().synchronize().unwrap();
    let places = lab.places();
    assert!([used, unused, second].iter().all(|place| places.contains(place)), "{places:?}");
    lab.finish();
}

/// The same of memory that the graphs made themselves: what copies and kernels of the scope used is not given to a
/// later graph of the pool.
#[test]
fn a_later_graph_of_the_pool_gets_nothing_that_an_earlier_one_used() {
    let lab = Lab::new();
    let (mut one, mut two, mut three) = (lab.graph(), lab.graph(), lab.graph());
    let [copied, counted, unused] = one
        .capture(lab.side(), PLAIN, |capture| {
            let (stream, word) = (capture.stream().clone(), capture.allocate(4)?);
            let keys: Vec<HostKey> = (0..3).map(|_| capture.allocate_host(&lab.host, BYTES)).collect::<Result<_>>()?;
            for &key in &keys {
                put(capture.host_buffer(key)?, 1);
            }
            capture.copy(word, keys[0], 4, &stream)?;
            lab.graphs.capture_add_host(capture, keys[1], 1)?;
            let places = keys.iter().map(|&key| Ok(capture.host_buffer(key)?.ptr())).collect::<Result<Vec<_>>>()?;
            Ok(places.try_into().expect("three"))
        })
        .unwrap();
    let same = CaptureOptions { pool: Some(one.pool().unwrap()), ..PLAIN };
    two.capture(lab.side(), same, |_| lab.host.allocate_on(BYTES, lab.side()).map(drop)).unwrap();
    drop(one);
    let given = three
        .capture(lab.side(), same, |_| {
            let blocks: Vec<HostBlock> =
                (0..6).map(|_| lab.host.allocate_on(BYTES, lab.side())).collect::<Result<_>>()?;
            Ok(blocks.iter().map(HostBlock::ptr).collect::<Vec<_>>())
        })
        .unwrap();
    assert!(given.contains(&unused), "{unused:?} of {given:?}");
    assert!(!given.contains(&copied) && !given.contains(&counted), "{copied:?}, {counted:?} of {given:?}");
    drop((two, three));
    let given = lab.places();
    assert!([copied, counted, unused].iter().all(|place| given.contains(place)), "the pool is gone");
    lab.finish();
}

/// test_cond_pin_memory_cudagraphs: pinned memory that is made in the bodies of conditional nodes, and copied from
/// there.
#[test]
fn bodies_copy_from_pinned_memory_of_their_own() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let (flags, word, places) = graph
        .capture(lab.side(), PLAIN, |capture| {
            let (flags, word) = (capture.allocate(8)?, capture.allocate(4)?);
            let mut places = Vec::new();
            for at in 0..2 {
                places.push(capture.if_node(Flag::word(flags.at(4 * at)), |body| {
                    let value = body.allocate_host(&lab.host, BYTES)?;
                    put(body.host_buffer(value)?, 10 + at as u32);
                    let stream = body.stream().clone();
                    body.copy(word, value, 4, &stream)?;
                    // One that is given back, and used: by a library, say.
                    let loose = lab.host.allocate_on(BYTES, &stream)?;
                    loose.record_use(&stream)?;
                    Ok([body.host_buffer(value)?.ptr(), loose.ptr()])
                })?);
            }
            Ok((flags, word, places.concat()))
        })
        .unwrap();
    for (ways, want) in [([0, 0], 7), ([1, 0], 10), ([0, 1], 11), ([1, 1], 11)] {
        lab.graphs.set(lab.graphs.at(&graph, word), 7);
        for (at, way) in ways.into_iter().enumerate() {
            lab.graphs.set(lab.graphs.at(&graph, flags).offset(4 * at as u64), way);
        }
        graph.replay(&lab.graphs.context.main).unwrap();
        assert_eq!(lab.device_word(&graph, word), want, "{ways:?}");
    }
    let given = lab.places();
    assert!(!places.iter().any(|place| given.contains(place)), "the graph is there");
    drop(graph);
    let given = lab.places();
    assert!(places.iter().all(|place| given.contains(place)), "{places:?} of {given:?}");
    lab.finish();
}

#[test]
fn replays_see_what_the_host_wrote_and_the_host_what_they_wrote() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let input = Arc::new(lab.block());
    let (input_key, output, doubled) = graph
        .capture(lab.side(), PLAIN, |capture| {
            let (stream, device) = (capture.stream().clone(), capture.allocate(BYTES)?);
            let input = capture.share_host(Arc::clone(&input))?;
            let output = capture.keep_host(lab.block())?;
            let doubled = capture.allocate_host(&lab.host, BYTES)?;
            capture.copy(device, input, BYTES, &stream)?;
            capture.copy(output, device, BYTES - 8, &stream)?;
            capture.copy(output.at(BYTES - 8), device.at(4), 8, &stream)?;
            // Between two places on the host, and on a second stream.
            let fork = capture.fork()?;
            capture.copy(doubled, output.at(0), 4, &fork)?;
            capture.copy(doubled.at(4), input.at(0), 4, &fork)?;
            capture.join(fork)?;
            Ok((input, output, doubled))
        })
        .unwrap();
    assert_eq!(graph.host_buffer(input_key).unwrap().ptr(), input.ptr());
    for round in 1..=3_u8 {
        let stream = if round == 2 { &lab.graphs.context.main } else { lab.side() };
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
    lab.finish();
}

#[test]
fn kernels_work_on_pinned_memory_where_it_is() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let (count, place) = graph
        .capture(lab.side(), PLAIN, |capture| {
            let count = capture.allocate_host(&lab.host, 8)?;
            put(capture.host_buffer(count)?, 100);
            lab.graphs.capture_add_host(capture, count.at(4), 1)?;
            lab.graphs.capture_add_host(capture, count, 5)?;
            Ok((count, capture.host_buffer(count)?.ptr()))
        })
        .unwrap();
    graph.host_buffer(count).unwrap().write(4, &[0; 4]).unwrap();
    for round in 1..=4 {
        graph.replay(&lab.graphs.context.main).unwrap();
        lab.graphs.context.main.synchronize().unwrap();
        assert_eq!(get(graph.host_buffer(count).unwrap()), 100 + 5 * round);
        let mut second = [0; 4];
        graph.host_buffer(count).unwrap().read(4, &mut second).unwrap();
        assert_eq!(u32::from_le_bytes(second), round);
    }
    // The last replay is under way when the graph goes.
    lab.graphs.context.pause_stream(lab.side());
    graph.replay(lab.side()).unwrap();
    drop(graph);
    let eight_bytes = || lab.host.allocate(8).unwrap();
    let early: Vec<HostBlock> = (0..20).map(|_| eight_bytes()).collect();
    assert!(!early.iter().any(|block| block.ptr() == place));
    early.iter().for_each(|block| put(block, 1));
    lab.graphs.context.resume_stream(lab.side());
    drop(early);
    lab.finish();
}

/// An ordinary block with a use on a stream that captures is the graph's from there on, whoever drops it when.
#[test]
fn an_ordinary_block_that_captures_used_comes_back_behind_the_last_graph() {
    let lab = Lab::new();
    let (mut one, mut two) = (lab.graph(), lab.graph());
    let block = lab.block();
    let place = block.ptr();
    put(&block, 9);
    let capture = |graph: &mut Graph| {
        graph
            .capture(lab.side(), PLAIN, |capture| {
                let word = capture.allocate(4)?;
                lab.upload(capture.buffer(word)?.ptr(), &block, lab.side())?;
                Ok(word)
            })
            .unwrap()
    };
    let words = [capture(&mut one), capture(&mut two)];
    drop(block);
    assert!(!lab.gives(place));
    for (graph, word) in [&one, &two].into_iter().zip(words) {
        graph.replay(lab.side()).unwrap();
        assert_eq!(lab.device_word(graph, word), 9, "replayed after the program has dropped it");
    }
    two.reset().unwrap();
    assert!(!lab.gives(place), "the other graph still reads it");
    one.replay(lab.side()).unwrap();
    assert_eq!(lab.device_word(&one, words[0]), 9);
    drop(one);
    assert!(lab.gives(place));
    lab.finish();
}

/// In which way a graph may know of pinned memory.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// It made it.
    Allocated,
    /// It made it, and nobody said that it is used.
    Untold,
    /// It was given it.
    Kept,
    /// It shares it with the program, which drops it first.
    Shared,
    /// A library used it, and dropped it in the capture.
    Loose,
    /// A library used memory of the graph's pool, and dropped it in the capture.
    LooseInPool,
    /// The program has it, and drops it after the graph.
    Outlives,
    /// The same, of the graph's pool.
    OutlivesInPool,
}

const WAYS: [Way; 8] = [
    Way::Allocated,
    Way::Untold,
    Way::Kept,
    Way::Shared,
    Way::Loose,
    Way::LooseInPool,
    Way::Outlives,
    Way::OutlivesInPool,
];

/// Graphs go while replays run on two streams that do not order each other: their pinned memory waits for both.
#[test]
fn a_graph_that_goes_while_replays_run_leaves_its_memory_to_nobody_before_they_end() {
    for way in WAYS {
        for by_reset in [false, true] {
            let lab = Lab::new();
            let other = lab.graphs.context.side_stream();
            let mut graph = lab.graph();
            let mut outlives = None;
            let mut place = HostPtr(0);
            let word = graph
                .capture(lab.side(), PLAIN, |capture| {
                    let (word, stream) = (capture.allocate(4)?, capture.stream().clone());
                    let ptr = capture.buffer(word)?.ptr();
                    let key = match way {
                        Way::Allocated | Way::Untold => Some(capture.allocate_host(&lab.host, BYTES)?),
                        Way::Kept => Some(capture.keep_host(lab.block())?),
                        Way::Shared => Some(capture.share_host(Arc::new(lab.block()))?),
                        _ => None,
                    };
                    if let Some(key) = key {
                        put(capture.host_buffer(key)?, 3);
                        place = capture.host_buffer(key)?.ptr();
                        if matches!(way, Way::Untold) {
                            lab.graphs.context.sim.copy(ptr.into(), place.into(), 4, stream.id())?;
                        } else {
                            capture.copy(word, key, 4, &stream)?;
                        }
                        return Ok(word);
                    }
                    let in_pool = matches!(way, Way::LooseInPool | Way::OutlivesInPool);
                    let block = if in_pool { lab.host.allocate_on(BYTES, &stream)? } else { lab.block() };
                    put(&block, 3);
                    place = block.ptr();
                    lab.upload(ptr, &block, &stream)?;
                    if matches!(way, Way::Outlives | Way::OutlivesInPool) {
                        outlives = Some(block);
                    }
                    Ok(word)
                })
                .unwrap();
            graph.replay(lab.side()).unwrap();
            assert_eq!(lab.device_word(&graph, word), 3, "{way:?}");
            for stream in [lab.side(), &other] {
                lab.graphs.context.pause_stream(stream);
                graph.replay(stream).unwrap();
            }
            if by_reset {
                graph.reset().unwrap();
            }
            drop(graph);
            if let Some(block) = outlives {
                assert_eq!(get(&block), 3, "{way:?}: still its owner's");
                drop(block);
            }
            assert!(!lab.gives(place), "{way:?}: two replays under way");
            lab.graphs.context.resume_stream(&other);
            assert!(!lab.gives(place), "{way:?}: one replay under way");
            lab.graphs.context.resume_stream(lab.side());
            assert!(lab.gives(place), "{way:?}: nobody uses it");
            lab.finish();
        }
    }
}

#[test]
fn a_capture_that_fails_gives_everything_back() {
    // By an error of the body, by a panic, by a call that breaks the capture, and by a graph that is dropped in
    // between.
    for how in 0..4 {
        let lab = Lab::new();
        let mut graph = lab.graph();
        let ordinary = lab.block();
        let mut places = vec![ordinary.ptr()];
        let mut body = |capture: &mut warpool::graph::Capture<'_>| -> Result<()> {
            let stream = capture.stream().clone();
            let (word, key) = (capture.allocate(4)?, capture.allocate_host(&lab.host, BYTES)?);
            capture.copy(word, key, 4, &stream)?;
            let kept = capture.keep_host(lab.block())?;
            capture.copy(kept, word, 4, &stream)?;
            let loose = [lab.host.allocate_on(BYTES, &stream)?, lab.host.allocate_on(BYTES, &stream)?];
            loose[0].record_use(&stream)?;
            ordinary.record_use(&stream)?;
            places.extend([capture.host_buffer(key)?.ptr(), capture.host_buffer(kept)?.ptr()]);
            places.extend(loose.iter().map(HostBlock::ptr));
            Ok(())
        };
        match how {
            0 => {
                let error = graph
                    .capture(lab.side(), PLAIN, |capture| {
                        body(capture).and_then(|()| Err::<(), _>(GraphError::ForeignSlot.into()))
                    })
                    .unwrap_err();
                assert_eq!(error, GraphError::ForeignSlot.into());
            }
            1 => {
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    graph.capture(lab.side(), PLAIN, |capture| -> Result<()> {
                        body(capture)?;
                        panic!("on purpose")
                    })
                }));
                assert!(outcome.is_err());
            }
            2 => {
                let outcome = graph.capture(lab.side(), PLAIN, |capture| {
                    body(capture)?;
                    assert!(lab.graphs.context.sim.stream_synchronize(lab.side().id()).is_err());
                    Ok(())
                });
                assert!(matches!(graph_error(outcome), GraphError::CaptureFailed { .. }));
                lab.graphs.forgive(HazardKind::CaptureInvalidated);
            }
            _ => {
                graph.capture_begin(lab.side(), PLAIN).unwrap();
                body(&mut graph.scope().unwrap()).unwrap();
                drop(graph);
                graph = lab.graph();
                // The next capture or reset on the device ends what was abandoned.
                graph.reset().unwrap();
            }
        }
        drop(ordinary);
        let given = lab.places();
        assert!(places.iter().all(|place| given.contains(place)), "way {how}: {places:?} of {given:?}");
        // And the graph can capture again.
        let key = graph.capture(lab.side(), PLAIN, |capture| capture.allocate_host(&lab.host, BYTES)).unwrap();
        put(graph.host_buffer(key).unwrap(), 1);
        drop(graph);
        lab.finish();
    }
}

/// A stream that used a block captures by the time the block is freed: no mark can be put there before the capture is
/// over.
#[test]
fn frees_of_blocks_whose_stream_captures_wait_for_the_capture() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let target = lab.graphs.block(4, lab.side());
    let block = lab.block();
    let place = block.ptr();
    put(&block, 5);
    lab.graphs.context.pause_stream(lab.side());
    lab.upload(target.ptr(), &block, lab.side()).unwrap();
    graph
        .capture(lab.side(), PLAIN, |_| {
            block.free()?;
            assert!(!lab.gives(place), "in the capture");
            lab.host.process_pending()
        })
        .unwrap();
    assert!(!lab.gives(place), "the copy from before the capture waits");
    lab.graphs.context.resume_stream(lab.side());
    assert!(lab.gives(place), "it is done, and the graph has nothing to do with it");
    assert_eq!(lab.graphs.word(target.ptr()), 5);
    drop((graph, target));
    lab.finish();
}

#[test]
fn wrong_uses_say_what_is_wrong() {
    let lab = Lab::new();
    let (mut one, mut two) = (lab.graph(), lab.graph());
    let key = one.capture(lab.side(), PLAIN, |capture| capture.allocate_host(&lab.host, 100)).unwrap();
    let elsewhere = HostAllocator::new(&crate::common::machine(1).1, PinnedSettings::default());
    let foreign = elsewhere.allocate(64).unwrap();
    let not_in_capture = lab.graphs.context.side_stream();
    assert_eq!(graph_error(two.host_buffer(key)), GraphError::NotCaptured);
    two.capture(lab.side(), PLAIN, |capture| {
        let stream = capture.stream().clone();
        let (device, own) = (capture.allocate(64)?, capture.allocate_host(&lab.host, 100)?);
        assert_eq!(graph_error(capture.copy(device, key, 4, &stream)), GraphError::UnknownBuffer);
        assert_eq!(graph_error(capture.host_buffer(key)), GraphError::UnknownBuffer);
        assert_eq!(graph_error(lab.graphs.capture_add_host(capture, key, 1)), GraphError::UnknownBuffer);
        let beyond = GraphError::OutOfBounds { offset: 98, bytes: 4, available: 100 };
        assert_eq!(graph_error(capture.copy(device, own.at(98), 4, &stream)), beyond);
        assert!(matches!(graph_error(capture.copy(own, device, 65, &stream)), GraphError::OutOfBounds { .. }));
        let outside = GraphError::StreamNotInCapture { stream: not_in_capture.id() };
        assert_eq!(graph_error(capture.copy(own, device, 4, &not_in_capture)), outside);
        assert!(matches!(capture.keep_host(foreign), Err(Error::ForeignInstance { .. })));
        assert!(matches!(capture.allocate_host(&elsewhere, 64), Err(Error::ForeignInstance { .. })));
        // Nothing of all this has harmed the capture.
        capture.copy(device, own, 64, &stream)
    })
    .unwrap();
    one.reset().unwrap();
    assert_eq!(graph_error(one.host_buffer(key)), GraphError::NotCaptured);
    assert_eq!(graph_error(two.host_buffer(key)), GraphError::UnknownBuffer);
    drop((one, two));
    elsewhere.close().unwrap();
    lab.finish();
}

#[test]
fn an_empty_block_is_a_block() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let key: HostKey = graph
        .capture(lab.side(), PLAIN, |capture| {
            let (stream, device) = (capture.stream().clone(), capture.allocate(16)?);
            let (empty, full) = (capture.allocate_host(&lab.host, 0)?, capture.allocate_host(&lab.host, 16)?);
            capture.copy(device, full, 16, &stream)?;
            Ok(empty)
        })
        .unwrap();
    graph.replay(lab.side()).unwrap();
    assert_eq!((graph.host_buffer(key).unwrap().bytes(), graph.host_buffer(key).unwrap().ptr()), (0, HostPtr(0)));
    drop(graph);
    lab.finish();
}

/// The allocator is not closed over a graph's head: what lies in its pool is the graph's, used or not.
#[test]
fn an_allocator_is_not_closed_while_a_graph_has_memory_of_it() {
    for used in [false, true] {
        let lab = Lab::new();
        let mut graph = lab.graph();
        graph
            .capture(lab.side(), PLAIN, |_| {
                let block = lab.host.allocate_on(BYTES, lab.side())?;
                if used { block.record_use(lab.side()) } else { Ok(()) }
            })
            .unwrap();
        let second = HostAllocator::clone(&lab.host);
        let Lab { graphs, host } = lab;
        drop(second);
        assert_eq!(host.close(), Err(Error::HostMemoryInUse { handles: 0, blocks: 1 }), "used: {used}");
        drop(graph);
        graphs.finish();
    }
}

/// A block is used by its address too, as foreign code knows it.
#[test]
fn uses_by_address_count_in_captures() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let place = graph
        .capture(lab.side(), PLAIN, |capture| {
            let word = capture.allocate(4)?;
            let block = lab.host.allocate_on(BYTES, lab.side())?;
            put(&block, 1);
            assert!(lab.host.record_use_at(block.ptr(), lab.side())?);
            assert!(!lab.host.record_use_at(block.ptr().offset(4), lab.side())?, "not where it starts");
            lab.graphs.context.sim.copy(capture.buffer(word)?.ptr().into(), block.ptr().into(), 4, lab.side().id())?;
            Ok(block.ptr())
        })
        .unwrap();
    graph.replay(lab.side()).unwrap();
    assert!(!lab.gives(place));
    drop(graph);
    lab.graphs.context.device().synchronize().unwrap();
    assert!(lab.gives(place));
    assert_eq!(lab.graphs.context.sim.capture_state(lab.side().id()).unwrap(), warpool::driver::CaptureState::None);
    assert!(!lab.host.record_use_at(HostPtr(64), &lab.graphs.context.main).unwrap(), "nobody's address");
    lab.finish();
}
