//! A simulated machine with checked memory: every block contains its owner's tag, and kernels check it. The code under
//! test calls the driver through [`Faulty`]; the program itself calls the simulation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{Hazard, HazardKind, Latencies, ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{
    Call, CaptureState, Captures as _, DeviceId, DevicePtr, Devices as _, Driver, ErrorCode, EventOptions, EventScope,
    Events as _, Memory as _, StreamOptions, Streams as _,
};
use warpool::graph::Graph;
use warpool::memory::OomCause;
use warpool::{Device, Error, Instance, Stream, StreamLease};
use warpool_testing::Tags;

use crate::caught::{Caught, caught, inject_panic};
use crate::context::Context;
use crate::rng::Rng;
use crate::unsafe_calls::foreign_stream;

const MIB: u64 = 1 << 20;

pub struct Machine {
    pub sim: Arc<SimDriver>,
    pub faulty: Arc<Faulty>,
    pub instance: Instance,
    /// The streams of each device.
    pub streams: Vec<Vec<Stream>>,
    leases: Vec<StreamLease>,
    /// The tag kernels of each device.
    tags: Vec<Tags>,
    /// How many of a thousand driver calls fail in a call under test with injected faults; 0 is none.
    fault_rate: u64,
    /// Whether tags are in every page of a block, not only at its ends.
    pub tags_every_page: bool,
    /// For callbacks that the program attaches.
    pub panics: Arc<Panics>,
    start: ObjectCounts,
}

/// A call under test that may fail.
pub struct Armed {
    plan: Option<FaultPlan>,
    injected_before: usize,
    misbehaved_before: u64,
}

/// Whether the next callback of the program panics.
#[derive(Default)]
pub struct Panics(AtomicBool, AtomicU64);

impl Panics {
    fn arm(&self, on: bool) {
        self.0.store(on, Ordering::Relaxed);
    }

    /// Called by upstreams: whether to return an address that no driver returns, if misbehaving is armed.
    pub fn misbehaves(&self) -> bool {
        let misbehaves = self.0.swap(false, Ordering::Relaxed);
        self.1.fetch_add(u64::from(misbehaves), Ordering::Relaxed);
        misbehaves
    }

    /// How often an upstream misbehaved.
    fn misbehaved(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }

    /// Called by callbacks: panics once, if that was armed.
    pub fn pass(&self) {
        if self.0.swap(false, Ordering::Relaxed) {
            inject_panic();
        }
    }
}

/// What a call under test returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    Done(T),
    /// It failed, with a reason that the program knows: injected faults.
    Faulted,
    /// It ran out of memory: device memory, which the allocator counts, or a cap of a decorator or on pinned memory.
    OutOfMemory {
        counted: bool,
    },
    /// A callback of the program panicked.
    Panicked,
}

impl<T> Outcome<T> {
    /// The result, if there is one.
    pub fn done(self) -> Option<T> {
        match self {
            Self::Done(result) => Some(result),
            _ => None,
        }
    }
}

impl Machine {
    /// `devices` devices with `streams` streams each; the rest is drawn from the seed.
    pub fn new(context: &Context, devices: u32, streams: usize) -> Self {
        Self::with(context, devices, streams, |_| ())
    }

    /// The same, with settings of the simulation that `change` has changed.
    pub fn with(context: &Context, devices: u32, streams: usize, change: impl FnOnce(&mut SimConfig)) -> Self {
        Self::decorated(context, devices, streams, change, |sim| sim)
    }

