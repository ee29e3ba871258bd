//! Threads, and what an allocator reports: to trackers and observers, in its history and in snapshots.

use super::*;

#[test]
fn threads_share_an_allocator() {
    each_by_default(|context| {
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                scope.spawn(move || {
                    let mut rng = Rng::new(thread);
                    let stream = context.stream();
                    let mut live = Vec::new();
                    for step in 0..300_u64 {
                        if rng.below(2) == 0 || live.is_empty() {
                            let block = context.block(request_bytes(&mut rng).min(4 * MIB), &stream);
                            context.fill(block, step as u8, &stream);
                            live.push(block);
                        } else {
                            let block = live.swap_remove(rng.below(live.len()));
                            match rng.below(2) {
                                0 => context.allocator.free_raw(block.ptr).unwrap(),
                                _ => context.allocator.free_later(block),
                            }
                        }
                        match step {
                            99 => drop(context.snapshot()),
                            199 => drop(context.trim()),
                            _ => {}
                        }
                    }
                    live.into_iter().for_each(|block| context.allocator.free(block).unwrap());
                });
            }
        });
        context.trim();
        context.expect_sound(&[]);
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
        context.expect_no_hazard();
    });
}

#[test]
fn trackers_see_every_entry_and_may_call_the_allocator() {
    each_by_default(|context| {
        let stream = context.stream();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let inside = Arc::new(AtomicBool::new(false));
        let id = {
            let (weak, seen, stream) = (Arc::downgrade(&context.allocator), Arc::clone(&seen), stream.clone());
            context.allocator.observers().attach_tracker(
                &[Action::Alloc, Action::FreeRequested, Action::FreeCompleted],
                Arc::new(move |device, entry| {
                    if inside.swap(true, Ordering::SeqCst) {
                        return;
                    }
                    seen.lock().unwrap().push((entry.action, entry.size));
                    let allocator = weak.upgrade().expect("the allocator is alive");
                    allocator.stats(device).unwrap();
                    let block = allocator.allocate_raw(Request::new(device, stream.id(), 700)).unwrap();
                    allocator.free(block).unwrap();
                    inside.store(false, Ordering::SeqCst);
                }),
            )
        };
        let block = context.block(5000, &stream);
        context.allocator.free(block).unwrap();
        let expected = [(Action::Alloc, 5000), (Action::FreeRequested, 5000), (Action::FreeCompleted, 5000)];
        assert_eq!(*seen.lock().unwrap(), expected);
        assert!(context.allocator.observers().detach(id) && !context.allocator.observers().detach(id));
        let block = context.block(5000, &stream);
        context.allocator.free(block).unwrap();
        assert_eq!(seen.lock().unwrap().len(), 3);
    });
}

#[test]
fn oom_observers_are_called_and_pressure_callbacks_may_free_memory() {
    each(&SimConfig::default().with_capacity(4 * GIB), |context| {
        let stream = context.stream();
        let observed = Arc::new(AtomicU64::new(0));
        {
            let (observed, weak) = (Arc::clone(&observed), Arc::downgrade(&context.allocator));
            context.allocator.observers().attach_oom_observer(Arc::new(move |report| {
                observed.fetch_add(report.bytes_requested, Ordering::SeqCst);
                let allocator = weak.upgrade().expect("the allocator is alive");
                allocator.trim(report.device, MemPoolId::DEFAULT).unwrap();
                allocator.snapshot(SnapshotOptions::default()).unwrap();
            }));
        }
        let spare = Arc::new(Mutex::new(Some(context.block(2 * GIB, &stream))));
        assert!(matches!(context.refused(3 * GIB, &stream), Error::OutOfMemory(_)));
        assert_eq!(observed.load(Ordering::SeqCst), 3 * GIB);

        let weak = Arc::downgrade(&context.allocator);
        let block = Arc::clone(&spare);
        context.allocator.observers().attach_pressure_callback(Arc::new(move |_| {
            let Some(spare) = block.lock().unwrap().take() else { return false };
            weak.upgrade().expect("the allocator is alive").free(spare).unwrap();
            true
        }));
        let large = context.block(3 * GIB, &stream);
        assert!(spare.lock().unwrap().is_none());
        context.allocator.free(large).unwrap();
        assert_eq!(observed.load(Ordering::SeqCst), 3 * GIB);
    });
}

