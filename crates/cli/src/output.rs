//! Output of the commands: tables for readers, or one JSON object per line for programs; never both. Also the exit
//! status of a result.
//!
//! Text of a recording may contain anything. All output goes through here, and characters that a terminal would
//! interpret are escaped.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};

use comfy_table::{CellAlignment, ContentLineStyle, LineStyle, Table, TableStyle};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value};

use crate::fitting::{self, fitted, wrapped};

/// The result of a command that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Exit status 0.
    Success,
    /// A check failed or a limit was exceeded: exit status 1.
    Failure,
    /// That of a command that was run.
    Status(u8),
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

/// Whether a terminal interprets a character instead of showing it: control characters, and those that change the order
/// in which text is shown.
fn is_active(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escape(c: char) -> String {
    if is_active(c) { c.escape_default().to_string() } else { c.to_string() }
}

/// `text` (a file name, for example) on one line, with characters that a terminal would interpret escaped.
pub fn printable(text: &str) -> String {
    text.chars().map(escape).collect()
}

/// The same, in lines as they are.
fn printable_lines(text: &str) -> Cow<'_, str> {
    let is_active = |c: char| c != '\n' && is_active(c);
    if !text.contains(is_active) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().map(|c| if c == '\n' { c.to_string() } else { escape(c) }).collect())
}

/// JSON in which all such characters are written as `\uXXXX`. They can only be in strings.
fn printable_json(object: &Value) -> String {
    let text = object.to_string();
    if !text.contains(is_active) {
        return text;
    }
    text.chars().map(|c| if is_active(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() }).collect()
}

/// Writes a line to stderr. A failure is ignored: the exit status has the result, and `eprintln!` would panic.
pub fn message(line: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{}", printable_lines(&line.to_string()));
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
    /// The width of the terminal, or what COLUMNS says where there is none.
    width: Option<usize>,
    bold: bool,
}

impl Output {
    /// The standard output.
    pub fn stdout(json: bool) -> Self {
        let terminal = console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns));
        let variable = || std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let width = terminal.filter(|&columns| columns > 0).or_else(variable).filter(|&columns| columns > 0);
        // Without a terminal, or with NO_COLOR, there are no escape codes.
        Self { json, out: Box::new(io::stdout()), width, bold: console::colors_enabled() }
    }

    /// Writes one JSON object on its own line. All have a `schema_version`; it is 1 unless the object has its own.
    pub fn object(&mut self, object: &Value) -> io::Result<()> {
        const VERSION: &str = "schema_version";
        match object {
            _ if !self.json => Ok(()),
            Value::Object(fields) if !fields.contains_key(VERSION) => {
                let versioned: Map<String, Value> = std::iter::once((VERSION.to_owned(), Value::from(1)))
                    .chain(fields.iter().map(|(key, value)| (key.clone(), value.clone())))
                    .collect();
                writeln!(self.out, "{}", printable_json(&Value::Object(versioned)))
            }
            _ => writeln!(self.out, "{}", printable_json(object)),
        }
    }

    /// Writes a line of text.
    pub fn line(&mut self, line: impl fmt::Display) -> io::Result<()> {
        if self.json { Ok(()) } else { writeln!(self.out, "{}", printable_lines(&line.to_string())) }
    }

    /// Writes a line in bold, if the output is a terminal.
    pub fn heading(&mut self, line: &str) -> io::Result<()> {
        if self.json || !self.bold {
            return self.line(line);
        }
        writeln!(self.out, "{}", console::style(printable_lines(line)).bold().force_styling(true))
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

    /// Writes a line of text, wrapped to the terminal's width. Continuation lines are indented by `indent`.
    pub fn remark(&mut self, line: &str, indent: usize) -> io::Result<()> {
        match self.width {
            None => self.line(line),
            Some(width) => fitting::indented(line, indent, width).iter().try_for_each(|line| self.line(line)),
        }
    }

    /// Writes a table of texts.
    pub fn texts(&mut self, texts: &warpool_report::explain::Table) -> io::Result<()> {
        let mut table = table(texts.columns);
        for row in &texts.rows {
            table.add_row(row);
        }
        self.table(&texts.title, &table)
    }

    /// Writes a table under a title.
    pub fn table(&mut self, title: &str, table: &Table) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        self.remark(title, 2)?;
        let lines = match self.width {
            Some(width) => fitted(table, width),
            None => table.lines().collect(),
        };
        for line in lines {
            writeln!(self.out, "{}", printable_lines(line.trim_end()))?;
        }
        writeln!(self.out)
    }
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

/// The log, on stderr: its messages may contain text of a recording.
pub struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(printable_lines(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Issue 18: they reached the terminal, which set its title, cleared its screen and hid text.
    #[test]
    fn what_a_terminal_would_act_on_is_escaped() {
        let text = "\u{1b}]0;owned\u{7}train\r\u{9b}8m\n\u{202e}x é";
        let escaped = "\\u{1b}]0;owned\\u{7}train\\r\\u{9b}8m\n\\u{202e}x é";
        assert_eq!(printable_lines(text), escaped);
        assert_eq!(printable(text), escaped.replace('\n', "\\n"));
        let object = Value::from(text);
        let json = printable_json(&object);
        assert!(!json.contains(is_active), "{json}");
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), object);
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
