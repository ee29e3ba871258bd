//! Pinned host memory: reuse, waiting, both ways of pinning, limits, threads, graphs. Contents go to the device and
//! back; kernels also work on them where they are. Where something must be under way, a kernel keeps the stream busy
//! and is asked afterwards whether it still was. No more than 50 MiB are pinned at once.

use std::sync::Arc;

use warpool::memory::{
    Action, BlockState, HistoryOptions, HostAllocator, HostBlock, HostStats, PinnedSettings, Snapshot,
};
use warpool::{Error, Stream};
use warpool_driver::{DevicePtr, HostPtr};

use super::graph_helpers::{PLAIN, graph, with_allocator};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, expect_slice_eq, require};

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

/// Runs `body` with both ways of pinning, as far as the device has them.
fn both_ways(context: &TestContext, body: impl Fn(&HostAllocator) -> CheckResult) -> CheckResult {
    with_host(context, "plain", PinnedSettings::default(), &body)?;
    if context.device().properties().host_registration {
        with_host(context, "registered", registered(4), &body)?;
    }
    Ok(())
}

fn registered(threads: u64) -> PinnedSettings {
    PinnedSettings { use_cuda_host_register: true, num_register_threads: threads, ..PinnedSettings::default() }
}

/// Runs `body` with an allocator, and expects everything to go back to the driver.
fn with_host(
    context: &TestContext,
    name: &str,
    settings: PinnedSettings,
    body: impl FnOnce(&HostAllocator) -> CheckResult,
) -> CheckResult {
    // So that pinning finds a context, as in a program that uses the device.
    context.device().default_stream()?.synchronize()?;
    let host = HostAllocator::new(context.instance(), settings);
    let outcome = body(&host).and_then(|()| {
        context.device().synchronize()?;
        host.trim(0)?;
        host.check();
        let HostStats { active_requests, allocated_bytes, .. } = host.stats();
        expect_eq("blocks and bytes in the end", (active_requests.current, allocated_bytes.current), (0, 0))
    });
    if outcome.is_err() {
        // Whatever it left under way must not touch what goes now. The first failure is the one to report.
        let _ = context.device().synchronize();
    }
    let closed = host.close();
    match outcome {
        Ok(()) => Ok(closed?),
        Err(CheckError::Failed(text)) => Err(CheckError::Failed(format!("{name}: {text}"))),
        Err(other) => Err(other),
    }
}

/// Bytes that differ from those of another seed.
fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(seed | 1) >> 3) as u8 ^ seed as u8).collect()
}

