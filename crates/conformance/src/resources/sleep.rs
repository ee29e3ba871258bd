//! Memory that sleeps and wakes, with the caching and the paged allocator. Kernels write contents before and check them
//! after; the driver reports how much memory is free meanwhile. At most 128 MiB of the device are used, except in one
//! check that fills it.

use std::sync::Arc;

use warpool::graph::CaptureOptions;
use warpool::memory::sleep::Keep;
use warpool::memory::{
    Allocate, CachingAllocator, DeviceBlock, HostAllocator, MemPoolId, PagedAllocator, PinnedSettings, Settings, Tags,
};
use warpool::{Error, Stream, StreamLease};

use super::helpers::{PLAIN, SharedAllocator, capture_sum, graph, reserved_bytes};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    contents_and_addresses_return,
    host_memory_is_pinned_ahead,
    discarded_contents_are_zero,
    the_driver_has_the_memory_meanwhile,
    other_memory_takes_its_place_meanwhile,
    tags_wake_one_by_one,
    work_in_streams_is_waited_for,
    captured_graph_replays_after_waking,
    memory_of_a_graph_sleeps_with_its_tag,
    many_rounds_leave_nothing_behind,
    a_full_device_is_reported_and_changes_nothing,
    pinned_memory_that_runs_out_changes_nothing,
    what_is_freed_asleep_stays_freed,
];

const MIB: u64 = 1 << 20;

/// An allocator with tags, and the context of the check.
struct Sleeper<'a> {
    context: &'a TestContext,
    allocator: SharedAllocator,
    host: HostAllocator,
    tags: Tags,
    stream: StreamLease,
}

/// Runs `body` on each allocator whose memory can sleep, and then expects that all memory can be returned.
fn on_each(context: &TestContext, body: impl Fn(&Sleeper<'_>) -> CheckResult) -> CheckResult {
    on_each_with(context, &PinnedSettings::default(), body)
}

fn on_each_with(
    context: &TestContext,
    pinned: &PinnedSettings,
    body: impl Fn(&Sleeper<'_>) -> CheckResult,
) -> CheckResult {
    require(context.device().properties().virtual_memory, "the device has no virtual memory management")?;
    let instance = context.instance();
    let allocators: [SharedAllocator; 2] = [
        Arc::new(CachingAllocator::new(instance, Settings::default())),
        Arc::new(PagedAllocator::new(instance, Settings::default())?),
    ];
    for allocator in allocators {
        let host = HostAllocator::new(instance, pinned.clone());
        let tags = Tags::new(&allocator, &host)?;
        let sleeper = Sleeper { context, allocator, host, tags, stream: context.device().lease_stream()? };
        let outcome = body(&sleeper);
        // Work of a failed body must not use memory that is freed now. The body's failure is the one to report.
        let synchronized = context.device().synchronize();
        outcome?;
        synchronized?;
        let Sleeper { allocator, host, tags, stream, .. } = sleeper;
        drop((tags, stream));
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_eq("reserved bytes at the end", reserved_bytes(context, &allocator)?, 0)?;
        host.close()?;
    }
    Ok(())
}

impl Sleeper<'_> {
    fn block(&self, tag: &str, bytes: u64) -> CheckResult<DeviceBlock> {
        let _scope = self.tags.tag(self.context.device(), tag)?.enter()?;
        Ok(self.allocator.allocate(bytes, &self.stream)?)
    }

    fn write(&self, block: &DeviceBlock, first: u32) -> CheckResult {
        self.context.write_sequence(block.ptr(), block.bytes(), first, &self.stream)
    }

    #[track_caller]
    fn expect(&self, what: &str, block: &DeviceBlock, first: u32) -> CheckResult {
        self.context.expect_sequence(what, block.ptr(), block.bytes(), first, &self.stream)
    }

    fn bytes_free(&self) -> CheckResult<u64> {
        Ok(self.context.driver.mem_info(self.context.device_id)?.bytes_free)
    }

    fn reserved(&self) -> CheckResult<u64> {
        reserved_bytes(self.context, &self.allocator)
    }
}

fn contents_and_addresses_return(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let sizes = [1000, 300_000, 3 * MIB, 24 * MIB, 40 * MIB];
        let mut blocks = Vec::new();
        for (first, bytes) in (1..).zip(sizes) {
            blocks.push(on.block("weights", bytes)?);
            on.write(&blocks[first - 1], first as u32)?;
        }
        for _ in 0..2 {
            let report = on.tags.sleep(&["weights"], Keep::Host)?;
            expect(report.bytes_copied >= sizes.iter().sum(), "all contents were copied")?;
            expect_eq("what the driver refused", report.bytes_not_returned, 0)?;
            expect_eq("reserved bytes asleep", on.reserved()?, 0)?;
            on.tags.wake(&["weights"])?;
            for (first, block) in (1..).zip(&blocks) {
                on.expect("a block after waking", block, first)?;
            }
        }
        Ok(())
    })
}

