//! The cost of virtual memory calls per handle, and the part of it that is remapping: mapping memory that was mapped
//! before.

use std::sync::Arc;
use std::time::Duration;

use crate::fixture::DEVICE;
use warpool_driver::decorate::Counting;
use warpool_driver::sim::{RemapCounts, SimConfig, SimDriver};
use warpool_driver::*;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;
const ALL: &[DeviceAccess] = &[DeviceAccess { device: DEVICE, access: Access::ReadWrite }];

/// Costs of a 2 MiB handle, in microseconds.
const MAP: u64 = 1;
const SET_ACCESS: u64 = 30;
const UNMAP: u64 = 18;

fn gpu() -> SimDriver {
    SimDriver::new(SimConfig::default())
}

fn page(gpu: &SimDriver) -> Result<PhysicalId> {
    gpu.vm_create(DEVICE, PAGE, PhysicalOptions::default())
}

fn counted(mappings: u64, micros: u64) -> RemapCounts {
    RemapCounts { mappings, bytes: mappings * PAGE, time: Duration::from_micros(micros) }
}

/// As measured on an H200.
#[test]
fn virtual_memory_costs_are_per_handle() -> Result<()> {
    #[rustfmt::skip]
    let by_mib = [
        // MiB, create, map, set access, unmap, release: microseconds
        (   2,  12, 1,  30, 18,  14),
        (  64,  16, 1,  27, 16,  45),
        ( 512,  33, 1,  51, 24, 256),
        (2048, 177, 1, 110, 44, 984),
    ];
    for (mib, create, map, set_access, unmap, release) in by_mib {
        for handles in [1, 5] {
            let gpu = Counting::new(Arc::new(gpu()));
            let bytes = mib * MIB;
            let base = gpu.vm_reserve(bytes * handles, 0, None)?;
            let created = (0..handles).map(|_| gpu.vm_create(DEVICE, bytes, PhysicalOptions::default()));
            let created = created.collect::<Result<Vec<_>>>()?;
            for (at, &physical) in (0..).zip(&created) {
                gpu.vm_map(base.offset(at * bytes), physical)?;
            }
            gpu.vm_set_access(base, bytes * handles, ALL)?;
            gpu.vm_unmap(base, bytes * handles)?;
            created.into_iter().try_for_each(|physical| gpu.vm_release(physical))?;
            let micros = |call| u64::try_from(gpu.count(call).time.as_micros()).expect("a short time");
            let calls = [Call::VmCreate, Call::VmMap, Call::VmSetAccess, Call::VmUnmap, Call::VmRelease];
            let expected = [create, map, set_access, unmap, release].map(|each| each * handles);
            assert_eq!(calls.map(micros), expected, "{handles} handles of {mib} MiB");
            assert_eq!(micros(Call::VmReserve), 13);
        }
    }
    Ok(())
}

#[test]
fn growth_is_not_remapping() -> Result<()> {
    let gpu = gpu();
    let base = gpu.vm_reserve(4 * PAGE, 0, None)?;
    for at in 0..4 {
        gpu.vm_map(base.offset(at * PAGE), page(&gpu)?)?;
    }
    gpu.vm_set_access(base, 4 * PAGE, ALL)?;
    gpu.vm_set_access(base, 4 * PAGE, ALL)?;
    gpu.vm_unmap(base, 4 * PAGE)?;
    // New memory at the same addresses.
    gpu.vm_map(base, page(&gpu)?)?;
    gpu.vm_set_access(base, PAGE, ALL)?;
    assert_eq!(gpu.remap_counts(), RemapCounts::default());
    Ok(())
}

#[test]
fn unmapping_first_and_mapping_later_is_remapping() -> Result<()> {
    let gpu = gpu();
    let base = gpu.vm_reserve(4 * PAGE, 0, None)?;
    let moved = page(&gpu)?;
    gpu.vm_map(base, moved)?;
    gpu.vm_set_access(base, PAGE, ALL)?;
    gpu.vm_unmap(base, PAGE)?;
    assert_eq!(gpu.remap_counts(), RemapCounts::default(), "it may be released next");
    gpu.vm_map(base.offset(PAGE), moved)?;
    assert_eq!(gpu.remap_counts(), counted(1, UNMAP + MAP));
    // Together with new memory, in the same call.
    gpu.vm_map(base.offset(2 * PAGE), page(&gpu)?)?;
    gpu.vm_set_access(base.offset(PAGE), 2 * PAGE, ALL)?;
    assert_eq!(gpu.remap_counts(), counted(1, UNMAP + MAP + SET_ACCESS));
    // The last unmapping, with nothing after it, is not.
    gpu.vm_unmap(base.offset(PAGE), 2 * PAGE)?;
    assert_eq!(gpu.remap_counts(), counted(1, UNMAP + MAP + SET_ACCESS));
    Ok(())
}

#[test]
fn mapping_first_and_unmapping_later_is_remapping() -> Result<()> {
    let gpu = gpu();
    let base = gpu.vm_reserve(4 * PAGE, 0, None)?;
    let moved = page(&gpu)?;
    gpu.vm_map(base, moved)?;
    gpu.vm_map(base.offset(PAGE), moved)?;
    gpu.vm_map(base.offset(2 * PAGE), moved)?;
    gpu.vm_set_access(base, 3 * PAGE, ALL)?;
    assert_eq!(gpu.remap_counts(), counted(2, 2 * (MAP + SET_ACCESS)), "the first mapping was growth");
    gpu.vm_unmap(base, 3 * PAGE)?;
    assert_eq!(gpu.remap_counts(), counted(2, 2 * (MAP + SET_ACCESS + UNMAP)), "but the last mapping's");
    Ok(())
}

/// A call counts in the period in which it was made.
#[test]
fn restarted_counts_have_only_calls_made_since() -> Result<()> {
    let gpu = gpu();
    let base = gpu.vm_reserve(4 * PAGE, 0, None)?;
    let (early, late) = (page(&gpu)?, page(&gpu)?);
    gpu.vm_map(base, early)?;
    gpu.vm_map(base.offset(PAGE), late)?;
    gpu.vm_map(base.offset(2 * PAGE), late)?;
    gpu.vm_unmap(base, PAGE)?;
    gpu.restart_remap_counts();
    assert_eq!(gpu.remap_counts(), RemapCounts::default());
    gpu.vm_map(base.offset(3 * PAGE), early)?;
    assert_eq!(gpu.remap_counts(), counted(1, MAP), "unmapped before");
    gpu.vm_unmap(base.offset(PAGE), PAGE)?;
    assert_eq!(gpu.remap_counts(), counted(1, MAP + UNMAP), "mapped again before, and unmapped since");
    Ok(())
}
