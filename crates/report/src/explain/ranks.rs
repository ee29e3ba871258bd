//! Many explanations in one table, such as those of the ranks of one job: which differ from the others, and in what.

use std::collections::BTreeMap;

use warpool_trace::explain::Explanation;

use super::tables::Table;
use crate::size;

/// A difference from the middle by more than this share makes an outlier.
const OUTLIER: f64 = 0.05;

/// One recording among several.
#[derive(Clone, Copy)]
pub struct Rank<'a> {
    /// The short name that distinguishes it.
    pub name: &'a str,
    /// Its explanation.
    pub explanation: &'a Explanation,
}

/// All in one table.
#[must_use]
pub fn ranks_table(ranks: &[Rank<'_>]) -> Table {
    let row = |&Rank { name, explanation }: &Rank<'_>| {
        let moment = explanation.moment();
        let most = moment.holders.groups.first();
        let most = most.map_or_else(String::new, |most| format!("{} ({})", most.name, size::format(most.bytes)));
        vec![
            name.to_owned(),
            moment.kind.name().to_owned(),
            size::format(moment.bytes_allocated),
            size::format(moment.bytes_reserved),
            explanation.verdict.words().to_owned(),
            most,
        ]
    };
    Table {
        title: format!("{} recordings", ranks.len()),
        columns: &["file", "moment", ">allocated", ">reserved", "verdict", "held most by"],
        rows: ranks.iter().map(row).collect(),
    }
}

/// A sentence for each that differs from the middle, by allocated bytes, and the number of the middle; `None` if none
/// differs.
#[must_use]
pub fn outliers(ranks: &[Rank<'_>]) -> Option<(Vec<String>, usize)> {
    let middle = middle(ranks)?;
    let others = ranks.iter().filter(|other| differs(other.explanation, ranks[middle].explanation));
    let sentences: Vec<String> = others.map(|other| difference(*other, ranks[middle])).collect();
    (!sentences.is_empty()).then_some((sentences, middle))
}

fn middle(ranks: &[Rank<'_>]) -> Option<usize> {
    let mut sorted: Vec<usize> = (0..ranks.len()).collect();
    sorted.sort_by_key(|&rank| ranks[rank].explanation.moment().bytes_allocated);
    sorted.get(sorted.len() / 2).copied()
}

#[expect(clippy::cast_precision_loss, reason = "a share")]
fn differs(one: &Explanation, middle: &Explanation) -> bool {
    let is_far = |one: u64, middle: u64| one.abs_diff(middle) as f64 > OUTLIER * middle as f64;
    let reserved = |it: &Explanation| it.peaks.map_or(it.moment().bytes_reserved, |peaks| peaks.reserved.bytes);
    one.verdict != middle.verdict
        || is_far(one.moment().bytes_allocated, middle.moment().bytes_allocated)
        || is_far(reserved(one), reserved(middle))
}

/// In what one differs from the middle.
fn difference(outlier: Rank<'_>, middle: Rank<'_>) -> String {
    let (one, other) = (outlier.explanation.moment(), middle.explanation.moment());
    let groups = |rank: Rank<'_>| -> BTreeMap<(String, Option<String>), u64> {
        let groups = rank.explanation.moment().holders.groups.iter();
        groups.map(|holder| ((holder.name.clone(), holder.line.clone()), holder.bytes)).collect()
    };
    let (ours, theirs) = (groups(outlier), groups(middle));
    let keys = ours.keys().chain(theirs.keys());
    let change = |key: &(String, Option<String>)| {
        let of = |groups: &BTreeMap<(String, Option<String>), u64>| groups.get(key).copied().unwrap_or(0);
        i128::from(of(&ours)) - i128::from(of(&theirs))
    };
    let most = keys.max_by_key(|key| change(key).unsigned_abs());
    let what = most.map_or_else(String::new, |key| {
        let change = change(key);
        let bytes = size::format(u64::try_from(change.unsigned_abs()).unwrap_or(u64::MAX));
        format!("; the most in {}: {bytes} {}", key.0, if change < 0 { "less" } else { "more" })
    });
    format!(
        "{} differs: {} allocated and {} reserved, where {} has {} and {}{what}.",
        outlier.name,
        size::format(one.bytes_allocated),
        size::format(one.bytes_reserved),
        middle.name,
        size::format(other.bytes_allocated),
        size::format(other.bytes_reserved),
    )
}
