//! Hazard reports of the simulated GPU contain labels, and lines of the program.

use warpool::driver::sim::HazardKind;
use warpool::driver::{Copies, DevicePtr, Pattern};
use warpool::memory::Allocate;
use warpool::memory::report::SnapshotOptions;
use warpool::typed::{Kernel, PointerMut};
use warpool::{DeviceVec, Result};

use crate::fixture::{Fixture, KERNELS};

/// The hazards of one kind, as text.
fn hazards(gpu: &Fixture, kind: HazardKind) -> Vec<String> {
    gpu.gpu.hazards().iter().filter(|hazard| hazard.kind == kind).map(ToString::to_string).collect()
}

#[test]
fn a_race_names_labels_and_lines() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two) = (gpu.stream()?, gpu.stream()?);
    one.set_label("copies");
    two.set_label("compute");
    let mut weights = DeviceVec::<u32>::uninit(&gpu.allocator, 1024, &one)?.with_label("weights");
    let line = line!() + 1;
    one.fill(&mut weights, 1)?;
    // A raw call bypasses the ordering of typed memory. The address is that of the allocator's only block.
    let ptr = DevicePtr(gpu.allocator.snapshot(SnapshotOptions::default())?.segments[0].blocks[0].address);
    gpu.gpu.fill(ptr, Pattern::U32(2), 1024, two.id())?;
    gpu.device.synchronize()?;
    let found = hazards(&gpu, HazardKind::Race);
    assert_eq!(found.len(), 1, "{found:?}");
    for part in [
        "\"weights\"",
        &format!("in {} \"copies\" ({}:{line})", one.id(), file!()),
        &format!("in {} \"compute\"", two.id()),
        &one.id().to_string(),
    ] {
        assert!(found[0].contains(part), "{part} is not in {}", found[0]);
    }
    Ok(())
}

#[test]
fn a_kernel_that_runs_into_its_neighbour_is_a_hazard_of_its_own() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    // SAFETY: deliberately violated, which the simulated GPU detects: the kernel increments as many elements as its
    // argument says.
    let increment: Kernel<(PointerMut<u32>, u32)> = unsafe { Kernel::load(&gpu.device, &KERNELS, "increment")? };
    let mut first = DeviceVec::<u32>::zeroed(&gpu.allocator, 128, &stream)?.with_label("first");
    let second = DeviceVec::<u32>::zeroed(&gpu.allocator, 128, &stream)?.with_label("second");
    increment.launch_linear(&stream, 128, (&mut first, 128))?;
    gpu.device.synchronize()?;
    assert!(gpu.gpu.hazards().is_empty(), "{:?}", gpu.gpu.hazards());
    let line = line!() + 1;
    increment.launch_linear(&stream, 130, (&mut first, 130))?;
    gpu.device.synchronize()?;
    let found = hazards(&gpu, HazardKind::BlockOverrun);
    assert_eq!((found.len(), gpu.gpu.hazards().len()), (1, 1), "{:?}", gpu.gpu.hazards());
    for part in ["kernel increment", &format!("hazards.rs:{line}"), "\"first\"", "8 bytes past the end", "\"second\""] {
        assert!(found[0].contains(part), "{part} is not in {}", found[0]);
    }
    assert_eq!(second.to_vec(&stream)?[..3], [1, 1, 0], "the neighbour was changed, as on a real device");
    Ok(())
}

#[test]
fn a_fill_that_runs_into_its_neighbour_is_a_hazard_of_its_own() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let (first, second) = (gpu.allocator.allocate(512, &stream)?, gpu.allocator.allocate(512, &stream)?);
    assert_eq!(first.ptr().offset(512), second.ptr());
    gpu.gpu.fill(second.ptr(), Pattern::U8(1), 512, stream.id())?;
    gpu.gpu.fill(first.ptr(), Pattern::U8(2), 520, stream.id())?;
    gpu.device.synchronize()?;
    let found = hazards(&gpu, HazardKind::BlockOverrun);
    assert_eq!((found.len(), gpu.gpu.hazards().len()), (1, 1), "{:?}", gpu.gpu.hazards());
    assert!(found[0].contains("fill") && found[0].contains("8 bytes past the end"), "{}", found[0]);
    // After the free there is no block at that address; the fill is then a use of freed memory.
    drop(second);
    gpu.gpu.clear_hazards();
    gpu.gpu.fill(first.ptr(), Pattern::U8(2), 520, stream.id())?;
    gpu.device.synchronize()?;
    assert!(hazards(&gpu, HazardKind::BlockOverrun)[0].contains("memory that no block uses"));
    Ok(())
}
