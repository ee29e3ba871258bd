//! cuBLAS on the simulated library: which settings a fetch makes, on which thread and stream, and the precision.

use std::sync::{Arc, Barrier};
use std::thread;

use crate::common::blas::{BlasFixture, HOPPER, Matrices, on_threads};
use crate::common::memory::{FIRST, KIB, MIB};
use warpool::blas::{Blas, BlasHandle, BlasSettings, forbid_tf32};
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{LibraryCall, SimConfig, SimDriver};
use warpool::driver::{BlasMath, BlasMatrix, Call, DevicePtr, Devices as _, ErrorCode, Sgemm};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, MemPoolId, Settings};
use warpool::{Error, Instance, Result, Stream};

#[test]
fn a_fetch_sets_only_what_has_changed() {
    let fixture = BlasFixture::new();
    let (one, two) = (fixture.stream(), fixture.stream());
    let handle = fixture.blas.handle_on(&one).unwrap();
    let id = handle.id();
    let (ptr, bytes) = handle.workspace();
    assert_eq!(bytes, HOPPER);
    let stream_and_workspace = [LibraryCall::SetStream(one.id()), LibraryCall::SetWorkspace { ptr, bytes }];
    assert_eq!(fixture.calls_since(id, 1), stream_and_workspace);

    // The same fetch again makes no call.
    fixture.counting.reset();
    for _ in 0..10 {
        assert_eq!(fixture.blas.handle_on(&one).unwrap().workspace(), (ptr, bytes));
    }
    assert_eq!(fixture.counting.counts(), []);

    // Another stream: its own workspace, as setting the stream resets it. And back.
    let (other, _) = fixture.blas.handle_on(&two).unwrap().workspace();
    assert_ne!(other, ptr);
    assert_eq!(
        fixture.calls_since(id, 3),
        [LibraryCall::SetStream(two.id()), LibraryCall::SetWorkspace { ptr: other, bytes }]
    );
    assert_eq!(fixture.blas.handle_on(&one).unwrap().workspace(), (ptr, bytes));
    assert_eq!(fixture.calls_since(id, 5), stream_and_workspace);

    // Change one setting at a time.
    fixture.blas.set_tf32(true);
    fixture.blas.handle_on(&one).unwrap();
    assert_eq!(fixture.calls_since(id, 7), [LibraryCall::SetMath(BlasMath::Tf32)]);
    fixture.blas.set_deterministic(false);
    fixture.blas.handle_on(&one).unwrap();
    assert_eq!(fixture.calls_since(id, 8), [LibraryCall::SetAtomics(true)]);
    fixture.blas.set_deterministic(true);
    {
        let _exact = forbid_tf32();
        fixture.blas.handle_on(&one).unwrap();
    }
    assert_eq!(fixture.calls_since(id, 9), [LibraryCall::SetMath(BlasMath::Default), LibraryCall::SetAtomics(false)]);
    fixture.counting.reset();
    fixture.blas.set_tf32(false);
    fixture.blas.handle_on(&one).unwrap();
    assert_eq!(fixture.counting.counts(), []);
    drop(handle);
    fixture.finish();
}

#[test]
fn the_current_stream_is_used_by_default() {
    let fixture = BlasFixture::new();
    let (stream, other) = (fixture.stream(), fixture.instance.device(1).unwrap());
    assert_eq!(
        fixture.blas.handle(&fixture.device).unwrap().stream_id(),
        fixture.device.default_stream().unwrap().id()
    );
    {
        let _guard = stream.enter();
        assert_eq!(fixture.blas.handle(&fixture.device).unwrap().stream_id(), stream.id());
        fixture.counting.reset();
        assert_eq!(fixture.blas.handle(&fixture.device).unwrap().stream_id(), stream.id());
        assert_eq!(fixture.counting.counts(), []);
    }
    let far = fixture.blas.handle(&other).unwrap();
    assert_ne!(far.id(), fixture.blas.handle(&fixture.device).unwrap().id());
    assert_eq!(fixture.allocator.stats(other.id()).unwrap().workspace_bytes.current, HOPPER);
    drop(far);
    let foreign = crate::common::device();
    assert_eq!(fixture.blas.handle(&foreign).unwrap_err(), Error::ForeignInstance { object: "the device" });
    let foreign = foreign.default_stream().unwrap();
    assert_eq!(fixture.blas.handle_on(&foreign).unwrap_err(), Error::ForeignInstance { object: "the stream" });
    fixture.finish();
}

