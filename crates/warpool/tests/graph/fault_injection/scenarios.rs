//! Short programs over graphs that stop at the first error and check their results. They share a graph with their next
//! run, which resets it.

use std::sync::Arc;

use warpool::driver::{BlasMatrix, CaptureMode, ErrorCode, Pattern, Sgemm};
use warpool::generator::philox;
use warpool::graph::{
    Call, Callable, CaptureOptions, Flag, Graph, GraphOptions, GraphedCallable, GraphedOptions, Input,
};
use warpool::handle::{Cublas, Cusolver, HandlePool};
use warpool::memory::pools::PoolOptions;
use warpool::memory::{Allocate as _, DeviceBlock, MemPool};
use warpool::{Error, Result};

use super::fixture::{FaultFixture, WORDS};
use crate::common::launch::capture_kernel;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 4 * WORDS as u64;

/// A program by name.
pub struct Scenario {
    pub name: &'static str,
    pub run: fn(&FaultFixture, &mut Graph) -> Result<()>,
}

pub const SCENARIOS: &[Scenario] = &[
    Scenario { name: "temporaries", run: temporaries },
    Scenario { name: "kept", run: kept },
    Scenario { name: "draws", run: draws },
    Scenario { name: "products", run: products },
    Scenario { name: "conditionals", run: conditionals },
    Scenario { name: "shared pool", run: shared_pool },
    Scenario { name: "pollers", run: pollers },
    Scenario { name: "dropped", run: dropped },
    Scenario { name: "broken", run: broken },
    Scenario { name: "callable", run: callable },
    Scenario { name: "handles", run: handles },
    Scenario { name: "pinned", run: pinned },
];

/// External memory, temporaries on two streams, replays on two streams, a reset, and all of it again.
fn temporaries(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let outside = Arc::new(fixture.get(BYTES, 5, &fixture.one)?);
    for round in 0..2 {
        let copy = graph.capture(&fixture.one, CaptureOptions::default(), |capture| {
            let (key, stream) = (capture.share(outside.clone())?, capture.stream().clone());
            let temp = fixture.get(3 * MIB, 1, &stream)?;
            let fork = capture.fork()?;
            let more = fixture.get(600, 2, &fork)?;
            temp.record_use(&fork)?;
            fixture.plus(temp.ptr(), more.ptr(), &fork)?;
            more.free()?;
            capture.join(fork)?;
            drop(temp);
            let kept = capture.keep(fixture.get(BYTES, 3, &stream)?)?;
            capture_kernel(capture, fixture.plus, &[key.into(), kept.into()], &stream)?;
            let copy = capture.allocate(BYTES)?;
            capture.fill(copy, Pattern::U8(0), BYTES, &stream)?;
            capture.copy(copy, key, BYTES, &stream)?;
            Ok(copy)
        })?;
        graph.replay(&fixture.one)?;
        fixture.two.wait_stream(&fixture.one)?;
        graph.replay(&fixture.two)?;
        fixture.two.synchronize()?;
        let expected = [5 + 6 * (round + 1); WORDS];
        assert_eq!(fixture.words(outside.ptr()), expected);
        assert_eq!(fixture.words(graph.buffer(copy)?.ptr()), expected);
        fixture.one.wait_stream(&fixture.two)?;
        graph.reset()?;
        fixture.trim()?;
    }
    Ok(())
}

/// A graph that keeps its template, queried and instantiated twice; another that is dropped with a replay under way.
fn kept(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    for by_drop in [true, false] {
        let mut own = fixture.graph_with(GraphOptions { keep_graph: true });
        let key = own.capture(&fixture.one, CaptureOptions::default(), |capture| {
            let key = capture.allocate(2 * MIB)?;
            capture.fill(key, Pattern::U32(7), WORDS as u64, &fixture.one)?;
            Ok(key)
        })?;
        assert!(own.dot()?.contains("digraph") && own.topology()?.nodes.len() == 1);
        own.instantiate()?;
        own.instantiate()?;
        own.replay(&fixture.two)?;
        own.raw()?;
        own.raw_exec()?;
        if by_drop {
            drop(own);
        } else {
            fixture.two.synchronize()?;
            assert_eq!(fixture.words(own.buffer(key)?.ptr()), [7; WORDS]);
            own.reset()?;
        }
    }
    fixture.trim()?;
    temporaries(fixture, graph)
}

