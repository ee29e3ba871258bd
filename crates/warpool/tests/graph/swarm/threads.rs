//! Real threads on one device: some capture graphs with temporaries, multiplications and draws, replay them and check
//! the results; others allocate, free and trim, and some poll events as watchdogs do. The interleaving differs from run
//! to run; what is asserted holds for all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use warpool::driver::{CaptureMode, DevicePtr};
use warpool::generator::{Generator, philox};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate as _, DeviceBlock, MemPoolId};
use warpool::{Result, StreamLease};

use super::context::SwarmContext;
use super::kernels::WORDS;
use super::program::{Program, Var, Work};
use crate::common::launch::launch_kernel;
use crate::common::rng::Rng;

const CAPTURERS: u64 = 3;
const BYTES: u64 = 4 * WORDS as u64;

/// One run of all threads.
pub fn run(seed: u64, rounds: usize) {
    let program = Program {
        settings: ["", "expandable_segments:True", "graph_capture_record_stream_reuse:True"][(seed % 3) as usize],
        workspace_bytes: [None, Some(0), Some(1 << 16)][(seed / 3 % 3) as usize],
        outside: 0,
        generators: 0,
        shared_state: false,
        sections: Vec::new(),
        groups: Vec::new(),
        rounds: Vec::new(),
    };
    let context = SwarmContext::new(seed, &program);
    // The kernels that draw numbers are loaded at first use, possibly by several threads at once.
    let shared = Generator::new(&context.device).unwrap();
    let (drawn, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (context, shared, drawn, done) = (&context, &shared, &drawn, &done);
        let capturers: Vec<_> = (0..CAPTURERS)
            .map(|thread| {
                scope.spawn(move || {
                    capturing_thread(context, shared, drawn, Rng::new(seed * 100 + thread), rounds).unwrap();
                })
            })
            .collect();
        let others = [
            scope.spawn(move || polling_thread(context, done).unwrap()),
            scope.spawn(move || allocating_thread(context, Rng::new(seed * 100 + 50), done).unwrap()),
        ];
        // Joined explicitly, so that the threads' destructors, above all of their handles, have run.
        let ended: Vec<_> = capturers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Release);
        let ended = ended.into_iter().chain(others.into_iter().map(std::thread::ScopedJoinHandle::join));
        for outcome in ended.collect::<Vec<_>>() {
            outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    assert_eq!(shared.offset().unwrap(), drawn.load(Ordering::Relaxed), "seed {seed}: every draw is counted");
    drop(shared);
    context.expect_no_hazards();
    context.close();
}

/// A captured graph and its results.
struct Captured {
    graph: Graph,
    /// Its results: numbers of the thread's own generator, then a product of those; numbers of the shared one.
    own: Arc<DeviceBlock>,
    product: Arc<DeviceBlock>,
    others: Arc<DeviceBlock>,
}

/// Captures, replays and checks, with a stream and a generator of its own, and one that all share.
fn capturing_thread(
    context: &SwarmContext,
    shared: &Generator,
    drawn: &AtomicU64,
    mut rng: Rng,
    rounds: usize,
) -> Result<()> {
    let (stream, replays) = (context.device.lease_stream()?, context.device.lease_stream()?);
    let generator = Generator::new(&context.device)?;
    let mut graphs: Vec<Captured> = Vec::new();
    for _ in 0..rounds {
        match rng.below(8) {
            0 | 1 => graphs.push(capture(context, shared, &generator, &mut rng, &stream)?),
            2 if !graphs.is_empty() => {
                let mut removed = graphs.swap_remove(rng.below(graphs.len()));
                if rng.one_in(2) {
                    removed.graph.reset()?;
                }
            }
            3 => generator.set_seed(rng.u64())?,
            _ if !graphs.is_empty() => {
                let chosen = &graphs[rng.below(graphs.len())];
                let target = if rng.one_in(2) { &stream } else { &replays };
                replay(context, chosen, &generator, drawn, target)?;
            }
            _ => {}
        }
    }
    Ok(())
}

fn capture(
    context: &SwarmContext,
    shared: &Generator,
    generator: &Generator,
    rng: &mut Rng,
    stream: &StreamLease,
) -> Result<Captured> {
    let allocate = || Ok::<_, warpool::Error>(Arc::new(context.allocator.allocate(BYTES, stream)?));
    let (own, product, others) = (allocate()?, allocate()?, allocate()?);
    let mut graph = Graph::new(&context.allocator, &context.device, GraphOptions { keep_graph: rng.one_in(3) })?;
    // Most are thread-local; some are global, so other threads must poll with guards.
    let modes = [CaptureMode::ThreadLocal, CaptureMode::ThreadLocal, CaptureMode::Global, CaptureMode::Relaxed];
    let options = CaptureOptions::default().with_mode(rng.pick(&modes));
    graph.capture(stream, options, |capture| {
        for block in [&own, &product, &others] {
            capture.share(Arc::clone(block))?;
        }
        generator.fill_bits(&*own, stream)?;
        let fork = capture.fork()?;
        shared.fill_bits(&*others, &fork)?;
        let temps = [0; 2].map(|_| context.allocator.allocate(BYTES + rng.u64() % (3 << 20), stream));
        let [left, right] = temps;
        let (left, right) = (left?, right?);
        let at = |var| -> DevicePtr {
            match var {
                Var::Temp(0) => left.ptr(),
                Var::Temp(1) => right.ptr(),
                _ => {
                    if var == Var::Outside(0) {
                        own.ptr()
                    } else {
                        product.ptr()
                    }
                }
            }
        };
        let issue = |work| context.issue(work, &at, stream);
        issue(Work::Tame { to: Var::Temp(0), from: Var::Outside(0) })?;
        issue(Work::Tame { to: Var::Temp(1), from: Var::Outside(0) })?;
        issue(Work::Fill { to: Var::Outside(1), value: 0, width: 4 })?;
        issue(Work::Multiply {
            to: Var::Outside(1),
            a: Var::Temp(0),
            b: Var::Temp(1),
            size: [4; 3],
            transposed: [false, true],
            beta: 0.0,
        })?;
        left.free()?;
        drop(right);
        capture.join(fork)
    })?;
    Ok(Captured { graph, own, product, others })
}

fn replay(
    context: &SwarmContext,
    captured: &Captured,
    generator: &Generator,
    drawn: &AtomicU64,
    stream: &StreamLease,
) -> Result<()> {
    let (seed, offset) = (generator.seed(), generator.offset()?);
    captured.graph.replay(stream)?;
    drawn.fetch_add(4, Ordering::Relaxed);
    context.instance.polling().run(|| stream.synchronize())?;
    let words = context.words(captured.own.ptr());
    let expected: Vec<u32> = (0..).flat_map(|at| philox::block(seed, at, offset)).take(WORDS).collect();
    assert_eq!(words, expected);
    assert_eq!(generator.offset()?, offset + 4);
    let floats: Vec<f32> = words.iter().map(|word| (word % 17) as f32 - 8.0).collect();
    // Columns of four; the right matrix is transposed.
    let product: Vec<f32> =
        (0..WORDS).map(|at| (0..4).map(|k| floats[at % 4 + 4 * k] * floats[at / 4 + 4 * k]).sum()).collect();
    let result: Vec<f32> = context.words(captured.product.ptr()).into_iter().map(f32::from_bits).collect();
    assert_eq!(result, product);
    // One draw of the shared generator, at some offset.
    let theirs = context.words(captured.others.ptr());
    let is_offset = |offset: u64| philox::block(warpool::generator::DEFAULT_SEED, 0, offset)[..] == theirs[..4];
    let until = drawn.load(Ordering::Relaxed) + 4 * CAPTURERS;
    assert!((0..=until / 4).any(|point| is_offset(4 * point)), "no point of the shared generator");
    Ok(())
}

/// Queries an event in a loop, as a watchdog does.
fn polling_thread(context: &SwarmContext, done: &AtomicBool) -> Result<()> {
    let stream = context.device.lease_stream()?;
    let block = context.allocator.allocate(BYTES, &stream)?;
    let args = [block.ptr().into(), 1_u32.into()];
    context.issue(Work::Fill { to: Var::Outside(0), value: 0, width: 4 }, &|_| block.ptr(), &stream)?;
    let mut count = 0;
    while !done.load(Ordering::Acquire) {
        launch_kernel(&**context.instance.driver(), context.kernels.add, &args, stream.id())?;
        count += 1;
        let mut event = context.instance.event();
        event.record(&stream)?;
        // On the virtual clock only a synchronization lets work complete.
        let is_done = (0..20).map(|_| context.instance.polling().query(&event)).find(|done| *done != Ok(false));
        if !is_done.unwrap_or(Ok(false))? {
            context.instance.polling().run(|| stream.synchronize())?;
        }
        std::thread::yield_now();
    }
    context.instance.polling().run(|| stream.synchronize())?;
    assert_eq!(context.words(block.ptr()), [count; WORDS]);
    Ok(())
}

/// Allocates, uses on two streams, frees, multiplies and trims.
fn allocating_thread(context: &SwarmContext, mut rng: Rng, done: &AtomicBool) -> Result<()> {
    let streams = [context.device.lease_stream()?, context.device.lease_stream()?];
    let mut held: Vec<(DeviceBlock, u32)> = Vec::new();
    let mut tag = 0;
    while !done.load(Ordering::Acquire) {
        let stream = &streams[rng.below(2)];
        match rng.below(8) {
            0..3 => {
                let block = context.allocator.allocate(BYTES + rng.u64() % (4 << 20), &streams[0])?;
                tag += 1;
                context.issue(Work::Fill { to: Var::Temp(0), value: tag, width: 4 }, &|_| block.ptr(), &streams[0])?;
                held.push((block, tag));
            }
            3 | 4 if !held.is_empty() => {
                let (block, tag) = held.swap_remove(rng.below(held.len()));
                if rng.one_in(2) {
                    streams[1].wait_stream(&streams[0])?;
                    block.record_use(&streams[1])?;
                    context.issue(Work::Add { to: Var::Temp(0), value: 1 }, &|_| block.ptr(), &streams[1])?;
                    context.instance.polling().run(|| streams[1].synchronize())?;
                    assert_eq!(context.words(block.ptr()), [tag + 1; WORDS]);
                }
                if rng.one_in(2) { block.free()? } else { drop(block) }
            }
            5 => {
                let handle = context.blas.handle_on(stream)?;
                drop(handle);
            }
            6 if rng.one_in(4) => {
                context.allocator.trim(context.device.id(), MemPoolId::DEFAULT)?;
            }
            7 if rng.one_in(4) => drop(context.blas.clear_workspaces_of(stream)?),
            _ => {}
        }
        if held.len() > 20 {
            held.truncate(10);
        }
    }
    Ok(())
}
