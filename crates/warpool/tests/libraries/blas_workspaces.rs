//! Workspaces of cuBLAS: their size, their users, when they are freed, and how they are counted.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use crate::common::blas::{BlasFixture, HOPPER, Matrices, on_threads};
use crate::common::memory::{FIRST, KIB, MIB};
use warpool::blas::{Blas, BlasHandle, BlasSettings};
use warpool::driver::sim::{LibraryCall, SimConfig, SimDriver};
use warpool::driver::{DevicePtr, Pattern};
use warpool::memory::pools::PoolOptions;
use warpool::memory::report::{Action, HistoryOptions, SnapshotOptions, Stat};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, DriverPoolAllocator, MemPool, Settings};
use warpool::{Error, Instance};

/// Mirrors test_cublas_workspace_explicit_allocation.
#[test]
fn the_size_comes_from_device_setting_or_call() {
    let size = |settings: BlasSettings| {
        let fixture = BlasFixture::with(settings);
        let handle = fixture.blas.handle(&fixture.device).unwrap();
        assert_eq!(handle.workspace().1, fixture.blas.workspace_bytes(&fixture.device));
        assert_eq!(fixture.workspaces().current, handle.workspace().1);
        let bytes = handle.workspace().1;
        drop(handle);
        fixture.finish();
        bytes
    };
    let from_text = |text| BlasSettings::from_texts(Some(text), None, None).0;
    assert_eq!(size(BlasSettings::default()), HOPPER);
    assert_eq!(size(from_text(":4096:2:16:8")), 8 * MIB + 128 * KIB);
    assert_eq!(size(from_text(":1024:1")), MIB);
    assert_eq!(size(from_text("nonsense")), HOPPER);
    assert_eq!(size(from_text(":0:0")), 0);
}

#[test]
fn size_0_is_no_workspace_instead_of_the_librarys_own() {
    let fixture = BlasFixture::with(BlasSettings { workspace_bytes: Some(0), ..BlasSettings::default() });
    let stream = fixture.stream();
    let matrices = Matrices::new(&fixture.allocator, &stream, 3).unwrap();
    let handle = fixture.blas.handle_on(&stream).unwrap();
    assert_eq!(handle.workspace(), (DevicePtr(0), 0));
    let nothing = LibraryCall::SetWorkspace { ptr: DevicePtr(0), bytes: 0 };
    assert_eq!(fixture.calls_since(handle.id(), 1), [LibraryCall::SetStream(stream.id()), nothing]);
    // Setting another stream resets it to the library's own, so it is set again.
    let other = fixture.stream();
    fixture.blas.handle_on(&other).unwrap();
    assert_eq!(fixture.calls_since(handle.id(), 3), [LibraryCall::SetStream(other.id()), nothing]);
    handle.sgemm(&matrices.product).unwrap();
    fixture.counting.reset();
    fixture.blas.handle_on(&stream).unwrap();
    assert_eq!(fixture.counting.counts(), []);
    matrices.check(&stream).unwrap();
    drop((matrices, handle));
    fixture.finish();
}

/// Mirrors test_cublas_workspace_size_api and test_cublas_workspace_lazy_reallocation.
#[test]
fn a_larger_size_applies_at_the_next_fetch_and_a_smaller_one_keeps_the_block() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let first = fixture.blas.handle_on(&stream).unwrap();
    let (ptr, _) = first.workspace();

    fixture.blas.set_workspace_bytes(Some(MIB));
    assert_eq!(fixture.blas.workspace_bytes(&fixture.device), MIB);
    let smaller = fixture.blas.handle_on(&stream).unwrap();
    assert_eq!(smaller.workspace(), (ptr, MIB));
    assert_eq!(fixture.workspaces().current, HOPPER);
    assert_eq!(fixture.calls_since(first.id(), 3), [LibraryCall::SetWorkspace { ptr, bytes: MIB }]);

    fixture.blas.set_workspace_bytes(Some(2 * HOPPER));
    // It is allocated at the next fetch, in addition to the old one as long as that has users.
    assert_eq!(fixture.workspaces().allocated, HOPPER);
    let larger = fixture.blas.handle_on(&stream).unwrap();
    assert_eq!(larger.workspace().1, 2 * HOPPER);
    assert_eq!(fixture.workspaces().current, 3 * HOPPER);
    drop((first, smaller));
    assert_eq!(
        fixture.workspaces(),
        Stat { current: 2 * HOPPER, peak: 3 * HOPPER, allocated: 3 * HOPPER, freed: HOPPER }
    );

    fixture.blas.set_workspace_bytes(None);
    assert_eq!(fixture.blas.handle_on(&stream).unwrap().workspace(), (larger.workspace().0, HOPPER));
    drop(larger);
    fixture.finish();
}