/// Random numbers on two streams of a capture, and eager draws in between.
fn draws(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let numbers = |seed, offset| -> [u32; WORDS] {
        let words: Vec<u32> = (0..).flat_map(|at| philox::block(seed, at, offset)).take(WORDS).collect();
        words.try_into().expect("as many as were taken")
    };
    let blocks = [fixture.get(BYTES, 0, &fixture.one)?, fixture.get(BYTES, 0, &fixture.one)?];
    fixture.generator.set_seed(11)?;
    graph.capture(&fixture.one, CaptureOptions::default(), |capture| {
        fixture.generator.fill_bits(&blocks[0], &fixture.one)?;
        let fork = capture.fork()?;
        fixture.generator.reserve(5, &fork)?;
        fixture.generator.fill_bits(&blocks[1], &fork)?;
        capture.join(fork)
    })?;
    for (round, seed) in [11, 11, 12].into_iter().enumerate() {
        if seed != fixture.generator.seed() {
            fixture.generator.set_seed(seed)?;
        }
        let before = fixture.generator.offset()?;
        if let Err(error) = graph.replay(&fixture.one) {
            assert_eq!(fixture.generator.offset(), Ok(before), "a replay that failed draws nothing, in round {round}");
            return Err(error);
        }
        fixture.one.synchronize()?;
        assert_eq!(fixture.words(blocks[0].ptr()), numbers(seed, before));
        assert_eq!(fixture.words(blocks[1].ptr()), numbers(seed, before + 12));
        assert_eq!(fixture.generator.offset()?, before + 16);
        let drawn = fixture.generator.fill_bits(&blocks[0], &fixture.one);
        assert_eq!(fixture.generator.offset()?, before + if drawn.is_ok() { 20 } else { 16 });
        drawn?;
    }
    graph.reset()
}

/// Matrix multiplications in a capture on two streams, and one without a graph.
fn products(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let bits = |value: f32| value.to_bits();
    let [a, b] = [fixture.get(BYTES, bits(2.0), &fixture.one)?, fixture.get(BYTES, bits(3.0), &fixture.one)?];
    let results = [fixture.get(BYTES, 0, &fixture.one)?, fixture.get(BYTES, 0, &fixture.one)?];
    let product = |to: &DeviceBlock| {
        let matrix = |block: &DeviceBlock| BlasMatrix { ptr: block.ptr(), stride: 2, transposed: false };
        Sgemm { m: 2, n: 2, k: 2, alpha: 1.0, a: matrix(&a), b: matrix(&b), beta: 1.0, c: matrix(to) }
    };
    graph.capture(&fixture.one, CaptureOptions::default(), |capture| {
        fixture.blas.handle_on(&fixture.one)?.sgemm(&product(&results[0]))?;
        let fork = capture.fork()?;
        let handle = fixture.blas.handle_on(&fork)?;
        handle.sgemm(&product(&results[1]))?;
        handle.sgemm(&product(&results[1]))?;
        capture.join(fork)
    })?;
    fixture.blas.handle_on(&fixture.one)?.sgemm(&product(&results[0]))?;
    graph.replay(&fixture.one)?;
    graph.replay(&fixture.one)?;
    fixture.blas.clear_workspaces();
    fixture.one.synchronize()?;
    assert_eq!(fixture.words(results[0].ptr())[..4], [bits(36.0); 4]);
    assert_eq!(fixture.words(results[1].ptr())[..4], [bits(48.0); 4]);
    graph.reset()?;
    fixture.trim()
}

