//! Generators: Philox against curand and against the host, user kernels, and replays that draw the eager sequence.

use warpool::generator::{self, DEFAULT_SEED, Generator, GeneratorError, Reservation, Target, philox};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate, DeviceBlock};
use warpool::{Error, Stream};
use warpool_driver::{FunctionId, HostKernel, KernelArg, KernelFault, KernelScope, KernelSource, LaunchShape, Pattern};

use super::helpers::{philox_words, read_block_words, with_allocator};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq, expect_slice_eq};
use crate::sync::join;

pub(crate) const CHECKS: &[Check] = crate::checks![
    philox_matches_curand,
    bits_and_uniforms_match_the_host,
    normals_match_the_host_within_rounding,
    dropout_masks_match_the_host,
    fill_writes_only_its_range,
    user_kernel_draws_its_reservation,
    each_device_has_one_default_generator,
    threads_draw_distinct_numbers,
    replays_draw_the_eager_sequence,
    replays_on_two_streams_are_independent,
    rejected_calls_do_not_invalidate_a_capture,
];

/// A user kernel: the words of one subsequence, as uniforms and as normals.
const SOURCE: KernelSource = KernelSource {
    name: "conformance generator",
    cuda: concat!(
        warpool::philox_cuda!(),
        r#"
extern "C" __global__ void draw_words(unsigned int *out, unsigned long long subsequence,
                                      const unsigned long long *slot, unsigned long long seed,
                                      unsigned long long offset) {
    WarpoolPosition position = warpool_position(slot, seed, offset);
    position.offset += 4ull * threadIdx.x;
    uint4 words = warpool_words(position, subsequence);
    unsigned int four[4] = { words.x, words.y, words.z, words.w };
    float2 first = warpool_normals(words.x, words.y), second = warpool_normals(words.z, words.w);
    float normals[4] = { first.x, first.y, second.x, second.y };
    for (int i = 0; i < 4; ++i) {
        unsigned int at = 4 * threadIdx.x + i, n = 4 * blockDim.x;
        out[at] = four[i];
        out[n + at] = __float_as_uint(warpool_uniform(four[i]));
        out[2 * n + at] = __float_as_uint(normals[i]);
    }
}
"#
    ),
    host_kernels: &[HostKernel::new("draw_words", draw)],
};

fn draw(scope: &mut KernelScope<'_>) -> Result<(), KernelFault> {
    let (out, subsequence) = (scope.arg_ptr(0)?, scope.arg_u64(1)?);
    let (seed, offset) = generator::position(scope, 2)?;
    let blocks = u64::from(scope.shape.block[0]);
    let words: Vec<u32> =
        (0..blocks).flat_map(|block| philox::block(seed, subsequence, offset.wrapping_add(4 * block))).collect();
    let uniforms = words.iter().map(|&word| philox::uniform(word).to_bits());
    let all: Vec<u32> =
        words.iter().copied().chain(uniforms).chain(normals(&words).iter().map(|x| x.to_bits())).collect();
    scope.write_u32(out, &all)
}

/// Normals of an even number of words, computed on the host.
fn normals(words: &[u32]) -> Vec<f32> {
    words.as_chunks().0.iter().flat_map(|&[first, second]| philox::normals(first, second)).collect()
}

/// Seeds, offsets and lengths with overflows and partial blocks.
const CASES: [(u64, u64, u64); 7] = [
    (0, 0, 4),
    (DEFAULT_SEED, 0, 1),
    (DEFAULT_SEED, 4, 1023),
    (42, 1 << 34, 1025),
    (u64::MAX, u64::MAX - 3, 77),
    (1 << 32, (1 << 34) - 4, 6),
    (7, 400, 100_003),
];

