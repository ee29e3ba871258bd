//! Generators in captures that are begun and ended step by step, so that each step can fail on its own. Whole graphs
//! are tested in `tests/libraries/generator_graph.rs`.

use std::sync::Arc;

use warpool_driver::decorate::{FaultPlan, Faulty};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{Call, CaptureId, CaptureMode, CaptureState, DevicePtr, Driver, ErrorCode, GraphExecId};

use super::{CapturedGenerators, Generator, GeneratorError, Reservation, Target, philox};
use crate::capture::{CaptureRecord, StreamCapture};
use crate::memory::{Allocate, CachingAllocator, CaptureMemory, DeviceAllocator, DeviceBlock, Route, Settings};
use crate::{Device, Error, Instance, Result, Stream, launch};

struct Fixture {
    sim: Arc<SimDriver>,
    faulty: Arc<Faulty>,
    instance: Instance,
    device: Device,
    allocator: Arc<dyn DeviceAllocator>,
    generator: Generator,
}

/// An active capture.
struct Capture<'a> {
    fixture: &'a Fixture,
    id: CaptureId,
    stream: Stream,
    record: Arc<CaptureRecord>,
}

/// The graph of a finished capture.
struct Captured {
    exec: GraphExecId,
    generators: CapturedGenerators,
}

impl Fixture {
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
        self.instance.count_capture();
        pools.capture_began(device).unwrap();
        self.driver().capture_begin(stream.id(), CaptureMode::ThreadLocal).unwrap();
        let CaptureState::Active(id) = self.driver().capture_state(stream.id()).unwrap() else { panic!("begun") };
        pools.begin_routing(device, pool, Route::Capture(id)).unwrap();
        let memory = CaptureMemory { allocator: Arc::clone(&self.allocator), pool };
        let record = Arc::new(CaptureRecord::new(device, memory));
        self.instance.captures().insert(StreamCapture { id, record: Arc::clone(&record), in_body: false });
        Capture { fixture: self, id, stream: stream.clone(), record }
    }

    /// Fills the block, eagerly or captured.
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
        let expected: Vec<u32> = (0..).flat_map(|at| philox::block(seed, at, offset)).take(count).collect();
        assert_eq!(self.words(block.ptr(), count), expected, "seed {seed}, offset {offset}");
    }

    fn finish(self) {
        self.device.synchronize().unwrap();
        assert_eq!(self.sim.hazards(), []);
    }
}

impl Capture<'_> {
    fn end(self) -> Captured {
        let fixture = self.fixture;
        let graph = fixture.driver().capture_end(self.stream.id()).unwrap();
        let pools = fixture.allocator.pools().unwrap();
        fixture.instance.captures().remove(self.id);
        pools.end_routing(fixture.device.id(), CaptureMemory::of(&self.record).pool).unwrap();
        pools.capture_ended(fixture.device.id()).unwrap();
        fixture.instance.uncount_capture();
        let exec = fixture.driver().graph_instantiate(graph, Default::default()).unwrap();
        Captured { exec, generators: self.record.take_slots().take() }
    }
}

impl Captured {
    fn prepare(&self, fixture: &Fixture) -> Result<()> {
        self.generators.prepare(fixture.driver(), self.exec)
    }
}

/// Replays draw from the generator's position, and advance it as the same work done eagerly would.
#[test]
fn replays_draw_what_eager_work_would() {
    let fixture = Fixture::new();
    let stream = fixture.stream();
    let (first, second) = (fixture.block(1000, &stream), fixture.block(7, &stream));
    let capture = fixture.begin(&stream);
    fixture.fill(&first, &stream);
    fixture.fill(&second, &stream);
    let graph = capture.end();
    assert_eq!(fixture.generator.offset().unwrap(), 0, "nothing is drawn by a capture");
    assert_eq!(graph.generators.seed_kernels_by_generator(), [1]);
    for round in 0..3 {
        fixture.replay(&graph, &stream);
        assert_eq!(fixture.generator.offset().unwrap(), 12 * round + 8);
        fixture.expect(&first, 11, 12 * round);
        fixture.expect(&second, 11, 12 * round + 4);
        // Eager draws in between continue from there.
        fixture.fill(&second, &stream);
        fixture.expect(&second, 11, 12 * round + 8);
    }
    fixture.generator.set_seed(99).unwrap();
    fixture.replay(&graph, &fixture.device.default_stream().unwrap());
    fixture.expect(&first, 99, 0);
    fixture.expect(&second, 99, 4);
    fixture.finish();
}