/// A loop with a conditional node in it, each with its own memory.
fn conditionals(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let [total, step] =
        [Arc::new(fixture.get(BYTES, 0, &fixture.one)?), Arc::new(fixture.get(BYTES, 10, &fixture.one)?)];
    let (count, choice) = graph.capture(&fixture.one, CaptureOptions::default(), |capture| {
        let (total, step) = (capture.share(total.clone())?, capture.share(step.clone())?);
        let (count, choice) = (capture.allocate(BYTES)?, capture.allocate(BYTES)?);
        capture.fill(count, Pattern::U32(3), 1, &fixture.one)?;
        capture.fill(choice, Pattern::U8(1), 1, &fixture.one)?;
        capture.while_node(Flag::word(count), |body| {
            let stream = body.stream().clone();
            let temp = fixture.get(MIB, 1, &stream)?;
            let at = body.buffer(total)?.ptr();
            fixture.plus(at, temp.ptr(), &stream)?;
            temp.free()?;
            body.if_node(Flag::byte(choice), |inner| {
                let stream = inner.stream().clone();
                capture_kernel(inner, fixture.plus, &[total.into(), step.into()], &stream)
            })?;
            body.fill(choice, Pattern::U8(0), 1, &stream)?;
            capture_kernel(body, fixture.less, &[count.into()], &stream)
        })?;
        Ok((count, choice))
    })?;
    graph.replay(&fixture.one)?;
    graph.replay(&fixture.one)?;
    fixture.one.synchronize()?;
    assert_eq!(fixture.words(total.ptr()), [26; WORDS], "three times 1 and once 10, twice");
    assert_eq!(fixture.words(graph.buffer(count)?.ptr())[0], 0);
    assert_eq!(fixture.words(graph.buffer(choice)?.ptr())[0] & 255, 0);
    graph.reset()
}

/// Graphs in one pool, of which later ones read outputs of the first, and a pool of the program's own.
fn shared_pool(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let outside = fixture.get(BYTES, 0, &fixture.one)?;
    let own = MemPool::new(&fixture.any, &fixture.device, PoolOptions::default())?;
    let left = graph.capture(&fixture.one, CaptureOptions::default(), |capture| {
        let temp = fixture.get(MIB, 1, &fixture.one)?;
        let left = capture.allocate(BYTES)?;
        capture.fill(left, Pattern::U32(4), WORDS as u64, &fixture.one)?;
        let _scope = capture.enter_pool(&own)?;
        capture.keep(fixture.get(512, 1, &fixture.one)?)?;
        temp.free()?;
        Ok(left)
    })?;
    let options = CaptureOptions::default().with_pool(graph.pool()?).with_mode(CaptureMode::ThreadLocal);
    let from = graph.buffer(left)?.ptr();
    let mut others = Vec::new();
    for _ in 0..2 {
        let mut other = fixture.graph();
        other.capture(&fixture.two, options, |capture| {
            let temp = fixture.get(MIB, 0, &fixture.two)?;
            fixture.plus(temp.ptr(), from, &fixture.two)?;
            fixture.plus(outside.ptr(), temp.ptr(), &fixture.two)?;
            capture.keep(temp).map(drop)
        })?;
        others.push(other);
    }
    for _ in 0..2 {
        graph.replay(&fixture.one)?;
        for other in &others {
            other.replay(&fixture.one)?;
        }
    }
    fixture.one.synchronize()?;
    assert_eq!(fixture.words(outside.ptr()), [16; WORDS]);
    drop(others.pop());
    graph.reset()?;
    drop(others);
    own.close()
}

/// Queries of an event during a capture in global mode.
fn pollers(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let outside = fixture.get(BYTES, 1, &fixture.two)?;
    let mut event = fixture.instance.event();
    event.record(&fixture.two)?;
    let (instance, event) = (&fixture.instance, &event);
    instance.polling().query(event)?;
    let key = graph.capture(&fixture.one, CaptureOptions::default(), |capture| {
        let key = capture.allocate(BYTES)?;
        capture.fill(key, Pattern::U32(3), WORDS as u64, &fixture.one)?;
        let polling = instance.polling();
        polling.query(event)?;
        polling.run(|| fixture.two.synchronize())?;
        Ok(key)
    })?;
    graph.replay(&fixture.one)?;
    fixture.one.synchronize()?;
    assert_eq!(fixture.words(outside.ptr()), [1; WORDS]);
    assert_eq!(fixture.words(graph.buffer(key)?.ptr()), [3; WORDS]);
    graph.reset()
}

