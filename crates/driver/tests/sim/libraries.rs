//! The simulated libraries beyond the contract: the log of calls on handles, hazards of workspaces and products,
//! libraries that are not installed.

use std::sync::Arc;

use crate::fixture::{DEVICE, Fixture};
use warpool_driver::decorate::{Counting, FaultPlan, Faulty, Recording};
use warpool_driver::sim::{HazardKind, LibraryCall, SimConfig, SimDriver, Timing};
use warpool_driver::*;

/// A product of 2 by 2 matrices in the fixture's memory.
fn small(fixture: &Fixture) -> Sgemm {
    let at = |offset| BlasMatrix { ptr: fixture.memory.offset(offset), stride: 2, transposed: false };
    Sgemm { m: 2, n: 2, k: 2, alpha: 1.0, a: at(0), b: at(256), beta: 0.0, c: at(512) }
}

/// A fixture, a cuBLAS handle on its first stream, and a workspace of 4 KiB.
fn with_blas() -> Result<(Fixture, HandleId, DevicePtr)> {
    let fixture = Fixture::new(SimConfig::default())?;
    fixture.fill(0, fixture.one)?;
    fixture.gpu.stream_synchronize(fixture.one)?;
    let handle = fixture.gpu.library_create(Library::Blas, DEVICE)?;
    fixture.gpu.library_set_stream(handle, fixture.one)?;
    let workspace = fixture.gpu.mem_alloc(DEVICE, 4096)?;
    Ok((fixture, handle, workspace))
}

fn hazards(fixture: &Fixture) -> Vec<HazardKind> {
    // Fails on a broken device; only the log matters.
    let _ = fixture.gpu.device_synchronize(DEVICE);
    fixture.gpu.hazards().iter().map(|hazard| hazard.kind).collect()
}

#[test]
fn calls_on_a_handle_are_logged_and_kept_after_it_is_destroyed() -> Result<()> {
    let (fixture, handle, workspace) = with_blas()?;
    let product = small(&fixture);
    fixture.gpu.blas_set_workspace(handle, workspace, 4096)?;
    fixture.gpu.blas_set_workspace(handle, workspace.offset(8), 64).expect_err("no multiple of 256");
    fixture.gpu.blas_set_math(handle, BlasMath::Tf32)?;
    fixture.gpu.blas_set_atomics(handle, true)?;
    fixture.gpu.blas_sgemm(handle, &product)?;
    fixture.gpu.library_destroy(handle)?;
    fixture.gpu.blas_sgemm(handle, &product).expect_err("it was destroyed");
    let calls = [
        LibraryCall::Created { library: Library::Blas, device: DEVICE },
        LibraryCall::SetStream(fixture.one),
        LibraryCall::SetWorkspace { ptr: workspace, bytes: 4096 },
        LibraryCall::SetMath(BlasMath::Tf32),
        LibraryCall::SetAtomics(true),
        LibraryCall::Sgemm(product),
        LibraryCall::Destroyed,
    ];
    assert_eq!(fixture.gpu.library_calls(handle), calls);
    assert_eq!(fixture.gpu.library_calls(HandleId(99)), []);
    assert_eq!(hazards(&fixture), [HazardKind::UseAfterDestroy]);
    Ok(())
}

#[test]
fn the_oldest_calls_are_dropped() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default());
    let busy = gpu.library_create(Library::Blas, DEVICE)?;
    for round in 0..2000 {
        gpu.blas_set_atomics(busy, round % 2 == 0)?;
    }
    assert_eq!(gpu.library_calls(busy).len(), 1024);
    let destroyed: Vec<HandleId> = (0..300)
        .map(|_| {
            let handle = gpu.library_create(Library::Dnn, DEVICE)?;
            gpu.library_destroy(handle).map(|()| handle)
        })
        .collect::<Result<_>>()?;
    let kept = destroyed.iter().filter(|&&handle| !gpu.library_calls(handle).is_empty()).count();
    assert_eq!((kept, gpu.library_calls(destroyed[299]).len(), gpu.object_counts().handles), (256, 2, 1));
    Ok(())
}

#[test]
fn a_library_that_is_not_installed_is_named() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default().without_library(Library::Dnn).without_library(Library::Blas));
    for library in Library::ALL {
        let made = gpu.library_create(library, DEVICE);
        if matches!(library, Library::Dnn | Library::Blas) {
            let error = made.expect_err("it is not installed");
            assert_eq!(error.code, ErrorCode::SharedObjectInitFailed);
            assert!(error.to_string().contains(library.name()), "{error}");
        } else {
            gpu.library_destroy(made?)?;
        }
    }
    assert_eq!(gpu.object_counts().handles, 0);
    Ok(())
}

