//! Generators in captures that are begun and ended by hand, so that each step can go wrong on its own. Whole graphs are
//! in `tests/generator_graph.rs`.

use std::sync::{Arc, Mutex};

use warpool_driver::decorate::{FaultPlan, Faulty};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{Call, CaptureId, CaptureMode, CaptureState, DevicePtr, Driver, ErrorCode, GraphExecId};

use super::{Generator, GeneratorError, GeneratorInCapture, Reservation, philox};
use crate::capture::{CaptureRecord, Site};
use crate::memory::{Allocate, CachingAllocator, DeviceAllocator, DeviceBlock, Route, Settings};
use crate::{Device, Error, Instance, Result, Stream, launch, lock};

struct Bench {
    sim: Arc<SimDriver>,
    faulty: Arc<Faulty>,
    instance: Instance,
    device: Device,
    allocator: Arc<dyn DeviceAllocator>,
    generator: Generator,
}

/// A capture under way.
struct Capture<'a> {
    bench: &'a Bench,
    id: CaptureId,
    stream: Stream,
    record: Arc<CaptureRecord>,
}

/// What came of it.
struct Captured {
    exec: GraphExecId,
    generators: Vec<GeneratorInCapture>,
    record: Arc<CaptureRecord>,
}

impl Bench {
    fn new() -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let generator = Generator::new(&device).unwrap();
        generator.set_seed(11).unwrap();
        Self { sim, faulty, instance, device, allocator, generator }
    }

    fn driver(&self) -> &dyn Driver {
        &*self.faulty
    }

    fn stream(&self) -> Stream {
        self.device.pool_stream().unwrap()
    }

    fn block(&self, words: u64, stream: &Stream) -> DeviceBlock {
        self.allocator.allocate(4 * words, stream).unwrap()
    }

    fn begin(&self, stream: &Stream) -> Capture<'_> {
        let (pools, device) = (self.allocator.pools().unwrap(), self.device.id());
        let pool = pools.create_graph_pool(device).unwrap();
        self.instance.captures().begins();
        pools.capture_began(device).unwrap();
        self.driver().capture_begin(stream.id(), CaptureMode::ThreadLocal).unwrap();
        let CaptureState::Active(id) = self.driver().capture_state(stream.id()).unwrap() else { panic!("begun") };
        pools.begin_routing(device, pool, Route::Capture(id)).unwrap();
        let (allocator, used) = (Arc::clone(&self.allocator), Mutex::default());
        let record = Arc::new(CaptureRecord { device, allocator, pool, used });
        self.instance.captures().insert(id, Site { record: Arc::clone(&record), in_body: false });
        Capture { bench: self, id, stream: stream.clone(), record }
    }

    /// Fills the block, as it is done eagerly or captured.
    fn fill(&self, block: &DeviceBlock, stream: &Stream) {
        self.generator.fill_bits(block, stream).unwrap();
    }

    fn replay(&self, graph: &Captured, stream: &Stream) {
        graph.prepare(self).unwrap();
        launch::graph(self.driver(), graph.exec, stream.id()).unwrap();
    }

    fn words(&self, ptr: DevicePtr, count: usize) -> Vec<u32> {
        self.device.synchronize().unwrap();
        let mut bytes = vec![0; 4 * count];
        self.driver().download(self.device.id(), ptr, &mut bytes).unwrap();
        bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
    }

    #[track_caller]
    fn expect(&self, block: &DeviceBlock, seed: u64, offset: u64) {
        let count = (block.bytes() / 4) as usize;
        let want: Vec<u32> = (0..).flat_map(|at| philox::block(seed, at, offset)).take(count).collect();
        assert_eq!(self.words(block.ptr(), count), want, "seed {seed}, offset {offset}");
    }

    fn finish(self) {
        self.device.synchronize().unwrap();
        assert_eq!(self.sim.hazards(), []);
    }
}

