//! Replays of typed work in the only stream that uses the memory, which take one lock, while a second stream begins to
//! use it.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use warpool::driver::decorate::{Arguments, Hook, Hooked, Outcome};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Driver};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator, Settings};
use warpool::{DeviceVec, Instance, Result, Stream};

use crate::fixture::Fixture;

const LEN: usize = 1000;

/// A graph that fills two vectors of `stream`.
fn two_fills(
    allocator: &Arc<dyn DeviceAllocator>,
    stream: &Stream,
    value: u32,
) -> Result<(Graph, [DeviceVec<u32>; 2])> {
    let mut graph = Graph::new(allocator, &stream.device(), GraphOptions::default())?;
    let mut vectors =
        [DeviceVec::<u32>::zeroed(allocator, LEN, stream)?, DeviceVec::<u32>::zeroed(allocator, LEN, stream)?];
    graph.capture(stream, CaptureOptions::default(), |capture| {
        let stream = capture.stream().clone();
        vectors.iter_mut().try_for_each(|vector| stream.fill(vector, value))
    })?;
    Ok((graph, vectors))
}

#[test]
fn one_stream_needs_no_events() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let (graph, mut vectors) = two_fills(&gpu.allocator, &stream, 3)?;
    for round in 0..5 {
        stream.fill(&mut vectors[0], round)?;
        graph.replay(&stream)?;
    }
    let events = [Call::EventCreate, Call::EventRecord, Call::StreamWaitEvent];
    assert_eq!(events.map(|call| gpu.gpu.call_count(call)), [0; 3]);
    assert_eq!(vectors[0].to_vec(&stream)?, [3; LEN]);
    gpu.finish()
}

/// In each order: a use in another stream before the first replay, between replays, and by another graph.
#[test]
fn a_second_stream_is_ordered_with_later_replays() -> Result<()> {
    for replays_before in 0..3 {
        let gpu = Fixture::new()?;
        let (stream, other) = (gpu.stream()?, gpu.stream()?);
        let (first, mut vectors) = two_fills(&gpu.allocator, &stream, 3)?;
        let mut second = Graph::new(&gpu.allocator, &gpu.device, GraphOptions::default())?;
        second
            .capture(&stream, CaptureOptions::default(), |capture| capture.stream().clone().fill(&mut vectors[1], 4))?;
        for _ in 0..replays_before {
            first.replay(&stream)?;
            second.replay(&stream)?;
        }
        other.fill(&mut vectors[0], 5)?; // ends it for the first graph alone
        first.replay(&stream)?;
        second.replay(&stream)?;
        second.replay(&other)?;
        first.replay(&stream)?;
        first.replay(&other)?;
        assert_eq!((vectors[0].to_vec(&other)?, vectors[1].to_vec(&stream)?), (vec![3; LEN], vec![3; LEN]));
        drop((first, second));
        other.fill(&mut vectors[1], 6)?;
        assert_eq!(vectors[1].to_vec(&stream)?, [6; LEN]);
        gpu.finish()?;
    }
    Ok(())
}

#[test]
fn threads_replay_while_another_begins_to_use_the_memory() -> Result<()> {
    let gpu = Fixture::new()?;
    let (stream, other) = (gpu.stream()?, gpu.stream()?);
    for round in 0..40 {
        let (graph, mut vectors) = two_fills(&gpu.allocator, &stream, round)?;
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..10).for_each(|_| graph.replay(&stream).expect("a replay")));
            }
            scope.spawn(|| {
                for vector in &mut vectors {
                    other.fill(&mut *vector, 1000).expect("a fill");
                    other.to_vec(&*vector).expect("a copy");
                }
            });
        });
        graph.replay(&stream)?;
        assert_eq!(vectors[1].to_vec(&other)?, [round; LEN]);
    }
    gpu.finish()
}

/// A driver that, before each graph launch, notifies another thread and gives it time.
struct TellBeforeLaunch {
    launching: Mutex<Option<Sender<()>>>,
}

impl Hook for TellBeforeLaunch {
    type CallState = ();

    fn before(&self, _: &dyn Driver, call: Call, _: Arguments<'_>) -> warpool::driver::Result<()> {
        if call == Call::GraphLaunch
            && let Some(launching) = self.launching.lock().expect("no panic").take()
        {
            launching.send(()).expect("the other thread waits for it");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn after(&self, _: &dyn Driver, _: Call, (): (), _: Outcome<'_>) {}

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}

/// The other thread waits for the launch: otherwise it would wait only for earlier work of the stream.
#[test]
fn a_use_that_begins_during_a_launch_comes_after_it() -> Result<()> {
    for replays_before in 0..3 {
        let gpu = Arc::new(SimDriver::new(SimConfig::default()));
        let driver = Arc::new(Hooked::with_hook(gpu.clone(), TellBeforeLaunch { launching: Mutex::new(None) }));
        let instance = Instance::new(driver.clone())?;
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let device = instance.device(0)?;
        let (stream, other) = (device.lease_stream()?, device.lease_stream()?);
        let (graph, mut vectors) = two_fills(&allocator, &stream, 3)?;
        for _ in 0..replays_before {
            graph.replay(&stream)?;
        }
        let (launching, launched) = channel();
        *driver.hook().launching.lock().expect("no panic") = Some(launching);
        let (in_other, vector) = (other.stream(), &mut vectors[1]);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                launched.recv().expect("a launch");
                in_other.fill(vector, 7).expect("a fill");
            });
            graph.replay(&stream).expect("a replay");
        });
        assert_eq!(vectors[1].to_vec(&other)?, [7; LEN]);
        assert!(gpu.hazards().is_empty(), "{:?}", gpu.hazards());
    }
    Ok(())
}
