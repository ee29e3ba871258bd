//! The report over many ranks: which are equal, which limits the job, and in what the others differ.
//!
//! - Ranks are in natural order. Summaries that are equal in everything count once.
//! - Two ranks are *equal* if their verdicts are the same, and the most that was allocated, the most that was reserved
//!   and the bytes of each category at the moment differ by at most [`TOLERANCE_PERCENT`] of what the first one
//!   reserved at most. A group has its first rank in natural order, and all later ones that are equal to this one.
//! - The job's ranks are taken to run on equal devices: where a recording does not tell what its device had for the
//!   program, it is the least that other ranks had, unless this one reserved more.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use super::identity::bare_number;
use super::natural::natural_order;
use super::summary::{Figures, Summary};
use crate::category::Category;
use crate::diff::{ChangeKind, HolderChange, holder_changes};
use crate::explain::Verdict;

/// Ranks that differ by no more than this share of what is reserved are equal.
pub const TOLERANCE_PERCENT: u64 = 2;

/// By how much more memory than recorded [`Ranks::more`] asks.
const MORE_PERCENT: u64 = 5;

/// The report.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// All ranks in natural order, those that cannot be read among them.
    pub rows: Vec<RankRow>,
    /// Groups of equal ranks, the largest first; of equal sizes the one with the first rank.
    pub groups: Vec<Group>,
    /// The rows that can be read, those that limit the job first: those that ran out of memory by time, then the others
    /// by margin.
    pub limiting: Vec<usize>,
    /// The rank that would run out of memory first if all needed a little more.
    pub more: Option<More>,
}

/// One rank.
#[derive(Clone, Debug)]
pub struct RankRow {
    /// A short name that no other row has: `rank 3`, or as much of the file's path as tells it apart.
    pub name: String,
    /// Its rank, from the metadata or the file's name.
    pub rank: Option<u32>,
    /// What is known of it.
    pub summary: Summary,
    /// The number of its group; `None` if it cannot be read.
    pub group: Option<usize>,
    /// What its device has for it; `None` if that is not known.
    pub bytes_available: Option<u64>,
    /// Whether that is taken from other ranks.
    pub available_assumed: bool,
}

/// Ranks that are equal.
#[derive(Clone, Debug)]
pub struct Group {
    /// Its rows, in natural order. The first stands for all.
    pub rows: Vec<usize>,
    /// In what its first differs from that of the largest group; `None` in the largest group.
    pub difference: Option<Difference>,
}

/// In what one rank differs from another.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The categories with their bytes in the other and in this one, those that differ most first.
    pub categories: Vec<(Category, u64, u64)>,
    /// Who holds more or less, those that differ most first.
    pub holders: Vec<HolderChange>,
}

/// The rank that would run out first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct More {
    /// How much more, in percent.
    pub percent: u64,
    /// The row with the least room: what its device has, in relation to what it needs.
    pub row: usize,
    /// How many rows would run out with that much more; `None` if no device is known.
    pub would_run_out: Option<usize>,
}

impl RankRow {
    /// Its figures, if it can be read.
    #[must_use]
    pub fn figures(&self) -> Option<&Figures> {
        self.summary.figures.as_ref().ok()
    }

    /// What its device has beyond what it needed; `None` if it ran out, or that is not known.
    #[must_use]
    pub fn margin(&self) -> Option<u64> {
        let figures = self.figures().filter(|figures| !figures.ran_out())?;
        Some(self.bytes_available?.saturating_sub(figures.peak_needed))
    }
}

impl Ranks {
    /// The report over these recordings.
    #[must_use]
    pub fn new(summaries: Vec<Summary>) -> Self {
        let mut rows = rows(summaries);
        let groups = groups(&mut rows);
        let mut limiting: Vec<usize> = (0..rows.len()).filter(|&row| rows[row].figures().is_some()).collect();
        limiting.sort_by(|&a, &b| limits(&rows[a], &rows[b]));
        let more = more(&rows);
        Self { rows, groups, limiting, more }
    }

