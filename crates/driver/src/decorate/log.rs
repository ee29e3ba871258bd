//! A log of driver calls as text, and the comparison of two logs. `recording.rs` makes the entries.

use std::fmt;

use crate::Call;

/// Calls, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// How many earlier entries were dropped to limit the size.
    pub dropped: u64,
    /// The entries.
    pub entries: Vec<LogEntry>,
}

/// One call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// The call.
    pub call: Call,
    /// Its arguments with their names.
    pub arguments: String,
    /// What it returned, or the error's text.
    pub outcome: String,
}

/// The first difference between two logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The number of the entry from 0, dropped entries included.
    pub index: u64,
    /// The entry of the one log; `None` if it has ended.
    pub left: Option<LogEntry>,
    /// The entry of the other log.
    pub right: Option<LogEntry>,
}

impl Log {
    /// The first entry in which `other` differs; `None` if the logs are equal. Dropped entries are not compared.
    #[must_use]
    pub fn diff(&self, other: &Self) -> Option<Difference> {
        let end = self.end().max(other.end());
        (self.dropped.max(other.dropped)..end)
            .map(|index| (index, self.get(index), other.get(index)))
            .find(|(_, left, right)| left != right)
            .map(|(index, left, right)| Difference { index, left: left.cloned(), right: right.cloned() })
    }

    fn end(&self) -> u64 {
        self.dropped + self.entries.len() as u64
    }

    fn get(&self, index: u64) -> Option<&LogEntry> {
        let position = index.checked_sub(self.dropped)?;
        self.entries.get(usize::try_from(position).ok()?)
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.dropped > 0 {
            writeln!(f, "({} earlier calls dropped)", self.dropped)?;
        }
        self.entries.iter().try_for_each(|entry| writeln!(f, "{entry}"))
    }
}

impl fmt::Display for LogEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({}) = {}", self.call, self.arguments, self.outcome)
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the logs differ at call {}:", self.index)?;
        for (side, entry) in [("left ", &self.left), ("right", &self.right)] {
            match entry {
                Some(entry) => writeln!(f, "  {side} {entry}")?,
                None => writeln!(f, "  {side} (no more calls)")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log of one entry per letter; a capital is dropped.
    fn log(script: &str) -> Log {
        let dropped = script.chars().filter(char::is_ascii_uppercase).count();
        let entry =
            |letter: char| LogEntry { call: Call::MemInfo, arguments: letter.to_string(), outcome: "ok".to_owned() };
        Log { dropped: dropped as u64, entries: script.chars().skip(dropped).map(entry).collect() }
    }

    /// The index of the first difference, and the entries.
    fn check(left: &str, right: &str, expected: Option<(u64, &str, &str)>) {
        let text = |entry: Option<LogEntry>| entry.map_or("-".to_owned(), |entry| entry.arguments);
        let found = log(left).diff(&log(right)).map(|d| (d.index, text(d.left), text(d.right)));
        assert_eq!(found, expected.map(|(index, l, r)| (index, l.to_owned(), r.to_owned())), "{left} and {right}");
    }

    #[test]
    fn diff_finds_the_first_difference() {
        check("", "", None);
        check("abc", "abc", None);
        check("abc", "axd", Some((1, "b", "x")));
        check("ab", "abc", Some((2, "-", "c")));
        check("abc", "", Some((0, "a", "-")));
    }

    #[test]
    fn dropped_entries_are_not_compared() {
        check("ABcd", "xycd", None);
        check("ABcd", "Xbcd", None);
        check("ABcd", "xyce", Some((3, "d", "e")));
        check("ABcd", "x", Some((2, "c", "-")));
    }

    #[test]
    fn difference_shows_both_sides() {
        let difference = log("ab").diff(&log("a")).unwrap();
        let expected = "the logs differ at call 1:\n  left  mem_info(b) = ok\n  right (no more calls)\n";
        assert_eq!(difference.to_string(), expected);
    }
}
