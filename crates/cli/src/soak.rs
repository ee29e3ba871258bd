//! `warpool soak`: runs random programs over every allocator for a time, and shows what they did.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use indicatif::ProgressBar;
use serde_json::{Value, json};
use warpool_soak::{Campaign, Counts, Length, Options, Progress, Report, Violation};

use crate::inputs;
use crate::output::{self, CommandError, Output, Result, Verdict};

/// How often a line about the progress is written as JSON.
const INTERVAL: Duration = Duration::from_secs(60);

/// Runs random programs over every allocator, with faults, on the simulated GPU, and checks everything they do
///
/// A program draws a machine, an allocator with settings and some hundred steps, and makes them: allocations on several
/// devices and streams, uses by other streams, private pools, captures and replays, limits, trims, checkpoints. Driver
/// calls and callbacks are made to fail. It checks the contents of every block, the hazard log of the simulated GPU,
/// statistics against a naive allocation table, addresses against a naive model of PyTorch's allocator, the results of
/// replays against the same work on the host, invariants, errors without a cause, calls that do not return, objects
/// left in the driver at the end, and the memory of this process.
///
/// The run stops at the first violation and shows the command that runs only that program again. Ctrl-C ends it after
/// the current program, with the totals so far; pressed again, at once.
/// A program is a function of the seed, its campaign and its number. Those of the campaign 'threads' use several
/// threads, so their interleaving differs from run to run; all others do the same in every run.
///
/// Memory: resident memory of this process is read when a campaign's turn of half a second ends, after the C library's
/// heap has returned what it holds for later. The lowest reading of a round of all campaigns counts. After the warm-up
/// (a quarter of the time, at most five minutes) it may exceed the highest of the warm-up by a tenth and 64 MiB; more
/// is a violation.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
#[command(after_help = format!("Campaigns: {}\n\n\
    Exit status: 0 no violation, 1 a violation, 2 wrong usage, 130 ended by Ctrl-C, without a violation.\n\n\
    Examples:\n  \
    warpool soak --minutes 60 --seed 7\n  \
    warpool soak --minutes 5 --campaign device --campaign captures\n  \
    warpool soak --programs 100 --json\n  \
    warpool soak --seed 7 --campaign device --program 4711    run one program again", names().join(", ")))]
pub struct Args {
    /// How long to run; 1 if neither this nor a number of programs is given
    #[arg(long, value_name = "N", conflicts_with_all = ["programs", "program"],
        value_parser = clap::value_parser!(u64).range(1..=100_000))]
    minutes: Option<u64>,
    /// The same in seconds
    #[arg(long, value_name = "N", hide = true, conflicts_with_all = ["minutes", "programs", "program"])]
    seconds: Option<u64>,
    /// Run this number of programs of each campaign instead
    #[arg(long, value_name = "N", conflicts_with = "program", value_parser = clap::value_parser!(u64).range(1..))]
    programs: Option<u64>,
    /// Run only the program with this number; needs one campaign
    #[arg(long, value_name = "K")]
    program: Option<u64>,
    /// Seed of all programs
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Run only this campaign; can be repeated
    #[arg(long = "campaign", value_name = "NAME")]
    campaigns: Vec<String>,
    /// Leave out a kind of steps, to find out what a violation needs: panics, caching, checkpoints, captures,
    /// extremes
    #[arg(long, value_name = "KIND", hide = true)]
    skip: Vec<String>,
    /// Put a defect into the allocators under test: the run must find it
    #[arg(long, hide = true)]
    broken: bool,
    /// One JSON object per campaign, per minute and per violation, then one with the totals
    #[arg(long)]
    pub json: bool,
}