    /// The rows that cannot be read.
    pub fn unreadable(&self) -> impl Iterator<Item = (&RankRow, &str)> {
        self.rows.iter().filter_map(|row| Some((row, row.summary.figures.as_ref().err()?.as_str())))
    }

    /// How many ran out of memory.
    #[must_use]
    pub fn ran_out(&self) -> usize {
        self.rows.iter().filter_map(RankRow::figures).filter(|figures| figures.ran_out()).count()
    }
}

/// The rows in their order, with names.
fn rows(mut summaries: Vec<Summary>) -> Vec<RankRow> {
    let rank_of = ranks_of(&summaries);
    let device = |summary: &Summary| summary.figures.as_ref().map_or(0, |figures| figures.device);
    summaries.sort_by(|a, b| {
        let known = |summary: &Summary| rank_of(summary).map_or((true, 0), |rank| (false, rank));
        let host = |summary: &Summary| summary.identity.host.clone().unwrap_or_default();
        let order = known(a).cmp(&known(b)).then_with(|| natural_order(&a.file, &b.file));
        let order = order.then_with(|| natural_order(&host(a), &host(b))).then_with(|| device(a).cmp(&device(b)));
        // Recordings that nothing tells apart but their content.
        order.then_with(|| if a == b { Ordering::Equal } else { format!("{a:?}").cmp(&format!("{b:?}")) })
    });
    summaries.dedup();
    let names = names(&summaries, &rank_of);
    // Before `bytes_available` of one is taken for the others.
    let devices: BTreeSet<u64> = known_devices(&summaries).collect();
    let is_one_card = devices.first().zip(devices.last()).is_some_and(|(least, most)| most - least <= most / 100);
    let others = summaries.iter().filter_map(|it| it.figures.as_ref().ok()?.bytes_available).min();
    let others = others.filter(|_| is_one_card || devices.is_empty());
    let row = |(summary, name): (Summary, String)| {
        let own = summary.figures.as_ref().ok().and_then(|figures| figures.bytes_available);
        // A rank that reserved more has another device, or another limit.
        let reserved = summary.figures.as_ref().map_or(0, |figures| figures.peak_reserved);
        let others = others.filter(|&bytes| bytes >= reserved);
        RankRow {
            name,
            rank: rank_of(&summary),
            group: None,
            bytes_available: own.or(others),
            available_assumed: own.is_none() && others.is_some(),
            summary,
        }
    };
    summaries.into_iter().zip(names).map(row).collect()
}

fn known_devices(summaries: &[Summary]) -> impl Iterator<Item = u64> {
    summaries.iter().filter_map(|summary| summary.figures.as_ref().ok()?.device_bytes_total)
}

/// The ranks: what each summary says, or bare numbers at the end of the names, if all have them and they differ.
fn ranks_of(summaries: &[Summary]) -> impl Fn(&Summary) -> Option<u32> + use<> {
    let mut prefixes = BTreeSet::new();
    let mut numbers = BTreeSet::new();
    let mut files = BTreeSet::new();
    let mut is_numbered = true;
    for summary in summaries {
        files.insert(&summary.file);
        match bare_number(&summary.file) {
            Some((prefix, number)) if summary.identity.rank.is_none() => {
                prefixes.insert(prefix);
                numbers.insert(number);
            }
            _ => is_numbered = false,
        }
    }
    let is_numbered = is_numbered && prefixes.len() == 1 && numbers.len() == files.len();
    move |summary| {
        let bare = || bare_number(&summary.file).filter(|_| is_numbered).map(|(_, number)| number);
        summary.identity.rank.or_else(bare)
    }
}

