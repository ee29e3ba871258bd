//! Replays, explains and draws recordings made from any bytes, a few bytes for each event. Most are valid contents of a
//! pickle, and many of their events match one another, unlike those of random pickles.

#![no_main]

use libfuzzer_sys::fuzz_target;
use warpool::memory::MemPoolId;
use warpool::memory::report::{
    Action, BlockInfo, BlockState, RecordedSettings, SegmentInfo, SegmentKind, Snapshot, TraceEntry,
};
use warpool_trace::explain::{ExplainOptions, explain};
use warpool_trace::replay::{AllocatorChoice, ReplayOptions, replay};
use warpool_trace::timeline::{TimelineOptions, timelines};

const MIB: u64 = 1 << 20;
const BASE: u64 = 0x7f00_0000_0000;
const MEMORY_LIMIT: u64 = 64 << 20;

/// Bytes that are consumed one by one; 0 after the end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        let (&first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        first
    }

    fn number(&mut self) -> u64 {
        (0..8).fold(0, |number, _| number << 8 | u64::from(self.next()))
    }

    fn size(&mut self) -> u64 {
        match self.next() {
            0 => 0,
            byte @ 1..64 => u64::from(byte) * 512,
            byte @ 64..128 => u64::from(byte - 63) * (64 << 10),
            byte @ 128..192 => u64::from(byte - 127) * 2 * MIB,
            byte @ 192..250 => 1 << (byte - 192),
            _ => self.number(),
        }
    }

    fn address(&mut self) -> u64 {
        match self.next() {
            byte @ 0..96 => BASE + u64::from(byte) * 512,
            byte @ 96..192 => BASE + u64::from(byte - 96) * 2 * MIB,
            byte @ 192..240 => BASE + (u64::from(byte - 192) << 34) + u64::from(self.next()) * 512,
            _ => self.number(),
        }
    }

    fn pool(&mut self) -> Option<MemPoolId> {
        match self.next() % 4 {
            0 => None,
            user => Some(MemPoolId { graph: 0, user: u32::from(user) - 1 }),
        }
    }

    fn entry(&mut self) -> TraceEntry {
        let kind = self.next();
        let action = Action::ALL[usize::from(kind) % Action::ALL.len()];
        let (addr, size) = (self.address(), self.size());
        let stream = u64::from(self.next() % 4);
        let time_us = if kind >= 200 { self.number().cast_signed() } else { i64::from(self.next()) * 1000 };
        TraceEntry { pool: self.pool(), ..TraceEntry::new(action, addr, size, stream, time_us) }
    }

    fn segment(&mut self) -> SegmentInfo {
        let (address, total_size, flags) = (self.address(), self.size(), self.next());
        let mut next = address;
        let blocks = (0..self.next() % 8).map(|_| {
            let size = self.size();
            let state = BlockState::ALL[usize::from(self.next()) % 3];
            let block = BlockInfo { address: next, size, requested_size: size, state, stack: None };
            next = next.wrapping_add(size);
            block
        });
        SegmentInfo {
            device: 0,
            address,
            total_size,
            allocated_size: 0,
            active_size: 0,
            requested_size: 0,
            stream: u64::from(flags & 3),
            kind: if flags & 4 == 0 { SegmentKind::Small } else { SegmentKind::Large },
            pool: MemPoolId { graph: 0, user: u32::from(flags >> 4 & 1) },
            is_expandable: flags & 8 != 0,
            is_elastic: flags & 32 != 0,
            stack: None,
            blocks: blocks.collect(),
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = Bytes(data);
    let flags = bytes.next();
    let conf = match flags >> 4 {
        0 => Some("garbage_collection_threshold:0.6".to_owned()),
        1 => Some("max_split_size_mb:40".to_owned()),
        2 => Some("roundup_power2_divisions:4".to_owned()),
        _ => None,
    };
    let settings = RecordedSettings { conf, expandable_segments: Some(flags & 1 != 0), ..RecordedSettings::default() };
    let segments: Vec<SegmentInfo> = (0..bytes.next() % 6).map(|_| bytes.segment()).collect();
    let mut events = Vec::new();
    while !bytes.0.is_empty() && events.len() < 500 {
        events.push(bytes.entry());
    }
    let snapshot = Snapshot { segments, traces: vec![events], settings, ..Snapshot::default() };
    let allocator = if flags & 2 != 0 { AllocatorChoice::DriverPool } else { AllocatorChoice::Caching };
    let capacity = (flags & 4 != 0).then_some(4 << 30);
    let options = ReplayOptions { allocator, capacity, memory_limit: Some(MEMORY_LIMIT), ..ReplayOptions::default() };
    let _ = replay(&snapshot, &options);
    let (memory_limit, address_orders) = (Some(MEMORY_LIMIT), Some(1));
    let options = ExplainOptions { memory_limit, address_orders, ..ExplainOptions::default() };
    let explained = explain(&snapshot, &options);
    let explain = ExplainOptions { skips_fits: true, ..options };
    let drawn = timelines(&snapshot, &TimelineOptions { explain, ..TimelineOptions::default() });
    assert!(drawn.is_ok() || explained.is_err(), "what can be explained can be drawn");
});
