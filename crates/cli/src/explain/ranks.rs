//! Many explanations in one table, such as those of the ranks of one job: which differ from the others, and in what.

use std::collections::BTreeMap;
use std::io;

use warpool_trace::explain::Explanation;

use super::Explained;
use crate::output::{self, Output};
use crate::size;

/// A difference from the middle by more than this share makes an outlier.
const OUTLIER: f64 = 0.05;

/// Writes the table, and a paragraph for each that differs.
pub(super) fn write(explained: &[Explained], output: &mut Output) -> io::Result<()> {
    let mut table = output::table(&["file", "moment", ">allocated", ">reserved", "verdict", "held most by"]);
    for Explained { name, explanation, .. } in explained {
        let moment = explanation.moment();
        let most = moment.holders.groups.first();
        let most = most.map_or_else(String::new, |most| format!("{} ({})", most.name, size::format(most.bytes)));
        table.add_row([
            name.clone(),
            moment.kind.name().to_owned(),
            size::format(moment.bytes_allocated),
            size::format(moment.bytes_reserved),
            explanation.verdict.words().to_owned(),
            most,
        ]);
    }
    output.table(&format!("{} recordings", explained.len()), &table)?;
    let middle = middle(explained);
    let outliers: Vec<&Explained> =
        explained.iter().filter(|other| differs(&other.explanation, &middle.explanation)).collect();
    if outliers.is_empty() {
        return output.paragraph("None differs from the others by more than 5 % in what is allocated or reserved.");
    }
    for outlier in outliers {
        output.paragraph(&difference(outlier, middle))?;
    }
    let file = output::printable(&middle.file.display().to_string());
    output.paragraph(&format!("`warpool explain FILE` tells more of one; the middle one is {file}."))
}

/// The one in the middle, by allocated bytes.
fn middle(explained: &[Explained]) -> &Explained {
    let mut sorted: Vec<&Explained> = explained.iter().collect();
    sorted.sort_by_key(|explained| explained.explanation.moment().bytes_allocated);
    sorted[sorted.len() / 2]
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
fn difference(outlier: &Explained, middle: &Explained) -> String {
    let (one, other) = (outlier.explanation.moment(), middle.explanation.moment());
    let groups = |explained: &Explained| -> BTreeMap<(String, Option<String>), u64> {
        let groups = explained.explanation.moment().holders.groups.iter();
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
