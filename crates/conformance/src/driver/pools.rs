//! The driver's stream-ordered pools.

use super::Check;
use super::bench::{Bench, to_bytes};
use super::owned::Owned;
use crate::expect::{Checked, expect, expect_code, expect_code_of, expect_eq, expect_same, need};
use warpool_driver::ErrorCode::{InvalidDevice, InvalidHandle, InvalidValue, OutOfMemory};
use warpool_driver::PoolAttribute::{
    ReleaseThreshold, ReservedCurrent, ReservedHigh, ReuseFollowEvents, ReuseInternalDependencies, ReuseOpportunistic,
    UsedCurrent, UsedHigh,
};
use warpool_driver::{Access, KernelArg, PoolId};

pub(super) const CHECKS: &[Check] = super::checks![
    the_default_pool_is_always_the_same,
    memory_is_given_and_taken_in_stream_order,
    memory_can_be_used_behind_an_event,
    live_allocations_do_not_overlap,
    too_many_bytes_are_out_of_memory,
    only_the_start_of_an_allocation_is_freed,
    plain_free_takes_pool_memory,
    a_fresh_pool_holds_nothing,
    settings_are_kept,
    high_water_marks_can_only_be_reset,
    used_bytes_follow_allocations,
    unused_memory_goes_when_the_host_waits,
    a_threshold_keeps_memory_until_it_is_trimmed,
    a_pools_own_device_keeps_its_rights,
    a_pool_never_made_is_unknown,
    ; provoking:
    nothing_is_freed_twice,
    a_destroyed_pool_is_unknown,
];

const MIB: u64 = 1 << 20;

fn the_default_pool_is_always_the_same(bench: &Bench<'_>) -> Checked {
    need(bench.properties()?.async_pools, "the device has no stream-ordered pools")?;
    let pool = bench.driver.pool_default(bench.device)?;
    bench.own(Owned::Trimmed(pool));
    expect_eq("the pool, asked again", bench.driver.pool_default(bench.device)?, pool)?;
    expect(bench.pool()? != pool, "a new pool to be another")?;
    expect_code(bench.driver.pool_destroy(pool), InvalidValue)?;
    let stream = bench.stream()?;
    let ptr = bench.pool_memory(pool, 4096, stream)?;
    bench.launch(bench.kernels()?.fill_index, 1024, &[ptr.into(), KernelArg::U32(1024)], stream)?;
    bench.sync(stream)?;
    expect_same("memory of the default pool", &bench.words_at(ptr, 1024)?, &(0..1024).collect::<Vec<_>>())?;
    bench.pool_free(ptr, stream)?;
    bench.sync(stream)
}

fn memory_is_given_and_taken_in_stream_order(bench: &Bench<'_>) -> Checked {
    let (pool, stream, n) = (bench.pool()?, bench.stream()?, 5000_u32);
    let fill_index = bench.kernels()?.fill_index;
    let back = bench.pinned(4 * u64::from(n) * 8)?;
    // Nobody waits in between: the memory of one round may well be that of the round before.
    for round in 0..8_u32 {
        let ptr = bench.pool_memory(pool, 4 * u64::from(n), stream)?;
        bench.launch(fill_index, n, &[ptr.into(), KernelArg::U32(n)], stream)?;
        bench.add(ptr, n, 1000 * round, stream)?;
        let place = back.offset(4 * u64::from(n * round));
        bench.driver.copy(place.into(), ptr.into(), 4 * u64::from(n), stream)?;
        bench.pool_free(ptr, stream)?;
    }
    bench.sync(stream)?;
    let want: Vec<u32> = (0..8).flat_map(|round| (0..n).map(move |i| i + 1000 * round)).collect();
    expect_same("what eight rounds left", &bench.pinned_bytes(back, 4 * 8 * n as usize)?, &to_bytes(&want))
}

fn memory_can_be_used_behind_an_event(bench: &Bench<'_>) -> Checked {
    let (pool, first, second) = (bench.pool()?, bench.stream()?, bench.stream()?);
    let fill_index = bench.kernels()?.fill_index;
    bench.spin(first)?;
    let ptr = bench.pool_memory(pool, 4096, first)?;
    bench.launch(fill_index, 1024, &[ptr.into(), KernelArg::U32(1024)], first)?;
    bench.order(first, second)?;
    bench.add(ptr, 1024, 5, second)?;
    let back = bench.pinned(4096)?;
    bench.driver.copy(back.into(), ptr.into(), 4096, second)?;
    bench.pool_free(ptr, second)?;
    bench.sync(second)?;
    expect_same(
        "what the second stream saw",
        &bench.pinned_bytes(back, 4096)?,
        &to_bytes(&(5..1029).collect::<Vec<_>>()),
    )
}

