//! Captures that begin, end or are joined by one thread while another enqueues typed work in the same stream. The work
//! either runs, or is part of a graph that keeps its memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use warpool::driver::decorate::Hooked;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, CaptureMode};
use warpool::graph::{CaptureOptions, Graph, GraphError, GraphOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator, HostAllocator, MemPoolId, PinnedSettings, Settings};
use warpool::{Device, DeviceVec, Instance, PinnedVec, Result, Stream};
use warpool_testing::Rng;

use crate::pause::{PATIENCE, Pause};

struct Machine {
    sim: Arc<SimDriver>,
    hooked: Arc<Hooked<Pause>>,
    allocator: Arc<dyn DeviceAllocator>,
    host: HostAllocator,
    instance: Instance,
    device: Device,
}

impl Machine {
    fn new() -> Result<Self> {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let hooked = Arc::new(Hooked::with_hook(sim.clone(), Pause::default()));
        let instance = Instance::new(hooked.clone())?;
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let host = HostAllocator::new(&instance, PinnedSettings::default());
        let device = instance.device(0)?;
        Ok(Self { sim, hooked, allocator, host, instance, device })
    }

    fn pause(&self) -> &Pause {
        self.hooked.hook()
    }

    fn graph(&self) -> Result<Graph> {
        Graph::new(&self.allocator, &self.device, GraphOptions::default())
    }

    /// A vector of sevens.
    fn sevens(&self, stream: &Stream) -> Result<DeviceVec<u32>> {
        let mut vector = DeviceVec::uninit(&self.allocator, 1024, stream)?;
        stream.fill(&mut vector, 7)?;
        stream.synchronize()?;
        Ok(vector)
    }

    fn finish(self) -> Result<()> {
        self.device.synchronize()?;
        assert_eq!(self.sim.hazards(), []);
        Ok(())
    }
}

fn relaxed() -> CaptureOptions<'static> {
    CaptureOptions::default().with_mode(CaptureMode::Relaxed)
}

/// Issue 18: the copy became part of a graph that did not keep its memory, and a replay wrote to a live slice.
#[test]
fn a_capture_does_not_begin_between_check_and_call() -> Result<()> {
    // On the direct path to the driver, and with a tracked buffer that several streams or the host use.
    for pinned in [false, true] {
        let gpu = Machine::new()?;
        let stream = gpu.device.pool_stream()?;
        let source = gpu.sevens(&stream)?;
        let mut graph = gpu.graph()?;
        thread::scope(|threads| {
            let capture = threads.spawn(|| {
                gpu.pause().wait_until_reached();
                graph.capture(&stream, relaxed(), |_| {
                    gpu.pause().release();
                    Ok(())
                })
            });
            gpu.pause().set(Call::Copy);
            if pinned {
                let mut target = PinnedVec::<u32>::zeroed(&gpu.host, 1024)?;
                stream.copy(&source, &mut target)?;
                capture.join().unwrap()?;
                stream.synchronize()?;
                assert_eq!(target[0], 7, "it ran at once");
            } else {
                let mut target = DeviceVec::<u32>::uninit(&gpu.allocator, 1024, &stream)?;
                stream.copy(&source, &mut target)?;
                capture.join().unwrap()?;
                assert_eq!(target.to_vec(&stream)?[0], 7, "it ran at once");
            }
            let (copy, begin) = (gpu.pause().position(Call::Copy), gpu.pause().position(Call::CaptureBegin));
            assert!(copy < begin, "the capture waited for the copy");
            Result::Ok(())
        })?;
        assert!(graph.is_empty()?);
        gpu.finish()?;
    }
    Ok(())
}

/// Issue 18: it panicked, and the work ran without a record of its use.
#[test]
fn a_capture_does_not_end_between_check_and_call() -> Result<()> {
    let gpu = Machine::new()?;
    let stream = gpu.device.pool_stream()?;
    let mut vector = gpu.sevens(&stream)?;
    let mut graph = gpu.graph()?;
    graph.capture_begin(&stream, relaxed())?;
    thread::scope(|threads| {
        let end = threads.spawn(|| {
            gpu.pause().wait_until_reached();
            graph.capture_end(&stream)?;
            gpu.pause().release();
            Result::Ok(())
        });
        gpu.pause().set(Call::Fill);
        stream.fill(&mut vector, 8)?;
        end.join().unwrap()
    })?;
    assert!(gpu.pause().position(Call::Fill) < gpu.pause().position(Call::CaptureEnd));
    assert!(!graph.is_empty()?, "the fill is part of the graph");
    drop(vector);
    let mut other = gpu.sevens(&stream)?;
    graph.replay(&stream)?;
    assert_eq!(other.to_vec(&stream)?, [7; 1024], "the graph has kept its memory");
    stream.fill(&mut other, 1)?;
    gpu.finish()
}

