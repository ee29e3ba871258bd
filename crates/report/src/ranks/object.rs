//! The JSON of a report over ranks: `docs/json.md` is its schema.

use serde_json::{Value, json};
use warpool_trace::Category;
use warpool_trace::ranks::{Figures, Group, RankRow, Ranks, TOLERANCE_PERCENT};

use super::prose::{headline, sentences};
use crate::diff::change_object;

/// How many changes of holders a group has.
const CHANGES_MAX: usize = 20;

/// The report as one object.
#[must_use]
pub fn object(ranks: &Ranks) -> Value {
    json!({
        "schema_version": 1,
        "headline": headline(ranks),
        "sentences": sentences(ranks),
        "recordings": ranks.rows.len(),
        "ran_out": ranks.ran_out(),
        "unreadable": ranks.unreadable().count(),
        "tolerance_percent": TOLERANCE_PERCENT,
        "ranks": ranks.rows.iter().map(row_object).collect::<Vec<_>>(),
        "groups": ranks.groups.iter().map(|group| group_object(ranks, group)).collect::<Vec<_>>(),
        "limiting": ranks.limiting.iter().map(|&row| &ranks.rows[row].name).collect::<Vec<_>>(),
        "more": ranks.more.map(|more| json!({
            "percent": more.percent,
            "name": ranks.rows[more.row].name,
            "needed_bytes": ranks.rows[more.row].figures().map(|figures| figures.peak_needed),
            "available_bytes": ranks.rows[more.row].bytes_available,
            "would_run_out": more.would_run_out,
        })),
    })
}

fn row_object(row: &RankRow) -> Value {
    let RankRow { name, rank, summary, group, .. } = row;
    let mut object = json!({
        "name": name,
        "rank": rank,
        "world": summary.identity.world,
        "host": summary.identity.host,
        "group": group,
        "error": summary.figures.as_ref().err(),
    });
    if let (Some(figures), Some(keys)) = (row.figures(), object.as_object_mut()) {
        let more = figures_object(row, figures);
        keys.extend(more.as_object().cloned().unwrap_or_default());
    }
    object
}

fn figures_object(row: &RankRow, figures: &Figures) -> Value {
    let most = figures.holders.first();
    json!({
        "device": figures.device,
        "verdict": figures.verdict.name(),
        "evidence": figures.evidence,
        "events": figures.events,
        "ooms": figures.ooms,
        "oom_us": figures.oom_us,
        "start_us": figures.start_us,
        "duration_us": figures.duration_us,
        "exact": figures.exact,
        "moment": figures.moment.name(),
        "event": figures.event,
        "requested_bytes": figures.bytes_requested,
        "allocated_bytes": figures.bytes_allocated,
        "reserved_bytes": figures.bytes_reserved,
        "request_bytes": figures.request_bytes,
        "peak_allocated_bytes": figures.peak_allocated,
        "peak_reserved_bytes": figures.peak_reserved,
        "peak_needed_bytes": figures.peak_needed,
        "device_bytes_total": figures.device_bytes_total,
        "device_name": figures.device_name,
        "available_bytes": row.bytes_available,
        "available_assumed": row.available_assumed,
        "margin_bytes": row.margin(),
        "held_most_by": most.map(|holder| json!({
            "name": holder.name,
            "line": holder.line,
            "bytes": holder.bytes,
            "category": holder.category.name(),
        })),
    })
}

fn group_object(ranks: &Ranks, group: &Group) -> Value {
    let first = &ranks.rows[group.rows[0]];
    let category = |&(category, before, after): &(Category, u64, u64)| {
        let name = category.name();
        json!({ "name": name, "bytes_before": before, "bytes_after": after })
    };
    let difference = group.difference.as_ref().map(|difference| {
        let changes = difference.holders.iter().take(CHANGES_MAX);
        json!({
            "from": ranks.rows[ranks.groups[0].rows[0]].name,
            "categories": difference.categories.iter().map(category).collect::<Vec<_>>(),
            "changes": changes.map(change_object).collect::<Vec<_>>(),
        })
    });
    json!({
        "first": first.name,
        "names": group.rows.iter().map(|&row| &ranks.rows[row].name).collect::<Vec<_>>(),
        "difference": difference,
    })
}