impl Capture<'_> {
    fn end(self) -> Captured {
        let bench = self.bench;
        let graph = bench.driver().capture_end(self.stream.id()).unwrap();
        let pools = bench.allocator.pools().unwrap();
        bench.instance.captures().remove(self.id);
        pools.end_routing(bench.device.id(), self.record.pool).unwrap();
        pools.capture_ended(bench.device.id()).unwrap();
        bench.instance.captures().ended();
        let exec = bench.driver().graph_instantiate(graph, Default::default()).unwrap();
        let generators = std::mem::take(&mut lock(&self.record.used).generators);
        Captured { exec, generators, record: self.record }
    }
}

impl Captured {
    fn prepare(&self, bench: &Bench) -> Result<()> {
        self.generators.iter().try_for_each(|generator| generator.prepare(bench.driver(), self.exec))
    }
}

/// Replays draw from where the generator is, and leave it where the same work done eagerly would.
#[test]
fn replays_are_the_eager_sequence() {
    let bench = Bench::new();
    let stream = bench.stream();
    let (first, second) = (bench.block(1000, &stream), bench.block(7, &stream));
    let capture = bench.begin(&stream);
    bench.fill(&first, &stream);
    bench.fill(&second, &stream);
    let graph = capture.end();
    assert_eq!(bench.generator.offset().unwrap(), 0, "nothing is drawn by a capture");
    assert_eq!(graph.generators.len(), 1);
    for round in 0..3 {
        bench.replay(&graph, &stream);
        assert_eq!(bench.generator.offset().unwrap(), 12 * round + 8);
        bench.expect(&first, 11, 12 * round);
        bench.expect(&second, 11, 12 * round + 4);
        // Eager use in between goes on from there.
        bench.fill(&second, &stream);
        bench.expect(&second, 11, 12 * round + 8);
    }
    bench.generator.set_seed(99).unwrap();
    bench.replay(&graph, &bench.device.default_stream().unwrap());
    bench.expect(&first, 99, 0);
    bench.expect(&second, 99, 4);
    bench.finish();
}

/// Launches that wait in a queue keep the numbers that they were launched with.
#[test]
fn launches_under_way_keep_their_numbers() {
    let bench = Bench::new();
    let (stream, other) = (bench.stream(), bench.stream());
    let [a, b] = [&stream, &other].map(|stream| bench.block(64, stream));
    let [first, second] = [(&a, &stream), (&b, &other)].map(|(block, stream)| {
        let capture = bench.begin(stream);
        bench.fill(block, stream);
        capture.end()
    });
    let copies = bench.block(3 * 64, &stream);
    bench.sim.pause_stream(stream.id()).unwrap();
    bench.sim.pause_stream(other.id()).unwrap();
    for round in 0..3 {
        bench.replay(&first, &stream);
        let to = copies.ptr().offset(256 * round);
        bench.driver().copy(to.into(), a.ptr().into(), 256, stream.id()).unwrap();
        bench.replay(&second, &other);
    }
    for held in [&other, &stream] {
        bench.sim.run_paused(held.id(), u64::MAX).unwrap();
        bench.sim.resume_stream(held.id()).unwrap();
        held.synchronize().unwrap();
    }
    for round in 0..3_u64 {
        let want: Vec<u32> = (0..16).flat_map(|at| philox::block(11, at, 8 * round)).collect();
        assert_eq!(bench.words(copies.ptr().offset(256 * round), 64), want, "round {round}");
    }
    bench.expect(&b, 11, 8 * 2 + 4);
    bench.finish();
}

/// Streams that join a capture have heads and slots of their own, and count to the same state.
#[test]
fn one_head_per_stream_and_generator() {
    let bench = Bench::new();
    let (stream, side) = (bench.stream(), bench.stream());
    let [a, b] = [&stream, &side].map(|stream| bench.block(16, stream));
    let before = bench.allocator.stats(bench.device.id()).unwrap();
    let other = bench.generator.duplicate().unwrap();
    let share = bench.generator.share();
    let capture = bench.begin(&stream);
    side.wait_stream(&stream).unwrap();
    bench.fill(&a, &stream);
    share.fill_bits(&b, &side).unwrap();
    bench.fill(&a, &stream);
    stream.wait_stream(&side).unwrap();
    other.reserve(9, &stream).unwrap();
    other.reserve(1, &stream).unwrap();
    let graph = capture.end();
    let heads: Vec<usize> = graph.generators.iter().map(|entry| entry.heads.len()).collect();
    assert_eq!(heads, [2, 1], "a shared state is one state");
    let after = bench.allocator.stats(bench.device.id()).unwrap();
    let taken = after.allocated_bytes.all.current - before.allocated_bytes.all.current;
    assert_eq!(taken, 3 * 512, "one slot for each, rounded by the allocator");
    bench.replay(&graph, &stream);
    bench.expect(&a, 11, 8);
    bench.expect(&b, 11, 4);
    assert_eq!((share.offset().unwrap(), other.offset().unwrap()), (12, 16));
    drop(graph);
    bench.finish();
}

