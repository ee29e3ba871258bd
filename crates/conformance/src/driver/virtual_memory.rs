//! Virtual memory: reserve, create, map, set access, unmap, release, free; export and import.

use std::fs::File;

use warpool_driver::ErrorCode::{InvalidHandle, InvalidValue, OutOfMemory, UnknownError};
use warpool_driver::platform::descriptor;
use warpool_driver::{
    Access, DeviceAccess, DevicePtr, Granularity, Pattern, PhysicalId, PhysicalOptions, ShareKind, SharedMemory,
};

use crate::check::Check;
use crate::context::{Resource, TestContext, VmContext, to_bytes};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, expect_slice_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    granularity_matches_properties,
    reservation_size_and_alignment_are_validated,
    one_terabyte_can_be_reserved,
    address_hint_may_be_ignored,
    reservations_do_not_overlap,
    reservation_is_freed_as_a_whole,
    physical_size_is_validated,
    physical_memory_counts_as_used,
    mapped_memory_stores_data,
    overlapping_mappings_are_rejected,
    memory_without_access_is_rejected,
    access_is_set_on_whole_mappings,
    physical_memory_can_be_mapped_twice,
    adjacent_mappings_act_as_one_range,
    partial_unmap_is_rejected,
    unmapping_unmapped_memory_is_a_no_op,
    reservation_with_mappings_cannot_be_freed,
    data_stays_with_physical_memory,
    mappings_survive_release_of_physical_memory,
    mapping_does_not_wait_for_the_device,
    memory_is_shared_through_a_file_descriptor,
    only_shareable_memory_can_be_exported,
    unrelated_file_descriptor_is_rejected,
    import_with_wrong_size_is_rejected,
    access_can_be_reduced_and_restored,
    ; provoking hazards:
    released_physical_memory_is_rejected,
    copies_beyond_a_mapping_are_rejected,
];

fn granularity_matches_properties(context: &TestContext) -> CheckResult {
    let properties = context.properties()?;
    require(properties.virtual_memory, "the device has no virtual memory management")?;
    let least = context.driver.vm_granularity(context.device_id, Granularity::Minimum)?;
    let best = context.driver.vm_granularity(context.device_id, Granularity::Recommended)?;
    expect_eq("the minimum granularity", least, properties.granularity)?;
    expect(best >= least && best % least == 0, "the recommended granularity is a multiple of the minimum")
}

fn reservation_size_and_alignment_are_validated(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let reserve = |bytes, align| context.driver.vm_reserve(bytes, align, None);
    expect_error(reserve(0, 0), InvalidValue)?;
    expect_error(reserve(1000, 0), InvalidValue)?;
    expect_error(reserve(vm.granule, 3 * vm.granule), InvalidValue)?;
    expect_error(reserve(1 << 60, 0), OutOfMemory)?;
    for align in [0, 512, vm.granule, 1 << 30] {
        let ptr = reserve(vm.granule, align)?;
        context.track(Resource::AddressRange(ptr, vm.granule));
        expect_eq("the address modulo its alignment", ptr.0 % align.max(1), 0)?;
        expect_eq("the address modulo 2 MiB", ptr.0 % (2 << 20), 0)?;
    }
    Ok(())
}

fn one_terabyte_can_be_reserved(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let before = context.driver.mem_info(context.device_id)?.bytes_free;
    let ptr = context.driver.vm_reserve(1 << 40, 0, None)?;
    context.track(Resource::AddressRange(ptr, 1 << 40));
    let after = context.driver.mem_info(context.device_id)?.bytes_free;
    expect(before.saturating_sub(after) < 64 << 20, "a reservation uses no device memory")?;
    let last = (1 << 40) / vm.granule - 1;
    let end = vm.map(ptr, last, vm.create(1)?, 1)?;
    vm.allow_access(end, 1)?;
    context.driver.upload(context.device_id, end.offset(vm.granule - 4), &[1, 2, 3, 4])?;
    expect_slice_eq("its last bytes", &context.read_bytes(end.offset(vm.granule - 4), 4)?, &[1, 2, 3, 4])
}

fn address_hint_may_be_ignored(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let taken = vm.reserve(4)?;
    let ptr = context.driver.vm_reserve(vm.granule, 0, Some(taken))?;
    context.track(Resource::AddressRange(ptr, vm.granule));
    expect(
        ptr.0 + vm.granule <= taken.0 || ptr.0 >= taken.0 + 4 * vm.granule,
        "the range does not overlap the one at the hint",
    )
}

