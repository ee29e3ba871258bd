//! Tags in simulated memory: a block contains its owner's tag, and kernels check in stream order that it still does.

use std::sync::Arc;

use warpool_driver::sim::SimDriver;
use warpool_driver::{
    Copies as _, DeviceId, DevicePtr, FunctionId, HostKernel, KernelArg, KernelSource, Kernels as _, LaunchShape,
    Memory as _, ModuleId, StreamId,
};

static KERNELS: KernelSource = KernelSource {
    name: "tags",
    cuda: "",
    host_kernels: &[
        HostKernel::new("write_tag", |k| {
            let (to, words, tag) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_u32(2)?);
            k.write_u32(to, &vec![tag; words as usize])
        }),
        HostKernel::new("check_tag", |k| {
            let (from, words, tag, mismatch) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_u32(2)?, k.arg_ptr(3)?);
            match k.read_u32(from, words as usize)?.into_iter().find(|&word| word != tag) {
                Some(other) => k.write_u32(mismatch, &[1, tag, other]),
                None => Ok(()),
            }
        }),
    ],
};

/// The kernels of one device that write and check tags, and where they report a wrong one.
pub struct Tags {
    sim: Arc<SimDriver>,
    device: DeviceId,
    module: ModuleId,
    write: FunctionId,
    check: FunctionId,
    mismatch: DevicePtr,
}

impl Tags {
    /// Loads the kernels. The calls on the simulation here and below must not fail: a failure is a panic.
    #[must_use]
    pub fn new(sim: &Arc<SimDriver>, device: DeviceId) -> Self {
        let module = sim.module_load(device, &KERNELS).unwrap();
        let mismatch = sim.mem_alloc(device, 12).unwrap();
        sim.upload(device, mismatch, &[0; 12]).unwrap();
        let [write, check] = ["write_tag", "check_tag"].map(|name| sim.function_get(module, name).unwrap());
        Self { sim: Arc::clone(sim), device, module, write, check, mismatch }
    }

    /// Queues a write of a tag into a block.
    pub fn write(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: StreamId) {
        for (ptr, words) in parts(ptr, bytes) {
            let args = [ptr.into(), KernelArg::U32(words), KernelArg::U32(tag)];
            self.sim.kernel_launch(self.write, LaunchShape::ONE, &args, stream).unwrap();
        }
    }

    /// Queues a check that a block still contains its tag.
    pub fn check(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: StreamId) {
        for (ptr, words) in parts(ptr, bytes) {
            let args = [ptr.into(), KernelArg::U32(words), KernelArg::U32(tag), self.mismatch.into()];
            self.sim.kernel_launch(self.check, LaunchShape::ONE, &args, stream).unwrap();
        }
    }

    /// After a synchronization: panics if a check found another tag.
    pub fn expect_intact(&self) {
        let mut bytes = [0; 12];
        self.sim.download(self.device, self.mismatch, &mut bytes).unwrap();
        let [found, tag, other] = [0, 4, 8].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()));
        assert_eq!(found, 0, "on {}, the block with tag {tag:#x} contained {other:#x}", self.device);
    }

    /// Frees what the kernels use, and unloads them.
    pub fn close(self) {
        self.sim.mem_free(self.mismatch).unwrap();
        self.sim.module_unload(self.module).unwrap();
    }
}

/// The parts of a block that contain the tag: its first and its last words.
fn parts(ptr: DevicePtr, bytes: u64) -> impl Iterator<Item = (DevicePtr, u32)> {
    const WORDS: u64 = 16;
    let words = bytes / 4;
    let parts = match words {
        0 => [None, None],
        _ if words <= 2 * WORDS => [Some((ptr, words as u32)), None],
        _ => [Some((ptr, WORDS as u32)), Some((ptr.offset(4 * (words - WORDS)), WORDS as u32))],
    };
    parts.into_iter().flatten()
}