/// A handle that was fetched before a fetch for another stream still runs on its own stream.
#[test]
fn one_handle_alternates_between_two_streams() {
    let fixture = BlasFixture::new();
    let streams = [fixture.stream(), fixture.stream()];
    let matrices = [0, 1].map(|i| Matrices::new(&fixture.allocator, &streams[i], i as u32).unwrap());
    let handles = [0, 1].map(|i: usize| fixture.blas.handle_on(&streams[i]).unwrap());
    for _ in 0..20 {
        for i in 0..2 {
            handles[i].sgemm(&matrices[i].product).unwrap();
        }
    }
    for i in 0..2 {
        matrices[i].check(&streams[i]).unwrap();
        assert_eq!(handles[i].stream_id(), streams[i].id());
    }
    assert_eq!(handles[0].id(), handles[1].id());
    assert_eq!(fixture.workspaces().current, 2 * HOPPER);
    drop((matrices, handles));
    fixture.finish();
}

/// Mirrors test_cublas_multiple_threads_same_device: each thread has its own handle and workspace, and gets the right
/// results.
#[test]
fn threads_have_their_own_handles_and_workspaces() {
    let fixture = BlasFixture::new();
    let streams = [fixture.stream(), fixture.stream()];
    let [start, end] = [Barrier::new(8), Barrier::new(8)];
    on_threads(8, |i| {
        let stream = &streams[i % 2];
        let matrices = Matrices::new(&fixture.allocator, stream, i as u32).unwrap();
        start.wait();
        for _ in 0..50 {
            fixture.blas.handle_on(stream).unwrap().sgemm(&matrices.product).unwrap();
        }
        matrices.check(stream).unwrap();
        // No thread ends before all have their own handle.
        end.wait();
    });
    assert_eq!(fixture.blas.handles_alive(&fixture.device), 8);
    assert_eq!(fixture.workspaces().current, 8 * HOPPER);
    fixture.finish();
}
/// Mirrors test_cublas_unified_workspace.
#[test]
fn cublaslt_shares_the_workspace_of_cublas() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let lt = fixture.blas.lt_on(&stream).unwrap();
    let handle = fixture.blas.handle_on(&stream).unwrap();
    assert_ne!(lt.id(), handle.id());
    assert_eq!(lt.workspace(), (handle.workspace().0, MIB));
    assert_eq!((lt.stream_id(), fixture.workspaces().current), (stream.id(), HOPPER));
    fixture.counting.reset();
    assert_eq!(fixture.blas.lt_on(&stream).unwrap().workspace(), lt.workspace());
    assert_eq!(fixture.counting.counts(), []);
    assert_ne!(lt.raw().unwrap(), handle.raw().unwrap());
    // Clearing does not free it while it is used.
    drop(handle);
    fixture.blas.clear_workspaces();
    assert_eq!(fixture.workspaces().current, HOPPER);
    drop(lt);
    assert_eq!(fixture.workspaces().current, 0);
    // Never larger than that of cuBLAS.
    fixture.blas.set_workspace_bytes(Some(512 * KIB));
    assert_eq!(fixture.blas.lt_on(&stream).unwrap().workspace().1, 512 * KIB);
    fixture.blas.set_workspace_bytes(Some(0));
    assert_eq!(fixture.blas.lt(&fixture.device).unwrap().workspace(), (DevicePtr(0), 0));
    fixture.finish();
}

#[test]
fn cublaslt_without_a_workspace() {
    for unified_workspaces in [true, false] {
        let fixture =
            BlasFixture::with(BlasSettings { lt_workspace_bytes: 0, unified_workspaces, ..BlasSettings::default() });
        assert_eq!(fixture.blas.lt_on(&fixture.stream()).unwrap().workspace(), (DevicePtr(0), 0));
        fixture.finish();
    }
}

#[test]
fn cublaslt_with_a_workspace_of_its_own() {
    let (settings, warnings) = BlasSettings::from_texts(None, Some("2048"), Some("0"));
    assert_eq!(warnings, []);
    let fixture = BlasFixture::with(settings);
    let stream = fixture.stream();
    let lt = fixture.blas.lt_on(&stream).unwrap();
    assert_eq!((lt.workspace().1, fixture.workspaces().current), (2 * MIB, 2 * MIB));
    assert_eq!(fixture.blas.handles_alive(&fixture.device), 0, "cuBLAS itself was not needed");
    let handle = fixture.blas.handle_on(&stream).unwrap();
    assert_ne!(handle.workspace().0, lt.workspace().0);
    fixture.counting.reset();
    fixture.blas.lt_on(&stream).unwrap();
    assert_eq!(fixture.counting.counts(), []);
    drop((lt, handle));
    assert_eq!(fixture.blas.clear_workspaces(), 2);
    assert_eq!(fixture.workspaces().current, 0);
    fixture.finish();
}

