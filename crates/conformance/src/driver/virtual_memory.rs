//! Virtual memory by hand: reserve, create, map, give access; and each step back.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::Check;
use super::bench::Bench;
use super::granules::Granules;
use super::owned::Owned;
use crate::expect::{Checked, expect, expect_code, expect_code_of, expect_eq, expect_same, need};
use crate::launch::free_range;
use warpool_driver::ErrorCode::{InvalidHandle, InvalidValue, OutOfMemory, UnknownError};
use warpool_driver::{
    Access, DeviceAccess, DevicePtr, Granularity, Pattern, PhysicalId, PhysicalOptions, ShareKind, SharedMemory,
};

pub(super) const CHECKS: &[Check] = super::checks![
    granularity_is_what_the_properties_say,
    ranges_have_legal_sizes_and_alignment,
    a_terabyte_can_be_reserved,
    a_hint_is_only_a_wish,
    ranges_do_not_overlap,
    a_range_is_given_back_whole,
    physical_memory_has_legal_sizes,
    physical_memory_counts_as_used,
    mapped_memory_holds_data,
    a_piece_fills_its_place_once,
    memory_without_access_is_refused,
    access_covers_whole_pieces,
    one_piece_can_be_mapped_twice,
    several_pieces_make_one_range,
    unmapping_cuts_no_piece,
    unmapping_nothing_is_fine,
    a_range_with_mappings_stays,
    data_follows_its_piece,
    releasing_leaves_mappings_alone,
    mapping_does_not_wait_for_the_device,
    a_file_descriptor_carries_memory,
    only_memory_made_for_it_is_exported,
    a_foreign_file_descriptor_is_refused,
    an_import_has_the_size_of_its_memory,
    access_can_be_read_only_and_taken_back,
    ; provoking:
    a_released_piece_is_unknown,
];

fn granularity_is_what_the_properties_say(bench: &Bench<'_>) -> Checked {
    let properties = bench.properties()?;
    need(properties.virtual_memory, "the device maps no memory by hand")?;
    let least = bench.driver.vm_granularity(bench.device, Granularity::Minimum)?;
    let best = bench.driver.vm_granularity(bench.device, Granularity::Recommended)?;
    expect_eq("the least granularity", least, properties.granularity)?;
    expect(best >= least && best % least == 0, "a recommended granularity made of the least one")
}

fn ranges_have_legal_sizes_and_alignment(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let reserve = |bytes, align| bench.driver.vm_reserve(bytes, align, None);
    expect_code(reserve(0, 0), InvalidValue)?;
    expect_code(reserve(1000, 0), InvalidValue)?;
    expect_code(reserve(granules.bytes, 3 * granules.bytes), InvalidValue)?;
    expect_code(reserve(1 << 60, 0), OutOfMemory)?;
    for align in [0, 512, granules.bytes, 1 << 30] {
        let ptr = reserve(granules.bytes, align)?;
        bench.own(Owned::Range(ptr, granules.bytes));
        expect_eq("the address modulo its alignment", ptr.0 % align.max(1), 0)?;
        expect_eq("the address modulo 2 MiB", ptr.0 % (2 << 20), 0)?;
    }
    Ok(())
}

fn a_terabyte_can_be_reserved(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let before = bench.driver.mem_info(bench.device)?.bytes_free;
    let ptr = bench.driver.vm_reserve(1 << 40, 0, None)?;
    bench.own(Owned::Range(ptr, 1 << 40));
    let after = bench.driver.mem_info(bench.device)?.bytes_free;
    expect(before.saturating_sub(after) < 64 << 20, "addresses to take no device memory")?;
    let last = (1 << 40) / granules.bytes - 1;
    let end = granules.map(ptr, last, granules.piece()?, 1)?;
    granules.open(end, 1)?;
    bench.driver.upload(bench.device, end.offset(granules.bytes - 4), &[1, 2, 3, 4])?;
    expect_same("its last bytes", &bench.bytes_at(end.offset(granules.bytes - 4), 4)?, &[1, 2, 3, 4])
}

fn a_hint_is_only_a_wish(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let taken = granules.reserve(4)?;
    let ptr = bench.driver.vm_reserve(granules.bytes, 0, Some(taken))?;
    bench.own(Owned::Range(ptr, granules.bytes));
    expect(
        ptr.0 + granules.bytes <= taken.0 || ptr.0 >= taken.0 + 4 * granules.bytes,
        "a range beside the one that was hinted at",
    )
}

