//! An explanation in a few lines of prose. Every number says which bytes it counts: requested, allocated (with
//! rounding, as PyTorch counts), reserved.

use warpool::memory::report::{AccountRow, DeviceAccount};
use warpool_trace::Category;
use warpool_trace::cards::DeviceOrigin;
use warpool_trace::explain::{CategoryShare, Explanation, Holder, Moment, MomentKind, OnDevice, Verdict};

use crate::bytes_text::text;

/// The lines before the advice: when, the numbers for the verdict, what was allocated, who held it, what grew.
#[must_use]
pub fn sentences(explanation: &Explanation) -> Vec<String> {
    let moment = explanation.moment();
    let mut lines = vec![when(explanation)];
    lines.extend(explanation.on_device.as_ref().map(on_device));
    if explanation.ooms > 0 || explanation.peaks.is_none() {
        lines.push(evidence(&explanation.evidence));
    }
    lines.push(memory(explanation));
    lines.extend(explanation.account.as_ref().map(account));
    lines.push(kinds(moment));
    lines.push(held_by(moment));
    if let Some(growth) = &explanation.growth {
        let what: Vec<String> = growth.holders.iter().take(3).map(named).collect();
        let by = match explanation.verdict {
            // The evidence has the figures.
            Verdict::Growth => "What stayed allocated".to_owned(),
            _ => format!(
                "Over the last {} of {} iterations {} more stayed allocated",
                growth.iterations_grown,
                growth.iterations,
                text(growth.bytes)
            ),
        };
        lines.push(format!("{by}: {}.", what.join("; ")));
    }
    lines.retain(|line| !line.is_empty());
    lines
}

/// Whose memory it was outside the allocator: those with most, the rest together.
fn account(account: &DeviceAccount) -> String {
    const NAMED: usize = 5;
    let mut rows: Vec<&AccountRow> = account.rows.iter().filter(|row| !row.is_reserved()).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    let mut parts: Vec<String> = Vec::new();
    for row in rows.iter().take(NAMED) {
        parts.push(format!("{}, {}: {}", row.owner, row.what, text(row.bytes)));
    }
    let others: u64 = rows.iter().skip(NAMED).map(|row| row.bytes).sum();
    if others > 0 {
        parts.push(format!("others: {}", text(others)));
    }
    if let Ok(unexplained @ 1..) = u64::try_from(account.unexplained()) {
        parts.push(format!("of nobody who is known: {}", text(unexplained)));
    }
    let outside = text(account.outside());
    let total = text(account.total);
    format!(
        "When the recording was written, {outside} of the device's {total} were in use outside the allocator ({}).",
        if parts.is_empty() { "nothing".to_owned() } else { parts.join("; ") }
    )
}

/// The verdict in a few words.
#[must_use]
pub fn headline(explanation: &Explanation) -> String {
    let verdict = explanation.verdict;
    let recorded = match verdict {
        Verdict::Fitted | Verdict::Unknown => verdict.words().to_owned(),
        Verdict::LiveExceedsDevice if explanation.device_bytes_total.is_none() => {
            "out of memory: more is allocated than the device had for this program".to_owned()
        }
        _ => format!("out of memory: {}", verdict.words()),
    };
    match &explanation.on_device {
        None => recorded,
        Some(on) => {
            let fits = if on.orders.all_fit() { "it fits" } else { "it does not fit" };
            format!("{recorded}; on a device of {} {fits}", text(on.bytes_total))
        }
    }
}

/// The name of a moment, with its article.
#[must_use]
pub const fn moment_name(kind: MomentKind) -> &'static str {
    match kind {
        MomentKind::Allocated => "the moment of most allocated memory",
        MomentKind::Reserved => "the moment of most reserved memory",
        MomentKind::OutOfMemory => "the out-of-memory event",
        MomentKind::Event => "the state",
    }
}

fn when(explanation: &Explanation) -> String {
    let moment = explanation.moment();
    let time = moment.time_us.map_or_else(String::new, |time_us| {
        #[expect(clippy::cast_precision_loss, reason = "seconds with two decimals")]
        let seconds = time_us as f64 / 1e6;
        format!(", {seconds:.2} s after the first event")
    });
    let place = match moment.event {
        Some(event) => format!("event {event}{time}"),
        None => "the start of the history".to_owned(),
    };
    let fitted = match explanation.ooms {
        0 => "Nothing ran out of memory. ",
        _ => "",
    };
    match moment.kind {
        MomentKind::OutOfMemory => {
            let which = match explanation.ooms {
                1 => String::new(),
                count => format!(" (the last of {count} such events)"),
            };
            format!("A request ran out of memory at {place}{which}.")
        }
        MomentKind::Event if explanation.peaks.is_none() => {
            "There is no history: this is the state when the snapshot was taken.".to_owned()
        }
        MomentKind::Event => format!("This is the state after {place}."),
        _ if explanation.verdict == Verdict::Unknown => format!("This is the state at {place}."),
        MomentKind::Allocated => format!("{fitted}The most memory was allocated at {place}."),
        MomentKind::Reserved => format!("{fitted}The most memory was reserved at {place}."),
    }
}

