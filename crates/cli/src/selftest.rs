//! `warpool selftest`: runs the conformance suites on a driver and shows their reports.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use indicatif::ProgressBar;
use serde_json::json;
use warpool_conformance::{Options, Outcome, Report, Suite, Summary};

use crate::driver::{self, SimArgs};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::{foreign, processes};

/// Runs the conformance checks: every call of the driver contract, and streams, events, memory, handles, generators
/// and graphs on top of it
///
/// A check is a small program on real streams whose results are compared exactly.
/// It is skipped only if the device lacks a feature, which is then named.
/// The last suite makes the device unusable on purpose, for this process only.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
#[command(after_help = format!("Suites, in the order in which they run:\n  {}\n\n\
    Exit status: 0 no check failed, 1 a check failed, 2 the checks could not be run.\n\n\
    Examples:\n  \
    warpool selftest --driver sim\n  \
    warpool selftest --driver sim --seed 7 --suite capture --suite graphs\n  \
    warpool selftest --driver cuda --device 1 --json > selftest.jsonl", suite_list()))]
pub struct Args {
    /// The driver to check: sim or cuda
    #[arg(long, value_name = "NAME")]
    driver: String,
    /// The device to check
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Seed of random sizes and contents, and of the simulated GPU's timing
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Run only this suite; can be repeated
    #[arg(long = "suite", value_name = "NAME")]
    suites: Vec<String>,
    /// Leave out the suite that makes the device unusable
    #[arg(long)]
    no_destructive: bool,
    #[command(flatten)]
    sim: SimArgs,
    /// One JSON object per check, then one with the totals
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    check_suites(args)?;
    let driver = driver::open(&args.driver, &args.sim, args.seed)?;
    let device = driver::device(&*driver, args.device)?;
    let options = Options {
        device,
        seed: args.seed,
        level: None,
        suites: args.suites.clone(),
        extra: EXTRA,
        destructive: !args.no_destructive,
    };

    // Queried first: the last suite makes the device unusable.
    let name = driver.device_properties(device)?.name;
    output.line(format!("driver {}, {device} ({name}), seed {}\n", driver.kind(), args.seed))?;
    let mut printer =
        Printer { output, reports: Vec::new(), suite_start: 0, written: Ok(()), spinner: output::spinner("checks") };
    let summary = warpool_conformance::run(&driver, &options, &mut |report| printer.add(report));
    let shown = printer.finish().and_then(|reports| print_summary(output, &reports, summary));
    match shown {
        // The result counts even if the reader closed the pipe early.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(if summary.failed == 0 { Verdict::Success } else { Verdict::Failure }),
    }
}

/// The totals come last, where they are visible in a terminal.
fn print_summary(output: &mut Output, reports: &[Report], summary: Summary) -> io::Result<()> {
    suites_table(output, reports)?;
    for reason in reasons(reports) {
        output.line(reason)?;
    }
    let Summary { passed, failed, skipped } = summary;
    output.object(&json!({ "passed": passed, "failed": failed, "skipped": skipped }))?;
    output.line(format!("{passed} passed, {failed} failed, {skipped} skipped"))
}

/// The suites of this crate.
const EXTRA: &[Suite] = &[foreign::SUITE, processes::SUITE];

/// The names of all suites, in the order in which they run.
fn names() -> Vec<&'static str> {
    warpool_conformance::suites(EXTRA).map(|suite| suite.name).collect()
}

/// The names of the suites that leave the device unusable.
fn destructive() -> impl Iterator<Item = &'static str> {
    warpool_conformance::suites(EXTRA).filter(|suite| suite.destructive).map(|suite| suite.name)
}

fn suite_list() -> String {
    names().chunks(8).map(|line| line.join(", ")).collect::<Vec<_>>().join(",\n  ")
}

/// Rejects unknown suites, and destructive ones together with `--no-destructive`.
fn check_suites(args: &Args) -> Result<()> {
    for suite in &args.suites {
        if !names().contains(&suite.as_str()) {
            return Err(CommandError::Usage(format!("no suite '{suite}': choose from {}", names().join(", "))));
        }
        if args.no_destructive && destructive().any(|name| name == suite) {
            return Err(CommandError::Usage(format!(
                "suite '{suite}' is destructive: leave out --no-destructive to run it"
            )));
        }
    }
    Ok(())
}

/// Shows each suite as a table once it has ended, or each check as an object at once.
struct Printer<'a> {
    output: &'a mut Output,
    reports: Vec<Report>,
    /// Index of the first report of the running suite.
    suite_start: usize,
    /// The first failed write; nothing is written after it.
    written: io::Result<()>,
    spinner: ProgressBar,
}