fn ranges_do_not_overlap(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let mut ranges = Vec::new();
    for _ in 0..32 {
        let n = 1 + bench.below(16);
        ranges.push((granules.reserve(n)?.0, n * granules.bytes));
    }
    ranges.sort_unstable();
    expect(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "ranges that do not overlap")
}

fn a_range_is_given_back_whole(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (ptr, bytes) = (granules.reserve(4)?, 4 * granules.bytes);
    expect_code(free_range(bench.driver, ptr, granules.bytes), InvalidValue)?;
    expect_code(free_range(bench.driver, granules.at(ptr, 1), 3 * granules.bytes), InvalidValue)?;
    bench.disown(Owned::Range(ptr, bytes));
    free_range(bench.driver, ptr, bytes)?;
    expect_code(free_range(bench.driver, ptr, bytes), InvalidValue)?;
    expect_code(granules.set_access(ptr, granules.bytes, Access::ReadWrite), InvalidValue)
}

fn physical_memory_has_legal_sizes(bench: &Bench<'_>) -> Checked {
    Granules::new(bench)?;
    let create = |bytes| bench.driver.vm_create(bench.device, bytes, PhysicalOptions::default());
    expect_code(create(0), InvalidValue)?;
    expect_code(create(1000), InvalidValue)?;
    expect_code(create(1 << 45), OutOfMemory)
}

fn physical_memory_counts_as_used(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let free = || -> Checked<u64> { Ok(bench.driver.mem_info(bench.device)?.bytes_free) };
    let before = free()?;
    let physical = granules.create(64, PhysicalOptions::default())?;
    let during = free()?;
    expect(before - during >= 64 * granules.bytes, "its bytes to be taken when it is created")?;
    bench.disown(Owned::Physical(physical));
    bench.driver.vm_release(physical)?;
    expect(free()? - during >= 64 * granules.bytes, "its bytes back when it is released")
}

fn mapped_memory_holds_data(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (ptr, _) = granules.mapped()?;
    let words = bench.random_words(granules.bytes as usize / 4);
    bench.driver.upload(bench.device, ptr, &super::bench::to_bytes(&words))?;
    let (stream, n) = (bench.stream()?, words.len() as u32);
    bench.add(ptr, n, 11, stream)?;
    bench.sync(stream)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(11)).collect();
    expect_same("a whole granule", &bench.words_at(ptr, words.len())?, &want)
}

fn a_piece_fills_its_place_once(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (range, physical) = (granules.reserve(4)?, granules.create(2, PhysicalOptions::default())?);
    granules.map(range, 0, physical, 2)?;
    let map = |at| bench.driver.vm_map(granules.at(range, at), physical);
    expect_code_of("mapping over itself", map(0), InvalidValue)?;
    expect_code_of("mapping over half of it", map(1), InvalidValue)?;
    // Nothing is asked about the end of a range: CUDA reserves more than it says and maps across.
    expect_code(bench.driver.vm_map(DevicePtr(0x5000_0000_0000), physical), InvalidValue)
}

fn memory_without_access_is_refused(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let stream = bench.stream()?;
    let ptr = granules.reserve(2)?;
    expect_code(bench.driver.fill(ptr, Pattern::U8(1), 16, stream), InvalidValue)?;
    granules.map(ptr, 0, granules.piece()?, 1)?;
    expect_code(bench.driver.fill(ptr, Pattern::U8(1), 16, stream), InvalidValue)?;
    bench.sync(stream)?;
    granules.open(ptr, 1)?;
    bench.driver.fill(ptr, Pattern::U8(1), 16, stream)?;
    bench.sync(stream)?;
    expect_same("memory once it may be touched", &bench.bytes_at(ptr, 16)?, &[1; 16])
}

