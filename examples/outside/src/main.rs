//! A small program of a user: typed memory and a captured step, on CUDA where there is a GPU, else on the simulated
//! one. With the feature `everything` it also uses the other crates.

use std::sync::Arc;

use warpool::driver::Driver;
#[cfg(any(test, feature = "sim"))]
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::graph::{CaptureOptions, Step};
use warpool::memory::{CachingAllocator, DeviceAllocator, HostAllocator, PinnedSettings, Settings};
use warpool::{DeviceVec, Instance, PinnedVec};
use warpool_cuda::CudaDriver;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let driver: Arc<dyn Driver> = match CudaDriver::open() {
        Ok(cuda) => Arc::new(cuda),
        #[cfg(feature = "sim")]
        Err(error) => {
            println!("on the simulated GPU: {error}");
            Arc::new(SimDriver::new(SimConfig::default()))
        }
        #[cfg(not(feature = "sim"))]
        Err(error) => return Err(error.into()),
    };
    let instance = Instance::new(driver)?;
    println!("{:?}", double(&instance, &[1.0, 2.0, 3.0])?);
    #[cfg(feature = "everything")]
    others::use_all(&instance)?;
    Ok(())
}

/// Copies `values` to a device, captures a step that copies them to a second vector, replays it, and returns the sums.
fn double(instance: &Instance, values: &[f32]) -> warpool::Result<Vec<f32>> {
    let allocator = Arc::new(CachingAllocator::new(instance, Settings::parse("expandable_segments:True")?));
    let host = HostAllocator::new(instance, PinnedSettings::default());
    let device = instance.device(0)?;
    let stream = device.lease_stream()?;

    let source = DeviceVec::from_slice(&allocator, values, &stream)?;
    let target = DeviceVec::zeroed(&allocator, values.len(), &stream)?;
    let step = Step::capture(&allocator, &stream, CaptureOptions::default(), (source, target), |stream, (from, to)| {
        stream.copy(&*from, to)
    })?;
    step.replay(&stream)?;

    let mut copied = PinnedVec::uninit(&host, values.len())?;
    stream.copy(&step.buffers().1, &mut copied)?;
    let sums = copied.wait()?.iter().zip(values).map(|(copied, value)| copied + value).collect();
    println!("{} bytes reserved", allocator.stats(device.id())?.reserved_bytes.all.current);
    Ok(sums)
}

#[cfg(feature = "everything")]
mod others {
    use std::sync::Arc;

    use warpool::Instance;
    use warpool::driver::Driver;
    use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, Settings};
    use warpool::memory::report::{HistoryOptions, SnapshotOptions};
    use warpool_conformance::Options;
    use warpool_external::{AllocatorSymbols, LoadedAllocator};
    use warpool_trace::{ReadOptions, read, write_snapshot};

    pub fn use_all(instance: &Instance) -> Result<(), Box<dyn std::error::Error>> {
        snapshot(instance)?;
        conformance(instance.driver().clone());
        // SAFETY: there is no such file, so nothing of it runs.
        let missing = unsafe { LoadedAllocator::open("./none.so", &AllocatorSymbols::new("my_malloc", "my_free")) };
        println!("{}", missing.err().ok_or("a file that is not there was opened")?);
        if let Ok(context) = cudarc::driver::CudaContext::new(0) {
            let allocator = Arc::new(CachingAllocator::new(instance, Settings::default()));
            println!("{:?}", warpool_cudarc::CudarcPool::new(&allocator, &context)?);
        }
        Ok(())
    }

    /// A recording that was written is read back.
    fn snapshot(instance: &Instance) -> Result<(), Box<dyn std::error::Error>> {
        let allocator = Arc::new(CachingAllocator::new(instance, Settings::default()));
        allocator.record_history(Some(HistoryOptions::default()))?;
        drop(allocator.allocate(1 << 20, &instance.device(0)?.pool_stream()?)?);
        let mut file = Vec::new();
        write_snapshot(&allocator.snapshot(SnapshotOptions::default())?, &mut file)?;
        let recording = read(file.as_slice(), &ReadOptions::default())?;
        println!("{} events", recording.snapshot.traces.iter().map(Vec::len).sum::<usize>());
        Ok(())
    }

    fn conformance(driver: Arc<dyn Driver>) {
        let options = Options { suites: vec!["events".to_owned()], ..Options::default() };
        let summary = warpool_conformance::run(&driver, &options, &mut |_| {});
        println!("{} checks passed, {} failed", summary.passed, summary.failed);
        assert_eq!(summary.failed, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test needs no GPU.
    #[test]
    fn values_are_doubled_without_a_hazard() -> warpool::Result<()> {
        let gpu = Arc::new(SimDriver::new(SimConfig::default()));
        let instance = Instance::new(gpu.clone())?;
        assert_eq!(double(&instance, &[1.0, 2.0, 3.0])?, [2.0, 4.0, 6.0]);
        assert!(gpu.hazards().is_empty());
        Ok(())
    }
}
