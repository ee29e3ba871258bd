//! Typed memory in captures and replays.

use std::sync::Arc;

use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, Graph, GraphOptions, Step};
use warpool::typed::BufferError;
use warpool::{DeviceVec, Error, PinnedVec, Result};

use crate::fixture::Fixture;

#[test]
fn a_step_reads_its_inputs_anew_at_every_replay() -> Result<()> {
    let gpu = Fixture::new()?;
    let (stream, other) = (gpu.stream()?, gpu.stream()?);
    let saxpy = gpu.saxpy()?;
    let input = PinnedVec::<f32>::zeroed(&gpu.host, 100)?;
    let x = DeviceVec::<f32>::zeroed(&gpu.allocator, 100, &stream)?;
    let y = DeviceVec::<f32>::zeroed(&gpu.allocator, 100, &stream)?;
    let options = CaptureOptions::default();
    let mut step = Step::capture(&gpu.allocator, &stream, options, (input, x, y), |stream, (input, x, y)| {
        stream.copy(&*input, &mut *x)?;
        saxpy.launch_linear(stream, 100, (2.0, &*x, y))
    })?;
    let mut sum = 0.0;
    for round in 0..6 {
        step.buffers_mut().0.host_mut()?.fill(round as f32);
        sum += 2.0 * round as f32;
        // Alternates between two streams: the replays and the reads in between are ordered.
        let on = if round % 2 == 0 { &stream } else { &other };
        step.replay(on)?;
        assert_eq!(step.buffers().2.to_vec(&other)?, [sum; 100]);
    }
    let (input, ..) = step.into_buffers();
    assert_eq!(input.wait()?, [5.0; 100]);
    gpu.finish()
}

#[test]
fn the_graph_keeps_memory_that_it_captured() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut graph = Graph::new(&gpu.allocator, &gpu.device, GraphOptions::default())?;
    let mut output = DeviceVec::<u32>::zeroed(&gpu.allocator, 1000, &stream)?;
    let mut between = DeviceVec::<u32>::zeroed(&gpu.allocator, 1000, &stream)?;
    graph.capture(&stream, CaptureOptions::default(), |capture| {
        let stream = capture.stream().clone();
        stream.fill(&mut between, 3)?;
        stream.copy(&between, &mut output)
    })?;
    drop(between); // the graph still has it
    let mut other = DeviceVec::<u32>::zeroed(&gpu.allocator, 1000, &stream)?;
    for round in 0..3 {
        stream.fill(&mut other, round)?;
        graph.replay(&stream)?;
        assert_eq!((output.to_vec(&stream)?, other.to_vec(&stream)?), (vec![3; 1000], vec![round; 1000]));
    }
    graph.reset()?;
    stream.fill(&mut output, 9)?;
    assert_eq!(output.to_vec(&stream)?, [9; 1000]);
    gpu.finish()
}

#[test]
fn forked_streams_of_a_capture_are_ordered_by_their_buffers() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut graph = Graph::new(&gpu.allocator, &gpu.device, GraphOptions::default())?;
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 1000, &stream)?;
    let mut y = DeviceVec::<u32>::zeroed(&gpu.allocator, 1000, &stream)?;
    graph.capture(&stream, CaptureOptions::default(), |capture| {
        let side = capture.fork()?;
        let main = capture.stream().clone();
        main.fill(&mut x, 1)?;
        side.copy(&x, &mut y)?; // after the fill, in the other stream
        main.fill(&mut x, 2)?; // after the copy
        capture.join(side)
    })?;
    for _ in 0..3 {
        graph.replay(&stream)?;
        assert_eq!((x.to_vec(&stream)?, y.to_vec(&stream)?), (vec![2; 1000], vec![1; 1000]));
    }
    gpu.finish()
}

#[test]
fn two_graphs_share_memory_on_two_threads() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 64, &stream)?;
    let mut graphs = Vec::new();
    for value in [1, 2] {
        let mut graph = Graph::new(&gpu.allocator, &gpu.device, GraphOptions::default())?;
        let capture = gpu.stream()?;
        graph.capture(&capture, CaptureOptions::default(), |capture| capture.stream().clone().fill(&mut x, value))?;
        graphs.push(graph);
    }
    std::thread::scope(|scope| {
        for graph in &graphs {
            scope.spawn(|| -> Result<()> {
                let own = gpu.stream()?;
                for _ in 0..50 {
                    graph.replay(&own)?;
                }
                Ok(())
            });
        }
        for _ in 0..50 {
            let values = x.to_vec(&stream).expect("a copy");
            assert!(values.iter().all(|&value| value == values[0] && value <= 2), "{values:?}");
        }
    });
    drop(graphs);
    stream.fill(&mut x, 7)?;
    assert_eq!(x.to_vec(&stream)?, [7; 64]);
    gpu.finish()
}

