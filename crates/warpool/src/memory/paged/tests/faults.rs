//! Every driver call of fixed programs fails once, with each of several codes: no panic, no page or block is lost, the
//! program goes on afterwards, and at its end everything can be freed and given back.

use std::sync::Arc;
use std::time::Duration;

use warpool_driver::decorate::FaultPlan;
use warpool_driver::{
    CaptureMode, CaptureState, Captures as _, Copies as _, Devices as _, ErrorCode, Graphs as _, InstantiateOptions,
    Pattern, Streams as _,
};

use warpool_testing::{in_parallel, seeds};

use super::machine::{DEVICE, MIB, Machine};
use crate::memory::elastic::{ElasticLayout, ElasticRanges as _};
use crate::memory::{
    Allocation, DeviceAllocator as _, MemPoolId, PoolOptions, PrivatePools as _, Request, Route, Settings,
};
use crate::{Error, Result, Stream};

/// The program's view of the machine: what it holds, and what to check.
struct Run<'a> {
    machine: &'a Machine,
    /// Blocks with their tags.
    held: Vec<(Allocation, u32, Stream)>,
    next_tag: u32,
    /// Whether calls may fail.
    tolerant: bool,
}

type Program = fn(&mut Run<'_>);

const PROGRAMS: &[(&str, Program)] = &[
    ("growth", growth),
    ("pages of the same heap", same_heap),
    ("pages of other heaps", other_heaps),
    ("released pools", released_pools),
    ("captures", captures),
    ("trims", trims),
    ("out of memory", out_of_memory),
    ("recorded uses", recorded_uses),
    ("elastic memory", elastic),
    ("idle decay", idle_decay),
];

impl Run<'_> {
    /// An error is passed over, if calls may fail.
    fn pass<T>(&self, outcome: Result<T>) -> Option<T> {
        self.machine.paged.check();
        match outcome {
            Ok(result) => Some(result),
            Err(Error::OutOfMemory(_)) => None,
            Err(_) if self.tolerant => None,
            Err(error) => panic!("without a fault: {error}"),
        }
    }

    fn stream(&self, index: usize) -> Stream {
        self.machine.streams[index].clone()
    }

    /// A block with a tag in every page. Returns its number.
    fn allocate(&mut self, stream: usize, bytes: u64) -> Option<u32> {
        self.allocate_in(stream, bytes, None)
    }

    fn allocate_in(&mut self, stream: usize, bytes: u64, pool: Option<MemPoolId>) -> Option<u32> {
        let stream = self.stream(stream);
        let request = Request { pool, ..Request::new(DEVICE, stream.id(), bytes) };
        let block = self.pass(self.machine.paged.allocate_raw(request))?;
        self.next_tag += 1;
        self.machine.write_tag(&block, self.next_tag, &stream);
        self.held.push((block, self.next_tag, stream));
        Some(self.next_tag)
    }

    /// Frees a block, if it could be allocated. That never fails.
    fn free(&mut self, tag: Option<u32>) {
        let Some(at) = self.held.iter().position(|&(_, each, _)| Some(each) == tag) else { return };
        let (block, tag, stream) = self.held.remove(at);
        self.machine.check_tag(&block, tag, &stream);
        self.machine.paged.free(block).unwrap();
        self.machine.paged.check();
    }

    fn trim(&self, target: Option<u64>) {
        let paged = &self.machine.paged;
        self.pass(match target {
            Some(target) => paged.trim_to(DEVICE, target),
            None => paged.trim(DEVICE, MemPoolId::DEFAULT),
        });
    }
}

fn growth(run: &mut Run<'_>) {
    for (stream, bytes) in [(0, 100), (0, 3 * MIB), (1, 20 * MIB), (0, MIB), (1, 5), (0, 9 * MIB + 5)] {
        run.allocate(stream, bytes);
    }
    let block = run.allocate(0, 4 * MIB);
    run.free(block);
    run.allocate(0, 3 * MIB);
}

/// Pages move between addresses of one stream, there and back, more often than old mappings are kept.
fn same_heap(run: &mut Run<'_>) {
    let mut small = run.allocate(0, 4 * MIB);
    run.allocate(0, 2 * MIB);
    for round in 0..6 {
        run.free(small);
        let large = run.allocate(0, (6 + 2 * round) * MIB);
        run.allocate(0, 1000);
        run.free(large);
        small = run.allocate(0, 4 * MIB);
        if round % 2 == 1 {
            run.machine.sim.stream_synchronize(run.stream(0).id()).unwrap();
        }
    }
}

fn other_heaps(run: &mut Run<'_>) {
    for round in 0..4 {
        let [first, second] = [0, 1].map(|stream| run.allocate(stream, (20 + round) * MIB));
        run.allocate(0, 3 * MIB);
        run.free(first);
        run.free(second);
        let third = run.allocate(2, 44 * MIB);
        run.free(third);
    }
}

