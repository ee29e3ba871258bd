//! Every driver call of sleeping and of waking fails once, with each of several codes, and kinds of calls fail
//! permanently. Afterwards all tags are in one state, nothing is lost or leaked, and the next call succeeds.

use std::sync::Arc;

use warpool_driver::decorate::FaultPlan;
use warpool_driver::{Call, DeviceId, DevicePtr, ErrorCode};
use warpool_testing::in_parallel;

use super::machine::{Kind, MIB, Machine};
use crate::error::{SleepCall, SleepFailure};
use crate::memory::Allocation;
use crate::memory::elastic::{ElasticLayout, ElasticMemory};
use crate::memory::sleep::Keep;
use crate::{Error, Result};

const TAGS: [&str; 3] = ["weights", "kv", "graphs"];
/// Expandable segments make no difference to tags: random programs have them.
const KINDS: [Kind; 2] = [Kind::Caching, Kind::Paged];
/// What the elastic memory contains.
const ELASTIC: u32 = 100;
const CODES: [ErrorCode; 2] = [ErrorCode::OutOfMemory, ErrorCode::Unknown(999)];

/// Tags with blocks whose contents are their numbers, counted from 1, and the memory that was free before.
struct Scene {
    machine: Machine,
    blocks: Vec<Allocation>,
    /// Elastic memory of a tag, with pages.
    elastic: Option<Arc<ElasticMemory>>,
    free_awake: u64,
}

impl Scene {
    fn new(kind: Kind) -> Self {
        let machine = Machine::new(kind, 200 * MIB);
        let mut blocks = Vec::new();
        for (tag, bytes) in [(0, 100), (0, 3 * MIB), (1, 11 * MIB), (1, 5000), (2, 2 * MIB)] {
            let block = machine.allocate(TAGS[tag], bytes, tag).unwrap();
            blocks.push(block);
            machine.write(&block, blocks.len() as u32, tag);
        }
        let elastic = (kind == Kind::Paged).then(|| {
            let layout = ElasticLayout { rows: 2, blocks: 10, block_bytes: 2 * MIB };
            let memory = machine.tag("kv").elastic(layout, &machine.streams[1]).unwrap();
            memory.commit(3..7, &machine.streams[1]).unwrap();
            memory.pieces(&(3..7)).for_each(|(ptr, bytes)| machine.write_at(DevicePtr(ptr), bytes, ELASTIC, 1));
            memory
        });
        // Free segments, which are returned when their tag is put to sleep, and a cached block without a tag.
        let spare = [machine.allocate("kv", 13 * MIB, 0).unwrap(), machine.untagged(11 * MIB, 0).unwrap()];
        spare.into_iter().for_each(|block| machine.allocator.free(block).unwrap());
        machine.sleep(&TAGS, Keep::Host).unwrap();
        machine.wake(&TAGS).unwrap();
        let free_awake = machine.free();
        Self { machine, blocks, elastic, free_awake }
    }

    fn is_asleep(&self) -> bool {
        let asleep = TAGS.map(|tag| self.machine.is_asleep(tag));
        assert!(asleep.iter().all(|&one| one == asleep[0]), "all tags are in one state: {asleep:?}");
        asleep[0]
    }

    /// Checks the contents; zeroes, if they were discarded.
    fn expect_contents(&self, keep: Keep) {
        for (number, block) in (1..).zip(&self.blocks) {
            self.machine.expect(block, if keep == Keep::Host { number } else { 0 }, 0);
        }
        if let Some(memory) = &self.elastic {
            assert_eq!(memory.committed_blocks(), vec![3..7; 1]);
            let value = if keep == Keep::Host { ELASTIC } else { 0 };
            memory.pieces(&(3..7)).for_each(|(ptr, bytes)| self.machine.expect_at(DevicePtr(ptr), bytes, value, 0));
        }
        assert_eq!(self.machine.defect(), None);
    }

    /// Makes a call with faults. Returns its result, and whether there was one.
    fn call<T>(&self, plan: FaultPlan, call: impl FnOnce() -> Result<T>) -> (Result<T>, bool) {
        let before = self.machine.faulty.injected().len();
        self.machine.faulty.set_plan(plan);
        let outcome = call();
        self.machine.faulty.clear_plan();
        (outcome, self.machine.faulty.injected().len() > before)
    }

