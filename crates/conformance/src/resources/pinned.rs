//! Pinned allocator: reuse, stream fences, allocated and registered memory, limits, threads, graphs. Contents are
//! copied to the device and back, and used by kernels in place. At most 50 MiB are pinned at once.

use std::sync::Arc;

use warpool::memory::host::HostStats;
use warpool::memory::report::{Action, BlockState, HistoryOptions, Snapshot};
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings};
use warpool::{Error, Stream};
use warpool_driver::{DevicePtr, HostPtr};

use super::helpers::{PLAIN, graph, with_allocator};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, expect_slice_eq, require};
use crate::sync::join;

pub(crate) const CHECKS: &[Check] = crate::checks![
    freed_block_is_reused,
    contents_survive_a_round_trip,
    freed_block_waits_for_recorded_streams,
    busy_stream_delays_only_its_own_blocks,
    device_address_equals_host_address,
    kernels_access_pinned_blocks,
    large_blocks_are_registered_by_several_threads,
    cap_releases_cached_memory_first,
    trim_stops_at_its_target,
    statistics_follow_allocations,
    threads_share_an_allocator,
    every_device_can_copy_from_a_block,
    replays_read_and_write_pinned_blocks,
    dropped_graph_frees_blocks_after_its_replays,
    snapshot_includes_pinned_memory,
];

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Runs `body` with allocated and with registered memory, as far as the device supports it.
fn on_each_kind(context: &TestContext, body: impl Fn(&HostAllocator) -> CheckResult) -> CheckResult {
    with_allocator_settings(context, "plain", PinnedSettings::default(), &body)?;
    if context.device().properties().host_registration {
        with_allocator_settings(context, "registered", registered(4), &body)?;
    }
    Ok(())
}

fn registered(threads: u64) -> PinnedSettings {
    PinnedSettings { use_cuda_host_register: true, num_register_threads: threads, ..PinnedSettings::default() }
}

/// Runs `body` with an allocator, and then expects that all memory can be released to the driver.
fn with_allocator_settings(
    context: &TestContext,
    name: &str,
    settings: PinnedSettings,
    body: impl FnOnce(&HostAllocator) -> CheckResult,
) -> CheckResult {
    // Creates the context, as in a program that uses the device.
    context.device().default_stream()?.synchronize()?;
    let host = HostAllocator::new(context.instance(), settings);
    let outcome = body(&host).and_then(|()| {
        context.device().synchronize()?;
        host.trim(0)?;
        host.check();
        let HostStats { active_requests, allocated_bytes, .. } = host.stats();
        expect_eq(
            "active blocks and allocated bytes at the end",
            (active_requests.current, allocated_bytes.current),
            (0, 0),
        )
    });
    if outcome.is_err() {
        // Work of the failed body must not use memory that is freed now. The body's failure is the one to report.
        let _ = context.device().synchronize();
    }
    let closed = host.close();
    match outcome {
        Ok(()) => Ok(closed?),
        Err(CheckError::Failed(text)) => Err(CheckError::Failed(format!("{name}: {text}"))),
        Err(other) => Err(other),
    }
}

/// Random bytes of a seed.
fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    let mut contents = vec![0; bytes as usize];
    fastrand::Rng::with_seed(seed).fill(&mut contents);
    contents
}

fn contents(block: &HostBlock) -> CheckResult<Vec<u8>> {
    let mut bytes = vec![0; block.bytes() as usize];
    block.read(0, &mut bytes)?;
    Ok(bytes)
}

/// The device address of a block.
fn on_device(block: &HostBlock) -> DevicePtr {
    DevicePtr(block.ptr().0)
}

/// Copies a block to the device on `stream`, and records the use.
fn upload(context: &TestContext, to: DevicePtr, from: &HostBlock, stream: &Stream) -> CheckResult {
    from.record_use(stream)?;
    Ok(context.driver.copy(to.into(), from.ptr().into(), from.bytes(), stream.id())?)
}

fn download(context: &TestContext, to: &HostBlock, from: DevicePtr, stream: &Stream) -> CheckResult {
    to.record_use(stream)?;
    Ok(context.driver.copy(to.ptr().into(), from.into(), to.bytes(), stream.id())?)
}

/// Whether the next few blocks of this size include the address. Writes to each of them.
fn reuses(host: &HostAllocator, address: HostPtr, bytes: u64) -> CheckResult<bool> {
    let blocks: Vec<HostBlock> = (0..4).map(|_| host.allocate(bytes)).collect::<Result<_, _>>()?;
    for block in &blocks {
        block.write(0, &pattern(bytes, 0xBAD))?;
    }
    Ok(blocks.iter().any(|block| block.ptr() == address))
}

