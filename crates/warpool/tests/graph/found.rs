//! Failures that random programs, threads and faults found, reduced. Races are repeated often.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use warpool::Result;
use warpool::driver::sim::SimDriver;
use warpool::driver::{CaptureMode, Captures as _, DeviceId, DevicePtr, Memory as _, StreamId};
use warpool::generator::Generator;
use warpool::graph::CaptureOptions;
use warpool::memory::pools::{PoolOptions, Upstream};
use warpool::memory::{Allocate as _, MemPool};

use super::fixture::CaptureFixture;

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
    let fixture = CaptureFixture::new();
    let (allocator, device) = (fixture.context.any(), fixture.context.device());
    let slow = Arc::new(Slow { sim: fixture.context.sim.clone(), asked: Barrier::new(2) });
    let options = PoolOptions { upstream: Some(slow.clone()), ..PoolOptions::default() };
    let pool = MemPool::new(&allocator, &device, options).unwrap();
    let stream = device.lease_stream().unwrap();
    std::thread::scope(|scope| {
        let allocating_thread = scope.spawn(|| allocator.allocate_in(&pool, 512, &stream).map(drop));
        slow.asked.wait();
        let mut graph = fixture.graph();
        let mut rented = None;
        graph
            .capture(&fixture.side, CaptureOptions::default(), |capture| {
                rented = Some(allocating_thread.join().unwrap());
                capture.allocate(512)
            })
            .unwrap();
        assert_eq!(rented, Some(Ok(())));
        graph.reset().unwrap();
    });
    pool.close().unwrap();
    drop((stream, slow, allocator));
    fixture.finish();
}

/// Threads: of those that loaded the same kernels, all but one unloaded theirs again, which their captures forbid.
#[test]
fn kernels_are_loaded_by_several_captures_at_once() {
    const THREADS: usize = 3;
    for _ in 0..300 {
        let fixture = CaptureFixture::new();
        let (allocator, device) = (fixture.context.any(), fixture.context.device());
        let waiting = AtomicUsize::new(THREADS);
        std::thread::scope(|scope| {
            let draw = || {
                let generator = Generator::new(&device).unwrap();
                let stream = device.lease_stream().unwrap();
                let block = allocator.allocate(64, &stream).unwrap();
                let mut graph = fixture.graph();
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
        drop((allocator, device));
        fixture.finish();
    }
}

/// Review: a panic in the closure of a polling guard left the thread in relaxed mode.
#[test]
fn a_panic_in_a_polling_guard_restores_the_capture_mode() {
    let fixture = CaptureFixture::new();
    fixture
        .graph()
        .capture(&fixture.side, CaptureOptions::default(), |_| {
            let polling = fixture.context.instance.polling();
            let asked = catch_unwind(AssertUnwindSafe(|| {
                polling.run(|| -> Result<()> { std::panic::resume_unwind(Box::new("on purpose")) })
            }));
            assert!(asked.is_err());
            assert_eq!(fixture.context.sim.capture_mode_exchange(CaptureMode::Global), Ok(CaptureMode::Global));
            Ok(())
        })
        .unwrap();
    fixture.finish();
}
