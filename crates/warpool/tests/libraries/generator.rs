//! Generators outside of captures: known answers, state, sharing, fills, errors. What they do in graphs is in
//! `generator_graph.rs`.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::launch::raw_target;
use crate::common::machine;
use crate::common::memory::{KIB, TestContext};
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, CaptureMode, Captures, DevicePtr, ErrorCode, KernelArg, Pattern};
use warpool::generator::{DEFAULT_SEED, Generator, GeneratorError, PHILOX_CUDA, Reservation, Target, philox};
use warpool::graph::GraphError;
use warpool::memory::{Allocate, DeviceBlock};
use warpool::{Error, Instance, Result};

fn generator_error<T: std::fmt::Debug>(outcome: Result<T>) -> GeneratorError {
    match outcome {
        Err(Error::Generator(error)) => error,
        other => panic!("a generator's error was expected, not {other:?}"),
    }
}

fn generator(context: &TestContext, seed: u64) -> Generator {
    let generator = Generator::new(&context.device()).unwrap();
    generator.set_seed(seed).unwrap();
    generator
}

/// Fills with `fill` and returns the bytes when the stream is done.
fn drawn(context: &TestContext, bytes: u64, fill: impl FnOnce(&DeviceBlock) -> Result<()>) -> Vec<u8> {
    let block = context.any().allocate(bytes, &context.main).unwrap();
    fill(&block).unwrap();
    context.main.synchronize().unwrap();
    let mut into = vec![0; bytes as usize];
    context.instance.driver().download(block.device_id(), block.ptr(), &mut into).unwrap();
    into
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    words(bytes).into_iter().map(f32::from_bits).collect()
}

/// The expected words of a fill at an offset.
fn expected(seed: u64, offset: u64, count: usize) -> Vec<u32> {
    (0..).flat_map(|subsequence| philox::block(seed, subsequence, offset)).take(count).collect()
}

/// `tests/data/curand_philox.txt`, made by curand on an H200; also offsets inside a block, and at the end of the range.
#[test]
fn the_host_function_matches_curand() {
    let lines: Vec<&str> = include_str!("../data/curand_philox.txt").lines().collect();
    assert_eq!(lines.len(), 16);
    for line in lines {
        let fields: Vec<u64> = line.split(' ').map(|field| u64::from_str_radix(field, 16).unwrap()).collect();
        let [seed, subsequence, offset] = fields[..3] else { panic!("a position: {line}") };
        let reference: Vec<u32> = fields[3..].iter().map(|&word| u32::try_from(word).unwrap()).collect();
        assert_eq!(reference.len(), 48);
        let ours: Vec<u32> = philox::words(seed, subsequence, offset).take(16).collect();
        assert_eq!(ours, reference[..16], "words of {line}");
        let uniforms: Vec<u32> = ours.iter().map(|&word| philox::uniform(word).to_bits()).collect();
        assert_eq!(uniforms, reference[16..32], "uniforms of {line}");
        let normals = ours.as_chunks().0.iter().flat_map(|&[first, second]| philox::normals(first, second));
        for (ours, &curand) in normals.zip(&reference[32..]) {
            let curand = f32::from_bits(curand);
            // cuRAND uses the fast sine, with an error of 2^-21 of the radius, which is at most 6.8.
            assert!((ours - curand).abs() < 4e-6, "normals of {line}: {ours} and {curand}");
        }
    }
}

/// test_graph_rng_functional, without the graph: the numbers depend on seed and offset alone.
#[test]
fn fills_match_the_host_function() {
    let context = TestContext::new("");
    for (seed, offset, count) in [(0, 0, 1), (42, 0, 5), (DEFAULT_SEED, 8, 4096), (u64::MAX, 1 << 40, 70_003)] {
        let generator = generator(&context, seed);
        generator.set_offset(offset).unwrap();
        let bits = words(&drawn(&context, 4 * count, |block| generator.fill_bits(block, &context.main)));
        assert_eq!(bits, expected(seed, offset, count as usize));
        let uniforms = floats(&drawn(&context, 4 * count, |block| generator.fill_uniform(block, &context.main)));
        let correct: Vec<f32> = expected(seed, offset + 4, count as usize).into_iter().map(philox::uniform).collect();
        assert_eq!(uniforms, correct);
        let normals = floats(&drawn(&context, 4 * count, |block| generator.fill_normal(block, &context.main)));
        let correct = expected(seed, offset + 8, (count as usize).next_multiple_of(2));
        let correct = correct.as_chunks().0.iter().flat_map(|&[first, second]| philox::normals(first, second));
        assert_eq!(normals, correct.take(count as usize).collect::<Vec<_>>());
        let mask = drawn(&context, count, |block| generator.fill_dropout_mask(block, 0.3, &context.main));
        let correct = expected(seed, offset + 12, count as usize);
        let correct: Vec<u8> = correct.into_iter().map(|word| u8::from(philox::uniform(word) <= 0.3)).collect();
        assert_eq!(mask, correct);
        assert_eq!(generator.offset().unwrap(), offset + 16, "four per fill, however long");
    }
    context.finish();
}