#[test]
fn a_history_is_recorded_while_enabled() {
    each_by_default(|context| {
        let stream = context.stream();
        let raw = stream.info().unwrap().raw.0;
        let round = || {
            let block = context.block(3000, &stream);
            context.allocator.free(block).unwrap();
            block
        };
        round();
        context.allocator.record_history(Some(HistoryOptions { entries_max: 3, ..HistoryOptions::default() })).unwrap();
        round();
        let skip = ["segment_alloc", "segment_free", "segment_map"];
        let options = HistoryOptions { entries_max: 3, ..HistoryOptions::default() }.skipping(&skip).unwrap();
        context.allocator.record_history(Some(options)).unwrap();
        let block = round();
        let trace = context.snapshot().traces.remove(0);
        let found: Vec<_> = trace.iter().map(|entry| (entry.action, entry.addr, entry.size, entry.stream)).collect();
        let entry = |action| (action, block.ptr.0, 3000, raw);
        assert_eq!(found, [Action::Alloc, Action::FreeRequested, Action::FreeCompleted].map(entry));
        assert!(trace.is_sorted_by_key(|entry| entry.time_us));

        let without = context.allocator.snapshot(SnapshotOptions { traces: false, ..SnapshotOptions::default() });
        assert!(without.unwrap().traces[0].is_empty());
        context.allocator.record_history(None).unwrap();
        round();
        assert!(context.snapshot().traces[0].is_empty());
    });
}

/// Entries of a free have the stack of the allocation, or of a later call that completes the free; only at the highest
/// level, they have their own. At lower levels only blocks have a stack, while they are allocated.
#[test]
fn the_stack_level_decides_where_stacks_appear() {
    for level in [StackLevel::Never, StackLevel::State, StackLevel::Alloc, StackLevel::All] {
        println!("level: {level:?}");
        each_by_default(|context| {
            let (stream, user) = (context.stream(), context.stream());
            context.allocator.observers().set_stack_hook(Some(Arc::new(|| {
                let name = CALL.get().to_owned();
                Some([Frame { name, filename: "main.rs".into(), line: 1 }].into())
            })));
            context.allocator.record_history(Some(HistoryOptions { stacks: level, ..Default::default() })).unwrap();
            CALL.set("allocate");
            let (plain, used) = (context.block(3000, &stream), context.block(3 * MIB, &stream));
            let live = context.snapshot();
            let blocks = live.segments.iter().flat_map(|segment| &segment.blocks);
            let allocated = blocks.filter(|block| block.state == BlockState::ActiveAllocated);
            let with_stack = allocated.filter(|block| block.stack.is_some()).count();
            assert_eq!(with_stack, if level == StackLevel::Never { 0 } else { 2 });
            context.allocator.record_use(used, user.id()).unwrap();
            CALL.set("free");
            context.allocator.free(plain).unwrap();
            context.allocator.free(used).unwrap();
            // Completes frees that wait for the stream.
            context.device().synchronize().unwrap();
            CALL.set("later");
            context.block(3000, &stream);
            CALL.set("trim");
            context.trim();

            let in_entries = level >= StackLevel::Alloc;
            let snapshot = context.snapshot();
            let name_of = |id: StackId| snapshot.stacks[id.index()][0].name.as_str();
            for entry in snapshot.traces[0].iter().filter(|entry| entry.action != Action::Snapshot) {
                // The former owner of pages is unknown when they are unmapped.
                let may_have_none = entry.action == Action::SegmentUnmap && level == StackLevel::Alloc;
                assert!(entry.stack.is_some() == in_entries || may_have_none, "{entry:?}");
                let name = entry.stack.map(name_of);
                match entry.action {
                    Action::FreeRequested if level == StackLevel::All => assert_eq!(name, Some("free")),
                    Action::FreeRequested if in_entries => assert_eq!(name, Some("allocate")),
                    _ => {}
                }
            }
            let frees = |action| snapshot.traces[0].iter().filter(|entry| entry.action == action).count();
            assert_eq!((frees(Action::FreeRequested), frees(Action::FreeCompleted)), (2, 2));
            let segments = || live.segments.iter().chain(&snapshot.segments).filter(|segment| segment.stack.is_some());
            assert!(in_entries || segments().next().is_none(), "a segment has a stack");
            let names: Vec<_> = snapshot.stacks.iter().map(|stack| stack[0].name.as_str()).collect();
            assert_eq!(names.contains(&"free"), level == StackLevel::All, "{names:?}");
            assert_eq!(names.contains(&"allocate"), in_entries, "{names:?}");
        });
    }
}

thread_local! {
    /// The call that the stack hook names.
    static CALL: Cell<&'static str> = const { Cell::new("none") };
}

#[test]
fn a_snapshot_of_one_pool_has_only_its_segments() {
    each_by_default(|context| {
        let block = context.block(3000, &context.stream());
        let of = |pool| {
            let options = SnapshotOptions { pool: Some(pool), ..SnapshotOptions::default() };
            context.allocator.snapshot(options).unwrap().segments.len()
        };
        assert!(of(MemPoolId::DEFAULT) > 0);
        assert_eq!(of(MemPoolId { graph: 0, user: 77 }), 0);
        context.allocator.free(block).unwrap();
    });
}
