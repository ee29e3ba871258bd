//! The conformance suite on the simulated device, with several seeds.

use std::collections::BTreeSet;
use std::sync::Arc;

use warpool_conformance::driver::{self as conformance, Options, Outcome, Report, Summary};
use warpool_driver::decorate::{Counting, FaultPlan, Faulty};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{Call, DeviceId, ErrorCode, Library};

fn driver(seed: u64, devices: u32) -> SimDriver {
    SimDriver::new(SimConfig::default().with_seed(seed).with_devices(devices))
}

/// Runs the suite and lists what went wrong: failed checks, and hazards that no check meant to provoke.
fn run(driver: &SimDriver, options: &Options) -> (Summary, Vec<String>) {
    let mut wrong = Vec::new();
    let mut hazards = driver.hazards().len();
    let summary = conformance::run(driver, options, &mut |report| {
        let name = format!("seed {}: {}.{}", options.seed, report.suite, report.check);
        if let Outcome::Failed(text) = &report.outcome {
            wrong.push(format!("{name}: {text}"));
        }
        let logged = driver.hazards();
        if logged.len() > hazards && !provokes_hazard(report) {
            wrong.extend(logged[hazards..].iter().map(|hazard| format!("{name}: {hazard}")));
        }
        hazards = logged.len();
    });
    (summary, wrong)
}

/// Whether a check does on purpose what the device logs as a hazard.
fn provokes_hazard(report: &Report) -> bool {
    let suite = conformance::suites().iter().find(|suite| suite.name == report.suite).expect("a known suite");
    suite.checks.iter().find(|check| check.name == report.check).expect("a known check").provokes_hazard
}

#[test]
fn the_simulated_device_keeps_the_contract() {
    let mut wrong = Vec::new();
    for seed in 0..8 {
        let driver = driver(seed, 2);
        let before = driver.object_counts();
        let (summary, found) = run(&driver, &Options { seed, ..Options::default() });
        wrong.extend(found);
        if summary.passed < 80 || summary.failed > 0 {
            wrong.push(format!("seed {seed}: {summary:?}"));
        }
        let after = driver.object_counts();
        if after != before {
            wrong.push(format!("seed {seed}: left behind: {after:?}, before: {before:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} things went wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn one_device_skips_only_what_needs_two() {
    let mut skipped = Vec::new();
    conformance::run(&driver(1, 1), &Options::default(), &mut |report| {
        if let Outcome::Skipped(reason) = &report.outcome {
            skipped.push(format!("{}.{}: {reason}", report.suite, report.check));
        }
    });
    assert!(!skipped.is_empty(), "peers need two devices");
    for line in &skipped {
        assert!(line.ends_with("there is only one device"), "{line}");
    }
}

#[test]
fn the_last_device_is_as_good_as_the_first() {
    let options = Options { device: DeviceId(2), seed: 2, ..Options::default() };
    let (_, wrong) = run(&driver(2, 3), &options);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_broken_device_says_so() {
    let options = Options { suites: vec!["errors".into()], destructive: true, ..Options::default() };
    let (summary, wrong) = run(&driver(3, 2), &options);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(summary.passed > 0 && summary.skipped == 0, "{summary:?}");
}

#[test]
fn without_libraries_their_checks_are_skipped_by_name() {
    let config = Library::ALL.into_iter().fold(SimConfig::default(), SimConfig::without_library);
    let driver = SimDriver::new(config);
    let options = Options { suites: vec!["libraries".into(), "capture_rules".into()], ..Options::default() };
    let mut reasons = Vec::new();
    let summary = conformance::run(&driver, &options, &mut |report| match &report.outcome {
        Outcome::Skipped(reason) => reasons.push(reason.clone()),
        Outcome::Failed(text) => panic!("{}.{}: {text}", report.suite, report.check),
        Outcome::Passed => {}
    });
    assert!(summary.skipped >= 20, "{summary:?}");
    for library in Library::ALL {
        let text = format!("{library} is not there");
        assert!(reasons.iter().any(|reason| reason.contains(&text)), "{text}: {reasons:#?}");
    }
}

#[test]
fn suites_are_chosen_by_name() {
    let mut seen = BTreeSet::new();
    let options = Options { suites: vec!["events".into(), "copies".into(), "errors".into()], ..Options::default() };
    conformance::run(&driver(4, 1), &options, &mut |report| {
        seen.insert(report.suite);
    });
    // What breaks the device runs only if that is asked for too.
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["copies", "events"]);
}

#[test]
fn every_call_of_the_contract_is_made() {
    let driver = Counting::new(Arc::new(driver(5, 2)));
    conformance::run(&driver, &Options::default(), &mut |_| ());
    let missing: Vec<_> = Call::ALL.iter().filter(|&&call| driver.count(call).calls == 0).collect();
    assert!(missing.is_empty(), "no check calls {missing:?}");
}

/// Checks that fail half-way clear up behind themselves. Only what the clearing up itself needs is spared.
#[test]
fn failed_checks_leave_nothing_behind() {
    const CLEARING: &[Call] =
        &[Call::CaptureState, Call::CaptureEnd, Call::CaptureModeExchange, Call::DeviceSynchronize, Call::PoolTrim];
    for seed in 0..8 {
        let sim = Arc::new(driver(seed, 2));
        let before = sim.object_counts();
        let plan = FaultPlan::new().fail_fraction(&[], 0.04, seed, ErrorCode::OutOfMemory);
        let driver = Faulty::new(sim.clone(), plan.excluding(FaultPlan::CLEANUP).excluding(CLEARING));
        let mut panics = Vec::new();
        let summary = conformance::run(&driver, &Options { seed, ..Options::default() }, &mut |report| {
            if let Outcome::Failed(text) = &report.outcome
                && text.contains("panicked")
            {
                panics.push(format!("{}.{}: {text}", report.suite, report.check));
            }
        });
        assert!(panics.is_empty(), "seed {seed}: {}", panics.join("\n"));
        assert!(summary.failed > 80, "seed {seed}: faults were noticed, but {summary:?}");
        assert_eq!(sim.object_counts(), before, "seed {seed}");
    }
}
