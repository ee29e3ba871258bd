//! Random numbers in graphs: a replay draws the same numbers as the same work without the graph. Failures of single
//! steps are tested in `src/generator/tests.rs`.

use std::sync::Arc;

use crate::common::launch::capture_kernel;
use crate::common::memory::{FIRST, KIB, TestContext};
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{HazardKind, SimConfig, SimDriver};
use warpool::driver::{Call, CaptureMode, Copies, DevicePtr, ErrorCode, HostKernel, KernelSource, Kernels};
use warpool::generator::{Generator, GeneratorError, Reservation, philox, position};
use warpool::graph::{BufferKey, CaptureOptions, Flag, Graph, GraphError, GraphOptions};
use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, DeviceBlock, Settings};
use warpool::{Error, Instance, Result, Stream};

const SEED: u64 = 2024;

fn generator(context: &TestContext) -> Generator {
    let generator = Generator::new(&context.device()).unwrap();
    generator.set_seed(SEED).unwrap();
    generator
}

fn graph(context: &TestContext) -> Graph {
    Graph::new(&context.any(), &context.device(), GraphOptions::default()).unwrap()
}

/// A graph that fills one buffer of `words` words.
fn filling(context: &TestContext, generator: &Generator, words: u64, stream: &Stream) -> (Graph, BufferKey) {
    let mut graph = graph(context);
    let key = graph
        .capture(stream, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4 * words)?;
            generator.fill_bits(capture.buffer(key)?, stream)?;
            Ok(key)
        })
        .unwrap();
    (graph, key)
}

fn bytes_at(context: &TestContext, ptr: DevicePtr, bytes: u64) -> Vec<u8> {
    context.device().synchronize().unwrap();
    let mut into = vec![0; bytes as usize];
    context.sim.download(FIRST, ptr, &mut into).unwrap();
    into
}

fn bytes_of(context: &TestContext, block: &DeviceBlock) -> Vec<u8> {
    bytes_at(context, block.ptr(), block.bytes())
}

/// The bytes of `fill_bits` at an offset.
fn bits(seed: u64, offset: u64, bytes: u64) -> Vec<u8> {
    let words = (0..).flat_map(|at| philox::block(seed, at, offset)).take((bytes / 4) as usize);
    words.flat_map(u32::to_le_bytes).collect()
}

/// test_graph_rng_functional, test_graph_rng_distributions: every kind of fill, three replays, the same numbers and
/// offsets as without a graph.
#[test]
fn replays_draw_what_eager_work_would() {
    let context = TestContext::new("");
    let stream = context.side_stream();
    let (eager, captured) = (generator(&context), generator(&context));
    let work = |generator: &Generator, blocks: [&DeviceBlock; 4], stream: &Stream| -> Result<()> {
        generator.fill_bits(blocks[0], stream)?;
        generator.fill_uniform(blocks[1], stream)?;
        generator.fill_normal(blocks[2], stream)?;
        generator.fill_dropout_mask(blocks[3], 0.25, stream)
    };
    let allocate = |bytes| context.any().allocate(bytes, &stream).unwrap();
    let blocks = [4 * KIB, 20, 4004, 1001].map(allocate);
    let mut graph = graph(&context);
    let keys = graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let mut allocate = |bytes| capture.allocate(bytes);
            let keys = [allocate(4 * KIB)?, allocate(20)?, allocate(4004)?, allocate(1001)?];
            let blocks = [0, 1, 2, 3].map(|at: usize| capture.buffer(keys[at]).unwrap());
            work(&captured, blocks, &stream)?;
            Ok(keys)
        })
        .unwrap();
    for round in 1..=3 {
        work(&eager, blocks.each_ref(), &stream).unwrap();
        graph.replay(&stream).unwrap();
        assert_eq!(eager.state(), captured.state());
        assert_eq!(captured.offset().unwrap(), 16 * round);
        for (key, block) in keys.into_iter().zip(&blocks) {
            assert_eq!(bytes_of(&context, graph.buffer(key).unwrap()), bytes_of(&context, block), "round {round}");
        }
        // Eager draws in between count as well.
        eager.fill_bits(&blocks[1], &stream).unwrap();
        captured.fill_bits(&blocks[1], &stream).unwrap();
        eager.set_offset(16 * round).unwrap();
        captured.set_offset(16 * round).unwrap();
    }
    drop((graph, blocks));
    context.finish();
}