fn host_memory_is_pinned_ahead(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let block = on.block("weights", 40 * MIB)?;
        on.write(&block, 3)?;
        let pinned = || (on.host.stats().num_host_alloc, on.host.stats().allocated_bytes.current);
        expect_eq("bytes prepared", on.tags.prepare(&["weights"])?, 40 * MIB)?;
        let prepared = pinned();
        expect(prepared.1 >= 40 * MIB, "they are pinned")?;
        on.tags.sleep(&["weights"], Keep::Host)?;
        expect_eq("what is pinned after the sleep", pinned(), prepared)?;
        on.tags.wake(&["weights"])?;
        on.expect("a block after waking", &block, 3)
    })
}

fn discarded_contents_are_zero(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let block = on.block("kv", 64 * MIB)?;
        on.write(&block, 1)?;
        let report = on.tags.sleep(&["kv"], Keep::Discard)?;
        expect_eq("copied bytes", report.bytes_copied, 0)?;
        on.tags.wake(&["kv"])?;
        for offset in [0, 32 * MIB, 64 * MIB - 4096] {
            let words = context.read_words(warpool_driver::DevicePtr(block.ptr().0 + offset), 1024)?;
            expect(words.iter().all(|&word| word == 0), "the memory is zero")?;
        }
        Ok(())
    })
}

fn the_driver_has_the_memory_meanwhile(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let block = on.block("weights", 48 * MIB)?;
        on.write(&block, 7)?;
        on.stream.synchronize()?;
        let before = on.bytes_free()?;
        let report = on.tags.sleep(&["weights"], Keep::Host)?;
        let asleep = on.bytes_free()?;
        expect_eq("bytes that the driver got", report.bytes_device, 48 * MIB)?;
        // Others may use the device at the same time; on the simulated one nobody does.
        let gained = asleep.saturating_sub(before);
        expect(gained > 32 * MIB, &format!("the driver has {gained} bytes more while they sleep"))?;
        on.tags.wake(&["weights"])?;
        on.expect("the block", &block, 7)
    })
}

fn other_memory_takes_its_place_meanwhile(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let block = on.block("weights", 16 * MIB)?;
        on.write(&block, 7)?;
        on.tags.sleep(&["weights"], Keep::Host)?;
        for round in 0..3 {
            let other = on.allocator.allocate(20 * MIB, &on.stream)?;
            expect(other.ptr() != block.ptr(), "addresses of what sleeps are not given away")?;
            on.write(&other, 1000 * round)?;
            on.expect("the other block", &other, 1000 * round)?;
        }
        on.allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        on.tags.wake(&["weights"])?;
        on.expect("the block", &block, 7)
    })
}

