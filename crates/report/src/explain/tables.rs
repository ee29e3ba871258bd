//! The tables of an explanation, and its advice, as texts: what the command prints and the page in the browser shows.

use warpool::memory::report::{AccountRow, DeviceAccount};
use warpool_trace::Category;
use warpool_trace::explain::{Advice, CategoryShare, Change, Explanation, Fit, Holder, Moment, Parts, Proof};

use crate::size;

/// A table of texts.
pub struct Table {
    /// What it shows.
    pub title: String,
    /// The names of its columns; those that begin with `>` are aligned to the right.
    pub columns: &'static [&'static str],
    /// A text for each column.
    pub rows: Vec<Vec<String>>,
}

/// One thing to do.
pub struct AdviceText {
    /// What, why, and whether it suffices.
    pub paragraph: String,
    /// The lines to write or to run.
    pub lines: Vec<String>,
}

/// What to do, the best first.
#[must_use]
pub fn advice_texts(explanation: &Explanation) -> Vec<AdviceText> {
    let text = |advice: &Advice| {
        let fits = match advice.fits {
            Some(true) if explanation.on_device.is_some() => " It fits there.",
            Some(true) => " It would have fitted.",
            Some(false) => " Alone it does not suffice.",
            None => "",
        };
        let proof = match advice.proof {
            Proof::Replay => "",
            Proof::Arithmetic => " (by arithmetic)",
        };
        let mut letters = advice.detail.chars();
        let detail: String = letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect();
        let fits = if explanation.ooms > 0 || explanation.on_device.is_some() { fits } else { "" };
        AdviceText {
            paragraph: format!("{}. {detail}{proof}.{fits}", advice.title),
            lines: advice.apply.iter().flat_map(|apply| apply.lines()).map(str::to_owned).collect(),
        }
    };
    explanation.advice.iter().map(text).collect()
}

/// The tables, those of holders with at most `rows` rows.
#[must_use]
pub fn tables(explanation: &Explanation, rows: usize) -> Vec<Table> {
    let moment = explanation.moment();
    let mut tables = vec![parts_table(&moment.parts, explanation)];
    tables.extend(explanation.account.as_ref().map(account_table));
    tables.extend(categories_table(moment));
    tables.extend(holders_tables(moment, rows));
    tables.extend(fits_table(&explanation.fits));
    tables
}

/// What kind of memory was allocated, with the rules that decided.
fn categories_table(moment: &Moment) -> Option<Table> {
    if moment.categories.iter().all(|share| share.category == Category::Unknown) {
        return None;
    }
    let columns = &["kind of memory", ">requested", ">share", ">blocks", "because it was"];
    let mut shares: Vec<&CategoryShare> = moment.categories.iter().collect();
    shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    let row = |share: &CategoryShare| {
        let rules: Vec<&str> = share.rules.iter().take(2).map(|(rule, _)| rule.words()).collect();
        vec![
            share.category.words().to_owned(),
            size::format(share.bytes),
            percent(share.bytes, moment.bytes_requested),
            share.count.to_string(),
            rules.join("; "),
        ]
    };
    let title = "What kind of memory was allocated".to_owned();
    Some(Table { title, columns, rows: shares.into_iter().map(row).collect() })
}

/// What to set.
fn setting(fit: &Fit) -> String {
    match (fit.change, fit.variable) {
        (Change::Others, _) => format!("others use less: {} of the device for this program", fit.set),
        (Change::Device, _) => format!("a device of {}", fit.set),
        // The program's own call overrides the environment.
        (Change::Limit, _) => "no memory limit".to_owned(),
        (_, variable) => format!("{variable}={}", fit.set),
    }
}

/// What the parts mean.
const MEANINGS: [(&str, &str); 10] = [
    ("allocated", "allocated: requested bytes"),
    ("rounding", "rounding inside allocated blocks"),
    ("free_too_small", "free for this request's stream and pool, in pieces too small for it"),
    ("free_large_enough", "free, in pieces large enough"),
    ("free_other_size", "free in segments for requests of the other size class"),
    ("free_other_streams", "free for other streams"),
    ("free_other_pools", "free in other pools (graphs, MemPools)"),
    ("waiting_for_streams", "freed, waiting for streams"),
    ("not_reserved", "not reserved"),
    ("outside", "outside the allocator (context, other processes)"),
];

