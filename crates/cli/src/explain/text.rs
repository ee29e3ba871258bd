//! One explanation for people: a few lines of prose first, tables after.

use std::io;

use warpool_report::explain::{headline, sentences};
use warpool_trace::Category;
use warpool_trace::explain::{CategoryShare, Change, Explanation, Fit, Moment, Parts, Proof};

use super::Explained;
use crate::output::{self, Output};
use crate::size;

/// Writes the prose and the tables of an explanation.
pub(super) fn write(explained: &Explained, rows: usize, quiet: bool, output: &mut Output) -> io::Result<()> {
    let Explained { name, explanation, .. } = explained;
    let moment = explanation.moment();
    output.heading(&format!("{name}: {}", headline(explanation)))?;
    for paragraph in sentences(explanation) {
        output.paragraph(&paragraph)?;
    }
    output.line("")?;
    write_advice(explanation, output)?;
    parts_table(&moment.parts, explanation, output)?;
    categories_table(moment, output)?;
    holders_tables(moment, rows, output)?;
    fits_table(&explanation.fits, output)?;
    if !quiet {
        for remark in &explanation.remarks {
            output.paragraph(&format!("Remark: {remark}."))?;
        }
    }
    Ok(())
}

/// What to do, numbered, with the line to write or run.
fn write_advice(explanation: &Explanation, output: &mut Output) -> io::Result<()> {
    if explanation.advice.is_empty() {
        return Ok(());
    }
    output.heading("What to do")?;
    for (number, advice) in (1..).zip(&explanation.advice) {
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
        output.paragraph(&format!("{number}. {}. {detail}{proof}.{fits}", advice.title))?;
        for line in advice.apply.iter().flat_map(|apply| apply.lines()) {
            output.line(format!("       {line}"))?;
        }
    }
    output.line("")
}

/// What kind of memory was allocated, with the rules that decided.
fn categories_table(moment: &Moment, output: &mut Output) -> io::Result<()> {
    if moment.categories.iter().all(|share| share.category == Category::Unknown) {
        return Ok(());
    }
    let mut table = output::table(&["kind of memory", ">requested", ">share", ">blocks", "because it was"]);
    let mut shares: Vec<&CategoryShare> = moment.categories.iter().collect();
    shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    for share in shares {
        let rules: Vec<&str> = share.rules.iter().take(2).map(|(rule, _)| rule.words()).collect();
        table.add_row([
            share.category.words().to_owned(),
            size::format(share.bytes),
            percent(share.bytes, moment.bytes_requested),
            share.count.to_string(),
            rules.join("; "),
        ]);
    }
    output.table("What kind of memory was allocated", &table)
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

fn parts_table(parts: &Parts, explanation: &Explanation, output: &mut Output) -> io::Result<()> {
    let mut table = output::table(&["part", ">bytes", ">share"]);
    let total = parts.total();
    for (name, bytes) in parts.named().into_iter().filter(|&(_, bytes)| bytes > 0) {
        let meaning = MEANINGS.iter().find(|(part, _)| *part == name).map_or(name, |(_, meaning)| meaning);
        // There is no request to compare the free blocks with.
        let is_free = explanation.moment().request.is_none() && name == "free_large_enough";
        let meaning = if is_free { "free" } else { meaning };
        let share = if explanation.device_bytes_total.is_some() { percent(bytes, total) } else { "-".to_owned() };
        table.add_row([meaning.to_owned(), size::format(bytes), share]);
    }
    let title = match explanation.device_bytes_total {
        Some(total) => format!("Where the device's {} were", size::format(total)),
        None => "Where memory was (the device's size is not known)".to_owned(),
    };
    output.table(&title, &table)
}

fn holders_tables(moment: &Moment, rows: usize, output: &mut Output) -> io::Result<()> {
    let holders = &moment.holders;
    let bytes = holders.bytes;
    let columns = [">requested", ">share", ">blocks", "allocated by", "called by", "from", "kind"];
    let mut table = output::table(&columns);
    for holder in holders.groups.iter().take(rows) {
        // The path ends with the allocating call. That a module calls itself says little.
        let callers = || holder.path.iter().rev().skip(1);
        let telling = callers().find(|caller| !caller.starts_with("forward ("));
        let caller = telling.or_else(|| callers().next()).map_or("", String::as_str);
        let from = holder.line.as_ref().filter(|line| **line != holder.name).or(holder.forward_line.as_ref());
        let (share, count) = (percent(holder.bytes, bytes), holder.count.to_string());
        table.add_row([
            size::format(holder.bytes),
            share,
            count,
            holder.name.clone(),
            caller.to_owned(),
            from.cloned().unwrap_or_default(),
            holder.category.words().to_owned(),
        ]);
    }
    output.table(&titled("Who held memory", rows, holders.groups.len()), &table)?;
    let others = match holders.has_stacks() {
        true => [("By line", &holders.by_line), ("By module", &holders.by_module)].to_vec(),
        false => vec![("By age", &holders.by_age)],
    };
    for (title, groups) in others {
        let mut table = output::table(&[">requested", ">share", ">blocks", "where", "kind"]);
        for group in groups.iter().take(rows) {
            let (share, count) = (percent(group.bytes, bytes), group.count.to_string());
            let kind = group.category.words().to_owned();
            table.add_row([size::format(group.bytes), share, count, group.name.clone(), kind]);
        }
        output.table(&titled(title, rows, groups.len()), &table)?;
    }
    Ok(())
}

fn titled(title: &str, rows: usize, all: usize) -> String {
    if all > rows { format!("{title}, the largest {rows} of {all}") } else { title.to_owned() }
}

fn fits_table(fits: &[Fit], output: &mut Output) -> io::Result<()> {
    if fits.is_empty() {
        return Ok(());
    }
    let mut table = output::table(&["change", "fits", ">margin", ">reserved", ">driver time", ">retries"]);
    for fit in fits {
        let orders = match fit.orders.run {
            1 => if fit.fits { "yes" } else { "no" }.to_owned(),
            run => format!("in {} of {run} orders", fit.orders.fit),
        };
        let margin = fit.orders.margin_bytes_least.filter(|_| fit.fits).map_or_else(|| "-".to_owned(), size::format);
        let reserved = size::format(fit.orders.peak_reserved_bytes_most);
        let time = format!("{:.3} s", fit.driver_seconds);
        table.add_row([setting(fit), orders, margin, reserved, time, fit.retries.to_string()]);
    }
    output.table("Changes that were replayed", &table)
}

fn percent(bytes: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let percent = 100.0 * bytes as f64 / whole as f64;
    format!("{percent:.1}%")
}
