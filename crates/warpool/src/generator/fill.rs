//! Filling memory with numbers: which kernel, how many threads, what is consumed.

use warpool_driver::{DeviceId, DevicePtr, KernelArg, LaunchShape};

use super::kernels::{BITS, DROPOUT, NORMAL, SOURCE, UNIFORM};
use super::{Generator, GeneratorError};
use crate::memory::DeviceBlock;
use crate::{Result, Stream, launch};

/// A thread makes four numbers.
const THREADS_PER_BLOCK: u64 = 256;
const NUMBERS_PER_BLOCK: u64 = 4 * THREADS_PER_BLOCK;
/// As many blocks as a grid of one dimension has.
const COUNT_MOST: u64 = NUMBERS_PER_BLOCK * (i32::MAX as u64);

/// Where numbers go: a [`DeviceBlock`], as many as fit, or an address and a count of them.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    ptr: DevicePtr,
    extent: Extent,
    /// Where it is known to be.
    device: Option<DeviceId>,
}

#[derive(Clone, Copy, Debug)]
enum Extent {
    Bytes(u64),
    Count(u64),
}

impl From<&DeviceBlock> for Target {
    fn from(block: &DeviceBlock) -> Self {
        Self { ptr: block.ptr(), extent: Extent::Bytes(block.bytes()), device: Some(block.device_id()) }
    }
}

impl From<(DevicePtr, u64)> for Target {
    /// `count` numbers from `ptr` on. Nobody checks that there is memory for them.
    fn from((ptr, count): (DevicePtr, u64)) -> Self {
        Self { ptr, extent: Extent::Count(count), device: None }
    }
}

/// Fills of memory, in the order of a stream. Number `i` is lane `i % 4` of subsequence `i / 4` at the generator's
/// offset, which a fill advances by 4, however long it is; an empty one does nothing. The bits are the same on every
/// device, and those that [`philox`](super::philox) computes on the host.
///
/// The stream must be one of the generator's device. If it captures, replays draw on from where the generator then is.
/// A fill that fails leaves the generator as it was.
impl Generator {
    /// Words of 32 random bits.
    pub fn fill_bits(&self, target: impl Into<Target>, stream: &Stream) -> Result<()> {
        self.fill(BITS, 4, target.into(), None, stream)
    }

    /// Floats between 0, which never comes, and 1, which does.
    pub fn fill_uniform(&self, target: impl Into<Target>, stream: &Stream) -> Result<()> {
        self.fill(UNIFORM, 4, target.into(), None, stream)
    }

    /// Floats of the normal distribution with mean 0 and deviation 1. Two devices may differ in the last bits.
    pub fn fill_normal(&self, target: impl Into<Target>, stream: &Stream) -> Result<()> {
        self.fill(NORMAL, 4, target.into(), None, stream)
    }

    /// Bytes that are 1 with the probability `keep`, else 0. Always 1 if it is 1, never if it is 0.
    pub fn fill_dropout_mask(&self, target: impl Into<Target>, keep: f32, stream: &Stream) -> Result<()> {
        if !(0.0..=1.0).contains(&keep) {
            return Err(GeneratorError::Probability { keep: keep.to_string() }.into());
        }
        self.fill(DROPOUT, 1, target.into(), Some(KernelArg::F32(keep)), stream)
    }

    fn fill(
        &self,
        kernel: &'static str,
        bytes: u64,
        target: Target,
        last: Option<KernelArg>,
        stream: &Stream,
    ) -> Result<()> {
        self.expect_stream(stream)?;
        if let Some(wanted) = target.device.filter(|&device| device != self.device().id()) {
            return Err(GeneratorError::ForeignDevice { generator: self.device().id(), wanted }.into());
        }
        let count = match target.extent {
            Extent::Bytes(extent) => extent / bytes,
            Extent::Count(count) => count,
        };
        if count > COUNT_MOST {
            return Err(GeneratorError::Count { count, most: COUNT_MOST }.into());
        }
        if !target.ptr.0.is_multiple_of(bytes) {
            return Err(GeneratorError::Alignment { ptr: target.ptr, bytes }.into());
        }
        if count == 0 {
            return Ok(());
        }
        let driver = self.device().driver();
        let function = self.device().state().kernels.get(driver, &SOURCE, kernel)?;
        let reserved = self.reserve_for(4, stream)?;
        let [slot, seed, offset] = reserved.reservation.args();
        let mut args = vec![target.ptr.into(), KernelArg::U64(count), slot, seed, offset];
        args.extend(last);
        let launched = launch::fill_random(driver, function, shape(count), &args, stream.id());
        if launched.is_err() {
            reserved.take_back();
        }
        Ok(launched?)
    }
}

fn shape(count: u64) -> LaunchShape {
    let blocks = u32::try_from(count.div_ceil(NUMBERS_PER_BLOCK)).expect("fewer than the most");
    LaunchShape { grid: [blocks, 1, 1], block: [THREADS_PER_BLOCK as u32, 1, 1], shared_bytes: 0 }
}
