//! What the plug is called with and when, and what becomes of its mistakes.

use super::*;

#[test]
fn the_plug_is_called_with_what_was_asked_for_and_gets_the_same_back() {
    let context = TestContext::plain();
    let (one, two) = (context.stream(), context.stream());
    let far = context.instance.device(1).unwrap().pool_stream().unwrap();
    let given = [context.give(1, &one), context.give(1000, &two), context.give(3 * MIB, &one)];
    let there = context.allocator.allocate_raw(Request::new(DeviceId(1), far.id(), 77)).unwrap();
    let live = context.book.live();
    for (what, stream) in [(given[0], &one), (given[1], &two), (given[2], &one), (there, &far)] {
        let (bytes, device, of) = live[&what.ptr.0];
        assert_eq!((bytes, device, of.id), (what.bytes_requested, what.device, stream.id()));
        assert_eq!((what.bytes, of.raw), (bytes, stream.info().unwrap().raw), "sizes are not rounded");
    }
    assert_eq!(context.give(0, &one).ptr, DevicePtr(0));
    // The notebook compares what comes back with what it gave.
    for what in given {
        context.allocator.free_raw(what.ptr).unwrap();
    }
    context.allocator.free(there).unwrap();
    let words = ["give 1", "give 1000", "give 3145728", "give 77", "take 1", "take 1000", "take 3145728", "take 77"];
    assert_eq!(context.book.read(), words);
    context.finish();
}

#[test]
fn a_null_address_is_out_of_memory_with_a_report() {
    let context = TestContext::plain();
    let stream = context.stream();
    context.book.capacity.store(10 * MIB, Ordering::SeqCst);
    let told = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&told);
    context
        .allocator
        .observers()
        .attach_oom_observer(Arc::new(move |report| seen.lock().unwrap().push(report.clone())));
    let held = context.give(8 * MIB, &stream);
    let report = context.expect_oom(3 * MIB, &stream);
    assert_eq!((report.cause, report.device, report.capturing), (OomCause::Upstream, DEVICE, false));
    assert_eq!((report.bytes_requested, report.bytes_segment), (3 * MIB, 3 * MIB));
    assert_eq!((report.bytes_allocated, report.bytes_reserved, report.bytes_limit), (8 * MIB, 8 * MIB, None));
    assert!(report.bytes_free > GIB && report.bytes_total > report.bytes_free);
    assert!(report.to_string().starts_with("CUDA out of memory. Tried to allocate 3.00 MiB."), "{report}");
    assert_eq!(*told.lock().unwrap(), [report]);
    assert_eq!((context.stats().num_ooms, context.stats().num_alloc_retries), (1, 1));

    // Null and none are the same.
    let nothing = FnAllocator::new(|_, _, _| Ok(Some(DevicePtr(0))), |_, _, _, _| Ok(()));
    let empty = PluggableAllocator::new(&context.instance, Arc::new(nothing)).unwrap();
    let outcome = empty.allocate_raw(Request::new(DEVICE, stream.id(), 1));
    assert!(matches!(outcome, Err(Error::OutOfMemory(_))), "{outcome:?}");

    // A callback under pressure may help.
    let (weak, spare) = (Arc::downgrade(&context.allocator), Mutex::new(Some(held)));
    context.allocator.observers().attach_pressure_callback(Arc::new(move |_| {
        let Some(held) = spare.lock().unwrap().take() else { return false };
        weak.upgrade().unwrap().free(held).unwrap();
        true
    }));
    let more = context.give(10 * MIB, &stream);
    context.allocator.free(more).unwrap();
    assert_eq!(context.stats().num_ooms, 1);
    context.finish();
}

#[test]
fn errors_of_the_plug_are_passed_on() {
    let context = TestContext::plain();
    let stream = context.stream();
    let why = |text: &str| Error::ExternalAllocator { why: text.to_owned() };
    let plug = FnAllocator::new(
        |_, _, _| Err(Error::ExternalAllocator { why: "no way".into() }),
        |_, _, _, _| Err(Error::ExternalAllocator { why: "not mine".into() }),
    );
    let refusing = PluggableAllocator::new(&context.instance, Arc::new(plug)).unwrap();
    assert_eq!(refusing.allocate_raw(Request::new(DEVICE, stream.id(), 1)), Err(why("no way")));
    assert_eq!(refusing.stats(DEVICE).unwrap().allocation.all.allocated, 0);

    let failed = FnAllocator::new(|_, _, _| Ok(None), |_, _, _, _| Ok(()))
        .on_init(|_| Err(Error::ExternalAllocator { why: "late".into() }));
    assert_eq!(PluggableAllocator::new(&context.instance, Arc::new(failed)).map(drop), Err(why("late")));

    // A free that fails is reported, and the block is gone from the books.
    let plug = FnAllocator::new(
        |_, _, _| Ok(Some(DevicePtr(4096))),
        |_, _, _, _| Err(Error::ExternalAllocator { why: "not mine".into() }),
    );
    let keeping = PluggableAllocator::new(&context.instance, Arc::new(plug)).unwrap();
    let given = keeping.allocate_raw(Request::new(DEVICE, stream.id(), 100)).unwrap();
    assert_eq!(keeping.free(given), Err(why("not mine")));
    assert_eq!(keeping.free(given), Err(Error::UnknownPointer { ptr: given.ptr }));
    assert_eq!(keeping.stats(DEVICE).unwrap().reserved_bytes.all.current, 0);
    context.finish();
}