    fn finish(mut self) {
        self.elastic = None;
        for &block in &self.blocks {
            self.machine.allocator.free(block).unwrap();
        }
        assert_eq!(self.machine.finish(), None);
    }
}

fn failure<T>(outcome: Result<T>) -> Option<SleepFailure> {
    match outcome {
        Ok(_) => None,
        Err(Error::Sleep(failure)) => Some(*failure),
        Err(error) => panic!("another error: {error}"),
    }
}

/// Sleeps with faults, then without, and wakes. Returns whether a call was made to fail.
fn sleep_with(kind: Kind, keep: Keep, plan: FaultPlan) -> bool {
    let scene = Scene::new(kind);
    let (outcome, faulted) = scene.call(plan, || scene.machine.sleep(&TAGS, keep));
    match failure(outcome) {
        Some(failure) => {
            assert_eq!((failure.call, failure.is_undone), (SleepCall::Sleep, !scene.is_asleep()), "{failure}");
            if failure.is_undone {
                scene.expect_contents(Keep::Host);
                // Free segments may have been returned before the failure.
                assert!(scene.machine.free() >= scene.free_awake);
                assert_eq!(scene.machine.pinned(), 0, "{failure}");
                scene.machine.sleep(&TAGS, keep).unwrap();
            } else {
                // Undoing the sleep failed, but all contents are present.
                scene.machine.wake(&TAGS).unwrap();
                scene.expect_contents(Keep::Host);
                scene.machine.sleep(&TAGS, keep).unwrap();
            }
        }
        None => assert!(scene.is_asleep()),
    }
    assert!(scene.is_asleep());
    scene.machine.wake(&TAGS).unwrap();
    scene.expect_contents(keep);
    assert!(scene.machine.free() >= scene.free_awake, "no memory was lost");
    scene.finish();
    faulted
}

/// Sleeps, wakes with faults, and then without. Returns whether a call was made to fail.
fn wake_with(kind: Kind, keep: Keep, plan: FaultPlan) -> bool {
    let scene = Scene::new(kind);
    scene.machine.sleep(&TAGS, keep).unwrap();
    let (free_asleep, pinned) = (scene.machine.free(), scene.machine.pinned());
    // With a single fault, undoing succeeds.
    let single = format!("{plan:?}").contains("Nth") && !format!("{plan:?}").contains("Fraction");
    let (outcome, faulted) = scene.call(plan, || scene.machine.wake(&TAGS));
    if let Some(failure) = failure(outcome) {
        assert!(scene.is_asleep() && failure.is_undone && failure.call == SleepCall::Wake, "{failure}");
        assert_eq!(scene.machine.pinned(), pinned, "the host keeps the contents: {failure}");
        // Memory that the driver failed to release stays until the tags wake.
        assert!(!single || scene.machine.free() >= free_asleep, "{failure}");
        scene.machine.wake(&TAGS).unwrap();
    }
    assert!(!scene.is_asleep());
    scene.expect_contents(keep);
    assert!(scene.machine.free() >= scene.free_awake, "no memory was lost");
    scene.finish();
    faulted
}

/// A wake that fails, and cannot undo its mappings, leaves memory to tags that sleep. Another sleep releases it.
#[test]
fn memory_that_a_failed_wake_left_is_counted_as_asleep_when_it_is_released() {
    for kind in KINDS {
        let mut scene = Scene::new(kind);
        // It would fail before the pools.
        scene.elastic = None;
        scene.machine.sleep(&TAGS, Keep::Discard).unwrap();
        let stats = || scene.machine.allocator.stats(DeviceId(0)).unwrap();
        let (asleep, reserved) = (stats().asleep_bytes, stats().reserved_bytes.all.current);
        let plan = FaultPlan::new().fail_fraction(&[Call::StreamSynchronize, Call::VmUnmap], 1.0, 0, CODES[1]);
        let (outcome, _) = scene.call(plan, || scene.machine.wake(&TAGS));
        assert!(failure(outcome).is_some_and(|failure| failure.is_undone) && scene.is_asleep());
        assert!(stats().asleep_bytes.all.current < asleep.all.current, "{kind:?}: the memory could not be released");
        scene.machine.sleep(&TAGS, Keep::Discard).unwrap();
        let now = (stats().asleep_bytes.all.current, stats().reserved_bytes.all.current);
        assert_eq!(now, (asleep.all.current, reserved), "{kind:?}");
        scene.machine.wake(&TAGS).unwrap();
        scene.expect_contents(Keep::Discard);
        scene.finish();
    }
}