/// Interleaved with eager draws, after a new seed, and on any stream.
#[test]
fn replays_start_where_the_generator_is() {
    let context = TestContext::new("");
    let (stream, other) = (context.side_stream(), context.side_stream());
    let generator = generator(&context);
    let (graph, key) = filling(&context, &generator, 100, &stream);
    let ptr = graph.buffer(key).unwrap().ptr();
    assert_eq!(generator.offset().unwrap(), 0);
    // The action before a replay, and the position where its numbers start.
    type Step<'a> = (&'a dyn Fn() -> Result<()>, u64, u64);
    let steps: [Step<'_>; 5] = [
        (&|| Ok(()), SEED, 0),
        (&|| generator.reserve(9, &stream).map(drop), SEED, 16),
        (&|| generator.set_seed(5), 5, 0),
        (&|| generator.set_offset(u64::MAX - 3), 5, u64::MAX - 3),
        (&|| generator.share().set_state(&[7; 16][..8]), u64::from_le_bytes([7; 8]), 0),
    ];
    for ((step, seed, offset), on) in steps.into_iter().zip([&stream, &other, &context.main, &stream, &other]) {
        step().unwrap();
        graph.replay(on).unwrap();
        assert_eq!(bytes_at(&context, ptr, 400), bits(seed, offset, 400), "seed {seed}, offset {offset}");
        assert_eq!(generator.offset().unwrap(), offset.wrapping_add(4));
    }
    drop(graph);
    context.finish();
}

/// test_graph_rng_concurrent_replay_on_different_streams: two graphs of one generator, many replays under way at once.
#[test]
fn concurrent_replays_do_not_disturb_each_other() {
    const ROUNDS: u64 = 10;
    const BYTES: u64 = 256;
    let context = TestContext::new("");
    let streams = [context.side_stream(), context.side_stream()];
    let generator = generator(&context);
    let graphs = streams.each_ref().map(|stream| filling(&context, &generator, BYTES / 4, stream));
    let copies = streams.each_ref().map(|stream| context.any().allocate(ROUNDS * BYTES, stream).unwrap());
    streams.iter().for_each(|stream| context.pause_stream(stream));
    for round in 0..ROUNDS {
        for at in 0..2 {
            let (graph, key) = &graphs[at];
            graph.replay(&streams[at]).unwrap();
            let to = copies[at].ptr().offset(round * BYTES);
            let from = graph.buffer(*key).unwrap().ptr();
            context.sim.copy(to.into(), from.into(), BYTES, streams[at].id()).unwrap();
        }
    }
    // The graph that was launched second runs first.
    streams.iter().rev().for_each(|stream| context.resume_stream(stream));
    for round in 0..ROUNDS {
        for (copies, number) in copies.iter().zip(0..) {
            let got = bytes_at(&context, copies.ptr().offset(round * BYTES), BYTES);
            assert_eq!(got, bits(SEED, 4 * (2 * round + number), BYTES), "round {round} of graph {number}");
        }
    }
    drop((graphs, copies));
    context.finish();
}

/// One graph, two threads: every replay has different numbers.
#[test]
fn threads_that_replay_one_graph_get_different_numbers() {
    const EACH: u64 = 20;
    let context = TestContext::new("");
    let stream = context.side_stream();
    let generator = generator(&context);
    let (graph, key) = filling(&context, &generator, 64, &stream);
    let from = graph.buffer(key).unwrap().ptr();
    let copies = context.any().allocate(2 * EACH * 256, &stream).unwrap();
    // On one stream: replays and copies of the graph's memory must be ordered.
    let turn = std::sync::Mutex::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..EACH {
                    let mut done = turn.lock().unwrap();
                    graph.replay(&stream).unwrap();
                    let to = copies.ptr().offset(*done * 256);
                    context.sim.copy(to.into(), from.into(), 256, stream.id()).unwrap();
                    *done += 1;
                }
            });
        }
        scope.spawn(|| (0..50).for_each(|_| assert_eq!(generator.seed(), SEED)));
    });
    let got = bytes_of(&context, &copies);
    for (round, got) in got.chunks(256).enumerate() {
        assert_eq!(got, bits(SEED, 4 * round as u64, 256), "round {round}");
    }
    drop((graph, copies));
    context.finish();
}

