//! Replays recordings and prints the reports. With `--repeat N`, each is replayed N times and the fastest time is
//! printed, without the time to read the file.
//!
//! `cargo run --release -p warpool-trace --example replay -- FILE… [--settings STRING] [--repeat N]`

use std::error::Error;
use std::time::Instant;

use warpool::memory::Settings;
use warpool_trace::ReadOptions;
use warpool_trace::replay::{Outcome, ReplayOptions, replay};

fn main() -> Result<(), Box<dyn Error>> {
    let mut files: Vec<String> = std::env::args().skip(1).collect();
    let mut options = ReplayOptions::default();
    if let Some(at) = files.iter().position(|argument| argument == "--settings") {
        let string = files.get(at + 1).ok_or("--settings needs a string")?;
        options.settings = Some(Settings::parse(string)?);
        files.drain(at..at + 2);
    }
    let mut repeat = 1;
    if let Some(at) = files.iter().position(|argument| argument == "--repeat") {
        repeat = files.get(at + 1).ok_or("--repeat needs a number")?.parse()?;
        files.drain(at..at + 2);
    }
    for file in files {
        let start = Instant::now();
        let recording = warpool_trace::read_file(&file, &ReadOptions::default())?;
        let parsed = start.elapsed();
        let mut report = replay(&recording.snapshot, &options)?;
        for _ in 1..repeat {
            let again = replay(&recording.snapshot, &options)?;
            if again.replay_seconds < report.replay_seconds {
                report = again;
            }
        }
        let fidelity = &report.fidelity;
        println!("{file}: {} events, {} allocations, {}", report.events, report.allocations, report.outcome.name());
        if let Outcome::OutOfMemory { event, report } = &report.outcome {
            println!("  at event {event}: {report}");
        }
        println!(
            "  live {} B, reserved {} B, {} segments",
            report.peak_live_bytes, report.peak_reserved_bytes, report.segments_allocated
        );
        println!(
            "  {} retries, {} failures, {} driver calls, {} synchronizations, {:.3} s in the driver",
            report.retries, report.ooms, report.driver_calls, report.forced_syncs, report.driver_seconds_modelled
        );
        println!(
            "  recorded {} B, {} segments; {} of {} addresses, exact: {}",
            fidelity.recorded_peak_reserved_bytes,
            fidelity.recorded_segments_allocated,
            fidelity.addresses_equal,
            fidelity.addresses_total,
            fidelity.exact
        );
        if let Some(first) = &fidelity.first_difference {
            println!("  first difference: {first}");
        }
        println!("  {:?}", report.inferred);
        report.warnings.iter().for_each(|warning| println!("  warning: {warning}"));
        let events_per_second = report.events as f64 / report.replay_seconds;
        println!(
            "  parsed in {parsed:?}, replayed in {:.4} s, of it the run {:.4} s, {:.2} million events a second",
            report.replay_seconds,
            report.run_seconds,
            events_per_second / 1e6
        );
    }
    Ok(())
}