fn released_pools(run: &mut Run<'_>) {
    for round in 0..3 {
        let options = PoolOptions { use_on_oom: round == 1, ..PoolOptions::default() };
        let Some(pool) = run.pass(run.machine.paged.create_pool(DEVICE, options)) else { continue };
        let blocks = [0, 1].map(|stream| run.allocate_in(stream, 16 * MIB, Some(pool)));
        run.free(blocks[0]);
        let other = run.allocate(2, 30 * MIB);
        run.machine.paged.release_pool(DEVICE, pool).unwrap();
        run.free(blocks[1]);
        run.free(other);
        let again = run.allocate(2, 40 * MIB);
        run.machine.sim.stream_synchronize(run.stream(1).id()).unwrap();
        run.free(again);
        let last = run.allocate(0, 50 * MIB);
        run.free(last);
    }
}

/// A graph that allocates and frees, launched while memory around it is short.
fn captures(run: &mut Run<'_>) {
    let (paged, sim, stream) = (Arc::clone(&run.machine.paged), Arc::clone(&run.machine.sim), run.stream(0).id());
    let warm = run.allocate(0, 20 * MIB);
    run.free(warm);
    let Some(pool) = run.pass(paged.create_graph_pool(DEVICE)) else { return };
    if run.pass(paged.capture_began(DEVICE)).is_none() {
        paged.release_pool(DEVICE, pool).unwrap();
        return;
    }
    sim.capture_begin(stream, CaptureMode::Global).unwrap();
    let CaptureState::Active(capture) = sim.capture_state(stream).unwrap() else { panic!("it captures") };
    paged.begin_routing(DEVICE, pool, Route::Capture(capture)).unwrap();
    let first = run.allocate(0, 6 * MIB);
    let kept = run.allocate(0, 2 * MIB);
    run.free(first);
    let second = run.allocate(0, 10 * MIB);
    run.allocate(1, 24 * MIB);
    run.trim(None);
    run.free(second);
    let graph = sim.capture_end(stream).unwrap();
    paged.end_routing(DEVICE, pool).unwrap();
    paged.capture_ended(DEVICE).unwrap();
    let exec = sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap();
    for mib in [30, 40] {
        let around = run.allocate(1, mib * MIB);
        sim.graph_launch(exec, stream).unwrap();
        run.trim(None);
        run.free(around);
    }
    sim.stream_synchronize(stream).unwrap();
    sim.graph_exec_destroy(exec).unwrap();
    sim.graph_destroy(graph).unwrap();
    run.free(kept);
    paged.release_pool(DEVICE, pool).unwrap();
    let last = run.allocate(1, 20 * MIB);
    run.free(last);
}

fn trims(run: &mut Run<'_>) {
    for target in [None, Some(10 * MIB), None] {
        let blocks = [0, 1, 2].map(|stream| run.allocate(stream, 10 * MIB));
        run.free(blocks[0]);
        run.free(blocks[2]);
        let moved = run.allocate(0, 16 * MIB);
        run.trim(target);
        run.free(moved);
        run.trim(target);
        run.free(blocks[1]);
    }
}

fn out_of_memory(run: &mut Run<'_>) {
    let first = run.allocate(0, 40 * MIB);
    let second = run.allocate(1, 30 * MIB);
    run.allocate(2, 40 * MIB);
    run.free(first);
    run.allocate(2, 60 * MIB);
    run.machine.paged.set_memory_cap(DEVICE, Some(50 * MIB)).unwrap();
    run.allocate(0, 30 * MIB);
    run.free(second);
    run.allocate(0, 30 * MIB);
    run.machine.paged.set_memory_cap(DEVICE, None).unwrap();
    run.allocate(1, 20 * MIB);
}

fn recorded_uses(run: &mut Run<'_>) {
    for round in 0..3 {
        let tag = run.allocate(0, 12 * MIB);
        if let Some(&(block, tag, ref owner)) = run.held.iter().find(|&&(_, each, _)| Some(each) == tag) {
            let user = run.stream(1);
            run.machine.wait(&user, owner);
            run.machine.check_tag(&block, tag, &user);
            run.machine.paged.record_use(block, user.id()).unwrap();
        }
        run.free(tag);
        let other = run.allocate(2, (20 + 6 * round) * MIB);
        run.free(other);
        let same = run.allocate(0, 40 * MIB);
        run.free(same);
    }
}