fn access_covers_whole_pieces(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (range, physical) = (granules.reserve(4)?, granules.create(2, PhysicalOptions::default())?);
    granules.map(range, 0, physical, 2)?;
    let set = |at, bytes| granules.set_access(granules.at(range, at), bytes, Access::ReadWrite);
    expect_code_of("half a piece", set(0, granules.bytes), InvalidValue)?;
    expect_code_of("an odd size", set(0, 1000), InvalidValue)?;
    expect_code_of("a piece and a hole", set(0, 4 * granules.bytes), InvalidValue)?;
    expect_code_of("nowhere", set(1 << 15, granules.bytes), InvalidValue)?;
    let unknown = [DeviceAccess { device: bench.no_device()?, access: Access::ReadWrite }];
    expect_code(bench.driver.vm_set_access(range, 2 * granules.bytes, &unknown), InvalidValue)?;
    granules.open(range, 2)
}

fn one_piece_can_be_mapped_twice(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (range, physical) = (granules.reserve(2)?, granules.piece()?);
    let first = granules.map(range, 0, physical, 1)?;
    let second = granules.map(range, 1, physical, 1)?;
    granules.open(range, 2)?;
    let bytes = bench.random_bytes(5000);
    bench.driver.upload(bench.device, first.offset(100), &bytes)?;
    expect_same("the second view", &bench.bytes_at(second.offset(100), 5000)?, &bytes)?;
    let more = bench.random_bytes(300);
    bench.driver.upload(bench.device, second.offset(200), &more)?;
    expect_same("the first view", &bench.bytes_at(first.offset(200), 300)?, &more)
}

fn several_pieces_make_one_range(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let range = granules.reserve(3)?;
    for at in [2, 0, 1] {
        granules.map(range, at, granules.piece()?, 1)?;
    }
    granules.open(range, 3)?;
    let (stream, bytes) = (bench.stream()?, bench.random_bytes(3000));
    // The source lies over the border between the last two pieces, the target over the one between the first two.
    let source = granules.at(range, 1).offset(granules.bytes - 1500);
    let target = range.offset(granules.bytes - 1500);
    bench.driver.upload(bench.device, source, &bytes)?;
    bench.driver.copy(target.into(), source.into(), 3000, stream)?;
    bench.sync(stream)?;
    expect_same("what was copied over a border", &bench.bytes_at(target, 3000)?, &bytes)
}

fn unmapping_cuts_no_piece(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let range = granules.reserve(4)?;
    let ptr = granules.map(range, 0, granules.create(2, PhysicalOptions::default())?, 2)?;
    granules.map(range, 2, granules.piece()?, 1)?;
    granules.map(range, 3, granules.piece()?, 1)?;
    expect_code(bench.driver.vm_unmap(range, granules.bytes), InvalidValue)?;
    expect_code(bench.driver.vm_unmap(granules.at(range, 1), 2 * granules.bytes), InvalidValue)?;
    // Two pieces go in one call.
    bench.disown(Owned::Mapping(granules.at(range, 2), granules.bytes));
    bench.disown(Owned::Mapping(granules.at(range, 3), granules.bytes));
    bench.driver.vm_unmap(granules.at(range, 2), 2 * granules.bytes)?;
    granules.unmap(ptr, 2)
}

fn unmapping_nothing_is_fine(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (range, physical) = (granules.reserve(4)?, granules.piece()?);
    bench.driver.vm_unmap(range, granules.bytes)?;
    // With holes around it, too.
    granules.map(range, 1, physical, 1)?;
    bench.disown(Owned::Mapping(granules.at(range, 1), granules.bytes));
    bench.driver.vm_unmap(range, 4 * granules.bytes)?;
    Ok(bench.driver.vm_unmap(range, 4 * granules.bytes)?)
}

fn a_range_with_mappings_stays(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let range = granules.reserve(4)?;
    let ptr = granules.map(range, 2, granules.piece()?, 1)?;
    expect_code(free_range(bench.driver, range, 4 * granules.bytes), InvalidValue)?;
    granules.open(ptr, 1)?;
    bench.driver.upload(bench.device, ptr, &[5; 64])?;
    expect_same("the mapping after the failure", &bench.bytes_at(ptr, 64)?, &[5; 64])
}

fn data_follows_its_piece(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (ptr, physical) = granules.mapped()?;
    let bytes = bench.random_bytes(10_000);
    bench.driver.upload(bench.device, ptr.offset(4096), &bytes)?;
    granules.unmap(ptr, 1)?;
    let elsewhere = granules.map(granules.reserve(2)?, 1, physical, 1)?;
    granules.open(elsewhere, 1)?;
    expect_same("the piece at its new place", &bench.bytes_at(elsewhere.offset(4096), 10_000)?, &bytes)
}

