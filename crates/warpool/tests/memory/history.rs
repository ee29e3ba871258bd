//! Snapshots and the history: what they contain, what is left out, and where call stacks and texts appear.

use std::sync::Arc;
use std::thread;

use crate::common::memory::{FIRST, MIB, TestContext};
use warpool::Error;
use warpool::driver::sim::SimConfig;
use warpool::driver::{DeviceId, DevicePtr};
use warpool::memory::raw::Request;
use warpool::memory::report::{
    Action, BlockState, Frame, HistoryOptions, SegmentKind, Snapshot, SnapshotOptions, Stack, StackLevel,
    pop_compile_context, push_compile_context, set_user_metadata,
};
use warpool::memory::{DeviceAllocator, MemPoolId};

fn snapshot(context: &TestContext) -> Snapshot {
    context.allocator.snapshot(SnapshotOptions::default()).unwrap()
}

fn actions(context: &TestContext) -> Vec<Action> {
    snapshot(context).traces[0].iter().map(|entry| entry.action).collect()
}

fn record(context: &TestContext, options: HistoryOptions) {
    context.allocator.record_history(Some(options)).unwrap();
}

thread_local! {
    static PLACE: std::cell::RefCell<&'static str> = const { std::cell::RefCell::new("nowhere") };
}

/// Runs something with that name as the call stack of the hook.
fn inside<R>(name: &'static str, act: impl FnOnce() -> R) -> R {
    let before = PLACE.replace(name);
    let result = act();
    PLACE.set(before);
    result
}

fn hook(context: &TestContext) {
    let gather = || -> Option<Stack> {
        let name = PLACE.with_borrow(|&name| name.to_owned());
        Some([Frame { name, filename: "main.rs".into(), line: 1 }].into())
    };
    context.allocator.observers().set_stack_hook(Some(Arc::new(gather)));
}

/// The names of all stacks of a snapshot.
fn names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.stacks.iter().map(|stack| stack[0].name.as_str()).collect()
}

/// TestCudaAllocator.test_memory_snapshot: segments and blocks sum up to the statistics.
#[test]
fn a_snapshot_sums_up_to_the_statistics() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::new(settings);
        let side = context.side_stream();
        let kept: Vec<_> = [311_488, 500, 3 * MIB, 25 * MIB, 700, 11 * MIB].map(|bytes| context.alloc(bytes)).into();
        context.alloc_on(&side, 5_000_000);
        context.free_all([kept[1], kept[3]]);
        let (snapshot, stats) = (snapshot(&context), context.stats());
        let sum = |of: fn(&warpool::memory::report::SegmentInfo) -> u64| snapshot.segments.iter().map(of).sum::<u64>();
        assert_eq!(sum(|segment| segment.total_size), stats.reserved_bytes.all.current);
        assert_eq!(sum(|segment| segment.allocated_size), stats.allocated_bytes.all.current);
        assert_eq!(sum(|segment| segment.active_size), stats.active_bytes.all.current);
        assert_eq!(sum(|segment| segment.requested_size), stats.requested_bytes.all.current);
        let raw = [context.main.raw().unwrap().0, side.raw().unwrap().0];
        for segment in &snapshot.segments {
            let mut end = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, end, "no gaps");
                end += block.size;
            }
            assert_eq!(end, segment.address + segment.total_size);
            assert!(raw.contains(&segment.stream) && segment.device == 0 && segment.pool == MemPoolId::DEFAULT);
        }
        assert!(snapshot.segments.is_sorted_by_key(|segment| segment.address));
        let first = snapshot.segments.iter().flat_map(|segment| &segment.blocks).find(|b| b.address == kept[0].ptr.0);
        assert_eq!(first.map(|block| (block.requested_size, block.size)), Some((311_488, 311_808)));
        context.finish();
    }
}