/// Two ranges and a heap that take each other's pages. A block that was committed has memory, whatever failed since.
fn elastic(run: &mut Run<'_>) {
    let paged = Arc::clone(&run.machine.paged);
    let ranges = [(2, 8, 3 * MIB), (1, 40, MIB)].map(|(rows, blocks, block_bytes)| {
        let (layout, stream) = (ElasticLayout { rows, blocks, block_bytes }, run.stream(0).id());
        run.pass(paged.reserve(DEVICE, stream, layout))
    });
    for round in 0..2 {
        for (range, stream) in ranges.iter().flatten().zip([0, 1]) {
            let (blocks, stream) = (range.layout.blocks, run.stream(stream));
            let wanted = round..blocks / 2 + round;
            let before = paged.committed(range);
            let done = run.pass(paged.commit(range, stream.id(), wanted.clone())).is_some();
            assert!(if done { paged.is_committed(range, wanted.clone()) } else { paged.committed(range) == before });
            for block in wanted.filter(|&block| paged.is_committed(range, block..block + 1)) {
                let (ptr, bytes) = (range.ptr.offset(block * range.layout.block_bytes), range.layout.block_bytes);
                run.machine.sim.fill(ptr, Pattern::U8(1), bytes, stream.id()).unwrap();
            }
            let after = run.allocate(2, (8 + 4 * round) * MIB);
            let before = paged.committed(range);
            let done = run.pass(paged.decommit(range, stream.id(), round..blocks / 2)).is_some();
            assert!(done || paged.committed(range) == before, "a failed decommit changes nothing");
            run.free(after);
            let before = run.allocate(2, 16 * MIB);
            run.free(before);
        }
    }
    for range in ranges.iter().flatten() {
        // What is done in the other stream was not ordered, if that failed.
        run.machine.sim.device_synchronize(DEVICE).unwrap();
        paged.release(range);
    }
}

/// Pages leave after a phase that needed them, while streams are busy and requests take others.
fn idle_decay(run: &mut Run<'_>) {
    let paged = Arc::clone(&run.machine.paged);
    paged.set_settings(Settings { idle_decay_ms: Some(8), ..Settings::default() }).unwrap();
    for round in 0..3 {
        let blocks = [0, 1].map(|stream| run.allocate(stream, (20 + round) * MIB));
        blocks.into_iter().for_each(|block| run.free(block));
        for step in 0..12 {
            run.machine.sim.pass_time(Duration::from_millis(2));
            if step % 3 == 0 {
                let block = run.allocate(2, MIB);
                run.free(block);
            }
            run.pass(paged.release_idle(DEVICE));
        }
    }
}

/// Runs a program, ends it, and expects that nothing is wrong or left. Returns whether a call was made to fail.
fn run(about: &str, program: Program, plan: Option<FaultPlan>) -> bool {
    let machine = Machine::with_capacity(80 * MIB, 3, Settings::default());
    let mut run = Run { machine: &machine, held: Vec::new(), next_tag: 0, tolerant: plan.is_some() };
    if let Some(plan) = plan {
        machine.faulty.set_plan(plan);
    }
    program(&mut run);
    machine.faulty.clear_plan();
    let about = format!("{about}, failed: {:?}", machine.faulty.injected());
    run.tolerant = false;
    // It can go on.
    let more = [1, 2].map(|stream| run.allocate(stream, 3 * MIB));
    run.free(more[0]);
    let tags: Vec<u32> = run.held.iter().map(|&(_, tag, _)| tag).collect();
    tags.into_iter().for_each(|tag| run.free(Some(tag)));
    machine.sim.device_synchronize(DEVICE).unwrap();
    assert!(run.allocate(0, 78 * MIB).is_some(), "{about}: all memory can be used");
    run.free(Some(run.next_tag));
    machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    machine.paged.check();
    let pages = machine.paged.page_stats(DEVICE).unwrap();
    assert_eq!((pages.active_bytes, pages.reserved_bytes), (0, 0), "{about}: {pages:?}");
    assert_eq!(machine.finish(), None, "{about}");
    !machine.faulty.injected().is_empty()
}

#[test]
fn every_driver_call_may_fail_once() {
    in_parallel(PROGRAMS, |&(name, program)| {
        assert!(!run(name, program, None));
        for code in [ErrorCode::OutOfMemory, ErrorCode::Unknown(999)] {
            let plan = |nth| FaultPlan::new().fail_nth_of_all(nth, code);
            let calls = (1..).take_while(|&nth| run(name, program, Some(plan(nth)))).count();
            assert!(calls > 20, "{name}: only {calls} calls");
        }
    });
}

#[test]
fn a_fraction_of_all_driver_calls_may_fail() {
    for &(name, program) in PROGRAMS {
        for seed in seeds(8) {
            let code = [ErrorCode::OutOfMemory, ErrorCode::Unknown(999)][seed as usize % 2];
            run(name, program, Some(FaultPlan::new().fail_fraction(&[], 0.1, seed, code)));
        }
    }
}