#[test]
fn a_product_with_a_freed_workspace_is_refused_and_a_hazard() -> Result<()> {
    let (fixture, handle, workspace) = with_blas()?;
    fixture.gpu.blas_set_workspace(handle, workspace, 4096)?;
    fixture.gpu.blas_sgemm(handle, &small(&fixture))?;
    assert_eq!(hazards(&fixture), []);
    fixture.gpu.mem_free(workspace)?;
    let refused = fixture.gpu.blas_sgemm(handle, &small(&fixture)).unwrap_err();
    assert_eq!(refused.code, ErrorCode::InvalidValue);
    assert_eq!(hazards(&fixture), [HazardKind::UseAfterFree]);
    Ok(())
}

#[test]
fn a_workspace_larger_than_its_memory_is_refused() -> Result<()> {
    let (fixture, handle, workspace) = with_blas()?;
    fixture.gpu.blas_set_workspace(handle, workspace, 4096)?;
    let refused = fixture.gpu.blas_set_workspace(handle, workspace, 4097).unwrap_err();
    assert_eq!(refused.code, ErrorCode::InvalidValue);
    fixture.gpu.blas_sgemm(handle, &small(&fixture))?;
    assert_eq!(hazards(&fixture), []);
    Ok(())
}

#[test]
fn two_streams_cannot_share_a_workspace_without_order() -> Result<()> {
    for ordered in [false, true] {
        let (fixture, handle, workspace) = with_blas()?;
        let mut product = small(&fixture);
        fixture.gpu.blas_set_workspace(handle, workspace, 4096)?;
        fixture.gpu.blas_sgemm(handle, &product)?;
        if ordered {
            fixture.order(fixture.one, fixture.two)?;
        }
        fixture.gpu.library_set_stream(handle, fixture.two)?;
        fixture.gpu.blas_set_workspace(handle, workspace, 4096)?;
        product.c.ptr = fixture.memory.offset(1024);
        fixture.gpu.blas_sgemm(handle, &product)?;
        let expected: &[HazardKind] = if ordered { &[] } else { &[HazardKind::Race] };
        assert_eq!(hazards(&fixture), expected, "{:#?}", fixture.gpu.hazards());
    }
    Ok(())
}

#[test]
fn setting_the_stream_resets_the_workspace() -> Result<()> {
    let (fixture, handle, workspace) = with_blas()?;
    fixture.gpu.blas_set_workspace(handle, workspace, 4096)?;
    fixture.gpu.library_set_stream(handle, fixture.one)?;
    fixture.gpu.mem_free(workspace)?;
    fixture.gpu.blas_sgemm(handle, &small(&fixture))?;
    assert_eq!(hazards(&fixture), []);
    Ok(())
}

#[test]
fn a_product_uses_the_workspace_and_math_mode_of_its_call() -> Result<()> {
    let (fixture, handle, workspace) = with_blas()?;
    // 1 + 2^-11 is 1 in TF32.
    let value = 1.0 + 2_f32.powi(-11);
    fixture.gpu.upload(DEVICE, fixture.memory, &value.to_le_bytes())?;
    fixture.gpu.upload(DEVICE, fixture.memory.offset(256), &1_f32.to_le_bytes())?;
    fixture.gpu.upload(DEVICE, workspace, &[0; 4096])?;
    let mut product = Sgemm { m: 1, n: 1, k: 1, ..small(&fixture) };
    fixture.gpu.blas_set_math(handle, BlasMath::Tf32)?;
    fixture.gpu.blas_sgemm(handle, &product)?;
    fixture.gpu.blas_set_math(handle, BlasMath::Default)?;
    fixture.gpu.blas_set_workspace(handle, workspace, 4096)?;
    product.c.ptr = fixture.memory.offset(1024);
    fixture.gpu.stream_synchronize(fixture.one)?;
    let mut scratch = [0; 16];
    fixture.gpu.download(DEVICE, workspace, &mut scratch)?;
    assert_eq!(scratch, [0; 16], "set after the call");
    fixture.gpu.blas_sgemm(handle, &product)?;
    fixture.gpu.stream_synchronize(fixture.one)?;
    let number = |ptr| -> Result<f32> {
        let mut bytes = [0; 4];
        fixture.gpu.download(DEVICE, ptr, &mut bytes)?;
        Ok(f32::from_le_bytes(bytes))
    };
    assert_eq!((number(fixture.memory.offset(512))?, number(fixture.memory.offset(1024))?), (1.0, value));
    fixture.gpu.download(DEVICE, workspace, &mut scratch)?;
    assert_ne!(scratch, [0; 16], "a product scribbles");
    Ok(())
}

#[test]
fn a_captured_product_with_freed_memory_names_its_graph() -> Result<()> {
    let (fixture, handle, workspace) = with_blas()?;
    fixture.gpu.blas_set_workspace(handle, workspace, 4096)?;
    let exec = fixture.capture(|| fixture.gpu.blas_sgemm(handle, &small(&fixture)))?;
    fixture.gpu.graph_launch(exec, fixture.two)?;
    assert_eq!(hazards(&fixture), []);
    fixture.gpu.mem_free(workspace)?;
    fixture.gpu.graph_launch(exec, fixture.two)?;
    assert_eq!(hazards(&fixture), [HazardKind::GraphUsesFreedMemory]);
    let entry = fixture.gpu.hazards()[0].to_string();
    let who = format!("kernel sgemm (node 0 of {exec}, launch #");
    assert!(entry.contains(&who) && entry.contains(&workspace.to_string()), "{entry}");
    Ok(())
}

