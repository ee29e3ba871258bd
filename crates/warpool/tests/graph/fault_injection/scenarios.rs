//! What graphs are for, in short programs that stop at the first error and look at what came of them.
//! They share a graph with their next run, so each leaves it to be reset.

use std::sync::Arc;

use warpool::driver::{BlasMatrix, CaptureMode, ErrorCode, Pattern, Sgemm};
use warpool::generator::philox;
use warpool::graph::{
    Call, Callable, CaptureOptions, Flag, Graph, GraphOptions, GraphedCallable, GraphedOptions, Input,
};
use warpool::handle::{Cublas, Cusolver, HandlePool};
use warpool::memory::{Allocate as _, DeviceBlock, MemPool, PoolOptions};
use warpool::{Error, Result};

use super::lab::{Lab, WORDS};
use crate::common::launch::capture_kernel;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 4 * WORDS as u64;

/// A program by name.
pub struct Scenario {
    pub name: &'static str,
    pub run: fn(&Lab, &mut Graph) -> Result<()>,
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

/// Outside memory, temporaries on two streams, replays on two streams, a reset, and all of it again.
fn temporaries(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let outside = Arc::new(lab.get(BYTES, 5, &lab.one)?);
    for round in 0..2 {
        let copy = graph.capture(&lab.one, CaptureOptions::default(), |capture| {
            let (key, stream) = (capture.share(outside.clone())?, capture.stream().clone());
            let temp = lab.get(3 * MIB, 1, &stream)?;
            let fork = capture.fork()?;
            let more = lab.get(600, 2, &fork)?;
            temp.record_use(&fork)?;
            lab.plus(temp.ptr(), more.ptr(), &fork)?;
            more.free()?;
            capture.join(fork)?;
            drop(temp);
            let kept = capture.keep(lab.get(BYTES, 3, &stream)?)?;
            capture_kernel(capture, lab.plus, &[key.into(), kept.into()], &stream)?;
            let copy = capture.allocate(BYTES)?;
            capture.fill(copy, Pattern::U8(0), BYTES, &stream)?;
            capture.copy(copy, key, BYTES, &stream)?;
            Ok(copy)
        })?;
        graph.replay(&lab.one)?;
        lab.two.wait_stream(&lab.one)?;
        graph.replay(&lab.two)?;
        lab.two.synchronize()?;
        let expected = [5 + 6 * (round + 1); WORDS];
        assert_eq!(lab.words(outside.ptr()), expected);
        assert_eq!(lab.words(graph.buffer(copy)?.ptr()), expected);
        lab.one.wait_stream(&lab.two)?;
        graph.reset()?;
        lab.trim()?;
    }
    Ok(())
}

/// A graph that keeps its template, asked about and made ready twice; another that is dropped with a replay under way.
fn kept(lab: &Lab, graph: &mut Graph) -> Result<()> {
    for by_drop in [true, false] {
        let mut own = lab.graph_with(GraphOptions { keep_graph: true });
        let key = own.capture(&lab.one, CaptureOptions::default(), |capture| {
            let key = capture.allocate(2 * MIB)?;
            capture.fill(key, Pattern::U32(7), WORDS as u64, &lab.one)?;
            Ok(key)
        })?;
        assert!(own.dot()?.contains("digraph") && own.topology()?.nodes.len() == 1);
        own.instantiate()?;
        own.instantiate()?;
        own.replay(&lab.two)?;
        own.raw()?;
        own.raw_exec()?;
        if by_drop {
            drop(own);
        } else {
            lab.two.synchronize()?;
            assert_eq!(lab.words(own.buffer(key)?.ptr()), [7; WORDS]);
            own.reset()?;
        }
    }
    lab.trim()?;
    temporaries(lab, graph)
}

/// Random numbers on two streams of a capture, and without a graph in between.
fn draws(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let numbers = |seed, offset| -> [u32; WORDS] {
        let words: Vec<u32> = (0..).flat_map(|at| philox::block(seed, at, offset)).take(WORDS).collect();
        words.try_into().expect("as many as were taken")
    };
    let blocks = [lab.get(BYTES, 0, &lab.one)?, lab.get(BYTES, 0, &lab.one)?];
    lab.generator.set_seed(11)?;
    graph.capture(&lab.one, CaptureOptions::default(), |capture| {
        lab.generator.fill_bits(&blocks[0], &lab.one)?;
        let fork = capture.fork()?;
        lab.generator.reserve(5, &fork)?;
        lab.generator.fill_bits(&blocks[1], &fork)?;
        capture.join(fork)
    })?;
    for (round, seed) in [11, 11, 12].into_iter().enumerate() {
        if seed != lab.generator.seed() {
            lab.generator.set_seed(seed)?;
        }
        let before = lab.generator.offset()?;
        if let Err(error) = graph.replay(&lab.one) {
            assert_eq!(lab.generator.offset(), Ok(before), "a replay that failed draws nothing, in round {round}");
            return Err(error);
        }
        lab.one.synchronize()?;
        assert_eq!(lab.words(blocks[0].ptr()), numbers(seed, before));
        assert_eq!(lab.words(blocks[1].ptr()), numbers(seed, before + 12));
        assert_eq!(lab.generator.offset()?, before + 16);
        let drawn = lab.generator.fill_bits(&blocks[0], &lab.one);
        assert_eq!(lab.generator.offset()?, before + if drawn.is_ok() { 20 } else { 16 });
        drawn?;
    }
    graph.reset()
}

/// Products in a capture on two streams, and one without.
fn products(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let bits = |value: f32| value.to_bits();
    let [a, b] = [lab.get(BYTES, bits(2.0), &lab.one)?, lab.get(BYTES, bits(3.0), &lab.one)?];
    let results = [lab.get(BYTES, 0, &lab.one)?, lab.get(BYTES, 0, &lab.one)?];
    let product = |to: &DeviceBlock| {
        let matrix = |block: &DeviceBlock| BlasMatrix { ptr: block.ptr(), stride: 2, transposed: false };
        Sgemm { m: 2, n: 2, k: 2, alpha: 1.0, a: matrix(&a), b: matrix(&b), beta: 1.0, c: matrix(to) }
    };
    graph.capture(&lab.one, CaptureOptions::default(), |capture| {
        lab.blas.handle_on(&lab.one)?.sgemm(&product(&results[0]))?;
        let fork = capture.fork()?;
        let handle = lab.blas.handle_on(&fork)?;
        handle.sgemm(&product(&results[1]))?;
        handle.sgemm(&product(&results[1]))?;
        capture.join(fork)
    })?;
    lab.blas.handle_on(&lab.one)?.sgemm(&product(&results[0]))?;
    graph.replay(&lab.one)?;
    graph.replay(&lab.one)?;
    lab.blas.clear_workspaces();
    lab.one.synchronize()?;
    assert_eq!(lab.words(results[0].ptr())[..4], [bits(36.0); 4]);
    assert_eq!(lab.words(results[1].ptr())[..4], [bits(48.0); 4]);
    graph.reset()?;
    lab.trim()
}

/// A loop with a condition in it, with memory of their own.
fn conditionals(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let [total, step] = [Arc::new(lab.get(BYTES, 0, &lab.one)?), Arc::new(lab.get(BYTES, 10, &lab.one)?)];
    let (count, choice) = graph.capture(&lab.one, CaptureOptions::default(), |capture| {
        let (total, step) = (capture.share(total.clone())?, capture.share(step.clone())?);
        let (count, choice) = (capture.allocate(BYTES)?, capture.allocate(BYTES)?);
        capture.fill(count, Pattern::U32(3), 1, &lab.one)?;
        capture.fill(choice, Pattern::U8(1), 1, &lab.one)?;
        capture.while_node(Flag::word(count), |body| {
            let stream = body.stream().clone();
            let temp = lab.get(MIB, 1, &stream)?;
            let at = body.buffer(total)?.ptr();
            lab.plus(at, temp.ptr(), &stream)?;
            temp.free()?;
            body.if_node(Flag::byte(choice), |inner| {
                let stream = inner.stream().clone();
                capture_kernel(inner, lab.plus, &[total.into(), step.into()], &stream)
            })?;
            body.fill(choice, Pattern::U8(0), 1, &stream)?;
            capture_kernel(body, lab.less, &[count.into()], &stream)
        })?;
        Ok((count, choice))
    })?;
    graph.replay(&lab.one)?;
    graph.replay(&lab.one)?;
    lab.one.synchronize()?;
    assert_eq!(lab.words(total.ptr()), [26; WORDS], "three times 1 and once 10, twice");
    assert_eq!(lab.words(graph.buffer(count)?.ptr())[0], 0);
    assert_eq!(lab.words(graph.buffer(choice)?.ptr())[0] & 255, 0);
    graph.reset()
}

/// Graphs in one pool, of which later ones read what the first left, and a pool of the program's own beside.
fn shared_pool(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let outside = lab.get(BYTES, 0, &lab.one)?;
    let own = MemPool::new(&lab.any, &lab.device, PoolOptions::default())?;
    let left = graph.capture(&lab.one, CaptureOptions::default(), |capture| {
        let temp = lab.get(MIB, 1, &lab.one)?;
        let left = capture.allocate(BYTES)?;
        capture.fill(left, Pattern::U32(4), WORDS as u64, &lab.one)?;
        let _scope = capture.enter_pool(&own)?;
        capture.keep(lab.get(512, 1, &lab.one)?)?;
        temp.free()?;
        Ok(left)
    })?;
    let options = CaptureOptions::default().with_pool(graph.pool()?).with_mode(CaptureMode::ThreadLocal);
    let from = graph.buffer(left)?.ptr();
    let mut others = Vec::new();
    for _ in 0..2 {
        let mut other = lab.graph();
        other.capture(&lab.two, options, |capture| {
            let temp = lab.get(MIB, 0, &lab.two)?;
            lab.plus(temp.ptr(), from, &lab.two)?;
            lab.plus(outside.ptr(), temp.ptr(), &lab.two)?;
            capture.keep(temp).map(drop)
        })?;
        others.push(other);
    }
    for _ in 0..2 {
        graph.replay(&lab.one)?;
        for other in &others {
            other.replay(&lab.one)?;
        }
    }
    lab.one.synchronize()?;
    assert_eq!(lab.words(outside.ptr()), [16; WORDS]);
    drop(others.pop());
    graph.reset()?;
    drop(others);
    own.close()
}

/// Questions about an event beside a strict capture.
fn pollers(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let outside = lab.get(BYTES, 1, &lab.two)?;
    let mut event = lab.instance.event();
    event.record(&lab.two)?;
    let (instance, event) = (&lab.instance, &event);
    instance.polling().query(event)?;
    let key = graph.capture(&lab.one, CaptureOptions::default(), |capture| {
        let key = capture.allocate(BYTES)?;
        capture.fill(key, Pattern::U32(3), WORDS as u64, &lab.one)?;
        let polling = instance.polling();
        polling.query(event)?;
        polling.run(|| lab.two.synchronize())?;
        Ok(key)
    })?;
    graph.replay(&lab.one)?;
    lab.one.synchronize()?;
    assert_eq!(lab.words(outside.ptr()), [1; WORDS]);
    assert_eq!(lab.words(graph.buffer(key)?.ptr()), [3; WORDS]);
    graph.reset()
}

/// Captures that nobody ends, and what comes after them on the same stream.
fn dropped(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let mut other = lab.graph();
    other.capture_begin(&lab.one, CaptureOptions::default())?;
    let filled = other.scope().and_then(|mut scope| {
        let key = scope.allocate(MIB)?;
        scope.fill(key, Pattern::U8(1), 64, &lab.one)
    });
    drop(other);
    filled?;
    graph.capture_begin(&lab.one, CaptureOptions::default())?;
    lab.get(MIB, 1, &lab.one)?.free()?;
    graph.reset()?;
    lab.expect_ended()?;
    temporaries(lab, graph)
}

/// Captures that come to nothing: an error, a forbidden call, a body that fails; then one that works.
fn broken(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let options = CaptureOptions::default();
    let given_up = graph.capture(&lab.one, options, |_| {
        lab.get(MIB, 1, &lab.one)?;
        Err::<(), _>(Error::ThreadEnding)
    });
    assert!(given_up.is_err() && !graph.is_capturing());
    lab.expect_ended()?;
    let forbidden = graph.capture(&lab.one, options, |_| {
        let block = lab.get(MIB, 1, &lab.one)?;
        match lab.device.synchronize() {
            Err(Error::Driver(error)) if error.code == ErrorCode::StreamCaptureUnsupported => Ok(block),
            other => Err(other.expect_err("it is forbidden")),
        }
    });
    assert!(forbidden.is_err() && !graph.is_captured(), "the driver ended it, and it was broken");
    lab.expect_ended()?;
    let body = graph.capture(&lab.one, options, |capture| {
        let flag = capture.allocate(4)?;
        capture.fill(flag, Pattern::U32(1), 1, &lab.one)?;
        match capture.if_node(Flag::word(flag), |_| Err::<(), _>(Error::ThreadEnding)) {
            // Passed over; but the node is there, and its body is not.
            Err(Error::ThreadEnding) => Ok(()),
            other => other,
        }
    });
    assert!(body.is_err() && !graph.is_captured());
    lab.expect_ended()?;
    let unjoined = graph.capture(&lab.one, options, |capture| {
        let fork = capture.fork()?;
        lab.get(BYTES, 1, &fork)
    });
    assert!(unjoined.is_err());
    drop(unjoined);
    lab.expect_ended()?;
    temporaries(lab, graph)
}

/// Doubles its input.
struct Double<'l>(&'l Lab);

