//! Fills of memory with random numbers: the kernel, the number of threads, and the consumed offset.

use warpool_driver::{DeviceId, DevicePtr, KernelArg, LaunchShape};

use super::Generator;
use super::kernels::{BITS, DROPOUT, NORMAL, SOURCE, UNIFORM};
use crate::error::GeneratorError;
use crate::memory::DeviceBlock;
use crate::{Result, Stream, launch};

/// Each thread generates four numbers.
const THREADS_PER_BLOCK: u64 = 256;
const NUMBERS_PER_BLOCK: u64 = 4 * THREADS_PER_BLOCK;
/// A grid of one dimension has at most `i32::MAX` blocks.
const COUNT_MAX: u64 = NUMBERS_PER_BLOCK * (i32::MAX as u64);

/// The memory that numbers are written to: a whole [`DeviceBlock`], or a [part](Self::part) of one.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    ptr: DevicePtr,
    /// `None` fills the whole block.
    count: Option<u64>,
    /// `None` is unknown: the caller has promised that it suffices.
    bytes_available: Option<u64>,
    device: Option<DeviceId>,
}

impl From<&DeviceBlock> for Target {
    fn from(block: &DeviceBlock) -> Self {
        let bytes_available = Some(block.bytes());
        Self { ptr: block.ptr(), count: None, bytes_available, device: Some(block.device_id()) }
    }
}

impl Target {
    /// `count` numbers, `offset` bytes from the start of a block.
    #[must_use]
    pub fn part(block: &DeviceBlock, offset: u64, count: u64) -> Self {
        Self {
            ptr: DevicePtr(block.ptr().0.saturating_add(offset)),
            count: Some(count),
            bytes_available: Some(block.bytes().saturating_sub(offset)),
            device: Some(block.device_id()),
        }
    }

    /// `count` numbers at an address.
    ///
    /// # Safety
    /// There must be device memory for `count` numbers at `ptr`, at every fill with this target and at every replay of
    /// a graph that captures one.
    #[expect(unsafe_code, reason = "a promise about an address, which launch.rs relies on")]
    #[must_use]
    pub const unsafe fn raw(ptr: DevicePtr, count: u64) -> Self {
        Self { ptr, count: Some(count), bytes_available: None, device: None }
    }

    /// How many numbers of `bytes` bytes each.
    fn count(&self, bytes: u64) -> Result<u64> {
        let count = match (self.count, self.bytes_available) {
            (Some(count), _) => count,
            (None, available) => available.unwrap_or(0) / bytes,
        };
        if count > COUNT_MAX {
            return Err(GeneratorError::Count { count, most: COUNT_MAX }.into());
        }
        match self.bytes_available.filter(|&available| count * bytes > available) {
            Some(available) => Err(GeneratorError::OutOfBounds { count, bytes: count * bytes, available }.into()),
            None => Ok(count),
        }
    }
}

/// Fills of memory, ordered in a stream. Number `i` is lane `i % 4` of subsequence `i / 4` at the generator's offset,
/// which a fill advances by 4, however long it is; an empty one does nothing. The bits are the same on every device,
/// and equal to those that [`philox`](super::philox) computes on the host.
///
/// The stream must belong to the generator's device. If it is capturing, each replay continues from the generator's
/// position at that time. A fill that fails leaves the generator as it was.
impl Generator {
    /// Words of 32 random bits.
    pub fn fill_bits(&self, target: impl Into<Target>, stream: &Stream) -> Result<()> {
        self.fill(BITS, 4, target.into(), None, stream)
    }

    /// Floats in (0, 1].
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
        let count = target.count(bytes)?;
        if !target.ptr.0.is_multiple_of(bytes) {
            return Err(GeneratorError::Alignment { ptr: target.ptr, bytes }.into());
        }
        if count == 0 {
            return Ok(());
        }
        let function = self.device().kernel(&SOURCE, kernel)?;
        // Keeps the capture status the same between the draw and the launch.
        let _frozen = stream.instance().freeze_captures(stream)?;
        let reserved = self.reserve_undoable(4, stream)?;
        let [slot, seed, offset] = reserved.reservation.args();
        let mut args = vec![target.ptr.into(), KernelArg::U64(count), slot, seed, offset];
        args.extend(last);
        let range = (target.ptr, count.saturating_mul(bytes));
        let driver = self.device().driver();
        let launched = launch::fill_random(driver, function, range, shape(count), &args, stream.id());
        if launched.is_err() {
            reserved.undo();
        }
        Ok(launched?)
    }
}

fn shape(count: u64) -> LaunchShape {
    let blocks = u32::try_from(count.div_ceil(NUMBERS_PER_BLOCK)).expect("at most COUNT_MAX");
    LaunchShape { grid: [blocks, 1, 1], block: [THREADS_PER_BLOCK as u32, 1, 1], shared_bytes: 0 }
}
