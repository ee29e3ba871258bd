//! Files that once took much memory or time, aborted or panicked. Each is a few hundred bytes, or compresses to a few
//! thousand.

use warpool_trace::default_memory_limit;
use warpool_trace::replay::ReplayError;

use crate::pickles::{Item, Pickle, entry, gzip, segment, snapshot};
use crate::{End, run};

const BASE: u64 = 0x7f00_0000_0000;
const MIB: u64 = 1 << 20;

/// The message of a file that no program recorded.
fn implausible(file: &[u8]) -> String {
    match run(file, None) {
        (End::Replay(ReplayError::Implausible { reason }), _) => reason,
        (other, _) => panic!("{other:?}"),
    }
}

#[test]
fn block_larger_than_its_segment_is_refused() {
    // It was divided into requests of 1 MiB each, and collecting these aborted.
    for (expandable, state) in [(false, "active_allocated"), (false, "inactive"), (true, "inactive")] {
        let segments = [segment(BASE, 2 * MIB, "small", expandable, &[(BASE, 1 << 59, state)])];
        let reason = implausible(&snapshot(&segments, &[entry("alloc", BASE + 4096, 512, 0, 0)], b""));
        assert_eq!(reason, "segment 0 of device 0: its blocks overlap or lie outside of it");
    }
}

#[test]
fn initial_state_out_of_proportion_is_refused() {
    // 16 TiB in pieces of 1 MiB took 7.9 GB and 69 s.
    let bytes = (16 << 40) - 2 * MIB;
    let segments = [segment(BASE, bytes, "small", true, &[(BASE, bytes, "inactive")])];
    let file = snapshot(&segments, &[entry("alloc", BASE, 512, 0, 0)], b"");
    assert!(implausible(&file).contains("before its first event"));
    let unmapped =
        snapshot(&[], &[entry("free_completed", BASE, 512, 0, 0), entry("segment_unmap", BASE, bytes, 0, 0)], b"");
    run(&unmapped, None);
}

/// An entry, repeated by reference.
fn repeated(count: usize) -> Vec<u8> {
    let mut events = vec![entry("alloc", BASE, 512, 0, 0), b"q\x00".to_vec()];
    events.push(b"h\x00".repeat(count));
    snapshot(&[], &events, b"")
}

#[test]
fn entry_that_is_repeated_by_reference_is_limited() {
    // Two bytes of the file are 88 of the snapshot and more in the replay: 4.9 KB of xz took 4.6 GB.
    let (end, peak) = run(&gzip(&repeated(20_000_000)), None);
    assert!(end.is_memory_limit(), "{end:?}");
    assert!(peak < 3 << 30, "{peak}");
    let (end, _) = run(&repeated(20_000), None);
    assert!(matches!(end, End::Report(_)), "{end:?}");
}

#[test]
fn large_texts_under_ignored_keys_are_skipped() {
    let mut more = Pickle::default();
    for number in 0..200 {
        more.text("something").text(&format!("{number}{}", "a".repeat(MIB as usize)));
    }
    let file = snapshot(&[], &[entry("alloc", BASE, 512, 0, 0)], &more.0);
    let (end, peak) = run(&gzip(&file), None);
    assert!(matches!(end, End::Report(_)), "{end:?}");
    assert!(peak < 64 << 20, "{peak}");
    // They do not raise the limit either.
    let recording = warpool_trace::read(file.as_slice(), &Default::default()).expect("a recording");
    assert!(recording.bytes_needed < 100_000 && recording.bytes_decompressed > 200 << 20, "{}", recording.bytes_needed);
}

#[test]
fn text_that_is_skipped_cannot_be_used_elsewhere() {
    let mut more = Pickle::default();
    more.text("something").text(&"x".repeat(1000)).raw(b"q\x07").text("device_traces").raw(b"](](}(");
    more.text("user_metadata").raw(b"h\x07uee");
    let (end, _) = run(&snapshot(&[], &[], &more.0), None);
    let End::Read(error) = end else { panic!("refused") };
    assert!(error.to_string().contains("a text that is first written in a part that is not read"), "{error}");
}

#[test]
fn limit_can_be_raised() {
    let file = repeated(100_000);
    let (end, _) = run(&file, Some(8 << 20));
    assert!(end.is_memory_limit(), "{end:?}");
    let (end, _) = run(&file, Some(1 << 30));
    assert!(matches!(end, End::Report(_)), "{end:?}");
}

#[test]
fn events_with_impossible_numbers_are_refused_by_number() {
    let max = u64::MAX;
    for (action, addr, size) in [
        ("segment_alloc", max - 511, 1024),
        ("segment_map", max, 1),
        ("segment_map", max - (2 * MIB - 1), 2 * MIB),
        ("segment_free", BASE, max),
        ("segment_unmap", max, max),
        ("segment_unmap", BASE, 1 << 45),
        ("alloc", max, 512),
        ("free_requested", 0, max),
        ("free_completed", 1 << 63, 1 << 63),
        ("oom", 0, max),
    ] {
        let events = [entry("alloc", BASE, 512, 0, 0), entry(action, addr, size, 0, 0)];
        let reason = implausible(&snapshot(&[], &events, b""));
        assert!(reason.contains("event 1"), "{action} {addr:#x} {size}: {reason}");
    }
}

