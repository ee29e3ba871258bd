//! A simulated machine whose memory is watched: every block carries its owner's tag, and kernels look whether it is
//! still there.

use std::sync::Arc;

use warpool::driver::sim::{Latencies, ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{
    Copies as _, DeviceId, DevicePtr, FunctionId, KernelArg, KernelMirror, KernelSource, Kernels as _, LaunchShape,
    Memory as _,
};
use warpool::{Instance, Stream, StreamLease};

use crate::common::rng::Rng;

const MIB: u64 = 1 << 20;

static KERNELS: KernelSource = KernelSource {
    name: "swarm",
    cuda: "",
    mirrors: &[
        KernelMirror {
            name: "stamp",
            run: |k| {
                let (to, words, tag) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_u32(2)?);
                k.write_u32(to, &vec![tag; words as usize])
            },
            nanos: None,
        },
        KernelMirror {
            name: "look",
            run: |k| {
                let (from, words, tag, verdict) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_u32(2)?, k.arg_ptr(3)?);
                match k.read_u32(from, words as usize)?.into_iter().find(|&word| word != tag) {
                    Some(other) => k.write_u32(verdict, &[1, tag, other]),
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
    /// Where kernels write what they found wrong, on each device.
    verdicts: Vec<DevicePtr>,
    start: ObjectCounts,
}

impl Machine {
    /// With so many devices and streams on each, and rng from the seed.
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
        let (mut leases, mut kernels, mut verdicts, mut all) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for device in instance.devices() {
            let own: Vec<StreamLease> = (0..streams).map(|_| device.lease_stream().unwrap()).collect();
            all.push(own.iter().map(|lease| lease.stream().clone()).collect::<Vec<Stream>>());
            leases.extend(own);
            let module = sim.module_load(device.id(), &KERNELS).unwrap();
            kernels.push((sim.function_get(module, "stamp").unwrap(), sim.function_get(module, "look").unwrap()));
            let verdict = sim.mem_alloc(device.id(), 12).unwrap();
            sim.upload(device.id(), verdict, &[0; 12]).unwrap();
            verdicts.push(verdict);
        }
        let start = sim.object_counts();
        Self { sim, instance, streams: all, leases, kernels, verdicts, start }
    }

    /// The parts of a block that carry the tag: its first and its last words.
    fn parts(ptr: DevicePtr, bytes: u64) -> Vec<(DevicePtr, u32)> {
        const WORDS: u64 = 16;
        match bytes / 4 {
            0 => Vec::new(),
            words if words <= 2 * WORDS => vec![(ptr, u32::try_from(words).expect("few"))],
            words => vec![(ptr, 16), (ptr.offset(4 * (words - WORDS)), 16)],
        }
    }

    /// Writes a tag into a block, in the order of a stream.
    pub fn stamp(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        let (stamp, _) = self.kernels[stream.device_id().0 as usize];
        for (ptr, words) in Self::parts(ptr, bytes) {
            let args = [ptr.into(), KernelArg::U32(words), KernelArg::U32(tag)];
            self.sim.kernel_launch(stamp, LaunchShape::ONE, &args, stream.id()).unwrap();
        }
    }

    /// Looks whether a block still carries its tag, in the order of a stream.
    pub fn look(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: &Stream) {
        let device = stream.device_id().0 as usize;
        let (_, look) = self.kernels[device];
        for (ptr, words) in Self::parts(ptr, bytes) {
            let args = [ptr.into(), KernelArg::U32(words), KernelArg::U32(tag), self.verdicts[device].into()];
            self.sim.kernel_launch(look, LaunchShape::ONE, &args, stream.id()).unwrap();
        }
    }

    pub fn stream(&self, device: usize, index: usize) -> &Stream {
        &self.streams[device][index]
    }

    /// At the end, after all was given back: nothing was overwritten, nothing was out of order, nothing is left.
    pub fn expect_clean(&self) {
        for device in self.instance.devices() {
            device.synchronize().unwrap();
            device.event_pool().trim().unwrap();
        }
        for (device, &verdict) in (0..).zip(&self.verdicts) {
            let mut bytes = [0; 12];
            self.sim.download(DeviceId(device), verdict, &mut bytes).unwrap();
            let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
            assert_eq!(
                words[0], 0,
                "on device {device}, the block of {:#x} was found with {:#x} in it",
                words[1], words[2]
            );
        }
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{hazards:#?}");
        assert_eq!(
            self.sim.object_counts(),
            self.start,
            "what is left, and what there was; {} leases",
            self.leases.len()
        );
    }
}
