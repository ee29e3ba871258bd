//! Properties of all strings, checked with random ones, which are the same in every run.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::keys::{KEYS, Key};
use super::*;
use crate::memory::RecordedSettings;

/// Checks a property with random input; a failure shows the smallest input that fails.
fn for_all<S: Strategy>(cases: u32, strategy: &S, property: impl Fn(S::Value)) {
    let cases = if cfg!(miri) { 5 } else { cases };
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let outcome = runner.run(strategy, |value| {
        property(value);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

/// Parts of settings strings, and some that are not.
fn part() -> impl Strategy<Value = String> {
    let names = KEYS.iter().flat_map(|info| [Some(info.name), info.alias]).flatten().collect::<Vec<_>>();
    let values = vec![
        "True",
        "False",
        "0",
        "1",
        "2",
        "20",
        "64",
        "0.5",
        "40G",
        "1e999",
        "-1",
        "native",
        "expandable",
        "paged",
        "cudaMallocAsync",
        "address",
    ];
    prop_oneof![
        4 => prop::sample::select(vec![":", ",", "[", "]", ">", " "]).prop_map(String::from),
        2 => prop::sample::select(names).prop_map(String::from),
        2 => prop::sample::select(values).prop_map(String::from),
        1 => any::<String>(),
    ]
}

#[test]
fn no_string_panics() {
    let strings = prop::collection::vec(part(), 0..24).prop_map(|parts| parts.concat());
    let before = Settings::parse("large_segment_size_mb:12,expandable_segments:True").unwrap();
    for_all(4000, &strings, |string| {
        for found in [lint(&string), before.lint_update(&string)] {
            assert_eq!(found.problems.is_empty(), found.effective.is_some());
            assert!(found.problems.iter().all(|problem| problem.at.is_some_and(|at| string.is_char_boundary(at))));
            assert!(found.problems.is_sorted_by_key(|problem| problem.at));
            assert!(!found.to_string().is_empty());
        }
        let recorded = RecordedSettings { conf: Some(string), ..RecordedSettings::default() };
        assert!(Settings::from_recorded(&recorded).is_ok());
    });
}

/// An entry of the key that is valid together with the others.
fn entry(key: Key) -> BoxedStrategy<String> {
    let name = key.name();
    let value = match key {
        Key::Backend => prop::sample::select(vec!["native", "paged"]).prop_map(String::from).boxed(),
        Key::LargeSegmentSize => (6_u64..50).prop_map(|half| (2 * half).to_string()).boxed(),
        Key::MaxSplitSize | Key::MaxNonSplitRounding => (98..u64::MAX).prop_map(|mib| mib.to_string()).boxed(),
        Key::GarbageCollectionThreshold | Key::RecordAbove => {
            (0.0001..1.0_f64).prop_map(|fraction| fraction.to_string()).boxed()
        }
        Key::PerProcessMemoryFraction => (0.0..=1.0_f64).prop_map(|fraction| fraction.to_string()).boxed(),
        Key::RoundupPower2Divisions => {
            let steps = prop_oneof![Just(0_u64), (0..10_u32).prop_map(|power| 1 << power)];
            let list = prop::collection::btree_map(0..18_u32, steps, 1..18).prop_map(|table| {
                let pairs = table.iter().map(|(power, steps)| format!("{}:{steps}", 1_u64 << power));
                pairs.collect::<Vec<_>>().join(",")
            });
            prop_oneof![
                (0..10_u32).prop_map(|power| (1_u64 << power).to_string()),
                list.clone().prop_map(|list| format!("[{list}]")),
                (list, 0..10_u32).prop_map(|(list, power)| format!("[{list},>:{}]", 1_u64 << power)),
            ]
            .boxed()
        }
        Key::ExpandableSegmentsReserve => reserve_text().boxed(),
        Key::ExpandableSegmentsReserveByClass => prop::collection::vec(("[a-z]{1,3}", reserve_text()), 0..5)
            .prop_map(|classes| {
                let pairs: Vec<String> = classes.iter().map(|(class, size)| format!("{class}:{size}")).collect();
                format!("[{}]", pairs.join(","))
            })
            .boxed(),
        Key::PinnedNumRegisterThreads => (0..8_u32).prop_map(|power| (1_u64 << power).to_string()).boxed(),
        Key::PinnedReserveSegmentSize
        | Key::PinnedMaxRoundThreshold
        | Key::PinnedMaxCachedSize
        | Key::PinnedCap
        | Key::PinnedDeviceCap
        | Key::RecordFileSize
        | Key::MemoryCap => (2..u64::MAX >> 22).prop_map(|mib| mib.to_string()).boxed(),
        Key::ShareGuaranteed | Key::ShareLimit => (0..u64::MAX, 0..4_u32)
            .prop_map(|(bytes, unit)| format!("{}{}", bytes >> (10 * unit), ["B", "KiB", "MiB", "GiB"][unit as usize]))
            .boxed(),
        Key::SharePriority => any::<u64>().prop_map(|priority| priority.to_string()).boxed(),
        Key::ShareReclaim | Key::IdleDecay => (1..u64::MAX).prop_map(|millis| millis.to_string()).boxed(),
        Key::Record => prop::sample::select(vec!["off", "oom"]).prop_map(String::from).boxed(),
        Key::RecordEvents => (1000..100_000_000_u64).prop_map(|events| events.to_string()).boxed(),
        Key::RecordSignal => prop::sample::select(vec!["SIGUSR1", "SIGUSR2"]).prop_map(String::from).boxed(),
        Key::RecordFiles => (1..10_000_u64).prop_map(|files| files.to_string()).boxed(),
        Key::RecordInterval => (0..u64::MAX).prop_map(|seconds| seconds.to_string()).boxed(),
        Key::FreeBlockOrder => prop::sample::select(vec!["registration", "address"]).prop_map(String::from).boxed(),
        _ => any::<bool>().prop_map(|value| if value { "True" } else { "False" }.to_owned()).boxed(),
    };
    value.prop_map(move |value| format!("{name}:{value}")).boxed()
}

fn reserve_text() -> impl Strategy<Value = String> {
    (1e-6..1e12_f64, any::<bool>()).prop_map(|(number, gib)| format!("{number}{}", if gib { "G" } else { "" }))
}

#[test]
fn written_settings_are_read_again() {
    let entries: Vec<_> = KEYS.iter().map(|info| prop::option::of(entry(info.key))).collect();
    let strings = (entries, any::<prop::sample::Index>()).prop_map(|(entries, start)| {
        let mut given: Vec<String> = entries.into_iter().flatten().collect();
        if !given.is_empty() {
            let start = start.index(given.len());
            given.rotate_left(start);
        }
        given.join(",")
    });
    for_all(2000, &strings, |string| {
        let settings = Settings::parse(&string).unwrap();
        let written = settings.to_conf_string();
        let again = Settings::parse(&written).unwrap();
        assert_eq!(Settings { text: string.clone(), ..again }, settings, "{string} was written as {written}");
        assert_eq!(rewritten(&written), written);
        let recorded = settings.recorded();
        let limit = settings.max_split_bytes.filter(|bytes| i64::try_from(*bytes).is_ok());
        let record = RecordSettings::default();
        let expected = Settings { max_split_bytes: limit, record, ..settings };
        assert_eq!(Settings::from_recorded(&recorded).unwrap(), expected);
    });
}

fn rewritten(written: &str) -> String {
    Settings::parse(written).unwrap().to_conf_string()
}
