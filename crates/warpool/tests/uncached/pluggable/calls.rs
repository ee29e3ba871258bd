//! Which calls an external allocator gets, and how its errors are handled.

use super::*;

#[test]
fn frees_have_the_arguments_of_their_allocations() {
    let context = TestContext::plain();
    let (one, two) = (context.stream(), context.stream());
    let far = context.instance.device(1).unwrap().pool_stream().unwrap();
    let block = [context.allocate(1, &one), context.allocate(1000, &two), context.allocate(3 * MIB, &one)];
    let there = context.allocator.allocate_raw(Request::new(DeviceId(1), far.id(), 77)).unwrap();
    let live = context.external.live();
    for (what, stream) in [(block[0], &one), (block[1], &two), (block[2], &one), (there, &far)] {
        let (bytes, device, of) = live[&what.ptr.0];
        assert_eq!((bytes, device, of.id), (what.bytes_requested, what.device, stream.id()));
        assert_eq!((what.bytes, of.raw), (bytes, stream.info().unwrap().raw), "sizes are not rounded");
    }
    assert_eq!(context.allocate(0, &one).ptr, DevicePtr(0));
    // The external allocator compares each free with its allocation.
    for what in block {
        context.allocator.free_raw(what.ptr).unwrap();
    }
    context.allocator.free(there).unwrap();
    let log = [
        "allocate 1",
        "allocate 1000",
        "allocate 3145728",
        "allocate 77",
        "free 1",
        "free 1000",
        "free 3145728",
        "free 77",
    ];
    assert_eq!(context.log(), log);
    context.finish();
}

#[test]
fn a_null_address_is_out_of_memory_with_a_report() {
    let context = TestContext::plain();
    let stream = context.stream();
    context.external.capacity.store(10 * MIB, Ordering::SeqCst);
    let observed = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&observed);
    context
        .allocator
        .observers()
        .attach_oom_observer(Arc::new(move |report| seen.lock().unwrap().push(report.clone())));
    let held = context.allocate(8 * MIB, &stream);
    let report = context.expect_oom(3 * MIB, &stream);
    assert_eq!((report.cause, report.device, report.capturing), (OomCause::External, DEVICE, false));
    assert_eq!((report.bytes_requested, report.bytes_segment), (3 * MIB, 3 * MIB));
    assert_eq!((report.bytes_allocated, report.bytes_reserved, report.bytes_limit), (8 * MIB, 8 * MIB, None));
    assert!(report.bytes_free > GIB && report.bytes_total > report.bytes_free);
    assert!(report.to_string().starts_with("CUDA out of memory. Tried to allocate 3.00 MiB."), "{report}");
    assert_eq!(*observed.lock().unwrap(), [report]);
    assert_eq!((context.stats().num_ooms, context.stats().num_alloc_retries), (1, 1));

    // A null address means the same as `None`.
    let nothing = FnAllocator::new(|_, _, _| Ok(Some(DevicePtr(0))), |_, _, _, _| Ok(()));
    let empty = PluggableAllocator::new(&context.instance, Arc::new(nothing)).unwrap();
    let outcome = empty.allocate_raw(Request::new(DEVICE, stream.id(), 1));
    assert!(matches!(outcome, Err(Error::OutOfMemory(_))), "{outcome:?}");

    // A pressure callback may free memory.
    let (weak, spare) = (Arc::downgrade(&context.allocator), Mutex::new(Some(held)));
    context.allocator.observers().attach_pressure_callback(Arc::new(move |_| {
        let Some(held) = spare.lock().unwrap().take() else { return false };
        weak.upgrade().unwrap().free(held).unwrap();
        true
    }));
    let more = context.allocate(10 * MIB, &stream);
    context.allocator.free(more).unwrap();
    assert_eq!(context.stats().num_ooms, 1);
    context.finish();
}

#[test]
fn errors_of_the_external_allocator_are_returned() {
    let context = TestContext::plain();
    let stream = context.stream();
    let why = |text: &str| Error::ExternalAllocator { why: text.to_owned() };
    let external = FnAllocator::new(
        |_, _, _| Err(Error::ExternalAllocator { why: "no way".into() }),
        |_, _, _, _| Err(Error::ExternalAllocator { why: "not mine".into() }),
    );
    let refusing = PluggableAllocator::new(&context.instance, Arc::new(external)).unwrap();
    assert_eq!(refusing.allocate_raw(Request::new(DEVICE, stream.id(), 1)), Err(why("no way")));
    assert_eq!(refusing.stats(DEVICE).unwrap().allocation.all.allocated, 0);

    let failed = FnAllocator::new(|_, _, _| Ok(None), |_, _, _, _| Ok(()))
        .on_init(|_| Err(Error::ExternalAllocator { why: "late".into() }));
    assert_eq!(PluggableAllocator::new(&context.instance, Arc::new(failed)).map(drop), Err(why("late")));

    // A failed free is reported, and the block is removed from the table.
    let external = FnAllocator::new(
        |_, _, _| Ok(Some(DevicePtr(4096))),
        |_, _, _, _| Err(Error::ExternalAllocator { why: "not mine".into() }),
    );
    let keeping = PluggableAllocator::new(&context.instance, Arc::new(external)).unwrap();
    let block = keeping.allocate_raw(Request::new(DEVICE, stream.id(), 100)).unwrap();
    assert_eq!(keeping.free(block), Err(why("not mine")));
    assert_eq!(keeping.free(block), Err(Error::UnknownPointer { ptr: block.ptr }));
    assert_eq!(keeping.stats(DEVICE).unwrap().reserved_bytes.all.current, 0);
    context.finish();
}

