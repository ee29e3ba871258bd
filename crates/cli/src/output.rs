//! Output of the commands: tables for people, or one JSON object per line for programs; never both. Also the exit
//! status of a result.

use std::fmt;
use std::io::{self, Write};

use comfy_table::{CellAlignment, ContentArrangement, ContentLineStyle, LineStyle, Table, TableStyle};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

/// The result of a command that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Exit status 0.
    Success,
    /// A check failed or a limit was exceeded: exit status 1.
    Failure,
}

/// Why a command did not complete.
#[derive(Debug)]
pub enum CommandError {
    /// Wrong arguments, or a missing driver, device, library or file.
    Usage(String),
    /// A driver call failed.
    Driver(warpool_driver::DriverError),
    /// The output could not be written.
    Output(io::Error),
}

/// `text` (a file name, for example) on one line, with control characters escaped.
pub fn printable(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escape).collect()
}

/// The result of a command.
pub type Result<T> = std::result::Result<T, CommandError>;

impl CommandError {
    /// The exit status.
    pub const fn status(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Driver(_) | Self::Output(_) => 1,
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) => f.write_str(message),
            Self::Driver(error) => write!(f, "the driver failed: {error}"),
            Self::Output(error) => write!(f, "cannot write the output: {error}"),
        }
    }
}

impl std::error::Error for CommandError {}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<warpool_driver::DriverError> for CommandError {
    fn from(error: warpool_driver::DriverError) -> Self {
        Self::Driver(error)
    }
}

impl From<warpool::Error> for CommandError {
    fn from(error: warpool::Error) -> Self {
        match error {
            warpool::Error::Driver(error) => Self::Driver(error),
            other => Self::Usage(other.to_string()),
        }
    }
}

/// The destination of a command's output. With JSON, text is discarded; without, objects are.
pub struct Output {
    json: bool,
    out: Box<dyn Write>,
    /// The width of the terminal, if it is one.
    width: Option<usize>,
    bold: bool,
}

impl Output {
    /// The standard output.
    pub fn stdout(json: bool) -> Self {
        let width = console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns));
        // Without a terminal, or with NO_COLOR, there are no escape codes.
        Self { json, out: Box::new(io::stdout()), width, bold: console::colors_enabled() }
    }

    /// Writes one JSON object on its own line.
    pub fn object(&mut self, object: &Value) -> io::Result<()> {
        if self.json { writeln!(self.out, "{object}") } else { Ok(()) }
    }

    /// Writes a line of text.
    pub fn line(&mut self, line: impl fmt::Display) -> io::Result<()> {
        if self.json { Ok(()) } else { writeln!(self.out, "{line}") }
    }

    /// Writes a line that stands out where a terminal is.
    pub fn heading(&mut self, line: &str) -> io::Result<()> {
        match self.bold {
            true => self.line(console::style(line).bold().force_styling(true)),
            false => self.line(line),
        }
    }

    /// Writes a paragraph in lines that fit the terminal; nothing if it is empty.
    pub fn paragraph(&mut self, text: &str) -> io::Result<()> {
        const WIDTH: usize = 100;
        if text.is_empty() {
            return Ok(());
        }
        let lines = wrapped(text, self.width.unwrap_or(WIDTH));
        lines.iter().try_for_each(|line| self.line(line))
    }

    /// Writes a table under a title.
    pub fn table(&mut self, title: &str, table: &Table) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        writeln!(self.out, "{title}")?;
        let mut table = table.clone();
        if let Some(width) = self.width.and_then(|width| u16::try_from(width).ok()) {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        }
        for line in table.lines() {
            writeln!(self.out, "{}", line.trim_end())?;
        }
        writeln!(self.out)
    }
}

/// The words of a text in lines of at most `width` letters; a longer word has a line of its own.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("it begins with one");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
            continue;
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines
}

/// A table without borders: a line below the header, spaces between the columns.
const STYLE: TableStyle = TableStyle::new()
    .header_lines(ContentLineStyle::new(' ', ' ', ' '))
    .header_separator(LineStyle::new(' ', '-', ' ', ' '))
    .content_lines(ContentLineStyle::new(' ', ' ', ' '));

/// An empty table with these columns; those whose name begins with `>` are aligned to the right.
pub fn table(columns: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(columns.iter().map(|column| column.trim_start_matches('>')));
    for (index, column) in columns.iter().enumerate() {
        if let Some(settings) = table.column_mut(index).filter(|_| column.starts_with('>')) {
            settings.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A progress spinner on stderr that counts `unit`; hidden unless stderr is a terminal.
pub fn spinner(unit: &str) -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template(&format!("{{spinner}} {{pos}} {unit}, last {{msg}}")) {
        spinner.set_style(style);
    }
    spinner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_wrapped_between_words() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("extraordinary word", 5), ["extraordinary", "word"]);
    }

    #[test]
    fn table_has_a_header_line_and_aligned_columns() {
        let mut table = table(&["call", ">ns"]);
        table.add_row(["event_record", "7"]).add_row(["fill", "1200"]);
        let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
        assert_eq!(
            lines,
            ["  call             ns", " -------------- ------", "  event_record      7", "  fill           1200",]
        );
    }
}
