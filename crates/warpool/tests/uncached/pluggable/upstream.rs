//! An external allocator as the upstream of a pool; a Rust type as an external allocator.

use super::*;

#[test]
fn an_external_allocator_is_the_upstream_of_one_pool() {
    let context = TestContext::plain();
    let caching: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&context.instance, Settings::default()));
    let upstream = ExternalUpstream::new(&context.instance, Arc::new(context.external.with_hooks())).unwrap();
    assert_eq!(context.log(), ["init 2"]);
    let options = PoolOptions { upstream: Some(Arc::new(upstream)), ..PoolOptions::default() };
    let pool = MemPool::new(&caching, &context.device(), options).unwrap();
    let stream = context.stream();
    let small = caching.allocate_in(&pool, 1000, &stream).unwrap();
    let large = caching.allocate_in(&pool, 3 * MIB, &stream).unwrap();
    let open = caching.allocate(1000, &stream).unwrap();
    assert_eq!(context.log(), ["allocate 2097152", "allocate 20971520"], "segments of the pool only");
    for (value, block) in [(1, &small), (2, &large), (3, &open)] {
        context.fill(block.ptr(), value, block.bytes(), &stream);
    }
    for (value, block) in [(1, &small), (2, &large), (3, &open)] {
        assert_eq!(context.byte_at(block.ptr().offset(block.bytes() - 1)), value);
    }
    // Cached: neither of these calls the external allocator.
    small.free().unwrap();
    let again = caching.allocate_in(&pool, 500, &stream).unwrap();
    assert_eq!(context.log(), [] as [&str; 0]);
    context.external.capacity.store(0, Ordering::SeqCst);
    let outcome = caching.allocate_in(&pool, 300 * MIB, &stream);
    assert!(matches!(&outcome, Err(Error::OutOfMemory(report)) if report.cause == OomCause::External), "{outcome:?}");
    drop((again, large, open));
    pool.close().unwrap();
    assert!(context.log().ends_with(&["free 2097152".to_owned(), "free 20971520".to_owned()]));
    caching.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    context.finish();
}

#[test]
fn an_upstream_frees_with_the_handle_of_a_destroyed_stream() {
    use warpool::memory::pools::Upstream as _;
    let context = TestContext::plain();
    let upstream = ExternalUpstream::new(&context.instance, Arc::new(context.external.plain())).unwrap();
    let short = context.driver().stream_create(DEVICE, StreamOptions::default()).unwrap();
    let ptr = upstream.allocate(DEVICE, MIB, short).unwrap().unwrap();
    context.driver().stream_destroy(short).unwrap();
    upstream.free(ptr, MIB, DEVICE, short).unwrap();
    assert!(upstream.allocate(DEVICE, MIB, short).is_err());
    context.clear_destroyed_stream_hazards();
    context.finish();
}

#[test]
fn an_upstream_refuses_an_overlapping_address() {
    use warpool::memory::pools::Upstream as _;
    let context = TestContext::plain();
    let stream = context.stream().id();
    let (next, frees) = (Arc::new(AtomicU64::new(0x1_0000)), Arc::new(AtomicBool::new(false)));
    let (address, succeeds) = (Arc::clone(&next), Arc::clone(&frees));
    let external = FnAllocator::new(
        move |_, _, _| Ok(Some(DevicePtr(address.load(Ordering::SeqCst)))),
        move |ptr, _, _, _| if succeeds.load(Ordering::SeqCst) { Ok(()) } else { Err(Error::UnknownPointer { ptr }) },
    );
    let upstream = ExternalUpstream::new(&context.instance, Arc::new(external)).unwrap();
    let first = upstream.allocate(DEVICE, 100, stream).unwrap().unwrap();
    let allocate_at = |at| {
        next.store(at, Ordering::SeqCst);
        upstream.allocate(DEVICE, 100, stream)
    };
    let overlap = |at| Err(Error::ExternalOverlap { ptr: DevicePtr(at), bytes: 100, live: first, live_bytes: 100 });
    assert_eq!((allocate_at(0x1_0000), allocate_at(0x1_0040)), (overlap(0x1_0000), overlap(0x1_0040)));
    // After a failed free the range is still allocated; after a successful one it may be reused.
    upstream.free(first, 100, DEVICE, stream).unwrap_err();
    assert_eq!(allocate_at(0x1_0040), overlap(0x1_0040));
    frees.store(true, Ordering::SeqCst);
    upstream.free(first, 100, DEVICE, stream).unwrap();
    assert_eq!(allocate_at(0x1_0040), Ok(Some(DevicePtr(0x1_0040))));
    context.finish();
}

#[test]
fn a_rust_type_is_an_external_allocator() {
    struct Bump {
        base: DevicePtr,
        next: AtomicU64,
    }
    impl ExternalAllocator for Bump {
        fn allocate(
            &self,
            bytes: u64,
            _: DeviceId,
            _: warpool::memory::external::RawStream,
        ) -> warpool::Result<Option<DevicePtr>> {
            let at = self.next.fetch_add(bytes.next_multiple_of(512), Ordering::SeqCst);
            Ok((at + bytes <= MIB).then(|| self.base.offset(at)))
        }

        fn free(
            &self,
            _: DevicePtr,
            _: u64,
            _: DeviceId,
            _: warpool::memory::external::RawStream,
        ) -> warpool::Result<()> {
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
