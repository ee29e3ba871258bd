//! Frees whose fences were left to a later call, by a destructor, a capture or a failed call: the owners of the streams
//! may destroy them meanwhile, and no later call names them. Their last work is waited for all the same.

use std::sync::Arc;

use warpool::driver::decorate::{Counting, FaultPlan, Faulty};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{
    Call, CaptureMode, Captures as _, Copies as _, Devices as _, ErrorCode, ForeignStream, Graphs as _, Memory as _,
    Pattern, StreamId, StreamOptions, Streams as _,
};
use warpool::memory::external::FnAllocator;
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, DriverPoolAllocator, HostAllocator, MemPoolId,
    PagedAllocator, PinnedSettings, PluggableAllocator, Settings,
};
use warpool::{Instance, Stream};

use crate::common::memory::{FIRST as DEVICE, MIB};

struct Gpu {
    sim: Arc<SimDriver>,
    faulty: Arc<Faulty>,
    counting: Arc<Counting>,
    instance: Instance,
}

impl Gpu {
    fn new() -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_capacity(4 << 30)));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let counting = Arc::new(Counting::new(faulty.clone()));
        let instance = Instance::new(counting.clone()).unwrap();
        Self { sim, faulty, counting, instance }
    }

    /// A stream that lives as long as the instance.
    fn own(&self) -> Stream {
        self.instance.device(0).unwrap().pool_stream().unwrap()
    }

    /// A foreign stream, and its id for its creator.
    fn foreign(&self) -> (Stream, StreamId) {
        let options = StreamOptions { non_blocking: true, priority: 0 };
        let theirs = self.sim.create_foreign_stream(DEVICE, options).unwrap();
        let raw = self.sim.stream_handle(theirs).unwrap().raw;
        // SAFETY: a stream of the simulation, which refuses handles of destroyed streams.
        let foreign = unsafe { ForeignStream::new(raw) };
        (Stream::external(&self.instance.device(0).unwrap(), foreign).unwrap(), theirs)
    }

    /// From now on no event can be recorded.
    fn fail_events(&self) {
        let calls = [Call::EventCreate, Call::EventRecord];
        self.faulty.set_plan(FaultPlan::new().fail_fraction(&calls, 1.0, 0, ErrorCode::LaunchFailed));
    }

    #[track_caller]
    fn expect_no_hazards(&self, what: &str) {
        self.sim.device_synchronize(DEVICE).unwrap();
        let hazards = self.sim.hazards();
        assert!(hazards.is_empty(), "{what}: {} hazards; the first is: {}", hazards.len(), hazards[0]);
    }
}

const ALLOCATORS: [&str; 5] = ["caching", "expandable segments", "paged", "driver pool", "external"];

fn allocator(gpu: &Gpu, name: &str) -> Arc<dyn DeviceAllocator> {
    let settings = Settings { expandable_segments: name == "expandable segments", ..Settings::default() };
    match name {
        "paged" => Arc::new(PagedAllocator::new(&gpu.instance, settings).unwrap()),
        "driver pool" => Arc::new(DriverPoolAllocator::new(&gpu.instance)),
        "external" => {
            let (allocates, frees) = (gpu.sim.clone(), gpu.sim.clone());
            let external = FnAllocator::new(
                move |bytes, device, _| Ok(allocates.mem_alloc(device, bytes).ok()),
                move |ptr, _, _, _| Ok(frees.mem_free(ptr)?),
            );
            Arc::new(PluggableAllocator::new(&gpu.instance, Arc::new(external)).unwrap())
        }
        _ => Arc::new(CachingAllocator::new(&gpu.instance, settings)),
    }
}

/// What keeps the call that frees the blocks from recording fences.
#[derive(Clone, Copy, Debug)]
enum Postponed {
    /// They are dropped.
    Destructor,
    /// The foreign stream captures.
    Capture,
    /// They are dropped, and another stream captures while the next calls are made.
    DestructorInCapture,
    /// No event can be recorded.
    Fault,
}

impl Postponed {
    const ALL: [Self; 4] = [Self::Destructor, Self::Capture, Self::DestructorInCapture, Self::Fault];
}

