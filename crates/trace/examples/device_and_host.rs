//! Writes the snapshot of a short program on the simulated GPU, with device memory and pinned host memory in one file.
//!
//! `cargo run -p warpool-trace --example device_and_host -- OUT`; programs that read PyTorch's snapshots read it.

use std::error::Error;
use std::fs::File;
use std::sync::Arc;

use warpool::Instance;
use warpool::driver::Copies as _;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::memory::report::{Frame, HistoryOptions, SnapshotOptions, StackLevel};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, HostAllocator, Settings};
use warpool_trace::write_snapshot;

fn main() -> Result<(), Box<dyn Error>> {
    let out = std::env::args().nth(1).ok_or("usage: device_and_host OUT")?;
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let instance = Instance::new(sim.clone())?;
    let device: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let host = HostAllocator::new(&instance, Settings::default().pinned);
    for observers in [device.observers(), host.observers()] {
        observers.set_stack_hook(Some(Arc::new(|| {
            Some([Frame { name: "main".into(), filename: "device_and_host.rs".into(), line: 1 }].into())
        })));
    }
    let options = HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() };
    device.record_history(Some(options.clone()))?;
    host.record_history(Some(options));

    let stream = instance.device(0)?.pool_stream()?;
    sim.pause_stream(stream.id())?;
    let (kept, dropped, target) = (host.allocate(5000)?, host.allocate(3 << 20)?, device.allocate(3 << 20, &stream)?);
    dropped.record_use(&stream)?;
    sim.copy(target.ptr().into(), dropped.ptr().into(), 3 << 20, stream.id())?;
    drop(dropped); // pending free: the copy has not run yet
    drop(host.allocate(100)?);

    let mut snapshot = device.snapshot(SnapshotOptions::default())?;
    host.add_to(&mut snapshot);
    write_snapshot(&snapshot, File::create(out)?)?;

    sim.resume_stream(stream.id())?;
    stream.synchronize()?;
    drop((kept, target));
    Ok(host.close()?)
}
