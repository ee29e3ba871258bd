//! Private pools, captures and graphs over an external allocator.

use super::*;

#[test]
fn private_pools_and_their_hooks() {
    let context = TestContext::hooked();
    let (any, stream) = (context.shared(), context.stream());
    let pool = MemPool::new(&any, &context.device(), PoolOptions::default()).unwrap();
    assert_eq!(pool.id(), MemPoolId { graph: 0, user: 1 });
    let routed = {
        let _scope = pool.enter().unwrap();
        assert_eq!(pool.uses(), Ok(2));
        assert_eq!(pool.enter().map(drop), Err(Error::AlreadyRouting { pool: pool.id() }));
        context.allocate(1000, &stream)
    };
    let named = any.allocate_in(&pool, 2000, &stream).unwrap();
    let open = context.allocate(4000, &stream);
    let expected =
        ["begin (0, 1) on device 0", "allocate 1000", "end (0, 1) on device 0", "allocate 2000", "allocate 4000"];
    assert_eq!(context.log(), expected);
    let sizes = |only| {
        let snapshot = any.snapshot(SnapshotOptions { pool: only, traces: false }).unwrap();
        snapshot.segments.iter().map(|segment| (segment.pool, segment.total_size)).collect::<BTreeMap<_, _>>().len()
    };
    assert_eq!((sizes(Some(pool.id())), sizes(Some(MemPoolId::DEFAULT)), sizes(None)), (1, 1, 2));
    assert_eq!(context.stats().reserved_bytes_by_private_pools[&pool.id()].all.current, 3000);
    let has = |live: &[DevicePtr]| context.allocator.has_exactly(DEVICE, pool.id(), live).unwrap();
    assert!(has(&[named.ptr(), routed.ptr]) && !has(&[named.ptr()]) && !has(&[named.ptr(), routed.ptr, open.ptr]));

    // Blocks outlive their pool; the release hook is called by the next call.
    let id = pool.id();
    drop(pool);
    assert_eq!(context.log(), [] as [&str; 0]);
    let released = context.allocator.allocate_raw(Request::new(DEVICE, stream.id(), 1).in_pool(id));
    assert_eq!(released, Err(Error::PoolReleased { pool: id }));
    named.free().unwrap();
    context.allocator.free(routed).unwrap();
    assert_eq!(context.log(), ["release (0, 1) on device 0", "free 2000", "free 1000"]);
    assert_eq!(context.allocator.pool_uses(DEVICE, id), Err(Error::UnknownPool { pool: id, device: DEVICE }));
    context.allocator.free(open).unwrap();

    let upstream = ExternalUpstream::new(&context.instance, Arc::new(context.external.plain())).unwrap();
    let options = PoolOptions { upstream: Some(Arc::new(upstream)), ..PoolOptions::default() };
    assert!(matches!(MemPool::new(&any, &context.device(), options), Err(Error::Unsupported { .. })));
    context.finish();
}

#[test]
fn a_graph_keeps_the_memory_of_its_capture() {
    let context = TestContext::hooked();
    let (any, stream) = (context.shared(), context.device().lease_stream().unwrap());
    let mut graph = Graph::new(&any, &context.device(), GraphOptions::default()).unwrap();
    let (key, scratch) = graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4096)?;
            // Freed in the capture, but used by every replay.
            let scratch = any.allocate(4096, capture.stream())?;
            context.fill(scratch.ptr(), 7, 4096, capture.stream());
            let to = capture.buffer(key)?.ptr();
            context.driver().copy(to.into(), scratch.ptr().into(), 4096, capture.stream().id())?;
            Ok((key, scratch.ptr()))
        })
        .unwrap();
    let pool = graph.pool().unwrap().id();
    assert!(context.log().contains(&format!("begin {pool} on device 0")));
    for round in 0..20 {
        // The freed memory is not reused.
        let other = context.allocate(4096, &stream);
        assert_ne!(other.ptr, scratch);
        context.fill(other.ptr, round, 4096, &stream);
        graph.replay(&stream).unwrap();
        assert_eq!(context.byte_at(graph.buffer(key).unwrap().ptr()), 7);
        assert_eq!(context.byte_at(other.ptr), round);
        context.allocator.free(other).unwrap();
    }
    context.trim();
    assert_eq!(context.external.bytes_live(), 2 * 4096, "a trim frees no memory of a graph");
    assert_eq!(context.stats().reserved_bytes_by_private_pools[&pool].all.current, 2 * 4096);
    graph.replay(&stream).unwrap();
    context.log();
    drop(graph);
    assert_eq!(context.log(), [] as [&str; 0], "destructors make no call");
    let next = context.allocate(100, &stream);
    let log = context.log();
    assert!(log.contains(&format!("release {pool} on device 0")), "{log:?}");
    context.allocator.free(next).unwrap();
    context.finish();
}