fn names() -> Vec<&'static str> {
    Campaign::ALL.map(Campaign::name).to_vec()
}

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    let options = options(args)?;
    let is_interrupted = interruptions();
    let named: Vec<&str> = options.campaigns.iter().map(|campaign| campaign.name()).collect();
    output.line(format!("seed {}, campaigns {}", options.seed, named.join(", ")))?;
    let mut printer = Printer { output, spinner: output::spinner("programs"), written: Ok(()), next: INTERVAL };
    let report = warpool_soak::run(&options, &mut |progress| {
        printer.add(progress);
        if is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let is_interrupted = report.violation.is_none() && is_interrupted();
    let shown = printer.finish().and_then(|()| print(output, &options, &report, is_interrupted));
    match shown {
        // The result counts even if the reader closed the pipe early.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ if is_interrupted => std::process::exit(inputs::INTERRUPTED),
        _ => Ok(if report.violation.is_none() { Verdict::Success } else { Verdict::Failure }),
    }
}

/// Whether Ctrl-C was pressed, from now on. The second time it ends the process.
fn interruptions() -> fn() -> bool {
    static PRESSED: AtomicBool = AtomicBool::new(false);
    let pressed = || {
        if PRESSED.swap(true, Ordering::Relaxed) {
            std::process::exit(inputs::INTERRUPTED);
        }
    };
    // Without a handler Ctrl-C ends the process, too.
    let _ = ctrlc::set_handler(pressed);
    || PRESSED.load(Ordering::Relaxed)
}

fn options(args: &Args) -> Result<Options> {
    let parse = |name: &String| {
        let unknown = || CommandError::Usage(format!("no campaign '{name}': choose from {}", names().join(", ")));
        Campaign::from_name(name).ok_or_else(unknown)
    };
    let mut campaigns: Vec<Campaign> = args.campaigns.iter().map(parse).collect::<Result<_>>()?;
    campaigns.dedup();
    if campaigns.is_empty() {
        campaigns = Campaign::ALL.to_vec();
    }
    let length = match (args.minutes, args.programs, args.program) {
        (_, _, Some(_)) if campaigns.len() != 1 => {
            return Err(CommandError::Usage("--program needs one --campaign: programs are numbered in each".into()));
        }
        (_, _, Some(program)) => Length::One(program),
        (_, Some(programs), _) => Length::Programs(programs),
        (minutes, ..) => Length::Time(Duration::from_secs(args.seconds.unwrap_or(60 * minutes.unwrap_or(1)))),
    };
    Ok(Options { seed: args.seed, campaigns, length, skip: args.skip.clone(), broken: args.broken })
}

/// The command that runs the program of a violation again.
fn command(violation: &Violation, options: &Options) -> String {
    let Violation { campaign, seed, program, .. } = violation;
    let skip: String = options.skip.iter().map(|kind| format!(" --skip {kind}")).collect();
    let broken = if options.broken { " --broken" } else { "" };
    format!("warpool soak --seed {seed} --campaign {} --program {program}{skip}{broken}", campaign.name())
}

/// Shows the progress: a spinner for people, a line per minute for programs.
struct Printer<'a> {
    output: &'a mut Output,
    spinner: ProgressBar,
    /// The first failed write; nothing is written after it.
    written: io::Result<()>,
    /// When the next line is due.
    next: Duration,
}

