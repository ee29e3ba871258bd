//! Two recordings, matched by call stack: what is new, gone, grown or shrunk at their moments (before and after a
//! change, or two ranks of one job).

use std::collections::BTreeMap;

use crate::explain::{Explanation, Holder};

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
    /// The innermost line of the program's own code.
    pub line: Option<String>,
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

/// All groups of two explanations, those that changed most first.
#[must_use]
pub fn diff(before: &Explanation, after: &Explanation) -> Vec<HolderChange> {
    let mut changes: BTreeMap<(&str, Option<&str>, &[String]), HolderChange> = BTreeMap::new();
    let sides = [(&before.moment().holders.groups, true), (&after.moment().holders.groups, false)];
    for (groups, is_before) in sides {
        for holder in groups {
            let Holder { name, line, path, bytes, count } = holder;
            let change = changes.entry((name, line.as_deref(), path)).or_insert_with(|| HolderChange {
                kind: ChangeKind::Same,
                name: name.clone(),
                line: line.clone(),
                path: path.clone(),
                bytes_before: 0,
                bytes_after: 0,
                count_before: 0,
                count_after: 0,
            });
            let (of_bytes, of_count) = match is_before {
                true => (&mut change.bytes_before, &mut change.count_before),
                false => (&mut change.bytes_after, &mut change.count_after),
            };
            *of_bytes += bytes;
            *of_count += count;
        }
    }
    let mut changes: Vec<HolderChange> = changes.into_values().collect();
    for change in &mut changes {
        change.kind = match (change.count_before, change.count_after) {
            (0, _) => ChangeKind::New,
            (_, 0) => ChangeKind::Gone,
            _ if change.bytes_after > change.bytes_before => ChangeKind::Grown,
            _ if change.bytes_after < change.bytes_before => ChangeKind::Shrunk,
            _ => ChangeKind::Same,
        };
    }
    changes.sort_by(|a, b| b.bytes_changed().cmp(&a.bytes_changed()).then_with(|| a.name.cmp(&b.name)));
    changes
}
