//! Steps with blocks: allocate, use, free.

use warpool::driver::DevicePtr;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::{DeviceBlock, MemPoolId};
use warpool::{Error, Stream};

use super::Run;
use super::pools::Pool;
use crate::allocators::into_block;
use crate::machine::{Outcome, is_counted};

/// An allocated block of the program.
pub struct Held {
    pub owned: Owned,
    pub tag: u32,
    pub stream: Stream,
    /// Another stream may still read it.
    pub read_elsewhere: bool,
}

pub enum Owned {
    Raw(Allocation),
    Block(DeviceBlock),
}

impl Held {
    pub fn ptr(&self) -> DevicePtr {
        match &self.owned {
            Owned::Raw(allocation) => allocation.ptr,
            Owned::Block(block) => block.ptr(),
        }
    }

    pub fn bytes(&self) -> u64 {
        match &self.owned {
            Owned::Raw(allocation) => allocation.bytes_requested,
            Owned::Block(block) => block.bytes(),
        }
    }
}

impl Run<'_> {
    pub fn tag(&mut self) -> u32 {
        self.next_tag += 1;
        self.next_tag
    }

    pub fn is_capturing(&self, stream: &Stream) -> bool {
        self.capturing.contains(stream)
    }

    /// A stream of the device that takes no part in a capture.
    pub fn idle_stream(&mut self, device: usize) -> Option<Stream> {
        let idle: Vec<usize> =
            (0..self.streams).filter(|&index| !self.is_capturing(self.machine.stream(device, index))).collect();
        (!idle.is_empty()).then(|| self.machine.stream(device, self.context.rng.pick(&idle)).clone())
    }

    pub fn allocate(&mut self) {
        let device = self.context.rng.below(self.devices);
        let Some(stream) = self.idle_stream(device) else { return };
        let pools: Vec<MemPoolId> = self.pools.iter().filter(|pool| pool.serves(device)).map(Pool::id).collect();
        let pool = (!pools.is_empty() && self.context.rng.one_in(3)).then(|| self.context.rng.pick(&pools));
        if let Some(held) = self.allocate_on(&stream, pool) {
            self.held.push(held);
        }
    }

    /// A block for a stream, with a tag.
    pub fn allocate_on(&mut self, stream: &Stream, pool: Option<MemPoolId>) -> Option<Held> {
        let bytes = self.sizes.next(&mut self.context.rng);
        let request = Request { pool, ..Request::new(stream.device_id(), stream.id(), bytes) };
        self.context.step(format!("allocate {bytes} on {} from {pool:?}", stream.id()));
        let allocator = &self.subject.allocator;
        let faults = self.context.counts.faults;
        let outcome = self.machine.call(self.context, || allocator.allocate_raw(request));
        let Outcome::Done(allocation) = outcome else {
            self.not_allocated(&outcome, stream);
            if outcome == (Outcome::OutOfMemory { counted: true }) && self.context.counts.faults == faults {
                self.expect_shortage(request);
            }
            return None;
        };
        self.context.counts.allocations += 1;
        assert_eq!((allocation.bytes_requested, allocation.device), (bytes, stream.device_id()), "{allocation:?}");
        let counted = self.is_counted(&allocation);
        self.table.insert(&allocation, counted);
        let tag = self.tag();
        self.context.step(format!("  block {tag} at {}", allocation.ptr));
        self.machine.write_tag(allocation.ptr, bytes, tag, stream);
        let owned = match self.context.rng.below(2) {
            0 => Owned::Raw(allocation),
            _ => Owned::Block(into_block(&self.subject.allocator, allocation)),
        };
        Some(Held { owned, tag, stream: stream.clone(), read_elsewhere: false })
    }

    /// Counts a request that failed.
    pub fn not_allocated<T>(&mut self, outcome: &Outcome<T>, stream: &Stream) {
        match outcome {
            Outcome::OutOfMemory { counted: true } => self.table.out_of_memory(stream.device_id().0 as usize),
            Outcome::Panicked => self.table.panicked(&*self.subject.allocator, 1),
            _ => {}
        }
    }

    /// Whether statistics count it.
    pub fn is_counted(&self, allocation: &Allocation) -> bool {
        self.subject.caching.is_none() || allocation.slot != 0
    }

    /// The owner's stream checks a block, and may write another tag.
    pub fn check_tag(&mut self) {
        let Some(at) = self.any_held() else { return };
        let tag = self.tag();
        let held = &mut self.held[at];
        if self.capturing.contains(&held.stream) {
            return;
        }
        self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &held.stream);
        if !held.read_elsewhere && self.context.rng.one_in(3) {
            held.tag = tag;
            self.machine.write_tag(held.ptr(), held.bytes(), held.tag, &held.stream);
        }
    }

    pub fn any_held(&mut self) -> Option<usize> {
        (!self.held.is_empty()).then(|| self.context.rng.below(self.held.len()))
    }

    /// Another stream reads or writes a block; the use is recorded or joined.
    pub fn use_elsewhere(&mut self) {
        let Some(at) = self.any_held() else { return };
        let owner = self.held[at].stream.clone();
        let device = owner.device_id().0 as usize;
        let device = if self.peers && self.context.rng.one_in(3) { 1 - device } else { device };
        let Some(other) = self.idle_stream(device) else { return };
        if self.is_capturing(&owner) || other == owner {
            return;
        }
        let held = self.held.swap_remove(at);
        let used = self.use_on(held, &other);
        self.held.push(used);
    }

    /// `other` uses a block, after its owner's stream.
    pub fn use_on(&mut self, mut held: Held, other: &Stream) -> Held {
        let rng = &mut self.context.rng;
        let (record, write) = (rng.one_in(2), rng.one_in(3) && !held.read_elsewhere);
        self.context.made("use elsewhere");
        self.context.step(format!("{} uses block {}, recorded {record}, writes {write}", other.id(), held.tag));
        self.machine.wait(other, &held.stream);
        self.machine.check_tag(held.ptr(), held.bytes(), held.tag, other);
        if write {
            held.tag = self.tag();
            self.machine.write_tag(held.ptr(), held.bytes(), held.tag, other);
        }
        let recorded = record && self.record_use(&held, other);
        held.read_elsewhere |= recorded;
        if write || !recorded {
            self.machine.wait(&held.stream, other);
        }
        held
    }

    /// Records a use. Returns whether it is recorded.
    fn record_use(&mut self, held: &Held, other: &Stream) -> bool {
        let allocator = &self.subject.allocator;
        let by_address = self.context.rng.one_in(2);
        let outcome = self.machine.call(self.context, || match &held.owned {
            Owned::Raw(allocation) if !by_address => allocator.record_use(*allocation, other.id()),
            Owned::Block(block) if !by_address => block.record_use(other),
            _ => allocator.record_use_raw(held.ptr(), other.id()),
        });
        outcome == Outcome::Done(())
    }

    pub fn free(&mut self) {
        let Some(at) = self.any_held() else { return };
        let held = self.held.swap_remove(at);
        self.free_held(held);
    }

    /// Checks a block's contents, and frees it.
    pub fn free_held(&mut self, held: Held) {
        if !self.is_capturing(&held.stream) {
            self.machine.check_tag(held.ptr(), held.bytes(), held.tag, &held.stream);
        }
        self.free_unchecked(held);
    }

    /// Frees a block, in one of several ways. It is freed even if the call fails.
    pub fn free_unchecked(&mut self, held: Held) {
        let (ptr, way) = (held.ptr(), self.context.rng.below(3));
        self.context.step(format!("free block {} at {ptr}, way {way}", held.tag));
        let allocator = &self.subject.allocator;
        let outcome = self.machine.call(self.context, || match held.owned {
            Owned::Raw(allocation) if way == 0 => allocator.free_raw(allocation.ptr),
            Owned::Raw(allocation) if way == 1 => match allocator.free_cached(allocation.device, allocation.ptr) {
                true => Ok(()),
                false => allocator.free_raw(allocation.ptr),
            },
            Owned::Raw(allocation) => allocator.free(allocation),
            Owned::Block(block) if way == 0 => block.free(),
            Owned::Block(block) => {
                drop(block);
                Ok(())
            }
        });
        self.table.remove(ptr);
        if outcome == Outcome::Done(()) && self.context.rng.one_in(8) {
            let again = allocator.free_raw(ptr);
            assert!(matches!(again, Err(Error::UnknownPointer { .. })), "a second free of {ptr}: {again:?}");
        }
    }

    /// Calls with arguments that no correct program passes.
    pub fn invalid_calls(&mut self) {
        let allocator = &self.subject.allocator;
        let stream = self.machine.stream(0, 0);
        let unknown = self.table.unknown_address();
        let outcomes = [allocator.free_raw(unknown), allocator.record_use_raw(unknown, stream.id())];
        for outcome in outcomes {
            assert!(matches!(outcome, Err(Error::UnknownPointer { .. })), "{unknown}: {outcome:?}");
        }
        assert!(allocator.find(unknown).is_err(), "{unknown} is found");
        let empty = allocator.allocate_raw(Request::new(stream.device_id(), stream.id(), 0)).unwrap();
        assert!(empty.ptr.is_null(), "{empty:?}");
        allocator.free(empty).unwrap();
        allocator.free_raw(DevicePtr(0)).unwrap();
        let huge = self.context.rng.pick(&[1 << 45, 1 << 60, u64::MAX - 511, u64::MAX]);
        let outcome = allocator.allocate_raw(Request::new(stream.device_id(), stream.id(), huge));
        match outcome {
            Err(Error::OutOfMemory(report)) if is_counted(report.cause) => {
                self.table.out_of_memory(0);
            }
            Err(_) => {}
            Ok(allocation) => panic!("{huge} bytes: {allocation:?}"),
        }
        let missing = allocator.allocate_raw(Request::new(warpool::driver::DeviceId(77), stream.id(), 1));
        assert!(missing.is_err(), "device 77: {missing:?}");
    }
}
