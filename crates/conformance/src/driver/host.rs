//! Pinned host memory, allocated and registered.

use std::sync::Arc;

use super::Check;
use super::bench::{Bench, to_bytes, to_words};
use super::owned::Owned;
use crate::expect::{Checked, expect_code, expect_code_of, expect_eq, expect_same, need};
use warpool_driver::ErrorCode::{HostMemoryAlreadyRegistered, HostMemoryNotRegistered, InvalidDevice, InvalidValue};
use warpool_driver::{HostOptions, HostPages, HostPtr, HostRange, KernelArg};

pub(super) const CHECKS: &[Check] = super::checks![
    no_bytes_are_refused,
    the_host_reads_what_it_wrote,
    reads_and_writes_stay_in_their_range,
    kernels_use_pinned_memory,
    device_addresses_keep_offsets,
    memory_that_is_not_pinned_has_no_device_address,
    only_the_start_of_an_allocation_is_freed,
    freeing_waits_for_the_device,
    every_kind_of_pinned_memory_works,
    memory_can_be_pinned_where_it_is,
    nothing_is_registered_twice,
    a_range_is_unregistered_by_its_start,
    a_range_need_not_be_page_aligned,
    registered_memory_is_not_freed,
    unregistered_memory_is_not_pinned,
    any_thread_may_free_pinned_memory,
    pages_stay_while_they_are_pinned,
    pages_are_pinned_once_at_a_time,
    ; provoking:
    nothing_is_freed_twice,
];

fn no_bytes_are_refused(bench: &Bench<'_>) -> Checked {
    expect_code(bench.driver.host_alloc(bench.device, 0, HostOptions::default()), InvalidValue)
}

fn the_host_reads_what_it_wrote(bench: &Bench<'_>) -> Checked {
    for n in [1, 3, 4096, 4097, 100_001] {
        let bytes = bench.random_bytes(n);
        let ptr = bench.pinned_of(&bytes)?;
        expect_same("pinned memory", &bench.pinned_bytes(ptr, n)?, &bytes)?;
        let (from, some) = (n / 3, bench.random_bytes(n / 3));
        bench.driver.host_write(ptr.offset(from as u64), &some)?;
        let mut want = bytes;
        want[from..from + some.len()].copy_from_slice(&some);
        expect_same("pinned memory, partly written", &bench.pinned_bytes(ptr, n)?, &want)?;
    }
    Ok(())
}

fn reads_and_writes_stay_in_their_range(bench: &Bench<'_>) -> Checked {
    let ptr = bench.pinned_of(&[1; 4096])?;
    let (read, write) = (
        |ptr, n: usize| bench.driver.host_read(ptr, &mut vec![0; n]),
        |ptr, n: usize| bench.driver.host_write(ptr, &vec![2; n]),
    );
    let nowhere = bench.pages(1).ptr();
    expect_code_of("a read past the end", read(ptr, 4097), InvalidValue)?;
    expect_code_of("a read over the end", read(ptr.offset(4000), 97), InvalidValue)?;
    expect_code_of("a read of other memory", read(nowhere, 16), InvalidValue)?;
    expect_code_of("a write past the end", write(ptr, 4097), InvalidValue)?;
    expect_code_of("a write over the end", write(ptr.offset(4000), 97), InvalidValue)?;
    expect_code_of("a write of other memory", write(nowhere, 16), InvalidValue)?;
    expect_same("the memory after the failures", &bench.pinned_bytes(ptr, 4096)?, &[1; 4096])?;
    Ok(read(ptr.offset(4000), 96)?)
}

fn kernels_use_pinned_memory(bench: &Bench<'_>) -> Checked {
    let (stream, n) = (bench.stream()?, 3000_u32);
    let words = bench.random_words(n as usize);
    let ptr = bench.pinned_of(&to_bytes(&words))?;
    let there = bench.driver.host_device_ptr(bench.device, ptr)?;
    bench.add(there, n, 77, stream)?;
    bench.sync(stream)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(77)).collect();
    expect_same("what the kernel left", &to_words(&bench.pinned_bytes(ptr, 4 * n as usize)?), &want)
}

fn device_addresses_keep_offsets(bench: &Bench<'_>) -> Checked {
    let ptr = bench.pinned(10_000)?;
    let start = bench.driver.host_device_ptr(bench.device, ptr)?;
    for offset in [8, 4096, 9999] {
        let inside = bench.driver.host_device_ptr(bench.device, ptr.offset(offset))?;
        expect_eq("the device address inside", inside, start.offset(offset))?;
    }
    Ok(())
}

fn memory_that_is_not_pinned_has_no_device_address(bench: &Bench<'_>) -> Checked {
    expect_code(bench.driver.host_device_ptr(bench.device, bench.pages(1).ptr()), InvalidValue)
}

