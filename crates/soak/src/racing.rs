//! One thread captures in a stream, again and again, and another puts typed work into the same stream: each piece of
//! work runs, or is part of a graph that keeps its memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use warpool::driver::CaptureMode;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator, MemPoolId, PagedAllocator, Settings};
use warpool::{DeviceVec, Stream};

use crate::caught::{Caught, caught};
use crate::context::Context;
use crate::machine::{Machine, device_id};
use crate::rng::Rng;

const LEN: usize = 1000;

struct Shared {
    machine: Machine,
    allocator: Arc<dyn DeviceAllocator>,
    /// The stream that both threads use.
    stream: Stream,
    is_over: AtomicBool,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let machine = Machine::new(context, 1, 3);
    let is_paged = context.rng.one_in(2);
    context.step(format!("captures beside typed work, paged {is_paged}"));
    let allocator: Arc<dyn DeviceAllocator> = match is_paged {
        true => Arc::new(PagedAllocator::new(&machine.instance, Settings::default()).unwrap()),
        false => Arc::new(CachingAllocator::new(&machine.instance, Settings::default())),
    };
    let stream = machine.stream(0, 0).clone();
    let shared = Shared { machine, allocator, stream, is_over: AtomicBool::new(false) };
    let (rng, captures) = (Rng::new(context.seed), 20 + context.rng.below(60) as u32);
    let outcomes = std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let outcome = caught(|| shared.capture(captures));
            shared.is_over.store(true, Ordering::Relaxed);
            outcome
        });
        let second = scope.spawn(|| caught(|| shared.use_typed(rng)));
        [first, second].map(|thread| thread.join().expect("panics are caught"))
    });
    for outcome in outcomes {
        match outcome {
            Ok(operations) => context.counts.operations += operations,
            Err(Caught::Failed(message)) => panic!("{message}"),
            Err(Caught::Injected) => panic!("a panic that nobody injected"),
        }
    }
    context.counts.captures += u64::from(captures);
    shared.close(is_paged);
}

impl Shared {
    /// The first thread.
    fn capture(&self, captures: u32) -> u64 {
        let (device, own) = (self.machine.device(0), self.machine.stream(0, 1));
        for round in 1..=captures {
            let mut output = DeviceVec::<u32>::zeroed(&self.allocator, LEN, own).unwrap();
            let mut graph = Graph::new(&self.allocator, &device, GraphOptions::default()).unwrap();
            let options = CaptureOptions::default().with_mode(CaptureMode::Relaxed);
            graph.capture(&self.stream, options, |capture| capture.stream().fill(&mut output, round)).unwrap();
            graph.replay(&self.stream).unwrap();
            let found = output.to_vec(own).unwrap();
            assert!(found.iter().all(|&word| word == round), "replay {round} wrote {:#x}", found[0]);
        }
        u64::from(4 * captures)
    }

    /// The second thread, until the first is done.
    fn use_typed(&self, mut rng: Rng) -> u64 {
        let (own, mut round) = (self.machine.stream(0, 2), 0);
        while !self.is_over.load(Ordering::Relaxed) {
            round += 1;
            (0..rng.below(500)).for_each(|_| std::hint::spin_loop());
            let [from, mut to] = [0, 1].map(|_| DeviceVec::<u32>::zeroed(&self.allocator, LEN, own).unwrap());
            // A capture may refuse it; then nothing was queued.
            let _ = self.stream.copy(&from, &mut to);
            drop((from, to));
            let mut kept = DeviceVec::<u32>::zeroed(&self.allocator, LEN, own).unwrap();
            own.fill(&mut kept, round).unwrap();
            let found = kept.to_vec(own).unwrap();
            assert!(found.iter().all(|&word| word == round), "a vector of {round} contains {:#x}", found[0]);
        }
        u64::from(7 * round)
    }

    fn close(self, keeps_addresses: bool) {
        let Self { machine, allocator, stream, .. } = self;
        machine.synchronize();
        machine.check_contents();
        // Releases what dropped graphs still have.
        Graph::new(&allocator, &machine.device(0), GraphOptions::default()).unwrap().reset().unwrap();
        allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
        let active = allocator.stats(device_id(0)).unwrap().active_bytes.all.current;
        assert_eq!(active, 0, "active at the end");
        drop((allocator, stream));
        machine.close(keeps_addresses);
    }
}