impl Printer<'_> {
    fn add(&mut self, report: &Report) {
        self.spinner.set_message(format!("{}.{}", report.suite, report.check));
        self.spinner.inc(1);
        if self.reports.last().is_some_and(|last| last.suite != report.suite) {
            self.end_suite();
        }
        self.reports.push(report.clone());
        self.write(|output, _| output.object(&object(report)));
    }

    fn finish(mut self) -> io::Result<Vec<Report>> {
        self.end_suite();
        self.spinner.finish_and_clear();
        self.written.map(|()| self.reports)
    }

    fn end_suite(&mut self) {
        self.write(suite_table);
        self.suite_start = self.reports.len();
    }

    /// Writes something about the running suite.
    fn write(&mut self, write: impl FnOnce(&mut Output, &[Report]) -> io::Result<()>) {
        if self.written.is_ok() {
            let suite = &self.reports[self.suite_start..];
            self.written = self.spinner.suspend(|| write(self.output, suite));
        }
    }
}

fn object(report: &Report) -> serde_json::Value {
    let (result, detail) = text(&report.outcome);
    json!({
        "suite": report.suite,
        "check": report.check,
        "result": result,
        "detail": detail,
        "seconds": report.elapsed.as_secs_f64(),
    })
}

/// The checks of one suite.
fn suite_table(output: &mut Output, reports: &[Report]) -> io::Result<()> {
    let Some(first) = reports.first() else { return Ok(()) };
    let mut table = output::table(&["check", "result", ">ms"]);
    for report in reports {
        let result = match report.outcome {
            // In capitals, to stand out in a long list.
            Outcome::Failed(_) => "FAILED",
            _ => text(&report.outcome).0,
        };
        table.add_row([report.check, result, &ms(report.elapsed)]);
    }
    output.table(first.suite, &table)
}

/// One line per suite, since the tables are long.
fn suites_table(output: &mut Output, reports: &[Report]) -> io::Result<()> {
    let suites: Vec<&[Report]> = reports.chunk_by(|one, next| one.suite == next.suite).collect();
    if suites.len() < 2 {
        return Ok(());
    }
    let mut table = output::table(&["suite", ">passed", ">failed", ">skipped", ">ms"]);
    for suite in suites {
        let count = |result| suite.iter().filter(|report| text(&report.outcome).0 == result).count().to_string();
        let elapsed = ms(suite.iter().map(|report| report.elapsed).sum());
        table.add_row([suite[0].suite.to_owned(), count("passed"), count("failed"), count("skipped"), elapsed]);
    }
    output.table("all suites", &table)
}

/// The failures, and each reason for skips once, with the skipped checks.
fn reasons(reports: &[Report]) -> Vec<String> {
    let mut failed = Vec::new();
    let mut skipped: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for report in reports {
        let name = format!("{}.{}", report.suite, report.check);
        match &report.outcome {
            Outcome::Passed => {}
            Outcome::Failed(detail) => failed.push(format!("FAILED {name}: {detail}\n")),
            Outcome::Skipped(reason) => skipped.entry(reason).or_default().push(name),
        }
    }
    let skipped = skipped.iter().map(|(why, names)| format!("skipped because {why}:\n  {}\n", names.join("\n  ")));
    failed.into_iter().chain(skipped).collect()
}

fn ms(elapsed: Duration) -> String {
    format!("{:.2}", elapsed.as_secs_f64() * 1e3)
}

fn text(outcome: &Outcome) -> (&'static str, &str) {
    match outcome {
        Outcome::Passed => ("passed", ""),
        Outcome::Failed(detail) => ("failed", detail),
        Outcome::Skipped(reason) => ("skipped", reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_come_first_and_reasons_for_skips_once() {
        let report = |suite, check, outcome| Report { suite, check, outcome, elapsed: Duration::ZERO };
        let one_device = || Outcome::Skipped("there is only one device".to_owned());
        let reports = [
            report("events", "first", one_device()),
            report("events", "second", Outcome::Passed),
            report("copies", "third", one_device()),
            report("copies", "fourth", Outcome::Failed("expected 1, got 2".to_owned())),
            report("copies", "fifth", Outcome::Skipped("nothing is mapped".to_owned())),
        ];
        let expected = [
            "FAILED copies.fourth: expected 1, got 2\n",
            "skipped because nothing is mapped:\n  copies.fifth\n",
            "skipped because there is only one device:\n  events.first\n  copies.third\n",
        ];
        assert_eq!(reasons(&reports), expected);
    }
}