fn only_the_start_of_an_allocation_is_freed(bench: &Bench<'_>) -> Checked {
    let ptr = bench.pinned_of(&[4; 4096])?;
    expect_code(bench.driver.host_free(ptr.offset(8)), InvalidValue)?;
    expect_code(bench.driver.host_free(bench.pages(1).ptr()), InvalidValue)?;
    expect_same("the memory after the failures", &bench.pinned_bytes(ptr, 4096)?, &[4; 4096])
}

fn nothing_is_freed_twice(bench: &Bench<'_>) -> Checked {
    let ptr = bench.pinned(4096)?;
    bench.disown(Owned::Pinned(ptr));
    bench.driver.host_free(ptr)?;
    expect_code(bench.driver.host_free(ptr), InvalidValue)?;
    expect_code(bench.driver.host_read(ptr, &mut [0; 16]), InvalidValue)
}

fn freeing_waits_for_the_device(bench: &Bench<'_>) -> Checked {
    let (stream, log, ptr) = (bench.stream()?, bench.log(1)?, bench.pinned(1 << 20)?);
    bench.spin(stream)?;
    bench.append(log, 1, stream)?;
    bench.disown(Owned::Pinned(ptr));
    bench.driver.host_free(ptr)?;
    bench.expect_idle("all work", stream)?;
    bench.expect_log(log, &[1])
}

fn every_kind_of_pinned_memory_works(bench: &Bench<'_>) -> Checked {
    let (stream, memory) = (bench.stream()?, bench.memory(4096)?);
    for kind in 0..8 {
        let options = HostOptions { portable: kind & 1 != 0, mapped: kind & 2 != 0, write_combined: kind & 4 != 0 };
        let bytes = bench.random_bytes(4096);
        let ptr = bench.driver.host_alloc(bench.device, 4096, options)?;
        bench.own(Owned::Pinned(ptr));
        bench.driver.host_write(ptr, &bytes)?;
        bench.driver.copy(memory.into(), ptr.into(), 4096, stream)?;
        bench.sync(stream)?;
        expect_same(&format!("memory copied from {options:?}"), &bench.bytes_at(memory, 4096)?, &bytes)?;
    }
    Ok(())
}

/// Pages that can be pinned, or a skip.
fn registrable(bench: &Bench<'_>, n: usize) -> Checked<HostRange> {
    need(bench.properties()?.host_registration, "the device pins no memory where it is")?;
    Ok(bench.pages(n))
}

/// A part of a range.
fn part(range: &HostRange, offset: u64, bytes: u64) -> HostRange {
    assert!(offset + bytes <= range.bytes(), "a part lies inside");
    // SAFETY: a part of a range that lives as the whole does.
    unsafe { HostRange::new(range.ptr().offset(offset), bytes) }
}

fn memory_can_be_pinned_where_it_is(bench: &Bench<'_>) -> Checked {
    let (stream, n) = (bench.stream()?, 4096_u32);
    let ptr = bench.register(registrable(bench, 4)?)?;
    let words = bench.random_words(n as usize);
    let memory = bench.words_of(&words)?;
    bench.driver.copy(ptr.into(), memory.into(), 4 * u64::from(n), stream)?;
    let there = bench.driver.host_device_ptr(bench.device, ptr)?;
    bench.add(there, n, 9, stream)?;
    bench.sync(stream)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(9)).collect();
    expect_same("what a copy and a kernel left", &to_words(&bench.pinned_bytes(ptr, 4 * n as usize)?), &want)?;
    bench.driver.host_write(ptr, &[3; 64])?;
    bench.driver.copy(memory.into(), ptr.into(), 64, stream)?;
    bench.sync(stream)?;
    expect_same("what was copied from it", &bench.bytes_at(memory, 64)?, &[3; 64])
}

fn nothing_is_registered_twice(bench: &Bench<'_>) -> Checked {
    let range = registrable(bench, 4)?;
    bench.register(range.clone())?;
    let register = |range| bench.driver.host_register(bench.device, range, HostOptions::default());
    expect_code_of("the same range", register(range.clone()), HostMemoryAlreadyRegistered)?;
    expect_code_of("a part of it", register(part(&range, 4096, 4096)), HostMemoryAlreadyRegistered)?;
    expect_code_of("no bytes", register(part(&bench.pages(1), 0, 0)), InvalidValue)
}

fn a_range_is_unregistered_by_its_start(bench: &Bench<'_>) -> Checked {
    let ptr = bench.register(registrable(bench, 4)?)?;
    expect_code(bench.driver.host_unregister(ptr.offset(4096)), InvalidValue)?;
    bench.disown(Owned::Registered(ptr));
    bench.driver.host_unregister(ptr)?;
    expect_code(bench.driver.host_unregister(ptr), HostMemoryNotRegistered)
}