fn freed_block_is_reused(context: &TestContext) -> CheckResult {
    on_each_kind(context, |host| {
        for bytes in [1, 4096, 100_000, 3 * MIB + 5] {
            let mut addresses = Vec::new();
            for round in 0..4 {
                let block = host.allocate(bytes)?;
                let want = pattern(bytes, round);
                block.write(0, &want)?;
                expect_slice_eq("the written bytes", &contents(&block)?, &want)?;
                addresses.push(block.ptr());
                if round % 2 == 0 { block.free()? } else { drop(block) }
            }
            addresses.dedup();
            expect_eq("addresses of four successive blocks", addresses.len(), 1)?;
        }
        let empty = host.allocate(0)?;
        expect_eq("an empty block", (empty.ptr(), empty.bytes_usable()), (HostPtr(0), 0))
    })
}

fn contents_survive_a_round_trip(context: &TestContext) -> CheckResult {
    const MAX_BYTES: u64 = 5 * MIB + 3;
    let device = context.alloc(MAX_BYTES)?;
    on_each_kind(context, |host| {
        let stream = context.device().lease_stream()?;
        for (seed, bytes) in [1, 511, 5000, 300_000, MAX_BYTES].into_iter().enumerate() {
            let (from, back) = (host.allocate(bytes)?, host.allocate(bytes)?);
            let want = pattern(bytes, seed as u64);
            from.write(0, &want)?;
            back.write(0, &vec![0; bytes as usize])?;
            upload(context, device, &from, &stream)?;
            download(context, &back, device, &stream)?;
            stream.synchronize()?;
            expect_slice_eq(&format!("{bytes} bytes after a round trip"), &contents(&back)?, &want)?;
        }
        Ok(())
    })
}

fn freed_block_waits_for_recorded_streams(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 200 * KIB;
    let device = context.alloc(BYTES)?;
    on_each_kind(context, |host| {
        let stream = context.device().lease_stream()?;
        let block = host.allocate(BYTES)?;
        let (address, want) = (block.ptr(), pattern(BYTES, 7));
        block.write(0, &want)?;
        context.keep_stream_busy(&stream)?;
        upload(context, device, &block, &stream)?;
        block.free()?;
        let reused_early = reuses(host, address, BYTES)?;
        expect(!stream.query()?, "the stream still has work")?;
        expect(!reused_early, "the block is not reused before the copy")?;
        expect_eq("active blocks before the copy", host.stats().active_requests.current, 1)?;
        stream.synchronize()?;
        expect_slice_eq("the copied memory", &context.read_bytes(device, BYTES as usize)?, &want)?;
        host.process_pending()?;
        expect_eq("active blocks after the copy", host.stats().active_requests.current, 0)?;
        expect(reuses(host, address, BYTES)?, "the block is reused after the copy")
    })
}

fn busy_stream_delays_only_its_own_blocks(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 64 * KIB;
    let device = context.alloc(2 * BYTES)?;
    on_each_kind(context, |host| {
        let (busy, quick) = (context.device().lease_stream()?, context.device().lease_stream()?);
        let (first, second) = (host.allocate(BYTES)?, host.allocate(BYTES)?);
        let (first_at, second_at) = (first.ptr(), second.ptr());
        first.write(0, &pattern(BYTES, 1))?;
        second.write(0, &pattern(BYTES, 2))?;
        // The busy stream first: events complete out of order.
        context.keep_stream_busy(&busy)?;
        upload(context, device, &first, &busy)?;
        upload(context, device.offset(BYTES), &second, &quick)?;
        drop((first, second));
        quick.synchronize()?;
        host.process_pending()?;
        let (delayed, reused) = (!reuses(host, first_at, BYTES)?, reuses(host, second_at, BYTES)?);
        expect(!busy.query()?, "the busy stream still has work")?;
        expect(delayed, "the block of the busy stream is not reused")?;
        expect(reused, "the block of the other stream is reused")?;
        busy.synchronize()?;
        let want = [pattern(BYTES, 1), pattern(BYTES, 2)].concat();
        expect_slice_eq("the memory of both copies", &context.read_bytes(device, 2 * BYTES as usize)?, &want)
    })
}

fn device_address_equals_host_address(context: &TestContext) -> CheckResult {
    on_each_kind(context, |host| {
        for bytes in [8, 70_000, 4 * MIB] {
            let block = host.allocate(bytes)?;
            for offset in [0, bytes / 2, bytes - 1] {
                let ptr = block.ptr().offset(offset);
                let seen = context.driver.host_device_ptr(context.device_id, ptr)?;
                expect_eq("the device address", seen.0, ptr.0)?;
            }
            expect(block.ptr().0.is_multiple_of(512), "the address is a multiple of 512")?;
        }
        Ok(())
    })
}