/// The names: ranks, if every recording has one and no two files have the same; else as much of the paths as needed.
fn names(summaries: &[Summary], rank_of: impl Fn(&Summary) -> Option<u32>) -> Vec<String> {
    let files: BTreeSet<&str> = summaries.iter().map(|summary| summary.file.as_str()).collect();
    let ranks: Option<BTreeSet<u32>> = summaries.iter().map(&rank_of).collect();
    let are_ranks = ranks.is_some_and(|ranks| ranks.len() == files.len());
    let files: Vec<String> = summaries.iter().map(|summary| summary.file.clone()).collect();
    let short = short_names(&files);
    let mut names: Vec<String> = Vec::with_capacity(summaries.len());
    for (summary, short) in summaries.iter().zip(short) {
        let name = match rank_of(summary).filter(|_| are_ranks) {
            Some(rank) => format!("rank {rank}"),
            None => short,
        };
        let device = summary.figures.as_ref().ok().filter(|figures| figures.has_others).map(|figures| figures.device);
        let name = device.map_or(name.clone(), |device| format!("{name} GPU {device}"));
        // The same path on several machines.
        let same = names.iter().filter(|other| **other == name || other.starts_with(&format!("{name} ("))).count();
        names.push(if same == 0 { name } else { format!("{name} ({})", same + 1) });
    }
    names
}

/// The shortest names that distinguish the files: the file's own, with as much of its path as needed. Equal paths have
/// equal names.
#[must_use]
pub fn short_names(files: &[String]) -> Vec<String> {
    let parts: Vec<Vec<&str>> = files.iter().map(|file| file.split('/').collect()).collect();
    let tail = |parts: &[&str], count: usize| parts[parts.len().saturating_sub(count)..].join("/");
    let mut names: Vec<Option<String>> = vec![None; files.len()];
    let longest = parts.iter().map(Vec::len).max().unwrap_or(0);
    for count in 1..=longest {
        // The paths of each tail: one that is the tail of a single path is its name.
        let mut paths: std::collections::BTreeMap<String, Option<&str>> = std::collections::BTreeMap::new();
        for (file, parts) in files.iter().zip(&parts) {
            let of_tail = paths.entry(tail(parts, count)).or_insert(Some(file));
            if *of_tail != Some(file.as_str()) {
                *of_tail = None;
            }
        }
        for (name, parts) in names.iter_mut().zip(&parts).filter(|(name, _)| name.is_none()) {
            let own = tail(parts, count);
            if paths.get(&own).is_some_and(Option::is_some) || count >= parts.len() {
                *name = Some(own);
            }
        }
    }
    names.into_iter().map(Option::unwrap_or_default).collect()
}

/// Puts every row in a group, and compares the groups with the largest.
fn groups(rows: &mut [RankRow]) -> Vec<Group> {
    let mut found: Vec<Vec<usize>> = Vec::new();
    for at in 0..rows.len() {
        let Some(figures) = rows[at].figures() else { continue };
        let is_of = |group: &&mut Vec<usize>| rows[group[0]].figures().is_some_and(|first| are_equal(first, figures));
        match found.iter_mut().find(is_of) {
            Some(group) => group.push(at),
            None => found.push(vec![at]),
        }
    }
    // Stable: of equal sizes the one with the first rank.
    found.sort_by_key(|group| std::cmp::Reverse(group.len()));
    for (number, group) in found.iter().enumerate() {
        for &row in group {
            rows[row].group = Some(number);
        }
    }
    let first = |group: &[usize]| rows[group[0]].figures();
    let Some(middle) = found.first().and_then(|group| first(group)) else { return Vec::new() };
    let group = |(number, rows): (usize, Vec<usize>)| {
        let difference = first(&rows).filter(|_| number > 0).map(|figures| difference(middle, figures));
        Group { difference, rows }
    };
    found.clone().into_iter().enumerate().map(group).collect()
}

fn are_equal(first: &Figures, other: &Figures) -> bool {
    let tolerance = first.peak_reserved.saturating_mul(TOLERANCE_PERCENT) / 100;
    let is_near = |one: u64, other: u64| one.abs_diff(other) <= tolerance;
    first.verdict == other.verdict
        && first.ran_out() == other.ran_out()
        && is_near(first.peak_allocated, other.peak_allocated)
        && is_near(first.peak_reserved, other.peak_reserved)
        && first.categories.iter().zip(&other.categories).all(|(&one, &other)| is_near(one, other))
}

