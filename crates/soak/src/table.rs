//! The naive model: which addresses are allocated, and what the statistics must be.

use std::collections::BTreeMap;

use warpool::driver::DevicePtr;
use warpool::memory::DeviceAllocator;
use warpool::memory::raw::Allocation;
use warpool::memory::report::{BlockState, SegmentInfo, SnapshotOptions, Stat};

use crate::machine::device_id;

/// The allocated blocks of a program, by address, and the sums that statistics are compared with.
pub struct Table {
    live: BTreeMap<u64, Entry>,
    totals: Vec<Totals>,
    /// Whether `num_ooms` is compared: a panic leaves open whether a request was counted.
    knows_ooms: bool,
}

struct Entry {
    bytes: u64,
    requested: u64,
    device: usize,
    /// Whether statistics count it: memory that bypasses the cache is in none.
    counted: bool,
}

/// The statistics of one device.
#[derive(Clone, Copy, Default)]
struct Totals {
    blocks: u64,
    bytes: u64,
    requested: u64,
    /// Since the start, or the last reset.
    blocks_allocated: u64,
    blocks_freed: u64,
    bytes_allocated: u64,
    bytes_freed: u64,
    peak: u64,
    ooms: u64,
}

impl Table {
    pub fn new(devices: usize) -> Self {
        Self { live: BTreeMap::new(), totals: vec![Totals::default(); devices], knows_ooms: true }
    }

    /// Adds a block, which must not overlap another one.
    pub fn insert(&mut self, allocation: &Allocation, counted: bool) {
        let (ptr, bytes, requested) = (allocation.ptr.0, allocation.bytes, allocation.bytes_requested);
        assert!(bytes >= requested, "{bytes} bytes for a request of {requested}");
        let end = ptr.checked_add(bytes).expect("a range of addresses");
        let before = self.live.range(..end).next_back();
        if let Some((&other, entry)) = before {
            let other_end = other + entry.bytes;
            assert!(other_end <= ptr, "a block at {ptr:#x}..{end:#x} overlaps one at {other:#x}..{other_end:#x}");
        }
        let device = allocation.device.0 as usize;
        self.live.insert(ptr, Entry { bytes, requested, device, counted });
        if counted {
            let totals = &mut self.totals[device];
            totals.blocks += 1;
            totals.bytes += bytes;
            totals.requested += requested;
            totals.blocks_allocated += 1;
            totals.bytes_allocated += bytes;
            totals.peak = totals.peak.max(totals.bytes);
        }
    }

    /// Removes a block.
    pub fn remove(&mut self, ptr: DevicePtr) {
        let entry = self.live.remove(&ptr.0).unwrap_or_else(|| panic!("no block is allocated at {ptr}"));
        if entry.counted {
            let totals = &mut self.totals[entry.device];
            totals.blocks -= 1;
            totals.bytes -= entry.bytes;
            totals.requested -= entry.requested;
            totals.blocks_freed += 1;
            totals.bytes_freed += entry.bytes;
        }
    }

    /// An address that no block contains.
    pub fn unknown_address(&self) -> DevicePtr {
        DevicePtr(self.live.last_key_value().map_or(0x1000, |(&ptr, entry)| ptr + entry.bytes + (1 << 40)))
    }

    pub fn reset_peak(&mut self, device: usize) {
        self.totals[device].peak = self.totals[device].bytes;
    }

    pub fn reset_accumulated(&mut self, device: usize) {
        let totals = &mut self.totals[device];
        totals.blocks_allocated = 0;
        totals.blocks_freed = 0;
        totals.bytes_allocated = 0;
        totals.bytes_freed = 0;
        totals.ooms = 0;
    }

    /// A request ran out of memory, as the allocator counts it.
    pub fn out_of_memory(&mut self, device: usize) {
        self.totals[device].ooms += 1;
    }

    /// Whether the statistics have the same number of blocks as this table.
    pub fn has_current(&self, allocator: &dyn DeviceAllocator) -> bool {
        let blocks = |device| allocator.stats(device_id(device)).unwrap().allocation.all.current;
        self.totals.iter().enumerate().all(|(device, totals)| blocks(device) == totals.blocks)
    }

    /// A request ended in a panic of a callback: nobody has the block. At most `most` blocks may have been allocated
    /// and freed again.
    pub fn panicked(&mut self, allocator: &dyn DeviceAllocator, most: usize) {
        self.knows_ooms = false;
        self.undone(allocator, most);
    }

