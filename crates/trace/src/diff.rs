//! Two recordings at moments of one kind: what is new, gone, grown or shrunk (before and after a change, or two ranks
//! of one job).
//!
//! Groups of blocks are matched by the functions and files of their calls. Lines move when code is inserted above them,
//! so they decide only among calls of one function: the same lines first, then those in the same order.

use std::collections::BTreeMap;

use crate::category::Category;
use crate::explain::{Explanation, Holder, Moment};

/// How a group of blocks changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChangeKind {
    /// It is only in the second recording.
    New,
    /// It is only in the first recording.
    Gone,
    /// It has more bytes in the second.
    Grown,
    /// It has fewer.
    Shrunk,
    /// It has as many.
    Same,
}

impl ChangeKind {
    /// Its name: `new`, `gone`, `grown`, `shrunk`, `same`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Gone => "gone",
            Self::Grown => "grown",
            Self::Shrunk => "shrunk",
            Self::Same => "same",
        }
    }
}

/// A group of blocks in both recordings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderChange {
    /// How it changed.
    pub kind: ChangeKind,
    /// What the blocks have in common: the call that allocated them, or their size.
    pub name: String,
    /// The innermost line of the program's own code; of the second recording, if it is in both.
    pub line: Option<String>,
    /// In the backward pass, the line of the forward pass, where that can be determined.
    pub forward_line: Option<String>,
    /// The category of most of its bytes.
    pub category: Category,
    /// The calls from that line to the allocation.
    pub path: Vec<String>,
    /// Bytes in the first recording.
    pub bytes_before: u64,
    /// Bytes in the second.
    pub bytes_after: u64,
    /// Blocks in the first recording.
    pub count_before: u64,
    /// Blocks in the second.
    pub count_after: u64,
}

impl HolderChange {
    /// By how many bytes it changed.
    #[must_use]
    pub const fn bytes_changed(&self) -> u64 {
        self.bytes_before.abs_diff(self.bytes_after)
    }
}

/// The bytes of a category in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CategoryChange {
    /// The category.
    pub category: Category,
    /// Requested bytes in the first recording.
    pub bytes_before: u64,
    /// Requested bytes in the second.
    pub bytes_after: u64,
}

/// The categories that either has.
#[must_use]
pub fn category_changes(before: &Moment, after: &Moment) -> Vec<CategoryChange> {
    let of = |moment: &Moment, category: Category| {
        moment.categories.iter().find(|share| share.category == category).map_or(0, |share| share.bytes)
    };
    let change = |category: Category| CategoryChange {
        category,
        bytes_before: of(before, category),
        bytes_after: of(after, category),
    };
    let all = Category::ALL.into_iter().map(change);
    all.filter(|change| change.bytes_before > 0 || change.bytes_after > 0).collect()
}

/// All groups of two explanations, those that changed most first.
#[must_use]
pub fn diff(before: &Explanation, after: &Explanation) -> Vec<HolderChange> {
    holder_changes(&before.moment().holders.groups, &after.moment().holders.groups)
}

/// The same of two lists of holders.
#[must_use]
pub fn holder_changes(before: &[Holder], after: &[Holder]) -> Vec<HolderChange> {
    let mut groups: BTreeMap<Vec<String>, [Vec<&Holder>; 2]> = BTreeMap::new();
    for (side, holders) in [before, after].into_iter().enumerate() {
        for holder in holders {
            groups.entry(without_lines(holder)).or_default()[side].push(holder);
        }
    }
    let mut changes: Vec<HolderChange> = Vec::new();
    for [before, after] in groups.into_values() {
        changes.extend(matched(before, after).into_iter().map(|(before, after)| change(before, after)));
    }
    changes.sort_by(|a, b| b.bytes_changed().cmp(&a.bytes_changed()).then_with(|| a.name.cmp(&b.name)));
    changes
}

/// The functions and files of a group, without their lines.
fn without_lines(holder: &Holder) -> Vec<String> {
    let calls = holder.path.iter().chain(&holder.line).chain(&holder.forward_line).chain([&holder.name]);
    calls.map(|call| place_without_line(call).0).collect()
}

/// `f (a/b.py)` and 12, of `f (/home/me/a/b.py:12)`. The folder of a project may be another.
fn place_without_line(place: &str) -> (String, u64) {
    const FOLDERS: usize = 2;
    let parts = || {
        let (name, rest) = place.rsplit_once(" (")?;
        let (file, line) = rest.strip_suffix(')')?.rsplit_once(':')?;
        Some((name, file, line.parse::<u64>().ok()?))
    };
    let Some((name, file, line)) = parts() else { return (place.to_owned(), 0) };
    let mut folders: Vec<&str> = file.rsplit(['/', '\\']).take(FOLDERS).collect();
    folders.reverse();
    (format!("{name} ({})", folders.join("/")), line)
}

/// The lines of a group, the innermost of the program first.
fn lines(holder: &Holder) -> Vec<u64> {
    let calls = holder.line.iter().chain(&holder.forward_line).chain(&holder.path).chain([&holder.name]);
    calls.map(|call| place_without_line(call).1).collect()
}

