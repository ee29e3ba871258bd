//! Limits, snapshots, random programs, failing drivers, threads: the books are right.

use super::*;

#[test]
fn a_cap_of_the_settings_holds() {
    let settings = Settings { memory_cap_bytes: Some(5 * MIB), ..Settings::default() };
    let context = TestContext::with(settings, Notebook::plug);
    let (own, other) = (context.stream(), context.stream());
    let held = context.give(4 * MIB, &own);
    let report = context.expect_oom(2 * MIB, &own);
    assert_eq!((report.cause, report.bytes_limit), (OomCause::Limit, Some(5 * MIB)));
    // What other streams still use counts, and is waited for.
    crate::common::keep_busy(&other);
    context.allocator.record_use(held, other.id()).unwrap();
    context.allocator.free(held).unwrap();
    let next = context.give(5 * MIB, &own);
    context.allocator.free(next).unwrap();
    context.finish();
}

#[test]
fn snapshots_and_histories_show_blocks_with_their_stacks() {
    let context = TestContext::plain();
    let stream = context.stream();
    let frame = Frame { name: "step".into(), filename: "train.rs".into(), line: 12 };
    context.allocator.observers().set_stack_hook(Some(Arc::new(move || Some(vec![frame.clone()].into()))));
    context
        .allocator
        .record_history(Some(HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() }))
        .unwrap();
    let given = context.give(5000, &stream);
    context.book.capacity.store(0, Ordering::SeqCst);
    context.expect_oom(7, &stream);
    let snapshot = context.allocator.snapshot(SnapshotOptions::default()).unwrap();
    let segment = &snapshot.segments[0];
    assert_eq!(
        (segment.address, segment.total_size, segment.stream),
        (given.ptr.0, 5000, stream.info().unwrap().raw.0)
    );
    assert_eq!(snapshot.stacks[segment.blocks[0].stack.unwrap().0 as usize][0].line, 12);
    context.allocator.free(given).unwrap();
    let trace = context.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
    let actions: Vec<_> = trace.iter().map(|entry| entry.action).collect();
    let whole = [
        Action::SegmentAlloc,
        Action::Alloc,
        Action::Oom,
        Action::Snapshot,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentFree,
    ];
    assert_eq!(actions, whole);
    assert!(trace.iter().all(|entry| entry.stack.is_some()), "{trace:#?}");
    context.finish();
}

/// Random programs over a plug that compares: on two streams, with pools, late frees, uses by others and trims.
#[test]
fn random_programs_keep_the_books() {
    for seed in 0..20 {
        println!("seed: {seed}");
        let mut luck = seed;
        let mut draw = move |n: u64| {
            luck = u64::wrapping_add(luck, 0x9e37_79b9_7f4a_7c15);
            let mut z = luck;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) % n
        };
        let context = if seed % 2 == 0 { TestContext::plain() } else { TestContext::hooked() };
        context.book.capacity.store(2 * MIB, Ordering::SeqCst);
        let streams = [context.stream(), context.stream(), context.stream()];
        let pools = [context.allocator.create_pool(DEVICE, PoolOptions::default()).unwrap(), MemPoolId::DEFAULT];
        let mut live: Vec<Allocation> = Vec::new();
        for _ in 0..300 {
            match draw(10) {
                0..=3 => {
                    let (bytes, stream) = (1 + draw(MIB / 4), &streams[draw(3) as usize]);
                    let request = Request::new(DEVICE, stream.id(), bytes).in_pool(pools[draw(2) as usize]);
                    match context.allocator.allocate_raw(request) {
                        Ok(given) => {
                            context.fill(given.ptr, draw(256) as u8, bytes, stream);
                            live.push(given);
                        }
                        Err(Error::OutOfMemory(report)) => assert_eq!(report.cause, OomCause::Upstream),
                        Err(other) => panic!("{other}"),
                    }
                }
                4..=6 if !live.is_empty() => {
                    let given = live.swap_remove(draw(live.len() as u64) as usize);
                    match draw(3) {
                        0 => context.allocator.free(given).unwrap(),
                        1 => context.allocator.free_raw(given.ptr).unwrap(),
                        _ => context.allocator.free_later(given),
                    }
                }
                7 | 8 if !live.is_empty() => {
                    let given = live[draw(live.len() as u64) as usize];
                    context.allocator.record_use(given, streams[draw(3) as usize].id()).unwrap();
                }
                9 if draw(10) == 0 => drop(context.trim()),
                _ => {}
            }
            let stats = context.stats();
            assert_eq!(stats.active_bytes.all.current, context.book.bytes_live(), "seed {seed}");
            assert_eq!(stats.allocation.all.current, live.len() as u64, "seed {seed}");
        }
        live.into_iter().for_each(|given| context.allocator.free(given).unwrap());
        context.allocator.release_pool(DEVICE, pools[0]).unwrap();
        context.finish();
    }
}