fn difference(from: &Figures, to: &Figures) -> Difference {
    let both = |category: Category| (category, from.bytes_of(category), to.bytes_of(category));
    let mut categories: Vec<_> = Category::ALL.into_iter().map(both).filter(|(_, one, other)| one != other).collect();
    // Stable: of equals in the order of categories.
    categories.sort_by_key(|(_, one, other)| std::cmp::Reverse(one.abs_diff(*other)));
    let mut holders = holder_changes(&from.holders, &to.holders);
    holders.retain(|change| change.kind != ChangeKind::Same);
    Difference { categories, holders }
}

/// Those that ran out first, by time; then those with the least margin, then those that need the most.
fn limits(one: &RankRow, other: &RankRow) -> Ordering {
    let key = |row: &RankRow| {
        let figures = row.figures();
        let ran_out = figures.is_some_and(Figures::ran_out);
        let oom = figures.and_then(|figures| figures.oom_us).filter(|_| ran_out);
        let needed = figures.map_or(0, |figures| figures.peak_needed);
        let (margin, is_unknown) = (row.margin().unwrap_or(0), row.margin().is_none());
        (!ran_out, oom.is_none(), oom, is_unknown, margin, std::cmp::Reverse(needed))
    };
    key(one).cmp(&key(other))
}

