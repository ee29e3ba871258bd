//! Every driver call of a scenario with pinned memory fails once, and pairs of them: the allocator stays whole, leaks
//! nothing, spoils nothing and still serves. The scenario is in `host_faults/lab.rs`.

mod lab;

use warpool::Error;
use warpool::driver::decorate::FaultPlan;
use warpool::driver::{Call, ErrorCode};
use warpool::memory::{HostBlock, PinnedSettings};

use lab::{Lab, MIB};

/// The ways to run.
fn ways() -> [PinnedSettings; 3] {
    let plain = PinnedSettings::default();
    let registered = PinnedSettings { use_cuda_host_register: true, num_register_threads: 2, ..plain.clone() };
    let reserved = PinnedSettings { reserve_segment_bytes: 4 * MIB, ..plain.clone() };
    [plain, registered, reserved]
}

/// How many calls the scenario makes.
fn calls(settings: &PinnedSettings) -> u64 {
    let lab = Lab::new(settings.clone());
    let before = lab.sim.calls_made();
    lab.scenario(false);
    let calls = lab.sim.calls_made() - before;
    lab.settle("without faults");
    calls
}

fn check(settings: &PinnedSettings, plan: FaultPlan) {
    let lab = Lab::new(settings.clone());
    lab.faulty.set_plan(plan);
    lab.scenario(true);
    let about = format!("{settings:?}, with {:?} failing", lab.faulty.injected());
    lab.expect_whole(&about);
}

#[test]
fn each_call_may_fail_once() {
    for settings in ways() {
        let calls = calls(&settings);
        assert!(calls > 100, "the scenario makes only {calls} calls");
        // Once in each other way: registering touches every page, which takes real time.
        let codes: &[ErrorCode] = match settings == PinnedSettings::default() {
            true => &[ErrorCode::OutOfMemory, ErrorCode::UnknownError, ErrorCode::LaunchFailed],
            false => &[ErrorCode::OutOfMemory],
        };
        for &code in codes {
            for nth in 1..=calls {
                check(&settings, FaultPlan::new().fail_nth_of_all(nth, code));
            }
        }
    }
}

#[test]
fn two_calls_may_fail_one_behind_the_other() {
    for settings in ways() {
        let calls = calls(&settings);
        for nth in 1..=calls {
            let code = if nth % 2 == 0 { ErrorCode::OutOfMemory } else { ErrorCode::LaunchFailed };
            // Giving back is spared: what is pinned for nothing, and then cannot be unpinned, is given up with a
            // warning.
            let plan = FaultPlan::new().excluding(FaultPlan::CLEANUP);
            check(&settings, plan.fail_nth_of_all(nth, code).fail_nth_of_all(nth + 1 + nth % 4, code));
        }
    }
}

#[test]
fn a_share_of_all_calls_may_fail() {
    for settings in ways() {
        for seed in 0..60 {
            let code = [ErrorCode::OutOfMemory, ErrorCode::UnknownError][seed as usize % 2];
            let plan = FaultPlan::new().excluding(FaultPlan::CLEANUP);
            check(&settings, plan.fail_fraction(&[], 0.1, seed, code));
        }
    }
}

/// Close goes on behind a call that failed: only what the driver would not take stays pinned, and the error says so.
#[test]
fn close_gives_back_all_but_what_fails() {
    for settings in ways() {
        let registered = settings.use_cuda_host_register;
        for nth in 1..=3 {
            let lab = Lab::new(PinnedSettings { reserve_segment_bytes: 0, ..settings.clone() });
            let blocks: Vec<HostBlock> = (0..3).map(|_| lab.host.allocate(5 * MIB).unwrap()).collect();
            drop(blocks);
            assert_eq!(lab.sim.object_counts().pinned, 3);
            let call = if registered { Call::HostUnregister } else { Call::HostFree };
            lab.faulty.set_plan(FaultPlan::new().fail_nth(call, nth, ErrorCode::UnknownError));
            let Lab { sim, host, .. } = lab;
            let error = host.close().unwrap_err();
            assert_eq!(error.driver().map(|error| error.call), Some(call.name()), "{error}");
            assert_eq!(sim.object_counts().pinned, 1, "{call:?}, number {nth}");
        }
    }
}

/// With somebody's block alive nothing is given back, and what there is stays good.
#[test]
fn close_refuses_while_somebody_has_a_block() {
    let lab = Lab::new(PinnedSettings::default());
    let block = lab.host.allocate(MIB).unwrap();
    block.write(0, &[3; 8]).unwrap();
    let Lab { sim, host, .. } = lab;
    let error = host.clone().close().unwrap_err();
    assert!(matches!(error, Error::HostMemoryInUse { handles: 1, blocks: 1 }), "{error}");
    drop(host);
    let mut seen = [0; 8];
    block.read(0, &mut seen).unwrap();
    assert_eq!(seen, [3; 8], "the block outlives the allocator");
    assert_eq!(sim.object_counts().pinned, 1);
}