#[test]
fn larger_products_take_longer() -> Result<()> {
    let took = |m: u32| -> Result<std::time::Duration> {
        let gpu = SimDriver::new(SimConfig::default().with_timing(Timing::Model));
        let handle = gpu.library_create(Library::Blas, DEVICE)?;
        let memory = gpu.mem_alloc(DEVICE, 4 << 20)?;
        let matrix = BlasMatrix { ptr: memory, stride: m, transposed: false };
        let c = BlasMatrix { ptr: memory.offset(2 << 20), ..matrix };
        let product =
            Sgemm { m, n: 256, k: 256, alpha: 0.0, a: matrix, b: BlasMatrix { stride: 256, ..matrix }, beta: 0.0, c };
        let begun = gpu.now();
        gpu.blas_sgemm(handle, &product)?;
        gpu.device_synchronize(DEVICE)?;
        Ok(gpu.now() - begun)
    };
    // 65 and 131 million multiplications, at 40 ns for each million.
    let (one, two) = (took(1000)?, took(2000)?);
    assert_eq!((two - one).as_nanos(), 2_621);
    Ok(())
}

#[test]
fn entropy_depends_on_the_seed() {
    let draw = |seed: u64| {
        let gpu = SimDriver::new(SimConfig::default().with_seed(seed));
        [gpu.entropy(), gpu.entropy(), gpu.entropy()]
    };
    assert_eq!(draw(1), draw(1));
    let mut all: Vec<u64> = (0..100).flat_map(draw).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 300);
}

#[test]
fn drawing_entropy_changes_nothing_else() -> Result<()> {
    let run = |ask: bool| -> Result<std::time::Duration> {
        let fixture = Fixture::new(SimConfig::default().with_seed(3))?;
        for _ in 0..10 {
            if ask {
                fixture.gpu.entropy();
            }
            fixture.fill(1, fixture.one)?;
        }
        fixture.gpu.device_synchronize(DEVICE)?;
        Ok(fixture.gpu.now())
    };
    assert_eq!(run(true)?, run(false)?);
    Ok(())
}

/// A product in pinned memory.
fn in_pinned_memory(gpu: &dyn Driver) -> Result<()> {
    let handle = gpu.library_create(Library::Blas, DEVICE)?;
    let pinned = gpu.host_alloc(DEVICE, 4096, HostOptions::default())?;
    gpu.host_write(pinned, &[0; 4096])?;
    let ptr = gpu.host_device_ptr(DEVICE, pinned)?;
    let at = |offset| BlasMatrix { ptr: ptr.offset(offset), stride: 2, transposed: false };
    let product = Sgemm { m: 2, n: 2, k: 2, alpha: 1.0, a: at(0), b: at(256), beta: 1.0, c: at(512) };
    let outcome = gpu.blas_sgemm(handle, &product);
    gpu.library_raw(handle)?;
    gpu.device_synchronize(DEVICE)?;
    gpu.host_free(pinned)?;
    gpu.library_destroy(handle)?;
    outcome
}

#[test]
fn recordings_of_products_are_equal_in_every_run() -> Result<()> {
    let recorded = || -> Result<Recording> {
        let gpu = Recording::new(Arc::new(SimDriver::new(SimConfig::default())));
        in_pinned_memory(&gpu)?;
        Ok(gpu)
    };
    let first = recorded()?;
    // So that the second run does not get the same memory.
    let _moved = vec![0_u8; 5000];
    let second = recorded()?;
    assert_eq!(first.log().diff(&second.log()), None);
    let text = first.log().to_string();
    assert!(text.contains("a: host 1, stride 2; b: host 1 + 256, stride 2; c: host 1 + 512, stride 2"), "{text}");
    Ok(())
}

#[test]
fn calls_of_libraries_are_counted_and_can_fail() -> Result<()> {
    let counting = Counting::new(Arc::new(SimDriver::new(SimConfig::default())));
    in_pinned_memory(&counting)?;
    for call in [Call::LibraryCreate, Call::BlasSgemm, Call::LibraryRaw, Call::LibraryDestroy] {
        assert_eq!(counting.count(call).calls, 1, "{call}");
    }
    assert!(counting.count(Call::LibraryCreate).time.as_nanos() >= 211_000);
    for (call, left) in [(Call::LibraryCreate, 0), (Call::BlasSgemm, 0), (Call::LibraryDestroy, 1)] {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let faulty = Faulty::new(sim.clone(), FaultPlan::new().fail_nth(call, 1, ErrorCode::OutOfMemory));
        let error = in_pinned_memory(&faulty).expect_err("injected");
        assert_eq!((error.code, error.call), (ErrorCode::OutOfMemory, call.name()));
        assert_eq!(sim.object_counts().handles, left, "{call}");
    }
    Ok(())
}