/// What a graph never draws it is not told, and nothing moves.
#[test]
fn a_graph_without_numbers_needs_nothing() {
    let bench = Bench::new();
    let stream = bench.stream();
    let block = bench.block(16, &stream);
    let capture = bench.begin(&stream);
    bench.generator.fill_bits((block.ptr(), 0), &stream).unwrap();
    assert!(lock(&capture.record.used).generators.is_empty());
    let Reservation::Captured { intragraph: 0, .. } = bench.generator.reserve(0, &stream).unwrap() else {
        panic!("captured")
    };
    let graph = capture.end();
    let calls = bench.sim.call_count(Call::GraphExecSetKernel);
    bench.replay(&graph, &stream);
    assert_eq!(bench.sim.call_count(Call::GraphExecSetKernel), calls);
    assert_eq!(bench.generator.offset().unwrap(), 0);
    bench.finish();
}

/// A launch that failed takes its numbers back, unless somebody has drawn since.
#[test]
fn taking_back() {
    let bench = Bench::new();
    let stream = bench.stream();
    let block = bench.block(16, &stream);
    let capture = bench.begin(&stream);
    bench.fill(&block, &stream);
    let graph = capture.end();
    graph.prepare(&bench).unwrap();
    graph.generators[0].take_back();
    assert_eq!(bench.generator.offset().unwrap(), 0);
    graph.generators[0].take_back();
    graph.prepare(&bench).unwrap();
    bench.fill(&block, &stream);
    graph.generators[0].take_back();
    assert_eq!(bench.generator.offset().unwrap(), 8);
    // The exchange itself fails: as before.
    bench.faulty.set_plan(FaultPlan::new().fail_nth(Call::GraphExecSetKernel, 1, ErrorCode::OutOfMemory));
    graph.prepare(&bench).unwrap_err();
    assert_eq!(bench.generator.offset().unwrap(), 8);
    graph.generators[0].take_back();
    assert_eq!(bench.generator.offset().unwrap(), 8, "what an earlier replay took is not taken back");
    bench.replay(&graph, &stream);
    bench.expect(&block, 11, 8);
    bench.finish();
}

/// What has no meaning while the thread's current stream captures.
#[test]
fn refused_during_a_capture() {
    let bench = Bench::new();
    let (stream, generator) = (bench.stream(), &bench.generator);
    let saved = generator.state();
    let capture = bench.begin(&stream);
    let tries = || -> Vec<Result<()>> {
        vec![
            Generator::new(&bench.device).map(drop),
            generator.offset().map(drop),
            generator.set_offset(4),
            generator.reseed().map(drop),
            generator.duplicate().map(drop),
            generator.set_state(&saved),
        ]
    };
    {
        let _current = stream.enter();
        for outcome in tries() {
            match outcome {
                Err(Error::Generator(GeneratorError::InCapture { state: CaptureState::Active(id), .. })) => {
                    assert_eq!(id, capture.id);
                }
                other => panic!("refused: {other:?}"),
            }
        }
        let text = generator.set_offset(8).unwrap_err().to_string();
        assert!(text.starts_with("cannot set the offset during graph capture"), "{text}");
        // test_graph_manual_seed_mismatch_raises
        generator.set_seed(11).unwrap();
        let error = generator.set_seed(12).unwrap_err();
        assert_eq!(error, GeneratorError::SeedInCapture { wanted: 12, seed: 11 }.into());
        assert_eq!((generator.seed(), generator.state()), (11, saved));
        assert!(generator.share().shares_with(generator));
    }
    // Another thread, or this one on another stream, is free.
    assert!(tries().iter().all(Result::is_ok));
    generator.set_seed(11).unwrap();
    capture.end();
    let _current = stream.enter();
    assert!(tries().iter().all(Result::is_ok));
    bench.finish();
}