/// What is too large to be kept, and could not be given back at once, is given back by the next call.
#[test]
fn what_is_not_to_be_kept_goes_later_if_it_could_not_go_at_once() {
    for settings in ways() {
        let settings = PinnedSettings { max_cached_bytes: Some(MIB), reserve_segment_bytes: 0, ..settings };
        let lab = Lab::new(settings.clone());
        let call = if settings.use_cuda_host_register { Call::HostUnregister } else { Call::HostFree };
        let block = lab.host.allocate(5 * MIB).unwrap();
        lab.faulty.set_plan(FaultPlan::new().fail_nth(call, 1, ErrorCode::UnknownError));
        let error = block.free().unwrap_err();
        assert_eq!(error.driver().map(|error| error.call), Some(call.name()), "{error}");
        lab.check();
        assert_eq!((lab.sim.object_counts().pinned, lab.host.stats().active_requests.current), (1, 0));
        lab.host.process_pending().unwrap();
        assert_eq!(lab.sim.object_counts().pinned, 0);
        lab.host.close().unwrap();
    }
}

/// A stream that cannot be marked holds back what it used: nothing else, and no request.
#[test]
fn a_stream_that_cannot_be_marked_holds_back_only_its_blocks() {
    let lab = Lab::new(PinnedSettings::default());
    let blocks = [0, 2].map(|stream: usize| {
        let block = lab.host.allocate(MIB).unwrap();
        block.record_use(&lab.streams[stream]).unwrap();
        block
    });
    drop(blocks);
    lab.faulty.set_plan(FaultPlan::new().fail_nth(Call::EventRecord, 1, ErrorCode::LaunchFailed));
    lab.host.process_pending().unwrap_err();
    // The other one has its mark by now, and is done.
    lab.faulty.set_plan(FaultPlan::new().fail_fraction(&[Call::EventRecord], 1.0, 0, ErrorCode::LaunchFailed));
    lab.streams[2].synchronize().unwrap();
    lab.host.process_pending().unwrap_err();
    assert_eq!(lab.host.stats().active_requests.current, 1);
    lab.host.allocate(64 * MIB).unwrap().free().unwrap();
    lab.expect_whole("marks failed");
}

/// The same where marks cannot be asked about.
#[test]
fn a_stream_that_cannot_be_asked_holds_back_only_its_blocks() {
    let lab = Lab::new(PinnedSettings::default());
    let blocks: Vec<HostBlock> = (0..6).map(|_| lab.host.allocate(MIB).unwrap()).collect();
    let streams = [0, 2].map(|stream: usize| &lab.streams[stream]);
    for stream in streams {
        lab.sim.pause_stream(stream.id()).unwrap();
    }
    for (index, block) in blocks.into_iter().enumerate() {
        block.record_use(streams[index % 2]).unwrap();
        block.free().unwrap();
    }
    for stream in streams {
        lab.sim.resume_stream(stream.id()).unwrap();
        stream.synchronize().unwrap();
    }
    assert_eq!(lab.host.stats().active_requests.current, 6);
    lab.faulty.set_plan(FaultPlan::new().fail_nth(Call::EventQuery, 1, ErrorCode::LaunchFailed));
    lab.host.process_pending().unwrap_err();
    assert_eq!(lab.host.stats().active_requests.current, 3);
    lab.expect_whole("a question failed");
}

/// The same where a segment cannot be given back.
#[test]
fn a_segment_that_cannot_go_holds_back_no_other() {
    let lab = Lab::new(PinnedSettings { max_cached_bytes: Some(MIB), ..PinnedSettings::default() });
    drop([5, 6, 7].map(|mib| lab.host.allocate(mib * MIB).unwrap()));
    lab.faulty.set_plan(FaultPlan::new().fail_nth(Call::HostFree, 1, ErrorCode::UnknownError));
    lab.host.process_pending().unwrap_err();
    assert_eq!(lab.sim.object_counts().pinned, 1);
    lab.expect_whole("a segment could not go");
}

/// What is cached makes room, also if some of it cannot go.
#[test]
fn a_machine_without_room_is_asked_again_although_a_segment_cannot_go() {
    let lab = Lab::new(PinnedSettings::default());
    drop([5, 6].map(|mib| lab.host.allocate(mib * MIB).unwrap()));
    let plan = FaultPlan::new().fail_nth(Call::HostAlloc, 1, ErrorCode::OutOfMemory);
    lab.faulty.set_plan(plan.fail_nth(Call::HostFree, 1, ErrorCode::UnknownError));
    lab.host.allocate(9 * MIB).unwrap().free().unwrap();
    assert_eq!(lab.faulty.injected().len(), 2);
    lab.expect_whole("no room");
}

/// What could not be given back goes with the next try.
#[test]
fn a_close_that_failed_can_be_tried_again() {
    let lab = Lab::new(PinnedSettings::default());
    drop([5, 6].map(|mib| lab.host.allocate(mib * MIB).unwrap()));
    lab.faulty.set_plan(FaultPlan::new().fail_nth(Call::HostFree, 1, ErrorCode::UnknownError));
    let Lab { sim, host, .. } = lab;
    let (host, error) = host.try_close().unwrap_err();
    assert_eq!(error.driver().map(|error| error.code), Some(ErrorCode::UnknownError), "{error}");
    host.check();
    assert_eq!(sim.object_counts().pinned, 1);
    host.allocate(MIB).unwrap().free().unwrap();
    host.close().unwrap();
    assert_eq!(sim.object_counts().pinned, 0);
}