/// test_graph_rng_distributions, without the graph.
#[test]
fn distributions_have_the_right_moments() {
    const COUNT: usize = 1 << 18;
    let context = TestContext::new("");
    let generator = generator(&context, 5);
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let doubles = |bytes: Vec<u8>| floats(&bytes).into_iter().map(f64::from).collect::<Vec<_>>();
    // Five standard errors; the seed is fixed, so the test is deterministic.
    let near = |what: &str, got: f64, correct: f64, deviation: f64| {
        let error = deviation / (COUNT as f64).sqrt();
        assert!((got - correct).abs() < 5.0 * error, "{what}: {got}, not {correct}");
    };

    let uniforms = doubles(drawn(&context, 4 * COUNT as u64, |block| generator.fill_uniform(block, &context.main)));
    assert!(uniforms.iter().all(|&x| 0.0 < x && x <= 1.0));
    near("mean of uniforms", mean(&uniforms), 0.5, (1.0_f64 / 12.0).sqrt());
    let squares: Vec<f64> = uniforms.iter().map(|x| x * x).collect();
    near("mean square of uniforms", mean(&squares), 1.0 / 3.0, (4.0_f64 / 45.0).sqrt());

    let normals = doubles(drawn(&context, 4 * COUNT as u64, |block| generator.fill_normal(block, &context.main)));
    near("mean of normals", mean(&normals), 0.0, 1.0);
    let squares: Vec<f64> = normals.iter().map(|x| x * x).collect();
    near("variance of normals", mean(&squares), 1.0, 2.0_f64.sqrt());
    let neighbours: Vec<f64> = normals.as_chunks().0.iter().map(|[first, second]| first * second).collect();
    near("correlation of neighbours", mean(&neighbours) / 2.0_f64.sqrt(), 0.0, 1.0);

    for keep in [0.1_f32, 0.5, 0.9] {
        let mask = drawn(&context, COUNT as u64, |block| generator.fill_dropout_mask(block, keep, &context.main));
        let kept = mask.iter().map(|&byte| f64::from(byte)).sum::<f64>() / COUNT as f64;
        let keep = f64::from(keep);
        near("share that is kept", kept, keep, (keep * (1.0 - keep)).sqrt());
    }
    for (keep, byte) in [(0.0, 0), (1.0, 1)] {
        let mask = drawn(&context, COUNT as u64, |block| generator.fill_dropout_mask(block, keep, &context.main));
        assert!(mask.iter().all(|&kept| kept == byte), "{keep} is certain");
    }
    context.finish();
}

