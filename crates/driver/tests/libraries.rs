//! The simulated libraries beyond the contract: the log of what handles were told, hazards of workspaces and products,
//! libraries that are not there.

mod common;

use std::sync::Arc;

use common::{DEVICE, Lab};
use warpool_driver::decorate::{Counting, FaultPlan, Faulty, Recording};
use warpool_driver::sim::{HazardKind, LibraryCall, SimConfig, SimDriver, Timing};
use warpool_driver::*;

/// A product of 2 by 2 over the lab's memory.
fn small(lab: &Lab) -> Sgemm {
    let at = |offset| BlasMatrix { ptr: lab.memory.offset(offset), stride: 2, transposed: false };
    Sgemm { m: 2, n: 2, k: 2, alpha: 1.0, a: at(0), b: at(256), beta: 0.0, c: at(512) }
}

/// A lab with a handle of cuBLAS on its first stream, and a workspace of 4 KiB.
fn with_blas() -> Result<(Lab, HandleId, DevicePtr)> {
    let lab = Lab::new(SimConfig::default())?;
    lab.fill(0, lab.one)?;
    lab.gpu.stream_synchronize(lab.one)?;
    let handle = lab.gpu.library_create(Library::Blas, DEVICE)?;
    lab.gpu.library_set_stream(handle, lab.one)?;
    let workspace = lab.gpu.mem_alloc(DEVICE, 4096)?;
    Ok((lab, handle, workspace))
}

fn hazards(lab: &Lab) -> Vec<HazardKind> {
    // A broken device says so here; the log is what counts.
    let _ = lab.gpu.device_synchronize(DEVICE);
    lab.gpu.hazards().iter().map(|hazard| hazard.kind).collect()
}

#[test]
fn a_handle_remembers_what_it_was_told_also_once_it_is_gone() -> Result<()> {
    let (lab, handle, workspace) = with_blas()?;
    let product = small(&lab);
    lab.gpu.blas_set_workspace(handle, workspace, 4096)?;
    lab.gpu.blas_set_workspace(handle, workspace.offset(8), 64).expect_err("no multiple of 256");
    lab.gpu.blas_set_math(handle, BlasMath::Tf32)?;
    lab.gpu.blas_set_atomics(handle, true)?;
    lab.gpu.blas_sgemm(handle, &product)?;
    lab.gpu.library_destroy(handle)?;
    lab.gpu.blas_sgemm(handle, &product).expect_err("it is gone");
    let told = [
        LibraryCall::Created { library: Library::Blas, device: DEVICE },
        LibraryCall::SetStream(lab.one),
        LibraryCall::SetWorkspace { ptr: workspace, bytes: 4096 },
        LibraryCall::SetMath(BlasMath::Tf32),
        LibraryCall::SetAtomics(true),
        LibraryCall::Sgemm(product),
        LibraryCall::Destroyed,
    ];
    assert_eq!(lab.gpu.library_calls(handle), told);
    assert_eq!(lab.gpu.library_calls(HandleId(99)), []);
    assert_eq!(hazards(&lab), [HazardKind::UseAfterDestroy]);
    Ok(())
}

#[test]
fn the_log_forgets_the_oldest() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default());
    let busy = gpu.library_create(Library::Blas, DEVICE)?;
    for round in 0..2000 {
        gpu.blas_set_atomics(busy, round % 2 == 0)?;
    }
    assert_eq!(gpu.library_calls(busy).len(), 1024);
    let gone: Vec<HandleId> = (0..300)
        .map(|_| {
            let handle = gpu.library_create(Library::Dnn, DEVICE)?;
            gpu.library_destroy(handle).map(|()| handle)
        })
        .collect::<Result<_>>()?;
    let remembered = gone.iter().filter(|&&handle| !gpu.library_calls(handle).is_empty()).count();
    assert_eq!((remembered, gpu.library_calls(gone[299]).len(), gpu.object_counts().handles), (256, 2, 1));
    Ok(())
}