/// test_graphsafe_set_get_rng_state: a generator adopts other states in a capture, and each is advanced by what was
/// drawn from it.
#[test]
fn a_generator_can_adopt_states_in_a_capture() {
    let context = TestContext::new("");
    let stream = context.side_stream();
    let main = context.device().default_generator();
    main.set_seed(1).unwrap();
    let original = main.share();
    let states = [original.share(), original.duplicate().unwrap(), original.duplicate().unwrap()];
    states[2].set_seed(3).unwrap();
    let mut graph = graph(&context);
    let keys = graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let mut keys = Vec::new();
            for (state, draws) in states.iter().zip([1, 2, 3]) {
                context.device().default_generator().adopt(state)?;
                for _ in 0..draws {
                    let key = capture.allocate(64)?;
                    main.fill_bits(capture.buffer(key)?, &stream)?;
                    keys.push(key);
                }
            }
            main.adopt(&original)?;
            Ok(keys)
        })
        .unwrap();
    for round in 0..3 {
        graph.replay(&stream).unwrap();
        let places = [
            (1, 4 * round),
            (1, 8 * round),
            (1, 8 * round + 4),
            (3, 12 * round),
            (3, 12 * round + 4),
            (3, 12 * round + 8),
        ];
        for (&key, (seed, offset)) in keys.iter().zip(places) {
            assert_eq!(bytes_of(&context, graph.buffer(key).unwrap()), bits(seed, offset, 64), "round {round}");
        }
        let offsets = [&main, &states[0], &states[1], &states[2]].map(|state| state.offset().unwrap());
        assert_eq!(offsets, [4, 4, 8, 12].map(|share| share * (round + 1)));
    }
    drop(graph);
    context.finish();
}

/// test_memory_stats_of_multiple_generators_and_graphs: one slot for each generator and graph, and none for those that
/// draw nothing.
#[test]
fn each_generator_of_a_graph_has_one_slot() {
    let context = TestContext::new("");
    let stream = context.side_stream();
    let generators: Vec<Generator> = (0..3).map(|_| generator(&context)).collect();
    let mut graphs = Vec::new();
    for number in 1..=4 {
        let mut graph = graph(&context);
        graph
            .capture(&stream, CaptureOptions::default(), |_| {
                for generator in &generators {
                    for _ in 0..5 {
                        generator.reserve(4, &stream)?;
                    }
                }
                Ok(())
            })
            .unwrap();
        graphs.push(graph);
        assert_eq!(context.bytes_allocated(), number * 3 * 512);
    }
    for graph in &mut graphs {
        graph.replay(&context.main).unwrap();
        graph.reset().unwrap();
    }
    context.device().synchronize().unwrap();
    context.trim();
    assert_eq!((context.bytes_allocated(), context.bytes_reserved()), (0, 0));
    assert!(generators.iter().all(|generator| generator.offset().unwrap() == 4 * 20));
    drop(graphs);
    context.finish();
}

/// test_graph_rng_replay_record_stream: a graph can be dropped while its replays run, and its slot is not reused before
/// they are done.
#[test]
fn a_slot_is_not_reused_before_replays_are_done() {
    for keeps_pool in [false, true] {
        let context = TestContext::new("");
        let (stream, other) = (context.side_stream(), context.side_stream());
        let generator = generator(&context);
        let target = context.any().allocate(256, &stream).unwrap();
        let keeper = filling(&context, &generator, 1, &stream).0;
        let pool = keeps_pool.then(|| keeper.pool().unwrap());
        let mut graph = graph(&context);
        let options = CaptureOptions { pool, ..CaptureOptions::default() };
        graph.capture(&stream, options, |_| generator.fill_bits(&target, &stream)).unwrap();
        target.record_use(&other).unwrap();
        stream.synchronize().unwrap();
        context.pause_stream(&other);
        graph.replay(&other).unwrap();
        drop(graph);
        // A request from the same pool, for a stream that is not ordered with the replay.
        let request = warpool::memory::raw::Request::new(FIRST, stream.id(), 16);
        let request = pool.map_or(request, |pool| request.in_pool(pool.id()));
        let given: Vec<_> = (0..8).map(|_| context.allocator.allocate_raw(request).unwrap()).collect();
        given.iter().for_each(|&block| context.fill(block, 0xFF, &stream));
        stream.synchronize().unwrap();
        context.resume_stream(&other);
        assert_eq!(bytes_of(&context, &target), bits(SEED, 0, 256), "keeps_pool {keeps_pool}");
        context.free_all(given);
        drop((keeper, target));
        context.finish();
    }
}

