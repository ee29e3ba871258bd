//! Every driver call of a scenario with pinned memory fails once, and pairs of them: the allocator stays consistent,
//! leaks nothing, and works afterwards. The scenario is in `scenario.rs`.

mod scenario;

use warpool::Error;
use warpool::driver::decorate::FaultPlan;
use warpool::driver::{Call, ErrorCode};
use warpool::memory::{HostBlock, PinnedSettings};
use warpool_testing::in_parallel;

use scenario::{MIB, TestContext};

/// The settings to run with.
fn variants() -> [PinnedSettings; 3] {
    let plain = PinnedSettings::default();
    let registered = PinnedSettings { use_cuda_host_register: true, num_register_threads: 2, ..plain.clone() };
    let reserved = PinnedSettings { reserve_segment_bytes: 4 * MIB, ..plain.clone() };
    [plain, registered, reserved]
}

/// The number of driver calls of the scenario.
fn calls(settings: &PinnedSettings) -> u64 {
    let context = TestContext::new(settings.clone());
    let before = context.sim.calls_made();
    context.scenario(false);
    let calls = context.sim.calls_made() - before;
    context.expect_clean("without faults");
    calls
}

fn check(settings: &PinnedSettings, plan: FaultPlan) {
    let context = TestContext::new(settings.clone());
    context.faulty.set_plan(plan);
    context.scenario(true);
    let about = format!("{settings:?}, with {:?} failing", context.faulty.injected());
    context.expect_recovered(&about);
}

#[test]
fn every_call_may_fail_once() {
    in_parallel(&variants(), |settings| {
        let calls = calls(settings);
        assert!(calls > 100, "the scenario makes only {calls} calls");
        // One code for the others: registering touches every page, which takes real time.
        let codes: &[ErrorCode] = match *settings == PinnedSettings::default() {
            true => &[ErrorCode::OutOfMemory, ErrorCode::UnknownError, ErrorCode::LaunchFailed],
            false => &[ErrorCode::OutOfMemory],
        };
        for &code in codes {
            for nth in 1..=calls {
                check(settings, FaultPlan::new().fail_nth_of_all(nth, code));
            }
        }
    });
}

#[test]
fn two_calls_may_fail() {
    in_parallel(&variants(), |settings| {
        let calls = calls(settings);
        for nth in 1..=calls {
            let code = if nth % 2 == 0 { ErrorCode::OutOfMemory } else { ErrorCode::LaunchFailed };
            // Cleanup calls do not fail: memory that is pinned in vain and cannot be unpinned is leaked with a warning.
            let plan = FaultPlan::new().excluding(FaultPlan::CLEANUP);
            check(settings, plan.fail_nth_of_all(nth, code).fail_nth_of_all(nth + 1 + nth % 4, code));
        }
    });
}

#[test]
fn a_fraction_of_all_calls_may_fail() {
    for settings in variants() {
        for seed in 0..60 {
            let code = [ErrorCode::OutOfMemory, ErrorCode::UnknownError][seed as usize % 2];
            let plan = FaultPlan::new().excluding(FaultPlan::CLEANUP);
            check(&settings, plan.fail_fraction(&[], 0.1, seed, code));
        }
    }
}

/// Closing continues after an error: only the segment whose call failed stays pinned.
#[test]
fn closing_unpins_all_but_what_fails() {
    for settings in variants() {
        let registered = settings.use_cuda_host_register;
        for nth in 1..=3 {
            let context = TestContext::new(PinnedSettings { reserve_segment_bytes: 0, ..settings.clone() });
            let blocks: Vec<HostBlock> = (0..3).map(|_| context.host.allocate(5 * MIB).unwrap()).collect();
            drop(blocks);
            assert_eq!(context.sim.object_counts().pinned, 3);
            let call = if registered { Call::HostUnregister } else { Call::HostFree };
            context.faulty.set_plan(FaultPlan::new().fail_nth(call, nth, ErrorCode::UnknownError));
            let TestContext { sim, host, .. } = context;
            let error = host.close().unwrap_err();
            assert_eq!(error.driver().map(|error| error.call), Some(call.name()), "{error}");
            assert_eq!(sim.object_counts().pinned, 1, "{call:?}, number {nth}");
        }
    }
}

/// Nothing is unpinned, and the block stays valid.
#[test]
fn closing_fails_while_a_block_is_allocated() {
    let context = TestContext::new(PinnedSettings::default());
    let block = context.host.allocate(MIB).unwrap();
    block.write(0, &[3; 8]).unwrap();
    let TestContext { sim, host, .. } = context;
    let error = host.clone().close().unwrap_err();
    assert!(matches!(error, Error::HostMemoryInUse { handles: 1, blocks: 1 }), "{error}");
    drop(host);
    let mut read = [0; 8];
    block.read(0, &mut read).unwrap();
    assert_eq!(read, [3; 8], "the block outlives the allocator");
    assert_eq!(sim.object_counts().pinned, 1);
}

