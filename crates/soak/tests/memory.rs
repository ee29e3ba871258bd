//! The check that the memory of the process stays flat. Alone in its process, in which nothing else may use memory.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use warpool_soak::{Campaign, FlatMemory, Length, Options, Report, run};

const MIB: u64 = 1 << 20;

/// The message about readings in MiB, one per second, in windows of four with a warm-up of ten seconds.
fn message(readings: impl IntoIterator<Item = u64>) -> Option<String> {
    let mut memory = FlatMemory::new((50 * MIB, 50 * MIB), Duration::from_secs(10), 4);
    let add = |(second, mib): (u64, u64)| memory.add((mib * MIB, mib * MIB), Duration::from_secs(second)).err();
    (1..).zip(readings).find_map(add)
}

#[test]
fn only_the_minimum_of_a_window_counts() {
    assert_eq!(message([100; 200]), None);
    // A program's peak in most readings, but not in all of a window.
    assert_eq!(message((0..200).map(|at| if at % 4 == 3 { 100 } else { 1600 })), None);
    // As much as is allowed: a tenth of 100 MiB and 64 MiB.
    assert_eq!(message((0..200).map(|at| if at < 12 { 100 } else { 174 })), None);
    let grown = message((0..200).map(|at| if at < 12 { 100 } else { 175 })).expect("a jump");
    assert!(grown.contains("after each of the last 4 turns; the limit is 182452224 bytes, from 104857600"), "{grown}");
    // A slow leak, also below peaks.
    assert!(message((0..2000).map(|at| 100 + at / 10)).is_some());
    assert!(message((0..2000).map(|at| if at % 4 == 1 { 100 + at / 10 } else { 1600 })).is_some());
    // Slow campaigns: the warm-up has at least one window.
    let mut slow = FlatMemory::new((0, 0), Duration::ZERO, 2);
    let mut add = |mib: u64| slow.add((mib * MIB, 0), Duration::from_secs(60));
    assert_eq!([add(500), add(500), add(500), add(560)], [const { Ok(()) }; 4]);
    assert!([add(700), add(700)].iter().any(Result::is_err));
}

/// Runs programs, and `act` between the turns with the seconds so far.
fn soak(seconds: u64, mut act: impl FnMut(f64)) -> Report {
    let length = Length::Time(Duration::from_secs(seconds));
    let options = Options { seed: 1, campaigns: vec![Campaign::Host], length, skip: Vec::new(), broken: false };
    let begin = Instant::now();
    run(&options, &mut |_| {
        act(begin.elapsed().as_secs_f64());
        ControlFlow::Continue(())
    })
}

#[test]
fn a_peak_beside_the_programs_is_no_leak_and_a_leak_is_one() {
    // 300 MiB most of the time, but not in the warm-up.
    let mut peak = Vec::new();
    let report = soak(4, |seconds| {
        let is_high = seconds > 1.5 && seconds % 1.0 > 0.45;
        match (is_high, peak.is_empty()) {
            (true, true) => peak = vec![1_u8; 300 << 20],
            (false, false) => peak = Vec::new(),
            _ => {}
        }
    });
    drop(peak);
    assert!(report.violation.is_none(), "{:?}", report.violation);
    let resident = report.resident;
    assert!(resident.peak > resident.limit(), "the peak is above the limit: {resident:?}");
    // 160 MiB a second.
    let mut leaked = Vec::new();
    let report = soak(12, |seconds| {
        if leaked.len() < (seconds * 10.0) as usize {
            leaked.push(vec![1_u8; 16 << 20]);
        }
    });
    let found = report.violation.expect("a leak");
    assert!(found.message.starts_with("memory has grown: at least "), "{}", found.message);
    assert!(report.elapsed < Duration::from_secs(10), "{:?}", report.elapsed);
}