impl Callable for Double<'_> {
    type Shape = u64;

    fn input_bytes(&self, shape: &u64) -> Vec<u64> {
        vec![BYTES * shape]
    }

    fn run(&self, call: &Call<'_, u64>) -> Result<Vec<DeviceBlock>> {
        let (lab, from) = (self.0, call.inputs()[0].ptr);
        let scratch = call.allocator().allocate(MIB, call.stream())?;
        lab.fill(scratch.ptr(), 0, call.stream())?;
        lab.plus(scratch.ptr(), from, call.stream())?;
        let output = call.allocator().allocate(BYTES, call.stream())?;
        lab.fill(output.ptr(), 0, call.stream())?;
        lab.plus(output.ptr(), scratch.ptr(), call.stream())?;
        lab.plus(output.ptr(), scratch.ptr(), call.stream())?;
        Ok(vec![output])
    }
}

/// A callable with two shapes, and one that it was not captured for.
fn callable(lab: &Lab, _: &mut Graph) -> Result<()> {
    let options = GraphedOptions { warmups: 1, ..GraphedOptions::default() };
    let mut graphed = GraphedCallable::new(&lab.any, &lab.device, Double(lab), [1, 2], options)?;
    for (shape, stream) in [(1, &lab.one), (2, &lab.two), (3, &lab.one)] {
        let input = lab.get(BYTES * shape, 20 + shape as u32, stream)?;
        let answer = graphed.call(&shape, &[Input::from(&input)], stream)?;
        stream.synchronize()?;
        let output = answer.outputs().next().expect("one").ptr();
        assert_eq!(lab.words(output), [40 + 2 * shape as u32; WORDS], "shape {shape}: {answer:?}");
    }
    let failed = graphed.reports().iter().find_map(|report| report.failed.clone());
    graphed.close()?;
    match failed {
        Some(error) => Err(error),
        None => lab.trim(),
    }
}