fn live_allocations_do_not_overlap(bench: &Bench<'_>) -> Checked {
    let (pool, stream) = (bench.pool()?, bench.stream()?);
    let mut taken = Vec::new();
    for at in 0..32_u32 {
        let n = 1 + bench.below(20_000) as u32;
        let ptr = bench.pool_memory(pool, 4 * u64::from(n), stream)?;
        bench.driver.fill(ptr, warpool_driver::Pattern::U32(at), u64::from(n), stream)?;
        taken.push((ptr, n, at));
    }
    bench.sync(stream)?;
    for (ptr, n, at) in taken {
        expect_eq("the address modulo 256", ptr.0 % 256, 0)?;
        expect_same("an allocation's contents", &bench.words_at(ptr, n as usize)?, &vec![at; n as usize])?;
        bench.pool_free(ptr, stream)?;
    }
    bench.sync(stream)
}

fn too_many_bytes_are_out_of_memory(bench: &Bench<'_>) -> Checked {
    let (pool, stream) = (bench.pool()?, bench.stream()?);
    expect_code(bench.driver.pool_alloc(pool, 1 << 45, stream), OutOfMemory)?;
    let ptr = bench.pool_memory(pool, MIB, stream)?;
    bench.pool_free(ptr, stream)?;
    bench.sync(stream)
}

fn only_the_start_of_an_allocation_is_freed(bench: &Bench<'_>) -> Checked {
    let (pool, stream) = (bench.pool()?, bench.stream()?);
    let ptr = bench.pool_memory(pool, MIB, stream)?;
    expect_code(bench.driver.pool_free(ptr.offset(8), stream), InvalidValue)?;
    bench.pool_free(ptr, stream)?;
    bench.sync(stream)
}

fn nothing_is_freed_twice(bench: &Bench<'_>) -> Checked {
    let (pool, stream) = (bench.pool()?, bench.stream()?);
    let ptr = bench.pool_memory(pool, MIB, stream)?;
    bench.pool_free(ptr, stream)?;
    expect_code(bench.driver.pool_free(ptr, stream), InvalidValue)?;
    expect_code(bench.driver.mem_free(ptr), InvalidValue)?;
    bench.sync(stream)
}

fn plain_free_takes_pool_memory(bench: &Bench<'_>) -> Checked {
    let (pool, stream, log) = (bench.pool()?, bench.stream()?, bench.log(1)?);
    let ptr = bench.pool_memory(pool, 4096, stream)?;
    bench.spin(stream)?;
    bench.append(log, 1, stream)?;
    bench.free_memory(ptr)?;
    bench.sync(stream)?;
    bench.expect_log(log, &[1])
}

fn a_fresh_pool_holds_nothing(bench: &Bench<'_>) -> Checked {
    let pool = bench.pool()?;
    for attribute in [ReleaseThreshold, ReservedCurrent, ReservedHigh, UsedCurrent, UsedHigh] {
        expect_eq(&format!("{attribute:?}"), bench.driver.pool_get(pool, attribute)?, 0)?;
    }
    for attribute in [ReuseFollowEvents, ReuseOpportunistic, ReuseInternalDependencies] {
        expect_eq(&format!("{attribute:?}"), bench.driver.pool_get(pool, attribute)?, 1)?;
    }
    Ok(())
}

fn settings_are_kept(bench: &Bench<'_>) -> Checked {
    let pool = bench.pool()?;
    let settings = [
        (ReleaseThreshold, 12_345_678),
        (ReleaseThreshold, u64::MAX),
        (ReuseFollowEvents, 0),
        (ReuseOpportunistic, 0),
        (ReuseInternalDependencies, 0),
        (ReuseOpportunistic, 1),
    ];
    for (attribute, value) in settings {
        bench.driver.pool_set(pool, attribute, value)?;
        expect_eq(&format!("{attribute:?}"), bench.driver.pool_get(pool, attribute)?, value)?;
    }
    Ok(())
}

fn high_water_marks_can_only_be_reset(bench: &Bench<'_>) -> Checked {
    let (pool, stream) = (bench.pool()?, bench.stream()?);
    for attribute in [ReservedCurrent, UsedCurrent] {
        expect_code(bench.driver.pool_set(pool, attribute, 0), InvalidValue)?;
        expect_code(bench.driver.pool_set(pool, attribute, 5), InvalidValue)?;
    }
    let ptr = bench.pool_memory(pool, MIB, stream)?;
    bench.pool_free(ptr, stream)?;
    bench.sync(stream)?;
    for (high, current) in [(UsedHigh, UsedCurrent), (ReservedHigh, ReservedCurrent)] {
        expect_code(bench.driver.pool_set(pool, high, 5), InvalidValue)?;
        expect(bench.driver.pool_get(pool, high)? >= MIB, "a mark that remembers the allocation")?;
        bench.driver.pool_set(pool, high, 0)?;
        let current = bench.driver.pool_get(pool, current)?;
        expect_eq(&format!("{high:?} after a reset"), bench.driver.pool_get(pool, high)?, current)?;
    }
    Ok(())
}

