//! An explanation in a few lines of prose.

use warpool_trace::explain::{Explanation, Holder, Moment, MomentKind, Verdict};

use crate::bytes_text::text;

/// The lines before what would have fitted: when, the numbers behind the verdict, who held memory, what grew.
pub fn sentences(explanation: &Explanation) -> Vec<String> {
    let moment = explanation.moment();
    let mut lines = vec![when(explanation), evidence(&moment.evidence), held_by(moment)];
    if let Some(growth) = &explanation.growth {
        let what: Vec<String> = growth.holders.iter().take(3).map(named).collect();
        lines.push(format!("What stays allocated from iteration to iteration: {}.", what.join("; ")));
    }
    lines
}

/// The verdict in a few words.
pub fn headline(explanation: &Explanation) -> String {
    let verdict = explanation.moment().verdict;
    match verdict {
        Verdict::Fitted | Verdict::Unknown => verdict.words().to_owned(),
        _ => format!("out of memory: {}", verdict.words()),
    }
}

fn when(explanation: &Explanation) -> String {
    let moment = explanation.moment();
    let time = moment.time_us.map_or_else(String::new, |time_us| {
        #[expect(clippy::cast_precision_loss, reason = "seconds with two decimals")]
        let seconds = time_us as f64 / 1e6;
        format!(", {seconds:.2} s after the first event")
    });
    let event = moment.event.unwrap_or(0);
    match moment.kind {
        MomentKind::OutOfMemory => {
            let which = match explanation.ooms {
                1 => String::new(),
                count => format!(" (the last of {count} such events)"),
            };
            format!("A request ran out of memory at event {event}{time}{which}.")
        }
        MomentKind::Peak => format!("Nothing ran out of memory. The peak is at event {event}{time}."),
        MomentKind::Snapshot => "There is no history: this is the state when the snapshot was taken.".to_owned(),
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
    let largest = format!("Of {} allocated, most is held by {}.", text(holders.bytes), largest.join("; "));
    match holders.has_stacks() {
        true => largest,
        false => format!(
            "{largest} The recording has no call stacks: to see which lines hold memory, record it with \
             torch.cuda.memory._record_memory_history(stacks=\"python\")."
        ),
    }
}

/// A group in a sentence.
fn named(holder: &Holder) -> String {
    let blocks = if holder.count == 1 { "1 block".to_owned() } else { format!("{} blocks", holder.count) };
    let from = holder.line.as_ref().filter(|line| **line != holder.name);
    let from = from.map_or_else(String::new, |line| format!(", from {line}"));
    format!("{} with {} in {blocks}{from}", holder.name, text(holder.bytes))
}
