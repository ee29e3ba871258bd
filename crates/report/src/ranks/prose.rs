//! The report over ranks in sentences and tables.

use warpool_trace::ranks::{Difference, Figures, Group, RankRow, Ranks};

use crate::bytes_text::text;
use crate::explain::Table;
use crate::size;

/// How many groups are compared in sentences, and how many unreadable recordings are named.
const NAMED_MAX: usize = 8;

/// Up to this many ranks, all are in a table.
const ROWS_ALL: usize = 64;

/// The answer in a few words.
#[must_use]
pub fn headline(ranks: &Ranks) -> String {
    let (all, ran_out, unreadable) = (ranks.rows.len(), ranks.ran_out(), ranks.unreadable().count());
    let recordings = if all == 1 { "1 recording".to_owned() } else { format!("{all} recordings") };
    let ran_out = match ran_out {
        0 => "none ran out of memory".to_owned(),
        1 => "1 ran out of memory".to_owned(),
        count => format!("{count} ran out of memory"),
    };
    let groups = match ranks.groups.len() {
        0 => String::new(),
        1 => ", all that can be read are equal".to_owned(),
        count => format!(", {count} groups of equal ranks"),
    };
    let unreadable = match unreadable {
        0 => String::new(),
        count => format!(", {count} cannot be read"),
    };
    format!("{recordings}: {ran_out}{groups}{unreadable}")
}

/// The answer in sentences: who ran out first, who would next, in what the groups differ, what cannot be read.
#[must_use]
pub fn sentences(ranks: &Ranks) -> Vec<String> {
    let mut lines: Vec<String> = ran_out(ranks).into_iter().chain(more(ranks)).collect();
    let differing: Vec<(&Group, &Difference)> =
        ranks.groups.iter().filter_map(|group| Some((group, group.difference.as_ref()?))).collect();
    for (group, difference) in differing.iter().take(NAMED_MAX) {
        lines.push(difference_sentence(ranks, group, difference));
    }
    if differing.len() > NAMED_MAX {
        lines.push(format!("{} more groups are in the table and in --json.", differing.len() - NAMED_MAX));
    }
    let unreadable: Vec<_> = ranks.unreadable().collect();
    lines
        .extend(unreadable.iter().take(NAMED_MAX).map(|(row, error)| format!("{} cannot be read: {error}.", row.name)));
    if unreadable.len() > NAMED_MAX {
        lines.push(format!("{} more recordings cannot be read.", unreadable.len() - NAMED_MAX));
    }
    lines
}

fn ran_out(ranks: &Ranks) -> Option<String> {
    let row = &ranks.rows[*ranks.limiting.first()?];
    let figures = row.figures().filter(|figures| figures.ran_out())?;
    let time =
        seconds(ranks, figures).map_or_else(String::new, |seconds| format!(", {seconds} after the job's first event"));
    let request = figures.request_bytes.map_or_else(String::new, |bytes| format!(" by a request of {}", text(bytes)));
    let evidence = match figures.evidence.as_slice() {
        [] => String::new(),
        list => format!(" ({})", list.join("; ")),
    };
    let first = match ranks.ran_out() {
        1 => "ran out of memory",
        _ => "ran out of memory first",
    };
    Some(format!("{} {first}{request}{time}: {}{evidence}.", row.name, figures.verdict.words()))
}

/// When it ran out of memory, after the first event of any recording.
fn seconds(ranks: &Ranks, figures: &Figures) -> Option<String> {
    let start = ranks.rows.iter().filter_map(|row| row.figures()?.start_us).min()?;
    let after = figures.oom_us?.checked_sub(start)?;
    #[expect(clippy::cast_precision_loss, reason = "seconds with two decimals")]
    let seconds = after as f64 / 1e6;
    Some(format!("{seconds:.2} s"))
}

fn more(ranks: &Ranks) -> Option<String> {
    let more = ranks.more?;
    let row = &ranks.rows[more.row];
    let figures = row.figures()?;
    let percent = more.percent;
    let Some((available, would)) = row.bytes_available.zip(more.would_run_out) else {
        return Some(format!(
            "On equal devices {} would run out of memory first with {percent} % more: it needs the most, {}. What the \
             devices have is not known: say it with --gpu or --capacity.",
            row.name,
            text(figures.peak_needed)
        ));
    };
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let room = 100.0 * (available as f64 / figures.peak_needed as f64 - 1.0).max(0.0);
    let assumed = if row.available_assumed { ", if its device has what those of other ranks have" } else { "" };
    let room = format!(
        "it needs {} of {}, which leaves room for {room:.1} % more{assumed}",
        text(figures.peak_needed),
        text(available)
    );
    Some(match would {
        0 => format!(
            "With {percent} % more, none of the others would run out of memory. {} has the least room: {room}.",
            row.name
        ),
        1 => format!("With {percent} % more, {} would run out of memory, and no other: {room}.", row.name),
        count => format!("With {percent} % more, {count} would run out of memory, {} first: {room}.", row.name),
    })
}

