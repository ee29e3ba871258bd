//! The driver's stream-ordered pools.

use warpool_driver::ErrorCode::{InvalidDevice, InvalidHandle, InvalidValue, OutOfMemory};
use warpool_driver::PoolAttribute::{
    ReleaseThreshold, ReservedCurrent, ReservedHigh, ReuseFollowEvents, ReuseInternalDependencies, ReuseOpportunistic,
    UsedCurrent, UsedHigh,
};
use warpool_driver::{Access, Pattern, PoolId};

use crate::check::Check;
use crate::context::{Resource, TestContext, to_bytes};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, expect_slice_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    default_pool_is_constant,
    allocation_and_free_are_stream_ordered,
    memory_can_be_used_on_another_stream_after_an_event,
    live_allocations_do_not_overlap,
    oversized_request_is_out_of_memory,
    only_the_start_of_an_allocation_can_be_freed,
    mem_free_accepts_pool_memory,
    new_pool_is_empty,
    attributes_can_be_set,
    high_water_marks_can_only_be_reset,
    used_bytes_follow_allocations,
    unused_memory_is_released_at_synchronization,
    release_threshold_keeps_memory_until_trim,
    own_device_access_cannot_be_removed,
    unknown_pool_is_rejected,
    ; provoking hazards:
    double_free_is_rejected,
    destroyed_pool_is_rejected,
];

const MIB: u64 = 1 << 20;

fn default_pool_is_constant(context: &TestContext) -> CheckResult {
    require(context.properties()?.async_pools, "the device has no stream-ordered pools")?;
    let pool = context.driver.pool_default(context.device_id)?;
    context.track(Resource::DefaultPool(pool));
    expect_eq("the pool in a second query", context.driver.pool_default(context.device_id)?, pool)?;
    expect(context.pool()? != pool, "a new pool is another one")?;
    expect_error(context.driver.pool_destroy(pool), InvalidValue)?;
    let stream = context.stream()?;
    let ptr = context.pool_alloc(pool, 4096, stream)?;
    context.fill_index(ptr, 1024, stream)?;
    context.synchronize(stream)?;
    expect_slice_eq("the memory of the default pool", &context.read_words(ptr, 1024)?, &(0..1024).collect::<Vec<_>>())?;
    context.pool_free(ptr, stream)?;
    context.synchronize(stream)
}

fn allocation_and_free_are_stream_ordered(context: &TestContext) -> CheckResult {
    let (pool, stream, n) = (context.pool()?, context.stream()?, 5000_u32);
    let back = context.alloc_pinned(4 * u64::from(n) * 8)?;
    // Without a wait in between: a round may use the memory of the round before.
    for round in 0..8_u32 {
        let ptr = context.pool_alloc(pool, 4 * u64::from(n), stream)?;
        context.fill_index(ptr, n, stream)?;
        context.add_u32(ptr, n, 1000 * round, stream)?;
        let place = back.offset(4 * u64::from(n * round));
        context.driver.copy(place.into(), ptr.into(), 4 * u64::from(n), stream)?;
        context.pool_free(ptr, stream)?;
    }
    context.synchronize(stream)?;
    let want: Vec<u32> = (0..8).flat_map(|round| (0..n).map(move |i| i + 1000 * round)).collect();
    expect_slice_eq("the results of eight rounds", &context.read_pinned(back, 4 * 8 * n as usize)?, &to_bytes(&want))
}

fn memory_can_be_used_on_another_stream_after_an_event(context: &TestContext) -> CheckResult {
    let (pool, first, second) = (context.pool()?, context.stream()?, context.stream()?);
    context.delay(first)?;
    let ptr = context.pool_alloc(pool, 4096, first)?;
    context.fill_index(ptr, 1024, first)?;
    context.order(first, second)?;
    context.add_u32(ptr, 1024, 5, second)?;
    let back = context.alloc_pinned(4096)?;
    context.driver.copy(back.into(), ptr.into(), 4096, second)?;
    context.pool_free(ptr, second)?;
    context.synchronize(second)?;
    expect_slice_eq(
        "the results of the second stream",
        &context.read_pinned(back, 4096)?,
        &to_bytes(&(5..1029).collect::<Vec<_>>()),
    )
}

