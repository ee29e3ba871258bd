//! Pinned host memory, allocated and registered.

use std::sync::Arc;

use warpool_driver::ErrorCode::{HostMemoryAlreadyRegistered, HostMemoryNotRegistered, InvalidDevice, InvalidValue};
use warpool_driver::{HostOptions, HostPages, HostPtr, HostRange, StreamId};

use crate::check::Check;
use crate::context::{Resource, TestContext, to_bytes, to_words};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, expect_slice_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    zero_bytes_are_rejected,
    host_reads_what_it_wrote,
    out_of_range_reads_and_writes_are_rejected,
    kernels_access_pinned_memory,
    device_address_preserves_offset,
    pageable_memory_has_no_device_address,
    only_the_start_of_an_allocation_can_be_freed,
    free_waits_for_the_device,
    all_host_options_work,
    registered_memory_is_used_by_copies_and_kernels,
    double_registration_is_rejected,
    unregister_requires_the_start_of_a_range,
    registered_range_need_not_be_page_aligned,
    registered_memory_cannot_be_freed,
    unregistered_memory_is_pageable_again,
    unregistering_waits_for_the_device,
    any_thread_may_free_pinned_memory,
    driver_keeps_registered_pages_alive,
    pages_can_be_registered_again_after_unregister,
    ; provoking hazards:
    double_free_is_rejected,
    host_read_during_a_copy_sees_old_or_new_bytes,
];

fn zero_bytes_are_rejected(context: &TestContext) -> CheckResult {
    expect_error(context.driver.host_alloc(context.device_id, 0, HostOptions::default()), InvalidValue)
}

fn host_reads_what_it_wrote(context: &TestContext) -> CheckResult {
    for n in [1, 3, 4096, 4097, 100_001] {
        let bytes = context.random_bytes(n);
        let ptr = context.alloc_pinned_bytes(&bytes)?;
        expect_slice_eq("pinned memory", &context.read_pinned(ptr, n)?, &bytes)?;
        let (from, some) = (n / 3, context.random_bytes(n / 3));
        context.driver.host_write(ptr.offset(from as u64), &some)?;
        let mut want = bytes;
        want[from..from + some.len()].copy_from_slice(&some);
        expect_slice_eq("pinned memory, partly written", &context.read_pinned(ptr, n)?, &want)?;
    }
    Ok(())
}

fn out_of_range_reads_and_writes_are_rejected(context: &TestContext) -> CheckResult {
    let ptr = context.alloc_pinned_bytes(&[1; 4096])?;
    let (read, write) = (
        |ptr, n: usize| context.driver.host_read(ptr, &mut vec![0; n]),
        |ptr, n: usize| context.driver.host_write(ptr, &vec![2; n]),
    );
    let nowhere = context.host_pages(1).ptr();
    expect_error_of("a read past the end", read(ptr, 4097), InvalidValue)?;
    expect_error_of("a read across the end", read(ptr.offset(4000), 97), InvalidValue)?;
    expect_error_of("a read of pageable memory", read(nowhere, 16), InvalidValue)?;
    expect_error_of("a write past the end", write(ptr, 4097), InvalidValue)?;
    expect_error_of("a write across the end", write(ptr.offset(4000), 97), InvalidValue)?;
    expect_error_of("a write of pageable memory", write(nowhere, 16), InvalidValue)?;
    expect_slice_eq("the memory after the rejected calls", &context.read_pinned(ptr, 4096)?, &[1; 4096])?;
    Ok(read(ptr.offset(4000), 96)?)
}

fn kernels_access_pinned_memory(context: &TestContext) -> CheckResult {
    let (stream, n) = (context.stream()?, 3000_u32);
    let words = context.random_words(n as usize);
    let ptr = context.alloc_pinned_bytes(&to_bytes(&words))?;
    let there = context.driver.host_device_ptr(context.device_id, ptr)?;
    context.add_u32(there, n, 77, stream)?;
    context.synchronize(stream)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(77)).collect();
    expect_slice_eq("the result of the kernel", &to_words(&context.read_pinned(ptr, 4 * n as usize)?), &want)
}