    /// The same; the code under test calls the simulation through what `decorate` makes of it.
    pub fn decorated(
        context: &Context,
        devices: u32,
        streams: usize,
        change: impl FnOnce(&mut SimConfig),
        decorate: impl FnOnce(Arc<SimDriver>) -> Arc<dyn Driver>,
    ) -> Self {
        let mut rng = Rng::new(context.seed ^ 0x5eed);
        let capacity = rng.pick(&[150, 300, 1000, 4000]) * MIB;
        let mut config = SimConfig::default().with_seed(context.seed).with_devices(devices).with_capacity(capacity);
        for device in &mut config.devices {
            device.bytes_context = 2 * MIB;
        }
        config.queue_depth = rng.pick(&[3, 20, 1024]);
        config.latencies = if rng.one_in(2) { Latencies::flat(0) } else { Latencies::h200() };
        change(&mut config);
        let sim = Arc::new(SimDriver::new(config));
        let start = sim.object_counts();
        let faulty = Arc::new(Faulty::new(decorate(sim.clone()), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let (mut leases, mut tags, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for device in instance.devices() {
            let own: Vec<StreamLease> = (0..streams).map(|_| device.lease_stream().unwrap()).collect();
            all.push(own.iter().map(|lease| lease.stream().clone()).collect::<Vec<Stream>>());
            leases.extend(own);
            tags.push(Tags::new(&sim, device.id()));
        }
        let fault_rate = rng.pick(&[0, 5, 50, 200]);
        let capacity = sim.mem_info(DeviceId(0)).unwrap().bytes_total;
        context.step(format!("{devices} devices of {capacity} bytes, {streams} streams each, {fault_rate}/1000 fail"));
        let (panics, tags_every_page) = (Arc::default(), false);
        Self { sim, faulty, instance, streams: all, leases, tags, fault_rate, tags_every_page, panics, start }
    }

    /// Whether driver calls are made to fail.
    pub fn has_faults(&self) -> bool {
        self.fault_rate > 0
    }

    pub fn device(&self, index: usize) -> Device {
        self.instance.device(device_id(index).0).unwrap()
    }

    pub fn stream(&self, device: usize, index: usize) -> &Stream {
        &self.streams[device][index]
    }

    /// Makes a call under test, some with faults. It may fail only if one was injected, or for lack of memory.
    pub fn call<T>(&self, context: &mut Context, call: impl FnOnce() -> warpool::Result<T>) -> Outcome<T> {
        let armed = self.arm(context);
        let outcome = caught(call);
        self.settle(context, armed, outcome, false)
    }

    /// Calls may fail from here on, until [`settle`](Self::settle). One in three calls is armed.
    pub fn arm(&self, context: &mut Context) -> Armed {
        context.counts.operations += 1;
        let plan = (self.fault_rate > 0 && context.rng.one_in(3)).then(|| self.plan(&mut context.rng));
        if let Some(plan) = &plan {
            self.faulty.set_plan(plan.clone());
        }
        self.panics.arm(self.fault_rate > 0 && context.rng.one_in(8) && !context.skips("panics"));
        Armed { injected_before: self.faulty.injected().len(), misbehaved_before: self.panics.misbehaved(), plan }
    }

    /// The program's own calls follow: no faults.
    pub fn suspend(&self) {
        self.faulty.clear_plan();
        self.panics.arm(false);
    }

    /// Resumes the call under test.
    pub fn resume(&self, armed: &Armed) {
        if let Some(plan) = &armed.plan {
            self.faulty.set_plan(plan.clone());
        }
    }

    /// Classifies what an armed call returned. An error is a violation, unless a fault was injected, memory ran out, or
    /// the program is the reason (`excused`).
    pub fn settle<T>(
        &self,
        context: &mut Context,
        armed: Armed,
        outcome: Result<warpool::Result<T>, Caught>,
        excused: bool,
    ) -> Outcome<T> {
        self.suspend();
        let injected = self.faulty.injected().len() - armed.injected_before;
        let misbehaved = self.panics.misbehaved() - armed.misbehaved_before;
        context.counts.faults += injected as u64 + misbehaved;
        let excused = excused || injected > 0 || misbehaved > 0;
        match outcome {
            Ok(Ok(result)) => Outcome::Done(result),
            Ok(Err(Error::OutOfMemory(report))) => {
                context.counts.out_of_memory += 1;
                context.step("  out of memory");
                Outcome::OutOfMemory { counted: is_counted(report.cause) }
            }
            Ok(Err(Error::PinnedCap(_))) => {
                context.counts.out_of_memory += 1;
                context.step("  the cap on pinned memory");
                Outcome::OutOfMemory { counted: false }
            }
            Ok(Err(error)) if excused => {
                context.step(format!("  failed: {error}"));
                Outcome::Faulted
            }
            Ok(Err(error)) => panic!("an error without a fault: {error}"),
            Err(Caught::Injected) => {
                context.counts.panics += 1;
                context.step("  a callback panicked");
                Outcome::Panicked
            }
            Err(Caught::Failed(message)) => panic!("{message}"),
        }
    }

    /// The plan for one call: some of the driver calls fail, with one code. No code says that the device is lost, since
    /// the code under test may not recover from that.
    fn plan(&self, rng: &mut Rng) -> FaultPlan {
        let codes = [ErrorCode::OutOfMemory, ErrorCode::OutOfMemory, ErrorCode::NotPermitted, ErrorCode::Unknown(999)];
        let calls: &[Call] = match rng.below(4) {
            0 => &[],
            1 => {
                &[Call::MemAlloc, Call::VmCreate, Call::VmReserve, Call::PoolAlloc, Call::HostAlloc, Call::HostRegister]
            }
            2 => FaultPlan::CLEANUP,
            _ => &[Call::EventCreate, Call::EventRecord, Call::EventQuery, Call::StreamWaitEvent, Call::CaptureState],
        };
        let fraction = if rng.one_in(8) { 1.0 } else { self.fault_rate as f64 / 1000.0 };
        FaultPlan::new().fail_fraction(calls, fraction, rng.u64(), rng.pick(&codes))
    }

    /// Queues a write of a tag into a block.
    pub fn write_tag(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        if self.tags_every_page {
            return self.write_pages(ptr, bytes, tag, stream);
        }
        self.tags[stream.device_id().0 as usize].write(ptr, bytes, tag, stream.id());
    }

    /// Queues a check that a block still contains its tag.
    pub fn check_tag(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        if self.tags_every_page {
            return self.check_pages(ptr, bytes, tag, stream);
        }
        self.tags[stream.device_id().0 as usize].check(ptr, bytes, tag, stream.id());
    }

    /// The same in every page of a block.
    pub fn write_pages(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        self.tags[stream.device_id().0 as usize].write_pages(ptr, bytes, tag, stream.id());
    }

    /// Queues a check of every page of a block.
    pub fn check_pages(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        self.tags[stream.device_id().0 as usize].check_pages(ptr, bytes, tag, stream.id());
    }

    /// A stream that the program creates, as another library would, and destroys with
    /// [`destroy_stream`](Self::destroy_stream).
    pub fn create_stream(&self, device: usize) -> Stream {
        let options = StreamOptions { non_blocking: true, priority: 0 };
        let stream = self.sim.stream_create(device_id(device), options).unwrap();
        let raw = self.sim.stream_handle(stream).unwrap().raw;
        Stream::external(&self.device(device), foreign_stream(raw)).unwrap()
    }

    /// Destroys a stream. Its queued work still runs.
    pub fn destroy_stream(&self, stream: &Stream) {
        self.sim.resume_stream(stream.id()).unwrap();
        self.sim.stream_destroy(stream.id()).unwrap();
    }

    /// The later work of `stream` waits for the work of `other`. The program's own call: it never fails.
    pub fn wait(&self, stream: &Stream, other: &Stream) {
        if stream == other {
            return;
        }
        let event = self.sim.event_create(other.device_id(), EventOptions::default()).unwrap();
        self.sim.event_record(event, other.id(), EventScope::Plain).unwrap();
        self.sim.stream_wait_event(stream.id(), event, EventScope::Plain).unwrap();
        self.sim.event_destroy(event).unwrap();
    }

    /// Keeps the work of a stream from starting, or lets it start. A wait of the host lets it start in any case.
    pub fn pause_or_resume(&self, stream: &Stream, pause: bool) {
        match pause {
            true => self.sim.pause_stream(stream.id()).unwrap(),
            false => self.sim.resume_stream(stream.id()).unwrap(),
        }
    }

    /// A host callback in a stream, which panics when that is armed.
    pub fn host_callback(&self, stream: &Stream) {
        let panics = self.panics.clone();
        self.sim.stream_host_callback(stream.id(), Arc::new(move || panics.pass())).unwrap();
    }

    /// The host waits for a stream.
    pub fn wait_for(&self, stream: &Stream) {
        self.sim.stream_synchronize(stream.id()).unwrap();
    }

    pub fn synchronize(&self) {
        self.instance.devices().for_each(|device| self.sim.device_synchronize(device.id()).unwrap());
    }

    /// Checks after a capture that it has ended in the driver too. If faults prevented that, resetting the graph tries
    /// again.
    pub fn expect_capture_ended(&self, graph: &mut Graph, stream: &Stream) {
        let capturing = || self.sim.capture_state(stream.id()).unwrap() != CaptureState::None;
        if !graph.is_captured() && capturing() {
            graph.reset().unwrap();
        }
        assert!(!capturing(), "{} still captures", stream.id());
        assert!(!graph.is_capturing(), "the graph still captures");
    }

    /// Checks after a synchronization that no tag was overwritten and no hazard was reported.
    pub fn check_contents(&self) {
        self.tags.iter().for_each(Tags::expect_intact);
        self.check_hazards();
    }

    pub fn check_hazards(&self) {
        // A body that gives up does not join its forks: that capture fails, as it should.
        let is_defect = |hazard: &Hazard| hazard.kind != HazardKind::CaptureUnjoined;
        let hazards: Vec<Hazard> = self.sim.hazards().into_iter().filter(is_defect).collect();
        if let Some(hazard) = hazards.first() {
            panic!("{} hazards, the first: {hazard}", hazards.len());
        }
    }

    /// Checks contents and hazards, closes everything, and checks that the driver has nothing left. All of the
    /// program's objects must be dropped before.
    pub fn close(self, keeps_addresses: bool) {
        self.synchronize();
        self.check_contents();
        let Self { sim, faulty, instance, streams, leases, tags, start, .. } = self;
        tags.into_iter().for_each(Tags::close);
        drop((streams, leases));
        instance.close().unwrap();
        // The paged allocator keeps the addresses that it reserved, in which nothing is mapped any more.
        let mut end = sim.object_counts();
        if keeps_addresses {
            end.reservations = start.reservations;
        }
        assert_eq!(end, start, "driver objects at the end and at the start");
        drop(faulty);
    }
}

/// Whether `num_ooms` counts an error.
pub fn is_counted(cause: OomCause) -> bool {
    !matches!(cause, OomCause::Cap { .. } | OomCause::Rejected)
}

pub fn device_id(index: usize) -> DeviceId {
    DeviceId(u32::try_from(index).expect("few devices"))
}
