//! `GraphedCallable`: the order of captures, their memory, which graph a call replays, and why it runs without one.
//! The simulated device checks the order of all work: a test ends with [`CallableFixture::finish`].

use std::cell::RefCell;
use std::sync::Arc;

use crate::common::launch::launch_kernel;
use crate::common::memory::{FIRST, KIB, MIB, TestContext};
use warpool::driver::sim::{HazardKind, ObjectCounts, SimConfig};
use warpool::driver::{
    Call as DriverCall, Copies as _, DevicePtr, ErrorCode, FunctionId, HostKernel, KernelArg, KernelSource,
    Kernels as _, Pattern,
};
use warpool::graph::{
    Call, Callable, CaptureOptions, Fallback, Graph, GraphError, GraphOptions, GraphedCallable, GraphedOptions, Input,
};
use warpool::memory::{Allocate as _, DeviceBlock};
use warpool::{Error, Result, Stream, StreamLease};

static KERNELS: KernelSource = KernelSource {
    name: "graphed tests",
    cuda: "",
    host_kernels: &[HostKernel::new("sum", |kernel| {
        let (to, from, by) = (kernel.arg_ptr(0)?, kernel.arg_ptr(1)?, kernel.arg_ptr(2)?);
        let by = kernel.read_u32(by, 1)?[0];
        let sums: Vec<u32> = kernel.read_u32(from, WORDS)?.iter().map(|word| word + by).collect();
        kernel.write_u32(to, &sums)
    })],
};

/// How many words of a block the work reads.
const WORDS: usize = 16;

/// Adds a weight to its input, twice: once into memory of its own, once into its output. A shape is the size of each in
/// KiB.
struct Adder {
    sum: FunctionId,
    weight: Arc<DeviceBlock>,
    /// A shape whose work waits on the host.
    waits_at: Option<u64>,
    pads: bool,
    /// Every run: its shape, and whether it was captured.
    runs: RefCell<Vec<(u64, bool)>>,
}

impl Callable for Adder {
    type Shape = u64;

    fn input_bytes(&self, &kib: &u64) -> Vec<u64> {
        vec![kib * KIB]
    }

    fn run(&self, call: &Call<'_, u64>) -> Result<Vec<DeviceBlock>> {
        let (&shape, stream, input) = (call.shape(), call.stream(), call.inputs()[0]);
        assert_eq!(stream.device().current_stream()?, *stream);
        assert_eq!(input.bytes, shape * KIB);
        let capturing = stream.is_capturing()?;
        self.runs.borrow_mut().push((shape, capturing));
        if self.waits_at == Some(shape) {
            stream.synchronize()?;
        }
        call.share(&self.weight)?;
        let between = call.allocator().allocate(shape * KIB, stream)?;
        let output = call.allocator().allocate(shape * KIB, stream)?;
        let add = |to: DevicePtr, from: DevicePtr| -> Result<()> {
            let args = [to, from, self.weight.ptr()].map(KernelArg::Ptr);
            launch_kernel(&**stream.instance().driver(), self.sum, &args, stream.id())
        };
        add(between.ptr(), input.ptr)?;
        add(output.ptr(), between.ptr())?;
        Ok(vec![output])
    }

    fn serves(&self, captured: &u64, requested: &u64) -> bool {
        if self.pads { captured >= requested } else { captured == requested }
    }
}

struct CallableFixture {
    context: TestContext,
    sum: FunctionId,
    side: StreamLease,
    start: ObjectCounts,
}

impl CallableFixture {
    fn new() -> Self {
        let context = TestContext::with_config(SimConfig::default().with_devices(2), "");
        let module = context.sim.module_load(FIRST, &KERNELS).unwrap();
        let sum = context.sim.function_get(module, "sum").unwrap();
        let side = context.device().lease_stream().unwrap();
        let start = context.sim.object_counts();
        Self { context, sum, side, start }
    }

    /// With a weight of 5: an output is its input plus 10.
    fn adder(&self) -> Adder {
        let weight = self.block(4, 5);
        Adder { sum: self.sum, weight: Arc::new(weight), waits_at: None, pads: false, runs: RefCell::default() }
    }

    fn graphed(&self, adder: Adder, shapes: &[u64]) -> GraphedCallable<Adder> {
        self.try_graphed(adder, shapes).unwrap()
    }