#[test]
fn an_address_that_is_taken_is_an_error() {
    let context = TestContext::plain();
    let stream = context.stream();
    let next = Arc::new(AtomicU64::new(0x1_0000));
    let gives = Arc::clone(&next);
    let plug = FnAllocator::new(move |_, _, _| Ok(Some(DevicePtr(gives.load(Ordering::SeqCst)))), |_, _, _, _| Ok(()));
    let allocator = PluggableAllocator::new(&context.instance, Arc::new(plug)).unwrap();
    let ask = |device: u32, stream: &Stream| allocator.allocate_raw(Request::new(DeviceId(device), stream.id(), 100));
    let first = ask(0, &stream).unwrap();
    let far = context.instance.device(1).unwrap().pool_stream().unwrap();
    for (at, device, on) in [(0x1_0000, 0, &stream), (0x1_0040, 0, &stream), (0xffff, 0, &stream), (0x1_0000, 1, &far)]
    {
        next.store(at, Ordering::SeqCst);
        let taken = Error::ExternalOverlap { ptr: DevicePtr(at), bytes: 100, live: first.ptr, live_bytes: 100 };
        assert_eq!(ask(device, on), Err(taken.clone()));
        assert!(taken.to_string().contains("0x10000"), "{taken}");
    }
    assert_eq!(allocator.find(first.ptr), Ok(first));
    assert_eq!(allocator.stats(DEVICE).unwrap().allocation.all.current, 1);
    // Once it is back with the plug, it may come again.
    allocator.free(first).unwrap();
    next.store(0x1_0040, Ordering::SeqCst);
    let again = ask(0, &stream).unwrap();
    allocator.free(again).unwrap();
    context.finish();
}

#[test]
fn a_panic_of_the_plug_leaves_the_books_right() {
    let context = TestContext::plain();
    let stream = context.stream();
    context.allocator.set_memory_fraction(DEVICE, 0.5).unwrap();
    let pool = MemPool::new(&context.any(), &context.device(), PoolOptions::default()).unwrap();
    let limit = context.device().properties().bytes_total / 2;
    let half = limit / 2 + 1;
    for _ in 0..3 {
        context.book.panics.store(true, Ordering::SeqCst);
        let request = Request::new(DEVICE, stream.id(), half).in_pool(pool.id());
        let outcome = catch_unwind(AssertUnwindSafe(|| context.allocator.allocate_raw(request)));
        assert!(outcome.is_err(), "the plug should have panicked");
    }
    // What was promised to them is free again.
    assert_eq!(context.stats().active.all.allocated, 0);
    let large = context.give(half, &stream);
    context.book.panics.store(true, Ordering::SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| context.allocator.free(large))).is_err());
    assert_eq!(context.stats().active.all.current, 0);
    assert_eq!(context.allocator.find(large.ptr), Err(Error::UnknownPointer { ptr: large.ptr }));
    let again = context.give(half, &stream);
    context.allocator.free(again).unwrap();
    let id = pool.id();
    drop(pool);
    assert_eq!(context.allocator.pool_uses(DEVICE, id), Err(Error::UnknownPool { pool: id, device: DEVICE }));
    context.finish();
}

#[test]
fn a_block_goes_back_when_other_streams_have_passed() {
    let context = TestContext::plain();
    context.book.keeps.store(true, Ordering::SeqCst);
    let (own, other, third) = (context.stream(), context.stream(), context.stream());
    let (slow, quick) = (context.give(MIB, &own), context.give(2 * MIB, &own));
    context.sim.pause_stream(other.id()).unwrap();
    context.fill(slow.ptr, 1, MIB, &other);
    context.allocator.record_use(slow, other.id()).unwrap();
    context.fill(quick.ptr, 1, MIB, &third);
    context.allocator.record_use(quick, third.id()).unwrap();
    context.book.read();
    context.allocator.free(slow).unwrap();
    context.allocator.free_later(quick);
    assert_eq!(context.book.read(), [] as [&str; 0], "destructors call nobody, and a stream is behind");
    let stats = context.stats();
    assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 2));
    third.synchronize().unwrap();
    let next = context.give(100, &own);
    // The one behind holds back no other. Its mark is put by this call, and asked about by the next.
    context.allocator.free(next).unwrap();
    let words = context.book.read();
    assert!(words.contains(&"take 2097152".to_owned()) && !words.contains(&"take 1048576".to_owned()), "{words:?}");
    context.sim.run_paused(other.id(), u64::MAX).unwrap();
    context.sim.resume_stream(other.id()).unwrap();
    other.synchronize().unwrap();
    let next = context.give(100, &own);
    assert_eq!(context.book.read()[0], "take 1048576");
    context.allocator.free(next).unwrap();
    context.finish();
}