/// A framework's stream that already captures when it is adopted: its properties cannot be queried.
#[test]
fn a_stream_adopted_during_its_capture_gets_memory() {
    use warpool::memory::pools::Upstream as _;
    let context = TestContext::plain();
    let upstream = ExternalUpstream::new(&context.instance, Arc::new(context.external.plain())).unwrap();
    let id = context.sim.create_foreign_stream(DEVICE, StreamOptions::default()).unwrap();
    context.driver().capture_begin(id, CaptureMode::Relaxed).unwrap();
    context.allocator.capture_began(DEVICE).unwrap();
    let raw = context.driver().stream_handle(id).unwrap().raw;
    // SAFETY: a simulated driver follows no handle.
    let stream = Stream::external(&context.device(), unsafe { ForeignStream::new(raw) }).unwrap();
    let refused = context.driver().stream_info(stream.id()).map_err(|error| error.code);
    assert_eq!(refused, Err(ErrorCode::StreamCaptureUnsupported));
    let block = context.allocate(1000, &stream);
    let segment = upstream.allocate(DEVICE, MIB, stream.id()).unwrap().unwrap();
    context.fill(block.ptr, 6, 1000, &stream);
    let graph = context.driver().capture_end(id).expect("the capture is valid");
    context.allocator.capture_ended(DEVICE).unwrap();
    context.driver().graph_destroy(graph).unwrap();
    upstream.free(segment, MIB, DEVICE, stream.id()).unwrap();
    context.allocator.free(block).unwrap();
    context.finish();
}

/// While one thread is in the begin hook of its pool, another opens its own: the hook runs before that returns.
#[test]
fn the_begin_hook_runs_before_a_scope_is_open() {
    let context = TestContext::plain();
    let (entered, inside) = mpsc::channel();
    let (leave, left) = mpsc::channel::<()>();
    let gate = Mutex::new(Some((entered, left)));
    let begun = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&begun);
    let external = context.external.plain().on_begin_pool(move |_, pool| {
        let first = gate.lock().unwrap().take();
        if let Some((entered, left)) = first {
            entered.send(()).unwrap();
            left.recv().unwrap();
        }
        log.lock().unwrap().push(pool);
    });
    let allocator = PluggableAllocator::new(&context.instance, Arc::new(external)).unwrap();
    let pools = [(); 2].map(|()| allocator.create_pool(DEVICE, PoolOptions::default()).unwrap());
    let open = |pool| allocator.begin_routing(DEVICE, pool, Route::Thread(thread::current().id())).unwrap();
    let notified = thread::scope(|scope| {
        scope.spawn(|| open(pools[0]));
        inside.recv().unwrap();
        let second = scope.spawn(|| {
            open(pools[1]);
            begun.lock().unwrap().contains(&pools[1])
        });
        while allocator.pool_uses(DEVICE, pools[1]) == Ok(1) {
            thread::yield_now();
        }
        // Gives a wrong implementation time to return early.
        thread::sleep(Duration::from_millis(50));
        leave.send(()).unwrap();
        second.join().unwrap()
    });
    assert!(notified, "the scope was open before the hook ran");
    assert_eq!(*begun.lock().unwrap(), pools);
    for pool in pools {
        allocator.end_routing(DEVICE, pool).unwrap();
        allocator.release_pool(DEVICE, pool).unwrap();
    }
    context.finish();
}

