//! Contents of large blocks, for checks over resources: kernels write and compare sequences of words (`first`,
//! `first + 1` and so on), so that nothing large is copied to the host.

use warpool::Stream;
use warpool_driver::{DevicePtr, KernelArg, LaunchShape, Pattern};

use super::TestContext;
use crate::expect::{CheckResult, expect_eq};

impl TestContext {
    /// [`keep_busy`](Self::keep_busy) for a stream of the instance.
    pub(crate) fn keep_stream_busy(&self, stream: &Stream) -> CheckResult {
        self.keep_busy(stream.id())
    }

    /// Writes the sequence that begins with `first` over `bytes` bytes.
    pub(crate) fn write_sequence(&self, ptr: DevicePtr, bytes: u64, first: u32, stream: &Stream) -> CheckResult {
        let n = word_count(bytes);
        let args = [ptr.into(), KernelArg::U32(n), KernelArg::U32(first)];
        self.launch(self.kernels()?.write_sequence, n, &args, stream.id())
    }

    /// Sets the words of `to` to those of `from` plus `value`, over `bytes` bytes. The result for a sequence is the
    /// sequence that begins `value` later.
    pub(crate) fn add_sequence(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: u64,
        value: u32,
        stream: &Stream,
    ) -> warpool::Result<()> {
        let (function, n) = (self.kernels().expect("loaded with the instance").add_sequence, word_count(bytes));
        let args = [to.into(), from.into(), KernelArg::U32(n), KernelArg::U32(value)];
        Ok(self.launch_kernel(function, LaunchShape::linear(n), &args, stream.id())?)
    }

    /// Waits for `stream` and expects the sequence that begins with `first`. A kernel counts the words that differ.
    #[track_caller]
    pub(crate) fn expect_sequence(
        &self,
        what: &str,
        ptr: DevicePtr,
        bytes: u64,
        first: u32,
        stream: &Stream,
    ) -> CheckResult {
        let different = self.count_differences(ptr, bytes, first, stream)?;
        expect_eq(&format!("{what}: words that differ"), different, 0)
    }

    #[track_caller]
    fn count_differences(&self, ptr: DevicePtr, bytes: u64, first: u32, stream: &Stream) -> CheckResult<u32> {
        let (kernels, n) = (self.kernels()?, word_count(bytes));
        let counter = self.kernel_cache.next_counter()?;
        self.driver.fill(counter, Pattern::U32(0), 1, stream.id())?;
        let args = [ptr.into(), KernelArg::U32(n), KernelArg::U32(first), counter.into()];
        self.launch(kernels.count_differences, n, &args, stream.id())?;
        stream.synchronize()?;
        Ok(self.read_words(counter, 1)?[0])
    }
}

fn word_count(bytes: u64) -> u32 {
    u32::try_from(bytes / 4).expect("checks use less than 16 GiB")
}
