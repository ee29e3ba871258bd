//! `warpool bench sleep`: how fast memory falls asleep and wakes, next to plain copies between the same amounts of
//! device memory and pinned host memory in the same run, and how much memory the driver reports free meanwhile.
//!
//! The plain copies use one piece of plain device memory and of pinned memory, in copies of 1 GiB on one stream: the
//! bandwidth of the bus.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use warpool::memory::sleep::Keep;
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, HostAllocator, MemPoolId, PinnedSettings, Settings,
    Tags,
};
use warpool::{Device, Instance, Stream};
use warpool_driver::{Address, DevicePtr, Driver, HostOptions, HostPtr, Pattern};

use super::measure::Measurement;
use super::{Args, Report, Row};
use crate::output::{Result, Verdict};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// How often each is measured; the fastest counts.
const ROUNDS: usize = 5;

const BASELINE: &str = "a plain copy of the same bytes, pinned";

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    let driver = args.open_driver()?;
    let instance = Instance::new(Arc::clone(&driver))?;
    let device = instance.device(args.device)?;
    // 20 GiB, or what the device has room for; the simulated one computes every byte on the host.
    let default = if driver.kind() == "sim" { 256 * MIB } else { 20 * GIB };
    let free = driver.mem_info(device.id())?.bytes_free;
    let bytes = args.ops.map_or(default, |mib| mib * MIB).min(free / 3).next_multiple_of(64 * MIB);
    let bench = Bench { driver: &*driver, device: &device, stream: device.pool_stream()?, bytes };
    let (to_host, to_device) = bench.plain_copies()?;
    bench.measure(to_host, to_device, report)
}

struct Bench<'a> {
    driver: &'a dyn Driver,
    device: &'a Device,
    stream: Stream,
    bytes: u64,
}