#[test]
fn a_plug_with_the_hook_is_told_of_other_streams_and_takes_care() {
    let context = TestContext::hooked();
    let (own, other) = (context.stream(), context.stream());
    let given = context.give(MIB, &own);
    context.sim.pause_stream(other.id()).unwrap();
    context.allocator.record_use(given, other.id()).unwrap();
    context.allocator.record_use(given, own.id()).unwrap();
    context.allocator.free(given).unwrap();
    let used = format!("{} used by {}", given.ptr, other.id());
    assert_eq!(context.book.read(), ["give 1048576".to_owned(), used, "take 1048576".to_owned()]);
    context.sim.resume_stream(other.id()).unwrap();
    context.finish();
}

#[test]
fn hooks_are_called() {
    let context = TestContext::with(Settings::default(), Notebook::plug_with_hooks);
    assert_eq!(context.book.read(), ["init 2"]);
    context.allocator.set_memory_fraction(DEVICE, 0.25).unwrap();
    assert_eq!(context.allocator.memory_fraction(DEVICE), Ok(0.25));
    assert!(context.allocator.set_memory_fraction(DEVICE, 2.0).is_err());
    context.trim();
    assert_eq!(context.book.read(), ["fraction 0.25 of device 0", "reset"]);
    // The books keep the share, whatever the plug does about it.
    let stream = context.stream();
    let report = context.expect_oom(context.device().properties().bytes_total / 2, &stream);
    assert_eq!(report.cause, OomCause::Limit);
    assert_eq!(context.book.read(), [] as [&str; 0]);
    context.finish();
}

#[test]
fn the_base_of_an_address_comes_from_the_hook_or_from_the_books() {
    let context = TestContext::hooked();
    let given = context.give(10_000, &context.stream());
    let base = context.allocator.base_allocation(given.ptr.offset(5)).unwrap();
    assert_eq!((base.ptr, base.bytes), (given.ptr, Some(10_000)));
    let elsewhere = context.allocator.base_allocation(DevicePtr(0x305)).unwrap();
    assert_eq!(
        (elsewhere.ptr, elsewhere.bytes),
        (DevicePtr(0x300), None),
        "the plug's word, which the books do not know"
    );
    context.allocator.free(given).unwrap();
    context.finish();

    let context = TestContext::plain();
    let given = context.give(10_000, &context.stream());
    let base = context.allocator.base_allocation(given.ptr.offset(9_999)).unwrap();
    assert_eq!((base.ptr, base.bytes), (given.ptr, Some(10_000)));
    let outside = given.ptr.offset(10_000);
    assert_eq!(context.allocator.base_allocation(outside), Err(Error::UnknownPointer { ptr: outside }));
    context.allocator.free(given).unwrap();
    context.finish();
}

#[test]
fn streams_that_are_gone_or_elsewhere() {
    let context = TestContext::plain();
    let far = context.instance.device(1).unwrap().pool_stream().unwrap();
    let wrong = Error::StreamDevice { device: DEVICE, stream: far.id(), owner: DeviceId(1) };
    assert_eq!(context.refused(100, &far), wrong);
    // Used by a stream of another device it may be.
    let given = context.give(100, &context.stream());
    context.allocator.record_use(given, far.id()).unwrap();
    context.allocator.free(given).unwrap();
    assert_eq!(context.refused(100, &far), wrong);

    let short: StreamId = context.driver().stream_create(DEVICE, StreamOptions::default()).unwrap();
    let request = Request::new(DEVICE, short, 5000);
    let given = context.allocator.allocate_raw(request).unwrap();
    context.driver().stream_destroy(short).unwrap();
    assert!(
        matches!(context.allocator.allocate_raw(request), Err(Error::Driver(_))),
        "its handle must not reach the plug"
    );
    // The notebook allows another stream if its own is gone.
    context.allocator.free(given).unwrap();
    assert_eq!(context.stats().active.all.current, 0);
    context.forgive_stale_streams();
    context.finish();
}