#[test]
fn names_are_those_of_snapshot_files() {
    let kinds = [SegmentKind::Small, SegmentKind::Large].map(SegmentKind::name);
    assert_eq!(kinds, ["small", "large"]);
    assert_eq!(BlockState::ALL.map(BlockState::name), ["active_allocated", "active_pending_free", "inactive"]);
    let actions = [
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "snapshot",
        "oom",
        "annotate",
    ];
    assert_eq!(Action::ALL.map(Action::name), actions);
}

/// The settings in force, with the last settings string.
#[test]
fn a_snapshot_has_the_settings() {
    let context = TestContext::new("max_split_size_mb:200,roundup_power2_divisions:4");
    let settings = snapshot(&context).settings;
    assert_eq!(settings.conf.as_deref(), Some("max_split_size_mb:200,roundup_power2_divisions:4"));
    assert_eq!((settings.max_split_size, settings.expandable_segments), (Some(200 << 20), Some(false)));
    let divisions = settings.roundup_power2_divisions.unwrap();
    assert_eq!((divisions.len(), &divisions[0], &divisions[15]), (16, &("1".into(), 4), &("32768".into(), 4)));
    context.set("expandable_segments:True");
    let settings = snapshot(&context).settings;
    assert_eq!((settings.max_split_size, settings.expandable_segments), (Some(-1), Some(true)));
    assert_eq!(settings.conf.as_deref(), Some("expandable_segments:True"));
    context.finish();
}

#[test]
fn taking_a_snapshot_is_an_entry_of_the_next() {
    let context = TestContext::new("");
    record(&context, HistoryOptions::default());
    let allocation = context.alloc(1000);
    assert_eq!(actions(&context), [Action::SegmentAlloc, Action::Alloc]);
    let trace = snapshot(&context).traces.remove(0);
    assert_eq!((trace[2].action, trace[2].size), (Action::Snapshot, allocation.bytes));
    context.finish();
}

/// Entries of blocks have the requested size, those of segments the whole one.
#[test]
fn entries_have_action_address_size_and_time() {
    let context = TestContext::new("");
    let side = context.side_stream();
    record(&context, HistoryOptions { epoch_us: 1_000_000_000, ..HistoryOptions::default() });
    let allocation = context.alloc_on(&side, 3_000_000);
    context.free(allocation);
    context.trim();
    let trace = snapshot(&context).traces.remove(0);
    let seen: Vec<_> = trace.iter().map(|entry| (entry.action, entry.size)).collect();
    let expected = [
        (Action::SegmentAlloc, 20 * MIB),
        (Action::Alloc, 3_000_000),
        (Action::FreeRequested, 3_000_000),
        (Action::FreeCompleted, 3_000_000),
        (Action::SegmentFree, 20 * MIB),
    ];
    assert_eq!(seen, expected);
    assert!(trace.iter().all(|entry| entry.addr == allocation.ptr.0 && entry.stream == side.raw().unwrap().0));
    assert!(trace.iter().all(|entry| entry.pool == Some(MemPoolId::DEFAULT) && entry.stack.is_none()));
    assert!(trace.iter().all(|entry| entry.time_us >= 1_000_000_000) && trace.is_sorted_by_key(|entry| entry.time_us));
    context.finish();
}

/// TestMemPool.test_pool_id_in_snapshot.
#[test]
fn segments_and_entries_have_their_pool() {
    let context = TestContext::new("");
    let pool = context.pools().create_graph_pool(FIRST).unwrap();
    record(&context, HistoryOptions::default());
    context.alloc_in(pool, MIB);
    context.alloc(MIB);
    let snapshot = snapshot(&context);
    let pools: Vec<_> = snapshot.traces[0].iter().map(|entry| entry.pool.unwrap()).collect();
    assert_eq!(pools, [pool, pool, MemPoolId::DEFAULT, MemPoolId::DEFAULT]);
    assert_eq!(snapshot.segments.iter().filter(|segment| segment.pool == pool).count(), 1);
    assert_eq!(context.segments_of(pool).len(), 1);
    assert_eq!(context.segments_of(MemPoolId { graph: 0, user: 77 }), []);
    context.finish();
}