#[test]
fn an_overlapping_address_is_an_error() {
    let context = TestContext::plain();
    let stream = context.stream();
    let next = Arc::new(AtomicU64::new(0x1_0000));
    let address = Arc::clone(&next);
    let external =
        FnAllocator::new(move |_, _, _| Ok(Some(DevicePtr(address.load(Ordering::SeqCst)))), |_, _, _, _| Ok(()));
    let allocator = PluggableAllocator::new(&context.instance, Arc::new(external)).unwrap();
    let ask = |device: u32, stream: &Stream| allocator.allocate_raw(Request::new(DeviceId(device), stream.id(), 100));
    let first = ask(0, &stream).unwrap();
    let far = context.instance.device(1).unwrap().pool_stream().unwrap();
    for (at, device, on) in [(0x1_0000, 0, &stream), (0x1_0040, 0, &stream), (0xffff, 0, &stream), (0x1_0000, 1, &far)]
    {
        next.store(at, Ordering::SeqCst);
        let overlap = Error::ExternalOverlap { ptr: DevicePtr(at), bytes: 100, live: first.ptr, live_bytes: 100 };
        assert_eq!(ask(device, on), Err(overlap.clone()));
        assert!(overlap.to_string().contains("0x10000"), "{overlap}");
    }
    assert_eq!(allocator.find(first.ptr), Ok(first));
    assert_eq!(allocator.stats(DEVICE).unwrap().allocation.all.current, 1);
    // Once freed, the address may be reused.
    allocator.free(first).unwrap();
    next.store(0x1_0040, Ordering::SeqCst);
    let again = ask(0, &stream).unwrap();
    allocator.free(again).unwrap();
    context.finish();
}

#[test]
fn a_panic_of_the_external_allocator_leaves_the_table_consistent() {
    let context = TestContext::plain();
    let stream = context.stream();
    context.allocator.set_memory_fraction(DEVICE, 0.5).unwrap();
    let pool = MemPool::new(&context.shared(), &context.device(), PoolOptions::default()).unwrap();
    let limit = context.device().properties().bytes_total / 2;
    let half = limit / 2 + 1;
    for _ in 0..3 {
        context.external.panics.store(true, Ordering::SeqCst);
        let request = Request::new(DEVICE, stream.id(), half).in_pool(pool.id());
        let outcome = catch_unwind(AssertUnwindSafe(|| context.allocator.allocate_raw(request)));
        assert!(outcome.is_err(), "a panic was injected");
    }
    // Their quota is released.
    assert_eq!(context.stats().active.all.allocated, 0);
    let large = context.allocate(half, &stream);
    context.external.panics.store(true, Ordering::SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| context.allocator.free(large))).is_err());
    assert_eq!(context.stats().active.all.current, 0);
    assert_eq!(context.allocator.find(large.ptr), Err(Error::UnknownPointer { ptr: large.ptr }));
    let again = context.allocate(half, &stream);
    context.allocator.free(again).unwrap();
    let id = pool.id();
    drop(pool);
    assert_eq!(context.allocator.pool_uses(DEVICE, id), Err(Error::UnknownPool { pool: id, device: DEVICE }));
    context.finish();
}

#[test]
fn a_block_is_freed_when_other_streams_have_passed() {
    let context = TestContext::plain();
    context.external.keeps_memory.store(true, Ordering::SeqCst);
    let (own, other, third) = (context.stream(), context.stream(), context.stream());
    let (slow, quick) = (context.allocate(MIB, &own), context.allocate(2 * MIB, &own));
    context.sim.pause_stream(other.id()).unwrap();
    context.fill(slow.ptr, 1, MIB, &other);
    context.allocator.record_use(slow, other.id()).unwrap();
    context.fill(quick.ptr, 1, MIB, &third);
    context.allocator.record_use(quick, third.id()).unwrap();
    context.log();
    context.allocator.free(slow).unwrap();
    context.allocator.free_later(quick);
    assert_eq!(context.log(), [] as [&str; 0], "a destructor makes no call, and a stream has not passed");
    let stats = context.stats();
    assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 2));
    third.synchronize().unwrap();
    let next = context.allocate(100, &own);
    // The paused stream delays no other block. The fence of the dropped one is recorded by the first call, and polled
    // by the next.
    context.allocator.free(next).unwrap();
    let log = context.log();
    assert!(log.contains(&"free 2097152".to_owned()) && !log.contains(&"free 1048576".to_owned()), "{log:?}");
    context.sim.run_paused(other.id(), u64::MAX).unwrap();
    context.sim.resume_stream(other.id()).unwrap();
    other.synchronize().unwrap();
    let next = context.allocate(100, &own);
    assert_eq!(context.log()[0], "free 1048576");
    context.allocator.free(next).unwrap();
    context.finish();
}