/// Runs `body` with the user kernel.
fn with_kernel(context: &TestContext, body: impl FnOnce(FunctionId) -> CheckResult) -> CheckResult {
    let driver = &context.driver;
    let module = driver.module_load(context.device_id, &SOURCE)?;
    let outcome = driver.function_get(module, "draw_words").map_err(Into::into).and_then(body);
    if outcome.is_err() {
        // Work of the failed body must not use an unloaded module. The body's failure is the one to report.
        let _ = driver.device_synchronize(context.device_id);
    }
    driver.module_unload(module)?;
    outcome
}

fn generator(context: &TestContext, seed: u64, offset: u64) -> CheckResult<Generator> {
    let generator = Generator::new(context.device())?;
    generator.set_seed(seed)?;
    generator.set_offset(offset)?;
    Ok(generator)
}

/// The number of floats between two floats. Both zeros count as one.
fn ulps(a: f32, b: f32) -> u32 {
    let place = |x: f32| {
        let bits = x.abs().to_bits().cast_signed();
        if x.is_sign_negative() { -bits } else { bits }
    };
    place(a).abs_diff(place(b))
}

fn philox_matches_curand(context: &TestContext) -> CheckResult {
    with_kernel(context, |function| {
        with_allocator(context, |allocator, stream| {
            let block = allocator.allocate(4 * 48, stream)?;
            let mut seen = 0;
            for line in include_str!("../../data/curand_philox.txt").lines() {
                let fields: Vec<u64> =
                    line.split(' ').filter_map(|field| u64::from_str_radix(field, 16).ok()).collect();
                let (seed, subsequence, offset) = (fields[0], fields[1], fields[2]);
                // Warpool's offsets are multiples of 4 and wrap, where curand's carry into the subsequence.
                if offset % 4 != 0 || offset.checked_add(16).is_none() {
                    continue;
                }
                seen += 1;
                let curand: Vec<u32> = fields[3..].iter().map(|&word| word as u32).collect();
                let [slot, seed, offset] = Reservation::Immediate { seed, offset }.args();
                let args = [block.ptr().into(), KernelArg::U64(subsequence), slot, seed, offset];
                let shape = LaunchShape { grid: [1; 3], block: [4, 1, 1], shared_bytes: 0 };
                context.launch_kernel(function, shape, &args, stream.id())?;
                stream.synchronize()?;
                let got = read_block_words(context, &block)?;
                expect_slice_eq("words", &got[..16], &curand[..16])?;
                expect_slice_eq("uniforms", &got[16..32], &curand[16..32])?;
                for (&got, &curand) in got[32..].iter().zip(&curand[32..]) {
                    let (got, curand) = (f32::from_bits(got), f32::from_bits(curand));
                    // curand uses a faster sine, exact to 2^-21.
                    expect((got - curand).abs() < 4e-6, &format!("a normal near that of curand: {got} and {curand}"))?;
                }
            }
            expect_eq("compared positions", seen, 12)
        })
    })
}

fn bits_and_uniforms_match_the_host(context: &TestContext) -> CheckResult {
    with_allocator(context, |allocator, stream| {
        for (seed, offset, count) in CASES {
            let generator = generator(context, seed, offset)?;
            let block = allocator.allocate(4 * count, stream)?;
            generator.fill_bits(&block, stream)?;
            stream.synchronize()?;
            let what = format!("{count} words of seed {seed} at {offset}");
            expect_slice_eq(&what, &read_block_words(context, &block)?, &philox_words(seed, offset, count as usize))?;
            let offset = offset.wrapping_add(4);
            expect_eq("the offset", generator.offset()?, offset)?;
            generator.fill_uniform(&block, stream)?;
            stream.synchronize()?;
            let want: Vec<u32> = philox_words(seed, offset, count as usize)
                .into_iter()
                .map(|word| philox::uniform(word).to_bits())
                .collect();
            expect_slice_eq(&format!("uniforms, {what}"), &read_block_words(context, &block)?, &want)?;
        }
        Ok(())
    })
}

