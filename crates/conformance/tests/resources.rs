//! The suites that run on real GPUs run here on the simulated one.

use std::sync::Arc;

use warpool::driver::sim::{Hazard, HazardKind, SimConfig, SimDriver};
use warpool::driver::{DeviceId, Driver, Library};
use warpool_conformance::driver::{Options, Outcome};

#[test]
fn the_suites_pass_and_leave_nothing_behind() {
    for seed in 0..8 {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_seed(seed).with_devices(2)));
        let driver = Arc::clone(&sim) as Arc<dyn Driver>;
        let before = sim.object_counts();
        let mut wrong = Vec::new();
        let options = Options { device: DeviceId((seed % 2) as u32), seed, ..Options::default() };
        let summary = warpool_conformance::resources::run(&driver, &options, &mut |report| {
            if report.outcome != Outcome::Passed {
                wrong.push(format!("{}.{}: {:?}", report.suite, report.check, report.outcome));
            }
        });
        assert!(wrong.is_empty(), "seed {seed}: {wrong:#?}");
        assert!(summary.passed >= 25, "seed {seed}: {summary:?}");
        // Some checks break captures on purpose.
        let on_purpose = |kind| matches!(kind, HazardKind::CaptureInvalidated | HazardKind::CaptureUnjoined);
        let hazards: Vec<Hazard> = sim.hazards().into_iter().filter(|hazard| !on_purpose(hazard.kind)).collect();
        assert!(hazards.is_empty(), "seed {seed}: {hazards:#?}");
        assert_eq!(sim.object_counts(), before, "seed {seed}");
    }
}

#[test]
fn suites_are_chosen_by_name() {
    let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(SimConfig::default()));
    let mut ran = Vec::new();
    let options = Options { suites: vec!["event_pool".to_owned()], ..Options::default() };
    let summary = warpool_conformance::resources::run(&driver, &options, &mut |report| ran.push(report.suite));
    assert!(ran.iter().all(|&suite| suite == "event_pool") && !ran.is_empty());
    assert_eq!((summary.failed, summary.skipped), (0, 1), "one check needs two devices");
}

#[test]
fn a_missing_library_is_a_skip_with_its_name() {
    let sim = SimDriver::new(SimConfig::default().without_library(Library::Dnn));
    let driver: Arc<dyn Driver> = Arc::new(sim);
    let mut skipped = Vec::new();
    let options = Options { suites: vec!["handles".to_owned()], ..Options::default() };
    let summary = warpool_conformance::resources::run(&driver, &options, &mut |report| {
        if let Outcome::Skipped(reason) = &report.outcome {
            skipped.push((report.check, reason.clone()));
        }
    });
    assert_eq!((summary.failed, skipped.len()), (0, 2), "cuDNN, and the check that needs two devices");
    assert!(skipped[0].0 == "cudnn_has_handles" && skipped[0].1.contains("cuDNN"), "{skipped:?}");
}
