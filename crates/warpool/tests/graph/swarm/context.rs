//! A simulated device with the memory, streams and generators of a program. Two of them run the same program: one
//! eagerly, the other by captures and replays.

use std::sync::Arc;

use warpool::blas::{Blas, BlasSettings};
use warpool::driver::sim::{Latencies, ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{
    Address, BlasMatrix, Copies as _, DeviceId, DevicePtr, FunctionId, KernelArg, Kernels as _, Pattern, Sgemm,
};
use warpool::generator::Generator;
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, Settings};
use warpool::{Device, Instance, Result, Stream, StreamLease};

use super::draw::STREAMS;
use super::kernels::{Kernels, WORDS};
use super::program::{Program, Var, Work};
use crate::common::launch::{launch_kernel, raw_target};
use crate::common::rng::Rng;

const FIRST: DeviceId = DeviceId(0);
const BYTES: u64 = 4 * WORDS as u64;

/// A simulated device with everything that a program uses.
pub struct SwarmContext {
    pub sim: Arc<SimDriver>,
    pub instance: Instance,
    pub device: Device,
    pub caching: Arc<CachingAllocator>,
    pub allocator: Arc<dyn DeviceAllocator>,
    pub blas: Blas,
    pub generators: Vec<Generator>,
    pub outside: Vec<Arc<DeviceBlock>>,
    /// The default stream, and others.
    pub streams: Vec<Stream>,
    pub kernels: Kernels,
    leases: Vec<StreamLease>,
    start: ObjectCounts,
}