fn live_allocations_do_not_overlap(context: &TestContext) -> CheckResult {
    let (pool, stream) = (context.pool()?, context.stream()?);
    let mut taken = Vec::new();
    for at in 0..32_u32 {
        let n = 1 + context.random_below(20_000) as u32;
        let ptr = context.pool_alloc(pool, 4 * u64::from(n), stream)?;
        context.driver.fill(ptr, Pattern::U32(at), u64::from(n), stream)?;
        taken.push((ptr, n, at));
    }
    context.synchronize(stream)?;
    for (ptr, n, at) in taken {
        expect_eq("the address modulo 256", ptr.0 % 256, 0)?;
        expect_slice_eq("the contents of an allocation", &context.read_words(ptr, n as usize)?, &vec![at; n as usize])?;
        context.pool_free(ptr, stream)?;
    }
    context.synchronize(stream)
}

fn oversized_request_is_out_of_memory(context: &TestContext) -> CheckResult {
    let (pool, stream) = (context.pool()?, context.stream()?);
    expect_error(context.driver.pool_alloc(pool, 1 << 45, stream), OutOfMemory)?;
    let ptr = context.pool_alloc(pool, MIB, stream)?;
    context.pool_free(ptr, stream)?;
    context.synchronize(stream)
}

fn only_the_start_of_an_allocation_can_be_freed(context: &TestContext) -> CheckResult {
    let (pool, stream) = (context.pool()?, context.stream()?);
    let ptr = context.pool_alloc(pool, MIB, stream)?;
    expect_error(context.driver.pool_free(ptr.offset(8), stream), InvalidValue)?;
    context.pool_free(ptr, stream)?;
    context.synchronize(stream)
}

fn double_free_is_rejected(context: &TestContext) -> CheckResult {
    let (pool, stream) = (context.pool()?, context.stream()?);
    let ptr = context.pool_alloc(pool, MIB, stream)?;
    context.pool_free(ptr, stream)?;
    expect_error(context.driver.pool_free(ptr, stream), InvalidValue)?;
    expect_error(context.driver.mem_free(ptr), InvalidValue)?;
    context.synchronize(stream)
}

fn mem_free_accepts_pool_memory(context: &TestContext) -> CheckResult {
    let (pool, stream, log) = (context.pool()?, context.stream()?, context.kernel_log(1)?);
    let ptr = context.pool_alloc(pool, 4096, stream)?;
    context.delay(stream)?;
    context.append(log, 1, stream)?;
    context.free(ptr)?;
    context.synchronize(stream)?;
    context.expect_log(log, &[1])
}

fn new_pool_is_empty(context: &TestContext) -> CheckResult {
    let pool = context.pool()?;
    for attribute in [ReleaseThreshold, ReservedCurrent, ReservedHigh, UsedCurrent, UsedHigh] {
        expect_eq(&format!("{attribute:?}"), context.driver.pool_get(pool, attribute)?, 0)?;
    }
    for attribute in [ReuseFollowEvents, ReuseOpportunistic, ReuseInternalDependencies] {
        expect_eq(&format!("{attribute:?}"), context.driver.pool_get(pool, attribute)?, 1)?;
    }
    Ok(())
}

fn attributes_can_be_set(context: &TestContext) -> CheckResult {
    let pool = context.pool()?;
    let settings = [
        (ReleaseThreshold, 12_345_678),
        (ReleaseThreshold, u64::MAX),
        (ReuseFollowEvents, 0),
        (ReuseOpportunistic, 0),
        (ReuseInternalDependencies, 0),
        (ReuseOpportunistic, 1),
    ];
    for (attribute, value) in settings {
        context.driver.pool_set(pool, attribute, value)?;
        expect_eq(&format!("{attribute:?}"), context.driver.pool_get(pool, attribute)?, value)?;
    }
    Ok(())
}

fn high_water_marks_can_only_be_reset(context: &TestContext) -> CheckResult {
    let (pool, stream) = (context.pool()?, context.stream()?);
    for attribute in [ReservedCurrent, UsedCurrent] {
        expect_error(context.driver.pool_set(pool, attribute, 0), InvalidValue)?;
        expect_error(context.driver.pool_set(pool, attribute, 5), InvalidValue)?;
    }
    let ptr = context.pool_alloc(pool, MIB, stream)?;
    context.pool_free(ptr, stream)?;
    context.synchronize(stream)?;
    for (high, current) in [(UsedHigh, UsedCurrent), (ReservedHigh, ReservedCurrent)] {
        expect_error(context.driver.pool_set(pool, high, 5), InvalidValue)?;
        expect(context.driver.pool_get(pool, high)? >= MIB, "the high-water mark includes the allocation")?;
        context.driver.pool_set(pool, high, 0)?;
        let current = context.driver.pool_get(pool, current)?;
        expect_eq(&format!("{high:?} after a reset"), context.driver.pool_get(pool, high)?, current)?;
    }
    Ok(())
}

