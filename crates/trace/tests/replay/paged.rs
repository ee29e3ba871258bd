//! Recordings of the paged allocator: they name the allocator, and replay exactly.

use std::sync::Arc;

use warpool::driver::DeviceId;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::memory::pools::{PoolOptions, PrivatePools as _};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{HistoryOptions, Snapshot, SnapshotOptions};
use warpool::memory::settings::Backend;
use warpool::memory::{DeviceAllocator as _, MemPoolId, PagedAllocator, Settings};
use warpool::{Instance, Stream};
use warpool_trace::replay::{ReplayOptions, ReplayReport, replay};

const DEVICE: DeviceId = DeviceId(0);

/// A random program on the simulated GPU, recorded from its start.
fn record(seed: u64, settings: &str) -> Snapshot {
    record_with(seed, settings, None)
}

/// The same, with a limit that the program sets and that is not in the settings.
fn record_with(seed: u64, settings: &str, limit: Option<u64>) -> Snapshot {
    let mut rng = fastrand::Rng::with_seed(seed);
    let driver = Arc::new(SimDriver::new(SimConfig::default()));
    let instance = Instance::new(driver).expect("a simulated GPU");
    let paged = PagedAllocator::new(&instance, Settings::parse(settings).expect("good settings")).expect("it maps");
    if limit.is_some() {
        paged.set_memory_cap(DEVICE, limit).expect("a device");
    }
    paged.record_history(Some(HistoryOptions::default())).expect("a history");
    let device = instance.device(0).expect("a device");
    let streams: Vec<Stream> = (0..3).map(|_| device.pool_stream().expect("a stream")).collect();
    let pool = paged.create_pool(DEVICE, PoolOptions::default()).expect("a pool");
    let mut live: Vec<Allocation> = Vec::new();
    for _ in 0..600 {
        match rng.usize(..20) {
            0 => {
                // A trim that returns nothing leaves no entry.
                if let Ok(block) = paged.allocate_raw(Request::new(DEVICE, streams[0].id(), 40 << 20)) {
                    paged.free(block).expect("a live block");
                    assert!(paged.trim(DEVICE, MemPoolId::DEFAULT).expect("a trim") > 0);
                }
            }
            1..12 => {
                let magnitude = 9 + rng.usize(..17);
                let request = Request::new(DEVICE, streams[rng.usize(..3)].id(), 1 + rng.u64(..1 << magnitude));
                let request = if rng.usize(..4) == 0 { request.in_pool(pool) } else { request };
                // It may run out of memory, where the settings limit it.
                live.extend(paged.allocate_raw(request));
            }
            _ if !live.is_empty() => {
                let block = live.swap_remove(rng.usize(..live.len()));
                paged.free(block).expect("a live block");
            }
            _ => {}
        }
    }
    paged.snapshot(SnapshotOptions::default()).expect("a snapshot")
}

fn replayed(snapshot: &Snapshot) -> ReplayReport {
    replay(snapshot, &ReplayOptions::default()).expect("a recording")
}

#[test]
fn a_recording_of_the_paged_allocator_replays_exactly() {
    for seed in 0..10 {
        println!("seed: {seed}");
        let snapshot = record(seed, "backend:paged");
        let recorded = Settings::from_recorded(&snapshot.settings).expect("good settings");
        assert_eq!(recorded.backend, Backend::Paged);
        let report = replayed(&snapshot);
        assert!(report.fidelity.exact, "{:?}", report.fidelity.first_difference);
        assert_eq!(report.fidelity.addresses_equal, report.fidelity.addresses_total);
        assert_eq!(report.peak_reserved_bytes, report.fidelity.recorded_peak_reserved_bytes);
    }
}

#[test]
fn limits_of_its_settings_count() {
    for seed in 0..5 {
        println!("seed: {seed}");
        let report = replayed(&record(seed, "backend:paged,memory_cap_mb:100"));
        assert!(report.fidelity.exact, "{:?}", report.fidelity.first_difference);
    }
}

/// A limit that is not in the settings shows in the requests that failed.
#[test]
fn limits_of_failed_requests_are_inferred() {
    const MIB: u64 = 1 << 20;
    for seed in 0..5 {
        println!("seed: {seed}");
        let report = replayed(&record_with(seed, "backend:paged", Some(100 * MIB)));
        assert!(report.ooms > 0, "the program runs out of memory");
        let limit = report.inferred.memory_limit.as_ref().expect("a limit");
        assert!(limit.at_least <= 100 * MIB && 100 * MIB < limit.below, "{limit:?}");
        assert!(!limit.device_full, "{limit:?}");
        assert!(report.fidelity.exact, "{limit:?}: {:?}", report.fidelity.first_difference);
    }
}
