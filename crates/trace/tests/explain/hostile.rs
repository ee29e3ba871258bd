//! Recordings that no real program makes are explained or refused. There is no panic, and the parts of an explanation
//! still add up. `WARPOOL_TEST_SCALE` multiplies the number of recordings.

use std::panic::{AssertUnwindSafe, catch_unwind};

use warpool::memory::MemPoolId;
use warpool::memory::report::{Action, BlockInfo, BlockState, SegmentInfo, SegmentKind, Snapshot, TraceEntry};
use warpool_trace::explain::{ExplainOptions, explain};
use warpool_trace::timeline::{TimelineOptions, timelines};

use crate::common::{MIB, scale};

const BASE: u64 = 0x7f00_0000_0000;

fn size(rng: &mut fastrand::Rng) -> u64 {
    // Most recordings have no size that is refused.
    match rng.u32(..1000) {
        0 => u64::MAX - rng.u64(..1024),
        1 => 1 << rng.u32(..64),
        2 => 1 << rng.u32(50..60),
        3..500 => rng.u64(1..=MIB),
        _ => rng.u64(1..=60) * MIB,
    }
}

fn address(rng: &mut fastrand::Rng) -> u64 {
    match rng.u32(..1000) {
        0 => rng.u64(..),
        1..500 => BASE + rng.u64(..8) * 64 * MIB,
        _ => BASE + rng.u64(..64) * 2 * MIB,
    }
}

fn pool(rng: &mut fastrand::Rng) -> MemPoolId {
    MemPoolId { graph: 0, user: rng.u32(..2) }
}

fn entry(rng: &mut fastrand::Rng, time_us: i64) -> TraceEntry {
    let action = Action::ALL[rng.usize(..Action::ALL.len())];
    let mut entry = TraceEntry::new(action, address(rng), size(rng), rng.u64(..2), time_us);
    entry.pool = rng.bool().then(|| pool(rng));
    entry
}

fn segment(rng: &mut fastrand::Rng) -> SegmentInfo {
    let (address, total_size) = (address(rng), size(rng));
    // The blocks fill the segment, a part of it, or slightly more.
    let size = rng.u64(1..=total_size.max(1));
    let blocks = (0..rng.u64(..3)).map(|number| BlockInfo {
        address: address.wrapping_add(number.wrapping_mul(size)),
        size,
        requested_size: rng.u64(..=size),
        state: BlockState::ALL[rng.usize(..3)],
        stack: None,
    });
    let blocks: Vec<BlockInfo> = blocks.collect();
    SegmentInfo {
        device: rng.i32(-1..2),
        address,
        total_size,
        allocated_size: 0,
        active_size: 0,
        requested_size: 0,
        stream: rng.u64(..2),
        kind: if rng.bool() { SegmentKind::Small } else { SegmentKind::Large },
        pool: pool(rng),
        is_expandable: rng.bool(),
        is_elastic: false,
        stack: None,
        blocks,
    }
}

#[test]
fn recordings_of_no_program_do_not_panic() {
    let (recordings, mut explained_count) = (1500 * scale(), 0);
    for seed in 0..recordings {
        let mut rng = fastrand::Rng::with_seed(seed);
        let events = (0..rng.i64(1..60)).map(|time_us| entry(&mut rng, time_us)).collect();
        let segments = (0..rng.usize(..3)).map(|_| segment(&mut rng)).collect();
        let snapshot = Snapshot { traces: vec![events], segments, ..Snapshot::default() };
        let options = ExplainOptions {
            skips_fits: seed % 16 != 0,
            address_orders: Some(1),
            threads: Some(1),
            memory_limit: Some(256 << 20),
            ..ExplainOptions::default()
        };
        let explained = catch_unwind(AssertUnwindSafe(|| explain(&snapshot, &options)));
        let Ok(explained) = explained else { panic!("seed {seed} panics") };
        let drawn = TimelineOptions { explain: options.clone(), ..TimelineOptions::default() };
        let drawn = catch_unwind(AssertUnwindSafe(|| timelines(&snapshot, &drawn)));
        let Ok(drawn) = drawn else { panic!("the timeline of seed {seed} panics") };
        assert!(drawn.is_ok() || explained.is_err(), "seed {seed} can be explained, but not drawn");
        explained_count += u64::from(explained.is_ok());
        for explanation in explained.into_iter().flatten() {
            for moment in &explanation.moments {
                assert!(moment.parts.reserved() == moment.bytes_reserved, "seed {seed}: {:?}", moment.parts);
            }
        }
    }
    assert!(explained_count > recordings / 4, "too many are refused: {explained_count} of {recordings} are explained");
}
