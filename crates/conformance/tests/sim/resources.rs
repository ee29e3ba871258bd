//! The suites over Warpool's resources on the simulated GPU.

use std::sync::Arc;

use warpool_conformance::{Level, Options, Outcome, run};
use warpool_driver::sim::{Hazard, HazardKind, SimConfig, SimDriver};
use warpool_driver::{DeviceId, Driver, Library};
use warpool_testing::{in_parallel, seeds};

fn options() -> Options {
    Options { level: Some(Level::Resources), ..Options::default() }
}

/// Checks of the paged allocator depend on the order of work, which differs from seed to seed.
#[test]
fn resources_conform_on_the_simulated_gpu() {
    in_parallel(&seeds(2).collect::<Vec<u64>>(), |&seed| {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_seed(seed).with_devices(2)));
        let driver = Arc::clone(&sim) as Arc<dyn Driver>;
        let before = sim.object_counts();
        let mut problems = Vec::new();
        let options = Options { device: DeviceId((seed % 2) as u32), seed, ..options() };
        let summary = run(&driver, &options, &mut |report| {
            if report.outcome != Outcome::Passed {
                problems.push(format!("{}.{}: {:?}", report.suite, report.check, report.outcome));
            }
        });
        assert!(problems.is_empty(), "seed {seed}: {problems:#?}");
        assert!(summary.passed >= 25, "seed {seed}: {summary:?}");
        // Some checks invalidate captures on purpose.
        let on_purpose = |kind| matches!(kind, HazardKind::CaptureInvalidated | HazardKind::CaptureUnjoined);
        let hazards: Vec<Hazard> = sim.hazards().into_iter().filter(|hazard| !on_purpose(hazard.kind)).collect();
        assert!(hazards.is_empty(), "seed {seed}: {hazards:#?}");
        assert_eq!(sim.object_counts(), before, "seed {seed}");
    });
}

#[test]
fn suites_are_selected_by_name() {
    let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(SimConfig::default()));
    let mut seen = Vec::new();
    let options = Options { suites: vec!["event_pool".to_owned()], ..options() };
    let summary = run(&driver, &options, &mut |report| seen.push(report.suite));
    assert!(seen.iter().all(|&suite| suite == "event_pool") && !seen.is_empty());
    assert_eq!((summary.failed, summary.skipped), (0, 1), "one check needs two devices");
}

#[test]
fn a_missing_library_is_named_in_the_skip() {
    let sim = SimDriver::new(SimConfig::default().without_library(Library::Dnn));
    let driver: Arc<dyn Driver> = Arc::new(sim);
    let mut skipped = Vec::new();
    let options = Options { suites: vec!["handles".to_owned()], ..options() };
    let summary = run(&driver, &options, &mut |report| {
        if let Outcome::Skipped(reason) = &report.outcome {
            skipped.push((report.check, reason.clone()));
        }
    });
    assert_eq!((summary.failed, skipped.len()), (0, 2), "cuDNN, and the check that needs two devices");
    assert!(skipped[0].0.contains("cudnn") && skipped[0].1.contains("cuDNN"), "{skipped:?}");
}