fn device_address_preserves_offset(context: &TestContext) -> CheckResult {
    let ptr = context.alloc_pinned(10_000)?;
    let start = context.driver.host_device_ptr(context.device_id, ptr)?;
    for offset in [8, 4096, 9999] {
        let inside = context.driver.host_device_ptr(context.device_id, ptr.offset(offset))?;
        expect_eq("the device address at an offset", inside, start.offset(offset))?;
    }
    Ok(())
}

fn pageable_memory_has_no_device_address(context: &TestContext) -> CheckResult {
    expect_error(context.driver.host_device_ptr(context.device_id, context.host_pages(1).ptr()), InvalidValue)
}

fn only_the_start_of_an_allocation_can_be_freed(context: &TestContext) -> CheckResult {
    let ptr = context.alloc_pinned_bytes(&[4; 4096])?;
    expect_error(context.driver.host_free(ptr.offset(8)), InvalidValue)?;
    expect_error(context.driver.host_free(context.host_pages(1).ptr()), InvalidValue)?;
    expect_slice_eq("the memory after the rejected calls", &context.read_pinned(ptr, 4096)?, &[4; 4096])
}

fn double_free_is_rejected(context: &TestContext) -> CheckResult {
    let ptr = context.alloc_pinned(4096)?;
    context.untrack(Resource::Pinned(ptr));
    context.driver.host_free(ptr)?;
    expect_error(context.driver.host_free(ptr), InvalidValue)?;
    expect_error(context.driver.host_read(ptr, &mut [0; 16]), InvalidValue)
}

fn free_waits_for_the_device(context: &TestContext) -> CheckResult {
    let (stream, log, ptr) = (context.stream()?, context.kernel_log(1)?, context.alloc_pinned(1 << 20)?);
    context.delay(stream)?;
    context.append(log, 1, stream)?;
    context.untrack(Resource::Pinned(ptr));
    context.driver.host_free(ptr)?;
    context.expect_idle("the stream", stream)?;
    context.expect_log(log, &[1])
}

fn all_host_options_work(context: &TestContext) -> CheckResult {
    let (stream, memory) = (context.stream()?, context.alloc(4096)?);
    for kind in 0..8 {
        let options = HostOptions { portable: kind & 1 != 0, mapped: kind & 2 != 0, write_combined: kind & 4 != 0 };
        let bytes = context.random_bytes(4096);
        let ptr = context.driver.host_alloc(context.device_id, 4096, options)?;
        context.track(Resource::Pinned(ptr));
        context.driver.host_write(ptr, &bytes)?;
        context.driver.copy(memory.into(), ptr.into(), 4096, stream)?;
        context.synchronize(stream)?;
        expect_slice_eq(&format!("memory copied from {options:?}"), &context.read_bytes(memory, 4096)?, &bytes)?;
    }
    Ok(())
}

/// Pages that can be registered. Skips the check where registration is not supported.
fn registrable_pages(context: &TestContext, n: usize) -> CheckResult<HostRange> {
    require(context.properties()?.host_registration, "the device cannot register host memory")?;
    Ok(context.host_pages(n))
}

fn registered_memory_is_used_by_copies_and_kernels(context: &TestContext) -> CheckResult {
    let (stream, n) = (context.stream()?, 4096_u32);
    let ptr = context.register(registrable_pages(context, 4)?)?;
    let words = context.random_words(n as usize);
    let memory = context.alloc_words(&words)?;
    context.driver.copy(ptr.into(), memory.into(), 4 * u64::from(n), stream)?;
    let there = context.driver.host_device_ptr(context.device_id, ptr)?;
    context.add_u32(there, n, 9, stream)?;
    context.synchronize(stream)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(9)).collect();
    expect_slice_eq("the result of a copy and a kernel", &to_words(&context.read_pinned(ptr, 4 * n as usize)?), &want)?;
    context.driver.host_write(ptr, &[3; 64])?;
    context.driver.copy(memory.into(), ptr.into(), 64, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("the memory copied from it", &context.read_bytes(memory, 64)?, &[3; 64])
}