fn reservations_do_not_overlap(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let mut ranges = Vec::new();
    for _ in 0..32 {
        let n = 1 + context.random_below(16);
        ranges.push((vm.reserve(n)?.0, n * vm.granule));
    }
    ranges.sort_unstable();
    expect(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "reservations do not overlap")
}

fn reservation_is_freed_as_a_whole(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (ptr, bytes) = (vm.reserve(4)?, 4 * vm.granule);
    expect_error(context.free_range(ptr, vm.granule), InvalidValue)?;
    expect_error(context.free_range(vm.at(ptr, 1), 3 * vm.granule), InvalidValue)?;
    context.untrack(Resource::AddressRange(ptr, bytes));
    context.free_range(ptr, bytes)?;
    expect_error(context.free_range(ptr, bytes), InvalidValue)?;
    expect_error(vm.set_access(ptr, vm.granule, Access::ReadWrite), InvalidValue)
}

fn physical_size_is_validated(context: &TestContext) -> CheckResult {
    VmContext::new(context)?;
    let create = |bytes| context.driver.vm_create(context.device_id, bytes, PhysicalOptions::default());
    expect_error(create(0), InvalidValue)?;
    expect_error(create(1000), InvalidValue)?;
    expect_error(create(1 << 45), OutOfMemory)
}

fn physical_memory_counts_as_used(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let free = || -> CheckResult<u64> { Ok(context.driver.mem_info(context.device_id)?.bytes_free) };
    let before = free()?;
    let physical = vm.create(64)?;
    let during = free()?;
    expect(before - during >= 64 * vm.granule, "its memory is used once it is created")?;
    context.untrack(Resource::Physical(physical));
    context.driver.vm_release(physical)?;
    expect(free()? - during >= 64 * vm.granule, "its memory is free once it is released")
}

fn mapped_memory_stores_data(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (ptr, _) = vm.create_mapped()?;
    let words = context.random_words(vm.granule as usize / 4);
    context.driver.upload(context.device_id, ptr, &to_bytes(&words))?;
    let (stream, n) = (context.stream()?, words.len() as u32);
    context.add_u32(ptr, n, 11, stream)?;
    context.synchronize(stream)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(11)).collect();
    expect_slice_eq("a whole granule", &context.read_words(ptr, words.len())?, &want)
}

fn overlapping_mappings_are_rejected(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (range, physical) = (vm.reserve(4)?, vm.create(2)?);
    vm.map(range, 0, physical, 2)?;
    let map = |at| context.driver.vm_map(vm.at(range, at), physical);
    expect_error_of("mapping at the same address", map(0), InvalidValue)?;
    expect_error_of("mapping over the second half", map(1), InvalidValue)?;
    // Mapping across the end of a range is not checked: CUDA reserves more than requested and allows it.
    expect_error(context.driver.vm_map(DevicePtr(0x5000_0000_0000), physical), InvalidValue)
}

