//! Steps with pinned blocks: allocate, use on the host and on streams, free.

use std::collections::BTreeSet;

use warpool::driver::sim::SimDriver;
use warpool::driver::{Call, Copies as _, HostPtr};
use warpool::memory::{HostAllocator, HostBlock};
use warpool::{Error, Stream};

use super::{KIB, MIB, Run};
use crate::machine::Outcome;

/// The bytes at each end of a block that hold its tag.
const END: u64 = 64;

/// A pinned block of the program.
pub struct Live {
    pub block: HostBlock,
    pub tag: u32,
    /// The stream whose write is the last one, if it may still run.
    writer: Option<usize>,
    /// Streams that may still read it.
    readers: BTreeSet<usize>,
    /// Streams whose use is recorded.
    recorded: BTreeSet<usize>,
}

impl Live {
    fn users(&self) -> BTreeSet<usize> {
        self.readers.iter().copied().chain(self.writer).collect()
    }
}

/// The end of a block, and how many bytes were requested.
pub struct Range {
    pub end: u64,
    pub bytes: u64,
}

/// The parts of a block that hold its tag: both ends, at multiples of four.
pub fn parts(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let parts = match bytes / 4 * 4 {
        0 => [None, None],
        whole if whole <= 2 * END => [Some((0, whole)), None],
        whole => [Some((0, END)), Some((whole - END, END))],
    };
    parts.into_iter().flatten()
}

/// A tag, repeated.
fn pattern(tag: u32, bytes: u64) -> Vec<u8> {
    tag.to_le_bytes().into_iter().cycle().take(usize::try_from(bytes).expect("few")).collect()
}

/// The host writes a tag.
pub fn write_tag(block: &HostBlock, tag: u32) {
    for (offset, len) in parts(block.bytes()) {
        block.write(offset, &pattern(tag, len)).unwrap();
    }
}

/// The host reads the tag.
fn expect_tag(block: &HostBlock, tag: u32) {
    for (offset, len) in parts(block.bytes()) {
        let mut read = vec![0; usize::try_from(len).expect("few")];
        block.read(offset, &mut read).unwrap();
        assert_eq!(read, pattern(tag, len), "the block with tag {tag:#x} at {}, offset {offset}", block.ptr());
    }
}