    fn try_graphed(&self, adder: Adder, shapes: &[u64]) -> Result<GraphedCallable<Adder>> {
        let (any, options) = (self.context.any(), GraphedOptions { warmups: 2, ..GraphedOptions::default() });
        GraphedCallable::new(&any, &self.context.device(), adder, shapes.iter().copied(), options)
    }

    /// Memory whose words are all `value`, which has been written.
    fn block(&self, bytes: u64, value: u32) -> DeviceBlock {
        let block = self.context.any().allocate(bytes, &self.context.main).unwrap();
        self.write(&block, value, &self.context.main);
        self.context.main.synchronize().unwrap();
        block
    }

    fn write(&self, block: &DeviceBlock, value: u32, stream: &Stream) {
        self.context.sim.fill(block.ptr(), Pattern::U32(value), (block.bytes() / 4).min(16), stream.id()).unwrap();
    }

    /// The first word that `stream` has written.
    fn word(&self, block: &DeviceBlock, stream: &Stream) -> u32 {
        stream.synchronize().unwrap();
        let mut bytes = [0; 4];
        self.context.sim.download(FIRST, block.ptr(), &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    /// Calls with an input of `value`; returns the shape of the replayed graph and the output.
    fn call(&self, graphed: &mut GraphedCallable<Adder>, shape: u64, value: u32) -> (Option<u64>, u32) {
        let (input, main) = (self.block(shape * KIB, value), &self.context.main);
        let answer = graphed.call(&shape, &[Input::from(&input)], main).unwrap();
        let output = answer.outputs().next().unwrap();
        (answer.replayed().copied(), self.word(output, main))
    }

    fn reserved(&self) -> u64 {
        self.context.bytes_reserved()
    }

    fn expect_hazards(&self, kind: HazardKind) {
        let hazards = self.context.sim.hazards();
        assert!(hazards.iter().all(|hazard| hazard.kind == kind), "{hazards:#?}");
        self.context.sim.clear_hazards();
    }

    fn finish(self) {
        // The next reset destroys what destructors left.
        Graph::new(&self.context.any(), &self.context.device(), GraphOptions::default()).unwrap().reset().unwrap();
        self.context.device().synchronize().unwrap();
        self.context.trim();
        let now = self.context.sim.object_counts();
        assert_eq!((now.graphs, now.graph_execs, now.captures, now.allocations), (0, 0, 0, 0), "leaked");
        assert_eq!(now.bytes_used, self.start.bytes_used, "memory leaked");
        self.context.finish();
    }
}

const SHAPES: [u64; 3] = [1 << 10, 12 << 10, 4 << 10];

/// The numbers follow from the allocator's rules: 12 MiB blocks have their own segments; the 4 MiB blocks are split
/// from memory that the first graph has freed; 1 MiB is small.
#[test]
fn shapes_are_captured_largest_first_into_one_pool() {
    let fixture = CallableFixture::new();
    let before = fixture.adder();
    let reserved = fixture.reserved();
    let graphed = fixture.graphed(before, &[SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[1]]);
    let runs = graphed.callable().runs.borrow().clone();
    let warm = [12 << 10, 4 << 10, 1 << 10].map(|shape| [(shape, false); 2]).concat();
    assert_eq!(runs[..6], warm, "each shape is warmed up before the first capture, and none twice");
    assert_eq!(runs[6..], [12 << 10, 4 << 10, 1 << 10].map(|shape| (shape, true)));

    let reports: Vec<_> = graphed.reports().iter().map(|it| (it.shape, it.bytes_added, it.bytes_outputs)).collect();
    assert_eq!(reports, [(12 << 10, 24 * MIB, 12 * MIB), (4 << 10, 0, 4 * MIB), (1 << 10, 2 * MIB, MIB)]);
    assert!(graphed.reports().iter().all(|report| report.failed.is_none()));
    assert_eq!(graphed.bytes_inputs(), 12 * MIB);
    let pool = graphed.pool().unwrap().id();
    let of_pool: u64 = fixture.context.segments_of(pool).iter().map(|segment| segment.total_size).sum();
    assert_eq!(of_pool, 26 * MIB, "all graphs are in one pool");
    let added = fixture.reserved() - reserved;
    assert_eq!(added, (12 + 26) * MIB, "inputs and graphs; memory of the warm-ups is freed");
    graphed.close().unwrap();
    fixture.finish();
}

#[test]
fn a_call_replays_the_graph_of_its_shape() {
    let fixture = CallableFixture::new();
    let mut graphed = fixture.graphed(fixture.adder(), &SHAPES);
    for (round, &shape) in SHAPES.iter().cycle().take(9).enumerate() {
        let value = 100 * round as u32;
        assert_eq!(fixture.call(&mut graphed, shape, value), (Some(shape), value + 10));
    }
    assert_eq!(graphed.callable().runs.borrow().len(), 3 * 2 + 3, "no call has run the work itself");
    drop(graphed);
    fixture.finish();
}

#[test]
fn inputs_in_the_graphs_memory_are_not_copied() {
    let fixture = CallableFixture::new();
    let mut graphed = fixture.graphed(fixture.adder(), &[64]);
    let main = fixture.context.main.clone();
    let copies = || fixture.context.sim.call_count(DriverCall::Copy);
    let before = copies();
    assert_eq!(fixture.call(&mut graphed, 64, 1), (Some(64), 11));
    assert_eq!(copies(), before + 1);
    assert!(graphed.input(1).is_none());
    let place = graphed.input(0).unwrap();
    fixture.write(place, 2, &main);
    let input = Input::from(place);
    let answer = graphed.call(&64, &[input], &main).unwrap();
    let output = answer.outputs().next().unwrap();
    assert_eq!((fixture.word(output, &main), answer.outputs().len()), (12, 1));
    assert_eq!(copies(), before + 1, "it was where the graph reads");
    drop(graphed);
    fixture.finish();
}

#[test]
fn a_larger_graph_is_used_if_the_callable_allows_it() {
    let fixture = CallableFixture::new();
    let mut adder = fixture.adder();
    adder.pads = true;
    let mut graphed = fixture.graphed(adder, &[64, 256, 1024]);
    let cases = [(1, Some(64)), (64, Some(64)), (65, Some(256)), (300, Some(1024)), (1024, Some(1024)), (1025, None)];
    for (requested, served) in cases {
        assert_eq!(fixture.call(&mut graphed, requested, 7), (served, 17), "{requested}");
    }
    drop(graphed);
    fixture.finish();
}

/// An input that does not fit is not copied, whatever `serves` returns.
#[test]
fn a_graph_with_smaller_inputs_is_never_used() {
    struct ServesEverything(Adder);
    impl Callable for ServesEverything {
        type Shape = u64;
        fn input_bytes(&self, shape: &u64) -> Vec<u64> {
            self.0.input_bytes(shape)
        }
        fn run(&self, call: &Call<'_, u64>) -> Result<Vec<DeviceBlock>> {
            self.0.run(call)
        }
        fn serves(&self, _: &u64, _: &u64) -> bool {
            true
        }
    }
    let fixture = CallableFixture::new();
    let (any, device) = (fixture.context.any(), fixture.context.device());
    let options = GraphedOptions::default();
    let mut graphed = GraphedCallable::new(&any, &device, ServesEverything(fixture.adder()), [8, 64], options).unwrap();
    for (requested, served) in [(4, Some(8)), (9, Some(64)), (65, None)] {
        let input = fixture.block(requested * KIB, 3);
        let answer = graphed.call(&requested, &[Input::from(&input)], &fixture.context.main).unwrap();
        assert_eq!(answer.replayed().copied(), served, "{requested}");
    }
    drop(graphed);
    fixture.finish();
}

#[test]
fn a_call_without_a_graph_says_why() {
    let fixture = CallableFixture::new();
    let mut adder = fixture.adder();
    adder.waits_at = Some(256);
    let mut graphed = fixture.graphed(adder, &[64, 256, 1024]);
    let failed: Vec<u64> = graphed.reports().iter().filter(|it| it.failed.is_some()).map(|it| it.shape).collect();
    assert_eq!(failed, [256], "the others were captured all the same");
    fixture.expect_hazards(HazardKind::CaptureInvalidated);
    let main = fixture.context.main.clone();
    let mut reason = |shape: u64, stream: &Stream| {
        let input = fixture.block(shape * KIB, 1);
        let answer = graphed.call(&shape, &[Input::from(&input)], stream).unwrap();
        assert_eq!((answer.replayed(), answer.outputs().len()), (None, 1));
        if stream == &main {
            assert_eq!(fixture.word(answer.outputs().next().unwrap(), stream), 11);
        }
        answer.fallback().cloned().unwrap()
    };
    assert_eq!(reason(128, &main), Fallback::NoSuchShape);
    match reason(256, &main) {
        Fallback::CaptureFailed(Error::Driver(error)) => {
            assert_eq!(error.code, ErrorCode::StreamCaptureUnsupported);
            assert!(error.to_string().contains("stream_synchronize"), "{error}");
        }
        other => panic!("{other}"),
    }
    // Inside a capture the work itself is captured.
    let mut outer = Graph::new(&fixture.context.any(), &fixture.context.device(), GraphOptions::default()).unwrap();
    outer
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let input = capture.allocate(64 * KIB)?;
            let stream = capture.stream().clone();
            capture.fill(input, Pattern::U32(1), WORDS as u64, &stream)?;
            let input = Input::from(capture.buffer(input)?);
            let answer = graphed.call(&64, &[input], &stream)?;
            assert_eq!(answer.fallback(), Some(&Fallback::StreamCaptures));
            Ok(())
        })
        .unwrap();
    outer.replay(&main).unwrap();
    assert_eq!(fixture.call(&mut graphed, 64, 1), (Some(64), 11));
    drop((outer, graphed));
    fixture.finish();
}