fn tags_wake_one_by_one(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let (weights, cache) = (on.block("weights", 12 * MIB)?, on.block("kv", 16 * MIB)?);
        on.write(&weights, 1)?;
        on.write(&cache, 2)?;
        on.tags.sleep(&["weights", "kv"], Keep::Host)?;
        on.tags.wake(&["weights"])?;
        on.expect("the weights, while the cache sleeps", &weights, 1)?;
        expect_eq("reserved bytes", on.reserved()?, 12 * MIB)?;
        let refused = on.block("kv", MIB);
        expect(
            matches!(refused, Err(CheckError::Failed(ref why)) if why.contains("wake the tag")),
            "a sleeping tag serves no request",
        )?;
        on.tags.wake(&["kv"])?;
        on.expect("the cache", &cache, 2)
    })
}

fn work_in_streams_is_waited_for(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let block = on.block("weights", 64 * MIB)?;
        on.write(&block, 1)?;
        context.keep_stream_busy(&on.stream)?;
        // After a long kernel.
        on.write(&block, 2)?;
        on.tags.sleep(&["weights"], Keep::Host)?;
        expect(on.stream.query()?, "the work was waited for")?;
        on.tags.wake(&["weights"])?;
        on.expect("what the work wrote", &block, 2)
    })
}

fn captured_graph_replays_after_waking(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        const BYTES: u64 = 12 * MIB;
        context.kernels()?;
        let (input, output) = (on.block("weights", BYTES)?, on.block("kv", BYTES)?);
        on.write(&input, 5)?;
        let mut graph = graph(context, &on.allocator)?;
        graph.capture(&on.stream, PLAIN, |capture| {
            context.add_sequence(output.ptr(), input.ptr(), BYTES, 10, capture.stream())
        })?;
        for keep in [Keep::Host, Keep::Discard] {
            on.write(&output, 1)?;
            on.tags.sleep(&["weights"], Keep::Host)?;
            on.tags.sleep(&["kv"], keep)?;
            let other = on.allocator.allocate(48 * MIB, &on.stream)?;
            on.write(&other, 9)?;
            drop(other);
            on.tags.wake(&["kv", "weights"])?;
            graph.replay(&on.stream)?;
            on.expect("what the graph wrote after waking", &output, 15)?;
        }
        Ok(())
    })
}

fn memory_of_a_graph_sleeps_with_its_tag(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        const BYTES: u64 = 12 * MIB;
        context.kernels()?;
        let input = on.block("weights", BYTES)?;
        on.write(&input, 5)?;
        let tag = on.tags.tag(context.device(), "graphs")?;
        let mut graph = graph(context, &on.allocator)?;
        let mut output = None;
        let options = CaptureOptions { pool: Some(tag.pool()), ..PLAIN };
        graph.capture(&on.stream, options, |capture| {
            output = Some(capture_sum(context, capture, input.ptr(), BYTES, 10)?);
            Ok(())
        })?;
        let output = graph.buffer(output.expect("captured"))?.ptr();
        expect(tag.info().bytes_device >= 2 * BYTES, "the graph's memory carries the tag")?;
        graph.replay(&on.stream)?;
        for _ in 0..2 {
            on.tags.sleep(&["weights", "graphs"], Keep::Host)?;
            expect_eq("device memory of the graph asleep", tag.info().bytes_device, 0)?;
            // The device would be lost.
            let refused = graph.replay(&on.stream);
            expect(refused.as_ref().is_err_and(Error::is_asleep), "a replay is refused while its memory sleeps")?;
            on.tags.wake(&["weights", "graphs"])?;
            context.expect_sequence("what the graph had written", output, BYTES, 15, &on.stream)?;
            graph.replay(&on.stream)?;
            context.expect_sequence("what the graph writes again", output, BYTES, 15, &on.stream)?;
        }
        on.stream.synchronize()?;
        Ok(())
    })
}

