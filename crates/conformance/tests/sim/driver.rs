//! The suites over the driver contract on the simulated GPU.

use std::collections::BTreeSet;
use std::sync::Arc;

use warpool_conformance::{Level, Options, Outcome, Report, SUITES, Summary, run};
use warpool_driver::decorate::{Counting, FaultPlan, Faulty};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{Call, DeviceId, Driver, ErrorCode, Library};
use warpool_testing::seeds;

fn sim(seed: u64, devices: u32) -> Arc<SimDriver> {
    Arc::new(SimDriver::new(SimConfig::default().with_seed(seed).with_devices(devices)))
}

fn options(seed: u64) -> Options {
    Options { level: Some(Level::Driver), seed, ..Options::default() }
}

/// Runs the suites and lists what went wrong: failed checks, and hazards that a check did not provoke on purpose.
fn run_on_sim(sim: &Arc<SimDriver>, options: &Options) -> (Summary, Vec<String>) {
    let driver = Arc::clone(sim) as Arc<dyn Driver>;
    let mut problems = Vec::new();
    let mut seen = sim.hazards().len();
    let summary = run(&driver, options, &mut |report| {
        let name = format!("seed {}: {}.{}", options.seed, report.suite, report.check);
        if let Outcome::Failed(text) = &report.outcome {
            problems.push(format!("{name}: {text}"));
        }
        let hazards = sim.hazards();
        if hazards.len() > seen && !provokes_hazards(report) {
            problems.extend(hazards[seen..].iter().map(|hazard| format!("{name}: {hazard}")));
        }
        seen = hazards.len();
    });
    (summary, problems)
}

fn provokes_hazards(report: &Report) -> bool {
    let suite = SUITES.iter().find(|suite| suite.name == report.suite).expect("a registered suite");
    suite.checks.iter().find(|check| check.name == report.check).expect("a registered check").provokes_hazards
}

#[test]
fn simulated_gpu_conforms() {
    let mut problems = Vec::new();
    for seed in seeds(2) {
        let sim = sim(seed, 2);
        let before = sim.object_counts();
        let (summary, found) = run_on_sim(&sim, &options(seed));
        problems.extend(found);
        if summary.passed < 80 || summary.failed > 0 {
            problems.push(format!("seed {seed}: {summary:?}"));
        }
        let after = sim.object_counts();
        if after != before {
            problems.push(format!("seed {seed}: objects leaked: {after:?}, before: {before:?}"));
        }
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn one_device_skips_only_checks_that_need_two() {
    let driver: Arc<dyn Driver> = sim(1, 1);
    let mut skipped = Vec::new();
    run(&driver, &options(0), &mut |report| {
        if let Outcome::Skipped(reason) = &report.outcome {
            skipped.push(format!("{}.{}: {reason}", report.suite, report.check));
        }
    });
    assert!(!skipped.is_empty(), "checks of peer access need two devices");
    for line in &skipped {
        assert!(line.ends_with("there is only one device"), "{line}");
    }
}

#[test]
fn every_device_can_be_checked() {
    let (_, problems) = run_on_sim(&sim(2, 3), &Options { device: DeviceId(2), ..options(2) });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn sticky_errors_are_reported() {
    let options = Options { suites: vec!["errors".into()], destructive: true, ..options(0) };
    let (summary, problems) = run_on_sim(&sim(3, 2), &options);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(summary.passed > 0 && summary.skipped == 0, "{summary:?}");
}

#[test]
fn a_missing_library_is_named_in_the_skip() {
    let config = Library::ALL.into_iter().fold(SimConfig::default(), SimConfig::without_library);
    let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(config));
    let options = Options { suites: vec!["libraries".into(), "capture_rules".into()], ..options(0) };
    let mut reasons = Vec::new();
    let summary = run(&driver, &options, &mut |report| match &report.outcome {
        Outcome::Skipped(reason) => reasons.push(reason.clone()),
        Outcome::Failed(text) => panic!("{}.{}: {text}", report.suite, report.check),
        Outcome::Passed => {}
    });
    assert!(summary.skipped >= 20, "{summary:?}");
    for library in Library::ALL {
        let text = format!("{library} is not installed");
        assert!(reasons.iter().any(|reason| reason.contains(&text)), "{text}: {reasons:#?}");
    }
}

#[test]
fn suites_are_selected_by_name() {
    let driver: Arc<dyn Driver> = sim(4, 1);
    let options = Options { suites: vec!["events".into(), "copies".into(), "errors".into()], ..options(0) };
    let mut seen = BTreeSet::new();
    run(&driver, &options, &mut |report| {
        seen.insert(report.suite);
    });
    // A destructive suite runs only with `destructive`.
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["copies", "events"]);
}

#[test]
fn every_call_of_the_contract_is_made() {
    let counting = Arc::new(Counting::new(sim(5, 2)));
    let driver = Arc::clone(&counting) as Arc<dyn Driver>;
    run(&driver, &options(0), &mut |_| ());
    let missing: Vec<_> = Call::ALL.iter().filter(|&&call| counting.count(call).calls == 0).collect();
    assert!(missing.is_empty(), "no check calls {missing:?}");
}

/// Every call may fail, except for those that the cleanup itself needs.
#[test]
fn failed_checks_leak_nothing() {
    const USED_BY_CLEANUP: &[Call] =
        &[Call::CaptureState, Call::CaptureEnd, Call::CaptureModeExchange, Call::DeviceSynchronize, Call::PoolTrim];
    for seed in seeds(2) {
        let sim = sim(seed, 2);
        let before = sim.object_counts();
        let plan = FaultPlan::new().fail_fraction(&[], 0.04, seed, ErrorCode::OutOfMemory);
        let plan = plan.excluding(FaultPlan::CLEANUP).excluding(USED_BY_CLEANUP);
        let driver: Arc<dyn Driver> = Arc::new(Faulty::new(sim.clone(), plan));
        let mut panics = Vec::new();
        let summary = run(&driver, &options(seed), &mut |report| {
            if let Outcome::Failed(text) = &report.outcome
                && text.contains("panicked")
            {
                panics.push(format!("{}.{}: {text}", report.suite, report.check));
            }
        });
        assert!(panics.is_empty(), "seed {seed}: {}", panics.join("\n"));
        assert!(summary.failed > 80, "seed {seed}: {summary:?}");
        assert_eq!(sim.object_counts(), before, "seed {seed}");
    }
}
