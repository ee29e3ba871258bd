//! The page of the book about the command, `docs/reference/command.md`, made from the definition of the command line. A
//! test compares the two; it writes the page if WARPOOL_WRITE_REFERENCE is set:
//!
//! ```sh
//! WARPOOL_WRITE_REFERENCE=1 cargo test -p warpool-cli --bin warpool reference
//! ```

use std::fmt::Write as _;
use std::path::Path;

use clap::builder::StyledStr;
use clap::{Arg, Command, CommandFactory as _};

const HEAD: &str = "\
<!-- Generated from the definition of the command line by crates/cli/src/reference.rs. Do not edit. -->

# The command

";

/// The exit status, which each command has in words of its own.
const STATUS: &str = "Exit status: ";

fn page(command: &Command) -> String {
    let mut page = HEAD.to_owned();
    let about = text(command.get_about());
    let _ = writeln!(page, "{}\n", wrapped(&format!("`warpool COMMAND [OPTION]... [FILE]...`: {about}.")));
    let _ = writeln!(page, "| command | what it does |\n|---|---|");
    for command in commands(command) {
        let name = command.get_name();
        let _ = writeln!(page, "| [`{name}`](#warpool-{name}) | {} |", cell(&text(command.get_about())));
    }
    page.push('\n');
    after(&mut page, command);
    for command in commands(command) {
        one(&mut page, command);
    }
    page
}

fn commands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

fn one(page: &mut String, command: &Command) {
    let _ = writeln!(page, "\n## `warpool {}`\n", command.get_name());
    let about = text(command.get_long_about().or(command.get_about()));
    for paragraph in about.split("\n\n") {
        let _ = writeln!(page, "{}.\n", wrapped(&prose(paragraph.trim_end_matches('.'))));
    }
    let shown: Vec<&Arg> = command.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_id() != "help").collect();
    if !shown.is_empty() {
        let _ = writeln!(page, "| option | meaning |\n|---|---|");
        // Files come first, as in the command's own help.
        let (options, files): (Vec<&Arg>, Vec<&Arg>) = shown.into_iter().partition(|arg| arg.get_long().is_some());
        for arg in files.into_iter().chain(options) {
            let _ = writeln!(page, "| `{}` | {} |", name(arg), cell(&meaning(arg)));
        }
        page.push('\n');
    }
    after(page, command);
}

/// `-o, --output PAGE`.
fn name(arg: &Arg) -> String {
    let value = arg.get_value_names().filter(|_| arg.get_action().takes_values()).and_then(|names| names.first());
    let value = value.map(ToString::to_string);
    let Some(long) = arg.get_long() else {
        let several = arg.get_num_args().is_some_and(|range| range.max_values() > 1);
        return format!("{}{}", value.unwrap_or_default(), if several { "..." } else { "" });
    };
    let short = arg.get_short().map_or_else(String::new, |short| format!("-{short}, "));
    format!("{short}--{long}{}", value.map_or_else(String::new, |value| format!(" {value}")))
}

fn meaning(arg: &Arg) -> String {
    let mut meaning = text(arg.get_long_help().or(arg.get_help()));
    let values: Vec<String> = arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if !values.is_empty() && arg.get_action().takes_values() {
        let _ = write!(meaning, ": {}", values.join(", "));
    }
    let defaults: Vec<String> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    if !defaults.is_empty() && arg.get_action().takes_values() {
        let _ = write!(meaning, " [default: {}]", defaults.join(" "));
    }
    meaning
}

fn text(styled: Option<&StyledStr>) -> String {
    styled.map_or_else(String::new, ToString::to_string)
}

/// Text in lines of at most 119 columns, so that a full stop has room.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is one");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > 119 {
            lines.push(word.to_owned());
        } else {
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
    }
    lines.join("\n")
}

/// Text in a cell of a table.
fn cell(text: &str) -> String {
    prose(text).replace('|', "\\|").replace('\n', " ")
}

