//! Every driver call of the scenarios fails once, and pairs of them: the error is returned or recovered from, no stream
//! is left capturing, the same graph, streams, allocator and generator work afterwards, and nothing is leaked.

mod fixture;
mod scenarios;

use std::collections::BTreeSet;
use std::sync::Mutex;

use warpool::Result;
use warpool::driver::decorate::{FaultPlan, InjectedFault};
use warpool::driver::{Call, ErrorCode};
use warpool_testing::in_parallel;

use fixture::FaultFixture;
use scenarios::{SCENARIOS, Scenario};

const SETTINGS: [&str; 2] = ["", "expandable_segments:True,graph_capture_record_stream_reuse:True"];

/// Calls whose failure need not be returned: they are retried later, or replaced by other calls.
const RECOVERABLE: &[Call] = &[
    // Pinned memory that waits for streams is processed again at the next call, if other memory serves this one.
    Call::StreamHandle,
    Call::EventCreate,
    // After an out-of-memory error the allocator frees cached memory and tries again.
    Call::VmReserve,
    Call::VmCreate,
    Call::VmRelease,
    Call::VmMap,
    Call::VmSetAccess,
    // If a large segment cannot be pinned, a smaller one is pinned.
    Call::HostDevicePtr,
    // The end of a discarded capture is tried twice.
    Call::CaptureEnd,
    Call::CaptureState,
    // Without the last nodes that used a block, it is not reused before the capture ends.
    Call::CaptureDependencies,
    // Restoring a thread's capture mode is tried twice.
    Call::CaptureModeExchange,
    // Retried at the next capture or reset.
    Call::GraphDestroy,
    Call::GraphExecDestroy,
    Call::EventRecord,
    Call::EventQuery,
    Call::MemAlloc,
    Call::HostAlloc,
];

/// Runs a scenario with faults, then without. Returns the injected faults, and the outcome of the first run.
fn check(scenario: &Scenario, settings: &str, plan: FaultPlan) -> (Vec<InjectedFault>, Result<()>) {
    let fixture = FaultFixture::new(settings);
    let mut graph = fixture.graph();
    // A handle whose destruction fails is leaked by its pool.
    fixture.faulty.set_plan(plan.excluding(&[Call::LibraryDestroy]));
    let outcome = (scenario.run)(&fixture, &mut graph);
    fixture.faulty.clear_plan();
    let fired = fixture.faulty.injected();
    let about = format!("{} with {settings:?}, {fired:?}: {outcome:?}", scenario.name);
    if graph.is_capturing() || graph.is_captured() {
        graph.reset().unwrap();
    }
    fixture.expect_idle(&about);
    if let Err(error) = (scenario.run)(&fixture, &mut graph) {
        panic!("{about}; and then, without faults: {error}");
    }
    drop(graph);
    fixture.close(&about);
    (fired, outcome)
}

#[test]
fn each_failed_call_is_returned_or_recovered() {
    let codes =
        [ErrorCode::OutOfMemory, ErrorCode::UnknownError, ErrorCode::InvalidValue, ErrorCode::StreamCaptureInvalidated];
    let recovered = Mutex::new(BTreeSet::new());
    in_parallel(SCENARIOS, |scenario| {
        for (settings, code) in SETTINGS.into_iter().flat_map(|settings| codes.map(|code| (settings, code))) {
            for nth in 1.. {
                let (fired, outcome) = check(scenario, settings, FaultPlan::new().fail_nth_of_all(nth, code));
                let [fault] = fired[..] else {
                    outcome.expect("nothing was made to fail");
                    assert!(nth > 15, "{} makes only {nth} calls", scenario.name);
                    break;
                };
                // That scenario expects errors.
                if outcome.is_ok() && scenario.name != "broken" {
                    recovered.lock().unwrap().insert(fault.call);
                }
            }
        }
    });
    assert_eq!(recovered.into_inner().unwrap().into_iter().collect::<Vec<_>>(), RECOVERABLE);
}

#[test]
fn two_failed_calls_in_a_row_leak_nothing() {
    in_parallel(SCENARIOS, |scenario| {
        for settings in SETTINGS {
            for apart in [1, 3] {
                for nth in 1.. {
                    let code = [ErrorCode::OutOfMemory, ErrorCode::UnknownError][(nth % 2) as usize];
                    let plan = FaultPlan::new().fail_nth_of_all(nth, code).fail_nth_of_all(nth + apart, code);
                    if check(scenario, settings, plan).0.is_empty() {
                        break;
                    }
                }
            }
        }
    });
}

#[test]
fn random_failures_leak_nothing() {
    for scenario in SCENARIOS {
        for settings in SETTINGS {
            for seed in 0..100 {
                let code = [ErrorCode::OutOfMemory, ErrorCode::UnknownError][(seed % 2) as usize];
                drop(check(scenario, settings, FaultPlan::new().fail_fraction(&[], 0.1, seed, code)));
            }
        }
    }
}