fn used_bytes_follow_allocations(context: &TestContext) -> CheckResult {
    let (pool, stream) = (context.pool()?, context.stream()?);
    let used = || context.driver.pool_get(pool, UsedCurrent);
    let first = context.pool_alloc(pool, 3 * MIB, stream)?;
    let second = context.pool_alloc(pool, MIB, stream)?;
    context.synchronize(stream)?;
    expect_eq("bytes used by two allocations", used()?, 4 * MIB)?;
    expect(context.driver.pool_get(pool, ReservedCurrent)? >= 4 * MIB, "reserved bytes include used bytes")?;
    context.pool_free(first, stream)?;
    context.synchronize(stream)?;
    expect_eq("bytes used by one allocation", used()?, MIB)?;
    context.pool_free(second, stream)?;
    context.synchronize(stream)?;
    expect_eq("bytes used by no allocation", used()?, 0)?;
    expect_eq("the high-water mark of used bytes", context.driver.pool_get(pool, UsedHigh)?, 4 * MIB)
}

fn unused_memory_is_released_at_synchronization(context: &TestContext) -> CheckResult {
    let (pool, stream) = (context.pool()?, context.stream()?);
    let ptr = context.pool_alloc(pool, 8 * MIB, stream)?;
    context.synchronize(stream)?;
    expect(context.driver.pool_get(pool, ReservedCurrent)? >= 8 * MIB, "memory in use is reserved")?;
    context.pool_free(ptr, stream)?;
    context.synchronize(stream)?;
    expect_eq("bytes reserved", context.driver.pool_get(pool, ReservedCurrent)?, 0)
}

fn release_threshold_keeps_memory_until_trim(context: &TestContext) -> CheckResult {
    let (pool, stream) = (context.pool()?, context.stream()?);
    context.driver.pool_set(pool, ReleaseThreshold, u64::MAX)?;
    let ptr = context.pool_alloc(pool, 64 * MIB, stream)?;
    context.pool_free(ptr, stream)?;
    context.synchronize(stream)?;
    let kept = context.driver.pool_get(pool, ReservedCurrent)?;
    expect(kept >= 64 * MIB, "freed memory stays reserved")?;
    for keep in [kept, u64::MAX] {
        context.driver.pool_trim(pool, keep)?;
        expect_eq(
            "reserved bytes after a trim that may keep all",
            context.driver.pool_get(pool, ReservedCurrent)?,
            kept,
        )?;
    }
    context.driver.pool_trim(pool, 0)?;
    expect_eq("reserved bytes after a trim that keeps none", context.driver.pool_get(pool, ReservedCurrent)?, 0)
}

fn own_device_access_cannot_be_removed(context: &TestContext) -> CheckResult {
    let pool = context.pool()?;
    expect_error(context.driver.pool_set_access(pool, context.device_id, Access::None), InvalidDevice)
}

fn unknown_pool_is_rejected(context: &TestContext) -> CheckResult {
    context.pool()?;
    expect_rejected(context, PoolId(u64::MAX))
}

fn destroyed_pool_is_rejected(context: &TestContext) -> CheckResult {
    let pool = context.pool()?;
    context.untrack(Resource::Pool(pool));
    context.driver.pool_destroy(pool)?;
    expect_rejected(context, pool)
}

/// Every call that takes a pool must reject this one.
fn expect_rejected(context: &TestContext, pool: PoolId) -> CheckResult {
    let (driver, stream) = (&context.driver, context.stream()?);
    let rejected = |call: &str, result: warpool_driver::Result<()>| expect_error_of(call, result, InvalidHandle);
    rejected("pool_alloc", driver.pool_alloc(pool, 64, stream).map(drop))?;
    rejected("pool_get", driver.pool_get(pool, UsedCurrent).map(drop))?;
    rejected("pool_set", driver.pool_set(pool, ReleaseThreshold, 0))?;
    rejected("pool_trim", driver.pool_trim(pool, 0))?;
    rejected("pool_set_access", driver.pool_set_access(pool, context.device_id, Access::ReadWrite))?;
    rejected("pool_destroy", driver.pool_destroy(pool))
}