/// Who would run out first with more memory needed everywhere. Those that ran out already are not asked.
fn more(rows: &[RankRow]) -> Option<More> {
    let asked = rows.iter().enumerate().filter_map(|(at, row)| {
        let figures = row.figures().filter(|figures| !figures.ran_out() && figures.verdict != Verdict::Unknown)?;
        (figures.peak_needed > 0).then_some((at, figures.peak_needed, row.bytes_available))
    });
    let asked: Vec<(usize, u64, Option<u64>)> = asked.collect();
    let is_known = asked.iter().any(|(_, _, available)| available.is_some());
    let wider = |bytes: u64| u128::from(bytes);
    // The least of available / needed, compared without a division; on unknown devices the one that needs the most.
    let first = asked.iter().filter(|(_, _, available)| available.is_some() || !is_known).min_by(|one, other| {
        let of = |&&(_, needed, available): &&(usize, u64, Option<u64>)| (wider(available.unwrap_or(1)), wider(needed));
        let ((a, a_needed), (b, b_needed)) = (of(one), of(other));
        (a * b_needed).cmp(&(b * a_needed))
    })?;
    let runs_out = |&&(_, needed, available): &&(usize, u64, Option<u64>)| {
        available.is_some_and(|available| wider(needed) * u128::from(100 + MORE_PERCENT) > wider(available) * 100)
    };
    let would_run_out = is_known.then(|| asked.iter().filter(runs_out).count());
    Some(More { percent: MORE_PERCENT, row: first.0, would_run_out })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::category::CategoryBytes;
    use crate::explain::MomentKind;
    use crate::ranks::Identity;

    const MIB: u64 = 1 << 20;

    /// A rank that allocated and reserved some MiB, of 1000; `oom_us` is when it ran out.
    fn summary(file: &str, mib: u64, oom_us: Option<i64>) -> Summary {
        let figures = Figures {
            device: 0,
            has_others: false,
            verdict: if oom_us.is_some() { Verdict::LiveExceedsDevice } else { Verdict::Fitted },
            evidence: Vec::new(),
            events: 100,
            ooms: u64::from(oom_us.is_some()),
            oom_us,
            start_us: Some(0),
            duration_us: Some(100),
            exact: Some(true),
            device_bytes_total: None,
            device_name: None,
            bytes_available: oom_us.map(|_| 1000 * MIB),
            moment: MomentKind::Allocated,
            event: Some(7),
            bytes_requested: mib * MIB,
            bytes_allocated: mib * MIB,
            bytes_reserved: mib * MIB,
            request_bytes: None,
            categories: CategoryBytes::default(),
            holders: Vec::new(),
            peak_allocated: mib * MIB,
            peak_reserved: mib * MIB,
            peak_needed: mib * MIB,
            columns: Vec::new(),
        };
        Summary { file: file.to_owned(), identity: Identity::of_path(file), figures: Ok(figures) }
    }

    fn names(ranks: &Ranks, rows: &[usize]) -> Vec<String> {
        rows.iter().map(|&row| ranks.rows[row].name.clone()).collect()
    }

    #[test]
    fn report_names_who_limits() {
        let ranks = Ranks::new(vec![
            summary("j/rank10.pickle", 500, None),
            summary("j/rank2.pickle", 960, None),
            summary("j/rank1.pickle", 900, Some(50)),
            summary("j/rank0.pickle", 900, Some(70)),
            summary("j/rank3.pickle", 505, None),
            summary("j/rank4.pickle", 520, None),
            Summary::unreadable("j/rank5.pickle", "damaged".to_owned()),
        ]);
        let all: Vec<usize> = (0..ranks.rows.len()).collect();
        let expected = ["rank 0", "rank 1", "rank 2", "rank 3", "rank 4", "rank 5", "rank 10"];
        assert_eq!(names(&ranks, &all), expected);
        let expected = ["rank 1", "rank 0", "rank 2", "rank 4", "rank 3", "rank 10"];
        assert_eq!(names(&ranks, &ranks.limiting), expected);
        let groups: Vec<Vec<String>> = ranks.groups.iter().map(|group| names(&ranks, &group.rows)).collect();
        // 520 differs from 505 by more than 2 %, 500 does not.
        let expected: [&[&str]; 4] = [&["rank 0", "rank 1"], &["rank 3", "rank 10"], &["rank 2"], &["rank 4"]];
        assert_eq!(groups, expected);
        let more = ranks.more.expect("some fitted");
        assert_eq!((ranks.rows[more.row].name.as_str(), more.would_run_out), ("rank 2", Some(1)));
        let row = &ranks.rows[2];
        assert_eq!((row.margin(), row.available_assumed), (Some(40 * MIB), true), "as much as those that ran out had");
        assert_eq!(
            ranks.unreadable().map(|(row, error)| (row.name.as_str(), error)).next(),
            Some(("rank 5", "damaged"))
        );
    }

    #[test]
    fn report_is_a_function_of_the_set() {
        let mut summaries: Vec<Summary> =
            (0..40).map(|rank| summary(&format!("r{rank}.pkl"), 400 + rank % 7, None)).collect();
        summaries.push(Summary::unreadable("r7.pkl", "two files of one name".to_owned()));
        let expected = format!("{:?}", Ranks::new(summaries.clone()));
        for seed in 0..20 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut mixed = summaries.clone();
            mixed.extend((0..rng.usize(0..9)).map(|_| summaries[rng.usize(0..summaries.len())].clone()));
            rng.shuffle(&mut mixed);
            assert_eq!(format!("{:?}", Ranks::new(mixed)), expected, "seed {seed}");
        }
    }

    #[test]
    fn bare_numbers_are_ranks_if_all_recordings_have_one() {
        let ranks = |files: &[&str]| -> Vec<Option<u32>> {
            let found = Ranks::new(files.iter().map(|file| summary(file, 100, None)).collect());
            found.rows.iter().map(|row| row.rank).collect()
        };
        assert_eq!(ranks(&["oom_10.pickle", "oom_9.pickle"]), [Some(9), Some(10)]);
        assert_eq!(ranks(&["oom_10.pickle", "oom.pickle"]), [None, None]);
        assert_eq!(ranks(&["a_1.pickle", "b_2.pickle"]), [None, None], "they are not of one series");
    }

    #[test]
    fn names_have_as_much_of_the_path_as_tells_them_apart() {
        let check = |files: &[&str], expected: &[&str]| {
            let files: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
            assert_eq!(short_names(&files), expected);
        };
        check(&["a/b/one.pickle", "a/b/two.pickle"], &["one.pickle", "two.pickle"]);
        let paths = ["run1/rank0/s.pickle", "run2/rank0/s.pickle", "t"];
        check(&paths, &paths);
        check(&["s.pickle", "a/s.pickle"], &["s.pickle", "a/s.pickle"]);
        check(&["same", "same"], &["same", "same"]);
    }
}