fn a_range_need_not_be_page_aligned(bench: &Bench<'_>) -> Checked {
    let range = part(&registrable(bench, 4)?, 100, 5000);
    let ptr = bench.register(range)?;
    let (stream, bytes) = (bench.stream()?, bench.random_bytes(5000));
    let memory = bench.memory_of(&bytes)?;
    bench.driver.copy(ptr.into(), memory.into(), 5000, stream)?;
    bench.sync(stream)?;
    expect_same("an odd range", &bench.pinned_bytes(ptr, 5000)?, &bytes)
}

fn registered_memory_is_not_freed(bench: &Bench<'_>) -> Checked {
    let ptr = bench.register(registrable(bench, 1)?)?;
    expect_code(bench.driver.host_free(ptr), InvalidValue)
}

fn unregistered_memory_is_not_pinned(bench: &Bench<'_>) -> Checked {
    let (stream, memory) = (bench.stream()?, bench.memory(64)?);
    let ptr = bench.register(registrable(bench, 1)?)?;
    bench.disown(Owned::Registered(ptr));
    bench.driver.host_unregister(ptr)?;
    expect_code(bench.driver.host_device_ptr(bench.device, ptr), InvalidValue)?;
    expect_code(bench.driver.host_read(ptr, &mut [0; 16]), InvalidValue)?;
    expect_code(bench.driver.copy(memory.into(), ptr.into(), 64, stream), InvalidValue)
}

fn any_thread_may_free_pinned_memory(bench: &Bench<'_>) -> Checked {
    let bytes = bench.random_bytes(512);
    let ptr: HostPtr = bench.elsewhere(|| bench.pinned_of(&bytes))?;
    expect_same("what another thread wrote", &bench.pinned_bytes(ptr, 512)?, &bytes)?;
    let (stream, memory) = (bench.stream()?, bench.memory(512)?);
    bench.launch(bench.kernels()?.fill_index, 128, &[memory.into(), KernelArg::U32(128)], stream)?;
    bench.driver.copy(ptr.into(), memory.into(), 512, stream)?;
    bench.sync(stream)?;
    expect_same("what was copied", &to_words(&bench.pinned_bytes(ptr, 512)?), &(0..128).collect::<Vec<_>>())?;
    bench.disown(Owned::Pinned(ptr));
    Ok(bench.elsewhere(|| bench.driver.host_free(ptr))?)
}

/// Pages that can be pinned, or a skip.
fn own_pages(bench: &Bench<'_>, bytes: u64) -> Checked<Arc<HostPages>> {
    need(bench.properties()?.host_registration, "the device pins no memory where it is")?;
    Ok(HostPages::map(bytes, true).expect("the host has a few megabytes"))
}

fn pages_stay_while_they_are_pinned(bench: &Bench<'_>) -> Checked {
    let (stream, n) = (bench.stream()?, (5 << 20) + 4096);
    let pages = own_pages(bench, n)?;
    pages.prefault(2);
    let alive = Arc::downgrade(&pages);
    let ptr = bench.register(HostRange::of_pages(&pages))?;
    let (bytes, end) = (bench.random_bytes(4096), ptr.offset(n - 4096));
    bench.driver.host_write(ptr, &bytes)?;
    drop(pages);
    let there = bench.memory(4096)?;
    bench.driver.copy(there.into(), ptr.into(), 4096, stream)?;
    bench.driver.copy(end.into(), there.into(), 4096, stream)?;
    bench.sync(stream)?;
    expect_same("the pages after their owner let them go", &bench.pinned_bytes(ptr, 4096)?, &bytes)?;
    expect_same("what came back from the device", &bench.pinned_bytes(end, 4096)?, &bytes)?;
    expect_eq("whether the driver keeps the pages", alive.strong_count(), 1)?;
    bench.disown(Owned::Registered(ptr));
    bench.driver.host_unregister(ptr)?;
    expect_eq("whether it keeps them after", alive.strong_count(), 0)
}

fn pages_are_pinned_once_at_a_time(bench: &Bench<'_>) -> Checked {
    let pages = own_pages(bench, 4096)?;
    let register = || bench.driver.host_register(bench.device, HostRange::of_pages(&pages), HostOptions::default());
    // A registration that fails takes nothing.
    let none = bench.no_device()?;
    let failed = bench.driver.host_register(none, HostRange::of_pages(&pages), HostOptions::default());
    expect_code(failed, InvalidDevice)?;
    for _ in 0..2 {
        let ptr = bench.register(HostRange::of_pages(&pages))?;
        expect_code_of("the same pages", register(), HostMemoryAlreadyRegistered)?;
        bench.disown(Owned::Registered(ptr));
        bench.driver.host_unregister(ptr)?;
    }
    expect_eq("who has the pages in the end", Arc::strong_count(&pages), 1)
}
