//! Plain device memory.

use super::Check;
use super::bench::Bench;
use super::owned::Owned;
use crate::expect::{Checked, expect, expect_code, expect_eq, expect_same};
use warpool_driver::DevicePtr;
use warpool_driver::ErrorCode::{InvalidValue, OutOfMemory};

pub(super) const CHECKS: &[Check] = super::checks![
    no_bytes_are_refused,
    too_many_bytes_are_out_of_memory,
    allocations_are_aligned,
    allocations_do_not_overlap,
    contents_survive_other_allocations,
    freeing_null_is_nothing,
    only_the_start_of_an_allocation_is_freed,
    the_count_of_free_bytes_follows,
    a_full_device_recovers,
    freeing_waits_for_the_device,
    allocating_does_not_wait,
    memory_is_shared_by_threads,
    notes_change_nothing,
    ; provoking:
    nothing_is_freed_twice,
];

const MIB: u64 = 1 << 20;

fn no_bytes_are_refused(bench: &Bench<'_>) -> Checked {
    expect_code(bench.driver.mem_alloc(bench.device, 0), InvalidValue)
}

fn too_many_bytes_are_out_of_memory(bench: &Bench<'_>) -> Checked {
    for bytes in [1 << 45, bench.properties()?.bytes_total + 1] {
        let result = bench.driver.mem_alloc(bench.device, bytes);
        expect(
            result.as_ref().is_err_and(warpool_driver::DriverError::is_out_of_memory),
            "an error that says out of memory",
        )?;
        expect_code(result, OutOfMemory)?;
    }
    let bytes = bench.random_bytes(1000);
    let ptr = bench.memory_of(&bytes)?;
    expect_same("memory after the failure", &bench.bytes_at(ptr, 1000)?, &bytes)
}

fn allocations_are_aligned(bench: &Bench<'_>) -> Checked {
    for bytes in [1, 2, 3, 255, 256, 257, 511, 513, 4095, 4097, MIB - 1, MIB + 1, 3 * MIB + 7] {
        let ptr = bench.memory(bytes)?;
        expect(!ptr.is_null(), "an address")?;
        expect_eq(&format!("{bytes} bytes at {ptr}: address modulo 256"), ptr.0 % 256, 0)?;
    }
    Ok(())
}

fn allocations_do_not_overlap(bench: &Bench<'_>) -> Checked {
    let mut taken: Vec<(DevicePtr, Vec<u8>)> = Vec::new();
    for _ in 0..48 {
        let bytes = bench.random_bytes(1 + bench.below(100_000) as usize);
        taken.push((bench.memory_of(&bytes)?, bytes));
    }
    let mut ranges: Vec<(u64, u64)> = taken.iter().map(|(ptr, bytes)| (ptr.0, ptr.0 + bytes.len() as u64)).collect();
    ranges.sort_unstable();
    expect(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "ranges that do not overlap")?;
    for (ptr, bytes) in &taken {
        expect_same("an allocation's bytes", &bench.bytes_at(*ptr, bytes.len())?, bytes)?;
    }
    Ok(())
}

fn contents_survive_other_allocations(bench: &Bench<'_>) -> Checked {
    let bytes = bench.random_bytes(70_000);
    let kept = bench.memory_of(&bytes)?;
    for round in 0..20_u8 {
        let other = bench.memory_of(&vec![round; 1 + bench.below(200_000) as usize])?;
        bench.free_memory(other)?;
    }
    expect_same("the bytes that were there first", &bench.bytes_at(kept, bytes.len())?, &bytes)
}

fn freeing_null_is_nothing(bench: &Bench<'_>) -> Checked {
    Ok(bench.driver.mem_free(DevicePtr(0))?)
}

