//! One explanation for people: a few lines of prose first, tables after.

use std::io;

use warpool_report::explain::{headline, sentences};
use warpool_trace::explain::{Change, Explanation, Fit, Moment, MomentKind, Parts};

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
    output.paragraph(&what_fits(explanation))?;
    output.line("")?;
    parts_table(&moment.parts, explanation, output)?;
    holders_tables(moment, rows, output)?;
    fits_table(&explanation.fits, output)?;
    if !quiet {
        for remark in &explanation.remarks {
            output.paragraph(&format!("Remark: {remark}."))?;
        }
    }
    Ok(())
}

fn what_fits(explanation: &Explanation) -> String {
    if explanation.fits.is_empty() {
        return match explanation.moment().kind {
            MomentKind::OutOfMemory => "What would have fitted was not examined.".to_owned(),
            MomentKind::Peak | MomentKind::Snapshot => String::new(),
        };
    }
    match explanation.fits.iter().find(|fit| fit.fits) {
        Some(fit) => {
            let margin = fit.orders.margin_bytes_least.unwrap_or(0);
            let margin = format!(
                "by at least {} in {} of {} address orders",
                size::format(margin),
                fit.orders.fit,
                fit.orders.run
            );
            format!("The smallest change that would have fitted: {}, {margin}, {}.", setting(fit), cost(fit))
        }
        None => "Nothing that was tried would have fitted but fewer bytes: no setting, no allocator, no larger \
                 device."
            .to_owned(),
    }
}

/// What to set.
fn setting(fit: &Fit) -> String {
    match (fit.change, fit.variable) {
        (Change::Others, _) => format!("others use less: {} of the device for this program", fit.set),
        (Change::Device, _) => format!("a device of {}", fit.set),
        (_, variable) => format!("{variable}={}", fit.set),
    }
}

fn cost(fit: &Fit) -> String {
    match fit.driver_seconds_more {
        more if more > 0.0005 => format!("with {more:.3} s more in driver calls"),
        more if more < -0.0005 => format!("with {:.3} s less in driver calls", -more),
        _ => "with as much time in driver calls".to_owned(),
    }
}

/// What the parts mean.
const MEANINGS: [(&str, &str); 10] = [
    ("allocated", "allocated, as requested"),
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
        // Without a request that it could be large enough for.
        let is_snapshot = explanation.moment().kind == MomentKind::Snapshot;
        let meaning = if is_snapshot && name == "free_large_enough" { "free" } else { meaning };
        let share = if explanation.device_bytes_total.is_some() { percent(bytes, total) } else { "-".to_owned() };
        table.add_row([meaning.to_owned(), size::format(bytes), share]);
    }
    let title = match explanation.device_bytes_total {
        Some(total) => format!("Where the device's {} were", size::format(total)),
        None => "Where memory was (the size of the device is not known)".to_owned(),
    };
    output.table(&title, &table)
}

fn holders_tables(moment: &Moment, rows: usize, output: &mut Output) -> io::Result<()> {
    let holders = &moment.holders;
    let bytes = holders.bytes;
    let mut table = output::table(&[">bytes", ">share", ">blocks", "allocated by", "called by", "from"]);
    for holder in holders.groups.iter().take(rows) {
        // The path ends with the allocating call. That a module calls itself says little.
        let callers = || holder.path.iter().rev().skip(1);
        let telling = callers().find(|caller| !caller.starts_with("forward ("));
        let caller = telling.or_else(|| callers().next()).map_or("", String::as_str);
        let from = holder.line.as_deref().filter(|line| *line != holder.name).unwrap_or_default();
        let (share, count) = (percent(holder.bytes, bytes), holder.count.to_string());
        table.add_row([
            size::format(holder.bytes),
            share,
            count,
            holder.name.clone(),
            caller.to_owned(),
            from.to_owned(),
        ]);
    }
    output.table(&titled("Who held memory", rows, holders.groups.len()), &table)?;
    let others = match holders.has_stacks() {
        true => [("By line", &holders.by_line), ("By module", &holders.by_module)].to_vec(),
        false => vec![("By age", &holders.by_age)],
    };
    for (title, groups) in others {
        let mut table = output::table(&[">bytes", ">share", ">blocks", "where"]);
        for group in groups.iter().take(rows) {
            let (share, count) = (percent(group.bytes, bytes), group.count.to_string());
            table.add_row([size::format(group.bytes), share, count, group.name.clone()]);
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
    output.table("What would have fitted, by replays", &table)
}

fn percent(bytes: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let percent = 100.0 * bytes as f64 / whole as f64;
    format!("{percent:.1}%")
}
