//! `warpool selftest`: does a driver keep the contract? Runs the conformance suite and shows what it reports.

use std::collections::BTreeSet;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use warpool_driver::conformance::{self, Options, Outcome, Report};

use crate::driver::{self, SimArgs};
use crate::output::{self, Output, Result, Stop, Verdict};

/// Checks that a driver keeps the contract, call by call
///
/// Runs small programs on real streams and compares exactly what comes out. A check is skipped only where the device
/// lacks what it is about, and says so. The last suite breaks the device on purpose, for this process only.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 if no check failed, 1 if one did, 2 if they could not be run.\n\n\
    Examples:\n  \
    warpool selftest --driver sim\n  \
    warpool selftest --driver sim --seed 7 --suite capture --suite graphs\n  \
    warpool selftest --driver cuda --device 1 --json > selftest.jsonl")]
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
    known_suites(&args.suites)?;
    let driver = driver::open(&args.driver, &args.sim, args.seed)?;
    let device = driver::device(&*driver, args.device)?;
    let options = Options { device, seed: args.seed, suites: args.suites.clone(), destructive: !args.no_destructive };

    // Names are looked up while the device still answers: the last suite breaks it.
    let name = driver.device_properties(device)?.name;
    output.line(format!("driver {}, {device} ({name}), seed {}\n", driver.kind(), args.seed))?;
    let mut printer = Printer { output, reports: Vec::new(), ended: Ok(()), spinner: spinner() };
    let summary = conformance::run(&*driver, &options, &mut |report| printer.take(report));
    printer.finish()?;

    let (passed, failed, skipped) = (summary.passed, summary.failed, summary.skipped);
    output.object(&json!({ "passed": passed, "failed": failed, "skipped": skipped }))?;
    output.line(format!("{passed} passed, {failed} failed, {skipped} skipped"))?;
    Ok(if failed == 0 { Verdict::Good } else { Verdict::Bad })
}

fn known_suites(asked: &[String]) -> Result<()> {
    let known: Vec<&str> = conformance::suites().iter().map(|suite| suite.name).collect();
    match asked.iter().find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(Stop::Usage(format!("there is no suite '{name}': choose of {}", known.join(", ")))),
    }
}

/// A sign of life on stderr; shows nothing unless that is a terminal.
fn spinner() -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {pos} checks, last {msg}") {
        spinner.set_style(style);
    }
    spinner
}

/// Shows each suite as a table once it has ended, or each check as an object at once.
struct Printer<'a> {
    output: &'a mut Output,
    /// The checks of the suite that runs.
    reports: Vec<Report>,
    /// The first write that failed; nothing is written after it.
    ended: std::io::Result<()>,
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

    fn finish(mut self) -> std::io::Result<()> {
        self.end_suite();
        self.spinner.finish_and_clear();
        self.ended
    }

    fn end_suite(&mut self) {
        self.write(table_of);
        self.reports.clear();
    }

    fn write(&mut self, write: impl FnOnce(&mut Output, &[Report]) -> std::io::Result<()>) {
        if self.ended.is_ok() {
            let Self { output, reports, spinner, .. } = self;
            self.ended = spinner.suspend(|| write(output, reports));
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

/// The table of one suite, and below it what failed and why, and each reason to skip once.
fn table_of(output: &mut Output, reports: &[Report]) -> std::io::Result<()> {
    let Some(first) = reports.first() else { return Ok(()) };
    let mut table = output::table(&["check", "result", ">ms"]);
    for report in reports {
        let ms = format!("{:.2}", report.elapsed.as_secs_f64() * 1e3);
        table.add_row([report.check, text(&report.outcome).0, ms.as_str()]);
    }
    output.table(first.suite, &table)?;

    let mut reasons = BTreeSet::new();
    for report in reports {
        match &report.outcome {
            Outcome::Passed => {}
            Outcome::Failed(detail) => output.line(format!("FAILED {}.{}: {detail}\n", report.suite, report.check))?,
            Outcome::Skipped(reason) => drop(reasons.insert(reason)),
        }
    }
    for reason in reasons {
        let skipped = reports.iter().filter(|report| report.outcome == Outcome::Skipped(reason.clone()));
        let checks: Vec<&str> = skipped.map(|report| report.check).collect();
        output.line(format!("skipped {}: {reason}\n", checks.join(", ")))?;
    }
    Ok(())
}

fn text(outcome: &Outcome) -> (&'static str, &str) {
    match outcome {
        Outcome::Passed => ("passed", ""),
        Outcome::Failed(detail) => ("failed", detail),
        Outcome::Skipped(reason) => ("skipped", reason),
    }
}
