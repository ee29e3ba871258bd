//! The difference of two recordings in sentences, as JSON and as a page.

use std::path::Path;

use serde_json::{Value, json};
use warpool_trace::diff::{CategoryChange, ChangeKind, HolderChange, category_changes, diff};
use warpool_trace::explain::{Explanation, Moment};

use crate::bytes_text::text;
use crate::explain::moment_name;
use crate::view::{DevicePart, Page};

/// The results for one device of a recording.
pub struct Side {
    /// Its explanation.
    pub explanation: Explanation,
    /// For the page.
    pub part: Option<DevicePart>,
}

/// The same devices of both; with one device in each, these two: ranks use one device each.
#[must_use]
pub fn pairs<'a>(before: &'a [Side], after: &'a [Side]) -> Vec<(&'a Side, &'a Side)> {
    match (before, after) {
        ([one], [other]) => vec![(one, other)],
        _ => {
            let device = |side: &Side| side.explanation.device;
            let same = |one: &'a Side| Some((one, after.iter().find(|other| device(other) == device(one))?));
            before.iter().filter_map(same).collect()
        }
    }
}

/// The page of all pairs.
#[must_use]
pub fn page(names: [&str; 2], pairs: &[(&Side, &Side)]) -> Page {
    let (mut sections, mut list) = (Vec::new(), Vec::new());
    for &(one, other) in pairs {
        let changes = diff(&one.explanation, &other.explanation);
        let changed: Vec<&HolderChange> = changes.iter().filter(|change| change.kind != ChangeKind::Same).collect();
        let mut sides = Vec::new();
        for ((side, name), prefix) in [one, other].into_iter().zip(names).zip(["before", "after"]) {
            let part = side.part.as_ref().expect("it was made for the page").with_prefix(prefix);
            sections.extend(part.sections);
            let mut info = part.info;
            info["name"] = json!(name);
            sides.push(info);
        }
        let [before, after] = [one, other].map(|side| side.explanation.moment());
        list.push(json!({
            "name": match one.explanation.device == other.explanation.device {
                true => one.explanation.device.to_string(),
                false => format!("{} and {}", one.explanation.device, other.explanation.device),
            },
            "headline": headline(&one.explanation, &other.explanation),
            "prose": [compared(&one.explanation, &other.explanation)],
            "before": sides[0],
            "after": sides[1],
            "allocated_before": before.bytes_requested,
            "allocated_after": after.bytes_requested,
            "categories_before": sides[0]["categories_at_moment"],
            "categories_after": sides[1]["categories_at_moment"],
            "changes": changed.into_iter().map(change_object).collect::<Vec<_>>(),
        }));
    }
    let title = format!("{} and {}", names[0], names[1]);
    Page { manifest: json!({ "title": title, "difference": list }), title, sections }
}

/// How much more or less is allocated and reserved, in a sentence.
#[must_use]
pub fn headline(before: &Explanation, after: &Explanation) -> String {
    let by = |(before, after): (u64, u64), what: &str| match after.abs_diff(before) {
        0 => (format!("as much {what}"), "as"),
        bytes => (format!("{} {} {what}", text(bytes), if after > before { "more" } else { "less" }), "than"),
    };
    let ([one, other], peaks) = sides(before, after);
    let allocated = by((one.bytes_allocated, other.bytes_allocated), "allocated");
    let reserved = by(peaks.into(), "reserved");
    match (allocated, reserved) {
        ((allocated, word), (reserved, same)) if word == same => {
            format!("The second recording has {allocated} and {reserved} {word} the first")
        }
        ((allocated, word), (reserved, _)) => {
            format!("The second recording has {allocated} {word} the first, and {reserved}")
        }
    }
}

/// The moments of both, and the most that each reserved.
fn sides<'a>(before: &'a Explanation, after: &'a Explanation) -> ([&'a Moment; 2], [u64; 2]) {
    let moments = [before.moment(), after.moment()];
    let reserved = |explanation: &Explanation| {
        explanation.peaks.map_or(explanation.moment().bytes_reserved, |peaks| peaks.reserved.bytes)
    };
    (moments, [reserved(before), reserved(after)])
}

/// What is compared, in sentences.
#[must_use]
pub fn compared(before: &Explanation, after: &Explanation) -> String {
    let ([one, other], [one_peak, other_peak]) = sides(before, after);
    let place =
        |moment: &Moment| moment.event.map_or_else(|| "at the start".to_owned(), |event| format!("event {event}"));
    let moment = match (before.peaks, after.peaks) {
        (None, _) | (_, None) => "the states when the snapshots were taken".to_owned(),
        _ => format!("{} of each: {} and {}", moment_name(one.kind), place(one), place(other)),
    };
    format!(
        "Compared is {moment}. Allocated then: {} and {} ({} and {} requested). Reserved at most: {} and {}.",
        text(one.bytes_allocated),
        text(other.bytes_allocated),
        text(one.bytes_requested),
        text(other.bytes_requested),
        text(one_peak),
        text(other_peak),
    )
}

fn category_object(change: &CategoryChange) -> Value {
    json!({
        "name": change.category.name(),
        "bytes_before": change.bytes_before,
        "bytes_after": change.bytes_after,
    })
}

/// What changed on one device.
#[must_use]
pub fn object(files: [&Path; 2], before: &Explanation, after: &Explanation, changes: &[HolderChange]) -> Value {
    let side = |file: &Path, explanation: &Explanation| {
        let moment = explanation.moment();
        json!({
            "file": file.to_string_lossy(),
            "device": explanation.device,
            "moment": moment.kind.name(),
            "event": moment.event,
            "requested_bytes": moment.bytes_requested,
            "allocated_bytes": moment.bytes_allocated,
            "reserved_bytes": moment.bytes_reserved,
            "peak_reserved_bytes": explanation.peaks.map(|peaks| peaks.reserved.bytes),
        })
    };
    json!({
        "schema_version": 2,
        "headline": headline(before, after),
        "before": side(files[0], before),
        "after": side(files[1], after),
        "categories": category_changes(before.moment(), after.moment()).iter().map(category_object).collect::<Vec<_>>(),
        "changes": changes.iter().map(change_object).collect::<Vec<_>>(),
    })
}

/// A group of blocks in both.
#[must_use]
pub fn change_object(change: &HolderChange) -> Value {
    json!({
        "kind": change.kind.name(),
        "name": change.name,
        "line": change.line,
        "forward_line": change.forward_line,
        "category": change.category.name(),
        "path": change.path,
        "bytes_before": change.bytes_before,
        "bytes_after": change.bytes_after,
        "count_before": change.count_before,
        "count_after": change.count_after,
    })
}