/// The body of a conditional node begins and ends as a capture does.
#[test]
fn a_body_does_not_end_between_check_and_call() -> Result<()> {
    let gpu = Machine::new()?;
    let stream = gpu.device.pool_stream()?;
    let vector = Mutex::new(gpu.sevens(&stream)?);
    let mut graph = gpu.graph()?;
    thread::scope(|threads| {
        graph.capture(&stream, relaxed(), |capture| {
            let flag = capture.allocate(512)?;
            capture.if_node(warpool::graph::Flag::word(flag), |body| {
                let (body, gpu, vector) = (body.stream().clone(), &gpu, &vector);
                gpu.pause().set(Call::Fill);
                threads.spawn(move || {
                    body.fill(&mut *vector.lock().unwrap(), 8).unwrap();
                });
                gpu.pause().wait_until_reached();
                Ok(())
            })?;
            gpu.pause().release();
            Ok(())
        })
    })?;
    let fill = gpu.pause().calls().iter().rposition(|&call| call == Call::Fill);
    assert!(fill < gpu.pause().position(Call::CaptureEnd));
    drop(vector);
    graph.reset()?;
    gpu.finish()
}

/// A stream that joins a capture by a wait is not blocked: the graph keeps buffers whose use may have become part of
/// it.
#[test]
fn a_graph_keeps_the_memory_of_a_stream_that_joins_between_check_and_call() -> Result<()> {
    let gpu = Machine::new()?;
    let (stream, origin) = (gpu.device.pool_stream()?, gpu.device.pool_stream()?);
    let source = gpu.sevens(&stream)?;
    let mut graph = gpu.graph()?;
    graph.capture_begin(&origin, relaxed())?;
    let mut target = PinnedVec::<u32>::zeroed(&gpu.host, 1024)?;
    let at = target.try_slice()?.as_ptr();
    thread::scope(|threads| {
        let join = threads.spawn(|| {
            gpu.pause().wait_until_reached();
            stream.wait_stream(&origin)?;
            gpu.pause().release();
            Result::Ok(())
        });
        gpu.pause().set(Call::Copy);
        stream.copy(&source, &mut target)?;
        join.join().unwrap()
    })?;
    origin.wait_stream(&stream)?;
    graph.capture_end(&origin)?;
    assert!(!graph.is_empty()?, "the copy is part of the graph");
    assert!(target.try_slice().is_err(), "a graph uses it");
    drop((target, source));
    let other = PinnedVec::<u32>::zeroed(&gpu.host, 1024)?;
    assert_ne!(other.as_ptr(), at, "the graph has kept its memory");
    graph.replay(&stream)?;
    stream.synchronize()?;
    assert_eq!(other[..], [0; 1024]);
    gpu.finish()
}

#[test]
fn a_capture_cannot_begin_or_end_in_the_closure_of_a_typed_call() -> Result<()> {
    let gpu = Machine::new()?;
    let (stream, other) = (gpu.device.pool_stream()?, gpu.device.pool_stream()?);
    let vector = gpu.sevens(&stream)?;
    let mut graph = gpu.graph()?;
    let refused = |outcome: Result<()>| assert_eq!(outcome, Err(GraphError::InTypedCall.into()));
    stream.with_address(&vector, |_| {
        refused(graph.capture(&other, relaxed(), |_| Ok(())));
        Ok(())
    })?;
    graph.capture_begin(&other, relaxed())?;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        stream.with_address(&vector, |_| {
            refused(graph.capture_end(&other));
            refused(graph.reset());
            if graph.is_capturing() {
                panic!("a panic leaves the call")
            }
            Ok(())
        })
    }));
    assert!(panicked.is_err());
    graph.capture_end(&other)?;
    drop(vector);
    gpu.finish()
}

