//! Every driver call of what graphs are for fails once, and pairs of them: the call above reports it or does without,
//! no stream is left capturing, the same graph, streams, allocator and generator do the same thing right afterwards,
//! and nothing is left behind.

mod lab;
mod scenarios;

use std::collections::BTreeSet;

use warpool::Result;
use warpool::driver::decorate::{FaultPlan, InjectedFault};
use warpool::driver::{Call, ErrorCode};

use lab::Lab;
use scenarios::{SCENARIOS, Scenario};

const SETTINGS: [&str; 2] = ["", "expandable_segments:True,graph_capture_record_stream_reuse:True"];

/// Calls that can fail without anybody being told: what they were to do is done later, or in another way.
const DISPENSABLE: &[Call] = &[
    // Pinned memory that waits for streams is looked after at the next call, if there is other memory for this one.
    Call::EventCreate,
    // Full once, the device is asked again, behind what was cached.
    Call::VmReserve,
    Call::VmCreate,
    Call::VmRelease,
    Call::VmMap,
    Call::VmSetAccess,
    // A smaller segment is pinned, if there is no room for a large one.
    Call::HostDevicePtr,
    // The end of a capture that nobody wants any more is tried twice.
    Call::CaptureEnd,
    Call::CaptureState,
    // Without the nodes that used a block last, it is not used again before the capture ends.
    Call::CaptureDependencies,
    // So is putting back how strict a thread is.
    Call::CaptureModeExchange,
    // Tried again at the next capture or reset.
    Call::GraphDestroy,
    Call::GraphExecDestroy,
    Call::EventRecord,
    Call::EventQuery,
    Call::MemAlloc,
    Call::HostAlloc,
];

/// Runs a scenario with faults, then without. What fired, and how the first run went.
fn check(scenario: &Scenario, settings: &str, plan: FaultPlan) -> (Vec<InjectedFault>, Result<()>) {
    let lab = Lab::new(settings);
    let mut graph = lab.graph();
    // A handle that cannot be destroyed is forgotten by its pool: nothing could be done with it.
    lab.faulty.set_plan(plan.excluding(&[Call::LibraryDestroy]));
    let outcome = (scenario.run)(&lab, &mut graph);
    lab.faulty.clear_plan();
    let fired = lab.faulty.injected();
    let about = format!("{} with {settings:?}, {fired:?}: {outcome:?}", scenario.name);
    if graph.is_capturing() || graph.is_captured() {
        graph.reset().unwrap();
    }
    lab.expect_calm(&about);
    if let Err(error) = (scenario.run)(&lab, &mut graph) {
        panic!("{about}; and then, without faults: {error}");
    }
    drop(graph);
    lab.close(&about);
    (fired, outcome)
}

#[test]
fn each_call_may_fail_once() {
    let codes =
        [ErrorCode::OutOfMemory, ErrorCode::UnknownError, ErrorCode::InvalidValue, ErrorCode::StreamCaptureInvalidated];
    let mut unheard = BTreeSet::new();
    for scenario in SCENARIOS {
        for (settings, code) in SETTINGS.into_iter().flat_map(|settings| codes.map(|code| (settings, code))) {
            for nth in 1.. {
                let (fired, outcome) = check(scenario, settings, FaultPlan::new().fail_nth_of_all(nth, code));
                let [fault] = fired[..] else {
                    outcome.expect("nothing was made to fail");
                    assert!(nth > 15, "{} makes only {nth} calls", scenario.name);
                    break;
                };
                // That one expects errors, and goes on.
                if outcome.is_ok() && scenario.name != "broken" {
                    unheard.insert(fault.call);
                }
            }
        }
    }
    assert_eq!(unheard.into_iter().collect::<Vec<_>>(), DISPENSABLE);
}

#[test]
fn two_calls_may_fail_one_behind_the_other() {
    for scenario in SCENARIOS {
        for settings in SETTINGS {
            for apart in [1, 2, 3, 5] {
                for nth in 1.. {
                    let code = [ErrorCode::OutOfMemory, ErrorCode::UnknownError][(nth % 2) as usize];
                    let plan = FaultPlan::new().fail_nth_of_all(nth, code).fail_nth_of_all(nth + apart, code);
                    if check(scenario, settings, plan).0.is_empty() {
                        break;
                    }
                }
            }
        }
    }
}

#[test]
fn a_share_of_all_calls_may_fail() {
    for scenario in SCENARIOS {
        for settings in SETTINGS {
            for seed in 0..100 {
                let code = [ErrorCode::OutOfMemory, ErrorCode::UnknownError][(seed % 2) as usize];
                drop(check(scenario, settings, FaultPlan::new().fail_fraction(&[], 0.1, seed, code)));
            }
        }
    }
}