/// Everything that asks the driver: blocks that wait for streams, a capture, a replay, pools, a request that fails.
fn scenario(instance: &Instance, sim: &SimDriver, any: &Arc<dyn DeviceAllocator>) -> warpool::Result<()> {
    let device = instance.device(0)?;
    let (own, other) = (device.pool_stream()?, device.pool_stream()?);
    let shared = any.allocate(MIB, &own)?;
    sim.fill(shared.ptr(), Pattern::U8(1), MIB, other.id())?;
    shared.record_use(&other)?;
    let late = any.allocate(2 * MIB, &own)?;
    late.record_use(&other)?;
    drop(late);
    shared.free()?;
    let pool = MemPool::new(any, &device, PoolOptions::default())?;
    let routed = {
        let _scope = pool.enter()?;
        any.allocate(1000, &own)?
    };
    pool.close()?;
    let lease = device.lease_stream()?;
    let mut graph = Graph::new(any, &device, GraphOptions::default())?;
    graph.capture(&lease, CaptureOptions::default(), |capture| {
        let key = capture.allocate(4096)?;
        drop(any.allocate(4096, capture.stream())?);
        let stream = capture.stream().clone();
        capture.fill(key, Pattern::U8(3), 4096, &stream)
    })?;
    graph.replay(&other)?;
    graph.reset()?;
    routed.free()?;
    let outcome = any.allocate(1 << 50, &own);
    if !matches!(outcome, Err(Error::OutOfMemory(_))) {
        outcome?;
    }
    any.set_memory_fraction(DEVICE, 0.9)?;
    any.trim(DEVICE, MemPoolId::DEFAULT)?;
    Ok(())
}

#[test]
fn every_driver_call_may_fail_once() {
    for nth in 1.. {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let plan = FaultPlan::new().fail_nth_of_all(nth, ErrorCode::NotPermitted).excluding(FaultPlan::CLEANUP);
        let faulty = Arc::new(Faulty::new(sim.clone(), plan));
        let Ok(instance) = Instance::new(faulty.clone()) else { continue };
        // The plug's own calls go past the faults.
        let book = Notebook::new(sim.clone());
        let plug = if nth % 2 == 0 { book.plug() } else { book.plug_with_hooks() };
        let any: Arc<dyn DeviceAllocator> = Arc::new(PluggableAllocator::new(&instance, Arc::new(plug)).unwrap());
        let _ = scenario(&instance, &sim, &any);
        let fired = faulty.injected();
        faulty.clear_plan();
        scenario(&instance, &sim, &any).unwrap_or_else(|error| panic!("after call {nth} failed: {error}"));
        assert_eq!(book.live(), BTreeMap::new(), "call {nth} failed: {fired:?}");
        let stats = any.stats(DEVICE).unwrap();
        assert_eq!((stats.active.all.current, stats.allocation.all.current), (0, 0), "call {nth} failed: {fired:?}");
        assert_eq!(sim.object_counts().allocations, 0, "call {nth} failed: {fired:?}");
        assert_eq!(sim.hazards(), [], "call {nth} failed: {fired:?}");
        if fired.is_empty() {
            assert!(nth > 60, "the scenario made only {nth} calls");
            return;
        }
    }
}

#[test]
fn threads_share_a_plug() {
    let context = TestContext::plain();
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let context = &context;
            scope.spawn(move || {
                let stream = context.stream();
                for step in 0..200 {
                    let given = context.give(1 + (step * 7919 + thread * 104_729) % MIB, &stream);
                    context.fill(given.ptr, step as u8, given.bytes, &stream);
                    if step % 3 == 0 {
                        context.allocator.free_later(given)
                    } else {
                        context.allocator.free(given).unwrap()
                    }
                }
            });
        }
    });
    context.finish();
}
