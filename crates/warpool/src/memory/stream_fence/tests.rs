//! Stream-ordered reuse with blocks by number, on paused streams.

use std::cell::RefCell;
use std::sync::Arc;

use warpool_driver::decorate::{FaultPlan, Faulty};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{Call, CaptureMode, Captures as _, Copies as _, DeviceId, ErrorCode, Graphs as _, Memory as _};
use warpool_driver::{Pattern, StreamId, StreamOptions, Streams as _};

use super::*;
use crate::Instance;

/// Blocks by number, and the order in which they were reclaimed.
struct Owner {
    sim: Arc<SimDriver>,
    faulty: Arc<Faulty>,
    instance: Instance,
    uses: RefCell<Vec<StreamUses>>,
    fences: RefCell<StreamFences<usize>>,
    reclaimed: RefCell<Vec<usize>>,
}

impl FenceOwner for Owner {
    type Key = usize;

    fn instance(&self) -> &Instance {
        &self.instance
    }

    fn with_uses<R>(&self, key: &usize, act: impl FnOnce(&mut StreamUses) -> R) -> R {
        act(&mut self.uses.borrow_mut()[*key])
    }

    fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<usize>) -> R) -> R {
        act(&mut self.fences.borrow_mut())
    }

    fn reclaim_if_clear(&self, key: usize) {
        if self.uses.borrow_mut()[key].take_reclaimable() {
            self.reclaimed.borrow_mut().push(key);
        }
    }
}

impl Owner {
    /// With paused streams that hold work, so that no fence passes by itself.
    fn new(streams: usize) -> (Self, Vec<StreamId>) {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let ptr = sim.mem_alloc(DeviceId(0), 512).unwrap();
        let options = StreamOptions { non_blocking: true, priority: 0 };
        let streams: Vec<StreamId> = (0..streams).map(|_| sim.stream_create(DeviceId(0), options).unwrap()).collect();
        for &stream in &streams {
            sim.pause_stream(stream).unwrap();
            sim.fill(ptr, Pattern::U8(0), 1, stream).unwrap();
        }
        let (uses, fences, reclaimed) = Default::default();
        (Self { sim, faulty, instance, uses, fences, reclaimed }, streams)
    }

    /// A freed block that these streams used.
    fn freed(&self, streams: &[StreamId]) -> usize {
        let mut uses = StreamUses::of(streams.to_vec());
        uses.mark_freed();
        self.uses.borrow_mut().push(uses);
        self.uses.borrow().len() - 1
    }

    fn run(&self, stream: StreamId) {
        self.sim.run_paused(stream, u64::MAX).unwrap();
    }

    /// The blocks that [`poll`] reclaims.
    fn poll(&self) -> Vec<usize> {
        poll(self).unwrap();
        self.reclaimed.take()
    }
}

#[test]
fn a_block_waits_for_all_streams_and_a_busy_stream_delays_only_its_own() {
    let (owner, streams) = Owner::new(2);
    let [both, second, none] = [owner.freed(&streams), owner.freed(&streams[1..]), owner.freed(&[])];
    [both, second, none].into_iter().for_each(|key| fence(&owner, key).unwrap());
    assert_eq!(owner.poll(), [none]);
    owner.run(streams[1]);
    assert_eq!(owner.poll(), [second]);
    owner.run(streams[0]);
    assert_eq!(owner.poll(), [both]);
    assert!(owner.fences.borrow().is_empty());
}

#[test]
fn a_result_that_arrives_after_another_thread_completed_the_fence_is_dropped() {
    let (owner, streams) = Owner::new(1);
    let keys = [(); 3].map(|()| owner.freed(&streams));
    keys.into_iter().for_each(|key| fence(&owner, key).unwrap());
    let all = owner.fences.borrow().all();
    owner.complete(&all[1]);
    all.iter().for_each(|fence| owner.complete(fence));
    assert_eq!(owner.reclaimed.take(), [1, 0, 2]);
}