fn parts_table(parts: &Parts, explanation: &Explanation) -> Table {
    let total = parts.total();
    let row = |(name, bytes): (&str, u64)| {
        let meaning = MEANINGS.iter().find(|(part, _)| *part == name).map_or(name, |(_, meaning)| meaning);
        // There is no request to compare the free blocks with.
        let is_free = explanation.moment().request.is_none() && name == "free_large_enough";
        let meaning = if is_free { "free" } else { meaning };
        let share = if explanation.device_bytes_total.is_some() { percent(bytes, total) } else { "-".to_owned() };
        vec![meaning.to_owned(), size::format(bytes), share]
    };
    let title = match explanation.device_bytes_total {
        Some(total) => format!("Where the device's {} were", size::format(total)),
        None => "Where memory was (the device's size is not known)".to_owned(),
    };
    let rows = parts.named().into_iter().filter(|&(_, bytes)| bytes > 0).map(row).collect();
    Table { title, columns: &["part", ">bytes", ">share"], rows }
}

/// Whose the memory outside the allocator was.
fn account_table(account: &DeviceAccount) -> Table {
    let outside = account.outside();
    let row = |row: &AccountRow| {
        vec![
            row.owner.clone(),
            row.what.clone(),
            size::format(row.bytes),
            percent(row.bytes, outside),
            row.known_by.clone(),
        ]
    };
    let mut rows: Vec<Vec<String>> = account.rows.iter().filter(|row| !row.is_reserved()).map(row).collect();
    let unexplained = u64::try_from(account.unexplained()).unwrap_or(0);
    let share = percent(unexplained, outside);
    rows.push(vec![
        "not known".to_owned(),
        String::new(),
        size::format(unexplained),
        share,
        account.remarks.join("; "),
    ]);
    Table {
        title: "Whose it was outside the allocator, when the recording was written".to_owned(),
        columns: &["owner", "what", ">bytes", ">share", "known by"],
        rows,
    }
}

fn holders_tables(moment: &Moment, rows: usize) -> Vec<Table> {
    let holders = &moment.holders;
    let bytes = holders.bytes;
    let by_call = |holder: &Holder| {
        // The path ends with the allocating call. That a module calls itself says little.
        let callers = || holder.path.iter().rev().skip(1);
        let telling = callers().find(|caller| !caller.starts_with("forward ("));
        let caller = telling.or_else(|| callers().next()).map_or("", String::as_str);
        let from = holder.line.as_ref().filter(|line| **line != holder.name).or(holder.forward_line.as_ref());
        vec![
            size::format(holder.bytes),
            percent(holder.bytes, bytes),
            holder.count.to_string(),
            holder.name.clone(),
            caller.to_owned(),
            from.cloned().unwrap_or_default(),
            holder.category.words().to_owned(),
        ]
    };
    let mut tables = vec![Table {
        title: titled("Who held memory", rows, holders.groups.len()),
        columns: &[">requested", ">share", ">blocks", "allocated by", "called by", "from", "kind"],
        rows: holders.groups.iter().take(rows).map(by_call).collect(),
    }];
    let by_place = |group: &Holder| {
        let (share, count) = (percent(group.bytes, bytes), group.count.to_string());
        vec![size::format(group.bytes), share, count, group.name.clone(), group.category.words().to_owned()]
    };
    let others = match holders.has_stacks() {
        true => [("By line", &holders.by_line), ("By module", &holders.by_module)].to_vec(),
        false => vec![("By age", &holders.by_age)],
    };
    tables.extend(others.into_iter().map(|(title, groups)| Table {
        title: titled(title, rows, groups.len()),
        columns: &[">requested", ">share", ">blocks", "where", "kind"],
        rows: groups.iter().take(rows).map(by_place).collect(),
    }));
    tables
}

fn titled(title: &str, rows: usize, all: usize) -> String {
    if all > rows { format!("{title}, the largest {rows} of {all}") } else { title.to_owned() }
}

fn fits_table(fits: &[Fit]) -> Option<Table> {
    let row = |fit: &Fit| {
        let orders = match fit.orders.run {
            1 => if fit.fits { "yes" } else { "no" }.to_owned(),
            run => format!("in {} of {run} orders", fit.orders.fit),
        };
        let margin = fit.orders.margin_bytes_least.filter(|_| fit.fits).map_or_else(|| "-".to_owned(), size::format);
        let reserved = size::format(fit.orders.peak_reserved_bytes_most);
        let time = format!("{:.3} s", fit.driver_seconds);
        vec![setting(fit), orders, margin, reserved, time, fit.retries.to_string()]
    };
    (!fits.is_empty()).then(|| Table {
        title: "Changes that were replayed".to_owned(),
        columns: &["change", "fits", ">margin", ">reserved", ">driver time", ">retries"],
        rows: fits.iter().map(row).collect(),
    })
}

fn percent(bytes: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let percent = 100.0 * bytes as f64 / whole as f64;
    format!("{percent:.1}%")
}
