//! Every recording of a real program comes out as it was, and what-ifs come out as the recording that was made with the
//! other settings. What is expected here is what PyTorch counted itself, or what can be counted in the recording.

mod common;

use common::{RECORDINGS, recording};
use warpool::memory::{Settings, Snapshot};
use warpool_trace::replay::{ReplayOptions, ReplayReport, replay};

/// What is known of a recording beside its events.
struct Known {
    name: &'static str,
    peak_reserved_bytes: u64,
    segments_allocated: u64,
    retries: u64,
    ooms: u64,
}

const fn known(
    name: &'static str,
    peak_reserved_bytes: u64,
    segments_allocated: u64,
    retries: u64,
    ooms: u64,
) -> Known {
    Known { name, peak_reserved_bytes, segments_allocated, retries, ooms }
}

/// By name.
#[rustfmt::skip]
const ALL: [Known; 23] = [
    known("churn.expandable_cap",                1_774_190_592,  44, 7, 1),
    known("churn.gc_call",                       1_530_920_960,  40, 0, 0),
    known("churn.max_split_40_gc_roundup_8",     2_160_066_560,  57, 0, 0),
    known("churn.max_split_64_cap",              1_797_259_264, 153, 5, 1),
    known("churn.roundup_list",                  7_302_283_264,  14, 0, 0),
    known("churn.switched_expandable",             358_612_992,  20, 0, 0),
    known("device_full.expandable",            148_019_085_312,  74, 1, 1),
    known("device_full.native",                148_086_194_176,  75, 1, 1),
    known("graphs.expandable",                     958_398_464,  90, 0, 0),
    known("graphs.native",                         182_452_224,  27, 0, 0),
    known("mempool.native",                      1_130_364_928,  65, 0, 0),
    known("oom_stacks.fraction_6gib",            6_438_256_640, 495, 8, 1),
    known("pools.native",                          377_487_360,  37, 0, 0),
    known("prefetch_streams_train.expandable",   5_163_188_224, 114, 0, 0),
    known("prefetch_streams_train.native",       8_057_257_984, 168, 0, 0),
    known("resnet_train.expandable",             6_098_518_016, 167, 0, 0),
    known("resnet_train.native",                 7_470_055_424, 146, 0, 0),
    known("ring.late_expandable",                  830_472_192,   0, 0, 0),
    known("ring.late_max_split_64",              4_550_819_840,   4, 0, 0),
    known("ring.late_native",                      824_180_736,   0, 0, 0),
    known("ring.late_streams",                     778_043_392,   2, 0, 0),
    known("streams.empty_cache",                   847_249_408, 200, 0, 0),
    known("streams.expandable_cap",              1_753_219_072,  87, 4, 0),
];

fn snapshot(name: &str) -> Snapshot {
    recording(&format!("{name}.pickle.xz")).snapshot
}

fn replayed(name: &str, options: &ReplayOptions<'_>) -> ReplayReport {
    replay(&snapshot(name), options).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn recordings_come_out_as_recorded() {
    for Known { name, peak_reserved_bytes, segments_allocated, retries, ooms } in ALL {
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
fn none_is_left_out() {
    let files = std::fs::read_dir(RECORDINGS).expect("the folder").map(|file| file.expect("a file").file_name());
    let files = files.map(|name| name.into_string().expect("plain names"));
    let mut names: Vec<String> =
        files.filter_map(|name| name.strip_suffix(".pickle.xz").map(ToOwned::to_owned)).collect();
    names.sort_unstable();
    assert_eq!(names, ALL.map(|known| known.name.to_owned()));
}

#[test]
fn a_what_if_is_what_the_other_recording_shows() {
    for (native, expandable) in [
        ("prefetch_streams_train.native", "prefetch_streams_train.expandable"),
        ("resnet_train.native", "resnet_train.expandable"),
    ] {
        let settings = Settings::parse("expandable_segments:True").expect("good settings");
        let report = replayed(native, &ReplayOptions { settings: Some(settings), ..ReplayOptions::default() });
        let other = ALL.iter().find(|known| known.name == expandable).expect("it is in the table");
        let recorded = other.peak_reserved_bytes;
        assert!(report.fidelity.exact && report.warnings.is_empty(), "{native}");
        assert!(report.peak_reserved_bytes.abs_diff(recorded) < recorded / 100, "{}", report.peak_reserved_bytes);
    }
}

/// The limit of these was set by a call, so no setting tells it.
#[test]
fn limits_are_told_by_what_they_did() {
    // The fractions of what an H200 has.
    let total = 150_109_880_320_u64;
    for (name, thousandths) in [
        ("churn.expandable_cap", 12),
        ("churn.max_split_64_cap", 12),
        ("streams.expandable_cap", 12),
        ("churn.gc_call", 15),
    ] {
        let cap = replayed(name, &ReplayOptions::default()).inferred.cap.unwrap_or_else(|| panic!("{name}: no limit"));
        let limit = total / 1000 * thousandths;
        assert!((cap.least..cap.below).contains(&limit), "{name}: {limit} is not in {cap:?}");
        assert!((cap.least..cap.below).contains(&cap.used), "{name}: {cap:?}");
    }
}

#[test]
fn a_setting_that_was_switched_is_found_and_said() {
    let report = replayed("churn.switched_expandable", &ReplayOptions::default());
    let notes = &report.inferred.notes;
    assert!(notes.iter().any(|note| note.contains("expandable_segments was switched 5 times")), "{notes:?}");
}