impl SwarmContext {
    pub fn new(seed: u64, program: &Program) -> Self {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let mut config = SimConfig::default().with_seed(seed);
        config.devices[0].bytes_context = 0;
        config.queue_depth = rng.pick(&[5, 50, 1024]);
        config.latencies = if rng.one_in(2) { Latencies::flat(0) } else { Latencies::h200() };
        config.check_uninitialized = true;
        let sim = Arc::new(SimDriver::new(config));
        let start = sim.object_counts();
        let instance = Instance::new(sim.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let caching = Arc::new(CachingAllocator::new(&instance, Settings::parse(program.settings).unwrap()));
        let allocator: Arc<dyn DeviceAllocator> = caching.clone();
        let workspace_bytes = program.workspace_bytes;
        let blas = Blas::new(&allocator, BlasSettings { workspace_bytes, ..BlasSettings::default() });
        let mut generators: Vec<Generator> =
            (0..program.generators).map(|_| Generator::new(&device).unwrap()).collect();
        if program.shared_state {
            *generators.last_mut().unwrap() = generators[0].share();
        }
        for (seed, generator) in (1..).zip(&generators) {
            generator.set_seed(seed).unwrap();
        }
        let leases: Vec<StreamLease> = (1..STREAMS).map(|_| device.lease_stream().unwrap()).collect();
        let main = device.default_stream().unwrap();
        let streams = [main.clone()].into_iter().chain(leases.iter().map(|lease| lease.stream().clone())).collect();
        let mut rng = Rng::new(seed ^ 0xda7a);
        let outside = (0..program.outside)
            .map(|_| {
                let block = allocator.allocate(BYTES, &main).unwrap();
                let words: Vec<u8> = (0..WORDS).flat_map(|_| rng.u32().to_le_bytes()).collect();
                sim.upload(FIRST, block.ptr(), &words).unwrap();
                Arc::new(block)
            })
            .collect();
        let kernels = Kernels::load(&sim);
        Self { sim, instance, device, caching, allocator, blas, generators, outside, streams, kernels, leases, start }
    }

    fn launch(&self, function: FunctionId, args: &[KernelArg], stream: &Stream) -> Result<()> {
        launch_kernel(&**self.instance.driver(), function, args, stream.id())
    }

    /// Enqueues an operation in a stream.
    pub fn issue(&self, work: Work, at: &dyn Fn(Var) -> DevicePtr, stream: &Stream) -> Result<()> {
        let (driver, kernels) = (self.instance.driver(), &self.kernels);
        let ptr = |var| KernelArg::Ptr(at(var));
        match work {
            Work::Fill { to, value, width } => {
                let (pattern, count) = fill(value, width);
                Ok(driver.fill(at(to), pattern, count, stream.id())?)
            }
            Work::Copy { to, from } => {
                let (to, from) = (Address::Device(at(to)), Address::Device(at(from)));
                Ok(driver.copy(to, from, BYTES, stream.id())?)
            }
            Work::Draw { to, generator, words } => {
                self.generators[generator].fill_bits(raw_target(&**driver, at(to), words), stream)
            }
            Work::Salt { to, generator, increment } => {
                let [slot, seed, offset] = self.generators[generator].reserve(increment, stream)?.args();
                self.launch(kernels.salt, &[ptr(to), slot, seed, offset], stream)
            }
            Work::Multiply { to, a, b, size: [m, n, k], transposed: [ta, tb], beta } => {
                let matrix = |var, transposed| BlasMatrix { ptr: at(var), stride: 4, transposed };
                let (a, b, c) = (matrix(a, ta), matrix(b, tb), matrix(to, false));
                self.blas.handle_on(stream)?.sgemm(&Sgemm { m, n, k, alpha: 1.0, a, b, beta, c })
            }
            Work::Add { to, value } => self.launch(kernels.add, &[ptr(to), value.into()], stream),
            Work::Mix { to, a, b } => self.launch(kernels.mix, &[ptr(to), ptr(a), ptr(b)], stream),
            Work::Sums { to, from } => self.launch(kernels.sums, &[ptr(to), ptr(from)], stream),
            Work::Limit { to, from, most } => self.launch(kernels.limit, &[ptr(to), ptr(from), most.into()], stream),
            Work::CountDown { flag } => self.launch(kernels.count_down, &[ptr(flag)], stream),
            Work::Tame { to, from } => self.launch(kernels.tame, &[ptr(to), ptr(from)], stream),
        }
    }

    /// The contents of a variable, after a synchronization.
    pub fn words(&self, ptr: DevicePtr) -> Vec<u32> {
        let mut bytes = [0; 4 * WORDS];
        self.sim.download(FIRST, ptr, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
    }

    /// Synchronizes, and returns the contents and states that programs are compared by.
    pub fn outcome(&self) -> (Vec<Vec<u32>>, Vec<[u8; 16]>) {
        self.device.synchronize().unwrap();
        let words = self.outside.iter().map(|block| self.words(block.ptr())).collect();
        (words, self.generators.iter().map(Generator::state).collect())
    }

    /// Checks that there was no hazard.
    pub fn expect_no_hazards(&self) {
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{hazards:#?}");
    }

    /// At the end, after all graphs are dropped: checks that nothing is leaked.
    pub fn close(self) {
        let Self {
            sim,
            instance,
            device,
            caching,
            allocator,
            blas,
            generators,
            outside,
            streams,
            kernels,
            leases,
            start,
        } = self;
        device.synchronize().unwrap();
        drop(outside);
        blas.close().unwrap();
        caching.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        caching.check();
        let stats = caching.stats(FIRST).unwrap();
        assert_eq!(stats.allocation.all.current, 0, "blocks leaked");
        assert_eq!(stats.workspace_bytes.current, 0, "workspaces leaked");
        assert_eq!(stats.reserved_bytes.all.current, 0, "memory leaked");
        let segments = caching.snapshot(Default::default()).unwrap().segments;
        assert!(segments.is_empty(), "{segments:#?}");
        sim.module_unload(kernels.module).unwrap();
        drop((caching, allocator, generators, streams, leases, device));
        instance.close().unwrap();
        assert_eq!(sim.object_counts(), start, "driver objects leaked");
        let hazards: Vec<String> = sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{hazards:#?}");
    }
}

/// A fill of a whole variable.
pub fn fill(value: u32, width: usize) -> (Pattern, u64) {
    match width {
        1 => (Pattern::U8(value as u8), BYTES),
        2 => (Pattern::U16(value as u16), BYTES / 2),
        _ => (Pattern::U32(value), BYTES / 4),
    }
}