#[test]
fn impossible_times_and_settings_cause_no_panic() {
    let events = [
        entry("segment_map", BASE, 20 * MIB, 0, i64::MIN),
        entry("alloc", BASE, 2 * MIB, 0, i64::MAX),
        entry("free_requested", BASE, 2 * MIB, 0, i64::MIN),
        entry("free_completed", BASE, 2 * MIB, 0, i64::MAX),
        entry("segment_unmap", BASE, 20 * MIB, 0, i64::MIN),
        entry("segment_free", BASE, 20 * MIB, 0, i64::MAX),
    ];
    for conf in [
        "expandable_segments:True",
        "expandable_segments:True,large_segment_size_mb:17592186044415",
        "large_segment_size_mb:17592186044414,garbage_collection_threshold:0.1",
        "max_split_size_mb:17592186044415,max_non_split_rounding_mb:17592186044415",
        "roundup_power2_divisions:4611686018427387904",
    ] {
        let mut settings = Pickle::default();
        settings.text("allocator_settings").dict(&[
            ("PYTORCH_CUDA_ALLOC_CONF", Item::Text(conf)),
            ("max_split_size", Item::Negative(i64::MAX)),
            ("garbage_collection_threshold", Item::Raw(b"G\x7f\xef\xff\xff\xff\xff\xff\xff")),
        ]);
        run(&snapshot(&[], &events, &settings.0), None);
        run(&snapshot(&[], &events[..2], &settings.0), None);
    }
    let mut divisions = Pickle::default();
    let of_one_mib = Pickle::default().dict(&[("1", Item::Number(1 << 62))]).0.clone();
    divisions.text("allocator_settings").dict(&[("roundup_power2_divisions", Item::Raw(&of_one_mib))]);
    run(&snapshot(&[], &events, &divisions.0), None);
}

#[test]
fn more_streams_devices_or_unordered_frees_than_there_can_be_are_errors() {
    let segments: Vec<Vec<u8>> = (0..66_000_u64)
        .map(|stream| {
            let base = BASE + stream * 2 * MIB;
            let mut segment = Pickle::default();
            let block = Pickle::default()
                .dict(&[
                    ("address", Item::Number(base)),
                    ("size", Item::Number(2 * MIB)),
                    ("state", Item::Text("inactive")),
                ])
                .0
                .clone();
            segment.dict(&[
                ("device", Item::Number(0)),
                ("address", Item::Number(base)),
                ("total_size", Item::Number(2 * MIB)),
                ("allocated_size", Item::Number(0)),
                ("active_size", Item::Number(0)),
                ("stream", Item::Number(stream)),
                ("segment_type", Item::Text("small")),
                ("blocks", Item::Raw(&[b"](", &block[..], b"e"].concat())),
            ]);
            segment.0
        })
        .collect();
    assert!(implausible(&snapshot(&segments, &[entry("alloc", BASE, 512, 0, 0)], b"")).contains("66000 streams"));

    let mut traces = Pickle::new();
    traces.raw(b"}(").text("segments").raw(b"]").text("device_traces").raw(b"](");
    for _ in 0..20_000 {
        traces.raw(b"](").raw(&entry("alloc", BASE, 512, 0, 0)).raw(b"e");
    }
    traces.raw(b"eu.");
    assert!(implausible(&traces.0).contains("20000 devices"));

    // Each free completes before the one that was requested before it.
    let count = 66_000_u64;
    let at = |block: u64| BASE + block * 512;
    let mut events = vec![entry("segment_alloc", BASE, 64 * MIB, 0, 0)];
    events.extend((0..count).map(|block| entry("alloc", at(block), 512, 0, 0)));
    events.extend((0..count).map(|block| entry("free_requested", at(block), 512, 0, 0)));
    events.extend((0..count).rev().map(|block| entry("free_completed", at(block), 512, 0, 0)));
    assert!(implausible(&snapshot(&[], &events, b"")).contains("out of order"));
}

#[test]
fn default_limit_is_the_stated_one() {
    assert_eq!(default_memory_limit(0), 256 << 20);
    assert_eq!(default_memory_limit(10 << 20), (256 + 320) << 20);
    assert_eq!(default_memory_limit(u64::MAX), 4 << 30);
}

#[test]
fn real_recordings_take_far_less_than_the_limit() {
    for name in ["churn.expandable_cap", "ring.late_streams", "resnet_train.native", "graphs.native", "pools.native"] {
        let file = crate::common::bytes(&format!("{name}.pickle.xz"));
        let (end, peak) = run(&file, None);
        let End::Report(report) = end else { panic!("{name}: {end:?}") };
        assert!(report.fidelity.exact, "{name}");
        let bytes = warpool_trace::read(file.as_slice(), &Default::default()).expect("a recording").bytes_decompressed;
        assert!(peak < default_memory_limit(bytes) / 4, "{name}: {peak} bytes for {bytes}");
    }
}