#[test]
fn a_thread_without_a_context_is_bound_to_the_devices() {
    let fixture = BlasFixture::new();
    let other = fixture.instance.device(1).unwrap();
    on_threads(1, |_| {
        assert_eq!(fixture.sim.current_device().unwrap(), None);
        fixture.blas.handle(&other).unwrap();
        assert_eq!(fixture.sim.current_device().unwrap(), Some(other.id()));
        fixture.blas.handle(&fixture.device).unwrap();
        assert_eq!(fixture.sim.current_device().unwrap(), Some(other.id()), "a bound context stays");
    });
    fixture.finish();
}

#[test]
fn settings_of_a_bare_handle_are_replaced_at_the_next_fetch() {
    let fixture = BlasFixture::new();
    let stream = fixture.stream();
    let bare = fixture.blas.bare(&fixture.device).unwrap();
    assert_eq!(fixture.calls_since(bare.id(), 1), []);
    let handle = fixture.blas.handle_on(&stream).unwrap();
    assert_eq!(handle.id(), bare.id());
    let (ptr, bytes) = handle.workspace();
    let calls = fixture.sim.library_calls(bare.id()).len();
    bare.raw().unwrap();
    fixture.sim_set_stream(bare.id(), &fixture.device.default_stream().unwrap());
    fixture.blas.handle_on(&stream).unwrap();
    let everything = [
        LibraryCall::SetStream(stream.id()),
        LibraryCall::SetWorkspace { ptr, bytes },
        LibraryCall::SetMath(BlasMath::Default),
        LibraryCall::SetAtomics(false),
    ];
    assert_eq!(fixture.calls_since(bare.id(), calls + 1), everything);
    drop((bare, handle));
    fixture.finish();
}

#[test]
fn tf32_rounds_and_the_guard_forbids_it() {
    let fixture = BlasFixture::with(BlasSettings { tf32: true, ..BlasSettings::default() });
    let stream = fixture.stream();
    let block = fixture.allocator.allocate(12, &stream).unwrap();
    // 11 bits of mantissa: one more than TF32 has.
    let exact = 1.0 + f32::EPSILON * 4096.0;
    let driver = fixture.instance.driver();
    driver.upload(FIRST, block.ptr(), &[exact, 1.0, 0.0].map(f32::to_ne_bytes).concat()).unwrap();
    let matrix = |at: u64| BlasMatrix { ptr: block.ptr().offset(4 * at), stride: 1, transposed: false };
    let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix(0), b: matrix(1), beta: 0.0, c: matrix(2) };
    let handle = fixture.blas.handle_on(&stream).unwrap();
    let multiply = || {
        handle.sgemm(&product).unwrap();
        stream.synchronize().unwrap();
        let mut out = [0; 4];
        driver.download(FIRST, block.ptr().offset(8), &mut out).unwrap();
        f32::from_ne_bytes(out)
    };
    assert_ne!(multiply(), exact);
    {
        // Also for a handle that was fetched before.
        let _guard = forbid_tf32();
        assert_eq!(multiply(), exact);
    }
    assert_ne!(multiply(), exact);
    fixture.blas.set_tf32(false);
    assert!(!fixture.blas.tf32());
    assert_eq!(multiply(), exact);
    drop((block, handle));
    fixture.finish();
}

#[test]
fn a_failed_setting_is_repeated_at_the_next_fetch() {
    for call in [Call::LibrarySetStream, Call::BlasSetWorkspace, Call::BlasSetMath, Call::BlasSetAtomics] {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let blas = Blas::new(&allocator, BlasSettings::default());
        let (one, two) = (device.pool_stream().unwrap(), device.pool_stream().unwrap());
        let id = blas.handle_on(&one).unwrap().id();
        blas.set_tf32(true);
        blas.set_deterministic(false);
        let before = sim.library_calls(id).len();
        faulty.set_plan(FaultPlan::new().fail_nth(call, 1, ErrorCode::NotPermitted));
        assert_eq!(blas.handle_on(&two).unwrap_err().driver().unwrap().call, call.name());
        let (ptr, bytes) = blas.handle_on(&two).unwrap().workspace();
        // Each setting is made once in total: settings made before the failure are not repeated.
        let everything = [
            LibraryCall::SetStream(two.id()),
            LibraryCall::SetWorkspace { ptr, bytes },
            LibraryCall::SetMath(BlasMath::Tf32),
            LibraryCall::SetAtomics(true),
        ];
        assert_eq!(sim.library_calls(id)[before..], everything, "{call}");
        blas.close().unwrap();
    }
}