fn begin_capture(gpu: &Gpu, allocator: &dyn DeviceAllocator, stream: StreamId) {
    if let Ok(pools) = allocator.pools() {
        pools.capture_began(DEVICE).unwrap();
    }
    gpu.sim.capture_begin(stream, CaptureMode::Global).unwrap();
}

fn end_capture(gpu: &Gpu, allocator: &dyn DeviceAllocator, stream: StreamId) {
    let graph = gpu.sim.capture_end(stream).expect("no call invalidates the capture");
    gpu.sim.graph_destroy(graph).unwrap();
    if let Ok(pools) = allocator.pools() {
        pools.capture_ended(DEVICE).unwrap();
    }
}

/// Much work of a stream in a block.
fn work(gpu: &Gpu, block: &DeviceBlock, stream: &Stream) {
    for value in 0..20 {
        gpu.sim.fill(block.ptr(), Pattern::U8(value), block.bytes(), stream.id()).unwrap();
    }
}

fn program(name: &str, postponed: Postponed) {
    program_on(&Gpu::new(), name, postponed);
}

fn program_on(gpu: &Gpu, name: &str, postponed: Postponed) {
    let what = format!("{name}, postponed {postponed:?}");
    let allocator = allocator(gpu, name);
    let (own, next, captured, (foreign, theirs)) = (gpu.own(), gpu.own(), gpu.own(), gpu.foreign());
    let lent = allocator.allocate(8 * MIB, &own).unwrap();
    foreign.wait_stream(&own).unwrap();
    work(gpu, &lent, &foreign);
    lent.record_use(&foreign).unwrap();
    let theirs_block = allocator.allocate(4 * MIB, &foreign).unwrap();
    work(gpu, &theirs_block, &foreign);
    theirs_block.record_use(&own).unwrap();
    match postponed {
        Postponed::Destructor => drop((lent, theirs_block)),
        Postponed::Capture => {
            begin_capture(gpu, &*allocator, foreign.id());
            lent.free().unwrap();
            theirs_block.free().unwrap();
            end_capture(gpu, &*allocator, foreign.id());
        }
        Postponed::DestructorInCapture => {
            begin_capture(gpu, &*allocator, captured.id());
            drop((lent, theirs_block));
        }
        Postponed::Fault => {
            gpu.fail_events();
            // They are freed all the same.
            let _ = (lent.free(), theirs_block.free());
            gpu.faulty.clear_plan();
        }
    }
    drop(foreign);
    gpu.sim.stream_destroy(theirs).unwrap();
    for _ in 0..3 {
        let block = allocator.allocate(8 * MIB, &own).unwrap();
        gpu.sim.fill(block.ptr(), Pattern::U8(1), block.bytes(), own.id()).unwrap();
        let other = allocator.allocate(4 * MIB, &next).unwrap();
        gpu.sim.fill(other.ptr(), Pattern::U8(2), other.bytes(), next.id()).unwrap();
        block.free().unwrap();
        other.free().unwrap();
    }
    if let Postponed::DestructorInCapture = postponed {
        end_capture(gpu, &*allocator, captured.id());
    }
    gpu.expect_no_hazards(&what);
    // Nothing waits for the stream for ever.
    allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!(allocator.stats(DEVICE).unwrap().active_bytes.all.current, 0, "{what}: active after a trim");
    gpu.expect_no_hazards(&what);
}

#[test]
fn a_postponed_fence_does_not_name_a_stream_that_its_owner_may_have_destroyed() {
    for name in ALLOCATORS {
        Postponed::ALL.into_iter().for_each(|postponed| program(name, postponed));
    }
}