#[test]
fn refused_in_a_body() {
    let bench = Bench::new();
    let stream = bench.stream();
    let block = bench.block(16, &stream);
    let capture = bench.begin(&stream);
    let site = Site { record: Arc::clone(&capture.record), in_body: true };
    bench.instance.captures().insert(capture.id, site);
    let launches = bench.sim.call_count(Call::KernelLaunch);
    let error = bench.generator.fill_bits(&block, &stream).unwrap_err();
    assert_eq!(error, GeneratorError::InBody.into());
    assert!(error.to_string().contains("not supported in data-dependent bodies"));
    assert_eq!(bench.sim.call_count(Call::KernelLaunch), launches);
    capture.end();
    bench.finish();
}

/// Whatever fails at a first draw in a capture, the graph has what it needs, and a second try works.
#[test]
fn failures_at_the_first_draw() {
    for (call, nth) in [(Call::KernelLaunch, 1), (Call::KernelLaunch, 2), (Call::CaptureDependencies, 1)] {
        let bench = Bench::new();
        let stream = bench.stream();
        let block = bench.block(16, &stream);
        let capture = bench.begin(&stream);
        bench.faulty.set_plan(FaultPlan::new().fail_nth(call, nth, ErrorCode::OutOfMemory));
        let error = bench.generator.fill_bits(&block, &stream).unwrap_err();
        assert_eq!(error.driver().map(|error| error.code), Some(ErrorCode::OutOfMemory), "{call:?}: {error}");
        bench.fill(&block, &stream);
        let graph = capture.end();
        bench.replay(&graph, &stream);
        bench.expect(&block, 11, 0);
        assert_eq!(bench.generator.offset().unwrap(), 4, "{call:?} #{nth}");
        assert_eq!(lock(&graph.record.used).kept.len(), usize::from(call == Call::CaptureDependencies));
        bench.finish();
    }
}

/// More than a graph can count.
#[test]
fn too_much_for_a_graph() {
    let bench = Bench::new();
    let stream = bench.stream();
    let capture = bench.begin(&stream);
    let increment = u64::MAX - 3;
    bench.generator.reserve(increment, &stream).unwrap();
    let error = bench.generator.reserve(8, &stream).unwrap_err();
    assert_eq!(error, GeneratorError::Increment { increment: 8 }.into());
    assert!(matches!(
        bench.generator.reserve(0, &stream),
        Ok(Reservation::Captured { intragraph, .. }) if intragraph == increment
    ));
    capture.end();
    bench.finish();
}

/// Threads that draw on streams of one capture: every number once.
#[test]
fn threads_in_one_capture() {
    let bench = Bench::new();
    let stream = bench.stream();
    let sides: Vec<Stream> = (0..4).map(|_| bench.stream()).collect();
    let capture = bench.begin(&stream);
    sides.iter().for_each(|side| side.wait_stream(&stream).unwrap());
    let mut drawn: Vec<u64> = std::thread::scope(|scope| {
        let draw = |side: &Stream| match bench.generator.reserve(4, side).unwrap() {
            Reservation::Captured { intragraph, .. } => intragraph,
            immediate => panic!("it captures: {immediate:?}"),
        };
        let work = |side| scope.spawn(move || (0..50).map(|_| draw(side)).collect::<Vec<_>>());
        let threads: Vec<_> = sides.iter().map(work).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    drawn.sort_unstable();
    assert_eq!(drawn, (0..200).map(|number| 4 * number).collect::<Vec<_>>());
    sides.iter().for_each(|side| stream.wait_stream(side).unwrap());
    let graph = capture.end();
    assert_eq!(graph.generators[0].heads.len(), 4);
    bench.replay(&graph, &stream);
    assert_eq!(bench.generator.offset().unwrap(), 800);
    bench.finish();
}