#[test]
fn a_segment_that_is_not_kept_is_unpinned_by_the_next_call_after_an_error() {
    for settings in variants() {
        let settings = PinnedSettings { max_cached_bytes: Some(MIB), reserve_segment_bytes: 0, ..settings };
        let context = TestContext::new(settings.clone());
        let call = if settings.use_cuda_host_register { Call::HostUnregister } else { Call::HostFree };
        let block = context.host.allocate(5 * MIB).unwrap();
        context.faulty.set_plan(FaultPlan::new().fail_nth(call, 1, ErrorCode::UnknownError));
        let error = block.free().unwrap_err();
        assert_eq!(error.driver().map(|error| error.call), Some(call.name()), "{error}");
        context.check();
        assert_eq!((context.sim.object_counts().pinned, context.host.stats().active_requests.current), (1, 0));
        context.host.process_pending().unwrap();
        assert_eq!(context.sim.object_counts().pinned, 0);
        context.host.close().unwrap();
    }
}

/// The other blocks are reclaimed, and requests succeed.
#[test]
fn a_failed_event_record_delays_only_the_blocks_of_its_stream() {
    let context = TestContext::new(PinnedSettings::default());
    let blocks = [0, 2].map(|stream: usize| {
        let block = context.host.allocate(MIB).unwrap();
        block.record_use(&context.streams[stream]).unwrap();
        block
    });
    drop(blocks);
    context.faulty.set_plan(FaultPlan::new().fail_nth(Call::EventRecord, 1, ErrorCode::LaunchFailed));
    context.host.process_pending().unwrap_err();
    // The fence of the other one is recorded, and has passed.
    context.faulty.set_plan(FaultPlan::new().fail_fraction(&[Call::EventRecord], 1.0, 0, ErrorCode::LaunchFailed));
    context.streams[2].synchronize().unwrap();
    context.host.process_pending().unwrap_err();
    assert_eq!(context.host.stats().active_requests.current, 1);
    context.host.allocate(64 * MIB).unwrap().free().unwrap();
    context.expect_recovered("event records failed");
}

#[test]
fn a_failed_event_query_delays_only_the_blocks_of_its_stream() {
    let context = TestContext::new(PinnedSettings::default());
    let blocks: Vec<HostBlock> = (0..6).map(|_| context.host.allocate(MIB).unwrap()).collect();
    let streams = [0, 2].map(|stream: usize| &context.streams[stream]);
    for stream in streams {
        context.sim.pause_stream(stream.id()).unwrap();
    }
    for (index, block) in blocks.into_iter().enumerate() {
        block.record_use(streams[index % 2]).unwrap();
        block.free().unwrap();
    }
    for stream in streams {
        context.sim.resume_stream(stream.id()).unwrap();
        stream.synchronize().unwrap();
    }
    assert_eq!(context.host.stats().active_requests.current, 6);
    context.faulty.set_plan(FaultPlan::new().fail_nth(Call::EventQuery, 1, ErrorCode::LaunchFailed));
    context.host.process_pending().unwrap_err();
    assert_eq!(context.host.stats().active_requests.current, 3);
    context.expect_recovered("an event query failed");
}

#[test]
fn a_segment_that_cannot_be_unpinned_delays_no_other() {
    let context = TestContext::new(PinnedSettings { max_cached_bytes: Some(MIB), ..PinnedSettings::default() });
    drop([5, 6, 7].map(|mib| context.host.allocate(mib * MIB).unwrap()));
    context.faulty.set_plan(FaultPlan::new().fail_nth(Call::HostFree, 1, ErrorCode::UnknownError));
    context.host.process_pending().unwrap_err();
    assert_eq!(context.sim.object_counts().pinned, 1);
    context.expect_recovered("an unpin failed");
}

#[test]
fn pinning_is_retried_although_a_cached_segment_cannot_be_unpinned() {
    let context = TestContext::new(PinnedSettings::default());
    drop([5, 6].map(|mib| context.host.allocate(mib * MIB).unwrap()));
    let plan = FaultPlan::new().fail_nth(Call::HostAlloc, 1, ErrorCode::OutOfMemory);
    context.faulty.set_plan(plan.fail_nth(Call::HostFree, 1, ErrorCode::UnknownError));
    context.host.allocate(9 * MIB).unwrap().free().unwrap();
    assert_eq!(context.faulty.injected().len(), 2);
    context.expect_recovered("out of memory");
}

#[test]
fn a_failed_close_can_be_retried() {
    let context = TestContext::new(PinnedSettings::default());
    drop([5, 6].map(|mib| context.host.allocate(mib * MIB).unwrap()));
    context.faulty.set_plan(FaultPlan::new().fail_nth(Call::HostFree, 1, ErrorCode::UnknownError));
    let TestContext { sim, host, .. } = context;
    let (host, error) = host.try_close().unwrap_err();
    assert_eq!(error.driver().map(|error| error.code), Some(ErrorCode::UnknownError), "{error}");
    host.check();
    assert_eq!(sim.object_counts().pinned, 1);
    host.allocate(MIB).unwrap().free().unwrap();
    host.close().unwrap();
    assert_eq!(sim.object_counts().pinned, 0);
}