/// What a program pays that drops memory of foreign streams: one event per device and pass, and the host never waits.
#[test]
fn postponed_fences_do_not_wait_for_the_device() {
    for name in ["caching", "expandable segments", "paged"] {
        let gpu = Gpu::new();
        let (allocator, own) = (allocator(&gpu, name), gpu.own());
        let mut reserved = Vec::new();
        for _ in 0..20 {
            let (foreign, theirs) = gpu.foreign();
            let blocks = [(); 3].map(|()| allocator.allocate(8 * MIB, &own).unwrap());
            foreign.wait_stream(&own).unwrap();
            for block in &blocks {
                work(&gpu, block, &foreign);
                block.record_use(&foreign).unwrap();
            }
            drop((blocks, foreign));
            gpu.sim.stream_destroy(theirs).unwrap();
            gpu.counting.reset();
            allocator.allocate(8 * MIB, &own).unwrap().free().unwrap();
            let calls = |call| gpu.counting.count(call).calls;
            assert_eq!((calls(Call::EventRecordContext), calls(Call::DeviceSynchronize)), (1, 0), "{name}");
            gpu.sim.device_synchronize(DEVICE).unwrap();
            reserved.push(allocator.stats(DEVICE).unwrap().reserved_bytes.all.current);
        }
        assert!(reserved[1..].iter().all(|bytes| *bytes == reserved[1]), "{name}: {reserved:?}");
        gpu.expect_no_hazards(name);
    }
}

/// Before CUDA 12.5 the devices are waited for.
#[test]
fn a_driver_without_events_of_contexts_waits() {
    for name in ALLOCATORS {
        let gpu = Gpu::new();
        let plan = FaultPlan::new().fail_fraction(&[Call::EventRecordContext], 1.0, 0, ErrorCode::NotSupported);
        gpu.faulty.set_plan(plan);
        program_on(&gpu, name, Postponed::Destructor);
    }
}

/// A stream whose owner promises to keep it is waited for alone.
#[test]
fn a_promised_stream_gets_its_fence_later() {
    for name in ["caching", "paged", "external"] {
        let gpu = Gpu::new();
        let (allocator, own, (foreign, _), (busy, _)) =
            (allocator(&gpu, name), gpu.own(), gpu.foreign(), gpu.foreign());
        // SAFETY: nothing destroys it here.
        unsafe { foreign.promise_to_keep() };
        gpu.sim.pause_stream(busy.id()).unwrap();
        let theirs = allocator.allocate(MIB, &busy).unwrap();
        work(&gpu, &theirs, &busy);
        let block = allocator.allocate(8 * MIB, &own).unwrap();
        foreign.wait_stream(&own).unwrap();
        work(&gpu, &block, &foreign);
        block.record_use(&foreign).unwrap();
        drop(block);
        allocator.allocate(8 * MIB, &own).unwrap().free().unwrap();
        foreign.synchronize().unwrap();
        allocator.allocate(8 * MIB, &own).unwrap().free().unwrap();
        let calls = gpu.counting.count(Call::EventRecordContext).calls;
        assert_eq!(calls, 0, "{name}: the busy stream is not waited for");
        let active = allocator.stats(DEVICE).unwrap().active_bytes.all.current;
        assert_eq!(active, theirs.bytes(), "{name}: the freed blocks are free");
        gpu.sim.resume_stream(busy.id()).unwrap();
        drop(theirs);
        gpu.expect_no_hazards(name);
    }
}

#[test]
fn pinned_memory_waits_for_destroyed_streams_without_naming_them() {
    for calls in [false, true] {
        let gpu = Gpu::new();
        let host = HostAllocator::new(&gpu.instance, PinnedSettings::default());
        let memory = gpu.sim.mem_alloc(DEVICE, MIB).unwrap();
        let mut pinned = Vec::new();
        for round in 0..20_u8 {
            let (foreign, theirs) = gpu.foreign();
            let block = host.allocate(MIB).unwrap();
            block.write(0, &[round; 64]).unwrap();
            for _ in 0..20 {
                gpu.sim.copy(memory.into(), block.ptr().into(), MIB, foreign.id()).unwrap();
            }
            block.record_use(&foreign).unwrap();
            if calls {
                gpu.fail_events();
                let _ = block.free();
                gpu.faulty.clear_plan();
            } else {
                drop(block);
            }
            drop(foreign);
            gpu.sim.stream_destroy(theirs).unwrap();
            drop(host.allocate(MIB).unwrap());
            gpu.sim.device_synchronize(DEVICE).unwrap();
            pinned.push(host.stats().num_host_alloc);
        }
        assert!(pinned[1..].iter().all(|bytes| *bytes == pinned[1]), "blocks are used again: {pinned:?}");
        gpu.expect_no_hazards("pinned");
        host.check();
        host.close().unwrap();
    }
}
