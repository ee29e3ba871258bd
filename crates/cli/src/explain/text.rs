//! One explanation for people: a few lines of prose first, tables after.

use std::io;

use warpool_report::explain::{advice_texts, headline, sentences, tables};

use super::Explained;
use crate::output::Output;

/// Writes the prose and the tables of an explanation.
pub(super) fn write(explained: &Explained, rows: usize, quiet: bool, output: &mut Output) -> io::Result<()> {
    let Explained { name, explanation, .. } = explained;
    output.heading(&format!("{name}: {}", headline(explanation)))?;
    for paragraph in sentences(explanation) {
        output.paragraph(&paragraph)?;
    }
    output.line("")?;
    let advice = advice_texts(explanation);
    if !advice.is_empty() {
        output.heading("What to do")?;
        for (number, advice) in (1..).zip(&advice) {
            output.paragraph(&format!("{number}. {}", advice.paragraph))?;
            for line in &advice.lines {
                output.line(format!("       {line}"))?;
            }
        }
        output.line("")?;
    }
    for table in tables(explanation, rows) {
        output.texts(&table)?;
    }
    if !quiet {
        for remark in &explanation.remarks {
            output.paragraph(&format!("Remark: {remark}."))?;
        }
    }
    Ok(())
}
