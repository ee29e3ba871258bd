//! A plug as the source of one pool, and as the program's allocator.

use super::*;

#[test]
fn a_plug_is_the_source_of_one_pool_with_caching_on_top() {
    let context = TestContext::plain();
    let caching: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&context.instance, Settings::default()));
    let upstream = ExternalUpstream::new(&context.instance, Arc::new(context.book.plug_with_hooks())).unwrap();
    assert_eq!(context.book.read(), ["init 2"]);
    let options = PoolOptions { upstream: Some(Arc::new(upstream)), ..PoolOptions::default() };
    let pool = MemPool::new(&caching, &context.device(), options).unwrap();
    let stream = context.stream();
    let small = caching.allocate_in(pool.id(), 1000, &stream).unwrap();
    let large = caching.allocate_in(pool.id(), 3 * MIB, &stream).unwrap();
    let open = caching.allocate(1000, &stream).unwrap();
    assert_eq!(context.book.read(), ["give 2097152", "give 20971520"], "segments, and those of the pool alone");
    for (value, block) in [(1, &small), (2, &large), (3, &open)] {
        context.fill(block.ptr(), value, block.bytes(), &stream);
    }
    for (value, block) in [(1, &small), (2, &large), (3, &open)] {
        assert_eq!(context.byte_at(block.ptr().offset(block.bytes() - 1)), value);
    }
    // Cached: neither of these asks the plug.
    small.free().unwrap();
    let again = caching.allocate_in(pool.id(), 500, &stream).unwrap();
    assert_eq!(context.book.read(), [] as [&str; 0]);
    context.book.capacity.store(0, Ordering::SeqCst);
    let outcome = caching.allocate_in(pool.id(), 300 * MIB, &stream);
    assert!(matches!(&outcome, Err(Error::OutOfMemory(report)) if report.cause == OomCause::Upstream), "{outcome:?}");
    drop((again, large, open));
    pool.close().unwrap();
    assert!(context.book.read().ends_with(&["take 2097152".to_owned(), "take 20971520".to_owned()]));
    caching.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    context.finish();
}

#[test]
fn an_upstream_remembers_streams_that_are_gone() {
    use warpool::memory::Upstream as _;
    let context = TestContext::plain();
    let upstream = ExternalUpstream::new(&context.instance, Arc::new(context.book.plug())).unwrap();
    let short = context.driver().stream_create(DEVICE, StreamOptions::default()).unwrap();
    let ptr = upstream.allocate(DEVICE, MIB, short).unwrap().unwrap();
    context.driver().stream_destroy(short).unwrap();
    upstream.free(ptr, MIB, DEVICE, short).unwrap();
    assert!(upstream.allocate(DEVICE, MIB, short).is_err());
    context.forgive_stale_streams();
    context.finish();
}

#[test]
fn an_upstream_refuses_an_address_that_is_taken() {
    use warpool::memory::Upstream as _;
    let context = TestContext::plain();
    let stream = context.stream().id();
    let (next, takes) = (Arc::new(AtomicU64::new(0x1_0000)), Arc::new(AtomicBool::new(false)));
    let (gives, free) = (Arc::clone(&next), Arc::clone(&takes));
    let plug = FnAllocator::new(
        move |_, _, _| Ok(Some(DevicePtr(gives.load(Ordering::SeqCst)))),
        move |ptr, _, _, _| if free.load(Ordering::SeqCst) { Ok(()) } else { Err(Error::UnknownPointer { ptr }) },
    );
    let upstream = ExternalUpstream::new(&context.instance, Arc::new(plug)).unwrap();
    let first = upstream.allocate(DEVICE, 100, stream).unwrap().unwrap();
    let ask = |at| {
        next.store(at, Ordering::SeqCst);
        upstream.allocate(DEVICE, 100, stream)
    };
    let taken = |at| Err(Error::ExternalOverlap { ptr: DevicePtr(at), bytes: 100, live: first, live_bytes: 100 });
    assert_eq!((ask(0x1_0000), ask(0x1_0040)), (taken(0x1_0000), taken(0x1_0040)));
    // What the plug would not take back is still taken; what it took may come again.
    upstream.free(first, 100, DEVICE, stream).unwrap_err();
    assert_eq!(ask(0x1_0040), taken(0x1_0040));
    takes.store(true, Ordering::SeqCst);
    upstream.free(first, 100, DEVICE, stream).unwrap();
    assert_eq!(ask(0x1_0040), Ok(Some(DevicePtr(0x1_0040))));
    context.finish();
}

/// A Rust type as a plug, with no closure in sight.
#[test]
fn any_type_can_be_a_plug() {
    struct Bump {
        base: DevicePtr,
        next: AtomicU64,
    }
    impl ExternalAllocator for Bump {
        fn allocate(
            &self,
            bytes: u64,
            _: DeviceId,
            _: warpool::memory::RawStream,
        ) -> warpool::Result<Option<DevicePtr>> {
            let at = self.next.fetch_add(bytes.next_multiple_of(512), Ordering::SeqCst);
            Ok((at + bytes <= MIB).then(|| self.base.offset(at)))
        }

        fn free(&self, _: DevicePtr, _: u64, _: DeviceId, _: warpool::memory::RawStream) -> warpool::Result<()> {
            Ok(())
        }
    }
    let context = TestContext::plain();
    let base = context.driver().mem_alloc(DEVICE, MIB).unwrap();
    let bump = Bump { base, next: AtomicU64::new(0) };
    let allocator: Arc<dyn DeviceAllocator> =
        Arc::new(PluggableAllocator::new(&context.instance, Arc::new(bump)).unwrap());
    let stream = context.stream();
    let blocks: Vec<_> = (0..10).map(|_| allocator.allocate(100_000, &stream).unwrap()).collect();
    assert_eq!(blocks[9].ptr(), base.offset(9 * 100_352));
    assert!(matches!(allocator.allocate(100_000, &stream), Err(Error::OutOfMemory(_))));
    drop(blocks);
    context.finish();
}