fn contents(block: &HostBlock) -> CheckResult<Vec<u8>> {
    let mut bytes = vec![0; block.bytes() as usize];
    block.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Where kernels find it.
fn on_device(block: &HostBlock) -> DevicePtr {
    DevicePtr(block.ptr().0)
}

/// Puts a copy to the device into `stream`, and notes it.
fn upload(context: &TestContext, to: DevicePtr, from: &HostBlock, stream: &Stream) -> CheckResult {
    from.record_use(stream)?;
    Ok(context.driver.copy(to.into(), from.ptr().into(), from.bytes(), stream.id())?)
}

fn download(context: &TestContext, to: &HostBlock, from: DevicePtr, stream: &Stream) -> CheckResult {
    to.record_use(stream)?;
    Ok(context.driver.copy(to.ptr().into(), from.into(), to.bytes(), stream.id())?)
}

/// Whether one of a few blocks of that size, taken at once, lies there. Each is written to.
fn gives(host: &HostAllocator, place: HostPtr, bytes: u64) -> CheckResult<bool> {
    let blocks: Vec<HostBlock> = (0..4).map(|_| host.allocate(bytes)).collect::<Result<_, _>>()?;
    for block in &blocks {
        block.write(0, &pattern(bytes, 0xBAD))?;
    }
    Ok(blocks.iter().any(|block| block.ptr() == place))
}

fn freed_block_is_reused(context: &TestContext) -> CheckResult {
    both_ways(context, |host| {
        for bytes in [1, 4096, 100_000, 3 * MIB + 5] {
            let mut places = Vec::new();
            for round in 0..4 {
                let block = host.allocate(bytes)?;
                let want = pattern(bytes, round);
                block.write(0, &want)?;
                expect_slice_eq("what was written", &contents(&block)?, &want)?;
                places.push(block.ptr());
                if round % 2 == 0 { block.free()? } else { drop(block) }
            }
            places.dedup();
            expect_eq("different places of four blocks in turn", places.len(), 1)?;
        }
        let empty = host.allocate(0)?;
        expect_eq("an empty block", (empty.ptr(), empty.bytes_usable()), (HostPtr(0), 0))
    })
}

fn contents_survive_a_round_trip(context: &TestContext) -> CheckResult {
    const MOST: u64 = 5 * MIB + 3;
    let device = context.alloc(MOST)?;
    both_ways(context, |host| {
        let stream = context.device().lease_stream()?;
        for (seed, bytes) in [1, 511, 5000, 300_000, MOST].into_iter().enumerate() {
            let (from, back) = (host.allocate(bytes)?, host.allocate(bytes)?);
            let want = pattern(bytes, seed as u64);
            from.write(0, &want)?;
            back.write(0, &vec![0; bytes as usize])?;
            upload(context, device, &from, &stream)?;
            download(context, &back, device, &stream)?;
            stream.synchronize()?;
            expect_slice_eq(&format!("{bytes} bytes there and back"), &contents(&back)?, &want)?;
        }
        Ok(())
    })
}

fn freed_block_waits_for_recorded_streams(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 200 * KIB;
    let device = context.alloc(BYTES)?;
    both_ways(context, |host| {
        let stream = context.device().lease_stream()?;
        let block = host.allocate(BYTES)?;
        let (place, want) = (block.ptr(), pattern(BYTES, 7));
        block.write(0, &want)?;
        context.keep_stream_busy(&stream)?;
        upload(context, device, &block, &stream)?;
        block.free()?;
        let early = gives(host, place, BYTES)?;
        expect(!stream.query()?, "the stream still at work")?;
        expect(!early, "other places while a copy is to come")?;
        expect_eq("blocks that wait", host.stats().active_requests.current, 1)?;
        stream.synchronize()?;
        expect_slice_eq("what the copy found", &context.read_bytes(device, BYTES as usize)?, &want)?;
        host.process_pending()?;
        expect_eq("blocks that wait, afterwards", host.stats().active_requests.current, 0)?;
        expect(gives(host, place, BYTES)?, "the place, now that the copy is done")
    })
}

fn busy_stream_delays_only_its_own_blocks(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 64 * KIB;
    let device = context.alloc(2 * BYTES)?;
    both_ways(context, |host| {
        let (busy, quick) = (context.device().lease_stream()?, context.device().lease_stream()?);
        let (first, second) = (host.allocate(BYTES)?, host.allocate(BYTES)?);
        let (first_at, second_at) = (first.ptr(), second.ptr());
        first.write(0, &pattern(BYTES, 1))?;
        second.write(0, &pattern(BYTES, 2))?;
        // The busy one first: marks pass out of order.
        context.keep_stream_busy(&busy)?;
        upload(context, device, &first, &busy)?;
        upload(context, device.offset(BYTES), &second, &quick)?;
        drop((first, second));
        quick.synchronize()?;
        host.process_pending()?;
        let (waits, came_back) = (!gives(host, first_at, BYTES)?, gives(host, second_at, BYTES)?);
        expect(!busy.query()?, "the busy stream still at work")?;
        expect(waits, "the block of the busy stream waits")?;
        expect(came_back, "the block of the other came back")?;
        busy.synchronize()?;
        let want = [pattern(BYTES, 1), pattern(BYTES, 2)].concat();
        expect_slice_eq("what both copies found", &context.read_bytes(device, 2 * BYTES as usize)?, &want)
    })
}

fn device_address_equals_host_address(context: &TestContext) -> CheckResult {
    both_ways(context, |host| {
        for bytes in [8, 70_000, 4 * MIB] {
            let block = host.allocate(bytes)?;
            for offset in [0, bytes / 2, bytes - 1] {
                let ptr = block.ptr().offset(offset);
                let seen = context.driver.host_device_ptr(context.device_id, ptr)?;
                expect_eq("the device's address", seen.0, ptr.0)?;
            }
            expect(block.ptr().0.is_multiple_of(512), "an address that is a multiple of 512")?;
        }
        Ok(())
    })
}

fn kernels_access_pinned_blocks(context: &TestContext) -> CheckResult {
    const BYTES: u64 = MIB;
    both_ways(context, |host| {
        let stream = context.device().lease_stream()?;
        let (from, to) = (host.allocate(BYTES)?, host.allocate(BYTES)?);
        from.write(0, &words(BYTES, 100))?;
        from.record_use(&stream)?;
        to.record_use(&stream)?;
        context.add_sequence(on_device(&to), on_device(&from), BYTES, 11, &stream)?;
        stream.synchronize()?;
        expect_slice_eq("what a kernel wrote", &contents(&to)?, &words(BYTES, 111))
    })
}

/// Words that count up, as the kernels write them.
fn words(bytes: u64, first: u32) -> Vec<u8> {
    (0..bytes as u32 / 4).flat_map(|at| (first + at).to_le_bytes()).collect()
}

fn large_blocks_are_registered_by_several_threads(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 24 * MIB;
    require(context.device().properties().host_registration, "the device cannot pin memory where it is")?;
    for threads in [1, 2, 8] {
        with_host(context, &format!("{threads} threads"), registered(threads), |host| {
            let stream = context.device().lease_stream()?;
            let (block, odd) = (host.allocate(BYTES)?, host.allocate(MIB + 12_345)?);
            block.record_use(&stream)?;
            context.write_sequence(on_device(&block), BYTES, threads as u32, &stream)?;
            context.expect_sequence("all of it", on_device(&block), BYTES, threads as u32, &stream)?;
            // Both ends, by the host.
            let mut ends = [0; 8];
            block.read(0, &mut ends[..4])?;
            block.read(BYTES - 4, &mut ends[4..])?;
            let last = threads as u32 + (BYTES / 4) as u32 - 1;
            let want = [(threads as u32).to_le_bytes(), last.to_le_bytes()].concat();
            expect_slice_eq("its ends", &ends, &want)?;
            // The way is remembered: the setting may change before memory goes back.
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
    for (name, settings) in [("in all", limited(Some(8 * MIB), None)), ("by device", limited(None, Some(8 * MIB)))] {
        with_host(context, name, settings, |host| {
            let ask = |bytes| host.allocate_for(bytes, context.device());
            let (first, second) = (ask(5 * MIB)?, ask(3 * MIB)?);
            match ask(MIB) {
                Err(Error::PinnedCap(report)) => {
                    let told = (report.bytes_cap, report.bytes_pinned, report.bytes_allocated);
                    expect_eq("the cap, and what is pinned and taken", told, (8 * MIB, 8 * MIB, 8 * MIB))?;
                }
                other => return Err(CheckError::Failed(format!("more than the cap: {other:?}"))),
            }
            second.write(0, &[3; 100])?;
            // What lies cached makes room.
            drop(first);
            let third = ask(4 * MIB)?;
            third.write(0, &[4; 100])?;
            expect(host.stats().allocated_bytes.peak <= 8 * MIB, "never more than the cap")?;
            expect(ask(5 * MIB).is_err(), "again more than the cap")?;
            drop((second, third));
            Ok(())
        })?;
    }
    Ok(())
}

fn trim_stops_at_its_target(context: &TestContext) -> CheckResult {
    both_ways(context, |host| {
        let kept = host.allocate(MIB)?;
        let blocks: Vec<HostBlock> =
            [2, 4, 8].into_iter().map(|mib| host.allocate(mib * MIB)).collect::<Result<_, _>>()?;
        drop(blocks);
        let held = || host.stats().allocated_bytes.current;
        expect_eq("what is pinned", held(), 15 * MIB)?;
        expect_eq("given back by a trim to more", host.trim(20 * MIB)?, 0)?;
        let returned = host.trim(8 * MIB)?;
        expect(held() <= 8 * MIB, "no more than the target")?;
        expect_eq("given back, with what is left", returned + held(), 15 * MIB)?;
        host.trim(0)?;
        expect_eq("what somebody has stays", held(), MIB)?;
        kept.write(0, &[1; 4096])?;
        drop(kept);
        Ok(())
    })
}

fn statistics_follow_allocations(context: &TestContext) -> CheckResult {
    both_ways(context, |host| {
        let of = |stats: &HostStats| {
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
        expect_eq("before anything", of(&host.stats()), [0; 6])?;
        let (small, large) = (host.allocate(1000)?, host.allocate(3 * MIB)?);
        expect_eq("two blocks", of(&host.stats()), [2, 2, 0, 3 * MIB + 1024, 2, 2])?;
        drop((small, large));
        expect_eq("none", of(&host.stats()), [0, 2, 2, 0, 2, 2])?;
        let again = host.allocate(3 * MIB)?;
        expect_eq("one, from the cache", of(&host.stats()), [1, 3, 2, 3 * MIB, 2, 2])?;
        drop(again);
        host.trim(0)?;
        let stats = host.stats();
        expect_eq("nothing", of(&stats), [0, 3, 3, 0, 0, 2])?;
        expect_eq("calls that took time", (stats.host_alloc_time.count, stats.host_free_time.count), (2, 2))?;
        expect_eq("the peak", stats.active_bytes.peak, 3 * MIB + 1024)?;
        host.reset_accumulated_stats();
        host.reset_peak_stats();
        let stats = host.stats();
        expect_eq("after both resets", (of(&stats), stats.active_bytes.peak, stats.num_host_free), ([0; 6], 0, 0))
    })
}

fn threads_share_an_allocator(context: &TestContext) -> CheckResult {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 60;
    const MOST: u64 = 40_000;
    both_ways(context, |host| {
        let device = context.alloc(THREADS * MOST)?;
        let work = |thread: u64| -> CheckResult {
            let stream = context.device().lease_stream()?;
            let own = device.offset(thread * MOST);
            let mut kept: Option<(HostBlock, Vec<u8>)> = None;
            for round in 0..ROUNDS {
                let bytes = 1 + (round * 7919 + thread * 104_729) % MOST;
                let (from, back) = (host.allocate(bytes)?, host.allocate(bytes)?);
                let want = pattern(bytes, thread * ROUNDS + round);
                from.write(0, &want)?;
                upload(context, own, &from, &stream)?;
                // Given back with the copy under way: nobody may get it yet.
                drop(from);
                download(context, &back, own, &stream)?;
                stream.synchronize()?;
                expect_slice_eq("there and back", &contents(&back)?, &want)?;
                if let Some((block, want)) = kept.replace((back, want)) {
                    expect_slice_eq("kept over a round", &contents(&block)?, &want)?;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, CheckResult>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().try_for_each(join)
        })
    })
}

fn every_device_can_copy_from_a_block(context: &TestContext) -> CheckResult {
    const BYTES: u64 = MIB;
    let other = context.second_device()?;
    both_ways(context, |host| {
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
            expect_slice_eq("there and back", &contents(&back)?, &want)?;
        }
        Ok(())
    })
}

fn replays_read_and_write_pinned_blocks(context: &TestContext) -> CheckResult {
    const BYTES: u64 = MIB;
    both_ways(context, |host| {
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
                // By a kernel, where it is.
                capture.host_buffer(mapped)?.record_use(&stream)?;
                context.add_sequence(on_device(capture.host_buffer(mapped)?), ptr, BYTES, 1, &stream)?;
                // What was not used serves the next request at once, and stays in the pool.
                let unused = host.allocate_on(BYTES, &stream)?.ptr();
                Ok((output, mapped, [unused, host.allocate_on(BYTES, &stream)?.ptr()]))
            })?;
            expect_eq("the place of a block that was not used", unused[0], unused[1])?;
            expect(!gives(host, unused[0], BYTES)?, "it is the graph's all the same")?;
            for round in 0..4 {
                input.write(0, &words(BYTES, 1000 * round))?;
                graph.replay(stream)?;
                stream.synchronize()?;
                let got = contents(graph.host_buffer(output)?)?;
                expect_slice_eq("what a replay copied out", &got, &words(BYTES, 1000 * round + 10))?;
                let got = contents(graph.host_buffer(mapped)?)?;
                expect_slice_eq("what a kernel in it wrote", &got, &words(BYTES, 1000 * round + 11))?;
            }
            Ok(graph.reset()?)
        })
    })
}

fn dropped_graph_frees_blocks_after_its_replays(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 128 * KIB;
    both_ways(context, |host| {
        with_allocator(context, |allocator, stream| {
            let device = context.alloc(BYTES)?;
            let other = context.device().lease_stream()?;
            let mut graph = graph(context, allocator)?;
            let want = pattern(BYTES, 3);
            let place = graph.capture(stream, PLAIN, |capture| {
                let block = host.allocate_on(BYTES, capture.stream())?;
                block.write(0, &want)?;
                block.record_use(capture.stream())?;
                let (to, from) = (device.into(), block.ptr().into());
                capture.stream().instance().driver().copy(to, from, BYTES, capture.stream().id())?;
                Ok(block.ptr())
            })?;
            expect(!gives(host, place, BYTES)?, "its own while it lives")?;
            context.keep_stream_busy(&other)?;
            graph.replay(&other)?;
            drop(graph);
            let early = gives(host, place, BYTES)?;
            expect(!other.query()?, "the replay still to come")?;
            expect(!early, "nobody's before the replay is done")?;
            other.synchronize()?;
            expect_slice_eq("what the replay found", &context.read_bytes(device, BYTES as usize)?, &want)?;
            host.process_pending()?;
            expect(gives(host, place, BYTES)?, "everybody's now")
        })
    })
}

fn snapshot_includes_pinned_memory(context: &TestContext) -> CheckResult {
    both_ways(context, |host| {
        host.record_history(Some(HistoryOptions::default()));
        let (kept, gone) = (host.allocate(5000)?, host.allocate(2 * MIB)?);
        drop(gone);
        let mut snapshot = Snapshot::default();
        host.add_to(&mut snapshot);
        let segments = snapshot.host_segments.unwrap_or_default();
        let total: u64 = segments.iter().map(|segment| segment.total_size).sum();
        expect_eq("bytes in segments", total, host.stats().allocated_bytes.current)?;
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let taken: Vec<(u64, u64)> = blocks
            .filter(|block| block.state == BlockState::ActiveAllocated)
            .map(|block| (block.address, block.requested_size))
            .collect();
        expect_slice_eq("blocks that somebody has", &taken, &[(kept.ptr().0, 5000)])?;
        let trace = snapshot.host_traces.unwrap_or_default();
        let count = |action| trace.iter().filter(|entry| entry.action == action).count();
        let counts = [Action::SegmentAlloc, Action::Alloc, Action::FreeRequested, Action::FreeCompleted].map(count);
        expect_eq("segments, allocations, frees that were asked for and done", counts, [2, 2, 1, 1])
    })
}