/// Waiting for the stream of the previous call would make the next call's stream part of its capture.
#[test]
fn a_capture_on_the_stream_of_the_last_call_is_not_joined() {
    let fixture = CallableFixture::new();
    let mut graphed = fixture.graphed(fixture.adder(), &[64]);
    let input = fixture.block(64 * KIB, 1);
    let given = [Input::from(&input)];
    graphed.call(&64, &given, &fixture.side).unwrap();
    let mut outer = Graph::new(&fixture.context.any(), &fixture.context.device(), GraphOptions::default()).unwrap();
    let other = fixture.context.device().lease_stream().unwrap();
    outer
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let answer = graphed.call(&64, &given, &other)?;
            assert_eq!(answer.fallback(), Some(&Fallback::LastStreamCaptures));
            assert!(!other.is_capturing()?);
            assert_eq!(capture.topology()?.nodes.len(), 0, "nothing was captured");
            Ok(())
        })
        .unwrap();
    let answer = graphed.call(&64, &given, &other).unwrap();
    assert_eq!(answer.replayed(), Some(&64));
    other.synchronize().unwrap();
    drop((graphed, outer, other, input));
    fixture.finish();
}

/// All calls share inputs, graphs and outputs: calls on another stream wait. The simulated device checks the order.
#[test]
fn calls_on_two_streams_are_ordered() {
    let fixture = CallableFixture::new();
    let mut graphed = fixture.graphed(fixture.adder(), &[64, 256]);
    let other = fixture.context.device().lease_stream().unwrap();
    let mut results = Vec::new();
    for round in 0..12_u32 {
        let stream: &Stream = if round % 2 == 0 { &fixture.side } else { &other };
        let shape = if round % 3 == 0 { 64 } else { 256 };
        let any = fixture.context.any();
        let (input, result) = (any.allocate(shape * KIB, stream).unwrap(), any.allocate(64, stream).unwrap());
        fixture.write(&input, 1000 * round, stream);
        let answer = graphed.call(&shape, &[Input::from(&input)], stream).unwrap();
        assert_eq!(answer.replayed(), Some(&shape));
        let output = answer.outputs().next().unwrap().ptr();
        fixture.context.sim.copy(result.ptr().into(), output.into(), 64, stream.id()).unwrap();
        results.push((result, stream.clone(), 1000 * round + 10));
    }
    for (result, stream, value) in &results {
        assert_eq!(fixture.word(result, stream), *value);
    }
    drop((graphed, results, other));
    fixture.finish();
}