/// The closure of a typed call may make other typed calls and poll while a capture waits for it.
#[test]
fn a_closure_does_not_wait_for_a_capture_that_waits_for_it() -> Result<()> {
    let gpu = Machine::new()?;
    let (stream, other) = (gpu.device.pool_stream()?, gpu.device.pool_stream()?);
    let (vector, mut second) = (gpu.sevens(&stream)?, gpu.sevens(&other)?);
    let mut graph = gpu.graph()?;
    let begun = AtomicBool::new(false);
    thread::scope(|threads| {
        let capture = stream.with_address(&vector, |_| {
            let capture = threads.spawn(|| {
                graph.capture(&stream, relaxed(), |_| {
                    begun.store(true, Ordering::SeqCst);
                    Ok(())
                })
            });
            thread::sleep(PATIENCE); // until it waits
            drop(gpu.instance.polling());
            other.fill(&mut second, 8)?;
            assert_eq!(second.to_vec(&other)?, [8; 1024]);
            assert!(!begun.load(Ordering::SeqCst));
            Ok(capture)
        })?;
        capture.join().unwrap()
    })?;
    assert!(begun.load(Ordering::SeqCst));
    drop((vector, second));
    gpu.finish()
}

/// Threads that use one stream, some of which capture it. None of this needs `unsafe`, and every mistake of a thread is
/// an error of one of its calls.
#[test]
fn threads_on_a_shared_stream() {
    for seed in warpool_testing::seeds(3) {
        race(seed);
    }
}

fn race(seed: u64) {
    println!("seed {seed}");
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_seed(seed)));
    let instance = Instance::new(sim.clone()).unwrap();
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let host = HostAllocator::new(&instance, PinnedSettings::default());
    let device = instance.device(0).unwrap();
    let streams = [device.pool_stream().unwrap(), device.pool_stream().unwrap()];
    let (stop, changed, work) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU64::new(0));
    let mut kept = 0;
    thread::scope(|threads| {
        for thread in 0..2 {
            let (streams, allocator, host, stop, changed, work) = (&streams, &allocator, &host, &stop, &changed, &work);
            threads.spawn(move || {
                let mut rng = Rng::new(seed ^ (thread + 1));
                while !stop.load(Ordering::Relaxed) {
                    let stream = &streams[rng.below(2)];
                    let Ok(mut device) = DeviceVec::<u32>::uninit(allocator, 4096, stream) else { continue };
                    for _ in 0..rng.below(4) {
                        work.fetch_add(u64::from(stream.fill(&mut device, 7).is_ok()), Ordering::Relaxed);
                    }
                    let mut pinned = PinnedVec::<u32>::zeroed(host, 4096).unwrap();
                    let _ = stream.copy(&device, &mut pinned);
                    // A slice means that no device writes the memory.
                    if let Ok(slice) = pinned.try_slice() {
                        let before = std::hint::black_box(slice)[0];
                        thread::yield_now();
                        changed.fetch_add(u32::from(std::hint::black_box(slice)[0] != before), Ordering::Relaxed);
                    }
                }
            });
        }
        let mut rng = Rng::new(seed);
        for _ in 0..500 {
            let (origin, other) = (rng.below(2), rng.one_in(2));
            let mut graph = Graph::new(&allocator, &device, GraphOptions::default()).unwrap();
            let captured = graph.capture(&streams[origin], relaxed(), |_| {
                if other {
                    streams[1 - origin].wait_stream(&streams[origin])?;
                    streams[origin].wait_stream(&streams[1 - origin])?;
                }
                Ok(())
            });
            // The other threads may have left work in the second stream that was not joined.
            if captured.is_err() || graph.is_empty().unwrap() {
                continue;
            }
            kept += 1;
            sim.clear_hazards();
            let _ = allocator.trim(device.id(), MemPoolId::DEFAULT);
            let _ = graph.replay(&streams[origin]);
            let _ = streams[origin].synchronize();
            let hazards = sim.hazards();
            let of_graphs: Vec<String> =
                hazards.iter().map(ToString::to_string).filter(|hazard| hazard.contains("graph")).collect();
            assert!(of_graphs.is_empty(), "seed {seed}: {of_graphs:?}");
        }
        stop.store(true, Ordering::Relaxed);
    });
    println!("{kept} graphs with work of the other threads; {} fills", work.load(Ordering::Relaxed));
    assert_eq!(changed.load(Ordering::Relaxed), 0, "seed {seed}: a live slice changed");
}