/// A call may fail because of the handle's settings, and a driver may reset them.
#[test]
fn everything_is_set_again_after_a_failed_call() {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
    let instance = Instance::new(faulty.clone()).unwrap();
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let blas = Blas::new(&allocator, BlasSettings::default());
    let stream = instance.device(0).unwrap().pool_stream().unwrap();
    let matrices = Matrices::new(&allocator, &stream, 1).unwrap();
    let handle = blas.handle_on(&stream).unwrap();
    let before = sim.library_calls(handle.id()).len();
    faulty.set_plan(FaultPlan::new().fail_nth(Call::BlasSgemm, 1, ErrorCode::InvalidHandle));
    handle.sgemm(&matrices.product).unwrap_err();
    handle.sgemm(&matrices.product).unwrap();
    let (ptr, bytes) = handle.workspace();
    let calls_since = [
        LibraryCall::SetStream(stream.id()),
        LibraryCall::SetWorkspace { ptr, bytes },
        LibraryCall::SetMath(BlasMath::Default),
        LibraryCall::SetAtomics(false),
        LibraryCall::Sgemm(matrices.product),
    ];
    assert_eq!(sim.library_calls(handle.id())[before..], calls_since);
    matrices.check(&stream).unwrap();
    drop(handle);
    blas.close().unwrap();
}

/// Every driver call of a scenario fails once: the error is returned, nothing is leaked, and the next attempt works.
#[test]
fn each_failed_call_is_returned_and_leaks_nothing() {
    fn scenario(blas: &Blas, allocator: &Arc<dyn DeviceAllocator>, streams: &[Stream; 2]) -> Result<()> {
        let device = streams[0].device();
        for (i, stream) in streams.iter().enumerate() {
            let matrices = Matrices::new(allocator, stream, i as u32)?;
            let handle: BlasHandle = blas.handle_on(stream)?;
            handle.sgemm(&matrices.product)?;
            handle.raw()?;
            blas.lt_on(stream)?.raw()?;
            blas.set_tf32(i == 0);
            blas.set_deterministic(i == 1);
            blas.set_workspace_bytes(Some((i as u64 + 1) * 48 * MIB));
            handle.sgemm(&matrices.product)?;
            matrices.check(stream)?;
        }
        blas.bare(&device)?.raw()?;
        blas.clear_workspaces_of(&streams[0])?;
        blas.handle(&device)?;
        thread::scope(|scope| scope.spawn(|| blas.handle_on(&streams[0]).map(drop)).join().unwrap())?;
        allocator.trim(device.id(), MemPoolId::DEFAULT)?;
        Ok(())
    }
    let code = ErrorCode::NotPermitted;
    let mut nth = 0;
    loop {
        nth += 1;
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let streams = [device.pool_stream().unwrap(), device.pool_stream().unwrap()];
        device.synchronize().unwrap();
        let start = sim.object_counts();
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let blas = Blas::new(&allocator, BlasSettings::default());

        faulty.set_plan(FaultPlan::new().fail_nth_of_all(nth, code).excluding(FaultPlan::CLEANUP));
        let outcome = scenario(&blas, &allocator, &streams);
        faulty.clear_plan();
        scenario(&blas, &allocator, &streams).expect("after a fault everything works");
        blas.close().unwrap();
        assert_eq!(allocator.stats(FIRST).unwrap().workspace_bytes.current, 0, "call {nth}");
        assert_eq!(allocator.stats(FIRST).unwrap().allocated_bytes.all.current, 0, "call {nth}");
        allocator.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        device.synchronize().unwrap();
        let mut end = sim.object_counts();
        // Events are pooled.
        end.events = start.events;
        assert_eq!(end, start, "leaked after call {nth} failed");
        assert_eq!(sim.hazards(), [], "call {nth}");
        if faulty.injected().is_empty() {
            outcome.expect("nothing was made to fail");
            break;
        }
        let fired = faulty.injected()[0];
        // The allocator recovers from some failures.
        if let Err(error) = outcome {
            assert_eq!(error.driver().map(|error| error.code), Some(code), "{} was made to fail", fired.call);
        }
    }
    assert!(nth > 40, "the scenario made only {nth} calls");
}
