//! cuBLAS over the simulated library: what a fetch tells it, on which thread and stream, and how precise it is.

use std::sync::{Arc, Barrier};
use std::thread;

use crate::common::blas::{HOPPER, Lab, Matrices, on_threads};
use crate::common::memory::{FIRST, KIB, MIB};
use warpool::blas::{Blas, BlasHandle, BlasSettings, forbid_tf32};
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{LibraryCall, SimConfig, SimDriver};
use warpool::driver::{BlasMath, BlasMatrix, Call, DevicePtr, Devices as _, ErrorCode, Sgemm};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, MemPoolId, Settings};
use warpool::{Error, Instance, Result, Stream};

#[test]
fn a_fetch_tells_the_library_only_what_it_does_not_know() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let handle = lab.blas.handle_on(&one).unwrap();
    let id = handle.id();
    let (ptr, bytes) = handle.workspace();
    assert_eq!(bytes, HOPPER);
    let stream_and_workspace = [LibraryCall::SetStream(one.id()), LibraryCall::SetWorkspace { ptr, bytes }];
    assert_eq!(lab.told(id, 1), stream_and_workspace);

    // The same again: nothing at all.
    lab.counting.reset();
    for _ in 0..10 {
        assert_eq!(lab.blas.handle_on(&one).unwrap().workspace(), (ptr, bytes));
    }
    assert_eq!(lab.counting.counts(), []);

    // Another stream: its own workspace, since the library forgot the first one. And back.
    let (other, _) = lab.blas.handle_on(&two).unwrap().workspace();
    assert_ne!(other, ptr);
    assert_eq!(lab.told(id, 3), [LibraryCall::SetStream(two.id()), LibraryCall::SetWorkspace { ptr: other, bytes }]);
    assert_eq!(lab.blas.handle_on(&one).unwrap().workspace(), (ptr, bytes));
    assert_eq!(lab.told(id, 5), stream_and_workspace);

    // One switch at a time.
    lab.blas.set_tf32(true);
    lab.blas.handle_on(&one).unwrap();
    assert_eq!(lab.told(id, 7), [LibraryCall::SetMath(BlasMath::Tf32)]);
    lab.blas.set_deterministic(false);
    lab.blas.handle_on(&one).unwrap();
    assert_eq!(lab.told(id, 8), [LibraryCall::SetAtomics(true)]);
    lab.blas.set_deterministic(true);
    {
        let _exact = forbid_tf32();
        lab.blas.handle_on(&one).unwrap();
    }
    assert_eq!(lab.told(id, 9), [LibraryCall::SetMath(BlasMath::Default), LibraryCall::SetAtomics(false)]);
    lab.counting.reset();
    lab.blas.set_tf32(false);
    lab.blas.handle_on(&one).unwrap();
    assert_eq!(lab.counting.counts(), []);
    drop(handle);
    lab.finish();
}

#[test]
fn the_current_stream_counts_without_a_call() {
    let lab = Lab::new();
    let (stream, other) = (lab.stream(), lab.instance.device(1).unwrap());
    assert_eq!(lab.blas.handle(&lab.device).unwrap().stream_id(), lab.device.default_stream().unwrap().id());
    {
        let _guard = stream.enter();
        assert_eq!(lab.blas.handle(&lab.device).unwrap().stream_id(), stream.id());
        lab.counting.reset();
        assert_eq!(lab.blas.handle(&lab.device).unwrap().stream_id(), stream.id());
        assert_eq!(lab.counting.counts(), []);
    }
    let far = lab.blas.handle(&other).unwrap();
    assert_ne!(far.id(), lab.blas.handle(&lab.device).unwrap().id());
    assert_eq!(lab.allocator.stats(other.id()).unwrap().workspace_bytes.current, HOPPER);
    drop(far);
    let foreign = crate::common::device();
    assert_eq!(lab.blas.handle(&foreign).unwrap_err(), Error::ForeignInstance { object: "the device" });
    let foreign = foreign.default_stream().unwrap();
    assert_eq!(lab.blas.handle_on(&foreign).unwrap_err(), Error::ForeignInstance { object: "the stream" });
    lab.finish();
}

