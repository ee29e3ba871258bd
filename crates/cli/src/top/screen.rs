//! The interactive screen: draws the state, reads keys, reads the pages at intervals. The terminal is restored on every
//! way out, also after a panic.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Sparkline, Table, TableState};
use warpool::share::{Board, BoardOrder, BoardRow, Card, OomEvent};
use warpool_report::{size, top};

use super::app::{App, KEYS, View, key_of};
use super::{table, usage};
use crate::output::{Result, printable};

/// Runs until a key ends it.
pub fn run(board: &dyn Fn() -> Result<Board>, order: BoardOrder, interval: Duration) -> Result<()> {
    if !(std::io::stdout().is_terminal() && std::io::stdin().is_terminal()) {
        return Err(usage("this is no terminal: warpool top --once prints a table, --json objects"));
    }
    // The first failure is one of the command's, with its exit status.
    let mut app = App::new(order);
    app.show(board()?);
    let mut terminal = ratatui::try_init()?;
    let outcome = turns(&mut terminal, &mut app, board, interval);
    ratatui::restore();
    outcome
}

fn turns(
    terminal: &mut ratatui::DefaultTerminal,
    app: &mut App,
    board: &dyn Fn() -> Result<Board>,
    interval: Duration,
) -> Result<()> {
    let mut read = Instant::now();
    loop {
        terminal.draw(|frame| draw(frame, app))?;
        if event::poll(interval.saturating_sub(read.elapsed()))? {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release && !app.press(key) => return Ok(()),
                _ => {}
            }
        }
        if read.elapsed() >= interval {
            if !app.is_paused {
                match board() {
                    Ok(board) => app.show(board),
                    Err(error) => app.error = Some(error.to_string()),
                }
            }
            read = Instant::now();
        }
    }
}

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, app: &App) {
    let rows = app.rows();
    let cards = u16::try_from(app.board.cards.len()).unwrap_or(u16::MAX).min(frame.area().height / 3);
    let [title, card_area, body, keys] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(cards), Constraint::Min(1), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(Line::styled(headline(app), bold()), title);
    draw_cards(frame, &app.board.cards, card_area);
    let selected = app.selected().and_then(|position| rows.get(position));
    match (app.view, selected) {
        (View::Help, _) => draw_help(frame, body),
        (View::Detail, Some(row)) => draw_detail(frame, app, row, body),
        _ => draw_processes(frame, app, &rows, body),
    }
    let keys_of_view = match app.view {
        View::Processes => "up/down select  Enter detail  s sort  r reverse  p pause  ? keys  q quit",
        View::Detail => "up/down other process  Enter back  p pause  ? keys  q quit",
        View::Help => "Esc back  q quit",
    };
    frame.render_widget(Line::styled(keys_of_view, Style::new().add_modifier(Modifier::REVERSED)), keys);
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn headline(app: &App) -> String {
    let count = |number: usize, one: &str, many: &str| format!("{number} {}", if number == 1 { one } else { many });
    let board = &app.board;
    let mut parts = vec![
        format!("warpool top: {}", count(board.processes.len(), "process", "processes")),
        count(board.cards.len(), "card", "cards"),
        format!("by {}{}", app.order.name(), if app.is_reversed { ", reversed" } else { "" }),
    ];
    if app.is_paused {
        parts.push("paused".to_owned());
    }
    if !board.problems.is_empty() {
        parts.push(count(board.problems.len(), "unreadable page", "unreadable pages"));
    }
    if let Some(error) = &app.error {
        parts.push(printable(error));
    }
    parts.join("   ")
}

/// One bar per card.
fn draw_cards(frame: &mut Frame<'_>, cards: &[Card], area: Rect) {
    for (card, line) in cards.iter().zip(area.rows()) {
        // Without the driver's word, what the processes reserved is the least that is used.
        let used = card.bytes_used.unwrap_or(card.bytes_reserved).min(card.bytes_total);
        let elsewhere = card.bytes_elsewhere().map_or_else(|| "unknown".to_owned(), size::format);
        let label = format!(
            "{}: {} reserved, {} asleep, {elsewhere} elsewhere, of {}",
            printable(&card.name),
            size::format(card.bytes_reserved),
            size::format(card.bytes_asleep),
            size::format(card.bytes_total)
        );
        frame.render_widget(Gauge::default().ratio(share(used, card.bytes_total)).label(label), line);
    }
}

#[expect(clippy::cast_precision_loss, reason = "the length of a bar")]
fn share(part: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { (part as f64 / of as f64).clamp(0.0, 1.0) }
}

fn draw_processes(frame: &mut Frame<'_>, app: &App, rows: &[BoardRow<'_>], area: Rect) {
    if rows.is_empty() {
        let text = "No process of this user publishes its GPU memory.\ndocs/top.md says which do.";
        return frame.render_widget(Paragraph::new(text), area);
    }
    let cells: Vec<[String; 13]> = rows.iter().map(table::cells).collect();
    let headers = table::COLUMNS.map(|column| column.trim_start_matches('>'));
    let widths: Vec<Constraint> = (0..headers.len())
        .map(|column| {
            let longest = cells.iter().map(|row| row[column].chars().count()).chain([headers[column].len()]).max();
            let width = u16::try_from(longest.unwrap_or(0)).unwrap_or(u16::MAX);
            // The command gets what the others leave.
            if column == 1 { Constraint::Min(12) } else { Constraint::Length(width) }
        })
        .collect();
    let right = |column: usize| table::COLUMNS[column].starts_with('>');
    let line = |cells: &[&str]| {
        Row::new(cells.iter().enumerate().map(|(column, text)| {
            let text = Line::from((*text).to_owned());
            Cell::from(if right(column) { text.right_aligned() } else { text })
        }))
    };
    let body = cells.iter().map(|row| line(&row.each_ref().map(String::as_str)));
    let table = Table::new(body, widths)
        .header(line(&headers).style(bold()))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(app.selected()));
}