/// A call without a graph may read the graphs' inputs; the next call with a graph writes there only after it.
#[test]
fn a_call_without_a_graph_on_the_shared_input_is_ordered() {
    let fixture = CallableFixture::new();
    let mut graphed = fixture.graphed(fixture.adder(), &[4, 8]);
    let other = fixture.context.device().lease_stream().unwrap();
    for round in 1..4 {
        let shared = graphed.input(0).unwrap();
        fixture.write(shared, round, &fixture.side);
        let input = Input { ptr: shared.ptr(), bytes: 2 * KIB };
        let answer = graphed.call(&2, &[input], &fixture.side).unwrap();
        assert_eq!(answer.fallback(), Some(&Fallback::NoSuchShape));
        let outputs: Vec<u32> = answer.outputs().map(|block| fixture.word(block, &fixture.side)).collect();
        drop(answer);
        assert_eq!(outputs, [round + 10]);
        fixture.write(graphed.input(0).unwrap(), round, &fixture.side);
        drop(graphed.call(&2, &[input], &fixture.side).unwrap());
        let elsewhere = fixture.context.any().allocate(4 * KIB, &other).unwrap();
        fixture.write(&elsewhere, 7, &other);
        let answer = graphed.call(&4, &[Input::from(&elsewhere)], &other).unwrap();
        assert_eq!(answer.replayed(), Some(&4));
        assert_eq!(fixture.word(answer.outputs().next().unwrap(), &other), 17);
        drop(answer);
        fixture.side.wait_stream(&other).unwrap();
    }
    drop(graphed.close().unwrap());
    drop(other);
    fixture.finish();
}