fn every_call_fails_once(run: fn(Kind, Keep, FaultPlan) -> bool) {
    let cases = [(Keep::Host, CODES[0]), (Keep::Host, CODES[1]), (Keep::Discard, CODES[1])];
    let cases: Vec<_> = KINDS.into_iter().flat_map(|kind| cases.map(|(keep, code)| (kind, keep, code))).collect();
    in_parallel(&cases, |&(kind, keep, code)| {
        let faulted = |&nth: &u64| run(kind, keep, FaultPlan::new().fail_nth_of_all(nth, code));
        let calls = (1..).take_while(faulted).count();
        println!("{kind:?}, {keep:?}, {code:?}: {calls} calls");
        assert!(calls > 10, "{kind:?}, {keep:?}: only {calls} calls");
    });
}

#[test]
fn every_driver_call_of_falling_asleep_may_fail_once() {
    every_call_fails_once(sleep_with);
}

#[test]
fn every_driver_call_of_waking_may_fail_once() {
    every_call_fails_once(wake_with);
}

#[test]
fn driver_calls_may_fail_for_good() {
    let kinds = [
        Call::VmCreate,
        Call::VmMap,
        Call::VmSetAccess,
        Call::VmUnmap,
        Call::VmRelease,
        Call::Copy,
        Call::Fill,
        Call::HostAlloc,
        Call::HostRegister,
        Call::StreamSynchronize,
        Call::DeviceSynchronize,
    ];
    let mut faults = 0;
    for kind in KINDS {
        for (keep, code) in [(Keep::Host, CODES[0]), (Keep::Host, CODES[1]), (Keep::Discard, CODES[1])] {
            for call in kinds {
                let plan = || FaultPlan::new().fail_fraction(&[call], 1.0, 0, code);
                faults += u32::from(sleep_with(kind, keep, plan())) + u32::from(wake_with(kind, keep, plan()));
            }
            // The call fails from its second time on: some of the tags are through.
            for call in [Call::VmUnmap, Call::VmMap, Call::VmSetAccess] {
                let others = [Call::VmMap, Call::VmSetAccess];
                let plan = || FaultPlan::new().fail_nth(call, 2, code).fail_fraction(&others, 1.0, 0, code);
                faults += u32::from(sleep_with(kind, keep, plan())) + u32::from(wake_with(kind, keep, plan()));
            }
        }
    }
    assert!(faults > 40, "only {faults}");
}

#[test]
fn random_driver_calls_may_fail() {
    for kind in KINDS {
        for seed in warpool_testing::seeds(12) {
            let code = CODES[seed as usize % 2];
            let plan = || FaultPlan::new().fail_fraction(&[], 0.15, seed, code);
            sleep_with(kind, Keep::Host, plan());
            wake_with(kind, Keep::Host, plan());
        }
    }
}

