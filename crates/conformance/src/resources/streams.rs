//! Pool streams, leased streams, external streams.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use warpool::{Error, Instance, STREAMS_PER_POOL, Stream};
use warpool_driver::{ForeignStream, Pattern};

use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq, expect_slice_eq};
use crate::sync::join;

pub(crate) const CHECKS: &[Check] = crate::checks![
    pool_streams_are_returned_round_robin,
    priorities_are_clamped,
    threads_share_one_pool,
    leased_streams_are_exclusive,
    returned_lease_is_reused,
    null_handle_is_the_default_stream,
    wait_stream_orders_the_work,
    callbacks_run_in_stream_order,
    instance_in_use_cannot_be_closed,
];

fn pool_streams_are_returned_round_robin(context: &TestContext) -> CheckResult {
    let streams: Vec<Stream> =
        (0..2 * STREAMS_PER_POOL).map(|_| context.device().pool_stream()).collect::<warpool::Result<_>>()?;
    let (first, second) = streams.split_at(STREAMS_PER_POOL);
    expect_slice_eq("the streams of the second round", second, first)?;
    let ids: BTreeSet<_> = first.iter().map(Stream::id).collect();
    expect_eq("the number of streams", ids.len(), STREAMS_PER_POOL)?;
    for stream in first {
        expect(
            stream.info()?.non_blocking && !stream.is_default()?,
            "a pool stream is non-blocking and not the default stream",
        )?;
        expect(stream.query()?, "the stream is idle")?;
    }
    Ok(())
}

fn priorities_are_clamped(context: &TestContext) -> CheckResult {
    let range = context.device().priority_range()?;
    for (requested, expected) in
        [(100, range.least), (0, range.least), (-100, range.greatest), (range.greatest, range.greatest)]
    {
        expect_eq("the priority", context.device().pool_stream_at(requested)?.priority()?, expected)?;
    }
    expect_eq(
        "the priority of a high-priority stream",
        context.device().high_priority_stream()?.priority()?,
        range.greatest,
    )
}

fn threads_share_one_pool(context: &TestContext) -> CheckResult {
    let ids = std::thread::scope(|scope| {
        let work = |_| {
            scope
                .spawn(|| (0..8).map(|_| Ok(context.device().pool_stream()?.id())).collect::<warpool::Result<Vec<_>>>())
        };
        let threads: Vec<_> = (0..4).map(work).collect();
        threads.into_iter().map(join).collect::<warpool::Result<Vec<_>>>()
    })?;
    let ids: BTreeSet<_> = ids.into_iter().flatten().collect();
    expect_eq("distinct streams of four threads with eight each", ids.len(), STREAMS_PER_POOL)
}

fn leased_streams_are_exclusive(context: &TestContext) -> CheckResult {
    let shared: BTreeSet<_> =
        (0..STREAMS_PER_POOL).map(|_| Ok(context.device().pool_stream()?.id())).collect::<warpool::Result<_>>()?;
    let leases = (0..40).map(|_| context.device().lease_stream()).collect::<warpool::Result<Vec<_>>>()?;
    let leased: BTreeSet<_> = leases.iter().map(|lease| lease.id()).collect();
    expect_eq("distinct leased streams", leased.len(), leases.len())?;
    expect(leased.is_disjoint(&shared), "leased streams are not pool streams")
}

fn returned_lease_is_reused(context: &TestContext) -> CheckResult {
    let lease = context.device().lease_stream()?;
    let id = lease.id();
    drop(lease);
    expect_eq("the next lease", context.device().lease_stream()?.id(), id)
}

fn null_handle_is_the_default_stream(context: &TestContext) -> CheckResult {
    let external = Stream::external(context.device(), ForeignStream::NULL)?;
    expect_eq("the stream", external, context.device().default_stream()?)
}

fn wait_stream_orders_the_work(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 8 << 20;
    let (first, second) = (context.device().pool_stream()?, context.device().pool_stream()?);
    let ptr = context.alloc(2 * BYTES)?;
    for round in 1..=20 {
        context.driver.fill(ptr, Pattern::U8(round), BYTES, first.id())?;
        second.wait_stream(&first)?;
        context.driver.copy(ptr.offset(BYTES).into(), ptr.into(), BYTES, second.id())?;
        first.wait_stream(&second)?;
    }
    second.synchronize()?;
    expect_slice_eq("the memory after the last round", &context.read_bytes(ptr.offset(2 * BYTES - 64), 64)?, &[20; 64])
}

fn callbacks_run_in_stream_order(context: &TestContext) -> CheckResult {
    let stream = context.device().lease_stream()?;
    let last = Arc::new(AtomicU32::new(0));
    let in_order = Arc::new(AtomicU32::new(0));
    for number in 1..=50 {
        let (last, in_order) = (Arc::clone(&last), Arc::clone(&in_order));
        stream.host_callback(move || {
            if last.swap(number, Ordering::Relaxed) == number - 1 {
                in_order.fetch_add(1, Ordering::Relaxed);
            }
        })?;
    }
    stream.synchronize()?;
    expect_eq("callbacks in order", in_order.load(Ordering::Relaxed), 50)
}

fn instance_in_use_cannot_be_closed(context: &TestContext) -> CheckResult {
    let instance = Instance::new(Arc::clone(&context.driver))?;
    let stream = instance.device(context.device().index())?.pool_stream()?;
    expect_eq("closing", instance.close(), Err(Error::StillInUse { references: 1 }))?;
    let instance = stream.instance().clone();
    drop(stream);
    Ok(instance.close()?)
}