#[test]
fn unfenced_blocks_are_retried_after_the_capture() {
    let (owner, streams) = Owner::new(1);
    owner.run(streams[0]);
    owner.sim.resume_stream(streams[0]).unwrap();
    owner.sim.capture_begin(streams[0], CaptureMode::ThreadLocal).unwrap();
    let (now, later) = (owner.freed(&streams), owner.freed(&streams));
    fence(&owner, now).unwrap();
    fence_later(&owner, later);
    fence_later(&owner, later);
    retry_unfenced(&owner, usize::MAX, |key, _| fence(&owner, key)).unwrap();
    assert_eq!(owner.fences.borrow().unfenced(), [now, later]);
    assert_eq!(owner.poll(), []);
    let graph = owner.sim.capture_end(streams[0]).unwrap();
    owner.sim.graph_destroy(graph).unwrap();
    retry_unfenced(&owner, usize::MAX, |key, _| fence(&owner, key)).unwrap();
    wait_all(&owner).unwrap();
    assert_eq!(owner.reclaimed.take(), [now, later]);
}

#[test]
fn a_use_that_is_added_while_fences_are_recorded_is_another_use() {
    let (owner, streams) = Owner::new(1);
    let key = owner.freed(&streams);
    let recording = owner.with_uses(&key, StreamUses::begin_fencing).unwrap();
    owner.with_uses(&key, |uses| uses.add(streams[0]));
    let after = owner.with_uses(&key, |uses| uses.end_fencing(recording.len() as u32, &[]));
    assert_eq!(after, uses::AfterFencing::List);
    owner.with_fences(|fences| assert!(fences.push_unfenced(key).is_none()));
    owner.reclaim_if_clear(key);
    retry_unfenced(&owner, usize::MAX, |key, _| fence(&owner, key)).unwrap();
    assert_eq!(owner.poll(), []);
    owner.run(streams[0]);
    assert_eq!(owner.poll(), [key]);
    fence(&owner, key).unwrap();
    assert_eq!(owner.reclaimed.take(), [], "a reclaimed block is not fenced again");
}

#[test]
fn an_error_in_one_stream_does_not_stop_the_others() {
    let (owner, streams) = Owner::new(3);
    let keys: Vec<usize> = streams.iter().map(|stream| owner.freed(std::slice::from_ref(stream))).collect();
    keys.iter().for_each(|&key| fence(&owner, key).unwrap());
    streams.iter().for_each(|&stream| owner.run(stream));
    let fail = |call| owner.faulty.set_plan(FaultPlan::new().fail_nth(call, 1, ErrorCode::LaunchFailed));
    fail(Call::EventQuery);
    assert!(poll(&owner).is_err());
    assert_eq!(owner.reclaimed.take(), [1, 2]);
    fail(Call::EventSynchronize);
    assert!(wait_all(&owner).is_err());
    assert_eq!(owner.reclaimed.take(), []);
    fail(Call::EventRecord);
    let unrecorded = owner.freed(&streams);
    assert!(fence(&owner, unrecorded).is_err());
    assert_eq!(owner.uses.borrow()[unrecorded].unfenced(), &streams[..1]);
    owner.faulty.set_plan(FaultPlan::new());
    retry_unfenced(&owner, usize::MAX, |key, _| fence(&owner, key)).unwrap();
    wait_all(&owner).unwrap();
    assert_eq!(owner.reclaimed.take(), [0, unrecorded]);
}

#[test]
fn for_a_destroyed_stream_the_devices_are_waited_for() {
    let (owner, streams) = Owner::new(1);
    owner.sim.resume_stream(streams[0]).unwrap();
    let key = owner.freed(&streams);
    owner.sim.stream_destroy(streams[0]).unwrap();
    fence(&owner, key).unwrap();
    assert_eq!(owner.reclaimed.take(), [key]);
}

#[test]
fn closed_fences_queue_nothing() {
    let (owner, streams) = Owner::new(1);
    drop(owner.fences.borrow_mut().close());
    let key = owner.freed(&streams);
    fence(&owner, key).unwrap();
    fence_later(&owner, key);
    owner.run(streams[0]);
    assert_eq!((owner.poll(), owner.fences.borrow().is_empty()), (vec![], true));
}