fn used_bytes_follow_allocations(bench: &Bench<'_>) -> Checked {
    let (pool, stream) = (bench.pool()?, bench.stream()?);
    let used = || bench.driver.pool_get(pool, UsedCurrent);
    let first = bench.pool_memory(pool, 3 * MIB, stream)?;
    let second = bench.pool_memory(pool, MIB, stream)?;
    bench.sync(stream)?;
    expect_eq("bytes used by two", used()?, 4 * MIB)?;
    expect(bench.driver.pool_get(pool, ReservedCurrent)? >= 4 * MIB, "at least as much reserved")?;
    bench.pool_free(first, stream)?;
    bench.sync(stream)?;
    expect_eq("bytes used by one", used()?, MIB)?;
    bench.pool_free(second, stream)?;
    bench.sync(stream)?;
    expect_eq("bytes used by none", used()?, 0)?;
    expect_eq("the most that was used", bench.driver.pool_get(pool, UsedHigh)?, 4 * MIB)
}

fn unused_memory_goes_when_the_host_waits(bench: &Bench<'_>) -> Checked {
    let (pool, stream) = (bench.pool()?, bench.stream()?);
    let ptr = bench.pool_memory(pool, 8 * MIB, stream)?;
    bench.sync(stream)?;
    expect(bench.driver.pool_get(pool, ReservedCurrent)? >= 8 * MIB, "memory in use to be reserved")?;
    bench.pool_free(ptr, stream)?;
    bench.sync(stream)?;
    expect_eq("bytes reserved", bench.driver.pool_get(pool, ReservedCurrent)?, 0)
}

fn a_threshold_keeps_memory_until_it_is_trimmed(bench: &Bench<'_>) -> Checked {
    let (pool, stream) = (bench.pool()?, bench.stream()?);
    bench.driver.pool_set(pool, ReleaseThreshold, u64::MAX)?;
    let ptr = bench.pool_memory(pool, 64 * MIB, stream)?;
    bench.pool_free(ptr, stream)?;
    bench.sync(stream)?;
    let kept = bench.driver.pool_get(pool, ReservedCurrent)?;
    expect(kept >= 64 * MIB, "memory to be kept")?;
    for keep in [kept, u64::MAX] {
        bench.driver.pool_trim(pool, keep)?;
        expect_eq("bytes after a trim that allows all", bench.driver.pool_get(pool, ReservedCurrent)?, kept)?;
    }
    bench.driver.pool_trim(pool, 0)?;
    expect_eq("bytes after a trim that allows none", bench.driver.pool_get(pool, ReservedCurrent)?, 0)
}

fn a_pools_own_device_keeps_its_rights(bench: &Bench<'_>) -> Checked {
    let pool = bench.pool()?;
    expect_code(bench.driver.pool_set_access(pool, bench.device, Access::None), InvalidDevice)
}

fn a_pool_never_made_is_unknown(bench: &Bench<'_>) -> Checked {
    bench.pool()?;
    unknown(bench, PoolId(u64::MAX))
}

fn a_destroyed_pool_is_unknown(bench: &Bench<'_>) -> Checked {
    let pool = bench.pool()?;
    bench.disown(Owned::Pool(pool));
    bench.driver.pool_destroy(pool)?;
    unknown(bench, pool)
}

/// Every call that takes a pool refuses this one.
fn unknown(bench: &Bench<'_>, pool: PoolId) -> Checked {
    let (driver, stream) = (bench.driver, bench.stream()?);
    let refused = |call: &str, result: warpool_driver::Result<()>| expect_code_of(call, result, InvalidHandle);
    refused("pool_alloc", driver.pool_alloc(pool, 64, stream).map(drop))?;
    refused("pool_get", driver.pool_get(pool, UsedCurrent).map(drop))?;
    refused("pool_set", driver.pool_set(pool, ReleaseThreshold, 0))?;
    refused("pool_trim", driver.pool_trim(pool, 0))?;
    refused("pool_set_access", driver.pool_set_access(pool, bench.device, Access::ReadWrite))?;
    refused("pool_destroy", driver.pool_destroy(pool))
}
