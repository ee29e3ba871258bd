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
        HostKernel::new("write_page_tags", |k| {
            let (to, words, tag) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_u32(2)?);
            for word in page_words(to, words) {
                k.write_u32(to.offset(4 * u64::from(word)), &[tag, word])?;
            }
            Ok(())
        }),
        HostKernel::new("check_page_tags", |k| {
            let (from, words, tag, mismatch) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_u32(2)?, k.arg_ptr(3)?);
            for word in page_words(from, words) {
                let found = k.read_u32(from.offset(4 * u64::from(word)), 2)?;
                if found != [tag, word] {
                    return k.write_u32(mismatch, &[1, tag, found[0]]);
                }
            }
            Ok(())
        }),
    ],
};

/// The positions of the words where a block's tag and the position itself are written: the first and the last, and
/// those around every boundary of 2 MiB, so that each page under the block is distinguished from all others. All are
/// even, so that no two pairs overlap in part. Blocks are aligned to 512 bytes.
fn page_words(ptr: DevicePtr, words: u32) -> impl Iterator<Item = u32> {
    const PAGE_WORDS: u64 = (2 << 20) / 4;
    let words = u64::from(words) & !1;
    let first = PAGE_WORDS - ptr.0 / 4 % PAGE_WORDS;
    let boundaries = (0..).map(move |nth| first + nth * PAGE_WORDS).take_while(move |&word| word + 2 <= words);
    let around = boundaries.flat_map(|word| [word - 2, word]);
    let ends = (words >= 2).then_some([0, words.saturating_sub(2)]);
    let all = ends.into_iter().flatten().chain(around);
    all.map(|word| u32::try_from(word).expect("words of a block are numbered by 32 bits"))
}

/// The kernels of one device that write and check tags, and where they report a wrong one.
pub struct Tags {
    sim: Arc<SimDriver>,
    device: DeviceId,
    module: ModuleId,
    write: FunctionId,
    check: FunctionId,
    write_pages: FunctionId,
    check_pages: FunctionId,
    mismatch: DevicePtr,
}

impl Tags {
    /// Loads the kernels. The calls on the simulation here and below must not fail: a failure is a panic.
    #[must_use]
    pub fn new(sim: &Arc<SimDriver>, device: DeviceId) -> Self {
        let module = sim.module_load(device, &KERNELS).unwrap();
        let mismatch = sim.mem_alloc(device, 12).unwrap();
        sim.upload(device, mismatch, &[0; 12]).unwrap();
        let [write, check, write_pages, check_pages] = ["write_tag", "check_tag", "write_page_tags", "check_page_tags"]
            .map(|name| sim.function_get(module, name).unwrap());
        Self { sim: Arc::clone(sim), device, module, write, check, write_pages, check_pages, mismatch }
    }

    /// Queues a write of a tag into every page of a block.
    pub fn write_pages(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: StreamId) {
        let args = [ptr.into(), KernelArg::U32((bytes / 4) as u32), KernelArg::U32(tag)];
        self.sim.kernel_launch(self.write_pages, LaunchShape::ONE, &args, stream).unwrap();
    }

    /// Queues a check that every page of a block still contains its tag.
    pub fn check_pages(&self, ptr: DevicePtr, bytes: u64, tag: u32, stream: StreamId) {
        let args = [ptr.into(), KernelArg::U32((bytes / 4) as u32), KernelArg::U32(tag), self.mismatch.into()];
        self.sim.kernel_launch(self.check_pages, LaunchShape::ONE, &args, stream).unwrap();
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
        if let Some((tag, other)) = self.mismatch() {
            panic!("on {}, the block with tag {tag:#x} contained {other:#x}", self.device);
        }
    }

    /// After a synchronization: a tag that a check did not find, and what it found.
    #[must_use]
    pub fn mismatch(&self) -> Option<(u32, u32)> {
        let mut bytes = [0; 12];
        self.sim.download(self.device, self.mismatch, &mut bytes).unwrap();
        let [found, tag, other] = [0, 4, 8].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()));
        (found > 0).then_some((tag, other))
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