/// Pairs of groups of the same functions. Both lists are short: the calls of one function from another.
fn matched<'a>(
    mut before: Vec<&'a Holder>,
    mut after: Vec<&'a Holder>,
) -> Vec<(Option<&'a Holder>, Option<&'a Holder>)> {
    let mut pairs = Vec::new();
    before.retain(|one| {
        let same = after.iter().position(|other| lines(other) == lines(one));
        let Some(at) = same else { return true };
        pairs.push((Some(*one), Some(after.remove(at))));
        false
    });
    before.sort_by_key(|holder| lines(holder));
    after.sort_by_key(|holder| lines(holder));
    // Code that was inserted moves all lines below it by as much, and keeps their order. If one side has more, those
    // that are nearest in their lines belong together.
    while !before.is_empty() && !after.is_empty() {
        let spare = before.len().abs_diff(after.len());
        let (fewer, more) = if before.len() <= after.len() { (&before, &after) } else { (&after, &before) };
        let distance = |holder: &&Holder| lines(holder)[0].abs_diff(lines(fewer[0])[0]);
        let nearest = (0..=spare).min_by_key(|&at| distance(&more[at])).unwrap_or(0);
        let before_is_fewer = before.len() <= after.len();
        let (skipped, paired) = match before_is_fewer {
            true => (after.drain(..nearest).collect::<Vec<_>>(), (before.remove(0), after.remove(0))),
            false => (before.drain(..nearest).collect::<Vec<_>>(), (before.remove(0), after.remove(0))),
        };
        for holder in skipped {
            pairs.push(if before_is_fewer { (None, Some(holder)) } else { (Some(holder), None) });
        }
        pairs.push((Some(paired.0), Some(paired.1)));
    }
    pairs.extend(before.into_iter().map(|holder| (Some(holder), None)));
    pairs.extend(after.into_iter().map(|holder| (None, Some(holder))));
    pairs
}

fn change(before: Option<&Holder>, after: Option<&Holder>) -> HolderChange {
    let shown = after.or(before).expect("one of them is there");
    let bytes = |holder: Option<&Holder>| holder.map_or(0, |holder| holder.bytes);
    let count = |holder: Option<&Holder>| holder.map_or(0, |holder| holder.count);
    HolderChange {
        kind: match (before, after) {
            (None, _) => ChangeKind::New,
            (_, None) => ChangeKind::Gone,
            _ if bytes(after) > bytes(before) => ChangeKind::Grown,
            _ if bytes(after) < bytes(before) => ChangeKind::Shrunk,
            _ => ChangeKind::Same,
        },
        name: shown.name.clone(),
        line: shown.line.clone(),
        forward_line: shown.forward_line.clone(),
        category: shown.category,
        path: shown.path.clone(),
        bytes_before: bytes(before),
        bytes_after: bytes(after),
        count_before: count(before),
        count_after: count(after),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(line: u64, bytes: u64) -> Holder {
        let line = format!("train (/home/me/train.py:{line})");
        Holder {
            name: "relu (torch/nn/functional.py:7)".to_owned(),
            line: Some(line),
            forward_line: None,
            path: vec!["relu (torch/nn/functional.py:7)".to_owned()],
            bytes,
            count: 1,
            category: Category::Activations,
        }
    }

    fn check(before: &[(u64, u64)], after: &[(u64, u64)], expected: &[(u64, u64)]) {
        let holders =
            |lines: &[(u64, u64)]| -> Vec<Holder> { lines.iter().map(|&(line, it)| holder(line, it)).collect() };
        let (one, other) = (holders(before), holders(after));
        let mut found: Vec<(u64, u64)> = matched(one.iter().collect(), other.iter().collect())
            .into_iter()
            .map(|(one, other)| (one.map_or(0, |it| it.bytes), other.map_or(0, |it| it.bytes)))
            .collect();
        found.sort_unstable();
        assert_eq!(found, expected, "{before:?} and {after:?}");
    }

    #[test]
    fn lines_that_moved_are_matched() {
        check(&[(10, 1), (20, 2)], &[(12, 1), (22, 2)], &[(1, 1), (2, 2)]);
        check(&[(10, 1), (20, 2)], &[(20, 1), (30, 2)], &[(1, 2), (2, 1)]);
        check(&[(10, 1), (20, 2), (30, 3)], &[(12, 1), (32, 3)], &[(1, 1), (2, 0), (3, 3)]);
        check(&[(10, 1)], &[(12, 1), (40, 4)], &[(0, 4), (1, 1)]);
        check(&[], &[(12, 1)], &[(0, 1)]);
    }

    #[test]
    fn places_are_split() {
        assert_eq!(place_without_line("f (/home/me/a/b.py:12)"), ("f (a/b.py)".to_owned(), 12));
        assert_eq!(place_without_line("f (C:\\me\\a\\b.py:12)"), ("f (a/b.py)".to_owned(), 12));
        assert_eq!(place_without_line("blocks of 2 MiB"), ("blocks of 2 MiB".to_owned(), 0));
        assert_eq!(place_without_line("BmmBackward0"), ("BmmBackward0".to_owned(), 0));
    }
}