#[test]
fn a_failed_enlargement_keeps_the_smaller_workspace() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let had = fixture.blas.handle_on(&stream).unwrap().workspace();
    fixture.blas.set_workspace_bytes(Some(1 << 50));
    assert!(matches!(fixture.blas.handle_on(&stream), Err(Error::OutOfMemory(_))));
    fixture.blas.set_workspace_bytes(Some(u64::MAX));
    assert!(matches!(fixture.blas.handle_on(&stream), Err(Error::RequestTooLarge { .. })));
    fixture.blas.set_workspace_bytes(None);
    fixture.counting.reset();
    assert_eq!(fixture.blas.handle_on(&stream).unwrap().workspace(), had);
    assert_eq!(fixture.counting.counts(), []);
    fixture.finish();
}

#[test]
fn workspaces_are_cleared_by_call_and_by_stream() {
    let fixture = BlasFixture::new();
    let (one, two) = (fixture.stream(), fixture.stream());
    let fetch = |stream| fixture.blas.handle_on(stream).unwrap().workspace().0;
    let (a, b) = (fetch(&one), fetch(&two));
    assert_eq!(fixture.blas.clear_workspaces_of(&one).unwrap(), 1);
    assert_eq!(fixture.blas.clear_workspaces_of(&one).unwrap(), 0);
    assert_eq!(fixture.workspaces().current, HOPPER);
    assert_eq!(fetch(&two), b);
    // The same memory again: it was cached for the stream.
    assert_eq!(fetch(&one), a);
    assert_eq!(fixture.blas.clear_workspaces(), 2);
    assert_eq!(fixture.workspaces().current, 0);

    // One in use stays until its user is done, and is not reused meanwhile.
    let user = fixture.blas.handle_on(&one).unwrap();
    fixture.blas.clear_workspaces();
    assert_eq!(fixture.workspaces().current, HOPPER);
    assert_ne!(fetch(&one), user.workspace().0);
    assert_eq!(fixture.workspaces().current, 2 * HOPPER);
    drop(user);
    assert_eq!(fixture.workspaces().current, HOPPER);
    fixture.finish();
}

/// Mirrors ConcurrentGetAndClearWorkspaces: threads multiply in a loop while another one clears.
#[test]
fn clearing_while_other_threads_multiply() {
    let fixture = BlasFixture::with(BlasSettings { workspace_bytes: Some(MIB), ..BlasSettings::default() });
    let streams = [fixture.stream(), fixture.stream(), fixture.stream()];
    let (multiplying, cleared) = (AtomicUsize::new(streams.len()), AtomicUsize::new(0));
    on_threads(streams.len() + 1, |i| {
        let Some(stream) = streams.get(i) else {
            while multiplying.load(Ordering::Relaxed) > 0 {
                cleared.fetch_add(fixture.blas.clear_workspaces(), Ordering::Relaxed);
                fixture.blas.set_workspace_bytes(Some(2 * MIB));
                fixture.trim();
                fixture.blas.set_workspace_bytes(None);
                thread::yield_now();
            }
            return;
        };
        let matrices = Matrices::new(&fixture.allocator, stream, i as u32).unwrap();
        for round in 0..300 {
            let handle = fixture.blas.handle_on(stream).unwrap();
            handle.sgemm(&matrices.product).unwrap();
            if round % 3 == 0 {
                // Another allocation gets the stream's free memory, and is written to.
                drop(handle);
                let block = fixture.allocator.allocate(MIB, stream).unwrap();
                fixture.instance.driver().fill(block.ptr(), Pattern::U8(9), MIB, stream.id()).unwrap();
            } else {
                handle.sgemm(&matrices.product).unwrap();
            }
        }
        matrices.check(stream).unwrap();
        multiplying.fetch_sub(1, Ordering::Relaxed);
    });
    assert!(cleared.load(Ordering::Relaxed) > 0, "nothing was ever cleared");
    fixture.finish();
}

