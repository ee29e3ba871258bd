//! Failures that random programs, threads and faults found, reduced. Races are repeated often.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use warpool::Result;
use warpool::driver::sim::SimDriver;
use warpool::driver::{CaptureMode, Captures as _, DeviceId, DevicePtr, Memory as _, StreamId};
use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate as _, MemPool, PoolOptions, Upstream};

use super::context::SwarmContext;
use super::program::Program;

fn context() -> SwarmContext {
    let program = Program {
        settings: "",
        workspace_bytes: Some(0),
        outside: 0,
        generators: 0,
        shared_state: false,
        sections: Vec::new(),
        groups: Vec::new(),
        rounds: Vec::new(),
    };
    SwarmContext::new(0, &program)
}

fn graph(context: &SwarmContext) -> Graph {
    Graph::new(&context.allocator, &context.device, GraphOptions::default()).unwrap()
}

/// An upstream that lets another thread run before each allocation.
struct Slow {
    sim: Arc<SimDriver>,
    asked: Barrier,
}

impl Upstream for Slow {
    fn allocate(&self, device: DeviceId, bytes: u64, _: StreamId) -> Result<Option<DevicePtr>> {
        self.asked.wait();
        // The other thread now begins its capture, or waits for this one. Too short a sleep could only hide a bug.
        std::thread::sleep(Duration::from_millis(50));
        Ok(Some(self.sim.mem_alloc(device, bytes)?))
    }

    fn free(&self, ptr: DevicePtr, _: u64, _: DeviceId, _: StreamId) -> Result<()> {
        Ok(self.sim.mem_free(ptr)?)
    }
}

/// Threads: the allocator saw no capture, another thread began a global one, and the allocator's request invalidated
/// it.
#[test]
fn a_capture_does_not_begin_between_the_check_and_the_request() {
    let context = context();
    let slow = Arc::new(Slow { sim: context.sim.clone(), asked: Barrier::new(2) });
    let options = PoolOptions { upstream: Some(slow.clone()), ..PoolOptions::default() };
    let pool = MemPool::new(&context.allocator, &context.device, options).unwrap();
    let stream = context.device.lease_stream().unwrap();
    std::thread::scope(|scope| {
        let allocating_thread = scope.spawn(|| context.allocator.allocate_in(&pool, 512, &stream).map(drop));
        slow.asked.wait();
        let side = context.device.lease_stream().unwrap();
        let mut graph = graph(&context);
        let mut rented = None;
        graph
            .capture(&side, CaptureOptions::default(), |capture| {
                rented = Some(allocating_thread.join().unwrap());
                capture.allocate(512)
            })
            .unwrap();
        assert_eq!(rented, Some(Ok(())));
        graph.reset().unwrap();
    });
    pool.close().unwrap();
    drop((stream, slow));
    context.close();
}

/// Threads: of those that loaded the same kernels, all but one unloaded theirs again, which their captures forbid.
#[test]
fn kernels_are_loaded_by_several_captures_at_once() {
    const THREADS: usize = 3;
    for _ in 0..300 {
        let context = context();
        let waiting = AtomicUsize::new(THREADS);
        std::thread::scope(|scope| {
            let draw = || {
                let generator = Generator::new(&context.device).unwrap();
                let stream = context.device.lease_stream().unwrap();
                let block = context.allocator.allocate(64, &stream).unwrap();
                let mut graph = graph(&context);
                let options = CaptureOptions::default().with_mode(CaptureMode::ThreadLocal);
                graph
                    .capture(&stream, options, |_| {
                        // Spinning, so that all continue at the same moment.
                        waiting.fetch_sub(1, Ordering::AcqRel);
                        while waiting.load(Ordering::Acquire) > 0 {
                            std::thread::yield_now();
                        }
                        generator.fill_bits(&block, &stream)
                    })
                    .unwrap();
            };
            let threads = [scope.spawn(draw), scope.spawn(draw), scope.spawn(draw)];
            for thread in threads {
                thread.join().unwrap();
            }
        });
        graph(&context).reset().unwrap();
        context.close();
    }
}

/// Review: a panic in the closure of a polling guard left the thread in relaxed mode.
#[test]
fn a_panic_in_a_polling_guard_restores_the_capture_mode() {
    let context = context();
    let stream = context.device.lease_stream().unwrap();
    graph(&context)
        .capture(&stream, CaptureOptions::default(), |_| {
            let polling = context.instance.polling();
            let asked = catch_unwind(AssertUnwindSafe(|| {
                polling.run(|| -> Result<()> { std::panic::resume_unwind(Box::new("on purpose")) })
            }));
            assert!(asked.is_err());
            assert_eq!(context.sim.capture_mode_exchange(CaptureMode::Global), Ok(CaptureMode::Global));
            Ok(())
        })
        .unwrap();
    graph(&context).reset().unwrap();
    drop(stream);
    context.close();
}