fn memory_without_access_is_rejected(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let stream = context.stream()?;
    let ptr = vm.reserve(2)?;
    expect_error(context.driver.fill(ptr, Pattern::U8(1), 16, stream), InvalidValue)?;
    vm.map(ptr, 0, vm.create(1)?, 1)?;
    expect_error(context.driver.fill(ptr, Pattern::U8(1), 16, stream), InvalidValue)?;
    context.synchronize(stream)?;
    vm.allow_access(ptr, 1)?;
    context.driver.fill(ptr, Pattern::U8(1), 16, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("accessible memory", &context.read_bytes(ptr, 16)?, &[1; 16])
}

fn access_is_set_on_whole_mappings(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (range, physical) = (vm.reserve(4)?, vm.create(2)?);
    vm.map(range, 0, physical, 2)?;
    let set = |at, bytes| vm.set_access(vm.at(range, at), bytes, Access::ReadWrite);
    expect_error_of("half a mapping", set(0, vm.granule), InvalidValue)?;
    expect_error_of("an odd size", set(0, 1000), InvalidValue)?;
    expect_error_of("a mapping and unmapped memory", set(0, 4 * vm.granule), InvalidValue)?;
    expect_error_of("outside the range", set(1 << 15, vm.granule), InvalidValue)?;
    let unknown = [DeviceAccess { device: context.invalid_device_id()?, access: Access::ReadWrite }];
    expect_error(context.driver.vm_set_access(range, 2 * vm.granule, &unknown), InvalidValue)?;
    vm.allow_access(range, 2)
}

fn physical_memory_can_be_mapped_twice(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (range, physical) = (vm.reserve(2)?, vm.create(1)?);
    let first = vm.map(range, 0, physical, 1)?;
    let second = vm.map(range, 1, physical, 1)?;
    vm.allow_access(range, 2)?;
    let bytes = context.random_bytes(5000);
    context.driver.upload(context.device_id, first.offset(100), &bytes)?;
    expect_slice_eq("the second mapping", &context.read_bytes(second.offset(100), 5000)?, &bytes)?;
    let more = context.random_bytes(300);
    context.driver.upload(context.device_id, second.offset(200), &more)?;
    expect_slice_eq("the first mapping", &context.read_bytes(first.offset(200), 300)?, &more)
}

fn adjacent_mappings_act_as_one_range(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let range = vm.reserve(3)?;
    for at in [2, 0, 1] {
        vm.map(range, at, vm.create(1)?, 1)?;
    }
    vm.allow_access(range, 3)?;
    let (stream, bytes) = (context.stream()?, context.random_bytes(3000));
    // The source crosses the boundary of the last two mappings, the target that of the first two.
    let source = vm.at(range, 1).offset(vm.granule - 1500);
    let target = range.offset(vm.granule - 1500);
    context.driver.upload(context.device_id, source, &bytes)?;
    context.driver.copy(target.into(), source.into(), 3000, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("the memory copied across a boundary", &context.read_bytes(target, 3000)?, &bytes)
}

fn copies_beyond_a_mapping_are_rejected(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (range, stream) = (vm.reserve(4)?, context.stream()?);
    let fill = |at: DevicePtr, bytes| context.driver.fill(at, Pattern::U8(4), bytes, stream);
    let first = vm.map(range, 0, vm.create(1)?, 1)?;
    let second = vm.map(range, 1, vm.create(1)?, 1)?;
    vm.allow_access(range, 2)?;
    fill(first, 2 * vm.granule)?;
    expect_error(fill(first, 2 * vm.granule + 1), InvalidValue)?;
    expect_error(fill(second.offset(vm.granule - 1), 2), InvalidValue)?;
    fill(second.offset(vm.granule - 1), 1)?;
    expect(context.driver.is_device_memory(first, 2 * vm.granule), "both pieces are device memory")?;
    expect(!context.driver.is_device_memory(first, 2 * vm.granule + 1), "and no more")?;
    context.synchronize(stream)?;
    vm.unmap(first, 1)?;
    expect_error(fill(first, 16), InvalidValue)?;
    expect_error(fill(first.offset(vm.granule - 8), 16), InvalidValue)?;
    fill(second, vm.granule)?;
    context.synchronize(stream)
}

fn partial_unmap_is_rejected(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let range = vm.reserve(4)?;
    let ptr = vm.map(range, 0, vm.create(2)?, 2)?;
    vm.map(range, 2, vm.create(1)?, 1)?;
    vm.map(range, 3, vm.create(1)?, 1)?;
    expect_error(context.driver.vm_unmap(range, vm.granule), InvalidValue)?;
    expect_error(context.driver.vm_unmap(vm.at(range, 1), 2 * vm.granule), InvalidValue)?;
    // One call can unmap two mappings.
    context.untrack(Resource::Mapping(vm.at(range, 2), vm.granule));
    context.untrack(Resource::Mapping(vm.at(range, 3), vm.granule));
    context.driver.vm_unmap(vm.at(range, 2), 2 * vm.granule)?;
    vm.unmap(ptr, 2)
}

fn unmapping_unmapped_memory_is_a_no_op(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (range, physical) = (vm.reserve(4)?, vm.create(1)?);
    context.driver.vm_unmap(range, vm.granule)?;
    // Also with unmapped memory around a mapping.
    vm.map(range, 1, physical, 1)?;
    context.untrack(Resource::Mapping(vm.at(range, 1), vm.granule));
    context.driver.vm_unmap(range, 4 * vm.granule)?;
    Ok(context.driver.vm_unmap(range, 4 * vm.granule)?)
}

fn reservation_with_mappings_cannot_be_freed(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let range = vm.reserve(4)?;
    let ptr = vm.map(range, 2, vm.create(1)?, 1)?;
    expect_error(context.free_range(range, 4 * vm.granule), InvalidValue)?;
    vm.allow_access(ptr, 1)?;
    context.driver.upload(context.device_id, ptr, &[5; 64])?;
    expect_slice_eq("the mapping after the rejected call", &context.read_bytes(ptr, 64)?, &[5; 64])
}

fn data_stays_with_physical_memory(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (ptr, physical) = vm.create_mapped()?;
    let bytes = context.random_bytes(10_000);
    context.driver.upload(context.device_id, ptr.offset(4096), &bytes)?;
    vm.unmap(ptr, 1)?;
    let moved = vm.map(vm.reserve(2)?, 1, physical, 1)?;
    vm.allow_access(moved, 1)?;
    expect_slice_eq("the contents at the new address", &context.read_bytes(moved.offset(4096), 10_000)?, &bytes)
}

fn mappings_survive_release_of_physical_memory(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (ptr, physical) = vm.create_mapped()?;
    let bytes = context.random_bytes(1000);
    context.driver.upload(context.device_id, ptr, &bytes)?;
    context.untrack(Resource::Physical(physical));
    context.driver.vm_release(physical)?;
    expect_slice_eq("the mapped memory after its release", &context.read_bytes(ptr, 1000)?, &bytes)?;
    vm.unmap(ptr, 1)
}

fn released_physical_memory_is_rejected(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let physical = vm.create(1)?;
    context.untrack(Resource::Physical(physical));
    context.driver.vm_release(physical)?;
    for released in [physical, PhysicalId(u64::MAX)] {
        expect_error(context.driver.vm_release(released), InvalidHandle)?;
        expect_error(context.driver.vm_map(vm.reserve(1)?, released), InvalidHandle)?;
        expect_error(context.driver.vm_export(released, ShareKind::PosixFd), InvalidHandle)?;
    }
    Ok(())
}

fn mapping_does_not_wait_for_the_device(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let stream = context.stream()?;
    context.keep_busy(stream)?;
    let (ptr, _) = vm.create_mapped()?;
    vm.unmap(ptr, 1)?;
    context.expect_busy("the stream", stream)
}

fn memory_is_shared_through_a_file_descriptor(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (physical, handle) = vm.create_shared()?;
    let imported = context.driver.vm_import(context.device_id, &handle, vm.granule)?;
    context.track(Resource::Physical(imported));
    expect(imported != physical, "the imported memory has another id")?;
    let range = vm.reserve(2)?;
    let original = vm.map(range, 0, physical, 1)?;
    let imported_ptr = vm.map(range, 1, imported, 1)?;
    vm.allow_access(range, 2)?;
    let bytes = context.random_bytes(5000);
    context.driver.upload(context.device_id, original, &bytes)?;
    expect_slice_eq("the imported memory", &context.read_bytes(imported_ptr, 5000)?, &bytes)?;
    vm.unmap(original, 1)?;
    context.untrack(Resource::Physical(physical));
    context.driver.vm_release(physical)?;
    expect_slice_eq(
        "the imported memory after the release of the original",
        &context.read_bytes(imported_ptr, 5000)?,
        &bytes,
    )
}

fn only_shareable_memory_can_be_exported(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    expect_error(context.driver.vm_export(vm.create(1)?, ShareKind::PosixFd), InvalidValue)
}

fn unrelated_file_descriptor_is_rejected(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    vm.require_file_descriptors()?;
    let Ok(unrelated) = File::open("/dev/null").and_then(descriptor::of_file) else {
        return crate::expect::skip("there is no /dev/null");
    };
    let result = context.driver.vm_import(context.device_id, &SharedMemory::PosixFd(unrelated), vm.granule);
    let code = result.as_ref().err().map(|error| error.code);
    expect(matches!(code, Some(InvalidValue | UnknownError)), &format!("the import fails, got {result:?}"))
}

fn import_with_wrong_size_is_rejected(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (_, handle) = vm.create_shared()?;
    let range = vm.reserve(4)?;
    // A driver may reject the wrong size at import or at mapping.
    let mapped = context.driver.vm_import(context.device_id, &handle, 2 * vm.granule).and_then(|imported| {
        context.track(Resource::Physical(imported));
        context.driver.vm_map(range, imported)
    });
    expect(mapped.is_err(), "the wrong size is rejected")
}

fn access_can_be_reduced_and_restored(context: &TestContext) -> CheckResult {
    let vm = VmContext::new(context)?;
    let (ptr, _) = vm.create_mapped()?;
    context.driver.upload(context.device_id, ptr, &[9; 64])?;
    vm.set_access(ptr, vm.granule, Access::Read)?;
    expect_slice_eq("read-only memory", &context.read_bytes(ptr, 64)?, &[9; 64])?;
    vm.set_access(ptr, vm.granule, Access::None)?;
    expect_error(context.driver.download(context.device_id, ptr, &mut [0; 64]), InvalidValue)?;
    vm.allow_access(ptr, 1)?;
    expect_slice_eq("memory that is accessible again", &context.read_bytes(ptr, 64)?, &[9; 64])
}