    /// At most `most` blocks were allocated and freed again within one call.
    pub fn undone(&mut self, allocator: &dyn DeviceAllocator, most: usize) {
        for (device, totals) in self.totals.iter_mut().enumerate() {
            let stats = allocator.stats(device_id(device)).unwrap();
            let (blocks, bytes) = (stats.allocation.all, stats.allocated_bytes.all);
            let undone = blocks.allocated - totals.blocks_allocated;
            assert!(undone <= most as u64, "{undone} blocks were allocated by one request");
            totals.blocks_allocated += undone;
            totals.blocks_freed += undone;
            let undone = bytes.allocated - totals.bytes_allocated;
            totals.bytes_allocated += undone;
            totals.bytes_freed += undone;
            totals.peak = totals.peak.max(bytes.peak);
        }
    }

    /// Compares with the statistics.
    pub fn check_stats(&self, allocator: &dyn DeviceAllocator) {
        for (device, totals) in self.totals.iter().enumerate() {
            let stats = allocator.stats(device_id(device)).unwrap();
            let blocks = Stat {
                current: totals.blocks,
                peak: stats.allocation.all.peak,
                allocated: totals.blocks_allocated,
                freed: totals.blocks_freed,
            };
            assert_eq!(stats.allocation.all, blocks, "allocation.all of device {device}");
            let bytes = Stat {
                current: totals.bytes,
                peak: totals.peak,
                allocated: totals.bytes_allocated,
                freed: totals.bytes_freed,
            };
            assert_eq!(stats.allocated_bytes.all, bytes, "allocated_bytes.all of device {device}");
            if self.knows_ooms {
                assert_eq!(stats.num_ooms, totals.ooms, "num_ooms of device {device}");
            }
            let (active, reserved) = (stats.active_bytes.all.current, stats.reserved_bytes.all.current);
            assert!(active >= totals.bytes, "{active} bytes are active, {} are allocated", totals.bytes);
            assert!(reserved >= active, "{reserved} bytes are reserved, {active} are active");
            let requested = stats.requested_bytes.all.current;
            assert!(requested >= totals.requested, "{requested} bytes requested, not {}", totals.requested);
            if active == totals.bytes {
                assert_eq!(requested, totals.requested, "requested_bytes of device {device}, nothing is pending");
            }
            for (name, by_kind) in [("allocation", stats.allocation), ("reserved_bytes", stats.reserved_bytes)] {
                let both = by_kind.small_pool.current + by_kind.large_pool.current;
                // Allocators without a cache do not distinguish segment kinds.
                assert!(both == by_kind.all.current || both == 0, "{name}: {by_kind:?}");
                let of_kinds = by_kind.small_pool.peak.max(by_kind.large_pool.peak);
                assert!(of_kinds <= by_kind.all.peak, "the peaks of {name}: {by_kind:?}");
            }
        }
    }

    /// Compares with a snapshot: its segments overlap nowhere, have no gaps, and contain exactly these blocks.
    pub fn check_snapshot(&self, allocator: &dyn DeviceAllocator) {
        let snapshot = allocator.snapshot(SnapshotOptions { pool: None, traces: false }).unwrap();
        let mut segments: Vec<&SegmentInfo> = snapshot.segments.iter().collect();
        segments.sort_by_key(|segment| segment.address);
        let mut end = 0;
        let mut allocated = BTreeMap::new();
        let mut reserved = vec![0; self.totals.len()];
        for segment in segments {
            assert!(segment.address >= end, "segments overlap at {:#x}", segment.address);
            end = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, end, "a gap in the segment at {:#x}", segment.address);
                end += block.size;
                if block.state == BlockState::ActiveAllocated {
                    allocated.insert(block.address, (block.size, block.requested_size));
                }
            }
            assert_eq!(end, segment.address + segment.total_size, "the end of the segment at {:#x}", segment.address);
            reserved[usize::try_from(segment.device).expect("a device")] += segment.total_size;
        }
        let counted = self.live.iter().filter(|(_, entry)| entry.counted);
        let expected: BTreeMap<u64, (u64, u64)> =
            counted.map(|(&ptr, entry)| (ptr, (entry.bytes, entry.requested))).collect();
        assert_eq!(allocated, expected, "allocated blocks of the snapshot, and of the program");
        for (device, reserved) in reserved.into_iter().enumerate() {
            let stats = allocator.stats(device_id(device)).unwrap();
            assert_eq!(stats.reserved_bytes.all.current, reserved, "reserved on device {device}, and in segments");
        }
    }

    /// At the end, with nothing allocated.
    pub fn check_empty(&self, allocator: &dyn DeviceAllocator) {
        assert!(self.live.is_empty(), "the program still has blocks");
        self.check_stats(allocator);
        for device in 0..self.totals.len() {
            let stats = allocator.stats(device_id(device)).unwrap();
            assert_eq!(stats.active_bytes.all.current, 0, "active on device {device} at the end");
        }
    }
}
