//! Reads and replays recordings. Undamaged ones of a random program must be read back as they were written. Damaged
//! ones must give errors or other recordings, without a panic and without much memory.

use std::sync::{Arc, OnceLock};

use warpool::Instance;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, DevicePtr};
use warpool::memory::report::{HistoryOptions, Snapshot, SnapshotOptions};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator as _, MemPoolId};
use warpool_trace::replay::{AllocatorChoice, ReplayOptions, replay};
use warpool_trace::{ReadOptions, read, write_snapshot};

use crate::allocators::draw_settings;
use crate::context::Context;
use crate::resident;
use crate::rng::Rng;

/// Small recordings of real programs, as they are and decompressed.
const EMBEDDED: [&[u8]; 3] = [
    include_bytes!("../recordings/device_full.expandable.pickle.xz"),
    include_bytes!("../recordings/graphs.native.pickle.xz"),
    include_bytes!("../recordings/mempool.native.pickle.xz"),
];
/// By how much the peak of this process's memory may grow in one program.
const BYTES_GROWTH: u64 = 1 << 30;
/// Damaged copies in one program.
const COPIES: usize = 12;

/// Runs one program.
pub fn run(context: &mut Context) {
    let peak = resident::now().unwrap_or_default().1;
    let file = match context.rng.below(4) {
        0 => context.rng.pick(&EMBEDDED).to_vec(),
        1 => decompressed(context.rng.below(EMBEDDED.len())).clone(),
        _ => own(context),
    };
    for _ in 0..COPIES {
        context.counts.operations += 1;
        let damaged =
            if context.rng.one_in(2) { damage(&mut context.rng, file.clone()) } else { alter(context, &file) };
        pass_through(context, &damaged);
    }
    // The kernel counts the peak in batches: a second reading may be slightly lower.
    let grown = resident::now().unwrap_or_default().1.saturating_sub(peak);
    assert!(grown <= BYTES_GROWTH, "the peak of resident memory grew by {grown} bytes");
}

/// Reads and replays a file. Errors are results.
fn pass_through(context: &mut Context, file: &[u8]) {
    context.counts.recordings += 1;
    let options = ReadOptions { stacks: context.rng.one_in(2), ..ReadOptions::default() };
    let Ok(recording) = read(file, &options) else { return };
    let mut options = ReplayOptions::default();
    if context.rng.one_in(3) {
        options.settings = Some(draw_settings(&mut context.rng));
        options.allocator = context.rng.pick(&AllocatorChoice::ALL);
        options.capacity = context.rng.one_in(2).then(|| context.rng.u64_in(1 << 20..=1 << 37));
    }
    context.counts.recordings_replayed += u64::from(replay(&recording.snapshot, &options).is_ok());
}

/// One of the embedded recordings, decompressed and written again.
fn decompressed(index: usize) -> &'static Vec<u8> {
    static FILES: [OnceLock<Vec<u8>>; EMBEDDED.len()] = [const { OnceLock::new() }; EMBEDDED.len()];
    FILES[index].get_or_init(|| {
        let options = ReadOptions { stacks: true, ..ReadOptions::default() };
        written(&read(EMBEDDED[index], &options).unwrap().snapshot)
    })
}

fn written(snapshot: &Snapshot) -> Vec<u8> {
    let mut file = Vec::new();
    write_snapshot(snapshot, &mut file).unwrap();
    file
}

