//! Logs of RMM's `logging_resource_adaptor`: `Thread,Time,Action,Pointer,Size,Stream`, one line per event.
//!
//! A log contains allocations and frees only: no segments, no settings, and no device. A free is one event in it, and
//! becomes a requested and a completed free.

use warpool::memory::report::{Action, Snapshot, TraceEntry};

use super::error::{Checked, ReadError};
use super::input::Input;
use crate::budget::{Budget, Exceeded};
use crate::printable::shortened;

/// The columns of the header.
const COLUMNS: [&str; 6] = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"];

/// Bytes of a line that are read; more than any line has.
const LINE_MAX: usize = 1 << 10;

const DAY_US: i64 = 24 * 60 * 60 * 1_000_000;

/// Whether data that starts with these bytes is such a log.
pub(super) fn is_log(first: &[u8]) -> bool {
    let end = first.iter().position(|&byte| byte == b'\n').unwrap_or(first.len());
    std::str::from_utf8(&first[..end.min(LINE_MAX)]).is_ok_and(is_header)
}

fn is_header(line: &str) -> bool {
    let mut columns = line.trim_end().split(',');
    COLUMNS.iter().all(|name| columns.next().is_some_and(|column| column.trim().eq_ignore_ascii_case(name)))
        && columns.next().is_none()
}

/// Reads a log with its header.
pub(super) fn read(input: &mut Input<'_>, budget: &Budget) -> Checked<Snapshot> {
    let mut trace = Vec::new();
    let mut clock = Clock::default();
    let mut line = Vec::new();
    let mut number = 0;
    while input.line(&mut line, LINE_MAX)? {
        number += 1;
        let malformed = |what| Box::new(ReadError::Line { line: number, what });
        let Ok(text) = std::str::from_utf8(&line) else { return Err(malformed("not UTF-8".to_owned())) };
        let text = text.trim_end();
        if number == 1 || text.is_empty() {
            continue;
        }
        // A line has up to two entries.
        budget.reserve(&mut trace, 2).map_err(|Exceeded| ReadError::memory_limit(budget, input.offset()))?;
        parse_line(text, &mut clock, &mut trace).map_err(malformed)?;
    }
    Ok(Snapshot { traces: vec![trace], ..Snapshot::default() })
}

/// Appends the entries of one line.
fn parse_line(line: &str, clock: &mut Clock, trace: &mut Vec<TraceEntry>) -> Result<(), String> {
    let columns: Vec<&str> = line.split(',').map(str::trim).collect();
    let [_thread, time, action, pointer, size, stream] = columns[..] else {
        let found = columns.len();
        return Err(format!("{found} columns instead of 6 ({}): check that the log is complete", COLUMNS.join(",")));
    };
    let addr = self::pointer(pointer).ok_or_else(|| format!("`{}` is not a pointer", shortened(pointer)))?;
    let size = size.parse().map_err(|_| format!("`{}` is not a size in bytes", shortened(size)))?;
    let stream = self::stream(stream).ok_or_else(|| format!("`{}` is not a stream", shortened(stream)))?;
    let time_us = clock.time_us(time).ok_or_else(|| format!("`{}` is not a time", shortened(time)))?;
    let entry = TraceEntry::new(Action::Alloc, addr, size, stream, time_us);
    let actions: &[Action] = match action {
        "allocate" => &[Action::Alloc],
        "free" | "deallocate" => &[Action::FreeRequested, Action::FreeCompleted],
        "allocate failure" => &[Action::Oom],
        _ => return Err(format!("`{}` is not `allocate`, `free` or `allocate failure`", shortened(action))),
    };
    trace.extend(actions.iter().map(|&action| TraceEntry { action, ..entry }));
    Ok(())
}

/// Hexadecimal with or without `0x`: C libraries print pointers in both ways.
fn pointer(text: &str) -> Option<u64> {
    match text {
        "(nil)" | "nullptr" => Some(0),
        _ => hexadecimal(text.strip_prefix("0x").unwrap_or(text)),
    }
}

/// Hexadecimal with `0x`, else decimal.
fn stream(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => hexadecimal(digits),
        None if text == "(nil)" => Some(0),
        None => text.parse().ok(),
    }
}

fn hexadecimal(digits: &str) -> Option<u64> {
    // `from_str_radix` accepts a sign.
    digits.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| u64::from_str_radix(digits, 16).ok())?
}

/// Parses times. A time of day restarts at midnight; the resulting times do not.
#[derive(Default)]
struct Clock {
    last_us: Option<i64>,
    days_us: i64,
}

impl Clock {
    fn time_us(&mut self, text: &str) -> Option<i64> {
        let parts: Vec<&str> = text.split(':').collect();
        let of_day = match parts[..] {
            // Seconds since some epoch.
            [seconds] => return decimal_us(seconds),
            [hours, minutes, seconds] => hours_us(hours, minutes)?.checked_add(decimal_us(seconds)?)?,
            [hours, minutes, seconds, us] => hours_us(hours, minutes)?
                .checked_add(decimal_us(seconds)?)?
                .checked_add(i64::from(us.parse::<u32>().ok()?))?,
            _ => return None,
        };
        // Threads may write slightly out of order; only a jump back by hours is midnight.
        if self.last_us.is_some_and(|last| last - of_day > DAY_US / 2) {
            self.days_us = self.days_us.checked_add(DAY_US)?;
        }
        self.last_us = Some(of_day);
        of_day.checked_add(self.days_us)
    }
}

fn hours_us(hours: &str, minutes: &str) -> Option<i64> {
    let (hours, minutes): (u8, u8) = (hours.parse().ok()?, minutes.parse().ok()?);
    Some((i64::from(hours) * 60 + i64::from(minutes)) * 60 * 1_000_000)
}

/// Seconds with decimals, of which six are used, in microseconds.
fn decimal_us(text: &str) -> Option<i64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    if !part.bytes().all(|byte| byte.is_ascii_digit()) || part.is_empty() {
        return None;
    }
    let part_us =
        part.bytes().chain(std::iter::repeat(b'0')).take(6).fold(0, |us, digit| us * 10 + i64::from(digit - b'0'));
    i64::from(whole.parse::<u32>().ok()?).checked_mul(1_000_000)?.checked_add(part_us)
}