fn normals_match_the_host_within_rounding(context: &TestContext) -> CheckResult {
    // Logarithm, root, sine and product: each is exact to the last bit or two.
    const MAX_ULPS: u32 = 8;
    with_allocator(context, |allocator, stream| {
        for (seed, offset, count) in CASES {
            let generator = generator(context, seed, offset)?;
            let block = allocator.allocate(4 * count, stream)?;
            generator.fill_normal(&block, stream)?;
            stream.synchronize()?;
            let want = normals(&philox_words(seed, offset, count as usize + 1));
            for (got, want) in read_block_words(context, &block)?.into_iter().map(f32::from_bits).zip(want) {
                let distance = ulps(got, want);
                expect(
                    distance <= MAX_ULPS,
                    &format!("a normal within {MAX_ULPS} floats: {got} and {want}, {distance} apart"),
                )?;
            }
        }
        Ok(())
    })
}

fn dropout_masks_match_the_host(context: &TestContext) -> CheckResult {
    with_allocator(context, |allocator, stream| {
        for (keep, (seed, offset, count)) in [0.5, 0.1, 0.9, 0.0, 1.0, 0.3, 0.75].into_iter().zip(CASES) {
            let generator = generator(context, seed, offset)?;
            let block = allocator.allocate(count, stream)?;
            generator.fill_dropout_mask(&block, keep, stream)?;
            stream.synchronize()?;
            let want: Vec<u8> = philox_words(seed, offset, count as usize)
                .into_iter()
                .map(|word| u8::from(philox::uniform(word) <= keep))
                .collect();
            let got = context.read_bytes(block.ptr(), count as usize)?;
            expect_slice_eq(&format!("a mask with {keep} of seed {seed}"), &got, &want)?;
        }
        Ok(())
    })
}

fn fill_writes_only_its_range(context: &TestContext) -> CheckResult {
    const UNTOUCHED: u32 = 0xAAAA_AAAA;
    with_allocator(context, |allocator, stream| {
        let block = allocator.allocate(4 * 64, stream)?;
        for first in 1..6 {
            for count in 0..10 {
                let generator = generator(context, 3, 0)?;
                context.driver.fill(block.ptr(), Pattern::U32(UNTOUCHED), 64, stream.id())?;
                // Mostly at addresses that are not aligned for writing four words at once.
                generator.fill_bits(Target::part(&block, 4 * first, count), stream)?;
                stream.synchronize()?;
                let mut want = vec![UNTOUCHED; 64];
                want[first as usize..][..count as usize].copy_from_slice(&philox_words(3, 0, count as usize));
                expect_slice_eq(&format!("{count} words at word {first}"), &read_block_words(context, &block)?, &want)?;
            }
        }
        Ok(())
    })
}

fn user_kernel_draws_its_reservation(context: &TestContext) -> CheckResult {
    with_kernel(context, |function| {
        with_allocator(context, |allocator, stream| {
            let generator = generator(context, 77, 12)?;
            let block = allocator.allocate(4 * 24, stream)?;
            let shape = LaunchShape { grid: [1; 3], block: [2, 1, 1], shared_bytes: 0 };
            let launch = || -> warpool::Result<()> {
                let [slot, seed, offset] = generator.reserve(7, stream)?.args();
                let args = [block.ptr().into(), KernelArg::U64(5), slot, seed, offset];
                Ok(context.launch_kernel(function, shape, &args, stream.id())?)
            };
            let expect_words = |offset| -> CheckResult {
                stream.synchronize()?;
                let want: Vec<u32> = philox::words(77, 5, offset).take(8).collect();
                expect_slice_eq("eight words", &read_block_words(context, &block)?[..8], &want)
            };
            launch()?;
            expect_words(12)?;
            expect_eq("the offset, rounded up", generator.offset()?, 20)?;
            let mut graph = Graph::new(allocator, context.device(), GraphOptions::default())?;
            graph.capture(stream, CaptureOptions::default(), |_| launch().and_then(|()| launch()))?;
            for round in 0..3 {
                graph.replay(stream)?;
                // The words of the second launch.
                expect_words(20 + 16 * round + 8)?;
            }
            expect_eq("the offset after replays", generator.offset()?, 20 + 48)?;
            Ok(graph.reset()?)
        })
    })
}

