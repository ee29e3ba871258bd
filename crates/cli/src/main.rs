//! The command `warpool`: arguments in, tables or JSON lines out. It holds no logic of its own: one file per command
//! asks the library and shows the answer. But for one suite of checks, in `processes`, which needs a second process and
//! starts this binary for it.
//!
//! Every command exits with 0 if all is well, 1 if the answer is a bad one, 2 if it could not be asked.

mod bench;
mod driver;
mod foreign;
mod info;
mod output;
mod processes;
mod replay;
mod selftest;
mod settings;
mod size;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

use output::{Output, Stop, Verdict};
use processes::peer;

#[derive(Debug, Parser)]
#[command(
    name = "warpool",
    version,
    about = "The layer between a GPU program and the CUDA driver, on a real GPU or a simulated one",
    after_help = "Every command takes --json: one JSON object per line on stdout, and nothing else there.\n\
        Exit status: 0 all is well, 1 the answer is a bad one, 2 bad usage or something is missing.\n\n\
        Examples:\n  \
        warpool replay snapshot.pickle    how a recorded program used memory, and whether the model is right\n  \
        warpool replay snapshot.pickle --settings expandable_segments:True    what would have been\n  \
        warpool settings max_split_size_mb:200    what a settings string means\n  \
        warpool info                      what this machine offers\n  \
        warpool selftest --driver sim     does the simulated GPU keep the contract?\n  \
        warpool selftest --driver cuda    does this GPU?\n  \
        warpool bench sim                 how fast is the simulated GPU?"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Info(info::Args),
    Selftest(selftest::Args),
    Replay(replay::Args),
    Settings(settings::Args),
    Bench(bench::Args),
    #[command(name = peer::NAME, hide = true)]
    Peer(peer::Args),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    // What a library can only warn of, such as an object that could not be destroyed. The checks of a selftest provoke
    // such warnings on purpose.
    let level = if matches!(cli.command, Command::Selftest(_)) { LevelFilter::ERROR } else { LevelFilter::WARN };
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level).without_time().init();
    let result = match cli.command {
        Command::Info(args) => info::run(&args, &mut Output::stdout(args.json)),
        Command::Selftest(args) => selftest::run(&args, &mut Output::stdout(args.json)),
        Command::Replay(args) => replay::run(&args, &mut Output::stdout(args.json)),
        Command::Settings(args) => settings::run(&args, &mut Output::stdout(args.json)),
        Command::Bench(args) => bench::run(&args, &mut Output::stdout(args.json)),
        Command::Peer(args) => peer::run(&args),
    };
    match result {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::FAILURE,
        // Whoever reads has read enough, as `head` does.
        Err(Stop::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(stop) => {
            eprintln!("warpool: {stop}");
            ExitCode::from(stop.status())
        }
    }
}

/// Ends on arguments that cannot be used, or that ask for help.
fn refuse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // Help and version. A closed pipe is no concern here either.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
    } else {
        eprintln!("warpool: {} (--help tells more)", one_line(&error.to_string()));
    }
    ExitCode::from(2)
}

/// What clap has to say, without the usage that it repeats below, and of its tips only those about a name that is
/// almost right.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim);
    let said = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let kept = said.filter(|line| !line.is_empty() && !line.starts_with("tip: to pass"));
    let line = kept.collect::<Vec<_>>().join(" ").replace(" tip: ", "; ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_arguments_are_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_refusal_is_one_line() {
        let refusal = |arguments: &[&str]| one_line(&Cli::try_parse_from(arguments).unwrap_err().to_string());
        let missing = refusal(&["warpool", "selftest"]);
        assert_eq!(missing, "the following required arguments were not provided: --driver <NAME>");
        let unknown = refusal(&["warpool", "info", "--jsn"]);
        assert_eq!(unknown, "unexpected argument '--jsn' found; a similar argument exists: '--json'");
        assert_eq!(refusal(&["warpool", "bench", "sim", "--seed", "3"]), "unexpected argument '--seed' found");
    }
}
