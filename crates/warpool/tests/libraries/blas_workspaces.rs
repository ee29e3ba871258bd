//! The memory that cuBLAS works in: how much, for whom, when it goes, and how it is counted.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use crate::common::blas::{HOPPER, Lab, Matrices, on_threads};
use crate::common::memory::{FIRST, KIB, MIB};
use warpool::blas::{Blas, BlasHandle, BlasSettings};
use warpool::driver::sim::{LibraryCall, SimConfig, SimDriver};
use warpool::driver::{DevicePtr, Pattern};
use warpool::memory::{
    Action, Allocate as _, CachingAllocator, DeviceAllocator, DriverPoolAllocator, HistoryOptions, MemPool,
    PoolOptions, Settings, SnapshotOptions, Stat,
};
use warpool::{Error, Instance};

/// Mirrors test_cublas_workspace_explicit_allocation.
#[test]
fn workspaces_are_sized_by_device_setting_or_call() {
    let size = |settings: BlasSettings| {
        let lab = Lab::with(settings);
        let handle = lab.blas.handle(&lab.device).unwrap();
        assert_eq!(handle.workspace().1, lab.blas.workspace_bytes(&lab.device));
        assert_eq!(lab.workspaces().current, handle.workspace().1);
        let bytes = handle.workspace().1;
        drop(handle);
        lab.finish();
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
fn no_workspace_at_all_is_none_and_not_the_librarys_own() {
    let lab = Lab::with(BlasSettings { workspace_bytes: Some(0), ..BlasSettings::default() });
    let stream = lab.stream();
    let matrices = Matrices::new(&lab.allocator, &stream, 3).unwrap();
    let handle = lab.blas.handle_on(&stream).unwrap();
    assert_eq!(handle.workspace(), (DevicePtr(0), 0));
    let nothing = LibraryCall::SetWorkspace { ptr: DevicePtr(0), bytes: 0 };
    assert_eq!(lab.told(handle.id(), 1), [LibraryCall::SetStream(stream.id()), nothing]);
    // Another stream brings back the library's own, so it is told again.
    let other = lab.stream();
    lab.blas.handle_on(&other).unwrap();
    assert_eq!(lab.told(handle.id(), 3), [LibraryCall::SetStream(other.id()), nothing]);
    handle.sgemm(&matrices.product).unwrap();
    lab.counting.reset();
    lab.blas.handle_on(&stream).unwrap();
    assert_eq!(lab.counting.counts(), []);
    matrices.check(&stream).unwrap();
    drop((matrices, handle));
    lab.finish();
}

/// Mirrors test_cublas_workspace_size_api and test_cublas_workspace_lazy_reallocation.
#[test]
fn a_larger_size_comes_at_the_next_fetch_and_a_smaller_one_keeps_the_block() {
    let lab = Lab::new();
    let stream = lab.stream();
    let first = lab.blas.handle_on(&stream).unwrap();
    let (ptr, _) = first.workspace();

    lab.blas.set_workspace_bytes(Some(MIB));
    assert_eq!(lab.blas.workspace_bytes(&lab.device), MIB);
    let smaller = lab.blas.handle_on(&stream).unwrap();
    assert_eq!(smaller.workspace(), (ptr, MIB));
    assert_eq!(lab.workspaces().current, HOPPER);
    assert_eq!(lab.told(first.id(), 3), [LibraryCall::SetWorkspace { ptr, bytes: MIB }]);

    lab.blas.set_workspace_bytes(Some(2 * HOPPER));
    // Not before the next fetch, and then beside the old one as long as that has users.
    assert_eq!(lab.workspaces().allocated, HOPPER);
    let larger = lab.blas.handle_on(&stream).unwrap();
    assert_eq!(larger.workspace().1, 2 * HOPPER);
    assert_eq!(lab.workspaces().current, 3 * HOPPER);
    drop((first, smaller));
    assert_eq!(lab.workspaces(), Stat { current: 2 * HOPPER, peak: 3 * HOPPER, allocated: 3 * HOPPER, freed: HOPPER });

    lab.blas.set_workspace_bytes(None);
    assert_eq!(lab.blas.handle_on(&stream).unwrap().workspace(), (larger.workspace().0, HOPPER));
    drop(larger);
    lab.finish();
}

#[test]
fn a_larger_size_that_cannot_be_had_leaves_the_smaller_one() {
    let lab = Lab::new();
    let stream = lab.stream();
    let had = lab.blas.handle_on(&stream).unwrap().workspace();
    lab.blas.set_workspace_bytes(Some(1 << 50));
    assert!(matches!(lab.blas.handle_on(&stream), Err(Error::OutOfMemory(_))));
    lab.blas.set_workspace_bytes(Some(u64::MAX));
    assert!(matches!(lab.blas.handle_on(&stream), Err(Error::RequestTooLarge { .. })));
    lab.blas.set_workspace_bytes(None);
    lab.counting.reset();
    assert_eq!(lab.blas.handle_on(&stream).unwrap().workspace(), had);
    assert_eq!(lab.counting.counts(), []);
    lab.finish();
}

#[test]
fn workspaces_are_cleared_by_call_and_by_stream() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let fetch = |stream| lab.blas.handle_on(stream).unwrap().workspace().0;
    let (a, b) = (fetch(&one), fetch(&two));
    assert_eq!(lab.blas.clear_workspaces_of(&one).unwrap(), 1);
    assert_eq!(lab.blas.clear_workspaces_of(&one).unwrap(), 0);
    assert_eq!(lab.workspaces().current, HOPPER);
    assert_eq!(fetch(&two), b);
    // The same memory again: it was cached for the stream.
    assert_eq!(fetch(&one), a);
    assert_eq!(lab.blas.clear_workspaces(), 2);
    assert_eq!(lab.workspaces().current, 0);

    // One in use stays until its user is done, and is not lent again meanwhile.
    let user = lab.blas.handle_on(&one).unwrap();
    lab.blas.clear_workspaces();
    assert_eq!(lab.workspaces().current, HOPPER);
    assert_ne!(fetch(&one), user.workspace().0);
    assert_eq!(lab.workspaces().current, 2 * HOPPER);
    drop(user);
    assert_eq!(lab.workspaces().current, HOPPER);
    lab.finish();
}

/// Mirrors ConcurrentGetAndClearWorkspaces: threads multiply in a loop while another clears.
#[test]
fn clearing_while_others_multiply_disturbs_nobody() {
    let lab = Lab::with(BlasSettings { workspace_bytes: Some(MIB), ..BlasSettings::default() });
    let streams = [lab.stream(), lab.stream(), lab.stream()];
    let (multiplying, cleared) = (AtomicUsize::new(streams.len()), AtomicUsize::new(0));
    on_threads(streams.len() + 1, |i| {
        let Some(stream) = streams.get(i) else {
            while multiplying.load(Ordering::Relaxed) > 0 {
                cleared.fetch_add(lab.blas.clear_workspaces(), Ordering::Relaxed);
                lab.blas.set_workspace_bytes(Some(2 * MIB));
                lab.trim();
                lab.blas.set_workspace_bytes(None);
                thread::yield_now();
            }
            return;
        };
        let matrices = Matrices::new(&lab.allocator, stream, i as u32).unwrap();
        for round in 0..300 {
            let handle = lab.blas.handle_on(stream).unwrap();
            handle.sgemm(&matrices.product).unwrap();
            if round % 3 == 0 {
                // Somebody else gets what memory the stream has to spare, and writes on it.
                drop(handle);
                let block = lab.allocator.allocate(MIB, stream).unwrap();
                lab.instance.driver().fill(block.ptr(), Pattern::U8(9), MIB, stream.id()).unwrap();
            } else {
                handle.sgemm(&matrices.product).unwrap();
            }
        }
        matrices.check(stream).unwrap();
        multiplying.fetch_sub(1, Ordering::Relaxed);
    });
    assert!(cleared.load(Ordering::Relaxed) > 0, "nothing was ever cleared");
    lab.finish();
}

#[test]
fn trim_takes_the_workspaces_that_nobody_uses() {
    for driver_pool in [false, true] {
        let lab = Lab::on(
            |instance| {
                if driver_pool {
                    Arc::new(DriverPoolAllocator::new(instance))
                } else {
                    Arc::new(CachingAllocator::new(instance, Settings::default()))
                }
            },
            BlasSettings::default(),
        );
        let stream = lab.stream();
        let held = lab.blas.handle_on(&stream).unwrap();
        let mine = held.workspace();
        on_threads(1, |_| drop(lab.blas.handle_on(&stream).unwrap()));
        assert_eq!(lab.workspaces().current, 2 * HOPPER);
        assert!(lab.trim() >= HOPPER);
        assert_eq!(lab.workspaces().current, HOPPER, "the other thread's went");
        lab.counting.reset();
        assert_eq!(lab.blas.handle_on(&stream).unwrap().workspace(), mine, "this thread's stayed");
        let told: Vec<_> = lab.counting.counts();
        assert_eq!(told, [], "and the library still has it");
        drop(held);
        assert!(lab.trim() >= HOPPER);
        assert_eq!(lab.workspaces().current, 0, "let go of, it goes as well");
        let matrices = Matrices::new(&lab.allocator, &stream, 2).unwrap();
        lab.blas.handle_on(&stream).unwrap().sgemm(&matrices.product).unwrap();
        matrices.check(&stream).unwrap();
        drop(matrices);
        // The handle is still there for the next thread, which gets it a workspace again.
        on_threads(1, |_| {
            let matrices = Matrices::new(&lab.allocator, &stream, 1).unwrap();
            lab.blas.handle_on(&stream).unwrap().sgemm(&matrices.product).unwrap();
            matrices.check(&stream).unwrap();
        });
        assert_eq!(lab.blas.handles_alive(&lab.device), 2);
        lab.finish();
    }
}

/// A request that would not fit otherwise gets the memory of idle workspaces.
#[test]
fn idle_workspaces_go_when_memory_is_short() {
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
    // One that a thread has does not.
    let handle = blas.handle_on(&stream).unwrap();
    drop(handle);
    assert!(allocator.allocate(90 * MIB, &device.default_stream().unwrap()).is_err());
    assert_eq!(allocator.stats(FIRST).unwrap().workspace_bytes.current, HOPPER);
    blas.close().unwrap();
}

#[test]
fn a_dropped_blas_takes_its_workspaces_along_and_is_asked_nothing_any_more() {
    let lab = Lab::new();
    let stream = lab.stream();
    let other = Blas::new(&lab.allocator, BlasSettings::default());
    drop(other.handle_on(&stream).unwrap());
    let clone = other.clone();
    drop(other);
    assert_eq!(lab.workspaces().current, HOPPER);
    let before = format!("{:?}", lab.allocator.observers());
    drop(clone);
    assert_eq!(lab.workspaces().current, 0);
    assert_ne!(format!("{:?}", lab.allocator.observers()), before, "its hooks are gone");
    lab.trim();
    lab.blas.handle_on(&stream).unwrap();
    let Lab { blas, .. } = lab;
    blas.close().unwrap();
}

#[test]
fn a_closed_blas_gives_out_nothing_on_any_thread() {
    let lab = Lab::new();
    let stream = lab.stream();
    let error = Error::HandlePoolClosed { library: "cuBLAS" };
    let [fetched, closed] = [Barrier::new(2), Barrier::new(2)];
    on_threads(2, |i| {
        drop(lab.blas.handle_on(&stream).unwrap());
        fetched.wait();
        if i == 0 {
            lab.blas.clone().close().unwrap();
        }
        closed.wait();
        assert_eq!(lab.blas.handle_on(&stream).unwrap_err(), error);
    });
    assert_eq!(lab.blas.handle_on(&stream).unwrap_err(), error);
    assert_eq!(lab.blas.lt_on(&stream).unwrap_err(), Error::HandlePoolClosed { library: "cuBLASLt" });
    assert_eq!(lab.workspaces().current, 0);
    // That of the thread that was not told in time.
    assert_eq!(lab.sim.object_counts().handles, 1);
}

/// A handle that another thread-local variable still has when the thread's own list goes comes back with that variable,
/// and its workspaces with it.
#[test]
fn a_handle_that_comes_back_late_has_its_workspaces() {
    thread_local! {
        /// Registered before the pool's own notes, hence dropped after them.
        static LAST: RefCell<Option<BlasHandle>> = const { RefCell::new(None) };
    }
    let lab = Lab::new();
    let stream = lab.stream();
    on_threads(1, |_| {
        LAST.with(|last| drop(last.borrow_mut().take()));
        let handle = lab.blas.handle_on(&stream).unwrap();
        LAST.with(|last| *last.borrow_mut() = Some(handle));
    });
    assert_eq!((lab.blas.handles_alive(&lab.device), lab.workspaces().current), (1, HOPPER));
    lab.trim();
    assert_eq!(lab.workspaces().current, 0, "nobody has the handle");
    lab.finish();
}

#[test]
fn workspaces_stay_out_of_the_pools_of_threads() {
    let lab = Lab::new();
    let stream = lab.stream();
    let pool = MemPool::new(&lab.allocator, &lab.device, PoolOptions::default()).unwrap();
    let id = pool.id();
    {
        let _scope = pool.enter().unwrap();
        lab.blas.handle_on(&stream).unwrap();
    }
    let of_pool = SnapshotOptions { pool: Some(id), traces: false };
    assert_eq!(lab.allocator.snapshot(of_pool).unwrap().segments, []);
    pool.close().unwrap();
    lab.finish();
}

#[test]
fn a_history_shows_workspaces_by_name() {
    let lab = Lab::new();
    let stream = lab.stream();
    lab.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    warpool::memory::set_user_metadata("mine");
    drop(lab.allocator.allocate(MIB, &stream).unwrap());
    drop(lab.blas.handle_on(&stream).unwrap());
    lab.blas.clear_workspaces();
    let snapshot = lab.allocator.snapshot(SnapshotOptions::default()).unwrap();
    let marked = |text: &str, action: Action| {
        let is = |entry: &&warpool::memory::TraceEntry| {
            entry.action == action && entry.user_metadata.is_some_and(|id| snapshot.texts.get(id) == text)
        };
        snapshot.traces[0].iter().filter(is).count()
    };
    for (text, times) in [("mine", 1), ("cuBLAS workspace", 1)] {
        assert_eq!(marked(text, Action::Alloc), times, "{text}");
        assert_eq!(marked(text, Action::FreeRequested), times, "{text}");
    }
    warpool::memory::set_user_metadata("");
    lab.finish();
}

#[test]
fn workspace_counters_are_reset_with_the_others() {
    let lab = Lab::new();
    let stream = lab.stream();
    lab.blas.handle_on(&stream).unwrap();
    lab.blas.clear_workspaces();
    let all = Stat { current: 0, peak: HOPPER, allocated: HOPPER, freed: HOPPER };
    assert_eq!(lab.workspaces(), all);
    lab.allocator.reset_peak_stats(FIRST).unwrap();
    assert_eq!(lab.workspaces(), Stat { peak: 0, ..all });
    lab.allocator.reset_accumulated_stats(FIRST).unwrap();
    assert_eq!(lab.workspaces(), Stat::default());
    lab.finish();
}
