//! `warpool selftest`: does a driver keep the contract, and what stands on it work? Runs the suites and shows what they
//! report.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use indicatif::ProgressBar;
use serde_json::json;
use warpool_conformance::{Options, Outcome, Report, Suite, Summary};

use crate::driver::{self, SimArgs};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::{foreign, processes};

/// Checks that a driver keeps the contract, call by call, and that what stands on it works: streams, events, memory,
/// handles, generators, graphs
///
/// Runs small programs on real streams and compares exactly what comes out.
/// A check is skipped only where the device lacks what it is about, and says so.
/// The last suite breaks the device on purpose, for this process only.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
#[command(after_help = format!("Suites, in the order in which they run:\n  {}\n\n\
    Exit status: 0 if no check failed, 1 if one did, 2 if they could not be run.\n\n\
    Examples:\n  \
    warpool selftest --driver sim\n  \
    warpool selftest --driver sim --seed 7 --suite capture --suite graphs\n  \
    warpool selftest --driver cuda --device 1 --json > selftest.jsonl", listed()))]
pub struct Args {
    /// The driver to check: sim or cuda
    #[arg(long, value_name = "NAME")]
    driver: String,
    /// The device to check
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Where random sizes, contents and the simulated GPU's timing come from
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Only this suite; may be given several times
    #[arg(long = "suite", value_name = "NAME")]
    suites: Vec<String>,
    /// Leave out the suite that breaks the device
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

    // Names are looked up while the device still answers: the last suite breaks it.
    let name = driver.device_properties(device)?.name;
    output.line(format!("driver {}, {device} ({name}), seed {}\n", driver.kind(), args.seed))?;
    let mut printer =
        Printer { output, reports: Vec::new(), suite_begun: 0, ended: Ok(()), spinner: output::spinner("checks") };
    let summary = warpool_conformance::run(&driver, &options, &mut |report| printer.take(report));
    let shown = printer.finish().and_then(|reports| conclude(output, &reports, summary));
    match shown {
        // The answer stands, also where the reader left before it came.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(if summary.failed == 0 { Verdict::Success } else { Verdict::Failure }),
    }
}

/// What a person reads first, and so comes last.
fn conclude(output: &mut Output, reports: &[Report], summary: Summary) -> io::Result<()> {
    overview(output, reports)?;
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

fn listed() -> String {
    names().chunks(8).map(|line| line.join(", ")).collect::<Vec<_>>().join(",\n  ")
}

/// Refuses suites that are not there, and those that were forbidden in the same breath.
fn check_suites(args: &Args) -> Result<()> {
    for asked in &args.suites {
        if !names().contains(&asked.as_str()) {
            return Err(CommandError::Usage(format!(
                "there is no suite '{asked}': choose from {}",
                names().join(", ")
            )));
        }
        if args.no_destructive && destructive().any(|name| name == asked) {
            return Err(CommandError::Usage(format!("the suite '{asked}' is what --no-destructive leaves out")));
        }
    }
    Ok(())
}

/// Shows each suite as a table once it has ended, or each check as an object at once.
struct Printer<'a> {
    output: &'a mut Output,
    reports: Vec<Report>,
    /// Where in the reports the suite that runs begins.
    suite_begun: usize,
    /// The first write that failed; nothing is written after it.
    ended: io::Result<()>,
    spinner: ProgressBar,
}

impl Printer<'_> {
    fn take(&mut self, report: &Report) {
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
        self.ended.map(|()| self.reports)
    }

    fn end_suite(&mut self) {
        self.write(suite_table);
        self.suite_begun = self.reports.len();
    }

    /// Writes something about the suite that runs.
    fn write(&mut self, write: impl FnOnce(&mut Output, &[Report]) -> io::Result<()>) {
        if self.ended.is_ok() {
            let suite = &self.reports[self.suite_begun..];
            self.ended = self.spinner.suspend(|| write(self.output, suite));
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
            // Loud, to be found in a long list.
            Outcome::Failed(_) => "FAILED",
            _ => text(&report.outcome).0,
        };
        table.add_row([report.check, result, &ms(report.elapsed)]);
    }
    output.table(first.suite, &table)
}

/// One line per suite, since the tables are long.
fn overview(output: &mut Output, reports: &[Report]) -> io::Result<()> {
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

/// Why checks failed, and each reason to skip once, with the checks that it kept from running.
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
    let skipped = skipped.iter().map(|(why, names)| format!("skipped, since {why}:\n  {}\n", names.join("\n  ")));
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
    fn failures_come_first_and_a_reason_to_skip_comes_once() {
        let report = |suite, check, outcome| Report { suite, check, outcome, elapsed: Duration::ZERO };
        let alone = || Outcome::Skipped("there is only one device".to_owned());
        let reports = [
            report("events", "first", alone()),
            report("events", "second", Outcome::Passed),
            report("copies", "third", alone()),
            report("copies", "fourth", Outcome::Failed("expected 1, got 2".to_owned())),
            report("copies", "fifth", Outcome::Skipped("nothing is mapped".to_owned())),
        ];
        let expected = [
            "FAILED copies.fourth: expected 1, got 2\n",
            "skipped, since nothing is mapped:\n  copies.fifth\n",
            "skipped, since there is only one device:\n  events.first\n  copies.third\n",
        ];
        assert_eq!(reasons(&reports), expected);
    }
}
