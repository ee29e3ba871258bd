//! What processes publish about their memory, as JSON and as OpenMetrics. `docs/json.md` has the keys.

use std::fmt::Write as _;

use serde_json::{Value, json};
use warpool::share::{Board, BoardOrder, BoardRow, Card, Counters, OomEvent, PageProblem, Reading, UsageRow};

/// The content type of [`metrics`].
pub const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// One object for each process and device, for each card and for each file that cannot be read, and the totals.
#[must_use]
pub fn objects(board: &Board, order: BoardOrder) -> Vec<Value> {
    let rows = board.rows(order);
    let mut objects: Vec<Value> = rows.iter().map(process).collect();
    objects.extend(board.cards.iter().map(card));
    objects.extend(board.problems.iter().map(problem));
    let sum = |of: fn(&Card) -> u64| board.cards.iter().map(of).fold(0, u64::saturating_add);
    objects.push(json!({
        "kind": "total",
        "processes": board.processes.len(),
        "cards": board.cards.len(),
        "unreadable": board.problems.len(),
        "bytes_reserved": sum(|card| card.bytes_reserved),
        "bytes_allocated": sum(|card| card.bytes_allocated),
        "bytes_asleep": sum(|card| card.bytes_asleep),
    }));
    objects
}

/// Why a process has no values, in a word and in a sentence; `None` if it has.
#[must_use]
pub const fn trouble(reading: &Reading) -> Option<(&'static str, &'static str)> {
    match reading {
        Reading::Values(_) => None,
        Reading::Nothing => Some(("empty", "the process has written nothing yet")),
        Reading::Busy => Some(("busy", "the process was stopped while it wrote its page")),
        Reading::Damaged => Some(("damaged", "the page is damaged: something else wrote there")),
    }
}

fn process(row: &BoardRow<'_>) -> Value {
    let (state, why) = trouble(row.reading).map_or(("ok", None), |(state, why)| (state, Some(why)));
    let mut object = json!({
        "kind": "process",
        "pid": row.process.pid,
        "page": format!("{:016x}", row.process.number),
        "command": row.process.command,
        "since_us": row.process.since_us,
        "device": row.device.ordinal,
        "uuid": row.device.uuid.to_string(),
        "device_name": row.device.name,
        "device_bytes_total": row.device.bytes_total,
        "state": state,
        "why": why,
    });
    if let (Some(values), Value::Object(fields)) = (row.values(), &mut object) {
        for (name, value) in values.counters.named() {
            fields.insert(name.to_owned(), counter(&values.counters, name, value));
        }
        for (key, kind) in [("tags", "tag"), ("pools", "pool"), ("streams", "stream")] {
            let of_kind = values.rows.iter().filter(|row| row.of.kind() == kind);
            fields.insert(key.to_owned(), of_kind.map(usage).collect());
        }
        fields.insert("last_oom".to_owned(), values.last_oom.as_ref().map_or(Value::Null, oom));
    }
    object
}

/// The value of a counter; `null` where there is none.
fn counter(counters: &Counters, name: &str, value: u64) -> Value {
    match name {
        "bytes_limit" => counters.limit().into(),
        "bytes_device_free" => counters.device_free().into(),
        _ => value.into(),
    }
}

fn usage(row: &UsageRow) -> Value {
    json!({
        "name": row.of.name(),
        "bytes_reserved": row.bytes_reserved,
        "bytes_allocated": row.bytes_allocated,
        "bytes_active": row.bytes_active,
        "bytes_asleep": row.bytes_asleep,
        "bytes_elastic": row.bytes_elastic,
    })
}

fn oom(event: &OomEvent) -> Value {
    json!({
        "time_us": event.time_us,
        "bytes_requested": event.bytes_requested,
        "bytes_device_free": event.bytes_free,
        "bytes_reserved": event.bytes_reserved,
        "bytes_allocated": event.bytes_allocated,
        "bytes_limit": event.bytes_limit,
        "by_limit": event.by_limit,
    })
}

fn card(card: &Card) -> Value {
    json!({
        "kind": "card",
        "uuid": card.uuid.to_string(),
        "device_name": card.name,
        "device_bytes_total": card.bytes_total,
        "processes": card.processes,
        "bytes_reserved": card.bytes_reserved,
        "bytes_allocated": card.bytes_allocated,
        "bytes_asleep": card.bytes_asleep,
        "bytes_used": card.bytes_used,
        "bytes_elsewhere": card.bytes_elsewhere(),
    })
}

