//! Placement: rounding, splitting, merging, and how much is pinned for the requested bytes.

use std::collections::BTreeMap;

use warpool::driver::ErrorCode;
use warpool::memory::HostBlock;
use warpool::memory::report::BlockState;

use super::context::{GIB, KIB, MIB, TestContext};
use crate::common::sizes::{bytes, short};

/// Runs a script and compares the segments. Steps: `a=SIZE`, `free a`, `drop a`, `trim`. Sizes have the units K, M, G.
/// The picture lists segments by age, and each block by its name, `.` if free in the heap, or `:` if in a front cache.
fn check(settings: &str, script: &str, picture: &str) {
    let context = TestContext::new(settings);
    let mut named: BTreeMap<String, HostBlock> = BTreeMap::new();
    let mut order: Vec<u64> = Vec::new();
    for step in script.split(';').map(str::trim).filter(|step| !step.is_empty()) {
        if let Some((name, size)) = step.split_once('=') {
            named.insert(name.to_owned(), context.alloc(bytes(size)));
        } else if let Some(name) = step.strip_prefix("free ") {
            context.free(named.remove(name).expect("a known name"));
        } else if let Some(name) = step.strip_prefix("drop ") {
            drop(named.remove(name).expect("a known name"));
        } else {
            assert_eq!(step, "trim", "unknown step");
            context.trim(0);
        }
        for segment in context.segments() {
            if !order.contains(&segment.address) {
                order.push(segment.address);
            }
        }
    }
    assert_eq!(draw(&context, &order, &named), picture, "{script} with {settings:?}");
    drop(named);
    context.finish();
}

fn draw(context: &TestContext, order: &[u64], named: &BTreeMap<String, HostBlock>) -> String {
    let name_at =
        |address: u64| named.iter().find(|(_, block)| block.ptr().0 == address).map(|(name, _)| name.as_str());
    let segments = context.segments();
    let by_age = order.iter().filter_map(|start| segments.iter().find(|segment| segment.address == *start));
    let drawn = by_age.map(|segment| {
        assert_eq!(segment.blocks.iter().map(|block| block.size).sum::<u64>(), segment.total_size);
        let blocks = segment.blocks.iter().map(|block| {
            let name = match block.state {
                BlockState::ActiveAllocated => name_at(block.address).unwrap_or("?"),
                BlockState::ActivePendingFree => "!",
                BlockState::Inactive if block.requested_size > 0 => ":",
                BlockState::Inactive => ".",
            };
            format!("[{name} {}]", short(block.size))
        });
        blocks.collect::<String>()
    });
    drawn.collect::<Vec<_>>().join(" ")
}

#[test]
fn small_blocks_share_segments_and_large_ones_have_their_own() {
    check("", "a=1", "[a 512][. 2096640]");
    check("", "a=4097; b=100K", "[a 4608][b 104K][. 1986048]");
    check("", "a=256K; b=260K", "[a 256K][. 1792K] [b 260K]");
    check("", "a=129.5M", "[a 132608K]");
    check("", "a=5000000", "[a 4884K]");
}

#[test]
fn freed_blocks_are_cached_and_merged_when_nothing_fits() {
    check("", "a=256K; b=256K; free a", "[: 256K][b 256K][. 1536K]");
    check("", "a=256K; b=256K; free a; c=256K", "[c 256K][b 256K][. 1536K]");
    check("", "a=256K; b=256K; drop a; c=200K", "[: 256K][b 256K][c 208K][. 1328K]");
    // Only the blocks of the emptied caches fit; nothing more is pinned.
    check(
        "",
        "a=256K; b=256K; c=256K; d=256K; e=256K; f=256K; g=256K; h=192K; free a; free b; i=240K; j=208K",
        "[i 240K][j 208K][. 64K][c 256K][d 256K][e 256K][f 256K][g 256K][h 192K][. 64K]",
    );
    check("", "a=8M; free a; b=8M", "[b 8M]");
    check("", "a=8M; free a; b=6M; c=2M", "[b 6M][c 2M]");
    check("", "a=8M; free a; b=6M; c=2M; free b; free c; d=8M", "[d 8M]");
    check("", "a=8M; free a; trim", "");
    check("", "a=1K; b=8M; free b; trim", "[a 1K][. 2047K]");
}