/// Issue 18: the tags counted as awake while copies of the failed sleep were reading them.
#[test]
fn no_copy_is_under_way_after_a_sleep_that_could_not_wait_for_it() {
    let code = ErrorCode::Unknown(4242);
    // A wait that fails once, or permanently; or the waits for the device too, except the first.
    let plans: [fn(ErrorCode) -> FaultPlan; 3] = [
        |code| FaultPlan::new().fail_nth(Call::StreamSynchronize, 1, code),
        |code| FaultPlan::new().fail_fraction(&[Call::StreamSynchronize], 1.0, 0, code),
        |code| {
            let streams = FaultPlan::new().fail_fraction(&[Call::StreamSynchronize], 1.0, 0, code);
            streams.fail_nth(Call::DeviceSynchronize, 2, code)
        },
    ];
    for kind in KINDS {
        for (number, plan) in plans.iter().enumerate() {
            for frees in [false, true] {
                let mut scene = Scene::new(kind);
                // It would be waited for before the pools.
                scene.elastic = None;
                let (outcome, faulted) = scene.call(plan(code), || scene.machine.sleep(&TAGS, Keep::Host));
                let failure = failure(outcome).expect("a wait failed");
                assert!(faulted);
                assert_eq!((failure.is_undone, scene.is_asleep()), (number < 2, number == 2), "{failure}");
                if frees {
                    // Memory that is freed and returned to the driver is not read any more.
                    let first = scene.blocks.remove(2);
                    scene.machine.allocator.free(first).unwrap();
                    for tag in TAGS {
                        let pool = scene.machine.tag(tag).pool().id();
                        scene.machine.allocator.trim(DeviceId(0), pool).unwrap();
                    }
                    scene.blocks.drain(..).for_each(|block| scene.machine.allocator.free(block).unwrap());
                    if scene.is_asleep() {
                        scene.machine.wake(&TAGS).unwrap();
                    }
                } else {
                    if scene.is_asleep() {
                        scene.machine.wake(&TAGS).unwrap();
                    }
                    // The next work in them is ordered after the copies.
                    let blocks = scene.blocks.clone();
                    for (value, block) in (1..).zip(&blocks) {
                        scene.machine.write(block, value, 0);
                    }
                    scene.expect_contents(Keep::Host);
                }
                scene.finish();
            }
        }
    }
}

/// The same of elastic memory: its blocks may be decommitted at once, and their pages serve others.
#[test]
fn pages_of_elastic_memory_wait_for_copies_that_could_not_be_waited_for() {
    let waits = [Call::StreamSynchronize, Call::DeviceSynchronize];
    for wakes in [false, true] {
        let scene = Scene::new(Kind::Paged);
        let plan = FaultPlan::new().fail_fraction(&waits[..1], 1.0, 0, CODES[1]);
        // Not the wait before the copies.
        let plan = (2..6).fold(plan, |plan, nth| plan.fail_nth(waits[1], nth, CODES[1]));
        if wakes {
            scene.machine.sleep(&TAGS, Keep::Host).unwrap();
        }
        let (outcome, faulted) = scene.call(plan, || match wakes {
            false => scene.machine.sleep(&TAGS, Keep::Host),
            true => scene.machine.wake(&TAGS),
        });
        assert!(faulted && failure(outcome).is_some_and(|failure| failure.is_undone));
        assert_eq!(scene.is_asleep(), wakes);
        let memory = scene.elastic.as_ref().unwrap();
        if !wakes {
            memory.decommit(0..10, &scene.machine.streams[1]).unwrap();
        }
        let other = scene.machine.untagged(100 * MIB, 2).unwrap();
        scene.machine.write(&other, 9, 2);
        scene.machine.expect(&other, 9, 2);
        scene.machine.allocator.free(other).unwrap();
        if wakes {
            scene.machine.wake(&TAGS).unwrap();
            scene.expect_contents(Keep::Host);
        }
        assert_eq!(scene.machine.defect(), None);
        scene.finish();
    }
}

/// Issue 35: copies of a failed wake wrote to memory that was freed and unmapped meanwhile.
#[test]
fn no_copy_is_under_way_to_what_is_freed_after_a_wake_that_could_not_wait_for_it() {
    let code = ErrorCode::Unknown(4242);
    for kind in KINDS {
        let mut scene = Scene::new(kind);
        scene.machine.sleep(&TAGS, Keep::Host).unwrap();
        let waits = [Call::StreamSynchronize, Call::DeviceSynchronize];
        let plan = FaultPlan::new().fail_fraction(&waits, 1.0, 0, code);
        let (outcome, faulted) = scene.call(plan, || scene.machine.wake(&TAGS));
        assert!(failure(outcome).is_some() && faulted && scene.is_asleep());
        scene.blocks.drain(..).for_each(|block| scene.machine.allocator.free(block).unwrap());
        for tag in TAGS {
            let pool = scene.machine.tag(tag).pool().id();
            scene.machine.allocator.trim(DeviceId(0), pool).unwrap();
        }
        scene.machine.wake(&TAGS).unwrap();
        scene.finish();
    }
}
