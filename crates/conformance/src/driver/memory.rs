//! Plain device memory.

use warpool_driver::ErrorCode::{InvalidContext, InvalidValue, OutOfMemory};
use warpool_driver::{DevicePtr, DriverError, IpcMemoryHandle};

use crate::check::Check;
use crate::context::{Resource, TestContext, to_bytes};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_slice_eq};

pub(crate) const CHECKS: &[Check] = crate::checks![
    zero_bytes_are_rejected,
    oversized_request_is_out_of_memory,
    allocations_are_aligned,
    allocations_do_not_overlap,
    contents_survive_other_allocations,
    freeing_null_is_a_no_op,
    only_the_start_of_an_allocation_can_be_freed,
    free_bytes_follow_allocations,
    full_device_recovers_after_a_free,
    free_waits_for_the_device,
    allocation_does_not_wait,
    memory_is_shared_by_threads,
    suballocation_reports_have_no_effect_on_contents,
    only_the_start_of_an_allocation_can_be_exported,
    exported_memory_cannot_be_opened_in_its_own_process,
    ; provoking hazards:
    double_free_is_rejected,
];

const MIB: u64 = 1 << 20;

fn zero_bytes_are_rejected(context: &TestContext) -> CheckResult {
    expect_error(context.driver.mem_alloc(context.device_id, 0), InvalidValue)
}

fn oversized_request_is_out_of_memory(context: &TestContext) -> CheckResult {
    for bytes in [1 << 45, context.properties()?.bytes_total + 1] {
        let result = context.driver.mem_alloc(context.device_id, bytes);
        expect(result.as_ref().is_err_and(DriverError::is_out_of_memory), "the error is out of memory")?;
        expect_error(result, OutOfMemory)?;
    }
    let bytes = context.random_bytes(1000);
    let ptr = context.alloc_bytes(&bytes)?;
    expect_slice_eq("memory allocated after the failure", &context.read_bytes(ptr, 1000)?, &bytes)
}

fn allocations_are_aligned(context: &TestContext) -> CheckResult {
    for bytes in [1, 2, 3, 255, 256, 257, 511, 513, 4095, 4097, MIB - 1, MIB + 1, 3 * MIB + 7] {
        let ptr = context.alloc(bytes)?;
        expect(!ptr.is_null(), "the address is not null")?;
        expect_eq(&format!("{bytes} bytes at {ptr}: address modulo 256"), ptr.0 % 256, 0)?;
    }
    Ok(())
}

fn allocations_do_not_overlap(context: &TestContext) -> CheckResult {
    let mut taken: Vec<(DevicePtr, Vec<u8>)> = Vec::new();
    for _ in 0..48 {
        let bytes = context.random_bytes(1 + context.random_below(100_000) as usize);
        taken.push((context.alloc_bytes(&bytes)?, bytes));
    }
    let mut ranges: Vec<(u64, u64)> = taken.iter().map(|(ptr, bytes)| (ptr.0, ptr.0 + bytes.len() as u64)).collect();
    ranges.sort_unstable();
    expect(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "ranges do not overlap")?;
    for (ptr, bytes) in &taken {
        expect_slice_eq("the contents of an allocation", &context.read_bytes(*ptr, bytes.len())?, bytes)?;
    }
    Ok(())
}

fn contents_survive_other_allocations(context: &TestContext) -> CheckResult {
    let bytes = context.random_bytes(70_000);
    let kept = context.alloc_bytes(&bytes)?;
    for round in 0..20_u8 {
        let other = context.alloc_bytes(&vec![round; 1 + context.random_below(200_000) as usize])?;
        context.free(other)?;
    }
    expect_slice_eq("the contents of the first allocation", &context.read_bytes(kept, bytes.len())?, &bytes)
}

fn freeing_null_is_a_no_op(context: &TestContext) -> CheckResult {
    Ok(context.driver.mem_free(DevicePtr(0))?)
}

fn only_the_start_of_an_allocation_can_be_freed(context: &TestContext) -> CheckResult {
    let bytes = context.random_bytes(4096);
    let ptr = context.alloc_bytes(&bytes)?;
    expect_error(context.driver.mem_free(ptr.offset(512)), InvalidValue)?;
    expect_error(context.driver.mem_free(DevicePtr(0x1234_5000)), InvalidValue)?;
    expect_slice_eq("the contents after the rejected calls", &context.read_bytes(ptr, 4096)?, &bytes)
}

