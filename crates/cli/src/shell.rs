//! `warpool completions` and `warpool man`, made from the definition of the command line.

use std::fmt::Write as _;

use clap::{Arg, Command, ValueEnum};

use crate::output::{Output, Result, Verdict};

/// Prints completions for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    warpool completions bash > ~/.local/share/bash-completion/completions/warpool\n  \
    warpool completions zsh > ~/.zfunc/_warpool\n  \
    warpool completions fish > ~/.config/fish/completions/warpool.fish")]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Prints the manual page, for man -l
#[derive(Debug, clap::Args)]
pub struct ManArgs {}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

pub fn completions(args: &CompletionsArgs, command: &Command, output: &mut Output) -> Result<Verdict> {
    let script = match args.shell {
        Shell::Bash => bash(command),
        Shell::Zsh => zsh(command),
        Shell::Fish => fish(command),
    };
    output.line(script.trim_end())?;
    Ok(Verdict::Success)
}

pub fn man(command: &Command, output: &mut Output) -> Result<Verdict> {
    output.line(man_page(command).trim_end())?;
    Ok(Verdict::Success)
}

fn subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set())
}

fn options(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| arg.get_long().is_some() && !arg.is_hide_set())
}

/// The first line of a help text.
fn summary(help: Option<&clap::builder::StyledStr>) -> String {
    help.map_or_else(String::new, |help| help.to_string().lines().next().unwrap_or_default().to_owned())
}

/// The words after a command: its subcommands and options.
fn words(command: &Command) -> String {
    let names = subcommands(command).map(|command| command.get_name().to_owned());
    let options = options(command).filter_map(|arg| arg.get_long().map(|long| format!("--{long}")));
    names.chain(options).chain(["--help".to_owned()]).collect::<Vec<_>>().join(" ")
}

fn bash(command: &Command) -> String {
    let names: Vec<&str> = subcommands(command).map(Command::get_name).collect();
    let mut script = format!(
        "_warpool() {{\n    local cur=${{COMP_WORDS[COMP_CWORD]}} command= word\n    COMPREPLY=()\n    for word in \
         \"${{COMP_WORDS[@]:1:COMP_CWORD-1}}\"; do\n        case $word in\n            {}) command=$word; break ;;\n\
         \x20       esac\n    done\n    case $command in\n",
        names.join("|")
    );
    for command in subcommands(command) {
        let _ = writeln!(script, "        {}) local words=\"{}\" ;;", command.get_name(), words(command));
    }
    let _ = write!(
        script,
        "        *) local words=\"{}\" ;;\n    esac\n    if [[ -z $command || $cur == -* ]]; then\n        \
         COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n    else\n        COMPREPLY=($(compgen -W \"$words\" -- \
         \"$cur\") $(compgen -f -- \"$cur\"))\n    fi\n}}\ncomplete -o filenames -F _warpool warpool\n",
        words(command)
    );
    script
}

fn zsh(command: &Command) -> String {
    let quoted = |text: &str| text.replace('\'', "'\\''").replace('[', "\\[").replace(']', "\\]").replace(':', "\\:");
    let mut script = "#compdef warpool\n_warpool() {\n    local -a commands\n    commands=(\n".to_owned();
    for command in subcommands(command) {
        let _ = writeln!(script, "        '{}:{}'", command.get_name(), quoted(&summary(command.get_about())));
    }
    script.push_str(
        "    )\n    if (( CURRENT == 2 )); then\n        _describe command commands\n        return\n    fi\n    case \
         $words[2] in\n",
    );
    for command in subcommands(command) {
        let _ = write!(script, "        {}) _arguments", command.get_name());
        for arg in options(command) {
            let long = arg.get_long().unwrap_or_default();
            let value = if arg.get_action().takes_values() { ":value:_files" } else { "" };
            let _ = write!(script, " '--{long}[{}]{value}'", quoted(&summary(arg.get_help())));
        }
        script.push_str(" '*:file:_files' ;;\n");
    }
    script.push_str("    esac\n}\n_warpool \"$@\"\n");
    script
}

fn fish(command: &Command) -> String {
    let quoted = |text: &str| text.replace('\\', "\\\\").replace('\'', "\\'");
    let mut script = String::new();
    for command in subcommands(command) {
        let (name, about) = (command.get_name(), quoted(&summary(command.get_about())));
        let _ = writeln!(script, "complete -c warpool -n __fish_use_subcommand -f -a {name} -d '{about}'");
        for arg in options(command) {
            let (long, help) = (arg.get_long().unwrap_or_default(), quoted(&summary(arg.get_help())));
            let value = if arg.get_action().takes_values() { " -r" } else { "" };
            let seen = format!("__fish_seen_subcommand_from {name}");
            let _ = writeln!(script, "complete -c warpool -n '{seen}' -l {long}{value} -d '{help}'");
        }
    }
    script
}

/// A manual page in the format of man(7).
fn man_page(command: &Command) -> String {
    let escaped = |text: &str| {
        let text = text.replace('\\', "\\\\").replace('-', "\\-");
        // A dot or a quote at the start of a line is a request.
        text.lines()
            .map(|line| if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line.to_owned() })
            .collect::<Vec<_>>()
            .join("\n")
    };
    let version = command.get_version().unwrap_or_default();
    let about = escaped(&command.get_about().map_or_else(String::new, ToString::to_string));
    let mut page = format!(".TH WARPOOL 1 \"\" \"warpool {version}\"\n.SH NAME\nwarpool \\- {about}\n");
    page.push_str(".SH SYNOPSIS\n.B warpool\n[\\-q] COMMAND [OPTION]... [FILE]...\n.SH COMMANDS\n");
    for command in subcommands(command) {
        let about = command.get_long_about().or(command.get_about()).map_or_else(String::new, ToString::to_string);
        let _ = write!(page, ".SS {}\n{}\n", command.get_name(), escaped(&about).replace("\n\n", "\n.PP\n"));
        for arg in options(command) {
            let short = arg.get_short().map_or_else(String::new, |short| format!("\\-{short}, "));
            let takes = arg.get_action().takes_values();
            let values = arg.get_value_names().filter(|_| takes).and_then(|names| names.first());
            let value = values.map_or_else(String::new, |name| format!(" {name}"));
            let long = escaped(arg.get_long().unwrap_or_default());
            let help = arg.get_long_help().or(arg.get_help()).map_or_else(String::new, ToString::to_string);
            let _ = write!(page, ".TP\n.B {short}\\-\\-{long}{value}\n{}\n", escaped(&help));
        }
    }
    page.push_str(
        ".SH EXIT STATUS\n0 success, 1 a check failed or a limit was exceeded, 2 wrong usage or something is \
         missing.\n.SH ENVIRONMENT\n.TP\n.B NO_COLOR\nNo colours, if it is set.\n",
    );
    page
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn every_command_and_option_is_in_each() {
        let command = crate::Cli::command();
        let texts = [bash(&command), zsh(&command), fish(&command), man_page(&command).replace("\\-", "-")];
        for text in &texts {
            for command in subcommands(&command) {
                assert!(text.contains(command.get_name()), "{} in {text}", command.get_name());
                for arg in options(command) {
                    let long = arg.get_long().expect("it was filtered");
                    assert!(text.contains(long), "--{long} of {} in {text}", command.get_name());
                }
            }
        }
    }
}
