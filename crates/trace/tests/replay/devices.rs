//! What is inferred about the device of a recording: its card, and the memory that a full device had for the program.

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDevice, SimDriver};
use warpool::driver::{DeviceId, Driver, Memory, StreamId, Streams};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{HistoryOptions, Snapshot, SnapshotOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator, Settings};
use warpool::{Error, Instance};
use warpool_trace::cards::{Card, DeviceOrigin};
use warpool_trace::replay::{DeviceReplays, LimitOrigin, ReplayOptions, ReplayReport, WhatIf};

use crate::common::{MIB, recording};

const GIB: u64 = 1024 * MIB;
const DEVICE: DeviceId = DeviceId(0);

/// A program on a device of some size, whose history is recorded.
struct Recorded {
    driver: Arc<SimDriver>,
    allocator: CachingAllocator,
    stream: StreamId,
}

impl Recorded {
    fn on(bytes_total: u64, settings: &str) -> Self {
        let config = SimConfig::default().with_capacity(bytes_total).without_suballocation_tracking();
        let driver = Arc::new(SimDriver::new(config));
        let instance = Instance::new(Arc::clone(&driver) as Arc<dyn Driver>).expect("an instance");
        let allocator = CachingAllocator::new(&instance, Settings::parse(settings).expect("valid settings"));
        allocator.record_history(Some(HistoryOptions::default())).expect("a history");
        let stream = driver.stream_default(DEVICE).expect("a device");
        Self { driver, allocator, stream }
    }

