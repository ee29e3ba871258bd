//! Streams that the program creates and destroys all the time, as other libraries do, with memory of every allocator.
//! Blocks are used by many streams, whose work may still run when they are destroyed.
//!
//! The programs are correct: before a stream is destroyed, its memory and all memory whose use by it was recorded is
//! freed, by a call or by a destructor, and every use by another stream is recorded or joined.

use std::collections::{BTreeMap, BTreeSet};

use warpool::memory::MemPoolId;
use warpool::memory::raw::{Allocation, Request};
use warpool::{Error, Stream};

use crate::allocators::{Allocators, Subject};
use crate::context::Context;
use crate::machine::{Machine, Outcome, device_id, is_counted};
use crate::table::Table;

/// Streams that stay for the whole program.
const STANDING: usize = 2;
/// The maximum number of streams that are created and destroyed, at a time.
const PASSING: usize = 6;
const MIB: u64 = 1 << 20;

struct Run<'a> {
    context: &'a mut Context,
    machine: Machine,
    subject: Subject,
    table: Table,
    /// By number.
    streams: BTreeMap<usize, Stream>,
    /// Streams that are not destroyed before the end.
    standing: BTreeSet<usize>,
    /// Streams that make no requests until all work is done: others may still use memory that was freed there.
    silent: BTreeSet<usize>,
    /// Streams that may use freed memory without a recorded use. They are not destroyed until all work is done.
    unsaid: BTreeSet<usize>,
    blocks: Vec<Block>,
    /// Allocations that were freed.
    stale: Vec<Allocation>,
    next_stream: usize,
    next_tag: u32,
}

struct Block {
    allocation: Allocation,
    tag: u32,
    /// Its stream, by number.
    stream: usize,
    /// Other streams whose use is recorded, by number. They may still read it.
    recorded: BTreeSet<usize>,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    // The allocators' shortest paths are taken only if the driver does not track suballocations.
    let is_told = !context.seed.is_multiple_of(4);
    let machine = Machine::with(context, 1, STANDING, |config| config.track_suballocations = is_told);
    let subject = Subject::draw(context, &machine, Allocators::All);
    let streams: BTreeMap<usize, Stream> = machine.streams[0].iter().cloned().enumerate().collect();
    let mut run = Run {
        context,
        machine,
        subject,
        table: Table::new(1),
        next_stream: streams.len(),
        standing: streams.keys().copied().collect(),
        streams,
        silent: BTreeSet::new(),
        unsaid: BTreeSet::new(),
        blocks: Vec::new(),
        stale: Vec::new(),
        next_tag: 1,
    };
    for _ in 0..60 + run.context.rng.below(200) {
        run.step();
        run.check();
    }
    run.finish();
}