fn kernels_access_pinned_blocks(context: &TestContext) -> CheckResult {
    const BYTES: u64 = MIB;
    on_each_kind(context, |host| {
        let stream = context.device().lease_stream()?;
        let (from, to) = (host.allocate(BYTES)?, host.allocate(BYTES)?);
        from.write(0, &words(BYTES, 100))?;
        from.record_use(&stream)?;
        to.record_use(&stream)?;
        context.add_sequence(on_device(&to), on_device(&from), BYTES, 11, &stream)?;
        stream.synchronize()?;
        expect_slice_eq("the result of a kernel", &contents(&to)?, &words(BYTES, 111))
    })
}

/// The sequence that `write_sequence` writes.
fn words(bytes: u64, first: u32) -> Vec<u8> {
    (0..bytes as u32 / 4).flat_map(|at| (first + at).to_le_bytes()).collect()
}

fn large_blocks_are_registered_by_several_threads(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 24 * MIB;
    require(context.device().properties().host_registration, "the device cannot register host memory")?;
    for threads in [1, 2, 8] {
        with_allocator_settings(context, &format!("{threads} threads"), registered(threads), |host| {
            let stream = context.device().lease_stream()?;
            let (block, odd) = (host.allocate(BYTES)?, host.allocate(MIB + 12_345)?);
            block.record_use(&stream)?;
            context.write_sequence(on_device(&block), BYTES, threads as u32, &stream)?;
            context.expect_sequence("the whole block", on_device(&block), BYTES, threads as u32, &stream)?;
            // Both ends, read by the host.
            let mut ends = [0; 8];
            block.read(0, &mut ends[..4])?;
            block.read(BYTES - 4, &mut ends[4..])?;
            let last = threads as u32 + (BYTES / 4) as u32 - 1;
            let want = [(threads as u32).to_le_bytes(), last.to_le_bytes()].concat();
            expect_slice_eq("the first and the last word", &ends, &want)?;
            // A block is freed the way it was pinned, even after the setting has changed.
            host.set_settings(PinnedSettings::default());
            let plain = host.allocate(3 * MIB)?;
            plain.write(0, &[1; 64])?;
            drop((block, odd, plain));
            Ok(())
        })?;
    }
    Ok(())
}

fn cap_releases_cached_memory_first(context: &TestContext) -> CheckResult {
    let limited =
        |cap_bytes, device_cap_bytes| PinnedSettings { cap_bytes, device_cap_bytes, ..PinnedSettings::default() };
    for (name, settings) in
        [("total cap", limited(Some(8 * MIB), None)), ("cap per device", limited(None, Some(8 * MIB)))]
    {
        with_allocator_settings(context, name, settings, |host| {
            let request = |bytes| host.allocate_for(bytes, context.device());
            let (first, second) = (request(5 * MIB)?, request(3 * MIB)?);
            match request(MIB) {
                Err(Error::PinnedCap(report)) => {
                    let reported = (report.bytes_cap, report.bytes_pinned, report.bytes_allocated);
                    expect_eq("cap, pinned and allocated bytes of the report", reported, (8 * MIB, 8 * MIB, 8 * MIB))?;
                }
                other => return Err(CheckError::Failed(format!("a request above the cap: {other:?}"))),
            }
            second.write(0, &[3; 100])?;
            // Cached memory is released to stay below the cap.
            drop(first);
            let third = request(4 * MIB)?;
            third.write(0, &[4; 100])?;
            expect(host.stats().allocated_bytes.peak <= 8 * MIB, "the peak is within the cap")?;
            expect(request(5 * MIB).is_err(), "a second request above the cap fails")?;
            drop((second, third));
            Ok(())
        })?;
    }
    Ok(())
}

fn trim_stops_at_its_target(context: &TestContext) -> CheckResult {
    on_each_kind(context, |host| {
        let kept = host.allocate(MIB)?;
        let blocks: Vec<HostBlock> =
            [2, 4, 8].into_iter().map(|mib| host.allocate(mib * MIB)).collect::<Result<_, _>>()?;
        drop(blocks);
        let pinned_bytes = || host.stats().allocated_bytes.current;
        expect_eq("pinned bytes", pinned_bytes(), 15 * MIB)?;
        expect_eq("bytes released by a trim to more than is pinned", host.trim(20 * MIB)?, 0)?;
        let released = host.trim(8 * MIB)?;
        expect(pinned_bytes() <= 8 * MIB, "pinned bytes are within the target")?;
        expect_eq("released and remaining bytes", released + pinned_bytes(), 15 * MIB)?;
        host.trim(0)?;
        expect_eq("bytes of the allocated block after a full trim", pinned_bytes(), MIB)?;
        kept.write(0, &[1; 4096])?;
        drop(kept);
        Ok(())
    })
}

