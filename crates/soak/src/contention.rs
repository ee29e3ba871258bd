//! Two threads use the memory of one stream, then of the next: the first all the time, the second now and then. So a
//! thread that waits for the lock of this memory competes with one that releases it and takes it again at once.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use warpool::driver::DevicePtr;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::{DeviceAllocator as _, MemPoolId, PagedAllocator, Settings};

use crate::caught::{Caught, caught};
use crate::context::Context;
use crate::machine::{Machine, device_id};
use crate::rng::Rng;

const STREAMS: usize = 8;
/// How often the second thread uses the memory of a stream.
const TAKES: usize = 200;
const BYTES: u64 = 4096;

struct Shared<'a> {
    machine: &'a Machine,
    paged: &'a PagedAllocator,
    /// The stream whose memory is used now.
    current: AtomicUsize,
    is_over: AtomicBool,
    /// The addresses that a thread has, by their low bits.
    taken: Vec<AtomicU64>,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    // Without suballocation reports, which would take longer than the lock is held.
    let machine = Machine::with(context, 1, STREAMS, |config| config.track_suballocations = false);
    let paged = PagedAllocator::new(&machine.instance, Settings::default()).unwrap();
    let shared = Shared {
        machine: &machine,
        paged: &paged,
        current: AtomicUsize::new(0),
        is_over: AtomicBool::new(false),
        taken: (0..1024).map(|_| AtomicU64::new(0)).collect(),
    };
    let rng = Rng::new(context.seed);
    let outcomes = std::thread::scope(|scope| {
        let first = scope.spawn(|| caught(|| shared.use_alone()));
        let second = scope.spawn(|| {
            let outcome = caught(|| shared.take_now_and_then(rng));
            shared.is_over.store(true, Ordering::Relaxed);
            outcome
        });
        [first, second].map(|thread| thread.join().expect("panics are caught"))
    });
    for outcome in outcomes {
        match outcome {
            Ok(allocations) => {
                context.counts.operations += 2 * allocations;
                context.counts.allocations += allocations;
            }
            Err(Caught::Failed(message)) => panic!("{message}"),
            Err(Caught::Injected) => panic!("a panic that nobody injected"),
        }
    }
    paged.check();
    machine.synchronize();
    paged.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
    drop(paged);
    machine.close(true);
}

impl Shared<'_> {
    /// The first thread. Runs until the second is done.
    fn use_alone(&self) -> u64 {
        let mut count = 0;
        while !self.is_over.load(Ordering::Relaxed) {
            let block = self.take(self.current.load(Ordering::Relaxed));
            self.give_back(block);
            count += 1;
        }
        count
    }

    /// The second thread.
    fn take_now_and_then(&self, mut rng: Rng) -> u64 {
        for stream in 0..STREAMS {
            self.current.store(stream, Ordering::Relaxed);
            for _ in 0..TAKES {
                (0..rng.below(500)).for_each(|_| std::hint::spin_loop());
                let block = self.take(stream);
                self.give_back(block);
            }
        }
        (STREAMS * TAKES) as u64
    }

    fn take(&self, stream: usize) -> Allocation {
        let request = Request::new(device_id(0), self.machine.stream(0, stream).id(), BYTES);
        let block = self.paged.allocate_raw(request).unwrap();
        let before = self.place(block.ptr).swap(block.ptr.0, Ordering::Relaxed);
        assert_ne!(before, block.ptr.0, "both threads have the block at {}", block.ptr);
        block
    }

    fn give_back(&self, block: Allocation) {
        self.place(block.ptr).store(0, Ordering::Relaxed);
        self.paged.free(block).unwrap();
    }

    fn place(&self, ptr: DevicePtr) -> &AtomicU64 {
        &self.taken[(ptr.0 / BYTES) as usize % self.taken.len()]
    }
}