impl Run<'_> {
    pub fn tag(&mut self) -> u32 {
        self.next_tag += 1;
        // Every byte differs from that of the next tag.
        self.next_tag.wrapping_mul(0x0103_0507)
    }

    /// A size of any order of magnitude, often at a boundary, often one that was used before.
    pub fn bytes(&mut self) -> u64 {
        let bytes = match self.context.rng.below(8) {
            0 => self.context.rng.pick(&[1, 64, 512, 513, 4096, 64 * KIB, MIB, MIB + 1, 2 * MIB]),
            1 => self.context.rng.pick(&[700, 3000, 100_000, 300_000, 3 * MIB]),
            _ => {
                let power = self.context.rng.below(self.bytes_max.ilog2() as usize + 1);
                (1 << power) + self.context.rng.u64() % (1 << power)
            }
        };
        bytes.min(self.bytes_max)
    }

    pub fn any_stream(&mut self) -> usize {
        self.context.rng.below(self.streams.len())
    }

    pub fn allocate(&mut self) {
        let (bytes, way, stream) = (self.bytes(), self.context.rng.below(4), self.any_stream());
        self.context.step(format!("allocate {bytes}, way {way}, for stream {stream}"));
        let to: &Stream = &self.streams[stream].0;
        let device = to.device();
        let outcome = self.machine.call(self.context, || match way {
            0 => self.host.allocate_for(bytes, &device),
            1 => self.host.allocate_on(bytes, to),
            _ => self.host.allocate(bytes),
        });
        let block = match outcome {
            Outcome::Done(block) => block,
            Outcome::OutOfMemory { .. } => return self.expect_justified(bytes),
            _ => return,
        };
        self.context.counts.allocations += 1;
        self.insert(&block, bytes);
        let tag = self.tag();
        self.context.step(format!("  {tag:#x} at {}", block.ptr()));
        write_tag(&block, tag);
        let none = BTreeSet::new;
        self.live.push(Live { block, tag, writer: None, readers: none(), recorded: none() });
    }

    /// Adds a block to the ranges: it must not overlap another one.
    pub fn insert(&mut self, block: &HostBlock, bytes: u64) {
        assert_eq!(block.bytes(), bytes, "the size of {block:?}");
        assert!(block.bytes_usable() >= bytes && block.ptr().0.is_multiple_of(512), "{block:?}");
        let usable = block.bytes_usable();
        assert!(usable <= bytes + bytes / 8 + 512, "{usable} bytes for {bytes}: more than an eighth is wasted");
        let (start, end) = (block.ptr().0, block.ptr().0 + usable);
        if let Some((&other, range)) = self.ranges.range(..end).next_back() {
            assert!(range.end <= start, "{start:#x}..{end:#x} overlaps {other:#x}..{:#x}", range.end);
        }
        let of_graph = self.graph_ranges.iter().find(|range| range.start < end && start < range.end);
        assert!(of_graph.is_none(), "{start:#x}..{end:#x} overlaps {of_graph:x?}");
        self.ranges.insert(start, Range { end, bytes });
        self.blocks_allocated += 1;
        self.bytes_allocated += usable;
    }

    pub fn remove(&mut self, ptr: HostPtr) {
        assert!(self.ranges.remove(&ptr.0).is_some(), "no block is allocated at {ptr}");
    }

    /// A stream copies a block's ends, from or to the block, ordered with other streams that use it.
    pub fn use_on_stream(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let (at, stream) = (self.context.rng.below(self.live.len()), self.any_stream());
        let mut live = self.live.swap_remove(at);
        let writes = self.context.rng.one_in(2);
        self.context.step(format!("stream {stream} {} {:#x}", if writes { "writes" } else { "reads" }, live.tag));
        let before: BTreeSet<usize> = if writes { live.users() } else { live.writer.into_iter().collect() };
        for other in before {
            self.machine.wait(&self.streams[stream].0, &self.streams[other].0);
        }
        if writes {
            live.tag = self.tag();
            self.copy_in(&live, stream);
            live.readers.clear();
            live.writer = Some(stream);
        } else {
            self.copy_out(&live, stream);
            live.readers.insert(stream);
        }
        if !live.recorded.contains(&stream) || self.context.rng.one_in(4) {
            self.record(&mut live, stream);
        }
        self.live.push(live);
    }

    fn record(&mut self, live: &mut Live, stream: usize) {
        let to = &self.streams[stream].0;
        let by_address = self.context.rng.one_in(3);
        let outcome = self.machine.call(self.context, || {
            if by_address {
                let found = self.host.record_use_at(live.block.ptr(), to)?;
                assert!(found, "{:?} is allocated", live.block);
                return Ok(());
            }
            live.block.record_use(to)
        });
        if outcome == Outcome::Done(()) {
            live.recorded.insert(stream);
        } else if !live.recorded.contains(&stream) {
            // A use that could not be recorded has to end before the block is freed.
            self.machine.wait_for(to);
            live.readers.remove(&stream);
            live.writer = live.writer.filter(|&writer| writer != stream);
        }
    }

    /// Copies the tag to the stream's scratch memory, and checks it there.
    fn copy_out(&self, live: &Live, stream: usize) {
        let (stream, scratch) = &self.streams[stream];
        for (offset, len) in parts(live.block.bytes()) {
            let from = HostPtr(live.block.ptr().0 + offset);
            self.machine.sim.copy((*scratch).into(), from.into(), len, stream.id()).unwrap();
            self.machine.check_tag(*scratch, len, live.tag, stream);
        }
    }

    /// The stream writes the tag.
    fn copy_in(&self, live: &Live, stream: usize) {
        let (stream, scratch) = &self.streams[stream];
        for (offset, len) in parts(live.block.bytes()) {
            self.machine.write_tag(*scratch, len, live.tag, stream);
            let to = HostPtr(live.block.ptr().0 + offset);
            self.machine.sim.copy(to.into(), (*scratch).into(), len, stream.id()).unwrap();
        }
    }

    /// The host reads a block, or writes to it, after waiting for its users.
    pub fn host_access(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.context.rng.below(self.live.len());
        let tag = self.tag();
        let live = &mut self.live[at];
        self.context.step(format!("the host reads {:#x}", live.tag));
        for stream in live.users() {
            self.machine.wait_for(&self.streams[stream].0);
        }
        live.readers.clear();
        live.writer = None;
        expect_tag(&live.block, live.tag);
        if self.context.rng.one_in(2) {
            live.tag = tag;
            write_tag(&live.block, tag);
        }
    }

    pub fn free_one(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.context.rng.below(self.live.len());
        let live = self.live.swap_remove(at);
        if live.users().is_empty() {
            expect_tag(&live.block, live.tag);
        }
        let drops = self.context.rng.one_in(2);
        self.context.step(format!("free {:#x}, recorded {:?}, dropped {drops}", live.tag, live.recorded));
        self.remove(live.block.ptr());
        let block = live.block;
        let _ = self.machine.call(self.context, || {
            if drops {
                drop(block);
                return Ok(());
            }
            block.free()
        });
    }

    /// Invalid and empty requests.
    pub fn invalid_calls(&mut self) {
        let empty = self.host.allocate(0).unwrap();
        assert_eq!((empty.ptr(), empty.bytes(), empty.bytes_usable()), (HostPtr(0), 0, 0));
        empty.record_use(&self.streams[0].0).unwrap();
        empty.free().unwrap();
        let unknown = HostPtr(self.ranges.last_key_value().map_or(0x1000, |(_, range)| range.end) + (1 << 45));
        assert!(!self.host.record_use_at(unknown, &self.streams[0].0).unwrap(), "{unknown} is no block");
        if let Some(live) = self.live.first() {
            let bytes = live.block.bytes();
            for (offset, len) in [(bytes, 1), (bytes - 1, 2), (u64::MAX, 2)] {
                let read = live.block.read(offset, &mut vec![0; len]);
                for outcome in [read, live.block.write(offset, &vec![0; len])] {
                    let is_refused = matches!(outcome, Err(Error::HostBounds { .. }));
                    assert!(is_refused, "{len} at {offset} of {bytes}: {outcome:?}");
                }
            }
        }
        // The first request of all pins the reserved segment, whatever becomes of the request.
        let refused = |sim: &SimDriver, host: &HostAllocator| {
            sim.call_count(Call::HostAlloc) + sim.call_count(Call::HostRegister) - host.stats().num_host_alloc
        };
        let before = refused(&self.machine.sim, &self.host);
        let huge = self.context.rng.pick(&[1 << 47, 1 << 60, u64::MAX]);
        assert!(self.host.allocate(huge).is_err(), "{huge} bytes are pinned");
        self.calls_refused += refused(&self.machine.sim, &self.host) - before;
    }
}
