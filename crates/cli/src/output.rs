//! What commands give back: tables for people, or one JSON object per line for programs; never both.

use std::fmt;
use std::io::{self, Write};

use comfy_table::{CellAlignment, ContentLineStyle, LineStyle, Table, TableStyle};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

/// How a command that ran to its end ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All is well.
    Good,
    /// The answer is a bad one: a check failed, a limit was passed.
    Bad,
}

/// Why a command did not run to its end.
#[derive(Debug)]
pub enum Stop {
    /// It was asked for something that is not there.
    Usage(String),
    /// The driver failed on the way.
    Driver(warpool_driver::DriverError),
    /// The output could not be written.
    Output(io::Error),
}

/// A text from outside, such as a file's name, on one line and without orders to the terminal.
pub fn printable(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escape).collect()
}

/// What a command returns.
pub type Result<T> = std::result::Result<T, Stop>;

impl Stop {
    /// The exit status that says it.
    pub const fn status(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Driver(_) | Self::Output(_) => 1,
        }
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) => f.write_str(message),
            Self::Driver(error) => write!(f, "the driver failed: {error}"),
            Self::Output(error) => write!(f, "cannot write the output: {error}"),
        }
    }
}

impl std::error::Error for Stop {}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<warpool_driver::DriverError> for Stop {
    fn from(error: warpool_driver::DriverError) -> Self {
        Self::Driver(error)
    }
}

/// Where a command writes. Text goes nowhere if JSON was asked for, and the other way around.
pub struct Output {
    json: bool,
    out: Box<dyn Write>,
}

impl Output {
    /// The standard output.
    pub fn stdout(json: bool) -> Self {
        Self { json, out: Box::new(io::stdout()) }
    }

    /// One JSON object on a line of its own.
    pub fn object(&mut self, object: &Value) -> io::Result<()> {
        if self.json { writeln!(self.out, "{object}") } else { Ok(()) }
    }

    /// A line for people.
    pub fn line(&mut self, line: impl fmt::Display) -> io::Result<()> {
        if self.json { Ok(()) } else { writeln!(self.out, "{line}") }
    }

    /// A table for people, under a title.
    pub fn table(&mut self, title: &str, table: &Table) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        writeln!(self.out, "{title}")?;
        for line in table.lines() {
            writeln!(self.out, "{}", line.trim_end())?;
        }
        writeln!(self.out)
    }
}

/// A table without frames: a line under the header, space between the columns.
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

/// A sign of life on stderr, which counts `things`; shows nothing unless that is a terminal.
pub fn spinner(things: &str) -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template(&format!("{{spinner}} {{pos}} {things}, last {{msg}}")) {
        spinner.set_style(style);
    }
    spinner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_under_its_header_and_aligned_columns() {
        let mut table = table(&["call", ">ns"]);
        table.add_row(["event_record", "7"]).add_row(["fill", "1200"]);
        let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
        assert_eq!(
            lines,
            ["  call             ns", " -------------- ------", "  event_record      7", "  fill           1200",]
        );
    }
}
