//! Limits, snapshots, random programs, injected faults, threads: the allocation table stays consistent.

use super::*;
use crate::common::rng::Rng;

#[test]
fn the_memory_cap_limits_requests() {
    let settings = Settings { memory_cap_bytes: Some(5 * MIB), ..Settings::default() };
    let context = TestContext::with(settings, LoggingAllocator::plain);
    let (own, other) = (context.stream(), context.stream());
    let first = context.allocate(4 * MIB, &own);
    let report = context.expect_oom(2 * MIB, &own);
    assert_eq!((report.cause, report.bytes_limit), (OomCause::Limit, Some(5 * MIB)));
    // Pending blocks count, and the request waits for them.
    crate::common::keep_busy(&other);
    context.allocator.record_use(first, other.id()).unwrap();
    context.allocator.free(first).unwrap();
    let next = context.allocate(5 * MIB, &own);
    context.allocator.free(next).unwrap();
    context.finish();
}

#[test]
fn snapshots_and_history_have_call_stacks() {
    let context = TestContext::plain();
    let stream = context.stream();
    let frame = Frame { name: "step".into(), filename: "train.rs".into(), line: 12 };
    context.allocator.observers().set_stack_hook(Some(Arc::new(move || Some(vec![frame.clone()].into()))));
    context
        .allocator
        .record_history(Some(HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() }))
        .unwrap();
    let block = context.allocate(5000, &stream);
    context.external.capacity.store(0, Ordering::SeqCst);
    context.expect_oom(7, &stream);
    let snapshot = context.allocator.snapshot(SnapshotOptions::default()).unwrap();
    let segment = &snapshot.segments[0];
    assert_eq!(
        (segment.address, segment.total_size, segment.stream),
        (block.ptr.0, 5000, stream.info().unwrap().raw.0)
    );
    assert_eq!(snapshot.stacks[segment.blocks[0].stack.unwrap().index()][0].line, 12);
    context.allocator.free(block).unwrap();
    let trace = context.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
    let actions: Vec<_> = trace.iter().map(|entry| entry.action).collect();
    let expected = [
        Action::SegmentAlloc,
        Action::Alloc,
        Action::Oom,
        Action::Snapshot,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentFree,
    ];
    assert_eq!(actions, expected);
    assert!(trace.iter().all(|entry| entry.stack.is_some()), "{trace:#?}");
    context.finish();
}

/// Random programs on three streams, with pools, drops, uses by other streams and trims.
#[test]
fn counters_agree_with_the_external_allocator_in_random_programs() {
    for seed in 0..20 {
        println!("seed: {seed}");
        let mut rng = Rng::new(seed);
        let context = if seed % 2 == 0 { TestContext::plain() } else { TestContext::hooked() };
        context.external.capacity.store(2 * MIB, Ordering::SeqCst);
        let streams = [context.stream(), context.stream(), context.stream()];
        let pools = [context.allocator.create_pool(DEVICE, PoolOptions::default()).unwrap(), MemPoolId::DEFAULT];
        let mut live: Vec<Allocation> = Vec::new();
        for _ in 0..300 {
            match rng.below(10) {
                0..=3 => {
                    let (bytes, stream) = (1 + rng.u64_below(MIB / 4), &streams[rng.below(3)]);
                    let request = Request::new(DEVICE, stream.id(), bytes).in_pool(pools[rng.below(2)]);
                    match context.allocator.allocate_raw(request) {
                        Ok(block) => {
                            context.fill(block.ptr, rng.u32() as u8, bytes, stream);
                            live.push(block);
                        }
                        Err(Error::OutOfMemory(report)) => assert_eq!(report.cause, OomCause::External),
                        Err(other) => panic!("{other}"),
                    }
                }
                4..=6 if !live.is_empty() => {
                    let block = live.swap_remove(rng.below(live.len()));
                    match rng.below(3) {
                        0 => context.allocator.free(block).unwrap(),
                        1 => context.allocator.free_raw(block.ptr).unwrap(),
                        _ => context.allocator.free_later(block),
                    }
                }
                7 | 8 if !live.is_empty() => {
                    let block = live[rng.below(live.len())];
                    context.allocator.record_use(block, streams[rng.below(3)].id()).unwrap();
                }
                9 if rng.one_in(10) => drop(context.trim()),
                _ => {}
            }
            let stats = context.stats();
            assert_eq!(stats.active_bytes.all.current, context.external.bytes_live(), "seed {seed}");
            assert_eq!(stats.allocation.all.current, live.len() as u64, "seed {seed}");
        }
        live.into_iter().for_each(|block| context.allocator.free(block).unwrap());
        context.allocator.release_pool(DEVICE, pools[0]).unwrap();
        context.finish();
    }
}

/// Pending blocks, a pool, a capture, a replay, a request that fails.
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
        // The external allocator's own calls do not fail.
        let external = LoggingAllocator::new(sim.clone());
        let made = if nth % 2 == 0 { external.plain() } else { external.with_hooks() };
        let any: Arc<dyn DeviceAllocator> = Arc::new(PluggableAllocator::new(&instance, Arc::new(made)).unwrap());
        let _ = scenario(&instance, &sim, &any);
        let fired = faulty.injected();
        faulty.clear_plan();
        scenario(&instance, &sim, &any).unwrap_or_else(|error| panic!("after call {nth} failed: {error}"));
        assert_eq!(external.live(), BTreeMap::new(), "call {nth} failed: {fired:?}");
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
fn threads_share_an_external_allocator() {
    let context = TestContext::plain();
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let context = &context;
            scope.spawn(move || {
                let stream = context.stream();
                for step in 0..200 {
                    let block = context.allocate(1 + (step * 7919 + thread * 104_729) % MIB, &stream);
                    context.fill(block.ptr, step as u8, block.bytes, &stream);
                    if step % 3 == 0 {
                        context.allocator.free_later(block);
                    } else {
                        context.allocator.free(block).unwrap();
                    }
                }
            });
        }
    });
    context.finish();
}
