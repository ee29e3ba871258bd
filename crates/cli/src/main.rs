//! The command `warpool`: one file per subcommand, which parses arguments, calls the library and prints tables or JSON
//! lines. The exception is the conformance suite in `processes`, which starts this binary as its second process.
//!
//! Exit status of every command: 0 success, 1 a check failed or a limit was exceeded, 2 wrong usage or something is
//! missing. `record` has that of the command that it runs.

mod bench;
mod capacity;
mod diff;
mod driver;
mod explain;
mod files;
mod fitting;
mod foreign;
mod info;
mod inputs;
mod limit;
mod output;
mod processes;
mod ranks;
mod record;
#[cfg(test)]
mod reference;
mod replay;
mod selftest;
mod settings;
mod shell;
mod soak;
mod top;
mod tune;
mod view;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;
use warpool_report::size;

use output::{CommandError, Output, Verdict};
use processes::peer;

#[derive(Debug, Parser)]
#[command(
    name = "warpool",
    version,
    about = "GPU memory, streams, handles and graphs: replay recordings, check a driver, measure costs",
    after_help = "Every command takes --json: one JSON object per line on stdout, and nothing else there.\n\
        Exit status: 0 success, 1 a check failed or a limit was exceeded, 2 wrong usage or something is missing.\n\n\
        Examples:\n  \
        warpool explain oom.pickle                explain why a program ran out of memory\n  \
        warpool explain snapshots/                compare the ranks of a job, and find the one that limits it\n  \
        warpool tune train.pickle                 find the settings that reserve least\n  \
        warpool view oom.pickle -o report.html    draw memory over time, and who holds it, in a page\n  \
        warpool replay snapshot.pickle            replay a PyTorch memory snapshot and compare every address\n  \
        warpool replay snapshot.pickle --settings expandable_segments:True    replay it with other settings\n  \
        warpool settings max_split_size_mb:200    explain a settings string\n  \
        warpool top                               show the GPU memory of running processes\n  \
        warpool record -- python train.py         show whose GPU memory it was, and record out-of-memory\n  \
        warpool info                              list devices, their features and NVIDIA's libraries\n  \
        warpool selftest --driver sim             run the conformance checks on the simulated GPU\n  \
        warpool selftest --driver cuda            run them on a real GPU\n  \
        warpool soak --minutes 10                 run random programs with faults over every allocator\n  \
        warpool bench sim                         measure the simulated GPU"
)]
struct Cli {
    /// Only the answer: no progress, no remarks
    #[arg(short, long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Info(info::Args),
    Selftest(selftest::Args),
    Explain(explain::Args),
    Replay(replay::Args),
    Tune(tune::Args),
    Diff(diff::Args),
    View(view::Args),
    Summarize(ranks::SummarizeArgs),
    Merge(ranks::MergeArgs),
    Settings(settings::Args),
    Top(top::Args),
    Limit(limit::Args),
    Record(record::Args),
    Soak(soak::Args),
    Bench(bench::Args),
    Completions(shell::CompletionsArgs),
    Man(shell::ManArgs),
    #[command(name = peer::NAME, hide = true)]
    Peer(peer::Args),
    #[command(name = top::demo::NAME, hide = true)]
    Page(top::demo::Args),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit_with_usage(&error),
    };
    let level = match cli.command {
        // They provoke warnings on purpose (objects that cannot be destroyed, for example).
        Command::Selftest(_) | Command::Soak(_) => LevelFilter::ERROR,
        _ => LevelFilter::WARN,
    };
    let log = tracing_subscriber::fmt().with_writer(|| output::Log).with_max_level(level).without_time();
    // It would report a failure of stderr on stderr, and panic.
    log.log_internal_errors(false).init();
    let result = match cli.command {
        Command::Info(args) => info::run(&args, &mut Output::stdout(args.json)),
        Command::Selftest(args) => selftest::run(&args, &mut Output::stdout(args.json)),
        Command::Explain(args) => explain::run(&args, cli.quiet, &mut Output::stdout(args.json)),
        Command::Replay(args) => replay::run(&args, cli.quiet, &mut Output::stdout(args.json)),
        Command::Diff(args) => diff::run(&args, cli.quiet, &mut Output::stdout(args.json)),
        Command::View(args) => view::run(&args, cli.quiet, &mut Output::stdout(args.json)),
        // Without `-o` the part itself is the output, which is JSON.
        Command::Summarize(args) => {
            let mut output = Output::stdout(args.json || args.output.is_none());
            ranks::summarize(&args, cli.quiet, &mut output)
        }
        Command::Merge(args) => ranks::merge(&args, &mut Output::stdout(args.json)),
        Command::Tune(args) => tune::run(&args, cli.quiet, &mut Output::stdout(args.json)),
        Command::Settings(args) => settings::run(&args, &mut Output::stdout(args.json)),
        Command::Top(args) => top::run(&args, &mut Output::stdout(args.json)),
        Command::Limit(args) => limit::run(&args, &mut Output::stdout(args.json)),
        Command::Record(args) => record::run(&args, cli.quiet, &mut Output::stdout(args.json)),
        Command::Soak(args) => soak::run(&args, &mut Output::stdout(args.json)),
        Command::Bench(args) => bench::run(&args, &mut Output::stdout(args.json)),
        Command::Completions(args) => shell::completions(&args, &Cli::command(), &mut Output::stdout(false)),
        Command::Man(_) => shell::man(&Cli::command(), &mut Output::stdout(false)),
        Command::Peer(args) => peer::run(&args),
        Command::Page(args) => top::demo::run(&args),
    };
    match result {
        Ok(Verdict::Success) => ExitCode::SUCCESS,
        Ok(Verdict::Failure) => ExitCode::FAILURE,
        Ok(Verdict::Status(status)) => ExitCode::from(status),
        // The reader closed the pipe, as `head` does.
        Err(CommandError::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            output::message(format_args!("warpool: {error}"));
            ExitCode::from(error.status())
        }
    }
}

/// Prints help, the version, or what is wrong with the arguments.
fn exit_with_usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // Help or version; a closed pipe is ignored here too.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
    } else {
        output::message(format_args!("warpool: {} (see --help)", one_line(&error.to_string())));
    }
    ExitCode::from(2)
}

/// Clap's message on one line, without the usage block; with only those tips that are about a misspelled name.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim);
    let head = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let kept = head.filter(|line| !line.is_empty() && !line.starts_with("tip: to pass"));
    let line = kept.collect::<Vec<_>>().join(" ").replace(" tip: ", "; ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn usage_error_is_one_line() {
        let message = |arguments: &[&str]| one_line(&Cli::try_parse_from(arguments).unwrap_err().to_string());
        let missing = message(&["warpool", "selftest"]);
        assert_eq!(missing, "the following required arguments were not provided: --driver <NAME>");
        let unknown = message(&["warpool", "info", "--jsn"]);
        assert_eq!(unknown, "unexpected argument '--jsn' found; a similar argument exists: '--json'");
        assert_eq!(message(&["warpool", "bench", "sim", "--seed", "3"]), "unexpected argument '--seed' found");
    }
}
