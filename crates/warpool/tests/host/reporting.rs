//! Counters, history and snapshots.

use std::sync::{Arc, Mutex};

use warpool::memory::host::HostStats;
use warpool::memory::report::{Action, BlockState, Frame, HistoryOptions, SegmentKind, Stack, StackLevel, Stat};

use super::context::{KIB, MIB, TestContext};

fn stat(current: u64, peak: u64, allocated: u64, freed: u64) -> Stat {
    Stat { current, peak, allocated, freed }
}

/// TestCuda.test_host_memory_stats: exact over allocation, reuse, emptying and resets.
#[test]
fn counters_are_exact_for_one_thread() {
    let context = TestContext::new("");
    let mut zero = HostStats::default();
    zero.pinned_bytes_by_device.push(0);
    assert_eq!(context.stats(), zero);
    let [one, two] = [context.alloc(MIB), context.alloc(1000)];
    let stats = context.stats();
    assert_eq!((stats.allocations, stats.allocated_bytes), (stat(2, 2, 2, 0), stat(3 * MIB, 3 * MIB, 3 * MIB, 0)));
    assert_eq!(stats.active_requests, stat(2, 2, 2, 0));
    assert_eq!(stats.active_bytes, stat(MIB + KIB, MIB + KIB, MIB + KIB, 0));
    assert_eq!((stats.num_host_alloc, stats.num_host_free, stats.host_alloc_time.count), (2, 0, 2));
    assert_eq!(stats.cached_bytes, 2 * MIB - KIB);
    let time = stats.host_alloc_time;
    assert!(time.min_us > 0 && time.min_us <= time.avg_us() && time.avg_us() <= time.max_us);
    assert!(time.total_us >= time.max_us + time.min_us);

    drop(one);
    let stats = context.stats();
    assert_eq!(stats.active_bytes, stat(KIB, MIB + KIB, MIB + KIB, MIB));
    assert_eq!((stats.allocated_bytes.current, stats.cached_bytes), (3 * MIB, 3 * MIB - KIB));
    let again = context.alloc(MIB);
    let stats = context.stats();
    assert_eq!(stats.active_requests, stat(2, 2, 3, 1));
    assert_eq!((stats.allocations.allocated, stats.num_host_alloc), (2, 2), "nothing more was pinned");

    drop(again);
    context.trim(0);
    let stats = context.stats();
    assert_eq!((stats.allocations, stats.allocated_bytes), (stat(1, 2, 2, 1), stat(2 * MIB, 3 * MIB, 3 * MIB, MIB)));
    assert_eq!((stats.num_host_free, stats.host_free_time.count), (1, 1));

    context.pinned.reset_peak_stats();
    let stats = context.stats();
    assert_eq!((stats.allocated_bytes.peak, stats.active_requests.peak), (2 * MIB, 1));
    context.pinned.reset_accumulated_stats();
    let stats = context.stats();
    assert_eq!(stats.active_bytes, stat(KIB, KIB, 0, 0));
    assert_eq!(stats.allocated_bytes, stat(2 * MIB, 2 * MIB, 0, 0));
    assert_eq!((stats.num_host_alloc, stats.host_alloc_time), (0, Default::default()));
    drop(two);
    context.finish();
}

#[test]
fn pending_blocks_are_active() {
    let context = TestContext::new("");
    let stream = context.stream();
    let block = context.alloc(KIB);
    context.pause_stream(&stream);
    context.upload(&block, &stream);
    context.free(block);
    assert_eq!(context.stats().active_bytes, stat(KIB, KIB, KIB, 0));
    context.finish_stream(&stream);
    assert_eq!(context.stats().active_requests.current, 1, "reading the counters processes nothing");
    context.pinned.process_pending().unwrap();
    assert_eq!(context.stats().active_bytes, stat(0, KIB, KIB, KIB));
    context.finish();
}

#[test]
fn counters_have_the_names_of_pytorch() {
    let context = TestContext::new("");
    let block = context.alloc(4096);
    let flat = context.stats().flattened();
    let of = |name: &str| flat.iter().find(|(other, _)| other == name).map(|(_, value)| *value);
    assert_eq!(of("active_bytes.current"), Some(4096));
    assert_eq!(
        (of("allocations.allocated"), of("num_host_alloc"), of("host_alloc_time.count")),
        (Some(1), Some(1), Some(1))
    );
    let names: Vec<&str> = flat.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), 4 * 4 + 2 + 2 * 5);
    assert!(
        names.contains(&"active_requests.peak")
            && names.contains(&"host_free_time.avg")
            && names.contains(&"allocated_bytes.freed")
    );
    drop(block);
    context.finish();
}

fn actions(context: &TestContext) -> Vec<Action> {
    context.snapshot().host_traces.unwrap().iter().map(|entry| entry.action).collect()
}

