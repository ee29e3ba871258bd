//! The state of the screen: what is shown, which process is selected, and what keys do. Nothing is drawn here.

use std::collections::{BTreeMap, VecDeque};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use warpool::share::{Board, BoardOrder, BoardRow};

/// How many readings the history has.
pub const HISTORY: usize = 240;

/// Names one process on one device: the number of its page, and the device's.
pub type RowKey = (u64, u32);

pub fn key_of(row: &BoardRow<'_>) -> RowKey {
    (row.process.number, row.device.ordinal)
}

/// What fills the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// All processes.
    Processes,
    /// The selected one.
    Detail,
    /// The keys.
    Help,
}

/// One reading of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    pub reserved: u64,
    pub allocated: u64,
    pub allocations_per_second: u64,
}

/// The keys, as the screen lists them.
pub const KEYS: [(&str, &str); 8] = [
    ("up, down, k, j", "select a process"),
    ("Enter", "show the selected process in detail; again, or Esc, goes back"),
    ("s, S", "sort by the next column, or by the one before"),
    ("r", "reverse the order"),
    ("p, Space", "pause, and go on"),
    ("Home, End", "select the first or the last process"),
    ("?, h", "these keys"),
    ("q, Ctrl-C", "quit"),
];

pub struct App {
    pub board: Board,
    pub order: BoardOrder,
    pub is_reversed: bool,
    pub is_paused: bool,
    pub view: View,
    pub histories: BTreeMap<RowKey, VecDeque<Sample>>,
    /// Why the last reading failed.
    pub error: Option<String>,
    selected: Option<RowKey>,
    /// Where the selection was: if its process ends, the one that is there now is selected.
    position: usize,
}

impl App {
    pub fn new(order: BoardOrder) -> Self {
        Self {
            board: Board::default(),
            order,
            is_reversed: false,
            is_paused: false,
            view: View::Processes,
            histories: BTreeMap::new(),
            error: None,
            selected: None,
            position: 0,
        }
    }

    /// The rows as they are shown.
    pub fn rows(&self) -> Vec<BoardRow<'_>> {
        let mut rows = self.board.rows(self.order);
        if self.is_reversed {
            rows.reverse();
        }
        rows
    }

    /// A new reading.
    pub fn show(&mut self, board: Board) {
        self.board = board;
        self.error = None;
        let rows = self.board.rows(self.order);
        let mut histories = std::mem::take(&mut self.histories);
        self.histories = rows
            .iter()
            .map(|row| {
                let mut history = histories.remove(&key_of(row)).unwrap_or_default();
                if let Some(counters) = row.values().map(|values| &values.counters) {
                    if history.len() == HISTORY {
                        history.pop_front();
                    }
                    history.push_back(Sample {
                        reserved: counters.bytes_reserved,
                        allocated: counters.bytes_allocated,
                        allocations_per_second: counters.allocations_per_second,
                    });
                }
                (key_of(row), history)
            })
            .collect();
        self.follow_selection();
    }

    /// The position of the selected row.
    pub fn selected(&self) -> Option<usize> {
        let selected = self.selected?;
        self.rows().iter().position(|row| key_of(row) == selected)
    }

    fn follow_selection(&mut self) {
        let keys: Vec<RowKey> = self.rows().iter().map(key_of).collect();
        match self.selected.and_then(|selected| keys.iter().position(|&key| key == selected)) {
            Some(position) => self.position = position,
            None => {
                // In detail, another process would take the place of the one that ended.
                if self.selected.is_some() && self.view == View::Detail {
                    self.view = View::Processes;
                }
                self.select(self.position);
            }
        }
    }

    fn select(&mut self, position: usize) {
        let keys: Vec<RowKey> = self.rows().iter().map(key_of).collect();
        self.position = position.min(keys.len().saturating_sub(1));
        self.selected = keys.get(self.position).copied();
    }

    fn sort(&mut self, step: usize) {
        let all = BoardOrder::ALL;
        let at = all.iter().position(|&order| order == self.order).unwrap_or(0);
        self.order = all[(at + step) % all.len()];
        self.follow_selection();
    }

    /// Acts on a key. `false` if the command is to end.
    pub fn press(&mut self, key: KeyEvent) -> bool {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return !matches!(key.code, KeyCode::Char('c' | 'd'));
        }
        match key.code {
            KeyCode::Char('q') => return false,
            KeyCode::Esc => self.view = View::Processes,
            KeyCode::Enter if self.view == View::Detail => self.view = View::Processes,
            KeyCode::Enter if self.selected().is_some() => self.view = View::Detail,
            KeyCode::Char('?' | 'h') if self.view == View::Help => self.view = View::Processes,
            KeyCode::Char('?' | 'h') => self.view = View::Help,
            KeyCode::Up | KeyCode::Char('k') => self.select(self.position.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(self.position + 1),
            KeyCode::PageUp => self.select(self.position.saturating_sub(10)),
            KeyCode::PageDown => self.select(self.position + 10),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            KeyCode::Char('s') => self.sort(1),
            KeyCode::Char('S') => self.sort(BoardOrder::ALL.len() - 1),
            KeyCode::Char('r') => {
                self.is_reversed = !self.is_reversed;
                self.follow_selection();
            }
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            _ => {}
        }
        true
    }
}