/// A block is filled with as many numbers as fit, a part with as many as requested; an empty fill does nothing.
#[test]
fn fills_stay_within_their_target() {
    let context = TestContext::new("");
    let generator = generator(&context, 3);
    let block = context.any().allocate(KIB, &context.main).unwrap();
    context.instance.driver().fill(block.ptr(), Pattern::U8(0xAA), KIB, context.main.id()).unwrap();
    // Not at a multiple of 16, where a device writes the numbers one by one.
    generator.fill_bits(Target::part(&block, 4, 6), &context.main).unwrap();
    context.main.synchronize().unwrap();
    let mut bytes = vec![0; 40];
    context.instance.driver().download(block.device_id(), block.ptr(), &mut bytes).unwrap();
    assert_eq!(words(&bytes)[1..7], expected(3, 0, 6));
    assert_eq!((words(&bytes)[0], words(&bytes)[7]), (0xAAAA_AAAA, 0xAAAA_AAAA), "nothing around it is written");

    let ragged = context.any().allocate(7, &context.main).unwrap();
    generator.fill_uniform(&ragged, &context.main).unwrap();
    assert_eq!(generator.offset().unwrap(), 8);
    let launches = context.sim.call_count(Call::KernelLaunch);
    generator.fill_normal(Target::part(&block, 0, 0), &context.main).unwrap();
    generator.fill_bits(&context.any().allocate(3, &context.main).unwrap(), &context.main).unwrap();
    assert_eq!((context.sim.call_count(Call::KernelLaunch), generator.offset().unwrap()), (launches, 8));

    let odd = Target::part(&block, 2, 4);
    let error = generator_error(generator.fill_bits(odd, &context.main));
    assert_eq!(error, GeneratorError::Alignment { ptr: block.ptr().offset(2), bytes: 4 });
    generator.fill_dropout_mask(odd, 0.5, &context.main).unwrap();
    let error = generator_error(generator.fill_bits(Target::part(&block, 8, KIB / 4 - 1), &context.main));
    assert_eq!(error, GeneratorError::OutOfBounds { count: KIB / 4 - 1, bytes: KIB - 4, available: KIB - 8 });
    let error = generator_error(generator.fill_bits(Target::part(&block, 0, u64::MAX), &context.main));
    assert!(matches!(error, GeneratorError::Count { count: u64::MAX, .. }));
    for keep in [-0.1, 1.1, f32::NAN, f32::INFINITY] {
        let error = generator_error(generator.fill_dropout_mask(&block, keep, &context.main));
        assert_eq!(error, GeneratorError::Probability { keep: keep.to_string() });
    }
    assert_eq!(generator.offset().unwrap(), 12, "a failed fill consumes nothing");
    context.finish();
}

/// Whichever driver call of a fill fails, nothing is consumed, and the next fill works.
#[test]
fn a_fill_that_fails_consumes_nothing() {
    let faulty = Arc::new(Faulty::new(Arc::new(SimDriver::new(SimConfig::default())), FaultPlan::new()));
    let instance = Instance::new(faulty.clone()).unwrap();
    let device = instance.device(0).unwrap();
    let (stream, generator) = (device.pool_stream().unwrap(), Generator::new(&device).unwrap());
    let ptr = instance.driver().mem_alloc(device.id(), KIB).unwrap();
    // In this order: each is the first call of its kind, and a call that succeeded is not repeated.
    for (call, fired) in
        [Call::ModuleLoad, Call::FunctionGet, Call::CaptureState, Call::KernelLaunch].into_iter().zip(1..)
    {
        faulty.set_plan(FaultPlan::new().fail_nth(call, 1, ErrorCode::LaunchFailed));
        let error = generator.fill_bits(raw_target(&**instance.driver(), ptr, 9), &stream).unwrap_err();
        assert_eq!(error.driver().map(|error| error.code), Some(ErrorCode::LaunchFailed), "{call:?}: {error}");
        assert_eq!((generator.offset().unwrap(), faulty.injected().len()), (0, fired), "{call:?}");
    }
    faulty.clear_plan();
    generator.fill_bits(raw_target(&**instance.driver(), ptr, 9), &stream).unwrap();
    assert_eq!(generator.offset().unwrap(), 4);
}

/// The defaults; setting the seed resets the offset.
#[test]
fn a_new_generator_has_the_default_seed() {
    let context = TestContext::new("");
    let generator = Generator::new(&context.device()).unwrap();
    assert_eq!((generator.seed(), generator.offset().unwrap()), (67_280_421_310_721, 0));
    generator.set_offset(400).unwrap();
    generator.set_seed(u64::MAX).unwrap();
    assert_eq!((generator.seed(), generator.offset().unwrap()), (u64::MAX, 0), "a seed resets the offset");
    generator.set_offset(8).unwrap();
    let seed = generator.reseed().unwrap();
    assert_eq!((generator.seed(), generator.offset().unwrap()), (seed, 0));
    assert_ne!(generator.reseed().unwrap(), seed);
    for offset in [1, 2, 3, u64::MAX] {
        assert_eq!(generator_error(generator.set_offset(offset)), GeneratorError::Offset { offset });
    }
    assert_eq!(generator_error(generator.set_offset(6)).to_string(), "offset must be a multiple of 4, not 6");
    context.finish();
}