/// A handle from before a fetch for another stream multiplies where it was fetched for.
#[test]
fn one_handle_on_two_streams_in_turn() {
    let lab = Lab::new();
    let streams = [lab.stream(), lab.stream()];
    let matrices = [0, 1].map(|i| Matrices::new(&lab.allocator, &streams[i], i as u32).unwrap());
    let handles = [0, 1].map(|i: usize| lab.blas.handle_on(&streams[i]).unwrap());
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
    assert_eq!(lab.workspaces().current, 2 * HOPPER);
    drop((matrices, handles));
    lab.finish();
}

/// Mirrors test_cublas_multiple_threads_same_device: each thread its own handle and workspace, and the right results.
#[test]
fn many_threads_on_two_streams() {
    let lab = Lab::new();
    let streams = [lab.stream(), lab.stream()];
    let [start, end] = [Barrier::new(8), Barrier::new(8)];
    on_threads(8, |i| {
        let stream = &streams[i % 2];
        let matrices = Matrices::new(&lab.allocator, stream, i as u32).unwrap();
        start.wait();
        for _ in 0..50 {
            lab.blas.handle_on(stream).unwrap().sgemm(&matrices.product).unwrap();
        }
        matrices.check(stream).unwrap();
        // Nobody takes over a handle before all have had their own.
        end.wait();
    });
    assert_eq!(lab.blas.handles_alive(&lab.device), 8);
    assert_eq!(lab.workspaces().current, 8 * HOPPER);
    lab.finish();
}
/// Mirrors test_cublas_unified_workspace.
#[test]
fn cublaslt_works_in_the_workspace_of_cublas() {
    let lab = Lab::new();
    let stream = lab.stream();
    let lt = lab.blas.lt_on(&stream).unwrap();
    let handle = lab.blas.handle_on(&stream).unwrap();
    assert_ne!(lt.id(), handle.id());
    assert_eq!(lt.workspace(), (handle.workspace().0, MIB));
    assert_eq!((lt.stream_id(), lab.workspaces().current), (stream.id(), HOPPER));
    lab.counting.reset();
    assert_eq!(lab.blas.lt_on(&stream).unwrap().workspace(), lt.workspace());
    assert_eq!(lab.counting.counts(), []);
    assert_ne!(lt.raw().unwrap(), handle.raw().unwrap());
    // Clearing does not take it away from its user.
    drop(handle);
    lab.blas.clear_workspaces();
    assert_eq!(lab.workspaces().current, HOPPER);
    drop(lt);
    assert_eq!(lab.workspaces().current, 0);
    // Never more than cuBLAS has.
    lab.blas.set_workspace_bytes(Some(512 * KIB));
    assert_eq!(lab.blas.lt_on(&stream).unwrap().workspace().1, 512 * KIB);
    lab.blas.set_workspace_bytes(Some(0));
    assert_eq!(lab.blas.lt(&lab.device).unwrap().workspace(), (DevicePtr(0), 0));
    lab.finish();
}

#[test]
fn cublaslt_that_should_have_no_workspace_is_given_none() {
    for unified_workspaces in [true, false] {
        let lab = Lab::with(BlasSettings { lt_workspace_bytes: 0, unified_workspaces, ..BlasSettings::default() });
        assert_eq!(lab.blas.lt_on(&lab.stream()).unwrap().workspace(), (DevicePtr(0), 0));
        lab.finish();
    }
}

#[test]
fn cublaslt_has_its_own_workspace_if_asked_to() {
    let (settings, warnings) = BlasSettings::from_texts(None, Some("2048"), Some("0"));
    assert_eq!(warnings, []);
    let lab = Lab::with(settings);
    let stream = lab.stream();
    let lt = lab.blas.lt_on(&stream).unwrap();
    assert_eq!((lt.workspace().1, lab.workspaces().current), (2 * MIB, 2 * MIB));
    assert_eq!(lab.blas.handles_alive(&lab.device), 0, "cuBLAS itself was not needed");
    let handle = lab.blas.handle_on(&stream).unwrap();
    assert_ne!(handle.workspace().0, lt.workspace().0);
    lab.counting.reset();
    lab.blas.lt_on(&stream).unwrap();
    assert_eq!(lab.counting.counts(), []);
    drop((lt, handle));
    assert_eq!(lab.blas.clear_workspaces(), 2);
    assert_eq!(lab.workspaces().current, 0);
    lab.finish();
}

