//! A simulated device whose calls can be made to fail, and a check for leaks at the end.

use std::sync::Arc;

use warpool::blas::{Blas, BlasSettings};
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{HazardKind, ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{
    CaptureMode, CaptureState, Captures as _, Copies as _, DeviceId, DevicePtr, FunctionId, HostKernel, KernelArg,
    KernelSource, Kernels as _, ModuleId, Pattern,
};
use warpool::generator::Generator;
use warpool::graph::{Graph, GraphOptions};
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, HostAllocator, MemPoolId, PinnedSettings, Settings,
};
use warpool::{Device, Error, Instance, Result, Stream, StreamLease};

use crate::common::launch::launch_kernel;

const FIRST: DeviceId = DeviceId(0);

/// How many words the kernels work on.
pub const WORDS: usize = 8;

static KERNELS: KernelSource = KernelSource {
    name: "graph faults",
    cuda: "",
    host_kernels: &[
        HostKernel::new("plus", |k| {
            let (to, from) = (k.arg_ptr(0)?, k.arg_ptr(1)?);
            let (to_words, from_words) = (k.read_u32(to, WORDS)?, k.read_u32(from, WORDS)?);
            let sums: Vec<u32> = to_words.iter().zip(&from_words).map(|(a, b)| a.wrapping_add(*b)).collect();
            k.write_u32(to, &sums)
        }),
        HostKernel::new("less", |k| {
            let flag = k.arg_ptr(0)?;
            let word = k.read_u32(flag, 1)?[0];
            k.write_u32(flag, &[word.saturating_sub(1)])
        }),
    ],
};

/// The machine.
pub struct FaultFixture {
    pub sim: Arc<SimDriver>,
    pub faulty: Arc<Faulty>,
    pub instance: Instance,
    pub device: Device,
    caching: Arc<CachingAllocator>,
    pub any: Arc<dyn DeviceAllocator>,
    pub host: HostAllocator,
    pub blas: Blas,
    pub generator: Generator,
    pub one: Stream,
    pub two: Stream,
    leases: [StreamLease; 2],
    module: ModuleId,
    pub plus: FunctionId,
    pub less: FunctionId,
    start: ObjectCounts,
}

impl FaultFixture {
    pub fn new(settings: &str) -> Self {
        let mut config = SimConfig::default();
        config.devices[0].bytes_context = 0;
        let sim = Arc::new(SimDriver::new(config));
        let start = sim.object_counts();
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let caching = Arc::new(CachingAllocator::new(&instance, Settings::parse(settings).unwrap()));
        let any: Arc<dyn DeviceAllocator> = caching.clone();
        let host = HostAllocator::new(&instance, PinnedSettings::default());
        let blas = Blas::new(&any, BlasSettings::default());
        let generator = Generator::new(&device).unwrap();
        let leases = [device.lease_stream().unwrap(), device.lease_stream().unwrap()];
        let [one, two] = [0, 1].map(|index: usize| leases[index].stream().clone());
        let module = sim.module_load(FIRST, &KERNELS).unwrap();
        let [plus, less] = ["plus", "less"].map(|name| sim.function_get(module, name).unwrap());
        Self {
            sim,
            faulty,
            instance,
            device,
            caching,
            any,
            host,
            blas,
            generator,
            one,
            two,
            leases,
            module,
            plus,
            less,
            start,
        }
    }

    pub fn graph(&self) -> Graph {
        self.graph_with(GraphOptions::default())
    }

    pub fn graph_with(&self, options: GraphOptions) -> Graph {
        Graph::new(&self.any, &self.device, options).unwrap()
    }

    /// Memory with `value` in its first words.
    pub fn get(&self, bytes: u64, value: u32, stream: &Stream) -> Result<DeviceBlock> {
        let block = self.any.allocate(bytes, stream)?;
        self.fill(block.ptr(), value, stream)?;
        Ok(block)
    }

    pub fn fill(&self, ptr: DevicePtr, value: u32, stream: &Stream) -> Result<()> {
        Ok(self.faulty.fill(ptr, Pattern::U32(value), WORDS as u64, stream.id())?)
    }

    /// Adds the words at `from` to those at `to`.
    pub fn plus(&self, to: DevicePtr, from: DevicePtr, stream: &Stream) -> Result<()> {
        let args = [KernelArg::Ptr(to), KernelArg::Ptr(from)];
        launch_kernel(&*self.faulty, self.plus, &args, stream.id())
    }

    /// Waits for the device and reads the words at `ptr`.
    pub fn words(&self, ptr: DevicePtr) -> [u32; WORDS] {
        let mut bytes = [0; 4 * WORDS];
        self.sim.download(FIRST, ptr, &mut bytes).unwrap();
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        words.try_into().expect("as many as were read")
    }

    pub fn trim(&self) -> Result<()> {
        self.any.trim(FIRST, MemPoolId::DEFAULT).map(drop)
    }

    /// Checks that the capture on the first stream is over, unless its end failed more than once: then the program
    /// stops.
    pub fn expect_ended(&self) -> Result<()> {
        if self.sim.capture_state(self.one.id()) == Ok(CaptureState::None) {
            return Ok(());
        }
        assert!(self.faulty.injected().len() > 1, "{} still captures", self.one);
        Err(Error::ThreadEnding)
    }

    /// After a fault: checks that no stream is capturing, that the thread's capture mode is restored, and the
    /// allocator's invariants.
    pub fn expect_idle(&self, about: &str) {
        self.caching.check();
        self.host.check();
        // The next reset destroys what destructors left.
        self.graph().reset().unwrap();
        assert_eq!(self.sim.object_counts().captures, 0, "{about}: a capture is still under way");
        for stream in [&self.one, &self.two] {
            assert_eq!(self.sim.capture_state(stream.id()), Ok(CaptureState::None), "{about}: {stream}");
        }
        // Restoring the mode is tried twice; it may fail both times.
        let mode = self.sim.capture_mode_exchange(CaptureMode::Global).unwrap();
        assert!(
            mode == CaptureMode::Global || self.faulty.injected().len() > 1,
            "{about}: the thread was left {mode:?}"
        );
        let meant = |kind| matches!(kind, HazardKind::CaptureInvalidated | HazardKind::CaptureUnjoined);
        let hazards: Vec<String> =
            self.sim.hazards().iter().filter(|hazard| !meant(hazard.kind)).map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{about}: {hazards:#?}");
        self.sim.clear_hazards();
    }

    /// At the end: checks that nothing is leaked.
    pub fn close(self, about: &str) {
        self.expect_idle(about);
        let Self {
            sim,
            faulty,
            instance,
            device,
            caching,
            any,
            host,
            blas,
            generator,
            one,
            two,
            leases,
            module,
            start,
            ..
        } = self;
        device.synchronize().unwrap();
        blas.close().unwrap();
        host.process_pending().unwrap();
        assert_eq!(host.stats().active_requests.current, 0, "{about}: pinned blocks leaked");
        host.close().unwrap();
        any.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        caching.check();
        let stats = any.stats(FIRST).unwrap();
        assert_eq!(stats.allocation.all.current, 0, "{about}: blocks leaked");
        assert_eq!(stats.workspace_bytes.current, 0, "{about}: workspaces leaked");
        assert_eq!(stats.reserved_bytes.all.current, 0, "{about}: memory leaked");
        sim.module_unload(module).unwrap();
        drop((caching, any, generator, one, two, leases, device));
        instance.close().unwrap();
        drop(faulty);
        assert_eq!(sim.object_counts(), start, "{about}: driver objects leaked");
        let hazards: Vec<String> = sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{about}: {hazards:#?}");
    }
}