/// test_graph_rng_after_failed_capture: draws of a failed capture do not count.
#[test]
fn draws_of_a_failed_capture_do_not_count() {
    let context = TestContext::new("");
    let stream = context.side_stream();
    let generator = generator(&context);
    let mut graph = graph(&context);
    let target = context.any().allocate(256, &stream).unwrap();
    let failed = graph.capture(&stream, CaptureOptions::default(), |_| {
        generator.fill_bits(&target, &stream)?;
        stream.synchronize()
    });
    assert!(matches!(failed, Err(Error::Driver(_) | Error::Graph(GraphError::CaptureFailed { .. }))), "{failed:?}");
    assert_eq!(
        context.sim.hazards().iter().map(|hazard| hazard.kind).collect::<Vec<_>>(),
        [HazardKind::CaptureInvalidated]
    );
    context.sim.clear_hazards();
    assert_eq!(generator.offset().unwrap(), 0);
    generator.fill_bits(&target, &stream).unwrap();
    assert_eq!(bytes_of(&context, &target), bits(SEED, 0, 256));
    graph.capture(&stream, CaptureOptions::default(), |_| generator.fill_bits(&target, &stream)).unwrap();
    graph.replay(&stream).unwrap();
    assert_eq!(bytes_of(&context, &target), bits(SEED, 4, 256));
    drop((graph, target));
    context.finish();
}

/// Errors of generators in a capture do not invalidate it.
#[test]
fn errors_of_generators_do_not_invalidate_a_capture() {
    let context = TestContext::new("");
    let stream = context.side_stream();
    let generator = generator(&context);
    let mut graph = graph(&context);
    let is_in_capture =
        |outcome: Result<()>| matches!(outcome, Err(Error::Generator(GeneratorError::InCapture { .. })));
    let key = graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            assert!(is_in_capture(generator.offset().map(drop)) && is_in_capture(generator.set_offset(4)));
            assert!(is_in_capture(generator.duplicate().map(drop)) && is_in_capture(generator.reseed().map(drop)));
            assert!(
                is_in_capture(generator.set_state(&[0; 16]))
                    && is_in_capture(Generator::new(&context.device()).map(drop))
            );
            assert!(matches!(generator.set_seed(1), Err(Error::Generator(GeneratorError::SeedInCapture { .. }))));
            generator.set_seed(SEED)?;
            let flag = capture.allocate(4)?;
            capture.fill(flag, warpool::driver::Pattern::U32(1), 1, &stream)?;
            let key = capture.allocate(64)?;
            generator.fill_bits(capture.buffer(key)?, &stream)?;
            capture.if_node(Flag::word(flag), |body| {
                let outcome = generator.fill_bits(body.buffer(key)?, body.stream());
                assert_eq!(outcome, Err(GeneratorError::InBody.into()));
                Ok(())
            })?;
            Ok(key)
        })
        .unwrap();
    graph.replay(&stream).unwrap();
    assert_eq!(bytes_of(&context, graph.buffer(key).unwrap()), bits(SEED, 0, 64));
    assert_eq!(generator.offset().unwrap(), 4);
    drop(graph);
    context.finish();
}

/// Two generators in a graph; whichever call of a replay fails, both are as before.
#[test]
fn a_replay_that_fails_draws_nothing() {
    let faulty = Arc::new(Faulty::new(Arc::new(SimDriver::new(SimConfig::default())), FaultPlan::new()));
    let instance = Instance::new(faulty.clone()).unwrap();
    let device = instance.device(0).unwrap();
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let stream = device.pool_stream().unwrap();
    let generators = [(); 2].map(|()| Generator::new(&device).unwrap());
    let target = allocator.allocate(64, &stream).unwrap();
    let mut graph = Graph::new(&allocator, &device, GraphOptions::default()).unwrap();
    graph
        .capture(&stream, CaptureOptions::default(), |_| {
            generators.iter().try_for_each(|generator| generator.fill_bits(&target, &stream))
        })
        .unwrap();
    for (call, nth) in [(Call::GraphExecSetKernel, 1), (Call::GraphExecSetKernel, 2), (Call::GraphLaunch, 1)] {
        faulty.set_plan(FaultPlan::new().fail_nth(call, nth, ErrorCode::OutOfMemory));
        graph.replay(&stream).unwrap_err();
        assert_eq!(generators.each_ref().map(|generator| generator.offset().unwrap()), [0, 0], "{call:?} {nth}");
    }
    faulty.clear_plan();
    graph.replay(&stream).unwrap();
    assert_eq!(generators.each_ref().map(|generator| generator.offset().unwrap()), [4, 4]);
    instance.driver().stream_synchronize(stream.id()).unwrap();
}

