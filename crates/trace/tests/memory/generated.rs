//! Random hostile recordings: damaged copies of the small ones in the repository, and valid pickles with extreme
//! numbers. None panics, aborts or takes more than its limit. `WARPOOL_TEST_SCALE` multiplies their number.

use fastrand::Rng;

use crate::common::{bytes, scale};
use crate::pickles::{Item, Pickle, entry, gzip, segment, snapshot};
use crate::run;

const ACTIONS: [&str; 10] = [
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "annotate",
];
const STATES: [&str; 3] = ["active_allocated", "active_pending_free", "inactive"];
const MIB: u64 = 1 << 20;
const BASE: u64 = 0x7f00_0000_0000;

/// A size, sometimes of a real program and sometimes extreme.
fn size(rng: &mut Rng) -> u64 {
    match rng.u32(..12) {
        0 => 0,
        1 => rng.u64(..),
        2 => 1 << rng.u32(..64),
        3 => (1_u64 << rng.u32(..64)).wrapping_sub(1),
        4 => rng.u64(..4096) * MIB,
        5 => 512,
        6 => 20 * MIB,
        7 => 2 * MIB,
        _ => (1 + rng.u64(..64)) * 512 * (1 << rng.u32(..9)),
    }
}

fn address(rng: &mut Rng) -> u64 {
    match rng.u32(..12) {
        0 => rng.u64(..),
        1 => 0,
        2 => u64::MAX - rng.u64(..4096),
        3 => BASE + rng.u64(..64) * 512,
        4 => BASE + (rng.u64(..8) << 38),
        _ => BASE + rng.u64(..32) * 2 * MIB,
    }
}

fn time(rng: &mut Rng) -> i64 {
    if rng.u32(..8) == 0 { rng.i64(..) } else { rng.i64(..100_000) }
}

/// Events that often match one another.
fn events(rng: &mut Rng) -> Vec<Vec<u8>> {
    let streams = if rng.bool() { 1 } else { 5 };
    let mut used: Vec<(u64, u64, u64)> = Vec::new();
    (0..rng.usize(1..80))
        .map(|_| {
            let action = ACTIONS[rng.usize(..ACTIONS.len())];
            let fresh = (address(rng), size(rng), rng.u64(..streams));
            let (addr, bytes, stream) = match used.get(rng.usize(..used.len().max(1))) {
                Some(&known) if rng.u32(..4) > 0 => known,
                _ => fresh,
            };
            used.push((addr, bytes, stream));
            entry(action, addr, bytes, stream, time(rng))
        })
        .collect()
}

fn segments(rng: &mut Rng) -> Vec<Vec<u8>> {
    (0..rng.usize(..6))
        .map(|_| {
            let (address, bytes) = (address(rng), size(rng));
            let mut blocks = Vec::new();
            let mut next = address;
            for _ in 0..rng.usize(..8) {
                let at = if rng.u32(..6) == 0 { self::address(rng) } else { next };
                let bytes = if rng.bool() { bytes / 4 } else { size(rng) };
                blocks.push((at, bytes, STATES[rng.usize(..STATES.len())]));
                next = at.wrapping_add(bytes);
            }
            segment(address, bytes, if rng.bool() { "small" } else { "large" }, rng.bool(), &blocks)
        })
        .collect()
}

fn settings(rng: &mut Rng) -> Vec<u8> {
    let conf = [
        "",
        "expandable_segments:True",
        "garbage_collection_threshold:0.5",
        "max_split_size_mb:64",
        "roundup_power2_divisions:8",
        "expandable_segments:True,expandable_segments_reserve:1G",
    ];
    let mut settings = Pickle::default();
    settings.text("allocator_settings").dict(&[
        ("PYTORCH_CUDA_ALLOC_CONF", Item::Text(conf[rng.usize(..conf.len())])),
        ("expandable_segments", Item::Bool(rng.bool())),
        ("max_split_size", Item::Negative(if rng.u32(..4) == 0 { rng.i64(..) } else { -1 })),
    ]);
    settings.0
}

/// Runs a file and prints the seed if that fails.
fn check(seed: u64, file: &[u8]) {
    let limit = if seed.is_multiple_of(2) { None } else { Some(48 << 20) };
    let outcome = std::panic::catch_unwind(|| run(file, limit));
    if outcome.is_err() {
        panic!("seed {seed}, {} bytes", file.len());
    }
}

#[test]
fn valid_pickles_with_extreme_numbers() {
    for seed in 0..1_500 * scale() {
        let mut rng = Rng::with_seed(seed);
        let (segments, events, settings) = (segments(&mut rng), events(&mut rng), settings(&mut rng));
        check(seed, &snapshot(&segments, &events, &settings));
    }
}

#[test]
fn damaged_copies_of_small_recordings() {
    let names = ["snapshot.p2.pickle", "snapshot.p4.pickle", "single.pickle", "legacy.pickle", "rmm.csv"];
    let files = names.map(bytes);
    for seed in 0..1_500 * scale() {
        let mut rng = Rng::with_seed(seed);
        let mut file = files[rng.usize(..files.len())].clone();
        for _ in 0..rng.u32(1..=6) {
            let at = rng.usize(2..file.len());
            match rng.u32(..5) {
                0 => file[at] = rng.u8(..),
                1 => drop(file.remove(at)),
                // Eight bytes are a number.
                2 => file.iter_mut().skip(at).take(8).for_each(|byte| *byte = 0xff),
                3 => {
                    let part: Vec<u8> = file[at..].iter().copied().take(rng.usize(1..40)).collect();
                    let to = rng.usize(2..file.len());
                    file.splice(to..to, part.repeat(rng.usize(1..50)));
                }
                _ => file[at] ^= 1 << rng.u32(..8),
            }
        }
        check(seed, &file);
    }
}

#[test]
fn decompressed_bombs() {
    let opcodes: [&[u8]; 9] =
        [b"N", b"(", b"K\x01\x94", b"]", b"}", b"}\x94]\x94", b")", b"\x8a\x00", b"K\x01r\xff\xff\xff\x7f"];
    for (number, opcode) in opcodes.iter().enumerate() {
        let mut pickle = Pickle::new();
        pickle.raw(b"}(").text("segments").raw(b"](").raw(&opcode.repeat(8_000_000));
        let (end, _) = run(&gzip(&pickle.0), Some(64 << 20));
        assert!(matches!(end, crate::End::Read(_)), "{number}: {end:?}");
    }
    // Short texts that are all different.
    let mut pickle = Pickle::new();
    pickle.raw(b"](");
    for number in 0..400_000_u32 {
        pickle.text(&format!("{number:x}"));
    }
    let (end, _) = run(&gzip(&pickle.0), Some(16 << 20));
    assert!(end.is_memory_limit(), "{end:?}");
}