/// TestCudaAllocator.test_snapshot_include_traces(_correctness).
#[test]
fn traces_can_be_left_out() {
    let context = TestContext::new("");
    record(&context, HistoryOptions::default());
    context.alloc(MIB);
    let with = context.allocator.snapshot(SnapshotOptions { pool: None, traces: true }).unwrap();
    let without = context.allocator.snapshot(SnapshotOptions { pool: None, traces: false }).unwrap();
    assert_eq!(with.segments, without.segments);
    assert!(!with.traces[0].is_empty() && without.traces.iter().all(Vec::is_empty));
    context.finish();
}

/// TestCudaAllocator.test_memory_snapshot_skip_actions.
#[test]
fn actions_can_be_skipped_by_name() {
    let context = TestContext::new("");
    record(&context, HistoryOptions::default().skipping(&["free_requested", "segment_alloc", "snapshot"]).unwrap());
    context.free(context.alloc(MIB));
    snapshot(&context);
    assert_eq!(actions(&context), [Action::Alloc, Action::FreeCompleted]);
    let error = HistoryOptions::default().skipping(&["alloc", "nonsense"]).unwrap_err();
    assert!(matches!(error, Error::UnknownAction { name, .. } if name == "nonsense"));
    context.finish();
}

#[test]
fn trackers_see_skipped_actions() {
    use std::sync::atomic::{AtomicU32, Ordering};
    let context = TestContext::new("");
    record(&context, HistoryOptions::default().skipping(&["alloc"]).unwrap());
    let seen = Arc::new(AtomicU32::new(0));
    let count = seen.clone();
    let tracker = Arc::new(move |_, _: &warpool::memory::report::HistoryEntry| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    context.allocator.observers().attach_tracker(&[Action::Alloc], tracker);
    context.free(context.alloc(MIB));
    assert_eq!(seen.load(Ordering::Relaxed), 1);
    assert!(!actions(&context).contains(&Action::Alloc));
    context.finish();
}

/// At least one; stopping clears the history.
#[test]
fn the_newest_entries_are_kept() {
    let context = TestContext::new("");
    record(&context, HistoryOptions { entries_max: 3, ..HistoryOptions::default() });
    context.free(context.alloc(MIB));
    let last = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
    assert_eq!(actions(&context), last);
    record(&context, HistoryOptions { entries_max: 0, ..HistoryOptions::default() });
    context.alloc(MIB);
    assert_eq!(actions(&context), [Action::Alloc]);
    context.allocator.record_history(None).unwrap();
    context.alloc(MIB);
    assert_eq!(actions(&context), []);
    context.finish();
}

/// TestCudaAllocator.test_memory_plots_free_stack and test_memory_plots_history_context.
#[test]
fn the_stack_level_decides_where_stacks_appear() {
    for level in [StackLevel::Never, StackLevel::State, StackLevel::Alloc, StackLevel::All] {
        let context = TestContext::new("");
        hook(&context);
        record(&context, HistoryOptions { stacks: level, ..HistoryOptions::default() });
        let allocation = inside("the_alloc", || context.alloc(1000));
        let live = snapshot(&context);
        let block = live.segments[0].blocks.iter().find(|block| block.address == allocation.ptr.0).unwrap();
        assert_eq!(block.stack.is_some(), level >= StackLevel::State, "{level:?}");
        inside("the_free", || context.free(allocation));
        let after = snapshot(&context);
        let alloc = after.traces[0].iter().find(|entry| entry.action == Action::Alloc).unwrap();
        assert_eq!(alloc.stack.is_some(), level >= StackLevel::Alloc, "{level:?}");
        assert_eq!(names(&after).contains(&"the_alloc"), level >= StackLevel::Alloc, "{level:?}");
        assert_eq!(names(&after).contains(&"the_free"), level == StackLevel::All, "{level:?}");
        context.trim();
        let trace = snapshot(&context).traces.remove(0);
        let segment_free = trace.iter().find(|entry| entry.action == Action::SegmentFree).unwrap();
        assert_eq!(segment_free.stack.is_some(), level >= StackLevel::Alloc, "{level:?}");
        context.finish();
    }
}

#[test]
fn equal_stacks_are_stored_once() {
    let context = TestContext::new("");
    hook(&context);
    record(&context, HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() });
    for _ in 0..10 {
        inside("one", || context.alloc(1000));
        inside("two", || context.alloc(3 * MIB));
    }
    let snapshot = snapshot(&context);
    let mut names = names(&snapshot);
    names.sort_unstable();
    assert_eq!(names, ["one", "two"]);
    assert!(snapshot.segments.iter().all(|segment| segment.stack.is_some()));
    // Off: the hook is not called.
    context.allocator.observers().set_stack_hook(None);
    let allocation = context.alloc(100);
    let without = self::snapshot(&context);
    let blocks = without.segments.iter().flat_map(|segment| &segment.blocks);
    assert!(blocks.filter(|block| block.address == allocation.ptr.0).all(|block| block.stack.is_none()));
    context.finish();
}