#[test]
fn the_smallest_fitting_range_is_used() {
    check("", "a=30M; b=14M; free a; free b; c=10M", "[. 30M] [c 10M][. 4M]");
    check("", "a=30M; b=14M; free a; free b; c=15M", "[c 15M][. 15M] [. 14M]");
    // A block is not split for less than an eighth.
    check("", "a=9M; free a; b=8M", "[b 9M]");
    check("", "a=72M; free a; b=64M", "[b 72M]");
    check("", "a=73M; free a; b=64M", "[b 64M][. 9M]");
    check("", "a=9M; free a; b=7.9M", "[b 8092K][. 1124K]");
}

#[test]
fn small_requests_of_one_size_waste_little() {
    for requested in [3_000, 9_000, 70_000, 140_000, 200_000, 250_000, 262_144] {
        let context = TestContext::new("");
        let blocks: Vec<_> = (0..64 * MIB / requested).map(|_| context.pinned.allocate(requested).unwrap()).collect();
        let total = requested * blocks.len() as u64;
        // Rounding wastes at most an eighth, and the last segment may waste another eighth.
        let max = total + total / 8 + total / 8;
        assert!(context.pinned_bytes() <= max, "{requested}: {} pinned for {total}", context.pinned_bytes());
        drop(blocks);
        context.finish();
    }
}

/// The weights of a Llama model with 7 billion parameters, in 16 bits: 32000 x 4096 twice, and in each of 32 layers
/// four of 4096 x 4096, three of 11008 x 4096 and two norms.
#[test]
fn a_model_of_seven_billion_parameters_wastes_almost_nothing() {
    let context = TestContext::new("");
    let mut sizes = vec![32_000 * 4096 * 2; 2];
    for _ in 0..32 {
        sizes.extend([4096 * 4096 * 2; 4]);
        sizes.extend([11_008 * 4096 * 2; 3]);
        sizes.extend([4096 * 2; 2]);
    }
    sizes.push(4096 * 2);
    let requested: u64 = sizes.iter().sum();
    assert_eq!(requested, 13_476_831_232, "a 7B model");
    let blocks: Vec<_> = sizes.iter().map(|&bytes| context.pinned.allocate(bytes).unwrap()).collect();
    let pinned = context.pinned_bytes();
    // Only the segment that the norms share is not full.
    assert!(pinned <= requested + 4 * MIB, "{pinned} for {requested}");
    drop(blocks);
    // In another order nothing more is pinned.
    sizes.reverse();
    let blocks: Vec<_> = sizes.iter().map(|&bytes| context.pinned.allocate(bytes).unwrap()).collect();
    assert_eq!(context.pinned_bytes(), pinned);
    drop(blocks);
    context.pinned.check();
    context.finish();
}

/// Requests of 20.4 GiB in total, for which powers of two pin 32 GiB, pin at most 20.5 GiB, as one request or as many.
/// Small requests are tested with a hundredth of it: simulated host memory is real memory, and only large ranges cost
/// nothing before they are touched.
#[test]
fn twenty_gibibytes_waste_almost_nothing() {
    for (piece, divisor) in [(MIB + 1, 100), (5_000_001, 100), (100_000_001, 1), (3 * GIB + 1, 1), (21 * GIB, 1)] {
        let (requested, max) = ((20.4 * GIB as f64) as u64 / divisor, (20.5 * GIB as f64) as u64 / divisor);
        let context = TestContext::new("");
        let mut left = requested;
        let mut blocks = Vec::new();
        while left > 0 {
            let bytes = piece.min(left);
            match context.pinned.allocate(bytes) {
                Ok(block) => blocks.push(block),
                Err(error) if error.driver().is_some_and(|error| error.code == ErrorCode::OutOfMemory) => {
                    eprintln!("this machine cannot map {bytes} bytes at once; skipped");
                    break;
                }
                Err(error) => panic!("{error}"),
            }
            left -= bytes;
        }
        let pinned = context.pinned_bytes();
        assert!(left > 0 || requested <= pinned && pinned <= max, "{pinned} in pieces of {piece}");
        drop(blocks);
        context.finish();
    }
}

/// The worst size: one byte above a mebibyte takes another page.
#[test]
fn large_requests_waste_a_page_at_most() {
    let context = TestContext::new("");
    let blocks: Vec<_> = (0..50).map(|_| context.alloc(MIB + 1)).collect();
    assert_eq!(context.pinned_bytes(), 50 * (MIB + 4 * KIB));
    drop(blocks);
    context.finish();
}