fn releasing_leaves_mappings_alone(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (ptr, physical) = granules.mapped()?;
    let bytes = bench.random_bytes(1000);
    bench.driver.upload(bench.device, ptr, &bytes)?;
    bench.disown(Owned::Physical(physical));
    bench.driver.vm_release(physical)?;
    expect_same("mapped memory after its release", &bench.bytes_at(ptr, 1000)?, &bytes)?;
    granules.unmap(ptr, 1)
}

fn a_released_piece_is_unknown(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let physical = granules.piece()?;
    bench.disown(Owned::Physical(physical));
    bench.driver.vm_release(physical)?;
    for gone in [physical, PhysicalId(u64::MAX)] {
        expect_code(bench.driver.vm_release(gone), InvalidHandle)?;
        expect_code(bench.driver.vm_map(granules.reserve(1)?, gone), InvalidHandle)?;
        expect_code(bench.driver.vm_export(gone, ShareKind::PosixFd), InvalidHandle)?;
    }
    Ok(())
}

fn mapping_does_not_wait_for_the_device(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let stream = bench.stream()?;
    bench.spin_long(stream)?;
    let (ptr, _) = granules.mapped()?;
    granules.unmap(ptr, 1)?;
    bench.expect_busy("the work under way", stream)
}

fn a_file_descriptor_carries_memory(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (physical, handle) = granules.shared()?;
    let imported = bench.driver.vm_import(bench.device, &handle, granules.bytes)?;
    bench.own(Owned::Physical(imported));
    expect(imported != physical, "an id of its own")?;
    let range = granules.reserve(2)?;
    let ours = granules.map(range, 0, physical, 1)?;
    let theirs = granules.map(range, 1, imported, 1)?;
    granules.open(range, 2)?;
    let bytes = bench.random_bytes(5000);
    bench.driver.upload(bench.device, ours, &bytes)?;
    expect_same("the imported memory", &bench.bytes_at(theirs, 5000)?, &bytes)?;
    granules.unmap(ours, 1)?;
    bench.disown(Owned::Physical(physical));
    bench.driver.vm_release(physical)?;
    expect_same("the imported memory, alone", &bench.bytes_at(theirs, 5000)?, &bytes)
}

fn only_memory_made_for_it_is_exported(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    expect_code(bench.driver.vm_export(granules.piece()?, ShareKind::PosixFd), InvalidValue)
}

fn a_foreign_file_descriptor_is_refused(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    granules.need_file_descriptors()?;
    let Ok(file) = File::open("/dev/null") else {
        return crate::expect::skip("there is no /dev/null here");
    };
    let result = bench.driver.vm_import(bench.device, &SharedMemory::PosixFd(OwnedFd::from(file)), granules.bytes);
    let code = result.as_ref().err().map(|error| error.code);
    expect(matches!(code, Some(InvalidValue | UnknownError)), &format!("a refusal, got {result:?}"))
}

fn an_import_has_the_size_of_its_memory(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (_, handle) = granules.shared()?;
    let range = granules.reserve(4)?;
    // A driver may notice the wrong size at once, or when the memory is mapped.
    let mapped = bench.driver.vm_import(bench.device, &handle, 2 * granules.bytes).and_then(|imported| {
        bench.own(Owned::Physical(imported));
        bench.driver.vm_map(range, imported)
    });
    expect(mapped.is_err(), "a refusal of the wrong size")
}

fn access_can_be_read_only_and_taken_back(bench: &Bench<'_>) -> Checked {
    let granules = Granules::new(bench)?;
    let (ptr, _) = granules.mapped()?;
    bench.driver.upload(bench.device, ptr, &[9; 64])?;
    granules.set_access(ptr, granules.bytes, Access::Read)?;
    expect_same("memory that may be read", &bench.bytes_at(ptr, 64)?, &[9; 64])?;
    granules.set_access(ptr, granules.bytes, Access::None)?;
    expect_code(bench.driver.download(bench.device, ptr, &mut [0; 64]), InvalidValue)?;
    granules.open(ptr, 1)?;
    expect_same("memory that is open again", &bench.bytes_at(ptr, 64)?, &[9; 64])
}