fn only_the_start_of_an_allocation_can_be_exported(context: &TestContext) -> CheckResult {
    let (first, second) = (context.alloc(2 * MIB)?, context.alloc(2 * MIB)?);
    let handle = context.driver.mem_export(first)?;
    expect_eq("the handle of the same memory", context.driver.mem_export(first)?, handle)?;
    expect(context.driver.mem_export(second)? != handle, "other memory has another handle")?;
    expect_error(context.driver.mem_export(first.offset(512)), InvalidValue)?;
    expect_error(context.driver.mem_export(DevicePtr(0)), InvalidValue)
}

fn exported_memory_cannot_be_opened_in_its_own_process(context: &TestContext) -> CheckResult {
    let ptr = context.alloc(2 * MIB)?;
    let handle = context.driver.mem_export(ptr)?;
    expect_error(context.driver.mem_import(context.device_id, &handle), InvalidContext)?;
    let garbage = context.driver.mem_import(context.device_id, &IpcMemoryHandle([7; 64]));
    expect(garbage.is_err(), "bytes that are no handle are refused")?;
    expect_error(context.driver.mem_close(context.device_id, ptr), InvalidValue)
}

fn double_free_is_rejected(context: &TestContext) -> CheckResult {
    let ptr = context.alloc(512)?;
    context.free(ptr)?;
    expect_error(context.driver.mem_free(ptr), InvalidValue)
}

fn free_bytes_follow_allocations(context: &TestContext) -> CheckResult {
    let free = || -> CheckResult<u64> { Ok(context.driver.mem_info(context.device_id)?.bytes_free) };
    let before = free()?;
    let ptr = context.alloc(256 * MIB)?;
    let during = free()?;
    expect(before - during >= 256 * MIB, "at least 256 MiB less free memory")?;
    context.free(ptr)?;
    expect(free()? - during >= 256 * MIB, "the memory is free again")
}

fn full_device_recovers_after_a_free(context: &TestContext) -> CheckResult {
    let piece = (context.properties()?.bytes_total / 20).next_multiple_of(2 * MIB);
    let mut pieces = Vec::new();
    let full = loop {
        match context.driver.mem_alloc(context.device_id, piece) {
            Ok(ptr) => {
                context.track(Resource::Memory(ptr));
                pieces.push(ptr);
            }
            Err(error) => break error,
        }
        expect(pieces.len() <= 20, "the device has no more memory than its properties say")?;
    };
    expect_eq("the error of a full device", full.code, OutOfMemory)?;
    let Some(last) = pieces.pop() else {
        return expect(false, "a twentieth of the memory can be allocated");
    };
    context.free(last)?;
    let again = context.alloc(piece)?;
    let words = context.random_words(32);
    context.driver.upload(context.device_id, again.offset(piece - 128), &to_bytes(&words))?;
    expect_slice_eq("the last words of the allocation", &context.read_words(again.offset(piece - 128), 32)?, &words)
}

fn free_waits_for_the_device(context: &TestContext) -> CheckResult {
    let (stream, log, other) = (context.stream()?, context.kernel_log(1)?, context.alloc(MIB)?);
    context.delay(stream)?;
    context.append(log, 1, stream)?;
    context.free(other)?;
    context.expect_idle("the stream", stream)?;
    context.expect_log(log, &[1])
}

fn allocation_does_not_wait(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    context.keep_busy(stream)?;
    context.alloc(MIB)?;
    context.expect_busy("the stream", stream)
}

fn memory_is_shared_by_threads(context: &TestContext) -> CheckResult {
    let words = context.random_words(256);
    let ptr = context.on_new_thread(|| context.alloc_words(&words))?;
    let seen = context.on_new_thread(|| context.read_words(ptr, 256))?;
    expect_slice_eq("the memory read by another thread", &seen, &words)?;
    context.on_new_thread(|| context.free(ptr))
}

/// As an allocator does with memory of the driver: allocate, free and allocate again.
fn suballocation_reports_have_no_effect_on_contents(context: &TestContext) -> CheckResult {
    let (stream, ptr, n) = (context.stream()?, context.alloc(4096)?, 1024_u32);
    for round in 0..3 {
        context.driver.suballocated(ptr, 4096, stream);
        context.fill_index(ptr, n, stream)?;
        context.add_u32(ptr, n, round, stream)?;
        context.synchronize(stream)?;
        let want: Vec<u32> = (round..n + round).collect();
        expect_slice_eq("the result of the user's work", &context.read_words(ptr, n as usize)?, &want)?;
        context.driver.suballocation_freed(ptr, 4096);
        context.driver.suballocated_in_place(ptr, 4096, stream);
        context.driver.suballocation_freed(ptr, 4096);
    }
    Ok(())
}
