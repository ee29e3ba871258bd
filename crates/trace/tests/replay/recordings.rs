//! Every recording of a real program is reproduced, and a what-if gives what was recorded with the other settings. The
//! expected numbers are those that PyTorch counted, or that can be counted in the recording.

use warpool::memory::Settings;
use warpool::memory::report::Snapshot;
use warpool_trace::replay::{ReplayOptions, ReplayReport, replay};

use crate::common::{RECORDINGS, recording};

/// What the recorded program counted.
struct Counted {
    name: &'static str,
    peak_reserved_bytes: u64,
    segments_allocated: u64,
    retries: u64,
    ooms: u64,
}

const fn counted(
    name: &'static str,
    peak_reserved_bytes: u64,
    segments_allocated: u64,
    retries: u64,
    ooms: u64,
) -> Counted {
    Counted { name, peak_reserved_bytes, segments_allocated, retries, ooms }
}

/// Sorted by name.
#[rustfmt::skip]
const ALL: [Counted; 38] = [
    counted("churn.expandable_cap",                1_774_190_592,  44, 7, 1),
    counted("churn.gc_call",                       1_530_920_960,  40, 0, 0),
    counted("churn.max_split_40_gc_roundup_8",     2_160_066_560,  57, 0, 0),
    counted("churn.max_split_64_cap",              1_797_259_264, 153, 5, 1),
    counted("churn.roundup_list",                  7_302_283_264,  14, 0, 0),
    counted("churn.switched_expandable",             358_612_992,  20, 0, 0),
    counted("device_full.expandable",            148_019_085_312,  74, 1, 1),
    counted("device_full.native",                148_086_194_176,  75, 1, 1),
    counted("generate.default",                      553_648_128,  23, 0, 0),
    counted("gnn_train.expandable",                1_145_044_992,  30, 0, 0),
    counted("graphs.expandable",                     958_398_464,  90, 0, 0),
    counted("graphs.native",                         182_452_224,  27, 0, 0),
    counted("leak.default",                        2_984_247_296,  53, 1, 1),
    counted("mempool.native",                      1_130_364_928,  65, 0, 0),
    counted("oom_device.default",                147_316_539_392, 110, 2, 1),
    counted("oom_limit.default",                   6_434_062_336,  86, 4, 1),
    counted("oom_stacks.fraction_6gib",            6_438_256_640, 495, 8, 1),
    counted("pools.native",                          377_487_360,  37, 0, 0),
    counted("prefetch_streams_train.expandable",   5_163_188_224, 114, 0, 0),
    counted("prefetch_streams_train.native",       8_057_257_984, 168, 0, 0),
    counted("resnet_train.expandable",             6_098_518_016, 167, 0, 0),
    counted("resnet_train.native",                 7_470_055_424, 146, 0, 0),
    counted("ring.late_expandable",                  830_472_192,   0, 0, 0),
    counted("ring.late_max_split_64",              4_550_819_840,   4, 0, 0),
    counted("ring.late_native",                      824_180_736,   0, 0, 0),
    counted("ring.late_streams",                     778_043_392,   2, 0, 0),
    counted("serve.native",                       16_716_398_592, 136, 0, 0),
    counted("streams.default",                     2_856_321_024,  48, 0, 0),
    counted("streams.empty_cache",                   847_249_408, 200, 0, 0),
    counted("streams.expandable_cap",              1_753_219_072,  87, 4, 0),
    counted("train.default",                       7_463_763_968,  93, 0, 0),
    counted("verdict.fragmentation",               1_887_436_800,   9, 1, 1),
    counted("verdict.growth",                      4_227_858_432,  36, 1, 1),
    counted("verdict.limit",                       2_097_152_000,  10, 1, 1),
    counted("verdict.live_exceeds_device",       147_102_629_888,  39, 1, 1),
    counted("verdict.other_pool",                  2_044_723_200,  11, 1, 1),
    counted("verdict.other_stream",                2_097_152_000,  12, 1, 1),
    counted("verdict.outside",                    20_401_094_656,  38, 1, 1),
];