impl Run<'_> {
    fn step(&mut self) {
        match self.context.rng.below(34) {
            0..9 => self.allocate(),
            9..15 => self.use_elsewhere(),
            15..21 => self.free_any(),
            21..24 => self.create(),
            24..26 => self.destroy(),
            26 if self.context.rng.one_in(2) => self.free_stale(),
            26 => self.allocate_again(),
            27 => self.trim(),
            28..31 => {
                let stream = self.any_stream();
                let pause = self.context.rng.one_in(2);
                self.machine.pause_or_resume(&self.streams[&stream], pause);
            }
            31 if self.context.rng.one_in(2) => {
                self.machine.synchronize();
                self.machine.check_contents();
                self.silent.clear();
                self.unsaid.clear();
            }
            32 => self.use_unsaid(),
            33 if self.context.rng.one_in(4) => self.outlast(),
            _ => {
                let stream = self.any_stream();
                self.machine.wait_for(&self.streams[&stream]);
            }
        }
    }

    fn check(&self) {
        self.machine.check_hazards();
        self.table.check_stats(&*self.subject.allocator);
        if let Some(caching) = &self.subject.caching {
            caching.check();
        }
        if let Some(paged) = &self.subject.paged {
            paged.check();
        }
    }

    fn any_stream(&mut self) -> usize {
        let all: Vec<usize> = self.streams.keys().copied().collect();
        self.context.rng.pick(&all)
    }

    /// A stream that may request memory.
    fn any_asking(&mut self) -> Option<usize> {
        let all: Vec<usize> = self.streams.keys().copied().filter(|number| !self.silent.contains(number)).collect();
        (!all.is_empty()).then(|| self.context.rng.pick(&all))
    }

    fn create(&mut self) {
        if self.streams.len() < self.standing.len() + PASSING {
            let (number, stream) = (self.next_stream, self.machine.create_stream(0));
            self.next_stream += 1;
            self.context.step(format!("stream {number} is created: {}", stream.id()));
            self.streams.insert(number, stream);
        }
    }

    /// Destroys a stream, after freeing its blocks and the blocks whose use by it is recorded.
    fn destroy(&mut self) {
        let passing: Vec<usize> = self.streams.keys().copied().filter(|number| self.may_end(*number)).collect();
        if passing.is_empty() {
            return;
        }
        let number = self.context.rng.pick(&passing);
        while let Some(at) =
            self.blocks.iter().position(|block| block.stream == number || block.recorded.contains(&number))
        {
            self.free(at);
        }
        if !self.may_end(number) {
            return;
        }
        let stream = self.streams.remove(&number).expect("it is one of them");
        self.context.step(format!("stream {number} is destroyed: {}", stream.id()));
        self.machine.destroy_stream(&stream);
    }

    fn may_end(&self, number: usize) -> bool {
        !self.standing.contains(&number) && !self.unsaid.contains(&number)
    }

    fn allocate(&mut self) {
        let Some(stream) = self.any_asking() else { return };
        let bytes = self.context.rng.request_bytes();
        self.allocate_on(stream, bytes);
    }

    /// Returns whether there is a block, the last one.
    fn allocate_on(&mut self, stream: usize, bytes: u64) -> bool {
        let id = self.streams[&stream].id();
        self.context.step(format!("allocate {bytes} on stream {stream}"));
        let allocator = &self.subject.allocator;
        let outcome = self.machine.call(self.context, || allocator.allocate_raw(Request::new(device_id(0), id, bytes)));
        // A block that an interrupted call had is freed by a later one.
        if matches!(outcome, Outcome::Panicked | Outcome::Faulted) {
            self.standing.insert(stream);
        }
        let allocation = match outcome {
            Outcome::Done(allocation) => allocation,
            outcome => {
                match outcome {
                    Outcome::OutOfMemory { counted: true } => self.table.out_of_memory(0),
                    Outcome::Panicked => self.table.panicked(&**allocator, 1),
                    _ => {}
                }
                return false;
            }
        };
        self.context.counts.allocations += 1;
        self.table.insert(&allocation, self.subject.caching.is_none() || allocation.slot != 0);
        self.next_tag += 1;
        self.context.step(format!("  block {} at {}", self.next_tag, allocation.ptr));
        self.machine.write_tag(allocation.ptr, bytes, self.next_tag, &self.streams[&stream]);
        self.blocks.push(Block { allocation, tag: self.next_tag, stream, recorded: BTreeSet::new() });
        true
    }

    /// A stream that has just requested memory uses a block without a recorded use, and the block is freed. Its pages
    /// wait for such a stream, as long as the block's own stream makes no request, no driver call fails, and no
    /// destructor frees the stream's last block.
    fn use_unsaid(&mut self) {
        let can_wait = self.subject.paged.is_some() && !self.machine.has_faults();
        let Some(other) = self.any_asking().filter(|_| can_wait && !self.blocks.is_empty()) else { return };
        let at = self.context.rng.below(self.blocks.len());
        let owner = self.blocks[at].stream;
        if owner == other || !self.allocate_on(other, 4096) {
            return;
        }
        let Block { allocation, tag, .. } = &self.blocks[at];
        self.context.step(format!("stream {other} uses block {tag}, which nobody says"));
        self.machine.wait(&self.streams[&other], &self.streams[&owner]);
        self.machine.check_tag(allocation.ptr, allocation.bytes_requested, *tag, &self.streams[&other]);
        self.silent.insert(owner);
        self.unsaid.insert(other);
        self.free(at);
    }

    /// The last work of a stream is paused, while two other streams take pages of each other again and again.
    fn outlast(&mut self) {
        let passing: Vec<usize> = self.streams.keys().copied().filter(|number| self.may_end(*number)).collect();
        if self.subject.paged.is_none() || passing.is_empty() || !self.silent.is_empty() {
            return;
        }
        let number = self.context.rng.pick(&passing);
        self.allocate_on(number, 6 * MIB);
        self.context.step(format!("the work of stream {number} waits"));
        self.machine.pause_or_resume(&self.streams[&number], true);
        while let Some(at) = self.blocks.iter().position(|block| block.stream == number) {
            self.free(at);
        }
        for round in 0..80 {
            if self.allocate_on(round % 2, 4 * MIB) {
                self.free(self.blocks.len() - 1);
            }
        }
        self.machine.pause_or_resume(&self.streams[&number], false);
    }

    /// Up to all other streams use a block, each after its own stream.
    fn use_elsewhere(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let at = self.context.rng.below(self.blocks.len());
        let owner = self.blocks[at].stream;
        let others: Vec<usize> = self.streams.keys().copied().filter(|&number| number != owner).collect();
        let (first, count) = (self.context.rng.below(others.len()), 1 + self.context.rng.below(others.len()));
        for index in (first..first + count).map(|index| index % others.len()) {
            self.use_on(at, others[index]);
        }
    }

    fn use_on(&mut self, at: usize, other: usize) {
        let block = &self.blocks[at];
        let (owner, stream) = (&self.streams[&block.stream], &self.streams[&other]);
        let (ptr, bytes) = (block.allocation.ptr, block.allocation.bytes_requested);
        let (record, writes) = (!self.context.rng.one_in(4), self.context.rng.one_in(3) && block.recorded.is_empty());
        self.context.step(format!("stream {other} uses block {}, recorded {record}, writes {writes}", block.tag));
        self.machine.wait(stream, owner);
        self.machine.check_tag(ptr, bytes, block.tag, stream);
        let mut tag = block.tag;
        if writes {
            self.next_tag += 1;
            tag = self.next_tag;
            self.machine.write_tag(ptr, bytes, tag, stream);
        }
        let (allocation, allocator) = (block.allocation, &self.subject.allocator);
        let recorded = record
            && self.machine.call(self.context, || allocator.record_use(allocation, stream.id())) == Outcome::Done(());
        if writes || !recorded {
            self.machine.wait(owner, stream);
        }
        let block = &mut self.blocks[at];
        block.tag = tag;
        // Even if the call failed: then the use may or may not be recorded.
        if record {
            block.recorded.insert(other);
        }
    }

    fn free_any(&mut self) {
        if !self.blocks.is_empty() {
            let at = self.context.rng.below(self.blocks.len());
            self.free(at);
        }
    }

    fn free(&mut self, at: usize) {
        let Block { allocation, tag, stream, .. } = self.blocks.swap_remove(at);
        self.context.step(format!("free block {tag} at {}", allocation.ptr));
        self.machine.check_tag(allocation.ptr, allocation.bytes_requested, tag, &self.streams[&stream]);
        // What a destructor, a failed driver call or a panic leaves to later calls names none of these streams.
        let kind = self.context.rng.below(6);
        let allocator = &self.subject.allocator;
        // A destructor records no event, so later calls know nothing of the stream's other work.
        let is_destructor = kind == 2 && !self.unsaid.contains(&stream);
        let outcome = self.machine.call(self.context, || match kind {
            0 | 1 => allocator.free_raw(allocation.ptr),
            2 if is_destructor => {
                allocator.free_later(allocation);
                Ok(())
            }
            _ => allocator.free(allocation),
        });
        self.table.remove(allocation.ptr);
        // A few stay, to be freed once more.
        if outcome == Outcome::Done(()) && allocation.slot != 0 && self.stale.len() < 20 {
            self.stale.push(allocation);
        }
    }

    /// A block is freed and allocated again at once: it is another allocation, whatever its address.
    fn allocate_again(&mut self) {
        if self.subject.caching.is_none() && self.subject.paged.is_none() {
            return;
        }
        let Some(stream) = self.any_asking() else { return };
        let request = Request::new(device_id(0), self.streams[&stream].id(), 1 + self.context.rng.u64_below(1 << 22));
        let allocator = self.subject.allocator.clone();
        let mut last: Option<Allocation> = None;
        for _ in 0..2 + self.context.rng.below(3) {
            let next = match allocator.allocate_raw(request) {
                Ok(next) => next,
                Err(Error::OutOfMemory(report)) => {
                    if is_counted(report.cause) {
                        self.table.out_of_memory(0);
                    }
                    return;
                }
                Err(error) => panic!("an error without a fault: {error}"),
            };
            self.table.insert(&next, self.subject.caching.is_none() || next.slot != 0);
            if let Some(last) = last.filter(|last| last.slot != 0) {
                let again = allocator.free(last);
                assert_eq!(again, Err(Error::UnknownPointer { ptr: last.ptr }), "a second free, and {next:?}");
            }
            allocator.free(next).unwrap();
            self.table.remove(next.ptr);
            last = Some(next);
        }
    }

    /// A second free of an allocation is refused, also if another one is at its address.
    fn free_stale(&mut self) {
        // The other allocators identify allocations by address alone.
        if self.subject.caching.is_none() && self.subject.paged.is_none() {
            return;
        }
        for stale in std::mem::take(&mut self.stale) {
            self.context.step(format!("a second free at {}", stale.ptr));
            let again = self.subject.allocator.free(stale);
            assert_eq!(again, Err(Error::UnknownPointer { ptr: stale.ptr }), "a second free");
        }
    }

    fn trim(&mut self) {
        self.context.step("trim");
        let allocator = &self.subject.allocator;
        let _ = self.machine.call(self.context, || allocator.trim(device_id(0), MemPoolId::DEFAULT));
    }

    /// Frees everything, destroys the streams, and checks that nothing is left.
    fn finish(mut self) {
        self.context.step("the end");
        while !self.blocks.is_empty() {
            self.free(0);
        }
        self.free_stale();
        self.check();
        self.machine.synchronize();
        self.unsaid.clear();
        while self.streams.len() > self.standing.len() {
            self.destroy();
        }
        self.machine.synchronize();
        let Self { machine, subject, streams, table, .. } = self;
        subject.allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
        // No work is left in these.
        streams.range(STANDING..).for_each(|(_, stream)| machine.destroy_stream(stream));
        let reserved = subject.allocator.stats(device_id(0)).unwrap().reserved_bytes.all.current;
        if subject.caching.is_some() || subject.paged.is_some() {
            assert_eq!(reserved, 0, "reserved at the end");
        }
        table.check_empty(&*subject.allocator);
        let Subject { allocator, caching, paged, limited, external, .. } = subject;
        let keeps_addresses = paged.is_some();
        drop((allocator, caching, paged, limited, streams));
        if let Some(external) = &external {
            external.check_empty();
        }
        drop(external);
        machine.close(keeps_addresses);
    }
}