fn many_rounds_leave_nothing_behind(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let blocks = [on.block("weights", 40 * MIB)?, on.block("kv", 24 * MIB)?];
        for (first, block) in (1..).zip(&blocks) {
            on.write(block, first)?;
        }
        let mut free = Vec::new();
        for _ in 0..12 {
            on.tags.sleep(&["weights", "kv"], Keep::Host)?;
            on.tags.wake(&["kv", "weights"])?;
            free.push(on.bytes_free()?);
        }
        for (first, block) in (1..).zip(&blocks) {
            on.expect("a block after many rounds", block, first)?;
        }
        let lost = free[1].saturating_sub(free[11]);
        expect(lost < 32 * MIB, &format!("{lost} bytes are gone after ten rounds"))?;
        let pinned = on.host.stats();
        expect_eq("pinned bytes in use", pinned.active_bytes.current, 0)?;
        expect(pinned.allocated_bytes.current <= 192 * MIB, "pinned memory is reused")
    })
}

fn a_full_device_is_reported_and_changes_nothing(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let block = on.block("weights", 64 * MIB)?;
        on.write(&block, 3)?;
        on.tags.sleep(&["weights"], Keep::Host)?;
        // Another program takes all but a little of the device.
        let mut taken = Vec::new();
        let mut piece = on.bytes_free()?;
        while on.bytes_free()? > 32 * MIB && piece >= MIB {
            match context.driver.mem_alloc(context.device_id, piece) {
                Ok(ptr) => taken.push(ptr),
                Err(_) => piece /= 2,
            }
        }
        let refused = on.tags.wake(&["weights"]);
        for ptr in taken {
            context.driver.mem_free(ptr)?;
        }
        match refused {
            Err(Error::Sleep(failure)) => {
                let text = failure.to_string();
                expect(text.contains("64.00 MiB of device memory are needed"), &text)?;
            }
            other => return Err(CheckError::Failed(format!("waking on a full device: {other:?}"))),
        }
        on.tags.wake(&["weights"])?;
        on.expect("the block", &block, 3)
    })
}

fn pinned_memory_that_runs_out_changes_nothing(context: &TestContext) -> CheckResult {
    let pinned = PinnedSettings { cap_bytes: Some(64 * MIB), ..PinnedSettings::default() };
    on_each_with(context, &pinned, |on| {
        let (weights, cache) = (on.block("weights", 48 * MIB)?, on.block("kv", 48 * MIB)?);
        on.write(&weights, 1)?;
        on.write(&cache, 2)?;
        match on.tags.sleep(&["weights", "kv"], Keep::Host) {
            Err(Error::Sleep(failure)) => {
                expect(failure.is_undone && failure.to_string().contains("pinned host memory"), &failure.to_string())?;
            }
            other => return Err(CheckError::Failed(format!("sleep without pinned memory: {other:?}"))),
        }
        on.expect("the weights", &weights, 1)?;
        on.expect("the cache", &cache, 2)?;
        on.tags.sleep(&["weights"], Keep::Host)?;
        on.tags.sleep(&["kv"], Keep::Discard)?;
        on.tags.wake(&["weights", "kv"])?;
        on.expect("the weights after waking", &weights, 1)
    })
}

fn what_is_freed_asleep_stays_freed(context: &TestContext) -> CheckResult {
    on_each(context, |on| {
        let (kept, freed) = (on.block("kv", 12 * MIB)?, on.block("kv", 20 * MIB)?);
        on.write(&kept, 1)?;
        on.write(&freed, 2)?;
        let other: Stream = on.stream.clone();
        freed.record_use(&other)?;
        on.tags.sleep(&["kv"], Keep::Host)?;
        drop(freed);
        on.tags.wake(&["kv"])?;
        on.expect("the block that was kept", &kept, 1)?;
        on.tags.sleep(&["kv"], Keep::Host)?;
        let info = on.tags.tag(context.device(), "kv")?.info();
        expect_eq("bytes of addresses", info.bytes, 12 * MIB)?;
        on.tags.wake(&["kv"])?;
        on.expect("the block that was kept, again", &kept, 1)
    })
}