#[test]
fn trim_frees_unused_workspaces() {
    for driver_pool in [false, true] {
        let fixture = BlasFixture::on(
            |instance| {
                if driver_pool {
                    Arc::new(DriverPoolAllocator::new(instance))
                } else {
                    Arc::new(CachingAllocator::new(instance, Settings::default()))
                }
            },
            BlasSettings::default(),
        );
        let stream = fixture.stream();
        let held = fixture.blas.handle_on(&stream).unwrap();
        let mine = held.workspace();
        on_threads(1, |_| drop(fixture.blas.handle_on(&stream).unwrap()));
        assert_eq!(fixture.workspaces().current, 2 * HOPPER);
        assert!(fixture.trim() >= HOPPER);
        assert_eq!(fixture.workspaces().current, HOPPER, "the other thread's is freed");
        fixture.counting.reset();
        assert_eq!(fixture.blas.handle_on(&stream).unwrap().workspace(), mine, "this thread's stayed");
        let calls_since: Vec<_> = fixture.counting.counts();
        assert_eq!(calls_since, [], "and the library still has it");
        drop(held);
        assert!(fixture.trim() >= HOPPER);
        assert_eq!(fixture.workspaces().current, 0, "freed once it is not in use");
        let matrices = Matrices::new(&fixture.allocator, &stream, 2).unwrap();
        fixture.blas.handle_on(&stream).unwrap().sgemm(&matrices.product).unwrap();
        matrices.check(&stream).unwrap();
        drop(matrices);
        // The next thread reuses the handle, with a new workspace.
        on_threads(1, |_| {
            let matrices = Matrices::new(&fixture.allocator, &stream, 1).unwrap();
            fixture.blas.handle_on(&stream).unwrap().sgemm(&matrices.product).unwrap();
            matrices.check(&stream).unwrap();
        });
        assert_eq!(fixture.blas.handles_alive(&fixture.device), 2);
        fixture.finish();
    }
}

/// A request that would not fit gets the memory of idle workspaces.
#[test]
fn idle_workspaces_are_freed_when_memory_runs_out() {
    let mut config = SimConfig::default().with_capacity(100 * MIB);
    config.devices[0].bytes_context = 0;
    let instance = Instance::new(Arc::new(SimDriver::new(config))).unwrap();
    let device = instance.device(0).unwrap();
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let blas = Blas::new(&allocator, BlasSettings::default());
    let stream = device.pool_stream().unwrap();
    on_threads(1, |_| drop(blas.handle_on(&stream).unwrap()));
    drop(allocator.allocate(90 * MIB, &device.default_stream().unwrap()).unwrap());
    assert_eq!(allocator.stats(FIRST).unwrap().workspace_bytes.current, 0);
    // The workspace of a thread's handle is not freed.
    let handle = blas.handle_on(&stream).unwrap();
    drop(handle);
    assert!(allocator.allocate(90 * MIB, &device.default_stream().unwrap()).is_err());
    assert_eq!(allocator.stats(FIRST).unwrap().workspace_bytes.current, HOPPER);
    blas.close().unwrap();
}

#[test]
fn a_dropped_blas_frees_its_workspaces_and_detaches_its_hooks() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let other = Blas::new(&fixture.allocator, BlasSettings::default());
    drop(other.handle_on(&stream).unwrap());
    let clone = other.clone();
    drop(other);
    assert_eq!(fixture.workspaces().current, HOPPER);
    let before = format!("{:?}", fixture.allocator.observers());
    drop(clone);
    assert_eq!(fixture.workspaces().current, 0);
    assert_ne!(format!("{:?}", fixture.allocator.observers()), before, "its hooks are detached");
    fixture.trim();
    fixture.blas.handle_on(&stream).unwrap();
    let BlasFixture { blas, .. } = fixture;
    blas.close().unwrap();
}