impl Bench<'_> {
    /// The fastest plain copy to the host, and back.
    fn plain_copies(&self) -> Result<(Duration, Duration)> {
        let host = self.driver.host_alloc(self.device.id(), self.bytes, HostOptions::default())?;
        let memory = self.driver.mem_alloc(self.device.id(), self.bytes)?;
        let (mut to_host, mut to_device) = (Duration::MAX, Duration::MAX);
        for _ in 0..ROUNDS {
            to_host = to_host.min(self.time(|| self.copy(host.into(), memory.into()))?);
            to_device = to_device.min(self.time(|| self.copy(memory.into(), host.into()))?);
        }
        self.driver.mem_free(memory)?;
        self.driver.host_free(host)?;
        Ok((to_host, to_device))
    }

    fn copy(&self, dst: Address, src: Address) -> Result<()> {
        let forward = |address: Address, by: u64| match address {
            Address::Device(ptr) => Address::Device(DevicePtr(ptr.0 + by)),
            Address::Host(ptr) => Address::Host(HostPtr(ptr.0 + by)),
        };
        for at in (0..self.bytes).step_by(GIB as usize) {
            let bytes = (self.bytes - at).min(GIB);
            self.driver.copy(forward(dst, at), forward(src, at), bytes, self.stream.id())?;
        }
        Ok(self.stream.synchronize()?)
    }

    fn time<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<Duration> {
        let begun = Instant::now();
        work()?;
        Ok(begun.elapsed())
    }

    fn free(&self) -> Result<u64> {
        Ok(self.driver.mem_info(self.device.id())?.bytes_free)
    }

    fn measure(&self, to_host: Duration, to_device: Duration, report: &mut Report<'_>) -> Result<Verdict> {
        let instance = self.device.instance();
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(instance, Settings::default()));
        let host = HostAllocator::new(instance, PinnedSettings::default());
        let tags = Tags::new(&allocator, &host)?;
        let mut blocks: Vec<DeviceBlock> = Vec::new();
        {
            // Like a model's weights: in each GiB, one block of 512 MiB and eight of 64 MiB.
            let _scope = tags.tag(self.device, "weights")?.enter()?;
            let mut left = self.bytes;
            while left > 0 {
                let bytes = if left.is_multiple_of(GIB) { 512 * MIB } else { 64 * MIB }.min(left);
                blocks.push(allocator.allocate(bytes, &self.stream)?);
                left -= bytes;
            }
        }
        for (value, block) in (1..).zip(&blocks) {
            self.driver.fill(block.ptr(), Pattern::U32(value), block.bytes() / 4, self.stream.id())?;
        }
        self.stream.synchronize()?;
        let awake = self.free()?;
        let (mut asleep, mut first) = (0, None);
        let (mut sleeps, mut wakes) = (Duration::MAX, Duration::MAX);
        for _ in 0..ROUNDS {
            let took = self.time(|| Ok(tags.sleep(&["weights"], Keep::Host)?))?;
            first.get_or_insert(took);
            sleeps = sleeps.min(took);
            asleep = self.free()?;
            wakes = wakes.min(self.time(|| Ok(tags.wake(&["weights"])?))?);
        }
        // As after the start of a program: nothing is pinned.
        host.trim(0)?;
        let prepares = self.time(|| Ok(tags.prepare(&["weights"])?))?;
        let prepared = self.time(|| Ok(tags.sleep(&["weights"], Keep::Host)?))?;
        tags.wake(&["weights"])?;
        let (mut drops, mut zeroes) = (Duration::MAX, Duration::MAX);
        let intact = self.are_intact(&blocks)?;
        for _ in 0..ROUNDS {
            drops = drops.min(self.time(|| Ok(tags.sleep(&["weights"], Keep::Discard)?))?);
            zeroes = zeroes.min(self.time(|| Ok(tags.wake(&["weights"])?))?);
        }
        let first = first.unwrap_or_default();
        self.row(report, "sleep, first: pinned memory is allocated", first, to_host)?;
        self.row(report, "prepare: pinned memory is allocated", prepares, to_host)?;
        self.row(report, "sleep, first, prepared", prepared, to_host)?;
        self.row(report, "sleep, keep host", sleeps, to_host)?;
        self.row(report, "wake, keep host", wakes, to_device)?;
        self.row(report, "sleep, discard", drops, to_host)?;
        self.row(report, "wake, discard: zeroed", zeroes, to_device)?;
        let gained = asleep.saturating_sub(awake);
        report.remark(format!(
            "{} bytes in {} blocks; the driver reports {} bytes free awake and {} asleep: {} more",
            self.bytes,
            blocks.len(),
            awake,
            asleep,
            gained
        ));
        drop(blocks);
        drop(tags);
        self.stream.synchronize()?;
        allocator.trim(self.device.id(), MemPoolId::DEFAULT)?;
        host.close()?;
        if !intact {
            report.remark("the contents were not the same after waking".to_owned());
        }
        let returned = gained >= self.bytes / 10 * 9;
        if !returned {
            report.remark("the driver did not get the memory".to_owned());
        }
        Ok(if intact && returned { Verdict::Success } else { Verdict::Failure })
    }

    /// Whether every block begins and ends with its value.
    fn are_intact(&self, blocks: &[DeviceBlock]) -> Result<bool> {
        self.stream.synchronize()?;
        for (value, block) in (1_u32..).zip(blocks) {
            for at in [0, block.bytes() - 4096] {
                let mut bytes = [0; 4096];
                self.driver.download(self.device.id(), DevicePtr(block.ptr().0 + at), &mut bytes)?;
                if bytes.chunks_exact(4).any(|word| word != value.to_le_bytes()) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    fn row(&self, report: &mut Report<'_>, case: &'static str, took: Duration, plain: Duration) -> Result<()> {
        let rate = |time: Duration| self.bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9;
        let measurement = Measurement { ns: took.as_nanos() as f64, baseline_ns: plain.as_nanos() as f64 };
        let mut row = Row::new(case, measurement);
        row.baseline = BASELINE;
        row.details = format!("{:.1} GB/s, plain copy {:.1} GB/s", rate(took), rate(plain));
        row.fields = vec![
            ("bytes", json!(self.bytes)),
            ("gb_per_second", json!(rate(took))),
            ("plain_gb_per_second", json!(rate(plain))),
        ];
        report.add(row)
    }
}
