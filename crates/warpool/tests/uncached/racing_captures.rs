//! Captures that one thread begins while an allocator, in another thread, is about to enqueue an event, a wait or an
//! allocation in the same stream. The capture waits for that driver call: an event that is recorded in a capture is a
//! captured event, a wait for work outside of a capture invalidates it, and an allocation becomes a node of its graph.

use std::sync::Arc;
use std::thread;

use warpool::driver::decorate::Hooked;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, CaptureMode, DeviceId};
use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::pools::{Checkpoints as _, PoolOptions, PrivatePools as _};
use warpool::memory::raw::Request;
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, DriverPoolAllocator, HostAllocator, MemPoolId, PagedAllocator,
    PinnedSettings, PluggableAllocator, Settings,
};
use warpool::{Device, Instance, Result, Stream};

use crate::common::logging_allocator::LoggingAllocator;
use crate::common::pause::Pause;

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

struct Machine {
    sim: Arc<SimDriver>,
    hooked: Arc<Hooked<Pause>>,
    instance: Instance,
    device: Device,
    /// The stream in which the other thread captures.
    captured: Stream,
    other: Stream,
}

impl Machine {
    fn new() -> Result<Self> {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let hooked = Arc::new(Hooked::with_hook(sim.clone(), Pause::default()));
        let instance = Instance::new(hooked.clone())?;
        let device = instance.device(0)?;
        let (captured, other) = (device.pool_stream()?, device.pool_stream()?);
        Ok(Self { sim, hooked, instance, device, captured, other })
    }

    fn allocators(&self) -> Result<[Arc<dyn DeviceAllocator>; 4]> {
        let external = LoggingAllocator::new(self.sim.clone()).plain();
        Ok([
            Arc::new(CachingAllocator::new(&self.instance, Settings::default())),
            Arc::new(self.paged()?),
            Arc::new(DriverPoolAllocator::new(&self.instance)),
            Arc::new(PluggableAllocator::new(&self.instance, Arc::new(external))?),
        ])
    }

    fn paged(&self) -> Result<PagedAllocator> {
        PagedAllocator::new(&self.instance, Settings::default())
    }

    /// Stops the first `call` of `act`. Meanwhile another thread captures, which has to wait for the call.
    #[track_caller]
    fn capture_waits(&self, call: Call, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let for_graph: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&self.instance, Settings::default()));
        let mut graph = Graph::new(&for_graph, &self.device, GraphOptions::default())?;
        let pause = self.hooked.hook();
        thread::scope(|threads| {
            let capture = threads.spawn(|| {
                pause.wait_until_reached();
                let options = CaptureOptions::default().with_mode(CaptureMode::Relaxed);
                graph.capture(&self.captured, options, |_| {
                    pause.release();
                    Ok(())
                })
            });
            pause.set(call);
            let acted = act();
            capture.join().unwrap()?;
            acted
        })?;
        assert!(pause.position(call) < pause.position(Call::CaptureBegin), "{:?}", pause.calls());
        assert!(graph.is_empty()?);
        self.device.synchronize()?;
        assert_eq!(self.sim.hazards(), []);
        Ok(())
    }
}

#[test]
fn fences_of_freed_blocks() -> Result<()> {
    for number in 0..4 {
        let gpu = Machine::new()?;
        let allocator = gpu.allocators()?[number].clone();
        println!("{}", allocator.name());
        let block = allocator.allocate(1000, &gpu.other)?;
        block.record_use(&gpu.captured)?;
        gpu.capture_waits(Call::EventRecord, || block.free())?;
        let again = allocator.allocate(1000, &gpu.other)?;
        again.free()?;
    }
    Ok(())
}

#[test]
fn fences_of_pinned_memory() -> Result<()> {
    let gpu = Machine::new()?;
    let host = HostAllocator::new(&gpu.instance, PinnedSettings::default());
    let block = host.allocate(1000)?;
    block.record_use(&gpu.captured)?;
    gpu.capture_waits(Call::EventRecord, || block.free())?;
    host.close()
}

/// Found as "already takes part in a capture": the wait for the pages' last stream invalidated the capture that had
/// just begun.
#[test]
fn waits_of_a_stream_that_takes_pages() -> Result<()> {
    for call in [Call::EventRecord, Call::StreamWaitEvent] {
        let gpu = Machine::new()?;
        let paged: Arc<dyn DeviceAllocator> = Arc::new(gpu.paged()?);
        let (giving, taking) = match call {
            // The event after the work of the stream that gives pages.
            Call::EventRecord => (&gpu.captured, &gpu.other),
            _ => (&gpu.other, &gpu.captured),
        };
        let kept = paged.allocate(MIB, giving)?;
        paged.allocate(40 * MIB, giving)?.free()?;
        gpu.capture_waits(call, || paged.allocate(40 * MIB, taking)?.free())?;
        kept.free()?;
    }
    Ok(())
}

#[test]
fn memory_of_the_drivers_pool() -> Result<()> {
    for call in [Call::PoolAlloc, Call::PoolFree] {
        let gpu = Machine::new()?;
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(DriverPoolAllocator::new(&gpu.instance));
        allocator.allocate(1000, &gpu.captured)?.free()?;
        gpu.capture_waits(call, || allocator.allocate(1000, &gpu.captured)?.free())?;
    }
    Ok(())
}

/// A wait for the stream would invalidate the capture, so an event is recorded first.
#[test]
fn waits_for_frees_of_the_drivers_pool() -> Result<()> {
    let gpu = Machine::new()?;
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(DriverPoolAllocator::new(&gpu.instance));
    allocator.allocate(1000, &gpu.captured)?.free()?;
    gpu.capture_waits(Call::EventRecord, || allocator.trim(DEVICE, MemPoolId::DEFAULT).map(drop))
}

#[test]
fn order_between_streams_of_a_restored_pool() -> Result<()> {
    for user_captures in [false, true] {
        let gpu = Machine::new()?;
        let paged = gpu.paged()?;
        let (user, own) = if user_captures { (&gpu.captured, &gpu.other) } else { (&gpu.other, &gpu.captured) };
        let pool = paged.create_pool(DEVICE, PoolOptions::default())?;
        let block = paged.allocate_raw(Request::new(DEVICE, own.id(), MIB).in_pool(pool))?;
        let checkpoint = paged.checkpoint(DEVICE, pool)?;
        paged.record_use(block, user.id())?;
        let call = if user_captures { Call::EventRecord } else { Call::StreamWaitEvent };
        gpu.capture_waits(call, || paged.restore(&checkpoint).map(drop))?;
    }
    Ok(())
}

/// Numbers that were drawn for a kernel outside of a graph would be the same at every replay.
#[test]
fn kernels_of_generators() -> Result<()> {
    let gpu = Machine::new()?;
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&gpu.instance, Settings::default()));
    let block = allocator.allocate(4096, &gpu.captured)?;
    let generator = Generator::new(&gpu.device)?;
    gpu.capture_waits(Call::KernelLaunch, || generator.fill_bits(&block, &gpu.captured))?;
    block.free()
}