fn double_registration_is_rejected(context: &TestContext) -> CheckResult {
    let range = registrable_pages(context, 4)?;
    context.register(range.clone())?;
    let register = |range| context.driver.host_register(context.device_id, range, HostOptions::default());
    expect_error_of("the same range", register(range.clone()), HostMemoryAlreadyRegistered)?;
    expect_error_of("a part of it", register(context.part_of(&range, 4096, 4096)), HostMemoryAlreadyRegistered)?;
    expect_error_of("no bytes", register(context.part_of(&context.host_pages(1), 0, 0)), InvalidValue)
}

fn unregister_requires_the_start_of_a_range(context: &TestContext) -> CheckResult {
    let ptr = context.register(registrable_pages(context, 4)?)?;
    expect_error(context.driver.host_unregister(ptr.offset(4096)), InvalidValue)?;
    context.untrack(Resource::Registered(ptr));
    context.driver.host_unregister(ptr)?;
    expect_error(context.driver.host_unregister(ptr), HostMemoryNotRegistered)
}

fn registered_range_need_not_be_page_aligned(context: &TestContext) -> CheckResult {
    let range = context.part_of(&registrable_pages(context, 4)?, 100, 5000);
    let ptr = context.register(range)?;
    let (stream, bytes) = (context.stream()?, context.random_bytes(5000));
    let memory = context.alloc_bytes(&bytes)?;
    context.driver.copy(ptr.into(), memory.into(), 5000, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("a range that is not page aligned", &context.read_pinned(ptr, 5000)?, &bytes)
}

fn registered_memory_cannot_be_freed(context: &TestContext) -> CheckResult {
    let ptr = context.register(registrable_pages(context, 1)?)?;
    expect_error(context.driver.host_free(ptr), InvalidValue)
}

fn unregistered_memory_is_pageable_again(context: &TestContext) -> CheckResult {
    let (stream, memory) = (context.stream()?, context.alloc(64)?);
    let ptr = context.register(registrable_pages(context, 1)?)?;
    context.untrack(Resource::Registered(ptr));
    context.driver.host_unregister(ptr)?;
    expect_error(context.driver.host_device_ptr(context.device_id, ptr), InvalidValue)?;
    expect_error(context.driver.host_read(ptr, &mut [0; 16]), InvalidValue)?;
    expect_error(context.driver.copy(memory.into(), ptr.into(), 64, stream), InvalidValue)
}

fn unregistering_waits_for_the_device(context: &TestContext) -> CheckResult {
    /// What happens to the stream between the work and the call.
    type Between<'a> = &'a dyn Fn(StreamId) -> CheckResult;
    let begin: Between<'_> = &|stream| context.begin_capture(stream);
    let cases: [(&str, StreamId, Between<'_>); 4] = [
        ("a stream", context.stream()?, &|_| Ok(())),
        ("the legacy stream", context.legacy_stream()?, &|_| Ok(())),
        ("a destroyed stream", context.stream()?, &|stream| context.destroy_stream(stream)),
        ("a stream that captures by now", context.stream()?, begin),
    ];
    for (what, stream, between) in cases {
        let (log, memory) = (context.kernel_log(1)?, context.alloc_bytes(&[6; 4096])?);
        let range = registrable_pages(context, 1)?;
        let ptr = context.register(range)?;
        context.delay(stream)?;
        context.driver.copy(ptr.into(), memory.into(), 4096, stream)?;
        context.append(log, 1, stream)?;
        between(stream)?;
        context.untrack(Resource::Registered(ptr));
        context.driver.host_unregister(ptr)?;
        expect_eq(what, context.read_words(log.ptr, 2)?, vec![1, 1])?;
    }
    Ok(())
}

/// On a simulated device this is a race between host and device, which it reports.
fn host_read_during_a_copy_sees_old_or_new_bytes(context: &TestContext) -> CheckResult {
    const BYTES: usize = 8 << 20;
    let (stream, ptr) = (context.stream()?, context.alloc_pinned_bytes(&vec![1; BYTES])?);
    let memory = context.alloc_bytes(&vec![2; BYTES])?;
    context.driver.copy(ptr.into(), memory.into(), BYTES as u64, stream)?;
    let seen = context.read_pinned(ptr, BYTES)?;
    expect(seen.iter().all(|byte| [1, 2].contains(byte)), "each byte is old or new")?;
    context.synchronize(stream)?;
    expect(context.read_pinned(ptr, BYTES)?.iter().all(|&byte| byte == 2), "all bytes are new after the copy")
}

fn any_thread_may_free_pinned_memory(context: &TestContext) -> CheckResult {
    let bytes = context.random_bytes(512);
    let ptr: HostPtr = context.on_new_thread(|| context.alloc_pinned_bytes(&bytes))?;
    expect_slice_eq("the memory that another thread wrote", &context.read_pinned(ptr, 512)?, &bytes)?;
    let (stream, memory) = (context.stream()?, context.alloc(512)?);
    context.fill_index(memory, 128, stream)?;
    context.driver.copy(ptr.into(), memory.into(), 512, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("the copied memory", &to_words(&context.read_pinned(ptr, 512)?), &(0..128).collect::<Vec<_>>())?;
    context.untrack(Resource::Pinned(ptr));
    Ok(context.on_new_thread(|| context.driver.host_free(ptr))?)
}

/// Pages that can be registered. Skips the check where registration is not supported.
fn host_pages(context: &TestContext, bytes: u64) -> CheckResult<Arc<HostPages>> {
    require(context.properties()?.host_registration, "the device cannot register host memory")?;
    Ok(HostPages::map(bytes, true).expect("the host has a few megabytes"))
}

fn driver_keeps_registered_pages_alive(context: &TestContext) -> CheckResult {
    let (stream, n) = (context.stream()?, (5 << 20) + 4096);
    let pages = host_pages(context, n)?;
    pages.prefault(2);
    let alive = Arc::downgrade(&pages);
    let ptr = context.register(HostRange::of_pages(&pages))?;
    let (bytes, end) = (context.random_bytes(4096), ptr.offset(n - 4096));
    context.driver.host_write(ptr, &bytes)?;
    drop(pages);
    let there = context.alloc(4096)?;
    context.driver.copy(there.into(), ptr.into(), 4096, stream)?;
    context.driver.copy(end.into(), there.into(), 4096, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("the pages after their owner dropped them", &context.read_pinned(ptr, 4096)?, &bytes)?;
    expect_slice_eq("the memory copied back from the device", &context.read_pinned(end, 4096)?, &bytes)?;
    expect_eq("owners of the registered pages", alive.strong_count(), 1)?;
    context.untrack(Resource::Registered(ptr));
    context.driver.host_unregister(ptr)?;
    expect_eq("owners of the pages after unregistering", alive.strong_count(), 0)
}

fn pages_can_be_registered_again_after_unregister(context: &TestContext) -> CheckResult {
    let pages = host_pages(context, 4096)?;
    let register =
        || context.driver.host_register(context.device_id, HostRange::of_pages(&pages), HostOptions::default());
    // A failed registration keeps no reference to the pages.
    let none = context.invalid_device_id()?;
    let failed = context.driver.host_register(none, HostRange::of_pages(&pages), HostOptions::default());
    expect_error(failed, InvalidDevice)?;
    for _ in 0..2 {
        let ptr = context.register(HostRange::of_pages(&pages))?;
        expect_error_of("the same pages", register(), HostMemoryAlreadyRegistered)?;
        context.untrack(Resource::Registered(ptr));
        context.driver.host_unregister(ptr)?;
    }
    expect_eq("owners of the pages at the end", Arc::strong_count(&pages), 1)
}
