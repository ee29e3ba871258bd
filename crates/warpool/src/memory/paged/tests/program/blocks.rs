//! Steps with blocks: allocate, check, use on another stream, free.

use warpool_testing::Rng;

use super::super::machine::{DEVICE, MIB, Machine, Outcome};
use super::Run;
use crate::Stream;
use crate::memory::{Allocation, DeviceAllocator as _, MemPoolId, Request};

/// An allocated block.
#[derive(Clone)]
pub struct Held {
    pub block: Allocation,
    pub tag: u32,
    pub stream: Stream,
    /// Another stream may still read it.
    pub read_elsewhere: bool,
}

/// Which sizes a program asks for.
pub enum Sizes {
    Any,
    /// Again and again the same few, as real programs do: pages go back and forth.
    Few(Vec<u64>),
}

impl Sizes {
    pub fn draw(rng: &mut Rng, capacity: u64) -> Self {
        if rng.one_in(2) {
            return Self::Any;
        }
        Self::Few((0..3 + rng.below(4)).map(|_| draw_bytes(rng, capacity / 2)).collect())
    }

    fn next(&self, rng: &mut Rng, capacity: u64) -> u64 {
        match self {
            Self::Few(sizes) if !rng.one_in(8) => rng.pick(sizes),
            _ => draw_bytes(rng, capacity),
        }
    }
}

/// Mostly sizes around those of pages, so that blocks and pages overlap in all ways.
fn draw_bytes(rng: &mut Rng, capacity: u64) -> u64 {
    match rng.below(24) {
        0..4 => rng.u64_in(1..=64 << 10),
        4..8 => rng.u64_in(1..=MIB),
        8..14 => rng.u64_in(MIB + 1..=6 * MIB),
        14..18 => 2 * MIB * rng.u64_in(1..=6),
        18..23 => rng.u64_in(6 * MIB..=capacity / 3),
        _ => rng.u64_in(capacity / 3..=capacity),
    }
}

impl Run<'_> {
    pub fn allocate(&mut self) {
        let Some(stream) = self.idle_stream() else { return };
        let pool = (!self.pools.ids.is_empty() && self.rng.one_in(3)).then(|| self.rng.pick(&self.pools.ids));
        if let Some(held) = self.allocate_on(&stream, pool) {
            self.held.push(held);
        }
    }

    /// A block for a stream, with a tag.
    pub fn allocate_on(&mut self, stream: &Stream, pool: Option<MemPoolId>) -> Option<Held> {
        let bytes = self.sizes.next(&mut self.rng, self.machine.capacity);
        let mut request = Request::new(DEVICE, stream.id(), bytes);
        request.pool = pool;
        self.failing.push(format!("allocate {bytes} on {} from {pool:?}", stream.id()));
        let outcome = self.call(|machine| machine.paged.allocate_raw(request));
        let block = match outcome {
            Outcome::Done(block) => block,
            Outcome::OutOfMemory { faulted } => {
                self.failing.push("  out of memory".to_owned());
                self.model.out_of_memory();
                self.tally.ooms += 1;
                self.expect_shortage(request, faulted);
                for _ in 0..self.rng.below(4) {
                    self.free();
                }
                return None;
            }
            Outcome::Faulted => return None,
        };
        self.tally.allocations += 1;
        self.model.allocated(&block);
        assert_eq!((block.bytes_requested, block.stream, block.device), (bytes, stream.id(), DEVICE));
        let tag = self.next_tag();
        self.failing.push(format!("  block {tag} at {}", block.ptr));
        self.machine.write_tag(&block, tag, stream);
        Some(Held { block, tag, stream: stream.clone(), read_elsewhere: false })
    }

    /// Memory ran short for a reason. Captures and private pools keep pages, and a stream that captures gets none of
    /// other heaps.
    fn expect_shortage(&mut self, request: Request, faulted: bool) {
        if faulted || !self.capturing.is_empty() {
            return;
        }
        if !self.pools.were_used() && !self.graphs.were_used() {
            let needed = self.model.bytes_needed_max(request.bytes, self.machine.page_bytes_max);
            assert!(needed > self.limit, "{needed} bytes of pages would do, and {} are allowed", self.limit);
        }
        if self.rng.one_in(8) {
            self.machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
            let again = self.machine.paged.allocate_raw(request);
            assert!(again.is_err(), "after all free pages were given back there was memory: {again:?}");
            self.model.out_of_memory();
        }
    }

    pub fn next_tag(&mut self) -> u32 {
        self.next_tag += 1;
        self.next_tag
    }

    pub fn check_tag(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.rng.below(self.held.len());
        if self.is_capturing(&self.held[at].stream) {
            return;
        }
        let tag = self.next_tag();
        let held = &mut self.held[at];
        self.machine.check_tag(&held.block, held.tag, &held.stream);
        if !held.read_elsewhere && self.rng.one_in(3) {
            held.tag = tag;
            self.machine.write_tag(&held.block, tag, &held.stream);
        }
    }

    /// Another stream reads or writes a block; recorded, or joined.
    pub fn use_elsewhere(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.rng.below(self.held.len());
        let owner = self.held[at].stream.clone();
        let Some(other) = self.idle_stream() else { return };
        if self.is_capturing(&owner) || other == owner {
            return;
        }
        let held = self.held.swap_remove(at);
        let used = self.use_on(held, &other);
        self.held.push(used);
    }

    pub fn use_on(&mut self, mut held: Held, other: &Stream) -> Held {
        let (record, write) = (self.rng.one_in(2), self.rng.one_in(3) && !held.read_elsewhere);
        self.failing.push(format!("{} uses block {}, recorded {record}, writes {write}", other.id(), held.tag));
        self.tally.uses += 1;
        self.machine.wait(other, &held.stream);
        self.machine.check_tag(&held.block, held.tag, other);
        if write {
            held.tag = self.next_tag();
            self.machine.write_tag(&held.block, held.tag, other);
        }
        if record {
            self.machine.paged.record_use_raw(held.block.ptr, other.id()).unwrap();
            held.read_elsewhere = true;
        }
        if write || !record {
            self.machine.wait(&held.stream, other);
        }
        held
    }

    pub fn free(&mut self) {
        if !self.held.is_empty() {
            let held = self.held.swap_remove(self.rng.below(self.held.len()));
            self.free_held(held);
        }
    }

    pub fn free_held(&mut self, held: Held) {
        if !self.is_capturing(&held.stream) {
            self.machine.check_tag(&held.block, held.tag, &held.stream);
        }
        self.free_unchecked(&held);
    }

    /// Frees never fail, also if driver calls do.
    pub fn free_unchecked(&mut self, held: &Held) {
        self.failing.push(format!("free block {}", held.tag));
        self.model.freed(&held.block);
        let (way, block) = (self.rng.below(3), held.block);
        let outcome = self.call(|machine: &Machine| match way {
            0 => machine.paged.free_raw(block.ptr),
            1 => machine.paged.free(block),
            _ => {
                machine.paged.free_later(block);
                Ok(())
            }
        });
        assert!(matches!(outcome, Outcome::Done(())), "a free failed");
    }
}