/// Launches that are queued keep the numbers that they were launched with.
#[test]
fn queued_launches_keep_their_numbers() {
    let fixture = Fixture::new();
    let (stream, other) = (fixture.stream(), fixture.stream());
    let [a, b] = [&stream, &other].map(|stream| fixture.block(64, stream));
    let [first, second] = [(&a, &stream), (&b, &other)].map(|(block, stream)| {
        let capture = fixture.begin(stream);
        fixture.fill(block, stream);
        capture.end()
    });
    let copies = fixture.block(3 * 64, &stream);
    fixture.sim.pause_stream(stream.id()).unwrap();
    fixture.sim.pause_stream(other.id()).unwrap();
    for round in 0..3 {
        fixture.replay(&first, &stream);
        let to = copies.ptr().offset(256 * round);
        fixture.driver().copy(to.into(), a.ptr().into(), 256, stream.id()).unwrap();
        fixture.replay(&second, &other);
    }
    for held in [&other, &stream] {
        fixture.sim.run_paused(held.id(), u64::MAX).unwrap();
        fixture.sim.resume_stream(held.id()).unwrap();
        held.synchronize().unwrap();
    }
    for round in 0..3_u64 {
        let expected: Vec<u32> = (0..16).flat_map(|at| philox::block(11, at, 8 * round)).collect();
        assert_eq!(fixture.words(copies.ptr().offset(256 * round), 64), expected, "round {round}");
    }
    fixture.expect(&b, 11, 8 * 2 + 4);
    fixture.finish();
}

/// Streams that join a capture have seed kernels and slots of their own, and count to the same state.
#[test]
fn one_seed_kernel_per_stream_and_generator() {
    let fixture = Fixture::new();
    let (stream, side) = (fixture.stream(), fixture.stream());
    let [a, b] = [&stream, &side].map(|stream| fixture.block(16, stream));
    let before = fixture.allocator.stats(fixture.device.id()).unwrap();
    let other = fixture.generator.duplicate().unwrap();
    let share = fixture.generator.share();
    let capture = fixture.begin(&stream);
    side.wait_stream(&stream).unwrap();
    fixture.fill(&a, &stream);
    share.fill_bits(&b, &side).unwrap();
    fixture.fill(&a, &stream);
    stream.wait_stream(&side).unwrap();
    other.reserve(9, &stream).unwrap();
    other.reserve(1, &stream).unwrap();
    let graph = capture.end();
    assert_eq!(graph.generators.seed_kernels_by_generator(), [2, 1], "a shared state is one state");
    let after = fixture.allocator.stats(fixture.device.id()).unwrap();
    let taken = after.allocated_bytes.all.current - before.allocated_bytes.all.current;
    assert_eq!(taken, 3 * 512, "one slot for each, rounded by the allocator");
    fixture.replay(&graph, &stream);
    fixture.expect(&a, 11, 8);
    fixture.expect(&b, 11, 4);
    assert_eq!((share.offset().unwrap(), other.offset().unwrap()), (12, 16));
    drop(graph);
    fixture.finish();
}

/// A graph that draws no numbers is not updated at replays, and advances no generator.
#[test]
fn a_graph_without_draws_is_not_updated() {
    let fixture = Fixture::new();
    let stream = fixture.stream();
    let block = fixture.block(16, &stream);
    let capture = fixture.begin(&stream);
    fixture.generator.fill_bits(Target::part(&block, 0, 0), &stream).unwrap();
    assert!(capture.record.with(|captured: &mut CapturedGenerators| captured.is_empty()));
    let Reservation::Captured { intragraph: 0, .. } = fixture.generator.reserve(0, &stream).unwrap() else {
        panic!("captured")
    };
    let graph = capture.end();
    let calls = fixture.sim.call_count(Call::GraphExecSetKernel);
    fixture.replay(&graph, &stream);
    assert_eq!(fixture.sim.call_count(Call::GraphExecSetKernel), calls);
    assert_eq!(fixture.generator.offset().unwrap(), 0);
    fixture.finish();
}

/// A failed launch undoes its draw, unless numbers were drawn since.
#[test]
fn a_failed_launch_undoes_its_draw() {
    let fixture = Fixture::new();
    let stream = fixture.stream();
    let block = fixture.block(16, &stream);
    let capture = fixture.begin(&stream);
    fixture.fill(&block, &stream);
    let graph = capture.end();
    graph.prepare(&fixture).unwrap();
    graph.generators.undo();
    assert_eq!(fixture.generator.offset().unwrap(), 0);
    graph.generators.undo();
    graph.prepare(&fixture).unwrap();
    fixture.fill(&block, &stream);
    graph.generators.undo();
    assert_eq!(fixture.generator.offset().unwrap(), 8);
    // The update of the seed kernel fails: the generator is as before.
    fixture.faulty.set_plan(FaultPlan::new().fail_nth(Call::GraphExecSetKernel, 1, ErrorCode::OutOfMemory));
    graph.prepare(&fixture).unwrap_err();
    assert_eq!(fixture.generator.offset().unwrap(), 8);
    graph.generators.undo();
    assert_eq!(fixture.generator.offset().unwrap(), 8, "what an earlier replay drew is not undone");
    fixture.replay(&graph, &stream);
    fixture.expect(&block, 11, 8);
    fixture.finish();
}