/// PyTorch's 16 bytes, and the older format of 8.
#[test]
fn the_state_is_saved_and_restored_as_bytes() {
    let context = TestContext::new("");
    let generator = generator(&context, 0x0807_0605_0403_0201);
    generator.set_offset(0x8000_0000_0000_0010).unwrap();
    let state = generator.state();
    assert_eq!(state, [1, 2, 3, 4, 5, 6, 7, 8, 0x10, 0, 0, 0, 0, 0, 0, 0x80]);
    let other = Generator::new(&context.device()).unwrap();
    other.set_state(&state).unwrap();
    assert_eq!((other.seed(), other.offset().unwrap()), (0x0807_0605_0403_0201, 0x8000_0000_0000_0010));
    other.set_state(&7_u64.to_le_bytes()).unwrap();
    assert_eq!((other.seed(), other.offset().unwrap()), (7, 0), "the seed alone");
    for bytes in [0, 1, 7, 9, 15, 17, 32] {
        let error = generator_error(other.set_state(&vec![0; bytes]));
        assert_eq!(error, GeneratorError::StateSize { bytes });
        assert!(error.to_string().starts_with("RNG state is wrong size"), "{error}");
    }
    let mut odd = state;
    odd[8] = 3;
    assert!(matches!(generator_error(other.set_state(&odd)), GeneratorError::Offset { .. }));
    assert_eq!((other.seed(), other.offset().unwrap()), (7, 0), "a failed call changes nothing");
    context.finish();
}

/// cuda_generator_test: copies have their own state, shares the same.
#[test]
fn copies_are_independent_and_shares_are_not() {
    let context = TestContext::new("");
    let first = generator(&context, 9);
    first.set_offset(20).unwrap();
    let (copy, share, clone) = (first.duplicate().unwrap(), first.share(), first.clone());
    first.reserve(4, &context.main).unwrap();
    assert_eq!(
        [&first, &copy, &share, &clone].map(|generator| (generator.seed(), generator.offset().unwrap())),
        [(9, 24), (9, 20), (9, 24), (9, 24)]
    );
    assert!(first.shares_with(&share) && !first.shares_with(&copy));

    // Adopting another state applies to the clones, and to no other generator.
    first.adopt(&copy).unwrap();
    assert!(clone.shares_with(&copy) && !share.shares_with(&copy));
    clone.reserve(4, &context.main).unwrap();
    assert_eq!((copy.offset().unwrap(), share.offset().unwrap()), (24, 24));
    share.set_seed(1).unwrap();
    assert_eq!(first.seed(), 9);
    first.adopt(&first).unwrap();
    assert!(first.shares_with(&copy));
    context.finish();
}

/// test_philox_state_*: rounding to 4, large seeds, the end of the offset range.
#[test]
fn reservations_round_up_and_wrap() {
    let context = TestContext::new("");
    let generator = generator(&context, u64::MAX - 1);
    let mut offset = 0;
    for (increment, advance) in [(0, 0), (1, 4), (2, 4), (3, 4), (4, 4), (5, 8), (7, 8), (1 << 40, 1 << 40)] {
        let reserved = generator.reserve(increment, &context.main).unwrap();
        assert_eq!(reserved, Reservation::Immediate { seed: u64::MAX - 1, offset }, "the old offset");
        offset += advance;
        assert_eq!(generator.offset().unwrap(), offset, "{increment} rounded up");
    }
    generator.set_offset(u64::MAX - 3).unwrap();
    let reserved = generator.reserve(8, &context.main).unwrap();
    assert_eq!(reserved, Reservation::Immediate { seed: u64::MAX - 1, offset: u64::MAX - 3 });
    assert_eq!(
        reserved.args(),
        [KernelArg::Ptr(DevicePtr(0)), KernelArg::U64(u64::MAX - 1), KernelArg::U64(u64::MAX - 3)]
    );
    assert_eq!(generator.offset().unwrap(), 4, "it wraps");
    let increment = u64::MAX - 2;
    assert_eq!(generator_error(generator.reserve(increment, &context.main)), GeneratorError::Increment { increment });
    generator.reserve(u64::MAX - 3, &context.main).unwrap();
    assert_eq!(generator.offset().unwrap(), 0);
    assert!(PHILOX_CUDA.contains("warpool_position") && !PHILOX_CUDA.contains("#include"));
    context.finish();
}

