//! The commands, with the same options and the same JSON objects as on the command line.

mod cards;
mod diff;
mod explain;
mod predict;
mod ranks;
mod replay;
mod tune;
mod view;

use crate::request::answer::Answer;
use crate::request::error::{Error, Result};
use crate::request::input::Source;
use crate::request::options::Options;
use crate::request::work::Work;

/// The answer of the command of that name.
pub fn answer(command: &str, options: Options, sources: &[Source<'_>], work: &Work) -> Result<Answer> {
    match (command, sources) {
        ("explain", [source]) => explain::answer(options, source, work),
        ("explain_files", [_, ..]) => explain::answer_files(options, sources, work),
        ("explain_ranks", [_, ..]) => ranks::explain(options, sources, work),
        ("summarize", [source]) => ranks::summarize(options, source, work),
        ("merge", [_, ..]) => ranks::merge(options, sources),
        ("replay", [source]) => replay::answer(options, source, work),
        ("tune", [_, ..]) => tune::answer(options, sources, work),
        ("diff", [before, after]) => diff::answer(options, [before, after], work),
        ("view", [source]) => view::answer(options, source, work),
        ("predict", [steps, stacks]) => predict::answer(options, steps, stacks, work),
        ("cards", []) => cards::answer(options),
        _ => {
            Err(Error::Internal(format!("the request is wrong: no command {command} of {} recordings", sources.len())))
        }
    }
}