/// Captures of dropped graphs, and later captures on the same stream.
fn dropped(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let mut other = fixture.graph();
    other.capture_begin(&fixture.one, CaptureOptions::default())?;
    let filled = other.scope().and_then(|mut scope| {
        let key = scope.allocate(MIB)?;
        scope.fill(key, Pattern::U8(1), 64, &fixture.one)
    });
    drop(other);
    filled?;
    graph.capture_begin(&fixture.one, CaptureOptions::default())?;
    fixture.get(MIB, 1, &fixture.one)?.free()?;
    graph.reset()?;
    fixture.expect_ended()?;
    temporaries(fixture, graph)
}

/// Captures that fail: an error, a forbidden call, a failing body; then one that succeeds.
fn broken(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let options = CaptureOptions::default();
    let given_up = graph.capture(&fixture.one, options, |_| {
        fixture.get(MIB, 1, &fixture.one)?;
        Err::<(), _>(Error::ThreadEnding)
    });
    assert!(given_up.is_err() && !graph.is_capturing());
    fixture.expect_ended()?;
    let forbidden = graph.capture(&fixture.one, options, |_| {
        let block = fixture.get(MIB, 1, &fixture.one)?;
        match fixture.device.synchronize() {
            Err(Error::Driver(error)) if error.code == ErrorCode::StreamCaptureUnsupported => Ok(block),
            other => Err(other.expect_err("it is forbidden")),
        }
    });
    assert!(forbidden.is_err() && !graph.is_captured(), "the capture was invalidated");
    fixture.expect_ended()?;
    let body = graph.capture(&fixture.one, options, |capture| {
        let flag = capture.allocate(4)?;
        capture.fill(flag, Pattern::U32(1), 1, &fixture.one)?;
        match capture.if_node(Flag::word(flag), |_| Err::<(), _>(Error::ThreadEnding)) {
            // Ignored, but the node has no body.
            Err(Error::ThreadEnding) => Ok(()),
            other => other,
        }
    });
    assert!(body.is_err() && !graph.is_captured());
    fixture.expect_ended()?;
    let unjoined = graph.capture(&fixture.one, options, |capture| {
        let fork = capture.fork()?;
        fixture.get(BYTES, 1, &fork)
    });
    assert!(unjoined.is_err());
    drop(unjoined);
    fixture.expect_ended()?;
    temporaries(fixture, graph)
}

/// Doubles its input.
struct Double<'l>(&'l FaultFixture);

impl Callable for Double<'_> {
    type Shape = u64;

    fn input_bytes(&self, shape: &u64) -> Vec<u64> {
        vec![BYTES * shape]
    }

    fn run(&self, call: &Call<'_, u64>) -> Result<Vec<DeviceBlock>> {
        let (fixture, from) = (self.0, call.inputs()[0].ptr);
        let scratch = call.allocator().allocate(MIB, call.stream())?;
        fixture.fill(scratch.ptr(), 0, call.stream())?;
        fixture.plus(scratch.ptr(), from, call.stream())?;
        let output = call.allocator().allocate(BYTES, call.stream())?;
        fixture.fill(output.ptr(), 0, call.stream())?;
        fixture.plus(output.ptr(), scratch.ptr(), call.stream())?;
        fixture.plus(output.ptr(), scratch.ptr(), call.stream())?;
        Ok(vec![output])
    }
}

/// A callable with two captured shapes and one other.
fn callable(fixture: &FaultFixture, _: &mut Graph) -> Result<()> {
    let options = GraphedOptions { warmups: 1, ..GraphedOptions::default() };
    let mut graphed = GraphedCallable::new(&fixture.any, &fixture.device, Double(fixture), [1, 2], options)?;
    for (shape, stream) in [(1, &fixture.one), (2, &fixture.two), (3, &fixture.one)] {
        let input = fixture.get(BYTES * shape, 20 + shape as u32, stream)?;
        let answer = graphed.call(&shape, &[Input::from(&input)], stream)?;
        stream.synchronize()?;
        let output = answer.outputs().next().expect("one").ptr();
        assert_eq!(fixture.words(output), [40 + 2 * shape as u32; WORDS], "shape {shape}: {answer:?}");
    }
    let failed = graphed.reports().iter().find_map(|report| report.failed.clone());
    graphed.close()?;
    match failed {
        Some(error) => Err(error),
        None => fixture.trim(),
    }
}

