//! Threads on one device: some capture graphs with temporaries, multiplications and random numbers, replay them and
//! check the results; one allocates, frees and trims; one polls events as watchdogs do. What is checked holds for all
//! interleavings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use warpool::driver::{CaptureMode, DevicePtr};
use warpool::generator::{DEFAULT_SEED, Generator, philox};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate as _, DeviceBlock, MemPoolId};
use warpool::{Result, StreamLease};

use super::work::{BYTES, Model, State, Var, WORDS, Work};
use super::{Gpu, Run};
use crate::caught::{Caught, caught};
use crate::context::Context;
use crate::counts::Counts;
use crate::machine::device_id;
use crate::rng::Rng;

const CAPTURING: u64 = 3;
/// The variables of a capturing thread: what its own generator draws, a product of that, and the factors.
const OWN: Var = Var::Outside(0);
const PRODUCT: Var = Var::Outside(1);
const LEFT: Var = Var::Temp(0);
const RIGHT: Var = Var::Temp(1);

struct Shared<'a> {
    gpu: &'a Gpu,
    generator: Generator,
    /// How far the shared generator was advanced.
    drawn: AtomicU64,
    is_over: AtomicBool,
}

struct Captured {
    graph: Graph,
    own: Arc<DeviceBlock>,
    product: Arc<DeviceBlock>,
    others: Arc<DeviceBlock>,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let rounds = 40 + context.rng.below(40);
    let run = Run::new(context);
    let seed = run.context.seed;
    let generator = Generator::new(&run.gpu.device).unwrap();
    let shared = Shared { gpu: &run.gpu, generator, drawn: AtomicU64::new(0), is_over: AtomicBool::new(false) };
    let outcomes: Vec<std::result::Result<Result<Counts>, Caught>> = std::thread::scope(|scope| {
        let (shared, rng) = (&shared, |thread: u64| Rng::new(seed ^ (thread + 1).wrapping_mul(0x9e37_79b9)));
        let capturing: Vec<_> = (0..CAPTURING)
            .map(|thread| scope.spawn(move || caught(|| shared.capture_and_replay(rng(thread), rounds))))
            .collect();
        let others =
            [scope.spawn(|| caught(|| shared.poll())), scope.spawn(move || caught(|| shared.allocate(rng(CAPTURING))))];
        // Joined explicitly, so that the threads' destructors, above all of their handles, have run.
        let mut outcomes: Vec<_> = capturing.into_iter().map(|thread| thread.join().expect("it is caught")).collect();
        shared.is_over.store(true, Ordering::Release);
        outcomes.extend(others.map(|thread| thread.join().expect("it is caught")));
        outcomes
    });
    for outcome in outcomes {
        match outcome {
            Ok(counts) => run.context.counts += counts.unwrap(),
            Err(Caught::Failed(message)) => panic!("{message}"),
            Err(Caught::Injected) => panic!("a panic that nobody injected"),
        }
    }
    let drawn = shared.drawn.load(Ordering::Relaxed);
    assert_eq!(shared.generator.offset().unwrap(), drawn, "every draw is counted");
    drop(shared);
    run.finish();
}