/// Whether it fits on another device.
fn on_device(on: &OnDevice) -> String {
    let device = text(on.bytes_total);
    let orders = match on.orders.run {
        1 => String::new(),
        run => format!(" in {} of {run} replays with other addresses", on.orders.fit),
    };
    if on.orders.all_fit() {
        let margin = on.orders.margin_bytes_least;
        let margin = margin.map_or_else(String::new, |bytes| format!(", with at least {} to spare", text(bytes)));
        return format!("On a device of {device} the recorded requests fit{orders}{margin}.");
    }
    let failed = match (on.oom_event, on.oom_bytes) {
        (Some(event), Some(bytes)) => format!(": a request of {} at event {event} runs out of memory", text(bytes)),
        _ => String::new(),
    };
    let orders = match (on.orders.run, on.orders.fit) {
        (1, _) => String::new(),
        (run, 0) => format!(", in none of {run} replays with other addresses"),
        (run, fit) => format!(" in {} of {run} replays with other addresses", run - fit),
    };
    format!("On a device of {device} the recorded requests do not fit{orders}{failed}.")
}

/// The requested, allocated and reserved bytes, and the device's total.
fn memory(explanation: &Explanation) -> String {
    let moment = explanation.moment();
    if explanation.peaks.is_none() {
        return String::new();
    }
    let mut sentence = format!(
        "{} were allocated then ({} requested), and {} reserved",
        text(moment.bytes_allocated),
        text(moment.bytes_requested),
        text(moment.bytes_reserved)
    );
    let reserved = text(moment.bytes_reserved);
    if let Some(peaks) = explanation.peaks.filter(|peaks| text(peaks.reserved.bytes) != reserved) {
        let event = peaks.reserved.event.map_or_else(|| "the start".to_owned(), |event| format!("event {event}"));
        sentence.push_str(&format!("; the most was {}, from {event} on", text(peaks.reserved.bytes)));
    }
    match (explanation.device_bytes_total, explanation.device_origin) {
        (Some(total), DeviceOrigin::Inferred) => {
            let name = explanation.device_name.as_ref().map_or_else(String::new, |name| format!(", {name}"));
            sentence.push_str(&format!(". By the free memory that was recorded, the device has {}{name}", text(total)));
        }
        (Some(total), _) => sentence.push_str(&format!(", of a device of {}", text(total))),
        (None, _) => {}
    }
    format!("{sentence}.")
}

/// The kinds of memory, the largest first.
fn kinds(moment: &Moment) -> String {
    let mut shares: Vec<&CategoryShare> = moment.categories.iter().collect();
    shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    let is_known = shares.iter().any(|share| share.category != Category::Unknown && share.bytes > 0);
    if !is_known || moment.bytes_requested == 0 {
        return String::new();
    }
    let named: Vec<String> = shares
        .iter()
        .map(|share| {
            let name = match share.category {
                Category::Unknown => "of unknown kind",
                category => category.words(),
            };
            format!("{} {name} ({})", text(share.bytes), percent(share.bytes, moment.bytes_requested))
        })
        .collect();
    format!("Of the requested bytes: {}.", named.join(", "))
}

/// A share in percent; small ones are not rounded to nothing.
fn percent(bytes: u64, whole: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let percent = 100.0 * bytes as f64 / whole as f64;
    match percent {
        percent if percent > 0.0 && percent < 1.0 => "<1%".to_owned(),
        percent => format!("{percent:.0}%"),
    }
}

/// The evidence as one paragraph.
fn evidence(evidence: &[String]) -> String {
    let sentence = |text: &String| {
        let mut letters = text.chars();
        letters.next().map_or_else(String::new, |first| format!("{}{}.", first.to_uppercase(), letters.as_str()))
    };
    evidence.iter().map(sentence).collect::<Vec<_>>().join(" ")
}

fn held_by(moment: &Moment) -> String {
    let holders = &moment.holders;
    if holders.bytes == 0 {
        return "Nothing was allocated.".to_owned();
    }
    let largest: Vec<String> = holders.groups.iter().take(3).map(named).collect();
    let largest = format!("Most of it was requested by {}.", largest.join("; "));
    let (before, without) = (holders.bytes_before_history, holders.bytes - holders.bytes_with_stack);
    if holders.bytes_with_stack == 0 && before < holders.bytes {
        format!(
            "{largest} The recording has no call stacks: to see which lines hold memory, record it with \
             torch.cuda.memory._record_memory_history()."
        )
    } else if before > holders.bytes / 20 && without > holders.bytes / 20 && moment.event.is_some() {
        format!(
            "{largest} {} were allocated before the history begins, by unknown code: to see it, call \
             torch.cuda.memory._record_memory_history() before the model is made.",
            text(before)
        )
    } else {
        largest
    }
}

/// A group in a sentence.
fn named(holder: &Holder) -> String {
    let blocks = if holder.count == 1 { "1 block".to_owned() } else { format!("{} blocks", holder.count) };
    let from = holder.line.as_ref().filter(|line| **line != holder.name);
    let from = match (from, &holder.forward_line) {
        (Some(line), _) => format!(", from {line}"),
        (None, Some(line)) => format!(", the backward pass of {line}"),
        (None, None) => String::new(),
    };
    format!("{} with {} in {blocks}{from}", holder.name, text(holder.bytes))
}