/// Pools of library handles, by thread and leased, while a stream captures.
fn handles(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let (blas, solver) = (HandlePool::new(&lab.instance, Cublas), HandlePool::new(&lab.instance, Cusolver));
    let outcome = (|| {
        blas.current(&lab.device)?.set_stream(&lab.one)?;
        graph.capture(&lab.one, CaptureOptions::default(), |capture| {
            let lease = solver.lease(&lab.device)?;
            lease.set_stream(&lab.one)?;
            let other = blas.lease(&lab.device)?;
            other.set_stream(&lab.one)?;
            assert_ne!(lease.raw(), other.raw());
            let key = capture.allocate(BYTES)?;
            capture.fill(key, Pattern::U32(1), WORDS as u64, &lab.one)
        })?;
        graph.replay(&lab.one)?;
        assert_eq!((blas.alive(&lab.device), blas.idle(&lab.device), solver.idle(&lab.device)), (2, 1, 1));
        solver.trim(&lab.device)?;
        lab.one.synchronize()?;
        graph.reset()
    })();
    // Handles cannot be destroyed while a stream captures, as one still does if the capture's end failed twice: the
    // reset tries again.
    lab.faulty.clear_plan();
    graph.reset()?;
    blas.close()?;
    solver.close()?;
    outcome
}