/// TestCudaAllocator.test_memory_plots_metadata: per thread, until it changes.
#[test]
fn entries_have_the_metadata_of_the_thread() {
    let context = TestContext::new("");
    record(&context, HistoryOptions::default());
    set_user_metadata("step 1");
    push_compile_context("Torch-Compiled Region: 0/0");
    let allocation = context.alloc(MIB);
    pop_compile_context();
    set_user_metadata("");
    context.free(allocation);
    thread::scope(|scope| {
        scope.spawn(|| context.alloc(12 * MIB));
    });
    let snapshot = snapshot(&context);
    let text = |id: Option<_>| id.map(|id| snapshot.texts.get(id));
    let seen: Vec<_> =
        snapshot.traces[0].iter().map(|entry| (text(entry.user_metadata), text(entry.compile_context))).collect();
    let both = (Some("step 1"), Some("Torch-Compiled Region: 0/0"));
    assert_eq!(seen, [both, both, (None, None), (None, None), (None, None), (None, None)]);
    context.finish();
}

/// TestCudaAllocator.test_memory_plots_annotate.
#[test]
fn a_block_can_be_annotated() {
    let context = TestContext::new("");
    record(&context, HistoryOptions::default());
    let allocation = context.alloc(1000);
    context.allocator.annotate(allocation.ptr, "weights").unwrap();
    let snapshot = snapshot(&context);
    let entry = snapshot.traces[0].last().unwrap();
    assert_eq!((entry.action, entry.addr, entry.size), (Action::Annotate, allocation.ptr.0, 1000));
    assert_eq!(entry.user_metadata.map(|id| snapshot.texts.get(id)), Some("weights"));
    let inside = DevicePtr(allocation.ptr.0 + 512);
    assert_eq!(context.allocator.annotate(inside, "x"), Err(Error::UnknownPointer { ptr: inside }));
    context.free(allocation);
    assert!(context.allocator.annotate(allocation.ptr, "x").is_err());
    context.finish();
}

/// One list per device, and segments of all.
#[test]
fn devices_have_their_own_history() {
    let context = TestContext::with_config(SimConfig::default().with_devices(2), "");
    record(&context, HistoryOptions::default());
    let other = context.instance.device(1).unwrap().default_stream().unwrap();
    context.allocator.allocate_raw(Request::new(DeviceId(1), other.id(), MIB)).unwrap();
    let snapshot = snapshot(&context);
    assert_eq!(snapshot.traces.iter().map(Vec::len).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(snapshot.segments.iter().map(|segment| segment.device).collect::<Vec<_>>(), [1]);
    assert_eq!(context.stats().allocation.all.allocated, 0);
    assert_eq!(context.allocator.stats(DeviceId(1)).unwrap().allocation.all.allocated, 1);
    context.finish();
}
