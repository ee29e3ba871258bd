//! A simulated machine with checked memory: every block contains its owner's tag, and kernels check that it is still
//! there.

use std::sync::Arc;

use warpool::driver::sim::{Latencies, ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{
    Copies as _, DeviceId, DevicePtr, FunctionId, HostKernel, KernelArg, KernelSource, Kernels as _, LaunchShape,
    Memory as _,
};
use warpool::{Instance, Stream, StreamLease};

use crate::common::rng::Rng;

const MIB: u64 = 1 << 20;

static KERNELS: KernelSource = KernelSource {
    name: "swarm",
    cuda: "",
    host_kernels: &[
        HostKernel {
            name: "write_tag",
            run: |k| {
                let (to, words, tag) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_u32(2)?);
                k.write_u32(to, &vec![tag; words as usize])
            },
            nanos: None,
        },
        HostKernel {
            name: "check_tag",
            run: |k| {
                let (from, words, tag, mismatch) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_u32(2)?, k.arg_ptr(3)?);
                match k.read_u32(from, words as usize)?.into_iter().find(|&word| word != tag) {
                    Some(other) => k.write_u32(mismatch, &[1, tag, other]),
                    None => Ok(()),
                }
            },
            nanos: None,
        },
    ],
};

/// The machine.
pub struct Machine {
    pub sim: Arc<SimDriver>,
    pub instance: Instance,
    /// The streams of each device.
    pub streams: Vec<Vec<Stream>>,
    leases: Vec<StreamLease>,
    kernels: Vec<(FunctionId, FunctionId)>,
    /// Where kernels report a wrong tag, on each device.
    mismatches: Vec<DevicePtr>,
    start: ObjectCounts,
}

impl Machine {
    /// So many devices, with so many streams each; the rest is drawn from the seed.
    pub fn new(seed: u64, devices: u32, streams: usize) -> Self {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let mut config =
            SimConfig::default().with_seed(seed).with_devices(devices).with_capacity(rng.pick(&[150, 300, 1000]) * MIB);
        for device in &mut config.devices {
            device.bytes_context = 2 * MIB;
        }
        config.queue_depth = rng.pick(&[3, 20, 1024]);
        config.latencies = if rng.one_in(2) { Latencies::flat(0) } else { Latencies::h200() };
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(sim.clone()).unwrap();
        let (mut leases, mut kernels, mut mismatches, mut all) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for device in instance.devices() {
            let own: Vec<StreamLease> = (0..streams).map(|_| device.lease_stream().unwrap()).collect();
            all.push(own.iter().map(|lease| lease.stream().clone()).collect::<Vec<Stream>>());
            leases.extend(own);
            let module = sim.module_load(device.id(), &KERNELS).unwrap();
            kernels
                .push((sim.function_get(module, "write_tag").unwrap(), sim.function_get(module, "check_tag").unwrap()));
            let mismatch = sim.mem_alloc(device.id(), 12).unwrap();
            sim.upload(device.id(), mismatch, &[0; 12]).unwrap();
            mismatches.push(mismatch);
        }
        let start = sim.object_counts();
        Self { sim, instance, streams: all, leases, kernels, mismatches, start }
    }

    /// The parts of a block that contain the tag: its first and its last words.
    fn parts(ptr: DevicePtr, bytes: u64) -> Vec<(DevicePtr, u32)> {
        const WORDS: u64 = 16;
        match bytes / 4 {
            0 => Vec::new(),
            words if words <= 2 * WORDS => vec![(ptr, u32::try_from(words).expect("few"))],
            words => vec![(ptr, 16), (ptr.offset(4 * (words - WORDS)), 16)],
        }
    }

    /// Queues a write of a tag into a block.
    pub fn write_tag(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        let (write_tag, _) = self.kernels[stream.device_id().0 as usize];
        for (ptr, words) in Self::parts(ptr, bytes) {
            let args = [ptr.into(), KernelArg::U32(words), KernelArg::U32(tag)];
            self.sim.kernel_launch(write_tag, LaunchShape::ONE, &args, stream.id()).unwrap();
        }
    }

    /// Queues a check that a block still contains its tag.
    pub fn check_tag(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        let device = stream.device_id().0 as usize;
        let (_, check_tag) = self.kernels[device];
        for (ptr, words) in Self::parts(ptr, bytes) {
            let args = [ptr.into(), KernelArg::U32(words), KernelArg::U32(tag), self.mismatches[device].into()];
            self.sim.kernel_launch(check_tag, LaunchShape::ONE, &args, stream.id()).unwrap();
        }
    }

    pub fn stream(&self, device: usize, index: usize) -> &Stream {
        &self.streams[device][index]
    }

    /// At the end, after everything was freed: no tag was overwritten, no hazard, no leak.
    pub fn expect_clean(&self) {
        for device in self.instance.devices() {
            device.synchronize().unwrap();
            device.event_pool().trim().unwrap();
        }
        for (device, &mismatch) in (0..).zip(&self.mismatches) {
            let mut bytes = [0; 12];
            self.sim.download(DeviceId(device), mismatch, &mut bytes).unwrap();
            let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
            assert_eq!(words[0], 0, "on device {device}, the block with tag {:#x} contained {:#x}", words[1], words[2]);
        }
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{hazards:#?}");
        assert_eq!(
            self.sim.object_counts(),
            self.start,
            "driver objects at the end and at the start; {} leases",
            self.leases.len()
        );
    }
}