fn draw_detail(frame: &mut Frame<'_>, app: &App, row: &BoardRow<'_>, area: Rect) {
    let title = format!(
        "{} {}, device {}: {}",
        row.process.pid,
        printable(&row.process.command),
        row.device.ordinal,
        row.device.uuid
    );
    let block = Block::bordered().title(title);
    let inside = block.inner(area);
    frame.render_widget(block, area);
    let Some(values) = row.values() else {
        let why = top::trouble(row.reading).map_or("", |(_, why)| why);
        return frame.render_widget(Paragraph::new(why), inside);
    };
    let [history, oom, rest] =
        Layout::vertical([Constraint::Length(6), Constraint::Length(1), Constraint::Min(1)]).areas(inside);
    draw_history(frame, app, row, history);
    frame.render_widget(Line::from(oom_text(values.last_oom.as_ref())), oom);
    let [left, right] = Layout::horizontal([Constraint::Length(46), Constraint::Min(1)]).areas(rest);
    let counters = values.counters.named();
    let shown = counters.iter().filter(|(name, _)| *name != "read_us").map(|&(name, value)| {
        let text = match (name, value) {
            ("bytes_limit" | "bytes_device_free", u64::MAX) => "-".to_owned(),
            (name, value) if name.starts_with("bytes_") => size::format(value),
            (_, value) => value.to_string(),
        };
        let name = name.strip_prefix("bytes_").unwrap_or(name).replace('_', " ");
        Row::new([Cell::from(name), Cell::from(Line::from(text).right_aligned())])
    });
    frame.render_widget(Table::new(shown, [Constraint::Length(26), Constraint::Length(18)]), left);
    let usage = values.rows.iter().map(|row| {
        let name = row.of.name().unwrap_or_else(|| "(others)".to_owned());
        let bytes = [row.bytes_reserved, row.bytes_allocated, row.bytes_asleep, row.bytes_elastic];
        let bytes = bytes.map(|bytes| Cell::from(Line::from(size::format(bytes)).right_aligned()));
        let names = [Cell::from(row.of.kind()), Cell::from(printable(&name))];
        Row::new(names.into_iter().chain(bytes))
    });
    let widths = [6, 20, 11, 11, 11, 11].map(Constraint::Length);
    let header = Row::new(["of", "name", "reserved", "allocated", "asleep", "elastic"]).style(bold());
    frame.render_widget(Table::new(usage, widths).header(header), right);
}

/// Reserved and allocated bytes of the last readings, the newest at the right.
fn draw_history(frame: &mut Frame<'_>, app: &App, row: &BoardRow<'_>, area: Rect) {
    let samples = app.histories.get(&key_of(row)).map(|history| history.iter().copied().collect()).unwrap_or_default();
    let samples: Vec<super::app::Sample> = samples;
    let [left, middle, right] = Layout::horizontal([Constraint::Ratio(1, 3); 3]).areas(area);
    let charts = [
        (left, "reserved", samples.iter().map(|sample| sample.reserved).collect::<Vec<_>>(), true),
        (middle, "allocated", samples.iter().map(|sample| sample.allocated).collect(), true),
        (right, "allocations/s", samples.iter().map(|sample| sample.allocations_per_second).collect(), false),
    ];
    for (area, name, mut data, is_bytes) in charts {
        let highest = data.iter().copied().max().unwrap_or(0);
        let shown = if is_bytes { size::format(highest) } else { highest.to_string() };
        let block = Block::bordered().title(format!("{name}, up to {shown}"));
        let width = usize::from(block.inner(area).width);
        let data = data.split_off(data.len().saturating_sub(width));
        frame.render_widget(Sparkline::default().block(block).max(highest.max(1)).data(&data), area);
    }
}

fn oom_text(event: Option<&OomEvent>) -> String {
    match event {
        None => "no out-of-memory error".to_owned(),
        Some(event) => format!(
            "last out of memory: {} requested, {} free on the card, {} reserved, {}",
            size::format(event.bytes_requested),
            size::format(event.bytes_free),
            size::format(event.bytes_reserved),
            match (event.by_limit, event.bytes_limit) {
                (true, Some(limit)) => format!("refused by a limit of {}", size::format(limit)),
                (true, None) => "refused by a limit".to_owned(),
                (false, _) => "the card was full".to_owned(),
            }
        ),
    }
}

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let rows = KEYS.map(|(keys, what)| Row::new([keys, what]));
    let block = Block::bordered().title("Keys");
    frame.render_widget(Table::new(rows, [Constraint::Length(16), Constraint::Min(1)]).block(block), area);
}