#[test]
fn a_library_that_is_not_installed_is_named() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default().without_library(Library::Dnn).without_library(Library::Blas));
    for library in Library::ALL {
        let made = gpu.library_create(library, DEVICE);
        if matches!(library, Library::Dnn | Library::Blas) {
            let error = made.expect_err("it is not there");
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
fn a_workspace_freed_under_a_product_is_a_hazard() -> Result<()> {
    for freed in [false, true] {
        let (lab, handle, workspace) = with_blas()?;
        lab.gpu.blas_set_workspace(handle, workspace, 4096)?;
        if freed {
            lab.gpu.mem_free(workspace)?;
        }
        lab.gpu.blas_sgemm(handle, &small(&lab))?;
        let want: &[HazardKind] = if freed { &[HazardKind::UseAfterFree] } else { &[] };
        assert_eq!(hazards(&lab), want);
    }
    Ok(())
}

#[test]
fn a_workspace_shorter_than_it_was_said_to_be_is_a_hazard() -> Result<()> {
    for bytes in [4096, 4097] {
        let (lab, handle, workspace) = with_blas()?;
        lab.gpu.blas_set_workspace(handle, workspace, bytes)?;
        lab.gpu.blas_sgemm(handle, &small(&lab))?;
        let want: &[HazardKind] = if bytes > 4096 { &[HazardKind::IllegalAccess] } else { &[] };
        assert_eq!(hazards(&lab), want);
    }
    Ok(())
}

#[test]
fn two_streams_cannot_share_a_workspace_without_order() -> Result<()> {
    for ordered in [false, true] {
        let (lab, handle, workspace) = with_blas()?;
        let mut product = small(&lab);
        lab.gpu.blas_set_workspace(handle, workspace, 4096)?;
        lab.gpu.blas_sgemm(handle, &product)?;
        if ordered {
            lab.order(lab.one, lab.two)?;
        }
        lab.gpu.library_set_stream(handle, lab.two)?;
        lab.gpu.blas_set_workspace(handle, workspace, 4096)?;
        product.c.ptr = lab.memory.offset(1024);
        lab.gpu.blas_sgemm(handle, &product)?;
        let want: &[HazardKind] = if ordered { &[] } else { &[HazardKind::Race] };
        assert_eq!(hazards(&lab), want, "{:#?}", lab.gpu.hazards());
    }
    Ok(())
}

#[test]
fn a_stream_takes_the_workspace_with_it() -> Result<()> {
    let (lab, handle, workspace) = with_blas()?;
    lab.gpu.blas_set_workspace(handle, workspace, 4096)?;
    lab.gpu.library_set_stream(handle, lab.one)?;
    lab.gpu.mem_free(workspace)?;
    lab.gpu.blas_sgemm(handle, &small(&lab))?;
    assert_eq!(hazards(&lab), []);
    Ok(())
}

#[test]
fn a_product_uses_the_workspace_and_the_precision_it_was_called_with() -> Result<()> {
    let (lab, handle, workspace) = with_blas()?;
    // 1 + 2^-11 is 1 in TF32.
    let value = 1.0 + 2_f32.powi(-11);
    lab.gpu.upload(DEVICE, lab.memory, &value.to_le_bytes())?;
    lab.gpu.upload(DEVICE, lab.memory.offset(256), &1_f32.to_le_bytes())?;
    lab.gpu.upload(DEVICE, workspace, &[0; 4096])?;
    let mut product = Sgemm { m: 1, n: 1, k: 1, ..small(&lab) };
    lab.gpu.blas_set_math(handle, BlasMath::Tf32)?;
    lab.gpu.blas_sgemm(handle, &product)?;
    lab.gpu.blas_set_math(handle, BlasMath::Default)?;
    lab.gpu.blas_set_workspace(handle, workspace, 4096)?;
    product.c.ptr = lab.memory.offset(1024);
    lab.gpu.stream_synchronize(lab.one)?;
    let mut scratch = [0; 16];
    lab.gpu.download(DEVICE, workspace, &mut scratch)?;
    assert_eq!(scratch, [0; 16], "set after the call");
    lab.gpu.blas_sgemm(handle, &product)?;
    lab.gpu.stream_synchronize(lab.one)?;
    let number = |ptr| -> Result<f32> {
        let mut bytes = [0; 4];
        lab.gpu.download(DEVICE, ptr, &mut bytes)?;
        Ok(f32::from_le_bytes(bytes))
    };
    assert_eq!((number(lab.memory.offset(512))?, number(lab.memory.offset(1024))?), (1.0, value));
    lab.gpu.download(DEVICE, workspace, &mut scratch)?;
    assert_ne!(scratch, [0; 16], "a product scribbles");
    Ok(())
}

#[test]
fn a_captured_product_over_freed_memory_names_its_graph() -> Result<()> {
    let (lab, handle, workspace) = with_blas()?;
    lab.gpu.blas_set_workspace(handle, workspace, 4096)?;
    let exec = lab.capture(|| lab.gpu.blas_sgemm(handle, &small(&lab)))?;
    lab.gpu.graph_launch(exec, lab.two)?;
    assert_eq!(hazards(&lab), []);
    lab.gpu.mem_free(workspace)?;
    lab.gpu.graph_launch(exec, lab.two)?;
    assert_eq!(hazards(&lab), [HazardKind::GraphUsesFreedMemory]);
    let entry = lab.gpu.hazards()[0].to_string();
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
fn numbers_that_nobody_foresees_follow_from_the_seed() {
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
fn asking_for_such_a_number_changes_nothing_else() -> Result<()> {
    let run = |ask: bool| -> Result<std::time::Duration> {
        let lab = Lab::new(SimConfig::default().with_seed(3))?;
        for _ in 0..10 {
            if ask {
                lab.gpu.entropy();
            }
            lab.fill(1, lab.one)?;
        }
        lab.gpu.device_synchronize(DEVICE)?;
        Ok(lab.gpu.now())
    };
    assert_eq!(run(true)?, run(false)?);
    Ok(())
}

/// A product in pinned memory, made through a decorator.
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
fn recordings_of_products_are_equal_from_run_to_run() -> Result<()> {
    let recorded = || -> Result<Recording> {
        let gpu = Recording::new(Arc::new(SimDriver::new(SimConfig::default())));
        in_pinned_memory(&gpu)?;
        Ok(gpu)
    };
    let first = recorded()?;
    // Keeps the second run from being given the same memory again.
    let _moved = vec![0_u8; 5000];
    let second = recorded()?;
    assert_eq!(first.log().diff(&second.log()), None);
    let text = first.log().to_string();
    assert!(text.contains("a: host 1, stride 2; b: host 1 + 256, stride 2; c: host 1 + 512, stride 2"), "{text}");
    Ok(())
}

#[test]
fn calls_of_libraries_are_counted_and_can_be_made_to_fail() -> Result<()> {
    let counting = Counting::new(Arc::new(SimDriver::new(SimConfig::default())));
    in_pinned_memory(&counting)?;
    for call in [Call::LibraryCreate, Call::BlasSgemm, Call::LibraryRaw, Call::LibraryDestroy] {
        assert_eq!(counting.count(call).calls, 1, "{call}");
    }
    assert!(counting.count(Call::LibraryCreate).time.as_nanos() >= 211_000);
    for (call, left) in [(Call::LibraryCreate, 0), (Call::BlasSgemm, 0), (Call::LibraryDestroy, 1)] {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let faulty = Faulty::new(sim.clone(), FaultPlan::new().fail_nth(call, 1, ErrorCode::OutOfMemory));
        let error = in_pinned_memory(&faulty).expect_err("the plan says so");
        assert_eq!((error.code, error.call), (ErrorCode::OutOfMemory, call.name()));
        assert_eq!(sim.object_counts().handles, left, "{call}");
    }
    Ok(())
}
