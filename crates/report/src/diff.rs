//! The difference of two recordings in sentences, as JSON and as a page.

use std::path::Path;

use serde_json::{Value, json};
use warpool_trace::diff::{ChangeKind, HolderChange, diff};
use warpool_trace::explain::{Explanation, MomentKind};

use crate::bytes_text::text;
use crate::view::{DevicePart, Page};

/// What is known of one device of a recording.
pub struct Side {
    /// Its explanation.
    pub explanation: Explanation,
    /// For the page.
    pub part: Option<DevicePart>,
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
            "headline": headline(before.parts.allocated, after.parts.allocated),
            "prose": [compared(&one.explanation, &other.explanation)],
            "before": sides[0],
            "after": sides[1],
            "allocated_before": before.parts.allocated,
            "allocated_after": after.parts.allocated,
            "categories_before": sides[0]["categories_at_moment"],
            "categories_after": sides[1]["categories_at_moment"],
            "changes": changed.into_iter().map(change_object).collect::<Vec<_>>(),
        }));
    }
    let title = format!("{} and {}", names[0], names[1]);
    Page { manifest: json!({ "title": title, "difference": list }), title, sections }
}

fn headline(before: u64, after: u64) -> String {
    match after.abs_diff(before) {
        0 => "The second recording holds as much as the first".to_owned(),
        bytes => {
            let direction = if after > before { "more" } else { "less" };
            format!("The second recording holds {} {direction} than the first", text(bytes))
        }
    }
}

/// What is compared, in a sentence.
#[must_use]
pub fn compared(one: &Explanation, other: &Explanation) -> String {
    let (one, other) = (one.moment(), other.moment());
    format!(
        "Allocated: {} and {}. Reserved: {} and {}. Compared are the {} of the first and the {} of the second.",
        text(one.parts.allocated),
        text(other.parts.allocated),
        text(one.bytes_reserved),
        text(other.bytes_reserved),
        moment_name(one.kind),
        moment_name(other.kind),
    )
}

fn moment_name(kind: MomentKind) -> &'static str {
    match kind {
        MomentKind::OutOfMemory => "out-of-memory event",
        MomentKind::Peak => "peak",
        MomentKind::Snapshot => "snapshot",
    }
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
            "allocated_bytes": moment.parts.allocated,
            "reserved_bytes": moment.bytes_reserved,
        })
    };
    json!({
        "schema_version": 1,
        "before": side(files[0], before),
        "after": side(files[1], after),
        "changes": changes.iter().map(change_object).collect::<Vec<_>>(),
    })
}

fn change_object(change: &HolderChange) -> Value {
    json!({
        "kind": change.kind.name(),
        "name": change.name,
        "line": change.line,
        "path": change.path,
        "bytes_before": change.bytes_before,
        "bytes_after": change.bytes_after,
        "count_before": change.count_before,
        "count_after": change.count_after,
    })
}