fn problem(problem: &PageProblem) -> Value {
    json!({ "kind": "unreadable", "file": problem.file, "why": problem.why })
}

/// Counters that only grow; the others go up and down.
const GROWING: [&str; 7] =
    ["allocations", "driver_allocations", "driver_frees", "pages_mapped", "pages_unmapped", "retries", "ooms"];

/// Everything as OpenMetrics, for Prometheus.
#[must_use]
pub fn metrics(board: &Board) -> String {
    let rows = board.rows(BoardOrder::Pid);
    let mut text = String::new();
    let values = rows.iter().filter_map(|row| Some((row, row.values()?)));
    for (name, _) in Counters::default().named() {
        // Rates are for the scraper to compute, and the time is its own.
        if name.ends_with("_per_second") || name == "read_us" {
            continue;
        }
        let is_growing = GROWING.contains(&name);
        let name_of_family = family(name);
        let _ = writeln!(text, "# TYPE {name_of_family} {}", if is_growing { "counter" } else { "gauge" });
        for (row, values) in values.clone() {
            let all = values.counters.named();
            let value = all.iter().find(|(other, _)| *other == name).map_or(0, |&(_, value)| value);
            if let Some(value) = counter(&values.counters, name, value).as_u64() {
                let total = if is_growing { "_total" } else { "" };
                let _ = writeln!(text, "{name_of_family}{total}{{{}}} {value}", labels(row));
            }
        }
    }
    for (name, of) in [
        ("reserved", (|row| row.bytes_reserved) as fn(&UsageRow) -> u64),
        ("allocated", |row| row.bytes_allocated),
        ("asleep", |row| row.bytes_asleep),
    ] {
        let _ = writeln!(text, "# TYPE warpool_tag_{name}_bytes gauge");
        for (row, values) in values.clone() {
            for tag in values.rows.iter().filter(|usage| usage.of.kind() == "tag") {
                let tag_name = escaped(&tag.of.name().unwrap_or_else(|| "(others)".to_owned()));
                let _ = writeln!(text, "warpool_tag_{name}_bytes{{{},tag=\"{tag_name}\"}} {}", labels(row), of(tag));
            }
        }
    }
    let cards: [(&str, fn(&Card) -> Option<u64>); 3] = [
        ("warpool_card_total_bytes", |card| Some(card.bytes_total)),
        ("warpool_card_used_bytes", |card| card.bytes_used),
        ("warpool_card_elsewhere_bytes", Card::bytes_elsewhere),
    ];
    for (name, of) in cards {
        let _ = writeln!(text, "# TYPE {name} gauge");
        for card in &board.cards {
            if let Some(value) = of(card) {
                let _ = writeln!(text, "{name}{{uuid=\"{}\",card=\"{}\"}} {value}", card.uuid, escaped(&card.name));
            }
        }
    }
    let _ = writeln!(text, "# TYPE warpool_processes gauge\nwarpool_processes {}", board.processes.len());
    let _ = writeln!(text, "# TYPE warpool_unreadable_pages gauge\nwarpool_unreadable_pages {}", board.problems.len());
    text.push_str("# EOF\n");
    text
}

/// `bytes_reserved` is `warpool_reserved_bytes`: the unit comes last there.
fn family(name: &str) -> String {
    match name.strip_prefix("bytes_") {
        Some(what) => format!("warpool_{what}_bytes"),
        None => format!("warpool_{name}"),
    }
}

fn labels(row: &BoardRow<'_>) -> String {
    format!(
        "pid=\"{}\",command=\"{}\",device=\"{}\",uuid=\"{}\"",
        row.process.pid,
        escaped(&row.process.command),
        row.device.ordinal,
        row.device.uuid
    )
}

/// A label's value. Control characters are not escaped in this format, and not needed.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\\' => escaped.push_str("\\\\"),
            '"' => escaped.push_str("\\\""),
            '\n' => escaped.push_str("\\n"),
            c if c.is_control() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        assert_eq!(escaped("a\"b\\c\nd\u{1b}é"), "a\\\"b\\\\c\\nd\u{fffd}é");
        assert_eq!(
            (family("bytes_reserved"), family("ooms")),
            ("warpool_reserved_bytes".into(), "warpool_ooms".into())
        );
        let text = metrics(&Board::default());
        assert!(text.contains("# TYPE warpool_reserved_bytes gauge\n") && text.ends_with("# EOF\n"), "{text}");
        assert!(text.contains("# TYPE warpool_allocations counter\n") && text.contains("\nwarpool_processes 0\n"));
    }
}