impl Shared<'_> {
    /// With a stream and a generator of its own, and one that all share.
    fn capture_and_replay(&self, mut rng: Rng, rounds: usize) -> Result<Counts> {
        let device = &self.gpu.device;
        let (stream, other, generator) = (device.lease_stream()?, device.lease_stream()?, Generator::new(device)?);
        let (mut graphs, mut counts) = (Vec::new(), Counts::default());
        for _ in 0..rounds {
            counts.operations += 1;
            match rng.below(8) {
                0 | 1 => {
                    graphs.push(self.capture(&generator, &mut rng, &stream)?);
                    counts.captures += 1;
                }
                2 if !graphs.is_empty() => {
                    let mut removed: Captured = graphs.swap_remove(rng.below(graphs.len()));
                    if rng.one_in(2) {
                        removed.graph.reset()?;
                    }
                }
                3 => generator.set_seed(rng.u64())?,
                _ if !graphs.is_empty() => {
                    let stream = if rng.one_in(2) { &stream } else { &other };
                    self.replay(&graphs[rng.below(graphs.len())], &generator, stream)?;
                    counts.replays += 1;
                }
                _ => {}
            }
        }
        Ok(counts)
    }

    /// The work in a capture on the thread's own variables.
    fn product() -> [Work; 4] {
        let transposed = [false, true];
        [
            Work::Tame { to: LEFT, from: OWN },
            Work::Tame { to: RIGHT, from: OWN },
            Work::Fill { to: PRODUCT, value: 0, width: 4 },
            Work::Multiply { to: PRODUCT, a: LEFT, b: RIGHT, size: [4; 3], transposed, beta: 0.0 },
        ]
    }

    fn capture(&self, generator: &Generator, rng: &mut Rng, stream: &StreamLease) -> Result<Captured> {
        let gpu = self.gpu;
        let allocate = || Ok::<_, warpool::Error>(Arc::new(gpu.allocator.allocate(BYTES, stream)?));
        let (own, product, others) = (allocate()?, allocate()?, allocate()?);
        let mut graph = Graph::new(&gpu.allocator, &gpu.device, GraphOptions { keep_graph: rng.one_in(3) })?;
        // Some are global, so other threads must poll with guards.
        let modes = [CaptureMode::ThreadLocal, CaptureMode::ThreadLocal, CaptureMode::Global, CaptureMode::Relaxed];
        let options = CaptureOptions::default().with_mode(rng.pick(&modes));
        graph.capture(stream, options, |capture| {
            for block in [&own, &product, &others] {
                capture.share(Arc::clone(block))?;
            }
            generator.fill_bits(&*own, stream)?;
            let fork = capture.fork()?;
            self.generator.fill_bits(&*others, &fork)?;
            let temp = |bytes: u64| gpu.allocator.allocate(BYTES + bytes, stream);
            let (left, right) = (temp(rng.u64_below(3 << 20))?, temp(rng.u64_below(3 << 20))?);
            let at = |var| -> DevicePtr {
                match var {
                    LEFT => left.ptr(),
                    RIGHT => right.ptr(),
                    OWN => own.ptr(),
                    _ => product.ptr(),
                }
            };
            Self::product().into_iter().try_for_each(|work| gpu.issue(work, &at, stream))?;
            left.free()?;
            drop(right);
            capture.join(fork)
        })?;
        Ok(Captured { graph, own, product, others })
    }

    fn replay(&self, captured: &Captured, generator: &Generator, stream: &StreamLease) -> Result<()> {
        let state = State { seed: generator.seed(), offset: generator.offset()? };
        captured.graph.replay(stream)?;
        self.drawn.fetch_add(4, Ordering::Relaxed);
        self.gpu.instance.polling().run(|| stream.synchronize())?;
        let mut model = Model { values: Default::default(), states: vec![state], state_of: vec![0] };
        model.apply(Work::Draw { to: OWN, generator: 0, words: WORDS as u64 });
        Self::product().into_iter().for_each(|work| model.apply(work));
        for (var, block) in [(OWN, &captured.own), (PRODUCT, &captured.product)] {
            assert_eq!(self.gpu.words(block), model.values[&var], "{var:?} after a replay");
        }
        assert_eq!(generator.offset()?, model.states[0].offset, "the offset after a replay");
        // One draw of the shared generator, at some offset.
        let theirs = self.gpu.words(&captured.others);
        let is_at = |offset: u64| philox::block(DEFAULT_SEED, 0, offset)[..] == theirs[..4];
        let until = self.drawn.load(Ordering::Relaxed) / 4 + CAPTURING;
        assert!((0..=until).any(|draw| is_at(4 * draw)), "no draw of the shared generator");
        Ok(())
    }

    /// Queries an event again and again, as a watchdog does.
    fn poll(&self) -> Result<Counts> {
        let gpu = self.gpu;
        let stream = gpu.device.lease_stream()?;
        let block = gpu.allocator.allocate(BYTES, &stream)?;
        let mut model = Model { values: Default::default(), states: Vec::new(), state_of: Vec::new() };
        let issue = |model: &mut Model, work| {
            model.apply(work);
            gpu.issue(work, &|_| block.ptr(), &stream)
        };
        issue(&mut model, Work::Fill { to: OWN, value: 3, width: 4 })?;
        while !self.is_over.load(Ordering::Acquire) {
            issue(&mut model, Work::Mix { to: OWN, a: OWN, b: OWN })?;
            let mut event = gpu.instance.event();
            event.record(&stream)?;
            // On the virtual clock only a synchronization lets work complete.
            let queried = (0..20).map(|_| gpu.instance.polling().query(&event)).find(|done| *done != Ok(false));
            if !queried.unwrap_or(Ok(false))? {
                gpu.instance.polling().run(|| stream.synchronize())?;
            }
            std::thread::yield_now();
        }
        gpu.instance.polling().run(|| stream.synchronize())?;
        assert_eq!(gpu.words(&block), model.values[&OWN], "what the polling thread computes");
        Ok(Counts::default())
    }

    /// Allocates, uses in two streams, frees, takes handles of cuBLAS and trims.
    fn allocate(&self, mut rng: Rng) -> Result<Counts> {
        let gpu = self.gpu;
        let streams = [gpu.device.lease_stream()?, gpu.device.lease_stream()?];
        let (mut held, mut counts) = (Vec::<(DeviceBlock, u32)>::new(), Counts::default());
        while !self.is_over.load(Ordering::Acquire) {
            match rng.below(8) {
                0..3 => {
                    let (block, value) =
                        (gpu.allocator.allocate(BYTES + rng.u64_below(4 << 20), &streams[0])?, rng.u32());
                    counts.allocations += 1;
                    gpu.issue(Work::Fill { to: OWN, value, width: 4 }, &|_| block.ptr(), &streams[0])?;
                    held.push((block, value));
                }
                3 | 4 if !held.is_empty() => {
                    let (block, value) = held.swap_remove(rng.below(held.len()));
                    if rng.one_in(2) {
                        streams[1].wait_stream(&streams[0])?;
                        block.record_use(&streams[1])?;
                        gpu.issue(Work::CountDown { flag: OWN }, &|_| block.ptr(), &streams[1])?;
                        gpu.instance.polling().run(|| streams[1].synchronize())?;
                        let words = gpu.words(&block);
                        assert_eq!((words[0], words[1]), (value.saturating_sub(1), value), "a block of this thread");
                    }
                    if rng.one_in(2) { block.free()? } else { drop(block) }
                }
                5 => drop(gpu.blas.handle_on(&streams[rng.below(2)])?),
                6 if rng.one_in(4) => drop(gpu.allocator.trim(device_id(0), MemPoolId::DEFAULT)?),
                7 if rng.one_in(4) => drop(gpu.blas.clear_workspaces_of(&streams[rng.below(2)])?),
                _ => {}
            }
            if held.len() > 20 {
                held.truncate(10);
            }
        }
        Ok(counts)
    }
}