fn each_device_has_one_default_generator(context: &TestContext) -> CheckResult {
    let generator = context.device().default_generator();
    let again = context.instance().default_generator(context.device().index())?;
    expect(generator.shares_with(&again), "both are the same generator")?;
    generator.set_seed(9)?;
    generator.reserve(4, &context.device().default_stream()?)?;
    expect_eq("its offset", again.offset()?, 4)?;
    let seeds = [again.reseed()?, again.reseed()?];
    expect(seeds[0] != seeds[1], "two random seeds are different")?;
    let count = context.instance().device_count();
    let rejected = context.instance().default_generator(count).err();
    expect_eq("the error for an invalid device", rejected, Some(Error::DeviceOutOfRange { index: count, count }))
}

fn threads_draw_distinct_numbers(context: &TestContext) -> CheckResult {
    const COUNT: u64 = 4096;
    const THREADS: u64 = 4;
    const DRAWS: u64 = 8;
    with_allocator(context, |allocator, _| {
        let generator = generator(context, 21, 0)?;
        let drawn = std::thread::scope(|scope| {
            let work = |_| {
                scope.spawn(|| -> CheckResult<Vec<Vec<u32>>> {
                    let stream = context.device().lease_stream()?;
                    let block = allocator.allocate(4 * COUNT, &stream)?;
                    let draw = |_| {
                        generator.fill_bits(&block, &stream)?;
                        stream.synchronize()?;
                        read_block_words(context, &block)
                    };
                    (0..DRAWS).map(draw).collect()
                })
            };
            let threads: Vec<_> = (0..THREADS).map(work).collect();
            threads.into_iter().map(join).collect::<CheckResult<Vec<_>>>()
        })?;
        let mut drawn: Vec<Vec<u32>> = drawn.into_iter().flatten().collect();
        let mut want: Vec<Vec<u32>> =
            (0..THREADS * DRAWS).map(|number| philox_words(21, 4 * number, COUNT as usize)).collect();
        drawn.sort_unstable();
        want.sort_unstable();
        expect(drawn == want, "every sequence is drawn exactly once")
    })
}

fn replays_draw_the_eager_sequence(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 40_004;
    with_allocator(context, |allocator, stream| {
        let (eager, captured) = (generator(context, 5, 0)?, generator(context, 5, 0)?);
        let work = |generator: &Generator, blocks: &[DeviceBlock], side: &Stream| -> warpool::Result<()> {
            generator.fill_bits(&blocks[0], stream)?;
            side.wait_stream(stream)?;
            generator.fill_uniform(&blocks[1], side)?;
            generator.fill_normal(&blocks[2], stream)?;
            generator.fill_dropout_mask(&blocks[3], 0.5, side)?;
            stream.wait_stream(side)
        };
        let side = context.device().lease_stream()?;
        let allocate = || -> CheckResult<Vec<DeviceBlock>> {
            let streams = [stream, &*side, stream, &*side];
            Ok(streams.into_iter().map(|stream| allocator.allocate(BYTES, stream)).collect::<warpool::Result<_>>()?)
        };
        let (own, graphs) = (allocate()?, allocate()?);
        let mut graph = Graph::new(allocator, context.device(), GraphOptions::default())?;
        graph.capture(stream, CaptureOptions::default(), |_| work(&captured, &graphs, &side))?;
        expect_eq("the offset after the capture", captured.offset()?, 0)?;
        for round in 0..4 {
            // Replays follow seeds and offsets set between them.
            for generator in [&eager, &captured] {
                if round == 2 {
                    generator.set_seed(6)?;
                }
                generator.reserve(round, stream)?;
            }
            work(&eager, &own, &side)?;
            graph.replay(stream)?;
            context.device().synchronize()?;
            expect_eq("seed and offset", captured.state(), eager.state())?;
            for (own, graphs) in own.iter().zip(&graphs) {
                let (own, graphs) =
                    (context.read_bytes(own.ptr(), BYTES as usize)?, context.read_bytes(graphs.ptr(), BYTES as usize)?);
                expect_slice_eq(&format!("numbers of round {round}"), &graphs, &own)?;
            }
        }
        Ok(graph.reset()?)
    })
}