    fn allocate(&self, bytes: u64) -> Option<Allocation> {
        match self.allocator.allocate_raw(Request::new(DEVICE, self.stream, bytes)) {
            Ok(allocation) => Some(allocation),
            Err(Error::OutOfMemory(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Allocates until a request fails.
    fn fill(&self, bytes: u64) {
        while self.allocate(bytes).is_some() {}
    }

    fn snapshot(&self) -> Snapshot {
        self.allocator.snapshot(SnapshotOptions::default()).expect("a snapshot")
    }
}

fn report(snapshot: &Snapshot, what_if: &WhatIf) -> ReplayReport {
    let options = ReplayOptions { address_orders: Some(2), ..ReplayOptions::default() };
    let replays = DeviceReplays::new(snapshot, &options).expect("a recording");
    let [device] = replays.devices() else { panic!("one device") };
    device.report(what_if, &options).expect("an answer")
}

fn total(key: &str) -> u64 {
    Card::find(key).expect("it is in the table").bytes_total()
}

fn context() -> u64 {
    SimDevice::h200().bytes_context
}

#[test]
fn card_and_limit_of_a_full_device_are_what_it_had() {
    for (key, settings) in
        [("rtx4090", ""), ("h100-80gb", ""), ("t4", "expandable_segments:True"), ("b200", "expandable_segments:True")]
    {
        let program = Recorded::on(total(key), settings);
        program.fill(700 * MIB);
        let report = report(&program.snapshot(), &WhatIf::default());
        assert!(report.fidelity.exact, "{key}: {:?}", report.fidelity);
        let had = total(key) - context();
        let limit = report.inferred.memory_limit.expect("it was full");
        assert!(limit.device_full && limit.at_least <= limit.used && limit.used < limit.below, "{key}: {limit:?}");
        assert_eq!((limit.used, limit.device_had), (had, Some((had, had))), "{key}");
        let in_force = &report.in_force;
        assert_eq!((in_force.memory_limit, in_force.limit_origin), (Some(had), LimitOrigin::RecordedDeviceFull));
        // Several cards of 16 GB may be a T4.
        match key {
            "t4" => assert_eq!((in_force.device_bytes_total, in_force.device_origin), (None, DeviceOrigin::Unknown)),
            _ => {
                let inferred = in_force.device_bytes_total.expect("the card follows");
                assert!(inferred.abs_diff(total(key)) < total(key) / 100, "{key}: {inferred}");
                assert_eq!(in_force.device_origin, DeviceOrigin::Inferred);
            }
        }
    }
}

/// A request of 50 MiB fails with 55 MiB free, since an expandable segment grows by chunks of 20 MiB.
#[test]
fn full_device_is_told_from_a_limit_by_chunks() {
    let program = Recorded::on(2 * GIB + context(), "expandable_segments:True");
    let chunks = (2 * GIB - 55 * MIB) / (20 * MIB);
    let rest = 2 * GIB - chunks * 20 * MIB - 55 * MIB;
    program.driver.mem_alloc(DEVICE, rest).expect("there is room");
    for _ in 0..chunks {
        program.allocate(20 * MIB).expect("there is room");
    }
    assert!(program.allocate(50 * MIB).is_none(), "it takes three chunks");
    let report = report(&program.snapshot(), &WhatIf::default());
    assert!(report.fidelity.exact, "{:?}", report.fidelity);
    let limit = report.inferred.memory_limit.expect("it was full");
    assert!(limit.device_full, "{limit:?}");
    assert!((limit.at_least..limit.below).contains(&limit.used), "{limit:?}");
    assert_eq!(limit.device_had, Some((2 * GIB - rest, 2 * GIB - rest)));
}

#[test]
fn others_that_come_and_go_give_a_range() {
    let program = Recorded::on(total("a100-40gb"), "");
    let others = program.driver.mem_alloc(DEVICE, 10 * GIB).expect("there is room");
    program.fill(500 * MIB);
    program.driver.mem_free(others).expect("it was allocated");
    program.fill(500 * MIB);
    let report = report(&program.snapshot(), &WhatIf::default());
    let limit = report.inferred.memory_limit.expect("it was full");
    let had = total("a100-40gb") - context();
    // The first failure is below what was reserved later, so only the last one has a limit.
    assert_eq!(limit.used, had, "{limit:?}");
    assert_eq!(report.in_force.device_name.as_deref(), Some("A100 40GB"));
    assert!(report.inferred.remarks.iter().any(|remark| remark.contains("limit changed")), "{:?}", report.inferred);
}

#[test]
fn unknown_device_has_no_total_and_no_margin() {
    let program = Recorded::on(total("h200"), "");
    program.allocate(3 * GIB).expect("there is room");
    let recorded = report(&program.snapshot(), &WhatIf::default());
    let in_force = &recorded.in_force;
    assert_eq!((in_force.device_bytes_total, in_force.device_origin), (None, DeviceOrigin::Unknown));
    assert_eq!((in_force.bytes_available, recorded.orders.margin_bytes_least), (None, None));
    assert!(recorded.orders.all_fit());
    let given = report(&program.snapshot(), &WhatIf { capacity: Some(8 * GIB), ..WhatIf::default() });
    assert_eq!(
        (given.in_force.device_bytes_total, given.in_force.device_origin),
        (Some(8 * GIB), DeviceOrigin::Argument)
    );
    assert_eq!(given.orders.margin_bytes_least, Some(5 * GIB - context()));

    // Others use most of the device: the rest matches no card.
    let program = Recorded::on(total("h200"), "");
    program.driver.mem_alloc(DEVICE, 80 * GIB).expect("there is room");
    program.fill(500 * MIB);
    let snapshot = program.snapshot();
    let replays = DeviceReplays::new(&snapshot, &ReplayOptions::default()).expect("a recording");
    let card = replays.devices()[0].card();
    assert_eq!((card.bytes_total, card.bytes_at_least), (None, total("h200") - 80 * GIB - context()));
}

/// With a limit, the free memory identifies the card too; a fraction of that card is then likely.
#[test]
fn fraction_of_a_card_is_inferred_to_the_byte() {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "as PyTorch computes it"
    )]
    let nine_tenths = (total("rtx4090") as f64 * 0.9) as u64;
    let program = Recorded::on(total("rtx4090"), "");
    program.allocator.set_memory_cap(DEVICE, Some(nine_tenths)).expect("a device");
    program.fill(700 * MIB);
    let report = report(&program.snapshot(), &WhatIf::default());
    let limit = report.inferred.memory_limit.expect("it had one");
    assert!(!limit.device_full && report.fidelity.exact, "{limit:?} {:?}", report.fidelity);
    assert_eq!(limit.used, nine_tenths, "{limit:?}");
}

#[test]
fn recordings_of_an_h200_are_of_an_h200() {
    for name in ["device_full.native", "device_full.expandable", "oom_stacks.fraction_6gib", "verdict.limit"] {
        let report = report(&recording(&format!("{name}.pickle.xz")).snapshot, &WhatIf::default());
        assert_eq!(report.in_force.device_name.as_deref(), Some("H200"), "{name}");
        let total = report.in_force.device_bytes_total.expect("it is known");
        assert!(total.abs_diff(150_109_880_320) < GIB / 10, "{name}: {total}");
    }
}