fn statistics_follow_allocations(context: &TestContext) -> CheckResult {
    on_each_kind(context, |host| {
        let counts = |stats: &HostStats| {
            let HostStats { active_requests: requests, active_bytes: bytes, allocations, .. } = stats;
            [
                requests.current,
                requests.allocated,
                requests.freed,
                bytes.current,
                allocations.current,
                stats.num_host_alloc,
            ]
        };
        expect_eq("statistics at first", counts(&host.stats()), [0; 6])?;
        let (small, large) = (host.allocate(1000)?, host.allocate(3 * MIB)?);
        expect_eq("statistics with two blocks", counts(&host.stats()), [2, 2, 0, 3 * MIB + 1024, 2, 2])?;
        drop((small, large));
        expect_eq("statistics after both were freed", counts(&host.stats()), [0, 2, 2, 0, 2, 2])?;
        let again = host.allocate(3 * MIB)?;
        expect_eq("statistics with one block from the cache", counts(&host.stats()), [1, 3, 2, 3 * MIB, 2, 2])?;
        drop(again);
        host.trim(0)?;
        let stats = host.stats();
        expect_eq("statistics after a trim", counts(&stats), [0, 3, 3, 0, 0, 2])?;
        expect_eq("timed calls", (stats.host_alloc_time.count, stats.host_free_time.count), (2, 2))?;
        expect_eq("the peak of active bytes", stats.active_bytes.peak, 3 * MIB + 1024)?;
        host.reset_accumulated_stats();
        host.reset_peak_stats();
        let stats = host.stats();
        expect_eq(
            "statistics after both resets",
            (counts(&stats), stats.active_bytes.peak, stats.num_host_free),
            ([0; 6], 0, 0),
        )
    })
}