#[test]
fn a_thread_without_a_context_gets_the_devices() {
    let lab = Lab::new();
    let other = lab.instance.device(1).unwrap();
    on_threads(1, |_| {
        assert_eq!(lab.sim.current_device().unwrap(), None);
        lab.blas.handle(&other).unwrap();
        assert_eq!(lab.sim.current_device().unwrap(), Some(other.id()));
        lab.blas.handle(&lab.device).unwrap();
        assert_eq!(lab.sim.current_device().unwrap(), Some(other.id()), "one that it has stays");
    });
    lab.finish();
}

#[test]
fn what_is_set_on_a_bare_handle_does_not_last() {
    let lab = Lab::new();
    let stream = lab.stream();
    let bare = lab.blas.bare(&lab.device).unwrap();
    assert_eq!(lab.told(bare.id(), 1), []);
    let handle = lab.blas.handle_on(&stream).unwrap();
    assert_eq!(handle.id(), bare.id());
    let (ptr, bytes) = handle.workspace();
    let calls = lab.sim.library_calls(bare.id()).len();
    bare.raw().unwrap();
    lab.sim_set_stream(bare.id(), &lab.device.default_stream().unwrap());
    lab.blas.handle_on(&stream).unwrap();
    let everything = [
        LibraryCall::SetStream(stream.id()),
        LibraryCall::SetWorkspace { ptr, bytes },
        LibraryCall::SetMath(BlasMath::Default),
        LibraryCall::SetAtomics(false),
    ];
    assert_eq!(lab.told(bare.id(), calls + 1), everything);
    drop((bare, handle));
    lab.finish();
}

#[test]
fn tf32_rounds_and_the_guard_forbids_it() {
    let lab = Lab::with(BlasSettings { tf32: true, ..BlasSettings::default() });
    let stream = lab.stream();
    let block = lab.allocator.allocate(12, &stream).unwrap();
    // 11 bits after the point: one more than TF32 has.
    let exact = 1.0 + f32::EPSILON * 4096.0;
    let driver = lab.instance.driver();
    driver.upload(FIRST, block.ptr(), &[exact, 1.0, 0.0].map(f32::to_ne_bytes).concat()).unwrap();
    let matrix = |at: u64| BlasMatrix { ptr: block.ptr().offset(4 * at), stride: 1, transposed: false };
    let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix(0), b: matrix(1), beta: 0.0, c: matrix(2) };
    let handle = lab.blas.handle_on(&stream).unwrap();
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
    lab.blas.set_tf32(false);
    assert!(!lab.blas.tf32());
    assert_eq!(multiply(), exact);
    drop((block, handle));
    lab.finish();
}

#[test]
fn what_could_not_be_told_is_told_by_the_next_fetch() {
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
        // Each once in all: what went well before the failure is not told again.
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

/// A product may fail because of what the handle was told, and a driver may make it unlearn that.
#[test]
fn after_a_product_that_failed_everything_is_told_again() {
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
    let told = [
        LibraryCall::SetStream(stream.id()),
        LibraryCall::SetWorkspace { ptr, bytes },
        LibraryCall::SetMath(BlasMath::Default),
        LibraryCall::SetAtomics(false),
        LibraryCall::Sgemm(matrices.product),
    ];
    assert_eq!(sim.library_calls(handle.id())[before..], told);
    matrices.check(&stream).unwrap();
    drop(handle);
    blas.close().unwrap();
}

/// Every driver call of a scenario fails once: the error comes through, nothing is left behind, and the next attempt
/// works.
#[test]
fn every_call_may_fail_once() {
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
        assert_eq!(end, start, "call {nth} failed and something stayed");
        assert_eq!(sim.hazards(), [], "call {nth}");
        if faulty.injected().is_empty() {
            outcome.expect("nothing was made to fail");
            break;
        }
        let fired = faulty.injected()[0];
        // Some failures the allocator gets over by itself.
        if let Err(error) = outcome {
            assert_eq!(error.driver().map(|error| error.code), Some(code), "{} was made to fail", fired.call);
        }
    }
    assert!(nth > 40, "the scenario made only {nth} calls");
}