fn difference_sentence(ranks: &Ranks, group: &Group, difference: &Difference) -> String {
    let (row, other) = (&ranks.rows[group.rows[0]], &ranks.rows[ranks.groups[0].rows[0]]);
    let (Some(one), Some(from)) = (row.figures(), other.figures()) else { return String::new() };
    let verb = if group.rows.len() == 1 { "differs" } else { "differ" };
    let by = |before: u64, after: u64| {
        format!("{} {}", text(after.abs_diff(before)), if after < before { "less" } else { "more" })
    };
    let kinds: Vec<String> = difference
        .categories
        .iter()
        .take(2)
        .map(|&(category, before, after)| format!("{} {}", category.words(), by(before, after)))
        .collect();
    let kinds = if kinds.is_empty() { String::new() } else { format!(". By category: {}", kinds.join(", ")) };
    let holder = difference.holders.first().map_or_else(String::new, |change| {
        let line = change.line.as_ref().filter(|line| **line != change.name);
        let line = line.map_or_else(String::new, |line| format!(", from {line}"));
        format!(". The most in {}{line}: {}", change.name, by(change.bytes_before, change.bytes_after))
    });
    let verdict = match one.verdict == from.verdict {
        true => String::new(),
        false => format!(" (verdict: {}; of {}: {})", one.verdict.words(), other.name, from.verdict.words()),
    };
    format!(
        "{} {verb} from {}{verdict}: at most {} allocated and {} reserved, where {} has {} and {}{kinds}{holder}.",
        names(ranks, &group.rows),
        other.name,
        text(one.peak_allocated),
        text(one.peak_reserved),
        other.name,
        text(from.peak_allocated),
        text(from.peak_reserved),
    )
}

/// The names of some rows: ranks as ranges, others at most three.
fn names(ranks: &Ranks, rows: &[usize]) -> String {
    let all_ranks = ranks.rows.iter().all(|row| row.rank.is_some_and(|rank| row.name == format!("rank {rank}")));
    let numbers: Option<Vec<u32>> = rows.iter().map(|&row| ranks.rows[row].rank.filter(|_| all_ranks)).collect();
    let Some(numbers) = numbers.filter(|numbers| numbers.len() > 1) else {
        let shown: Vec<&str> = rows.iter().take(3).map(|&row| ranks.rows[row].name.as_str()).collect();
        let rest = rows.len() - shown.len();
        return match rest {
            0 => shown.join(", "),
            rest => format!("{} and {rest} more", shown.join(", ")),
        };
    };
    const RANGES_MAX: usize = 6;
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let range = |&(first, last): &(u32, u32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let shown: Vec<String> = ranges.iter().take(RANGES_MAX).map(range).collect();
    let more = if ranges.len() > RANGES_MAX { ", …" } else { "" };
    format!("ranks {}{more}", shown.join(", "))
}

/// The tables: those that limit the job (at most `rows`), the groups (likewise), and all in natural order if these are
/// not too many.
#[must_use]
pub fn tables(ranks: &Ranks, rows: usize) -> Vec<Table> {
    let mut found = Vec::new();
    if ranks.limiting.len() > 1 {
        let limiting = ranks.limiting.iter().take(rows);
        found.push(Table {
            title: "Which limit the job: those that ran out of memory, by time; then the others, by margin".to_owned(),
            columns: RANK_COLUMNS,
            rows: limiting.map(|&row| rank_row(&ranks.rows[row])).collect(),
        });
    }
    if ranks.groups.len() > 1 {
        found.push(Table {
            title: format!("{} groups of equal ranks", ranks.groups.len()),
            columns: &["group", ">ranks", ">allocated", ">reserved", "verdict", "held most by"],
            rows: ranks.groups.iter().take(rows).map(|group| group_row(ranks, group)).collect(),
        });
    }
    if ranks.rows.len() <= ROWS_ALL {
        found.push(Table {
            title: format!("{} recordings", ranks.rows.len()),
            columns: RANK_COLUMNS,
            rows: ranks.rows.iter().map(rank_row).collect(),
        });
    }
    found
}

const RANK_COLUMNS: &[&str] = &["recording", ">allocated", ">reserved", ">margin", "verdict", "held most by"];

fn rank_row(row: &RankRow) -> Vec<String> {
    let Some(figures) = row.figures() else {
        let none = String::new;
        return vec![row.name.clone(), none(), none(), none(), "cannot be read".to_owned(), none()];
    };
    let margin = match row.margin() {
        Some(bytes) if row.available_assumed => format!("~{}", size::format(bytes)),
        Some(bytes) => size::format(bytes),
        None => "-".to_owned(),
    };
    vec![
        row.name.clone(),
        size::format(figures.peak_allocated),
        size::format(figures.peak_reserved),
        margin,
        figures.verdict.words().to_owned(),
        held_most_by(figures),
    ]
}

fn group_row(ranks: &Ranks, group: &Group) -> Vec<String> {
    let first = ranks.rows[group.rows[0]].figures();
    let of = |text: fn(&Figures) -> String| first.map_or_else(String::new, text);
    vec![
        names(ranks, &group.rows),
        group.rows.len().to_string(),
        of(|figures| size::format(figures.peak_allocated)),
        of(|figures| size::format(figures.peak_reserved)),
        of(|figures| figures.verdict.words().to_owned()),
        of(held_most_by),
    ]
}

fn held_most_by(figures: &Figures) -> String {
    let most = figures.holders.first();
    most.map_or_else(String::new, |most| format!("{} ({})", most.name, size::format(most.bytes)))
}