fn replays_on_two_streams_are_independent(context: &TestContext) -> CheckResult {
    const COUNT: u64 = 1024;
    const ROUNDS: u64 = 20;
    with_allocator(context, |allocator, first| {
        let second = context.device().lease_stream()?;
        let streams = [first, &*second];
        let generator = generator(context, 31, 0)?;
        let mut graphs = Vec::new();
        for stream in streams {
            let mut graph = Graph::new(allocator, context.device(), GraphOptions::default())?;
            let key = graph.capture(stream, CaptureOptions::default(), |capture| {
                let key = capture.allocate(4 * COUNT)?;
                generator.fill_bits(capture.buffer(key)?, stream)?;
                Ok(key)
            })?;
            let from = graph.buffer(key)?.ptr();
            graphs.push((graph, from, allocator.allocate(4 * COUNT * ROUNDS, stream)?));
        }
        // The launches of one stream are still pending when those of the other have finished.
        context.keep_stream_busy(first)?;
        for round in 0..ROUNDS {
            for ((graph, from, copies), stream) in graphs.iter().zip(streams) {
                graph.replay(stream)?;
                let to = copies.ptr().offset(4 * COUNT * round);
                context.driver.copy(to.into(), (*from).into(), 4 * COUNT, stream.id())?;
            }
        }
        context.device().synchronize()?;
        for round in 0..ROUNDS {
            for ((_, _, copies), number) in graphs.iter().zip(0..) {
                let got = context.read_words(copies.ptr().offset(4 * COUNT * round), COUNT as usize)?;
                let want = philox_words(31, 4 * (2 * round + number), COUNT as usize);
                expect_slice_eq(&format!("graph {number}, replay {round}"), &got, &want)?;
            }
        }
        Ok(graphs.iter_mut().try_for_each(|(graph, ..)| graph.reset())?)
    })
}

fn rejected_calls_do_not_invalidate_a_capture(context: &TestContext) -> CheckResult {
    with_allocator(context, |allocator, stream| {
        let generator = generator(context, 13, 0)?;
        let block = allocator.allocate(4 * 100, stream)?;
        let mut graph = Graph::new(allocator, context.device(), GraphOptions::default())?;
        let mut outcomes = Vec::new();
        graph.capture(stream, CaptureOptions::default(), |_| {
            outcomes = vec![
                Generator::new(context.device()).map(drop),
                generator.offset().map(drop),
                generator.set_offset(4),
                generator.reseed().map(drop),
                generator.duplicate().map(drop),
                generator.set_state(&[0; 16]),
            ];
            outcomes.push(generator.set_seed(14));
            generator.set_seed(13)?;
            generator.fill_bits(&block, stream)
        })?;
        let seed = outcomes.pop();
        let in_capture =
            |outcome: &warpool::Result<()>| matches!(outcome, Err(Error::Generator(GeneratorError::InCapture { .. })));
        expect(outcomes.iter().all(in_capture), "these calls are rejected during a capture")?;
        let want = GeneratorError::SeedInCapture { wanted: 14, seed: 13 }.into();
        expect_eq("the error for another seed", seed, Some(Err(want)))?;
        graph.replay(stream)?;
        stream.synchronize()?;
        expect_slice_eq("the numbers", &read_block_words(context, &block)?, &philox_words(13, 0, 100))?;
        Ok(graph.reset()?)
    })
}