/// Pools of library handles, by thread and leased, while a stream is capturing.
fn handles(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let (blas, solver) = (HandlePool::new(&fixture.instance, Cublas), HandlePool::new(&fixture.instance, Cusolver));
    let outcome = (|| {
        blas.current(&fixture.device)?.set_stream(&fixture.one)?;
        graph.capture(&fixture.one, CaptureOptions::default(), |capture| {
            let lease = solver.lease(&fixture.device)?;
            lease.set_stream(&fixture.one)?;
            let other = blas.lease(&fixture.device)?;
            other.set_stream(&fixture.one)?;
            assert_ne!(lease.raw(), other.raw());
            let key = capture.allocate(BYTES)?;
            capture.fill(key, Pattern::U32(1), WORDS as u64, &fixture.one)
        })?;
        graph.replay(&fixture.one)?;
        assert_eq!((blas.alive(&fixture.device), blas.idle(&fixture.device), solver.idle(&fixture.device)), (2, 1, 1));
        solver.trim(&fixture.device)?;
        fixture.one.synchronize()?;
        graph.reset()
    })();
    // Handles cannot be destroyed while a stream is capturing, which it still is if the end of the capture failed
    // twice: the reset retries it.
    fixture.faulty.clear_plan();
    graph.reset()?;
    blas.close()?;
    solver.close()?;
    outcome
}

/// Pinned memory that a graph shares, allocates and uses without owning, replays on two streams, and a graph that is
/// reset or dropped with a replay under way.
fn pinned(fixture: &FaultFixture, graph: &mut Graph) -> Result<()> {
    let words = |value: u32| [value.to_le_bytes(); WORDS].concat();
    let input = Arc::new(fixture.host.allocate(BYTES)?);
    for by_drop in [false, true] {
        input.write(0, &words(5))?;
        let mut own = fixture.graph();
        let graph: &mut Graph = if by_drop { &mut own } else { graph };
        let output = graph.capture(&fixture.one, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            let input = capture.share_host(Arc::clone(&input))?;
            let output = capture.allocate_host(&fixture.host, BYTES)?;
            let (sum, more) = (capture.allocate(BYTES)?, capture.allocate(BYTES)?);
            let loose = fixture.host.allocate_on(BYTES, &stream)?;
            loose.write(0, &words(2))?;
            let loose = capture.keep_host(loose)?;
            capture.copy(sum, input, BYTES, &stream)?;
            let fork = capture.fork()?;
            capture.copy(more, loose, BYTES, &fork)?;
            capture.join(fork)?;
            capture_kernel(capture, fixture.plus, &[sum.into(), more.into()], &stream)?;
            capture.copy(output, sum, BYTES, &stream)?;
            let used_past_the_scope = fixture.host.allocate_on(BYTES, &stream)?;
            used_past_the_scope.record_use(&stream)?;
            used_past_the_scope.free()?;
            Ok(output)
        })?;
        graph.replay(&fixture.one)?;
        fixture.two.wait_stream(&fixture.one)?;
        graph.replay(&fixture.two)?;
        fixture.two.synchronize()?;
        let mut bytes = [0; BYTES as usize];
        graph.host_buffer(output)?.read(0, &mut bytes)?;
        assert_eq!(bytes[..], words(7));
        if by_drop {
            graph.replay(&fixture.two)?;
        } else {
            graph.reset()?;
        }
        drop(own);
        let next = fixture.host.allocate(BYTES)?;
        next.write(0, &words(9))?;
        next.free()?;
        fixture.two.synchronize()?;
        fixture.host.process_pending()?;
        fixture.host.trim(0)?;
        fixture.one.wait_stream(&fixture.two)?;
    }
    Ok(())
}
