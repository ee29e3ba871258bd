//! Regions that the program named (pairs of `START` and `END` annotations), and the texts that were in force while
//! events happened. Annotations have times only; here they get positions.

use warpool::memory::report::{Annotation, TextId, TraceEntry};

/// The most regions; beyond that the longest are kept.
const REGIONS_MAX: usize = 1 << 16;

/// Regions that overlap are in different rows. Regions that would need more rows are left out: the recording has
/// regions without an end or a start.
const ROWS_MAX: usize = 16;

/// The most changes of the texts.
const CONTEXTS_MAX: usize = 1 << 16;

/// A part of the program with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its name, for example `Optimizer.step#AdamW.step`.
    pub name: String,
    /// The position before its first event.
    pub from: u64,
    /// The position after its last event.
    pub until: u64,
    /// Microseconds from the first event to its start; 0 if it began before.
    pub from_us: u64,
    /// Microseconds from the first event to its end; the recording's end if it ended later.
    pub until_us: u64,
    /// The row that it is drawn in: 0 is the outermost.
    pub row: u32,
    /// Whether its start is recorded.
    pub has_start: bool,
    /// Whether its end is recorded.
    pub has_end: bool,
}

/// The texts that the program had set, from a position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextChange {
    /// The position after the first event that has them.
    pub position: u64,
    /// The metadata that the program had set.
    pub user_metadata: Option<TextId>,
    /// The compiled region of the program.
    pub compile_context: Option<TextId>,
}

/// Where the texts of events change, and whether all changes are there.
pub(super) fn contexts(events: &[TraceEntry]) -> (Vec<ContextChange>, bool) {
    let mut changes = Vec::new();
    let mut before = (None, None);
    for (at, event) in events.iter().enumerate() {
        let now = (event.user_metadata, event.compile_context);
        if now == before {
            continue;
        }
        if changes.len() == CONTEXTS_MAX {
            return (changes, false);
        }
        before = now;
        changes.push(ContextChange { position: at as u64 + 1, user_metadata: now.0, compile_context: now.1 });
    }
    (changes, true)
}

/// The regions of a device in the order of their starts, and how many were left out.
pub(super) fn regions(annotations: &[Annotation], device: u32, events: &[TraceEntry]) -> (Vec<Region>, u64) {
    let Some(first) = events.first() else { return (Vec::new(), 0) };
    let mut found = paired(annotations.iter().filter(|it| it.device == i64::from(device)));
    if found.is_empty() {
        return (Vec::new(), 0);
    }
    let times = Times::new(events);
    let until = first.time_us.saturating_add_unsigned(times.last());
    // A region that ended before the history, or began after it, is not drawn.
    found.retain(|pair| pair.until_us.is_none_or(|end| end >= first.time_us) && pair.start() <= until);
    let mut left_out = found.len().saturating_sub(REGIONS_MAX);
    if left_out > 0 {
        let end = |pair: &Pair<'_>| pair.until_us.unwrap_or(until);
        found.sort_by_key(|pair| std::cmp::Reverse(end(pair).saturating_sub(pair.start().max(first.time_us))));
        found.truncate(REGIONS_MAX);
    }
    let since = |time_us: i64| u64::try_from(time_us.saturating_sub(first.time_us)).unwrap_or(0).min(times.last());
    let mut regions: Vec<Region> = found
        .into_iter()
        .map(|pair| {
            let (from_us, until_us) = (pair.from_us.map_or(0, since), pair.until_us.map_or(times.last(), since));
            Region {
                name: pair.name.to_owned(),
                from: pair.from_us.map_or(0, |_| times.events_before(from_us)),
                until: times.events_until(until_us),
                from_us,
                until_us,
                row: 0,
                has_start: pair.from_us.is_some(),
                has_end: pair.until_us.is_some(),
            }
        })
        .collect();
    // An outer region comes before what is inside it.
    regions.sort_by(|a, b| {
        (a.from_us, std::cmp::Reverse(a.until_us), &a.name).cmp(&(b.from_us, std::cmp::Reverse(b.until_us), &b.name))
    });
    let mut ends: Vec<u64> = Vec::new();
    regions.retain_mut(|region| {
        let row = ends.iter().position(|&end| end <= region.from_us).unwrap_or(ends.len());
        if row == ROWS_MAX {
            left_out += 1;
            return false;
        }
        ends.resize(ends.len().max(row + 1), 0);
        // Two that are empty and at one time are not drawn over each other.
        ends[row] = region.until_us.max(region.from_us + 1);
        region.row = row as u32;
        true
    });
    (regions, left_out as u64)
}

/// A start and its end; one of them may be missing.
struct Pair<'a> {
    name: &'a str,
    from_us: Option<i64>,
    until_us: Option<i64>,
}

impl Pair<'_> {
    fn start(&self) -> i64 {
        self.from_us.unwrap_or(i64::MIN)
    }
}