/// cuda_generator_test, multithreaded: threads get different numbers, without gaps.
#[test]
fn threads_draw_different_numbers() {
    const THREADS: u64 = 8;
    const EACH: u64 = 200;
    let context = TestContext::new("");
    let generator = generator(&context, 1);
    let streams: Vec<_> = (0..THREADS).map(|_| context.side_stream()).collect();
    let offsets: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = streams
            .iter()
            .map(|stream| {
                let generator = generator.share();
                scope.spawn(move || {
                    let reserve = |_| match generator.reserve(3, stream).unwrap() {
                        Reservation::Immediate { offset, .. } => offset,
                        captured => panic!("no stream captures: {captured:?}"),
                    };
                    (0..EACH).map(reserve).collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let different: BTreeSet<u64> = offsets.iter().copied().collect();
    assert_eq!(different, (0..THREADS * EACH).map(|number| 4 * number).collect());
    assert_eq!(generator.offset().unwrap(), 4 * THREADS * EACH);
    context.finish();
}

#[test]
fn each_device_has_a_default_generator() {
    let (_, instance) = machine(2);
    let generators = [0, 1].map(|index| instance.default_generator(index).unwrap());
    assert_ne!(generators[0].seed(), generators[1].seed());
    assert_eq!(generators.each_ref().map(|generator| generator.device().index()), [0, 1]);
    let again = instance.device(1).unwrap().default_generator();
    assert!(again.shares_with(&generators[1]), "made once");
    assert_eq!(instance.default_generator(2).unwrap_err(), Error::DeviceOutOfRange { index: 2, count: 2 });

    // It can adopt another state, for all its users.
    let own = Generator::new(generators[1].device()).unwrap();
    again.adopt(&own).unwrap();
    assert!(instance.default_generator(1).unwrap().shares_with(&own));

    // The simulated entropy is deterministic; and a default generator does not keep its Instance alive.
    let (_, twin) = machine(2);
    assert_eq!(twin.default_generator(0).unwrap().seed(), generators[0].seed());
    twin.close().unwrap();
}

/// A generator, a stream and memory must be of one device of one `Instance`.
#[test]
fn a_generator_of_another_device_or_instance_is_an_error() {
    let context = TestContext::with_config(SimConfig::default().with_devices(2), "");
    let [first, second] = [0, 1].map(|index| context.instance.device(index).unwrap());
    let generator = Generator::new(&second).unwrap();
    let error = generator_error(generator.reserve(4, &context.main));
    assert_eq!(error, GeneratorError::ForeignDevice { generator: second.id(), wanted: first.id() });
    assert!(error.to_string().starts_with("foreign generator"), "{error}");
    let block = context.any().allocate(64, &context.main).unwrap();
    let error = generator_error(generator.fill_bits(&block, &second.default_stream().unwrap()));
    assert_eq!(error, GeneratorError::ForeignDevice { generator: second.id(), wanted: first.id() });
    let error = generator_error(generator.adopt(&first.default_generator()));
    assert_eq!(error, GeneratorError::ForeignDevice { generator: first.id(), wanted: second.id() });

    let elsewhere = Generator::new(&machine(1).1.device(0).unwrap()).unwrap();
    let error = generator_error(elsewhere.reserve(4, &context.main));
    assert_eq!(error, GeneratorError::ForeignInstance);
    assert!(error.to_string().starts_with("foreign generator"), "{error}");
    assert_eq!(generator_error(generator.adopt(&elsewhere)), GeneratorError::ForeignInstance);
    assert_eq!((generator.offset().unwrap(), elsewhere.offset().unwrap()), (0, 0));
    context.finish();
}

/// Numbers in a capture that was not begun by a graph would be the same at every replay.
#[test]
fn a_draw_in_a_foreign_capture_is_an_error() {
    let context = TestContext::new("");
    let (stream, generator) = (context.side_stream(), generator(&context, 1));
    context.sim.capture_begin(stream.id(), CaptureMode::Relaxed).unwrap();
    assert_eq!(generator.reserve(4, &stream), Err(GraphError::ForeignCapture.into()));
    let block = context.any().allocate(64, &context.main).unwrap();
    assert_eq!(generator.fill_bits(&block, &stream), Err(GraphError::ForeignCapture.into()));
    assert_eq!(generator.offset().unwrap(), 0);
    let graph = context.sim.capture_end(stream.id()).unwrap();
    assert_eq!(context.instance.driver().graph_topology(graph).unwrap().nodes, [], "the capture is unchanged");
    generator.reserve(4, &stream).unwrap();
    context.finish();
}
