//! What `explain` says about a recording: a few lines for the text of an exception, and all of it for a file.
//!
//! It is made on a thread of its own, in bounded time and memory. First without replays, which takes little time; then
//! with those that find out what would have fitted, whose answer is used if it comes in time.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use warpool::memory::report::Snapshot;
use warpool_report::explain::{advice_texts, headline, sentences, tables};
use warpool_trace::Stop;
use warpool_trace::explain::{ExplainOptions, Explanation, explain};

/// How long it may take in all.
const TIME_MAX: Duration = Duration::from_secs(10);

/// The most memory of the host that it may take.
const MEMORY_MAX: u64 = 2 << 30;

/// Rows of tables in the file.
const ROWS: usize = 20;

/// What is said about one device.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) device: u32,
    pub(super) headline: String,
    /// Who holds most.
    pub(super) holder: Option<String>,
    /// What to do first.
    pub(super) advice: Option<String>,
    /// All of it.
    pub(super) text: String,
}

/// Explains a snapshot. `capacity` is the memory of the devices, if it is known. The error is a sentence.
pub(super) fn answers(snapshot: &Arc<Snapshot>, capacity: Option<u64>) -> Result<Vec<Answer>, String> {
    let deadline = Instant::now() + TIME_MAX;
    let (stop, (sender, receiver)) = (Stop::default(), channel());
    let (snapshot, its_stop) = (Arc::clone(snapshot), stop.clone());
    let work = move || explain_twice(&snapshot, capacity, &its_stop, &sender);
    if let Err(error) = thread::Builder::new().name("warpool-explain".to_owned()).spawn(work) {
        return Err(format!("It is not explained, since no thread can be started: {error}."));
    }
    let found = receive(&receiver, deadline);
    let with_replays = match &found {
        Ok(_) => receive(&receiver, deadline),
        Err(_) => Err(String::new()),
    };
    // The thread ends soon; nobody waits for it.
    stop.stop();
    with_replays.or(found)
}

fn receive(from: &Receiver<Result<Vec<Answer>, String>>, deadline: Instant) -> Result<Vec<Answer>, String> {
    match from.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(answers) => answers,
        Err(RecvTimeoutError::Timeout) => {
            Err(format!("It is not explained: that would take more than {} s.", TIME_MAX.as_secs()))
        }
        Err(RecvTimeoutError::Disconnected) => Err("It is not explained: there is a bug in `explain`.".to_owned()),
    }
}

fn explain_twice(
    snapshot: &Snapshot,
    capacity: Option<u64>,
    stop: &Stop,
    sender: &Sender<Result<Vec<Answer>, String>>,
) {
    for skips_fits in [true, false] {
        let options = ExplainOptions {
            capacity,
            skips_fits,
            threads: Some(2),
            memory_limit: Some(MEMORY_MAX),
            stop: stop.clone(),
            ..ExplainOptions::default()
        };
        let found = explain(snapshot, &options);
        let answers = found.map(|found| found.iter().map(answer).collect());
        // Nobody may be waiting any more.
        let _ = sender.send(answers.map_err(|error| format!("It is not explained: {error}.")));
    }
}

fn answer(explanation: &Explanation) -> Answer {
    let holders = &explanation.moment().holders;
    let holder = holders.groups.first().map(|holder| {
        let bytes = warpool_report::bytes_text::text(holder.bytes);
        let blocks = if holder.count == 1 { "1 block".to_owned() } else { format!("{} blocks", holder.count) };
        let line = holder.line.as_ref().filter(|line| !holder.name.contains(*line));
        let line = line.map_or_else(String::new, |line| format!(", from {line}"));
        format!("{}{line}: {bytes} in {blocks}", holder.name)
    });
    let advice = advice_texts(explanation);
    let first = advice.first().map(|advice| {
        let lines: Vec<&str> = advice.lines.iter().map(String::as_str).collect();
        let apply = if lines.is_empty() { String::new() } else { format!(" {}", lines.join("; ")) };
        format!("{}{apply}", advice.paragraph)
    });
    let mut text = format!("GPU {}: {}\n\n", explanation.device, headline(explanation));
    for sentence in sentences(explanation) {
        text += &format!("{sentence}\n");
    }
    if !advice.is_empty() {
        text += "\nWhat to do\n";
    }
    for (number, advice) in (1..).zip(&advice) {
        text += &format!("{number}. {}\n", advice.paragraph);
        advice.lines.iter().for_each(|line| text += &format!("     {line}\n"));
    }
    for table in tables(explanation, ROWS) {
        text += &format!("\n{}\n{}", table.title, columns(table.columns, &table.rows));
    }
    if !explanation.remarks.is_empty() {
        text += "\nRemarks\n";
        explanation.remarks.iter().for_each(|remark| text += &format!("- {remark}.\n"));
    }
    Answer { device: explanation.device, headline: headline(explanation), holder, advice: first, text }
}

/// A table with aligned columns. Names that begin with `>` are of columns that are aligned to the right.
fn columns(names: &[&str], rows: &[Vec<String>]) -> String {
    let titles: Vec<String> = names.iter().map(|name| name.trim_start_matches('>').to_owned()).collect();
    let all = || std::iter::once(&titles).chain(rows);
    let width =
        |column: usize| all().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..names.len()).map(width).collect();
    let mut text = String::new();
    for row in all() {
        let cells = row.iter().zip(&widths).zip(names).map(|((cell, &width), name)| match name.starts_with('>') {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        text += &format!("  {}\n", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_explained_is_a_sentence() {
        let error = answers(&Arc::default(), None).unwrap_err();
        assert!(error.starts_with("It is not explained: ") && error.ends_with('.'), "{error}");
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["a".to_owned(), "1".to_owned()], vec!["long".to_owned(), "22".to_owned()]];
        assert_eq!(columns(&["name", ">n"], &rows), "  name   n\n  a      1\n  long  22\n");
    }
}