/// A recording of a random program. It is read as it was written, and its replay ends.
fn own(context: &mut Context) -> Vec<u8> {
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_seed(context.seed).with_capacity(4 << 30)));
    let instance = Instance::new(sim).unwrap();
    let settings = draw_settings(&mut context.rng);
    context.step(settings.to_conf_string());
    let allocator = Arc::new(CachingAllocator::new(&instance, settings));
    let device = instance.device(0).unwrap();
    let streams = [device.pool_stream().unwrap(), device.pool_stream().unwrap()];
    let (mut held, start) = (Vec::new(), context.rng.below(30));
    for step in 0..start + 20 + context.rng.below(100) {
        if step == start {
            allocator.record_history(Some(HistoryOptions::default())).unwrap();
        }
        match context.rng.below(16) {
            0..9 => held.extend(allocator.allocate(context.rng.request_bytes(), &streams[context.rng.below(2)]).ok()),
            9..14 if !held.is_empty() => {
                let block = held.swap_remove(context.rng.below(held.len()));
                if context.rng.one_in(4) {
                    block.record_use(&streams[context.rng.below(2)]).unwrap();
                }
                block.free().unwrap();
            }
            14 => drop(allocator.trim(DeviceId(0), MemPoolId::DEFAULT).unwrap()),
            _ => {}
        }
    }
    let snapshot = allocator.snapshot(SnapshotOptions::default()).unwrap();
    let file = written(&snapshot);
    let options = ReadOptions { stacks: true, ..ReadOptions::default() };
    let again = read(file.as_slice(), &options).unwrap().snapshot;
    assert!(again.segments == snapshot.segments && again.traces == snapshot.traces, "read as written");
    context.counts.recordings += 1;
    match replay(&again, &ReplayOptions::default()) {
        Ok(_) => context.counts.recordings_replayed += 1,
        Err(error) => panic!("the replay of an undamaged recording: {error}"),
    }
    file
}

/// Damages a file: bytes that are changed, inserted, removed, repeated, or cut off.
fn damage(rng: &mut Rng, mut file: Vec<u8>) -> Vec<u8> {
    // Mostly opcodes, so that much of a damaged file is read.
    const BYTES: &[u8] = b"(.}]usae)t\x85\x86\x87hjqr\x94NJKM\x8a\x8bGX\x8c\x8d\x95\x80\x00\x01\x02\x7f\xff";
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(file.len().max(3) - 2) + 2;
        let byte = rng.pick(BYTES);
        match rng.below(6) {
            _ if at >= file.len() => {}
            0 | 1 => file[at] = byte,
            2 => file.insert(at, byte),
            3 => drop(file.remove(at)),
            4 => {
                let end = (at + rng.below(200)).min(file.len());
                let repeated = file[at..end].to_vec();
                file.splice(at..at, repeated);
            }
            _ if rng.one_in(8) => file.truncate(at),
            _ => file[at] ^= 1 << rng.below(8),
        }
    }
    file
}

/// Alters the content of a recording: addresses, sizes, streams and order that no program has.
fn alter(context: &mut Context, file: &[u8]) -> Vec<u8> {
    let rng = &mut context.rng;
    let Ok(recording) = read(file, &ReadOptions::default()) else { return file.to_vec() };
    let mut snapshot = recording.snapshot;
    for _ in 0..1 + rng.below(4) {
        let value = rng.pick(&[0, 1, 512, 1 << 20, 1 << 40, 1 << 60, u64::MAX - 511, u64::MAX]);
        let entries: usize = snapshot.traces.iter().map(Vec::len).sum();
        if rng.one_in(2) && entries > 0 {
            let trace = snapshot.traces.iter_mut().max_by_key(|trace| trace.len()).expect("there are entries");
            let (at, other) = (rng.below(trace.len()), rng.below(trace.len()));
            match rng.below(7) {
                0 => trace[at].addr = value,
                1 => trace[at].size = value,
                2 => trace[at].stream = value,
                3 => trace[at].action = trace[other].action,
                4 => trace.swap(at, other),
                5 => drop(trace.remove(at)),
                _ => trace[at].addr = DevicePtr(trace[other].addr).0,
            }
        } else if !snapshot.segments.is_empty() {
            let at = rng.below(snapshot.segments.len());
            let segment = &mut snapshot.segments[at];
            let block = rng.below(segment.blocks.len().max(1));
            match rng.below(7) {
                0 => segment.address = value,
                1 => segment.total_size = value,
                2 => segment.stream = value,
                3 if !segment.blocks.is_empty() => segment.blocks[block].size = value,
                4 if !segment.blocks.is_empty() => segment.blocks[block].address = value,
                5 if !segment.blocks.is_empty() => drop(segment.blocks.remove(block)),
                _ => drop(snapshot.segments.remove(at)),
            }
        }
    }
    written(&snapshot)
}