impl Printer<'_> {
    fn add(&mut self, progress: &Progress) {
        self.spinner.set_message(format!(
            "of {}; {} operations, {} faults, {} resident",
            progress.campaign.name(),
            progress.counts.operations,
            progress.counts.faults,
            mib(progress.bytes_resident)
        ));
        self.spinner.inc(1);
        if progress.elapsed >= self.next && self.written.is_ok() {
            self.next += INTERVAL;
            let mut object = json!({
                "kind": "progress",
                "seconds": progress.elapsed.as_secs_f64(),
                "bytes_resident": progress.bytes_resident,
            });
            add_counts(&mut object, &progress.counts);
            self.written = self.output.object(&object);
        }
    }

    fn finish(self) -> io::Result<()> {
        self.spinner.finish_and_clear();
        self.written
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn add_counts(object: &mut Value, counts: &Counts) {
    let Counts {
        programs,
        operations,
        allocations,
        faults,
        panics,
        out_of_memory,
        captures,
        captures_failed,
        replays,
        recordings,
        recordings_replayed,
    } = *counts;
    let values = json!({
        "programs": programs,
        "operations": operations,
        "allocations": allocations,
        "faults": faults,
        "panics": panics,
        "out_of_memory": out_of_memory,
        "captures": captures,
        "captures_failed": captures_failed,
        "replays": replays,
        "recordings": recordings,
        "recordings_replayed": recordings_replayed,
    });
    if let (Value::Object(object), Value::Object(values)) = (object, values) {
        object.extend(values);
    }
}

fn print(output: &mut Output, options: &Options, report: &Report, is_interrupted: bool) -> io::Result<()> {
    let columns =
        ["campaign", ">programs", ">operations", ">faults", ">panics", ">captures", ">replays", ">recordings", ">s"];
    let mut table = output::table(&columns);
    for campaign in &report.campaigns {
        let counts = &campaign.counts;
        let seconds = format!("{:.1}", campaign.elapsed.as_secs_f64());
        let numbers = [
            counts.programs,
            counts.operations,
            counts.faults,
            counts.panics,
            counts.captures,
            counts.replays,
            counts.recordings,
        ];
        let cells = numbers.iter().map(ToString::to_string).chain([seconds]);
        table.add_row([campaign.campaign.name().to_owned()].into_iter().chain(cells));
        let mut object = json!({
            "kind": "campaign",
            "campaign": campaign.campaign.name(),
            "seed": options.seed,
            "deterministic": campaign.campaign.is_deterministic(),
            "seconds": campaign.elapsed.as_secs_f64(),
        });
        add_counts(&mut object, counts);
        output.object(&object)?;
    }
    output.table("campaigns", &table)?;
    if report.campaigns.iter().any(|campaign| !campaign.campaign.is_deterministic()) {
        output.line("The programs of 'threads' interleave differently in every run; all others repeat exactly.")?;
    }
    if let Some(violation) = &report.violation {
        print_violation(output, violation, options)?;
    }
    print_summary(output, options, report, is_interrupted)
}

fn print_violation(output: &mut Output, violation: &Violation, options: &Options) -> io::Result<()> {
    let command = command(violation, options);
    output.object(&json!({
        "kind": "violation",
        "campaign": violation.campaign.name(),
        "seed": violation.seed,
        "program": violation.program,
        "message": violation.message,
        "reproduced": violation.reproduced,
        "steps": violation.steps,
        "command": command,
    }))?;
    output.line(format!("\nVIOLATION in program {} of {}:", violation.program, violation.campaign.name()))?;
    output.line(&violation.message)?;
    output.line("\nits last steps (with --program: all):")?;
    for step in &violation.steps {
        output.line(format!("  {step}"))?;
    }
    let again = match violation.reproduced {
        Some(true) => " (a second run found the same)",
        Some(false) => " (a second run did not find the same)",
        None => "",
    };
    output.line(format!("\nrun it again{again}:\n  {command}\n"))
}

fn print_summary(output: &mut Output, options: &Options, report: &Report, is_interrupted: bool) -> io::Result<()> {
    let (counts, resident) = (report.counts(), report.resident);
    let violations = u64::from(report.violation.is_some());
    let mut object = json!({ "kind": "summary", "seed": options.seed });
    add_counts(&mut object, &counts);
    if let Value::Object(object) = &mut object {
        object.extend([
            ("bytes_resident_start".to_owned(), resident.start.into()),
            ("bytes_resident_warm".to_owned(), resident.warm.into()),
            ("bytes_resident_peak".to_owned(), resident.peak.into()),
            ("bytes_resident_end".to_owned(), resident.end.into()),
            ("seconds".to_owned(), report.elapsed.as_secs_f64().into()),
            ("violations".to_owned(), violations.into()),
            ("interrupted".to_owned(), is_interrupted.into()),
        ]);
    }
    output.object(&object)?;
    output.line(format!(
        "resident: {} at the start, {} after the warm-up, {} at the peak, {} at the end",
        mib(resident.start),
        mib(resident.warm),
        mib(resident.peak),
        mib(resident.end)
    ))?;
    output.line(format!(
        "seed {}: {} programs, {} operations, {} faults, {} panics, {} captures, {} replays, {} recordings in {:.0} s; \
         {violations} violations{}",
        options.seed,
        counts.programs,
        counts.operations,
        counts.faults,
        counts.panics,
        counts.captures,
        counts.replays,
        counts.recordings,
        report.elapsed.as_secs_f64(),
        if is_interrupted { "; ended by Ctrl-C" } else { "" },
    ))
}