#[test]
fn pinned_memory_of_a_graph_is_accessed_by_guards() -> Result<()> {
    const LEN: usize = 1 << 18;
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut graph = Graph::new(&gpu.allocator, &gpu.device, GraphOptions::default())?;
    let x = DeviceVec::from_slice(&gpu.allocator, &[7_u32; LEN], &stream)?;
    let mut pinned = PinnedVec::<u32>::zeroed(&gpu.host, LEN)?;
    graph.capture(&stream, CaptureOptions::default(), |capture| capture.stream().clone().copy(&x, &mut pinned))?;
    let error = pinned.try_slice().map(drop).expect_err("a replay could write it at any time");
    assert!(matches!(error, Error::Buffer(BufferError::UsedByGraph { .. })), "{error}");
    {
        let borrowed = pinned.host()?;
        let error = graph.replay(&stream).expect_err("it would write borrowed memory");
        assert!(matches!(error, Error::Buffer(BufferError::BorrowedByHost { .. })), "{error}");
        assert_eq!(borrowed[0], 0);
    }
    graph.replay(&stream)?;
    assert_eq!(pinned.host()?[0], 7);
    graph.replay(&stream)?;
    drop(graph);
    assert!(pinned.try_slice().is_err(), "the last replay may be under way");
    assert_eq!(pinned.wait()?[LEN - 1], 7);
    gpu.finish()
}

#[test]
fn what_cannot_be_captured_is_refused_and_the_capture_goes_on() -> Result<()> {
    let gpu = Fixture::new()?;
    let (stream, other) = (gpu.stream()?, gpu.stream()?);
    let mut graph = Graph::new(&gpu.allocator, &gpu.device, GraphOptions::default())?;
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 8, &stream)?;
    let mut y = DeviceVec::<u32>::zeroed(&gpu.allocator, 8, &stream)?;
    graph.capture(&stream, CaptureOptions::default(), |capture| {
        let capturing = capture.stream().clone();
        let error = capturing.copy(&[1; 8], &mut x).expect_err("ordinary memory");
        assert!(error.is_refused_in_capture(), "{error}");
        // The other stream would have to wait for earlier work in a stream that is now capturing.
        let error = other.fill(&mut y, 1).expect_err("it was used in the capturing stream");
        assert!(error.is_refused_in_capture(), "{error}");
        capturing.fill(&mut x, 5)
    })?;
    graph.replay(&other)?;
    assert_eq!(x.to_vec(&stream)?, [5; 8]);
    gpu.finish()
}

#[test]
fn a_failed_capture_lets_go_of_its_memory() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut graph = Graph::new(&gpu.allocator, &gpu.device, GraphOptions::default())?;
    let mut pinned = PinnedVec::<u32>::zeroed(&gpu.host, 8)?;
    let x = DeviceVec::<u32>::zeroed(&gpu.allocator, 8, &stream)?;
    let failed = graph.capture(&stream, CaptureOptions::default(), |capture| {
        capture.stream().clone().copy(&x, &mut pinned)?;
        Err::<(), _>(Error::ThreadEnding)
    });
    assert_eq!(failed, Err(Error::ThreadEnding));
    assert_eq!(pinned.try_slice()?, [0; 8]);
    gpu.finish()
}

#[test]
fn generators_continue_at_every_replay() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let (generator, eager) = (Arc::new(Generator::new(&gpu.device)?), Generator::new(&gpu.device)?);
    generator.set_seed(7)?;
    eager.set_seed(7)?;
    let x = DeviceVec::<f32>::zeroed(&gpu.allocator, 64, &stream)?;
    let drawn = generator.clone();
    let step = Step::capture(&gpu.allocator, &stream, CaptureOptions::default(), x, move |stream, x| {
        stream.random_uniform(&drawn, x)
    })?;
    let mut expected = DeviceVec::<f32>::zeroed(&gpu.allocator, 64, &stream)?;
    for _ in 0..4 {
        step.replay(&stream)?;
        stream.random_uniform(&eager, &mut expected)?;
        assert_eq!(step.buffers().to_vec(&stream)?, expected.to_vec(&stream)?);
    }
    gpu.finish()
}