#[test]
fn a_closed_blas_returns_no_handle_on_any_thread() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let error = Error::HandlePoolClosed { library: "cuBLAS" };
    let [fetched, closed] = [Barrier::new(2), Barrier::new(2)];
    on_threads(2, |i| {
        drop(fixture.blas.handle_on(&stream).unwrap());
        fetched.wait();
        if i == 0 {
            fixture.blas.clone().close().unwrap();
        }
        closed.wait();
        assert_eq!(fixture.blas.handle_on(&stream).unwrap_err(), error);
    });
    assert_eq!(fixture.blas.handle_on(&stream).unwrap_err(), error);
    assert_eq!(fixture.blas.lt_on(&stream).unwrap_err(), Error::HandlePoolClosed { library: "cuBLASLt" });
    assert_eq!(fixture.workspaces().current, 0);
    // Only the handle of the other thread is left, which is leaked.
    assert_eq!(fixture.sim.object_counts().handles, 1);
}

/// A handle that another thread-local variable holds when the thread's own list is destroyed is returned with that
/// variable, with its workspaces.
#[test]
fn a_handle_returned_late_has_its_workspaces() {
    thread_local! {
        /// Registered before the thread's list of handles, hence destroyed after it.
        static LAST: RefCell<Option<BlasHandle>> = const { RefCell::new(None) };
    }
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    on_threads(1, |_| {
        LAST.with(|last| drop(last.borrow_mut().take()));
        let handle = fixture.blas.handle_on(&stream).unwrap();
        LAST.with(|last| *last.borrow_mut() = Some(handle));
    });
    assert_eq!((fixture.blas.handles_alive(&fixture.device), fixture.workspaces().current), (1, HOPPER));
    fixture.trim();
    assert_eq!(fixture.workspaces().current, 0, "the handle is idle");
    fixture.finish();
}

#[test]
fn workspaces_are_not_routed_to_a_threads_pool() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let pool = MemPool::new(&fixture.allocator, &fixture.device, PoolOptions::default()).unwrap();
    let id = pool.id();
    {
        let _scope = pool.enter().unwrap();
        fixture.blas.handle_on(&stream).unwrap();
    }
    let of_pool = SnapshotOptions { pool: Some(id), traces: false };
    assert_eq!(fixture.allocator.snapshot(of_pool).unwrap().segments, []);
    pool.close().unwrap();
    fixture.finish();
}

#[test]
fn a_history_shows_workspaces_by_name() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    fixture.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    warpool::memory::report::set_user_metadata("mine");
    drop(fixture.allocator.allocate(MIB, &stream).unwrap());
    drop(fixture.blas.handle_on(&stream).unwrap());
    fixture.blas.clear_workspaces();
    let snapshot = fixture.allocator.snapshot(SnapshotOptions::default()).unwrap();
    let marked = |text: &str, action: Action| {
        let is = |entry: &&warpool::memory::report::TraceEntry| {
            entry.action == action && entry.user_metadata.is_some_and(|id| snapshot.texts.get(id) == text)
        };
        snapshot.traces[0].iter().filter(is).count()
    };
    for (text, times) in [("mine", 1), ("cuBLAS workspace", 1)] {
        assert_eq!(marked(text, Action::Alloc), times, "{text}");
        assert_eq!(marked(text, Action::FreeRequested), times, "{text}");
    }
    warpool::memory::report::set_user_metadata("");
    fixture.finish();
}

#[test]
fn workspace_counters_are_reset_with_the_others() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    fixture.blas.handle_on(&stream).unwrap();
    fixture.blas.clear_workspaces();
    let all = Stat { current: 0, peak: HOPPER, allocated: HOPPER, freed: HOPPER };
    assert_eq!(fixture.workspaces(), all);
    fixture.allocator.reset_peak_stats(FIRST).unwrap();
    assert_eq!(fixture.workspaces(), Stat { peak: 0, ..all });
    fixture.allocator.reset_accumulated_stats(FIRST).unwrap();
    assert_eq!(fixture.workspaces(), Stat::default());
    fixture.finish();
}