/// Pinned memory that a graph shares, makes and uses in passing, replays on two streams, and a graph that goes by a
/// reset or with a replay under way.
fn pinned(lab: &Lab, graph: &mut Graph) -> Result<()> {
    let words = |value: u32| [value.to_le_bytes(); WORDS].concat();
    let input = Arc::new(lab.host.allocate(BYTES)?);
    for by_drop in [false, true] {
        input.write(0, &words(5))?;
        let mut own = lab.graph();
        let graph: &mut Graph = if by_drop { &mut own } else { graph };
        let output = graph.capture(&lab.one, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            let input = capture.share_host(Arc::clone(&input))?;
            let output = capture.allocate_host(&lab.host, BYTES)?;
            let (sum, more) = (capture.allocate(BYTES)?, capture.allocate(BYTES)?);
            let loose = lab.host.allocate_on(BYTES, &stream)?;
            loose.write(0, &words(2))?;
            let loose = capture.keep_host(loose)?;
            capture.copy(sum, input, BYTES, &stream)?;
            let fork = capture.fork()?;
            capture.copy(more, loose, BYTES, &fork)?;
            capture.join(fork)?;
            capture_kernel(capture, lab.plus, &[sum.into(), more.into()], &stream)?;
            capture.copy(output, sum, BYTES, &stream)?;
            let used_past_the_scope = lab.host.allocate_on(BYTES, &stream)?;
            used_past_the_scope.record_use(&stream)?;
            used_past_the_scope.free()?;
            Ok(output)
        })?;
        graph.replay(&lab.one)?;
        lab.two.wait_stream(&lab.one)?;
        graph.replay(&lab.two)?;
        lab.two.synchronize()?;
        let mut bytes = [0; BYTES as usize];
        graph.host_buffer(output)?.read(0, &mut bytes)?;
        assert_eq!(bytes[..], words(7));
        if by_drop {
            graph.replay(&lab.two)?;
        } else {
            graph.reset()?;
        }
        drop(own);
        let next = lab.host.allocate(BYTES)?;
        next.write(0, &words(9))?;
        next.free()?;
        lab.two.synchronize()?;
        lab.host.process_pending()?;
        lab.host.trim(0)?;
        lab.one.wait_stream(&lab.two)?;
    }
    Ok(())
}
