//! The requests of a recorded program, made with an allocator directly.

use std::sync::Arc;

use warpool::Instance;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, Driver, StreamOptions, Streams};
use warpool::memory::report::Snapshot;
use warpool::memory::{CachingAllocator, DeviceAllocator, Settings};
use warpool_trace::replay::{Program, ReplayError, ReplayOptions, replay};

use crate::common::recording;

const DEVICE: DeviceId = DeviceId(0);

/// The same allocations and the same peak, in every round: nothing is left out, and nothing stays allocated.
#[test]
fn program_does_what_was_recorded() {
    for (name, settings) in [
        ("prefetch_streams_train.native", "free_block_order:address"),
        ("resnet_train.expandable", "free_block_order:address,expandable_segments:True"),
    ] {
        let snapshot = recording(&format!("{name}.pickle.xz")).snapshot;
        let report = replay(&snapshot, &ReplayOptions::default()).expect("a good recording");
        let mut program = Program::new(&snapshot).expect("a good recording");
        assert_eq!(program.events(), report.events, "{name}");
        let driver = Arc::new(SimDriver::new(SimConfig::default()));
        let instance = Instance::new(Arc::clone(&driver) as Arc<dyn Driver>).expect("a driver");
        let allocator = CachingAllocator::new(&instance, Settings::parse(settings).expect("good settings"));
        let stream = || driver.stream_create(DEVICE, StreamOptions::default()).expect("a stream");
        let streams: Vec<_> = (0..program.streams()).map(|_| stream()).collect();
        let other = stream();
        for round in 0..2 {
            program.run(&allocator, DEVICE, &streams, other).expect("it fits");
            let stats = allocator.stats(DEVICE).expect("a device");
            assert_eq!(stats.allocation.all.allocated, (round + 1) * report.allocations, "{name}");
            let (live, peak) = (stats.allocated_bytes.all.peak, report.peak_live_bytes);
            assert!(live.abs_diff(peak) * 1000 < peak, "{name}: {live}, recorded {peak}");
            program.free_rest(&allocator).expect("its own blocks");
            assert_eq!(allocator.stats(DEVICE).expect("a device").allocated_bytes.all.current, 0, "{name}");
        }
    }
}

#[test]
fn without_events_there_is_no_program() {
    assert!(matches!(Program::new(&Snapshot::default()), Err(ReplayError::NoHistory)));
}