#[test]
fn with_the_record_stream_hook_blocks_are_freed_at_once() {
    let context = TestContext::hooked();
    let (own, other) = (context.stream(), context.stream());
    let block = context.allocate(MIB, &own);
    context.sim.pause_stream(other.id()).unwrap();
    context.allocator.record_use(block, other.id()).unwrap();
    context.allocator.record_use(block, own.id()).unwrap();
    context.allocator.free(block).unwrap();
    let used = format!("{} used by {}", block.ptr, other.id());
    assert_eq!(context.log(), ["allocate 1048576".to_owned(), used, "free 1048576".to_owned()]);
    context.sim.resume_stream(other.id()).unwrap();
    context.finish();
}

#[test]
fn hooks_are_called_with_their_arguments() {
    let context = TestContext::with(Settings::default(), LoggingAllocator::with_hooks);
    assert_eq!(context.log(), ["init 2"]);
    context.allocator.set_memory_fraction(DEVICE, 0.25).unwrap();
    assert_eq!(context.allocator.memory_fraction(DEVICE), Ok(0.25));
    assert!(context.allocator.set_memory_fraction(DEVICE, 2.0).is_err());
    context.trim();
    assert_eq!(context.log(), ["fraction 0.25 of device 0", "reset"]);
    // The allocator enforces the fraction itself.
    let stream = context.stream();
    let report = context.expect_oom(context.device().properties().bytes_total / 2, &stream);
    assert_eq!(report.cause, OomCause::Limit);
    assert_eq!(context.log(), [] as [&str; 0]);
    context.finish();
}

#[test]
fn the_base_of_an_address_is_from_the_hook_or_the_recorded_ranges() {
    let context = TestContext::hooked();
    let block = context.allocate(10_000, &context.stream());
    let base = context.allocator.base_allocation(block.ptr.offset(5)).unwrap();
    assert_eq!((base.ptr, base.bytes), (block.ptr, Some(10_000)));
    let elsewhere = context.allocator.base_allocation(DevicePtr(0x305)).unwrap();
    assert_eq!(
        (elsewhere.ptr, elsewhere.bytes),
        (DevicePtr(0x300), None),
        "the hook's answer, for an address that was not recorded"
    );
    context.allocator.free(block).unwrap();
    context.finish();

    let context = TestContext::plain();
    let block = context.allocate(10_000, &context.stream());
    let base = context.allocator.base_allocation(block.ptr.offset(9_999)).unwrap();
    assert_eq!((base.ptr, base.bytes), (block.ptr, Some(10_000)));
    let outside = block.ptr.offset(10_000);
    assert_eq!(context.allocator.base_allocation(outside), Err(Error::UnknownPointer { ptr: outside }));
    context.allocator.free(block).unwrap();
    context.finish();
}

#[test]
fn destroyed_streams_and_streams_of_other_devices() {
    let context = TestContext::plain();
    let far = context.instance.device(1).unwrap().pool_stream().unwrap();
    let wrong = Error::StreamDevice { device: DEVICE, stream: far.id(), owner: DeviceId(1) };
    assert_eq!(context.refused(100, &far), wrong);
    // A stream of another device may use the block.
    let block = context.allocate(100, &context.stream());
    context.allocator.record_use(block, far.id()).unwrap();
    context.allocator.free(block).unwrap();
    assert_eq!(context.refused(100, &far), wrong);

    let short: StreamId = context.driver().stream_create(DEVICE, StreamOptions::default()).unwrap();
    let request = Request::new(DEVICE, short, 5000);
    let block = context.allocator.allocate_raw(request).unwrap();
    context.driver().stream_destroy(short).unwrap();
    assert!(
        matches!(context.allocator.allocate_raw(request), Err(Error::Driver(_))),
        "a destroyed stream is not passed on"
    );
    // The external allocator gets another stream, since the block's own stream is destroyed.
    context.allocator.free(block).unwrap();
    assert_eq!(context.stats().active.all.current, 0);
    context.clear_destroyed_stream_hazards();
    context.finish();
}
