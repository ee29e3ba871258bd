//! What random programs, threads and faults found, made small. Where it took rng to find, it is tried often.

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

use super::machine::Machine;
use super::program::Program;

fn machine() -> Machine {
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
    Machine::new(0, &program)
}

fn graph(machine: &Machine) -> Graph {
    Graph::new(&machine.allocator, &machine.device, GraphOptions::default()).unwrap()
}

/// Asks the driver for memory, but lets another thread go first.
struct Slow {
    sim: Arc<SimDriver>,
    asked: Barrier,
}

impl Upstream for Slow {
    fn allocate(&self, device: DeviceId, bytes: u64, _: StreamId) -> Result<Option<DevicePtr>> {
        self.asked.wait();
        // The other thread now begins its capture, or waits for us. Too short a time could only hide a mistake.
        std::thread::sleep(Duration::from_millis(50));
        Ok(Some(self.sim.mem_alloc(device, bytes)?))
    }

    fn free(&self, ptr: DevicePtr, _: u64, _: DeviceId, _: StreamId) -> Result<()> {
        Ok(self.sim.mem_free(ptr)?)
    }
}

/// Threads: the allocator saw no capture, another thread began a strict one, and the allocator's request broke it.
#[test]
fn a_capture_does_not_begin_between_a_look_and_a_request() {
    let machine = machine();
    let slow = Arc::new(Slow { sim: machine.sim.clone(), asked: Barrier::new(2) });
    let options = PoolOptions { upstream: Some(slow.clone()), ..PoolOptions::default() };
    let pool = MemPool::new(&machine.allocator, &machine.device, options).unwrap();
    let stream = machine.device.lease_stream().unwrap();
    std::thread::scope(|scope| {
        let renter = scope.spawn(|| machine.allocator.allocate_in(pool.id(), 512, &stream).map(drop));
        slow.asked.wait();
        let side = machine.device.lease_stream().unwrap();
        let mut graph = graph(&machine);
        let mut rented = None;
        graph
            .capture(&side, CaptureOptions::default(), |capture| {
                rented = Some(renter.join().unwrap());
                capture.allocate(512)
            })
            .unwrap();
        assert_eq!(rented, Some(Ok(())));
        graph.reset().unwrap();
    });
    pool.close().unwrap();
    drop((stream, slow));
    machine.close();
}

/// Threads: of those that loaded the same kernels, all but one unloaded theirs again, which their own captures forbade.
#[test]
fn kernels_are_loaded_by_several_captures_at_once() {
    const THREADS: usize = 3;
    for _ in 0..300 {
        let machine = machine();
        let waiting = AtomicUsize::new(THREADS);
        std::thread::scope(|scope| {
            let draw = || {
                let generator = Generator::new(&machine.device).unwrap();
                let stream = machine.device.lease_stream().unwrap();
                let block = machine.allocator.allocate(64, &stream).unwrap();
                let mut graph = graph(&machine);
                let options = CaptureOptions::default().with_mode(CaptureMode::ThreadLocal);
                graph
                    .capture(&stream, options, |_| {
                        // Awake, so that all go on at the same moment.
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
        graph(&machine).reset().unwrap();
        machine.close();
    }
}

/// Review, after faults had shown that a thread could stay lax: a panic in the caller's question left it so.
#[test]
fn a_panic_in_a_question_leaves_the_thread_as_strict_as_before() {
    let machine = machine();
    let stream = machine.device.lease_stream().unwrap();
    graph(&machine)
        .capture(&stream, CaptureOptions::default(), |_| {
            let polling = machine.instance.polling();
            let asked = catch_unwind(AssertUnwindSafe(|| {
                polling.run(|| -> Result<()> { std::panic::resume_unwind(Box::new("on purpose")) })
            }));
            assert!(asked.is_err());
            assert_eq!(machine.sim.capture_mode_exchange(CaptureMode::Global), Ok(CaptureMode::Global));
            Ok(())
        })
        .unwrap();
    graph(&machine).reset().unwrap();
    drop(stream);
    machine.close();
}