/// Random programs over streams and generators, captured and replayed, compared with the same program run eagerly.
#[test]
fn random_programs_draw_the_same_captured_and_eager() {
    for seed in 0..300 {
        let mut words = philox::words(seed, 0, 0);
        let mut below = move |sides: u32| words.next().unwrap() % sides;
        let context = TestContext::with_config(SimConfig::default().with_seed(seed), "");
        let (stream, side) = (context.side_stream(), context.side_stream());
        let make = || {
            let first = generator(&context);
            let second = Generator::new(&context.device()).unwrap();
            [first.share(), first, second]
        };
        let (eager, captured) = (make(), make());
        // (generator, side stream, words); streams are joined at the end.
        let draws: Vec<(usize, bool, u64)> =
            (0..1 + below(6)).map(|_| (below(3) as usize, below(2) == 1, 1 + u64::from(below(40)))).collect();
        let run = |generators: &[Generator; 3], blocks: &[DeviceBlock]| -> Result<()> {
            side.wait_stream(&stream)?;
            for (&(who, on_side, _), block) in draws.iter().zip(blocks) {
                generators[who].fill_bits(block, if on_side { &side } else { &stream })?;
            }
            stream.wait_stream(&side)
        };
        let allocate = |&(_, on_side, words): &(usize, bool, u64)| {
            context.any().allocate(4 * words, if on_side { &side } else { &stream }).unwrap()
        };
        let [own, graphs]: [Vec<DeviceBlock>; 2] = [(); 2].map(|()| draws.iter().map(allocate).collect());
        let mut graph = graph(&context);
        let options = CaptureOptions { mode: CaptureMode::ThreadLocal, ..CaptureOptions::default() };
        graph.capture(&stream, options, |_| run(&captured, &graphs)).unwrap();
        for round in 0..1 + below(3) {
            let pause = u64::from(below(9));
            let who = below(3) as usize;
            for generators in [&eager, &captured] {
                assert!(matches!(generators[who].reserve(pause, &stream), Ok(Reservation::Immediate { .. })));
            }
            run(&eager, &own).unwrap();
            graph.replay(&stream).unwrap();
            for (at, (own, graphs)) in own.iter().zip(&graphs).enumerate() {
                assert_eq!(
                    bytes_of(&context, own),
                    bytes_of(&context, graphs),
                    "seed {seed}, round {round}, draw {at}"
                );
            }
            let states = [&eager, &captured].map(|generators| generators.each_ref().map(Generator::state));
            assert_eq!(states[0], states[1], "seed {seed}, round {round}");
        }
        drop((graph, own, graphs));
        assert_eq!(context.sim.hazards(), [], "seed {seed}");
        context.finish();
    }
}

/// A user's kernel that draws: its reservation is passed to the scope's launch, and only in the capture that it was
/// made in.
#[test]
fn a_users_kernel_draws_in_a_capture() {
    static OWN: KernelSource = KernelSource {
        name: "draws",
        cuda: concat!(
            warpool::philox_cuda!(),
            r#"extern "C" __global__ void draw(
                unsigned *to, const unsigned long long *slot, unsigned long long seed, unsigned long long offset) {
                *to = warpool_words(warpool_position(slot, seed, offset), 0).x;
            }"#
        ),
        host_kernels: &[HostKernel::new("draw", |scope| {
            let (to, (seed, offset)) = (scope.arg_ptr(0)?, position(scope, 1)?);
            scope.write_u32(to, &[philox::block(seed, 0, offset)[0]])
        })],
    };
    let context = TestContext::new("");
    let stream = context.side_stream();
    let generator = generator(&context);
    let module = context.sim.module_load(FIRST, &OWN).unwrap();
    let draw = context.sim.function_get(module, "draw").unwrap();
    let capture_into = |graph: &mut Graph| {
        graph.capture(&stream, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4)?;
            let reserved = generator.reserve(4, &stream)?;
            let [slot, seed, offset] = reserved.graph_args();
            capture_kernel(capture, draw, &[key.into(), slot, seed, offset], &stream)?;
            Ok((key, slot))
        })
    };
    let (mut graph, mut other) = (graph(&context), graph(&context));
    let (key, slot) = capture_into(&mut graph).unwrap();
    for round in 0..3 {
        graph.replay(&stream).unwrap();
        let word = philox::block(SEED, 0, 4 * round)[0];
        assert_eq!(bytes_of(&context, graph.buffer(key).unwrap()), word.to_le_bytes(), "round {round}");
    }
    let stolen = other.capture(&stream, CaptureOptions::default(), |capture| {
        let key = capture.allocate(4)?;
        capture_kernel(capture, draw, &[key.into(), slot, 0_u64.into(), 0_u64.into()], &stream)
    });
    assert_eq!(stolen, Err(Error::Graph(GraphError::ForeignSlot)));
    capture_into(&mut other).unwrap();
    drop((graph, other));
    context.device().synchronize().unwrap();
    context.sim.module_unload(module).unwrap();
    context.finish();
}