fn threads_share_an_allocator(context: &TestContext) -> CheckResult {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 60;
    const MAX_BYTES: u64 = 40_000;
    on_each_kind(context, |host| {
        let device = context.alloc(THREADS * MAX_BYTES)?;
        let work = |thread: u64| -> CheckResult {
            let stream = context.device().lease_stream()?;
            let own = device.offset(thread * MAX_BYTES);
            let mut kept: Option<(HostBlock, Vec<u8>)> = None;
            for round in 0..ROUNDS {
                let bytes = 1 + (round * 7919 + thread * 104_729) % MAX_BYTES;
                let (from, back) = (host.allocate(bytes)?, host.allocate(bytes)?);
                let want = pattern(bytes, thread * ROUNDS + round);
                from.write(0, &want)?;
                upload(context, own, &from, &stream)?;
                // Freed while the copy is pending: it must not be reused yet.
                drop(from);
                download(context, &back, own, &stream)?;
                stream.synchronize()?;
                expect_slice_eq("the bytes after a round trip", &contents(&back)?, &want)?;
                if let Some((block, want)) = kept.replace((back, want)) {
                    expect_slice_eq("a block kept for a round", &contents(&block)?, &want)?;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().try_for_each(join)
        })
    })
}

fn every_device_can_copy_from_a_block(context: &TestContext) -> CheckResult {
    const BYTES: u64 = MIB;
    let other = context.second_device()?;
    on_each_kind(context, |host| {
        let (here, there) = (context.device().lease_stream()?, other.lease_stream()?);
        let memory = context.alloc_on(other.id(), BYTES)?;
        let device = context.alloc(BYTES)?;
        let (from, back) = (host.allocate(BYTES)?, host.allocate(BYTES)?);
        let want = pattern(BYTES, 5);
        from.write(0, &want)?;
        upload(context, device, &from, &here)?;
        upload(context, memory, &from, &there)?;
        here.synchronize()?;
        there.synchronize()?;
        for (ptr, stream) in [(device, &*here), (memory, &*there)] {
            back.write(0, &vec![0; BYTES as usize])?;
            download(context, &back, ptr, stream)?;
            stream.synchronize()?;
            expect_slice_eq("the bytes after a round trip", &contents(&back)?, &want)?;
        }
        Ok(())
    })
}

fn replays_read_and_write_pinned_blocks(context: &TestContext) -> CheckResult {
    const BYTES: u64 = MIB;
    on_each_kind(context, |host| {
        with_allocator(context, |allocator, stream| {
            let input = Arc::new(host.allocate(BYTES)?);
            let mut graph = graph(context, allocator)?;
            let (output, mapped, unused) = graph.capture(stream, PLAIN, |capture| {
                let stream = capture.stream().clone();
                let (device, input) = (capture.allocate(BYTES)?, capture.share_host(Arc::clone(&input))?);
                let (output, mapped) = (capture.allocate_host(host, BYTES)?, capture.allocate_host(host, BYTES)?);
                capture.copy(device, input, BYTES, &stream)?;
                let ptr = capture.buffer(device)?.ptr();
                context.add_sequence(ptr, ptr, BYTES, 10, &stream)?;
                capture.copy(output, device, BYTES, &stream)?;
                // Written by a kernel in place.
                capture.host_buffer(mapped)?.record_use(&stream)?;
                context.add_sequence(on_device(capture.host_buffer(mapped)?), ptr, BYTES, 1, &stream)?;
                // A block without recorded use is reused at once by the next request of the capture.
                let unused = host.allocate_on(BYTES, &stream)?.ptr();
                Ok((output, mapped, [unused, host.allocate_on(BYTES, &stream)?.ptr()]))
            })?;
            expect_eq("the address of an unused block", unused[0], unused[1])?;
            expect(!reuses(host, unused[0], BYTES)?, "the unused block stays with the graph")?;
            for round in 0..4 {
                input.write(0, &words(BYTES, 1000 * round))?;
                graph.replay(stream)?;
                stream.synchronize()?;
                let got = contents(graph.host_buffer(output)?)?;
                expect_slice_eq("the memory copied by a replay", &got, &words(BYTES, 1000 * round + 10))?;
                let got = contents(graph.host_buffer(mapped)?)?;
                expect_slice_eq("the memory written by a kernel of a replay", &got, &words(BYTES, 1000 * round + 11))?;
            }
            Ok(graph.reset()?)
        })
    })
}

fn dropped_graph_frees_blocks_after_its_replays(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 128 * KIB;
    on_each_kind(context, |host| {
        with_allocator(context, |allocator, stream| {
            let device = context.alloc(BYTES)?;
            let other = context.device().lease_stream()?;
            let mut graph = graph(context, allocator)?;
            let want = pattern(BYTES, 3);
            let address = graph.capture(stream, PLAIN, |capture| {
                let block = host.allocate_on(BYTES, capture.stream())?;
                block.write(0, &want)?;
                block.record_use(capture.stream())?;
                let (to, from) = (device.into(), block.ptr().into());
                capture.stream().instance().driver().copy(to, from, BYTES, capture.stream().id())?;
                Ok(block.ptr())
            })?;
            expect(!reuses(host, address, BYTES)?, "the block stays with the graph")?;
            context.keep_stream_busy(&other)?;
            graph.replay(&other)?;
            drop(graph);
            let reused_early = reuses(host, address, BYTES)?;
            expect(!other.query()?, "the replay is still pending")?;
            expect(!reused_early, "the block is not reused before the replay")?;
            other.synchronize()?;
            expect_slice_eq("the memory copied by the replay", &context.read_bytes(device, BYTES as usize)?, &want)?;
            host.process_pending()?;
            expect(reuses(host, address, BYTES)?, "the block is reused after the replay")
        })
    })
}

fn snapshot_includes_pinned_memory(context: &TestContext) -> CheckResult {
    on_each_kind(context, |host| {
        host.record_history(Some(HistoryOptions::default()));
        let (kept, freed) = (host.allocate(5000)?, host.allocate(2 * MIB)?);
        drop(freed);
        let mut snapshot = Snapshot::default();
        host.add_to(&mut snapshot);
        let segments = snapshot.host_segments.unwrap_or_default();
        let total: u64 = segments.iter().map(|segment| segment.total_size).sum();
        expect_eq("bytes of all segments", total, host.stats().allocated_bytes.current)?;
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let taken: Vec<(u64, u64)> = blocks
            .filter(|block| block.state == BlockState::ActiveAllocated)
            .map(|block| (block.address, block.requested_size))
            .collect();
        expect_slice_eq("allocated blocks", &taken, &[(kept.ptr().0, 5000)])?;
        let trace = snapshot.host_traces.unwrap_or_default();
        let count = |action| trace.iter().filter(|entry| entry.action == action).count();
        let counts = [Action::SegmentAlloc, Action::Alloc, Action::FreeRequested, Action::FreeCompleted].map(count);
        expect_eq("traced segments, allocations, requested frees and completed frees", counts, [2, 2, 1, 1])
    })
}