fn snapshot(name: &str) -> Snapshot {
    recording(&format!("{name}.pickle.xz")).snapshot
}

fn replayed(name: &str, options: &ReplayOptions<'_>) -> ReplayReport {
    replay(&snapshot(name), options).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn recordings_are_reproduced() {
    for Counted { name, peak_reserved_bytes, segments_allocated, retries, ooms } in ALL {
        let report = replayed(name, &ReplayOptions::default());
        let fidelity = &report.fidelity;
        let first = fidelity.first_difference.as_ref().map(ToString::to_string);
        assert!(fidelity.checked && fidelity.exact, "{name}: {first:?}, {:?}", report.inferred);
        assert_eq!(fidelity.addresses_equal, fidelity.addresses_total, "{name}");
        let got = (report.peak_reserved_bytes, report.segments_allocated, report.retries, report.ooms);
        assert_eq!(got, (peak_reserved_bytes, segments_allocated, retries, ooms), "{name}");
        let recorded = (fidelity.recorded_peak_reserved_bytes, fidelity.recorded_segments_allocated);
        assert_eq!(recorded, (peak_reserved_bytes, segments_allocated), "{name}");
        assert_eq!(report.outcome.name(), if ooms == 0 { "completed" } else { "out_of_memory" }, "{name}");
        assert!(report.peak_live_bytes <= peak_reserved_bytes && report.driver_calls >= segments_allocated, "{name}");
        assert!(report.warnings.is_empty(), "{name}: {:?}", report.warnings);
    }
}

#[test]
fn every_recording_is_tested() {
    let files = std::fs::read_dir(RECORDINGS).expect("the folder").map(|file| file.expect("a file").file_name());
    let files = files.map(|name| name.into_string().expect("plain names"));
    let mut names: Vec<String> =
        files.filter_map(|name| name.strip_suffix(".pickle.xz").map(ToOwned::to_owned)).collect();
    names.sort_unstable();
    assert_eq!(names, ALL.map(|counted| counted.name.to_owned()));
}

#[test]
fn what_if_gives_what_was_recorded_with_those_settings() {
    for (native, expandable) in [
        ("prefetch_streams_train.native", "prefetch_streams_train.expandable"),
        ("resnet_train.native", "resnet_train.expandable"),
    ] {
        let settings = Settings::parse("expandable_segments:True").expect("good settings");
        let report = replayed(native, &ReplayOptions { settings: Some(settings), ..ReplayOptions::default() });
        let other = ALL.iter().find(|counted| counted.name == expandable).expect("it is in the table");
        let recorded = other.peak_reserved_bytes;
        assert!(report.fidelity.exact && report.warnings.is_empty(), "{native}");
        assert!(report.peak_reserved_bytes.abs_diff(recorded) < recorded / 100, "{}", report.peak_reserved_bytes);
    }
}

/// These limits were set by a call, so they are not in the recorded settings.
#[test]
fn limits_set_by_a_call_are_inferred() {
    // The fractions of what an H200 has.
    let total = 150_109_880_320_u64;
    for (name, thousandths) in [
        ("churn.expandable_cap", 12),
        ("churn.max_split_64_cap", 12),
        ("streams.expandable_cap", 12),
        ("churn.gc_call", 15),
    ] {
        let inferred = replayed(name, &ReplayOptions::default()).inferred.memory_limit;
        let inferred = inferred.unwrap_or_else(|| panic!("{name}: no limit"));
        let limit = total / 1000 * thousandths;
        let bounds = inferred.at_least..inferred.below;
        assert!(bounds.contains(&limit), "{name}: {limit} is not in {inferred:?}");
        assert!(bounds.contains(&inferred.used), "{name}: {inferred:?}");
    }
}

#[test]
fn changes_of_expandable_segments_are_inferred() {
    let report = replayed("churn.switched_expandable", &ReplayOptions::default());
    let remarks = &report.inferred.remarks;
    assert!(remarks.iter().any(|remark| remark.contains("expandable_segments changed 5 times")), "{remarks:?}");
}