#[test]
fn wrong_inputs_are_errors_and_change_nothing() {
    let fixture = CallableFixture::new();
    let mut graphed = fixture.graphed(fixture.adder(), &[64]);
    let (input, main) = (fixture.block(64 * KIB, 1), fixture.context.main.clone());
    let good = Input::from(&input);
    let mut error_of = |inputs: &[Input], stream: &Stream| graphed.call(&64, inputs, stream).unwrap_err();
    let inputs = |given: Vec<u64>| Error::from(GraphError::CallInputs { given, wanted: vec![64 * KIB] });
    assert_eq!(error_of(&[], &main), inputs(vec![]));
    assert_eq!(error_of(&[good, good], &main), inputs(vec![64 * KIB; 2]));
    assert_eq!(error_of(&[Input { bytes: 63 * KIB, ..good }], &main), inputs(vec![63 * KIB]));
    let far = fixture.context.instance.device(1).unwrap().default_stream().unwrap();
    assert!(matches!(error_of(&[good], &far), Error::Graph(GraphError::StreamDevice { .. })));
    let other = CallableFixture::new();
    assert_eq!(error_of(&[good], &other.context.main), Error::ForeignInstance { object: "the stream" });
    other.finish();
    assert_eq!(fixture.call(&mut graphed, 64, 1), (Some(64), 11));
    drop(input);
    drop(graphed);
    fixture.finish();
}

#[test]
fn a_failing_warm_up_is_an_error() {
    let fixture = CallableFixture::new();
    let adder = fixture.adder();
    let far = fixture.context.instance.device(1).unwrap();
    let foreign = GraphedCallable::new(
        &CallableFixture::new().context.any(),
        &far,
        fixture.adder(),
        [64],
        GraphedOptions::default(),
    );
    assert_eq!(foreign.unwrap_err(), Error::ForeignInstance { object: "the device" });
    // More than the device has: the inputs cannot be allocated.
    let outcome = fixture.try_graphed(adder, &[1 << 40]);
    assert!(matches!(outcome, Err(Error::OutOfMemory(_))), "{outcome:?}");
    let mut none = fixture.graphed(fixture.adder(), &[]);
    assert_eq!((none.pool(), none.bytes_inputs(), none.reports().len()), (None, 0, 0));
    assert_eq!(fixture.call(&mut none, 64, 1), (None, 11));
    drop(none);
    fixture.finish();
}

/// Closing does not wait: freed memory is not reused before the replay that uses it is done.
#[test]
fn close_frees_everything_after_the_last_replay() {
    let fixture = CallableFixture::new();
    for closes in [true, false] {
        let mut graphed = fixture.graphed(fixture.adder(), &[1024, 64]);
        let input = fixture.block(1024 * KIB, 1);
        fixture.context.pause_stream(&fixture.side);
        graphed.call(&1024, &[Input::from(&input)], &fixture.side).unwrap();
        input.record_use(&fixture.side).unwrap();
        if closes {
            let adder = graphed.close().unwrap();
            assert_eq!(adder.runs.borrow().len(), 2 * 2 + 2);
            assert_eq!(fixture.context.sim.object_counts().graph_execs, 0, "at once, not by the next call");
        } else {
            drop(graphed);
        }
        drop(input);
        // The weight, the input, and its copy: new blocks must not overlap them before the replay is done.
        let others: Vec<DeviceBlock> =
            [4, 1024 * KIB, 1024 * KIB, 1024 * KIB].map(|bytes| fixture.block(bytes, 9)).into();
        fixture.context.resume_stream(&fixture.side);
        drop(others);
        fixture.context.trim();
        assert_eq!(fixture.reserved(), 0);
    }
    fixture.finish();
}
