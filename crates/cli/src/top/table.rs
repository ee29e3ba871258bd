//! `warpool top --once`: tables, and the cells that the screen shows, too.

use warpool::share::{Board, BoardOrder, BoardRow, Card};
use warpool_report::{size, top};

use crate::output::{self, Output, Result, printable};

/// The columns of processes; `>` is for alignment to the right.
pub const COLUMNS: [&str; 13] = [
    ">pid",
    "command",
    ">device",
    ">reserved",
    ">allocated",
    ">free pages",
    ">asleep",
    ">elastic",
    ">pinned",
    ">limit",
    ">alloc/s",
    ">remap/s",
    ">OOM",
];

/// The columns of cards.
pub const CARD_COLUMNS: [&str; 8] =
    ["card", "name", ">processes", ">reserved", ">asleep", ">elsewhere", ">used", ">total"];

pub fn show(board: &Board, order: BoardOrder, output: &mut Output) -> Result<()> {
    let rows = board.rows(order);
    if rows.is_empty() {
        output.line("No process of this user publishes its GPU memory (docs/top.md says which do).\n")?;
    } else {
        let mut table = output::table(&COLUMNS);
        rows.iter().for_each(|row| {
            table.add_row(cells(row));
        });
        output.table(&format!("{} processes with Warpool", board.processes.len()), &table)?;
    }
    if !board.cards.is_empty() {
        let mut table = output::table(&CARD_COLUMNS);
        board.cards.iter().for_each(|card| {
            table.add_row(card_cells(card));
        });
        output.table("Cards; elsewhere: contexts, other programs, memory that no process has any more", &table)?;
    }
    for problem in &board.problems {
        output.line(format!("cannot read {}: {}", problem.file, problem.why))?;
    }
    for row in &rows {
        if let Some((_, why)) = top::trouble(row.reading) {
            output.line(format!("{} on device {}: {why}", row.process.pid, row.device.ordinal))?;
        }
    }
    Ok(())
}

/// The cells of a process on a device.
pub fn cells(row: &BoardRow<'_>) -> [String; 13] {
    let command = printable(&row.process.command);
    let (pid, device) = (row.process.pid.to_string(), row.device.ordinal.to_string());
    let Some(values) = row.values() else {
        let state = top::trouble(row.reading).map_or("", |(state, _)| state);
        let mut cells = [const { String::new() }; 13];
        (cells[0], cells[1], cells[2], cells[3]) = (pid, command, device, state.to_owned());
        return cells;
    };
    let counters = &values.counters;
    let bytes = |bytes: u64| if bytes == 0 { "-".to_owned() } else { size::format(bytes) };
    [
        pid,
        command,
        device,
        bytes(counters.bytes_reserved),
        bytes(counters.bytes_allocated),
        bytes(counters.bytes_free_pages),
        bytes(counters.bytes_asleep),
        bytes(counters.bytes_elastic),
        bytes(counters.bytes_pinned),
        counters.limit().map_or_else(|| "-".to_owned(), size::format),
        counters.allocations_per_second.to_string(),
        counters.remaps_per_second.to_string(),
        counters.ooms.to_string(),
    ]
}

/// The cells of a card.
pub fn card_cells(card: &Card) -> [String; 8] {
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), size::format);
    [
        card.uuid.to_string(),
        printable(&card.name),
        card.processes.to_string(),
        size::format(card.bytes_reserved),
        size::format(card.bytes_asleep),
        known(card.bytes_elsewhere()),
        known(card.bytes_used),
        size::format(card.bytes_total),
    ]
}