fn only_the_start_of_an_allocation_is_freed(bench: &Bench<'_>) -> Checked {
    let bytes = bench.random_bytes(4096);
    let ptr = bench.memory_of(&bytes)?;
    expect_code(bench.driver.mem_free(ptr.offset(512)), InvalidValue)?;
    expect_code(bench.driver.mem_free(DevicePtr(0x1234_5000)), InvalidValue)?;
    expect_same("the bytes after the failure", &bench.bytes_at(ptr, 4096)?, &bytes)
}

fn nothing_is_freed_twice(bench: &Bench<'_>) -> Checked {
    let ptr = bench.memory(512)?;
    bench.free_memory(ptr)?;
    expect_code(bench.driver.mem_free(ptr), InvalidValue)
}

fn the_count_of_free_bytes_follows(bench: &Bench<'_>) -> Checked {
    let free = || -> Checked<u64> { Ok(bench.driver.mem_info(bench.device)?.bytes_free) };
    let before = free()?;
    let ptr = bench.memory(256 * MIB)?;
    let during = free()?;
    expect(before - during >= 256 * MIB, "at least 256 MiB fewer free bytes")?;
    bench.free_memory(ptr)?;
    expect(free()? - during >= 256 * MIB, "those bytes back")
}

fn a_full_device_recovers(bench: &Bench<'_>) -> Checked {
    let piece = (bench.properties()?.bytes_total / 20).next_multiple_of(2 * MIB);
    let mut pieces = Vec::new();
    let full = loop {
        match bench.driver.mem_alloc(bench.device, piece) {
            Ok(ptr) => {
                bench.own(Owned::Memory(ptr));
                pieces.push(ptr);
            }
            Err(error) => break error,
        }
        expect(pieces.len() <= 20, "no more memory than the device has")?;
    };
    expect_eq("how it is full", full.code, OutOfMemory)?;
    let Some(last) = pieces.pop() else {
        return expect(false, "room for a twentieth of the device");
    };
    bench.free_memory(last)?;
    let again = bench.memory(piece)?;
    let words = bench.random_words(32);
    bench.driver.upload(bench.device, again.offset(piece - 128), &super::bench::to_bytes(&words))?;
    expect_same("the last bytes of it", &bench.words_at(again.offset(piece - 128), 32)?, &words)
}

fn freeing_waits_for_the_device(bench: &Bench<'_>) -> Checked {
    let (stream, log, other) = (bench.stream()?, bench.log(1)?, bench.memory(MIB)?);
    bench.spin(stream)?;
    bench.append(log, 1, stream)?;
    bench.free_memory(other)?;
    bench.expect_idle("all work", stream)?;
    bench.expect_log(log, &[1])
}

fn allocating_does_not_wait(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    bench.spin_long(stream)?;
    bench.memory(MIB)?;
    bench.expect_busy("the work under way", stream)
}

fn memory_is_shared_by_threads(bench: &Bench<'_>) -> Checked {
    let words = bench.random_words(256);
    let ptr = bench.elsewhere(|| bench.words_of(&words))?;
    let seen = bench.elsewhere(|| bench.words_at(ptr, 256))?;
    expect_same("what another thread reads", &seen, &words)?;
    bench.elsewhere(|| bench.free_memory(ptr))
}

/// What an allocator does with one driver allocation: it gives it out, takes it back, and gives it out again.
fn notes_change_nothing(bench: &Bench<'_>) -> Checked {
    let (stream, ptr, n) = (bench.stream()?, bench.memory(4096)?, 1024_u32);
    let fill_index = bench.kernels()?.fill_index;
    for round in 0..3 {
        bench.driver.suballocated(ptr, 4096, stream);
        bench.launch(fill_index, n, &[ptr.into(), warpool_driver::KernelArg::U32(n)], stream)?;
        bench.add(ptr, n, round, stream)?;
        bench.sync(stream)?;
        let want: Vec<u32> = (round..n + round).collect();
        expect_same("what its user computed", &bench.words_at(ptr, n as usize)?, &want)?;
        bench.driver.suballocation_freed(ptr, 4096);
    }
    Ok(())
}
