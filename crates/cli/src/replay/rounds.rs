//! The rounds of a program that was run several times, some of them in a table.

use std::io;

use comfy_table::Table;
use warpool_trace::replay::Round;

use crate::output::{self, Output};
use crate::size;

/// The rounds of all files.
pub struct RoundTable {
    table: Table,
}

impl Default for RoundTable {
    fn default() -> Self {
        Self { table: output::table(&["file", ">round", ">live", ">reserved", ">reserved / live", "outcome"]) }
    }
}

impl RoundTable {
    pub fn add(&mut self, name: &str, rounds: &[Round]) {
        let shown = |number: usize| number == rounds.len() || is_shown(number);
        for (round, number) in rounds.iter().zip(1..).filter(|&(_, number)| shown(number)) {
            #[expect(clippy::cast_precision_loss, reason = "a ratio with four decimals")]
            let ratio = round.peak_reserved_bytes as f64 / round.peak_live_bytes.max(1) as f64;
            let outcome = match round.ooms {
                0 => "completed".to_owned(),
                1 => "out of memory".to_owned(),
                ooms => format!("out of memory {ooms} times"),
            };
            self.table.add_row([
                name.to_owned(),
                number.to_string(),
                size::format(round.peak_live_bytes),
                size::format(round.peak_reserved_bytes),
                format!("{ratio:.4}"),
                outcome,
            ]);
        }
    }

    pub fn finish(&self, output: &mut Output) -> io::Result<()> {
        if self.table.is_empty() { Ok(()) } else { output.table("One round after another", &self.table) }
    }
}

/// 1, 2, 5, 10, 20, 50 and so on.
fn is_shown(number: usize) -> bool {
    let power = number.checked_ilog10().map_or(1, |digits| 10_usize.pow(digits));
    number.is_multiple_of(power) && matches!(number / power, 1 | 2 | 5)
}