/// Calls without a meaning while the thread's current stream captures.
#[test]
fn state_changes_are_errors_while_the_current_stream_captures() {
    let fixture = Fixture::new();
    let (stream, generator) = (fixture.stream(), &fixture.generator);
    let saved = generator.state();
    let capture = fixture.begin(&stream);
    let calls = || -> Vec<Result<()>> {
        vec![
            Generator::new(&fixture.device).map(drop),
            generator.offset().map(drop),
            generator.set_offset(4),
            generator.reseed().map(drop),
            generator.duplicate().map(drop),
            generator.set_state(&saved),
        ]
    };
    {
        let _current = stream.enter();
        for outcome in calls() {
            match outcome {
                Err(Error::Generator(GeneratorError::InCapture { state: CaptureState::Active(id), .. })) => {
                    assert_eq!(id, capture.id);
                }
                other => panic!("not an error of the capture: {other:?}"),
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
    // Another thread, or this one on another stream, may.
    assert!(calls().iter().all(Result::is_ok));
    generator.set_seed(11).unwrap();
    capture.end();
    let _current = stream.enter();
    assert!(calls().iter().all(Result::is_ok));
    fixture.finish();
}

#[test]
fn draws_in_a_conditional_body_are_errors() {
    let fixture = Fixture::new();
    let stream = fixture.stream();
    let block = fixture.block(16, &stream);
    let capture = fixture.begin(&stream);
    let body = StreamCapture { id: capture.id, record: Arc::clone(&capture.record), in_body: true };
    fixture.instance.captures().insert(body);
    let launches = fixture.sim.call_count(Call::KernelLaunch);
    let error = fixture.generator.fill_bits(&block, &stream).unwrap_err();
    assert_eq!(error, GeneratorError::InBody.into());
    assert!(error.to_string().contains("not supported in data-dependent bodies"));
    assert_eq!(fixture.sim.call_count(Call::KernelLaunch), launches);
    capture.end();
    fixture.finish();
}

/// Whichever call fails at the first draw in a capture, the graph owns the memory that it needs, and the next draw
/// works.
#[test]
fn a_failed_first_draw_can_be_repeated() {
    for (call, nth) in [(Call::KernelLaunch, 1), (Call::KernelLaunch, 2), (Call::CaptureDependencies, 1)] {
        let fixture = Fixture::new();
        let stream = fixture.stream();
        let block = fixture.block(16, &stream);
        let capture = fixture.begin(&stream);
        fixture.faulty.set_plan(FaultPlan::new().fail_nth(call, nth, ErrorCode::OutOfMemory));
        let error = fixture.generator.fill_bits(&block, &stream).unwrap_err();
        assert_eq!(error.driver().map(|error| error.code), Some(ErrorCode::OutOfMemory), "{call:?}: {error}");
        fixture.fill(&block, &stream);
        let graph = capture.end();
        fixture.replay(&graph, &stream);
        fixture.expect(&block, 11, 0);
        assert_eq!(fixture.generator.offset().unwrap(), 4, "{call:?} #{nth}");
        assert_eq!(graph.generators.unused_slots(), usize::from(call == Call::CaptureDependencies));
        fixture.finish();
    }
}

#[test]
fn a_graph_counts_its_draws_in_64_bits() {
    let fixture = Fixture::new();
    let stream = fixture.stream();
    let capture = fixture.begin(&stream);
    let increment = u64::MAX - 3;
    fixture.generator.reserve(increment, &stream).unwrap();
    let error = fixture.generator.reserve(8, &stream).unwrap_err();
    assert_eq!(error, GeneratorError::Increment { increment: 8 }.into());
    assert!(matches!(
        fixture.generator.reserve(0, &stream),
        Ok(Reservation::Captured { intragraph, .. }) if intragraph == increment
    ));
    capture.end();
    fixture.finish();
}

/// Threads that draw on streams of one capture get every number once.
#[test]
fn threads_of_one_capture_draw_different_numbers() {
    let fixture = Fixture::new();
    let stream = fixture.stream();
    let sides: Vec<Stream> = (0..4).map(|_| fixture.stream()).collect();
    let capture = fixture.begin(&stream);
    sides.iter().for_each(|side| side.wait_stream(&stream).unwrap());
    let mut drawn: Vec<u64> = std::thread::scope(|scope| {
        let draw = |side: &Stream| match fixture.generator.reserve(4, side).unwrap() {
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
    assert_eq!(graph.generators.seed_kernels_by_generator(), [4]);
    fixture.replay(&graph, &stream);
    assert_eq!(fixture.generator.offset().unwrap(), 800);
    fixture.finish();
}