/// An end belongs to the last start of its name that has none yet: regions nest.
fn paired<'a>(annotations: impl Iterator<Item = &'a Annotation>) -> Vec<Pair<'a>> {
    let mut sorted: Vec<&Annotation> = annotations.collect();
    // Stable: annotations of the same time stay in the order of the recording.
    sorted.sort_by_key(|it| it.time_us);
    let mut pairs: Vec<Pair<'a>> = Vec::new();
    let mut open: rustc_hash::FxHashMap<&str, Vec<usize>> = rustc_hash::FxHashMap::default();
    for annotation in sorted {
        let (name, time) = (annotation.name.as_str(), Some(annotation.time_us));
        match annotation.stage.as_str() {
            "START" => {
                open.entry(name).or_default().push(pairs.len());
                pairs.push(Pair { name, from_us: time, until_us: None });
            }
            "END" => match open.get_mut(name).and_then(Vec::pop) {
                Some(at) => pairs[at].until_us = time,
                None => pairs.push(Pair { name, from_us: None, until_us: time }),
            },
            _ => {}
        }
    }
    pairs
}

/// The times of events, made ascending: those of several threads may be out of order.
struct Times(Vec<u64>);

impl Times {
    fn new(events: &[TraceEntry]) -> Self {
        let first = events.first().map_or(0, |event| event.time_us);
        let mut latest = 0;
        let mut time = |event: &TraceEntry| {
            latest = u64::try_from(event.time_us.saturating_sub(first)).unwrap_or(0).max(latest);
            latest
        };
        Self(events.iter().map(&mut time).collect())
    }

    fn last(&self) -> u64 {
        self.0.last().copied().unwrap_or(0)
    }

    fn events_before(&self, us: u64) -> u64 {
        self.0.partition_point(|&time| time < us) as u64
    }

    fn events_until(&self, us: u64) -> u64 {
        self.0.partition_point(|&time| time <= us) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpool::memory::report::Action;

    /// Events at 100, 200, .. 900 microseconds; annotations such as `a+150` and `a-350`.
    fn check(annotations: &str, expected: &[&str]) {
        let events: Vec<TraceEntry> =
            (1..10).map(|at| TraceEntry::new(Action::Alloc, 0, 512, 0, 1000 + at * 100)).collect();
        let annotations: Vec<Annotation> = annotations
            .split_whitespace()
            .map(|text| {
                let at = text.find(['+', '-', '?']).expect("a stage");
                let stage = match &text[at..=at] {
                    "+" => "START",
                    "-" => "END",
                    _ => "OTHER",
                };
                let time_us = 1000 + text[at + 1..].parse::<i64>().expect("a time");
                Annotation { name: text[..at].to_owned(), stage: stage.to_owned(), device: 0, time_us }
            })
            .collect();
        let (found, left_out) = regions(&annotations, 0, &events);
        let found: Vec<String> = found
            .iter()
            .map(|it| {
                let open = |known| if known { "" } else { "?" };
                let (start, end) = (open(it.has_start), open(it.has_end));
                format!(
                    "{} {start}{}..{}{end} {}..{}us row {}",
                    it.name, it.from, it.until, it.from_us, it.until_us, it.row
                )
            })
            .collect();
        assert_eq!((found, left_out), (expected.iter().map(|&text| text.to_owned()).collect(), 0));
        assert_eq!(regions(&annotations, 1, &events).0, [], "another device");
    }

    #[test]
    fn starts_and_ends_are_paired() {
        check("a+150 a-350", &["a 1..3 50..250us row 0"]);
        check("a+200 a-300", &["a 1..3 100..200us row 0"]);
        check(
            "step+150 sub+250 sub-350 sub+400 sub-450 step-850",
            &["step 1..8 50..750us row 0", "sub 2..3 150..250us row 1", "sub 3..4 300..350us row 1"],
        );
        check("a+150 a+250 a-350 a-450", &["a 1..4 50..350us row 0", "a 2..3 150..250us row 1"]);
        check("a+150 b+250 a-350 b-450", &["a 1..3 50..250us row 0", "b 2..4 150..350us row 1"]);
    }

    #[test]
    fn missing_ends_and_other_stages_do_no_harm() {
        check("a+150", &["a 1..9? 50..800us row 0"]);
        check("a-350", &["a ?0..3 0..250us row 0"]);
        check("a?350", &[]);
        check("a-50 b+20 b-90 c+2000 c-3000", &[]);
        check("a+50 a-5000", &["a 0..9 0..800us row 0"]);
        assert_eq!(regions(&[], 0, &[]), (Vec::new(), 0));
    }

    #[test]
    fn rows_are_bounded() {
        let events = [TraceEntry::new(Action::Alloc, 0, 512, 0, 0), TraceEntry::new(Action::Alloc, 0, 512, 0, 90)];
        let start = |at| Annotation { name: format!("{at}"), stage: "START".to_owned(), device: 0, time_us: at };
        let (found, left_out) = regions(&(0..50).map(start).collect::<Vec<_>>(), 0, &events);
        assert_eq!((found.len(), left_out), (ROWS_MAX, 34));
    }

    #[test]
    fn texts_are_where_they_change() {
        let mut events = vec![TraceEntry::new(Action::Alloc, 0, 512, 0, 0); 6];
        for (event, text) in events.iter_mut().zip([None, Some(4), Some(4), None, Some(7), Some(7)]) {
            event.user_metadata = text.and_then(TextId::new);
        }
        let (changes, is_complete) = contexts(&events);
        let found: Vec<(u64, Option<usize>)> =
            changes.iter().map(|it| (it.position, it.user_metadata.map(TextId::index))).collect();
        assert_eq!(found, [(2, Some(4)), (4, None), (5, Some(7))]);
        assert!(is_complete);
    }
}