/// As with device memory: entries of a free have the stack of the allocation, or their own at the highest level.
#[test]
fn the_stack_level_decides_where_stacks_appear() {
    for level in [StackLevel::Never, StackLevel::State, StackLevel::Alloc, StackLevel::All] {
        println!("level: {level:?}");
        let context = TestContext::new("");
        context.pinned.record_history(Some(HistoryOptions { stacks: level, ..HistoryOptions::default() }));
        let name_calls = |name: &'static str| {
            let gather =
                move || -> Option<Stack> { Some([Frame { name: name.into(), filename: "".into(), line: 1 }].into()) };
            context.pinned.observers().set_stack_hook(Some(Arc::new(gather)));
        };
        name_calls("allocate");
        let block = context.alloc(1000);
        name_calls("free");
        context.free(block);
        let snapshot = context.snapshot();
        let (entries, in_entries) = (snapshot.host_traces.as_ref().unwrap(), level >= StackLevel::Alloc);
        assert_eq!(entries.len(), 4);
        for entry in entries {
            let is_free = matches!(entry.action, Action::FreeRequested | Action::FreeCompleted);
            let name = entry.stack.map(|id| snapshot.stacks[id.index()][0].name.as_str());
            let expected = if is_free && level == StackLevel::All { "free" } else { "allocate" };
            assert_eq!(name, in_entries.then_some(expected), "{entry:?}");
        }
        let segments = snapshot.host_segments.as_ref().unwrap();
        assert!(!segments.is_empty() && segments.iter().all(|segment| segment.stack.is_some() == in_entries));
    }
}

#[test]
fn the_history_lists_every_step() {
    let context = TestContext::new("");
    let stream = context.stream();
    assert_eq!(context.snapshot().host_traces, Some(vec![]));
    context.pinned.record_history(Some(HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() }));
    let gather =
        || -> Option<Stack> { Some([Frame { name: "here".into(), filename: "main.rs".into(), line: 1 }].into()) };
    context.pinned.observers().set_stack_hook(Some(Arc::new(gather)));
    let block = context.alloc(1000);
    let ptr = block.ptr();
    context.free(block);
    let block = context.alloc(900);
    context.pause_stream(&stream);
    context.upload(&block, &stream);
    drop(block);
    context.finish_stream(&stream);
    context.pinned.process_pending().unwrap();
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree};
    let free = [FreeRequested, FreeCompleted];
    assert_eq!(actions(&context), [&[SegmentAlloc, Alloc][..], &free, &[Alloc], &free].concat());
    let snapshot = context.snapshot();
    let traces = snapshot.host_traces.as_ref().unwrap();
    assert_eq!((traces[0].addr, traces[0].size), (ptr.0, 2 * MIB));
    assert_eq!((traces[1].addr, traces[1].size, traces[4].size), (ptr.0, 1000, 900));
    assert!(traces.iter().all(|entry| entry.stack.is_some() && entry.stream == 0));
    assert!(traces.is_sorted_by_key(|entry| entry.time_us));
    context.trim(0);
    assert_eq!(actions(&context).last(), Some(&SegmentFree));
    // Stopped, it is cleared, and nothing is recorded.
    context.pinned.record_history(None);
    context.free(context.alloc(1));
    assert_eq!(actions(&context), []);
    context.finish();
}

#[test]
fn trackers_are_called_without_a_lock() {
    let context = TestContext::new("");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (entries, pinned) = (Arc::clone(&seen), context.pinned.clone());
    let id = context.pinned.observers().attach_tracker(
        &[Action::Alloc, Action::FreeCompleted],
        Arc::new(move |device, entry| {
            let _ = pinned.stats();
            entries.lock().unwrap().push((device.0, entry.action, entry.size));
        }),
    );
    drop(context.alloc(5000));
    let expected = [(u32::MAX, Action::Alloc, 5000), (u32::MAX, Action::FreeCompleted, 5000)];
    assert_eq!(*seen.lock().unwrap(), expected);
    assert!(context.pinned.observers().detach(id));
    context.finish();
}

#[test]
fn a_snapshot_has_all_segments_and_blocks() {
    let context = TestContext::new("");
    let stream = context.stream();
    let [live, pending, free] = [1000, 3 * MIB, 2000].map(|bytes| context.alloc(bytes));
    context.pause_stream(&stream);
    context.upload(&pending, &stream);
    let ptrs = [live.ptr(), pending.ptr(), free.ptr()];
    context.free(pending);
    context.free(free);
    assert_eq!(
        ptrs.map(|ptr| context.state_at(ptr)),
        [BlockState::ActiveAllocated, BlockState::ActivePendingFree, BlockState::Inactive]
    );
    let segments = context.segments();
    assert!(segments.is_sorted_by_key(|segment| segment.address));
    let sum = |of: fn(&warpool::memory::report::SegmentInfo) -> u64| segments.iter().map(of).sum::<u64>();
    assert_eq!(sum(|segment| segment.total_size), context.stats().allocated_bytes.current);
    assert_eq!(sum(|segment| segment.active_size), context.stats().active_bytes.current);
    assert_eq!((sum(|segment| segment.allocated_size), sum(|segment| segment.requested_size)), (KIB, 1000 + 3 * MIB));
    for segment in &segments {
        assert_eq!((segment.device, segment.stream, segment.kind), (-1, 0, SegmentKind::Small));
        let mut end = segment.address;
        for block in &segment.blocks {
            assert_eq!(block.address, end, "no gaps");
            end += block.size;
        }
    }
    drop(live);
    context.finish_stream(&stream);
    context.finish();
}
