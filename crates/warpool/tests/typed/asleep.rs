//! Typed work and replays on sleeping memory are refused before the driver is called. Vectors fill their blocks, since
//! the fixture reports reads of memory that was not written, and a sleep copies whole blocks.

use std::sync::Arc;

use warpool::driver::{Call, Pattern};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::sleep::Keep;
use warpool::memory::{Allocate, Tags};
use warpool::{DeviceVec, Error, Result};

use crate::fixture::Fixture;

fn expect_asleep(outcome: Result<()>, tag: &str, what: &str) {
    let error = outcome.expect_err("memory that it uses sleeps");
    assert!(matches!(&error, Error::MemoryAsleep { tag: of, .. } if of == tag), "{error}");
    assert!(error.is_asleep() && error.to_string().starts_with(&format!("cannot {what}: ")), "{error}");
}

#[test]
fn typed_work_is_refused() -> Result<()> {
    let gpu = Fixture::new()?;
    let (stream, other, saxpy) = (gpu.stream()?, gpu.stream()?, gpu.saxpy()?);
    let tags = Tags::new(&gpu.allocator, &gpu.host)?;
    let mut x = {
        let _scope = tags.tag(&gpu.device, "weights")?.enter()?;
        DeviceVec::from_slice(&gpu.allocator, &[1.0_f32; 128], &stream)?
    };
    let mut y = DeviceVec::<f32>::zeroed(&gpu.allocator, 128, &stream)?;
    tags.sleep(&["weights"], Keep::Host)?;
    let calls = [Call::Fill, Call::Copy, Call::KernelLaunch, Call::Download, Call::StreamWaitEvent];
    let made = || calls.map(|call| gpu.gpu.call_count(call));
    let before = made();
    for stream in [&stream, &other] {
        expect_asleep(stream.fill(&mut x, 2.0), "weights", "queue this work");
        expect_asleep(stream.copy(&x, &mut y), "weights", "queue this work");
        expect_asleep(stream.copy(&y, x.slice_mut(..)?), "weights", "queue this work");
        expect_asleep(saxpy.launch_linear(stream, 128, (1.0, &x, &mut y)), "weights", "queue this work");
        expect_asleep(x.to_vec(stream).map(drop), "weights", "queue this work");
        expect_asleep(stream.with_address(&x, |_| Ok(())), "weights", "queue this work");
    }
    assert_eq!(made(), before, "the driver was not called");
    stream.fill(&mut y, 3.0)?; // other memory is as ever
    tags.wake(&["weights"])?;
    saxpy.launch_linear(&other, 128, (2.0, &x, &mut y))?;
    assert_eq!(y.to_vec(&other)?, [5.0; 128]);
    gpu.finish()
}

#[test]
fn replays_are_refused_whatever_of_their_memory_sleeps() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let tags = Tags::new(&gpu.allocator, &gpu.host)?;
    let new = || Graph::new(&gpu.allocator, &gpu.device, GraphOptions::default());
    let (mut typed, mut kept, mut pooled) = (new()?, new()?, new()?);
    let mut output = DeviceVec::<u32>::zeroed(&gpu.allocator, 1024, &stream)?;
    // A typed vector, a block that the graph owns, and the memory of the capture.
    let (vector, block) = {
        let _scope = tags.tag(&gpu.device, "kv")?.enter()?;
        let vector = DeviceVec::<u32>::from_slice(&gpu.allocator, &[7; 1024], &stream)?;
        (vector, gpu.allocator.allocate(4096, &stream)?)
    };
    typed.capture(&stream, CaptureOptions::default(), |capture| capture.stream().copy(&vector, &mut output))?;
    let block = Arc::new(block);
    kept.capture(&stream, CaptureOptions::default(), |capture| {
        let (key, stream) = (capture.share(Arc::clone(&block))?, capture.stream().clone());
        capture.fill(key, Pattern::U32(5), 1024, &stream)
    })?;
    let graphs = tags.tag(&gpu.device, "graphs")?;
    pooled.capture(&stream, CaptureOptions::default().with_pool(graphs.pool()), |capture| {
        let (key, stream) = (capture.allocate(4096)?, capture.stream().clone());
        capture.fill(key, Pattern::U32(6), 1024, &stream)
    })?;
    let all = [(&typed, "kv"), (&kept, "kv"), (&pooled, "graphs")];
    let replay_all = || all.iter().try_for_each(|(graph, _)| graph.replay(&stream));
    replay_all()?;
    for tag in ["kv", "graphs"] {
        tags.sleep(&[tag], Keep::Host)?;
        let launches = || gpu.gpu.call_count(Call::GraphLaunch);
        let before = launches();
        for (graph, _) in all.iter().filter(|(_, uses)| *uses == tag) {
            expect_asleep(graph.replay(&stream), tag, "replay the graph");
        }
        assert_eq!(launches(), before, "the driver was not called");
        for (graph, _) in all.iter().filter(|(_, uses)| *uses != tag) {
            graph.replay(&stream)?;
        }
        tags.wake(&[tag])?;
        replay_all()?;
    }
    assert_eq!(output.to_vec(&stream)?, [7; 1024]);
    gpu.finish()
}

#[test]
fn memory_that_is_freed_asleep_leaves_no_range_behind() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let tags = Tags::new(&gpu.allocator, &gpu.host)?;
    let tagged = || {
        let _scope = tags.tag(&gpu.device, "kv")?.enter()?;
        DeviceVec::<u8>::zeroed(&gpu.allocator, 30 << 20, &stream)
    };
    let (first, mut second) = (tagged()?, tagged()?);
    tags.sleep(&["kv"], Keep::Discard)?;
    drop(first);
    expect_asleep(stream.fill(&mut second, 1), "kv", "queue this work");
    tags.wake(&["kv"])?;
    stream.fill(&mut second, 1)?;
    stream.fill(&mut tagged()?, 1)?;
    gpu.finish()
}