/// A hook that opens a scope does not wait for itself.
#[test]
fn a_hook_may_open_a_scope() {
    let context = TestContext::plain();
    let allocator = Arc::new(OnceLock::<(Arc<PluggableAllocator>, MemPoolId)>::new());
    let (inner, begun) = (Arc::clone(&allocator), Arc::new(Mutex::new(Vec::new())));
    let log = Arc::clone(&begun);
    let external = context.external.plain().on_begin_pool(move |_, pool| {
        let (allocator, other) = inner.get().unwrap();
        if pool != *other {
            allocator.begin_routing(DEVICE, *other, Route::Thread(thread::current().id())).unwrap();
        }
        log.lock().unwrap().push(pool);
    });
    let made = Arc::new(PluggableAllocator::new(&context.instance, Arc::new(external)).unwrap());
    let pools = [(); 2].map(|()| made.create_pool(DEVICE, PoolOptions::default()).unwrap());
    allocator.set((Arc::clone(&made), pools[1])).expect("set once");
    made.begin_routing(DEVICE, pools[0], Route::Thread(thread::current().id())).unwrap();
    assert_eq!(*begun.lock().unwrap(), pools);
    context.finish();
}

#[test]
fn blocks_of_a_dropped_graph_wait_for_its_replays() {
    let context = TestContext::plain();
    context.external.keeps_memory.store(true, Ordering::SeqCst);
    let (any, stream, other) = (context.shared(), context.device().lease_stream().unwrap(), context.stream());
    let mut graph = Graph::new(&any, &context.device(), GraphOptions::default()).unwrap();
    graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let key = capture.allocate(MIB)?;
            let stream = capture.stream().clone();
            capture.fill(key, Pattern::U8(1), MIB, &stream)
        })
        .unwrap();
    context.sim.pause_stream(other.id()).unwrap();
    graph.replay(&other).unwrap();
    drop(graph);
    context.log();
    for _ in 0..3 {
        let next = context.allocate(100, &stream);
        context.allocator.free(next).unwrap();
    }
    assert!(!context.log().contains(&"free 1048576".to_owned()), "the replay is paused");
    context.sim.run_paused(other.id(), u64::MAX).unwrap();
    context.sim.resume_stream(other.id()).unwrap();
    context.finish();
}

#[test]
fn a_block_used_in_a_capture_is_freed_after_it() {
    for recorded in [false, true] {
        let context = TestContext::hooked();
        let (own, capturing) = (context.stream(), context.device().lease_stream().unwrap());
        // Either the block's own stream is capturing, or another that uses it. The hook handles other streams, but not
        // in a capture.
        let block = if recorded { context.allocate(MIB, &own) } else { context.allocate(MIB, &capturing) };
        let pools = context.shared();
        pools.pools().unwrap().capture_began(DEVICE).unwrap();
        context.driver().capture_begin(capturing.id(), CaptureMode::Global).unwrap();
        context.fill(block.ptr, 1, MIB, &capturing);
        if recorded {
            context.allocator.record_use(block, capturing.id()).unwrap();
        }
        context.allocator.free(block).unwrap();
        // Calls for both streams meanwhile invalidate nothing.
        let inside = context.allocate(100, &capturing);
        let outside = context.allocate(200, &own);
        context.allocator.free(outside).unwrap();
        context.trim();
        assert_eq!(context.stats().active.all.current, 2, "recorded: {recorded}");
        let log = context.log();
        assert!(!log.contains(&"reset".to_owned()), "reset may synchronize the device: {log:?}");
        let graph = context.driver().capture_end(capturing.id()).expect("the capture is valid");
        pools.pools().unwrap().capture_ended(DEVICE).unwrap();
        context.driver().graph_destroy(graph).unwrap();
        context.allocator.free(inside).unwrap();
        assert_eq!(context.stats().active.all.current, 0, "recorded: {recorded}");
        context.finish();
    }
}