/// Options and names in angle brackets as code, outside of what is code already: they are no markup.
fn prose(text: &str) -> String {
    let parts = text.split('`').enumerate().map(|(at, part)| {
        if at % 2 == 1 {
            return format!("`{part}`");
        }
        let words = part.split_inclusive([' ', '\n']).map(|word| {
            let start = word.len() - word.trim_start_matches(['(', '"']).len();
            // A call keeps its brackets.
            let is_call = word[start..].contains('(');
            let is_end = |letter| ".,;:".contains(letter) || (!is_call && ")\"".contains(letter));
            let end = word.trim_end().trim_end_matches(is_end).len();
            if start >= end {
                return word.to_owned();
            }
            let (before, inner, after) = (&word[..start], &word[start..end], &word[end..]);
            let is_code = inner.starts_with("--") || inner.contains(['_', '<', '*', '[']) && !inner.starts_with('[');
            if is_code { format!("{before}`{inner}`{after}") } else { word.to_owned() }
        });
        words.collect()
    });
    parts.collect()
}

/// What follows the options in the command's help: exit status, lists, examples.
fn after(page: &mut String, command: &Command) {
    for part in text(command.get_after_help()).split("\n\n") {
        let (head, lines) = part.split_once('\n').unwrap_or((part, ""));
        let lines: Vec<&str> = lines.lines().filter(|line| !line.trim().is_empty()).collect();
        match head {
            "" => {}
            "Examples:" => examples(page, &lines),
            _ if head.ends_with(':') && lines.iter().all(|line| line.trim().contains("  ")) => {
                let _ = writeln!(page, "{head}\n");
                for line in lines {
                    let (name, what) = line.trim().split_once(' ').unwrap_or((line, ""));
                    let _ = writeln!(page, "{}", wrapped(&format!("- `{name}`: {}", prose(what.trim()))));
                }
                page.push('\n');
            }
            _ if head.ends_with(':') => {
                let list = lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
                let _ = writeln!(page, "{}\n", wrapped(&format!("{head} {list}")));
            }
            _ => {
                for line in part.lines() {
                    let (head, line) = line.strip_prefix(STATUS).map_or(("", line), |line| ("*Exit status*: ", line));
                    let _ = writeln!(page, "{}\n", wrapped(&format!("{head}{}", prose(line))));
                }
            }
        }
    }
    while page.ends_with("\n\n") {
        page.pop();
    }
}

/// Examples as blocks, with the marks of `tests/book.py`, which runs them.
fn examples(page: &mut String, lines: &[&str]) {
    let mut of_kind: Vec<(&str, Vec<String>)> = Vec::new();
    for line in lines {
        // A comment, if any, stands after several spaces.
        let line = line.trim();
        let (example, comment) = line.split_once("  ").unwrap_or((line, ""));
        let example = match comment.trim() {
            "" => example.to_owned(),
            comment => format!("{example:<40}  # {comment}"),
        };
        let language = match line {
            _ if line.contains("--driver cuda") => "sh,gpu",
            _ if line.starts_with("warpool record ") => "sh,gpu",
            _ if line.starts_with("warpool limit ") => "sh,live",
            _ if line.starts_with("warpool top") && !line.contains("--once") && !line.contains("--json") => "sh,live",
            _ if ["bench", "selftest", "soak", "tune"]
                .iter()
                .any(|slow| line.starts_with(&format!("warpool {slow} "))) =>
            {
                "sh,slow"
            }
            _ => "sh",
        };
        match of_kind.iter_mut().find(|(kind, _)| *kind == language) {
            Some((_, examples)) => examples.push(example),
            None => of_kind.push((language, vec![example])),
        }
    }
    for (language, examples) in of_kind {
        let _ = writeln!(page, "```{language}\n{}\n```\n", examples.join("\n"));
    }
}

#[test]
fn the_page_of_the_book_is_up_to_date() {
    let mut command = crate::Cli::command();
    command.build();
    let page = page(&command);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/command.md");
    if std::env::var_os("WARPOOL_WRITE_REFERENCE").is_some() {
        std::fs::write(&file, &page).expect("the page can be written");
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        committed == page,
        "docs/reference/command.md is out of date: \
         WARPOOL_WRITE_REFERENCE=1 cargo test -p warpool-cli --bin warpool reference"
    );
}
