//! All pages of a folder at one moment, with what they add up to per card.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use warpool_driver::{DeviceUuid, MemoryInfo};

use super::directory::{Listing, PageProblem};
use super::other::{DeviceOfPage, PageIdentity, Reading};
use super::values::{Counters, DeviceValues};

/// Every process with a page, and every card that one of them sees.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Board {
    /// The processes, by id.
    pub processes: Vec<BoardProcess>,
    /// The cards, by UUID.
    pub cards: Vec<Card>,
    /// Files that cannot be read.
    pub problems: Vec<PageProblem>,
}

/// A process, and what its page says of each of its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BoardProcess {
    /// Who it is.
    pub identity: PageIdentity,
    /// In the order of its devices.
    pub devices: Vec<Reading>,
}

/// A card, and what the processes with a page have of it. Sums that would be too large are `u64::MAX`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Card {
    /// Which card it is.
    pub uuid: DeviceUuid,
    /// Its name.
    pub name: String,
    /// The size of its memory.
    pub bytes_total: u64,
    /// Processes with memory there, awake or asleep.
    pub processes: u64,
    /// Bytes that they reserved.
    pub bytes_reserved: u64,
    /// Bytes that they allocated.
    pub bytes_allocated: u64,
    /// Bytes of their memory that is asleep.
    pub bytes_asleep: u64,
    /// Bytes that the driver says are used, by whomever; `None` if nobody asked it.
    pub bytes_used: Option<u64>,
    /// When the driver said so, in microseconds since 1970; 0 if nobody asked it.
    pub used_us: u64,
}

impl Card {
    /// Used bytes that no process with a page reserved: contexts, other programs, memory that no process has any more.
    #[must_use]
    pub fn bytes_elsewhere(&self) -> Option<u64> {
        self.bytes_used.map(|used| used.saturating_sub(self.bytes_reserved))
    }
}

/// One process on one device.
#[derive(Clone, Copy, Debug)]
pub struct BoardRow<'a> {
    /// The process.
    pub process: &'a PageIdentity,
    /// The device.
    pub device: &'a DeviceOfPage,
    /// What its page says.
    pub reading: &'a Reading,
}

impl BoardRow<'_> {
    /// What the process wrote, if that can be read.
    #[must_use]
    pub fn values(&self) -> Option<&DeviceValues> {
        match self.reading {
            Reading::Values(values) => Some(values),
            Reading::Nothing | Reading::Busy | Reading::Damaged => None,
        }
    }

    fn has_memory(&self) -> bool {
        self.values().is_none_or(|values| is_used(&values.counters))
    }
}

/// Whether a process ever used a device.
fn is_used(counters: &Counters) -> bool {
    counters.bytes_reserved > 0 || counters.bytes_asleep > 0 || counters.allocations > 0
}

/// By what rows are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BoardOrder {
    /// Most reserved bytes first.
    #[default]
    Reserved,
    /// Most allocated bytes first.
    Allocated,
    /// Most bytes asleep first.
    Asleep,
    /// Most allocations per second first.
    Rate,
    /// By process id.
    Pid,
    /// By the command's name.
    Command,
}

impl BoardOrder {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Reserved, Self::Allocated, Self::Asleep, Self::Rate, Self::Pid, Self::Command];

    /// Its name, as arguments have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Allocated => "allocated",
            Self::Asleep => "asleep",
            Self::Rate => "rate",
            Self::Pid => "pid",
            Self::Command => "command",
        }
    }
}

impl Board {
    /// Reads every page.
    #[must_use]
    pub fn read(listing: Listing) -> Self {
        let Listing { pages, problems } = listing;
        let processes = pages.iter().map(|page| {
            let devices = (0..page.identity().devices.len()).map(|device| page.read(device)).collect();
            BoardProcess { identity: page.identity().clone(), devices }
        });
        Self::of(processes.collect(), problems)
    }

    fn of(processes: Vec<BoardProcess>, problems: Vec<PageProblem>) -> Self {
        let mut board = Self { processes, cards: Vec::new(), problems };
        let mut cards: BTreeMap<DeviceUuid, Card> = BTreeMap::new();
        for row in board.all_rows() {
            let card = cards.entry(row.device.uuid).or_insert_with(|| Card {
                uuid: row.device.uuid,
                name: row.device.name.clone(),
                bytes_total: row.device.bytes_total,
                ..Card::default()
            });
            let Some(counters) = row.values().map(|values| &values.counters) else {
                continue;
            };
            card.processes += u64::from(counters.bytes_reserved > 0 || counters.bytes_asleep > 0);
            card.bytes_reserved = card.bytes_reserved.saturating_add(counters.bytes_reserved);
            card.bytes_allocated = card.bytes_allocated.saturating_add(counters.bytes_allocated);
            card.bytes_asleep = card.bytes_asleep.saturating_add(counters.bytes_asleep);
            // The driver tells all processes the same: the last to ask knows best.
            if let Some(free) = counters.device_free().filter(|_| counters.read_us >= card.used_us) {
                card.bytes_used = Some(row.device.bytes_total.saturating_sub(free));
                card.used_us = counters.read_us;
            }
        }
        board.cards = cards.into_values().collect();
        board
    }

    /// Adds what a driver says of a card now.
    pub fn add_driver(&mut self, uuid: DeviceUuid, name: &str, info: MemoryInfo, now_us: u64) {
        let index = match self.cards.binary_search_by_key(&uuid, |card| card.uuid) {
            Ok(index) => index,
            Err(index) => {
                let card = Card { uuid, name: name.to_owned(), bytes_total: info.bytes_total, ..Card::default() };
                self.cards.insert(index, card);
                index
            }
        };
        let card = &mut self.cards[index];
        (card.bytes_used, card.used_us) = (Some(info.bytes_total.saturating_sub(info.bytes_free)), now_us);
    }

    fn all_rows(&self) -> impl Iterator<Item = BoardRow<'_>> {
        self.processes.iter().flat_map(|process| {
            let devices = process.identity.devices.iter().zip(&process.devices);
            devices.map(|(device, reading)| BoardRow { process: &process.identity, device, reading })
        })
    }

    /// One row for each process and device that it used, or the first of its devices if it used none.
    #[must_use]
    pub fn rows(&self, order: BoardOrder) -> Vec<BoardRow<'_>> {
        let mut rows: Vec<BoardRow<'_>> = Vec::new();
        for row in self.all_rows() {
            let is_first = rows.last().is_none_or(|last| last.process.number != row.process.number);
            let replaces =
                rows.last().is_some_and(|last| last.process.number == row.process.number && !last.has_memory());
            if replaces && row.has_memory() {
                rows.pop();
                rows.push(row);
            } else if is_first || row.has_memory() {
                rows.push(row);
            }
        }
        let bytes = |of: fn(&Counters) -> u64| {
            move |row: &BoardRow<'_>| Reverse(row.values().map_or(0, |values| of(&values.counters)))
        };
        // They are in the order of process ids and devices, which ties keep.
        match order {
            BoardOrder::Reserved => rows.sort_by_key(bytes(|counters| counters.bytes_reserved)),
            BoardOrder::Allocated => rows.sort_by_key(bytes(|counters| counters.bytes_allocated)),
            BoardOrder::Asleep => rows.sort_by_key(bytes(|counters| counters.bytes_asleep)),
            BoardOrder::Rate => rows.sort_by_key(bytes(|counters| counters.allocations_per_second)),
            BoardOrder::Pid => {}
            BoardOrder::Command => rows.sort_by(|a, b| a.process.command.cmp(&b.process.command)),
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ordinal: u32) -> DeviceOfPage {
        let mut uuid = [0; 16];
        uuid[0] = u8::try_from(ordinal).unwrap();
        DeviceOfPage { uuid: DeviceUuid(uuid), ordinal, name: format!("card {ordinal}"), bytes_total: 1000 }
    }

    /// A process with these reserved bytes on its devices; `None` is damaged.
    fn process(pid: u32, command: &str, reserved: &[Option<u64>]) -> BoardProcess {
        let devices = (0..).map(device).take(reserved.len()).collect();
        let identity = PageIdentity { pid, number: pid.into(), since_us: 0, command: command.to_owned(), devices };
        let reading = |reserved: &Option<u64>| match *reserved {
            None => Reading::Damaged,
            Some(bytes) => {
                let free = if bytes == 0 { u64::MAX } else { 1000 - 10 * u64::from(pid) };
                let read_us = pid.into();
                let counters =
                    Counters { bytes_reserved: bytes, bytes_device_free: free, read_us, ..Counters::default() };
                Reading::Values(Box::new(DeviceValues { counters, ..DeviceValues::default() }))
            }
        };
        BoardProcess { identity, devices: reserved.iter().map(reading).collect() }
    }

    #[test]
    fn cards_have_the_sums_of_their_processes() {
        let processes = vec![
            process(1, "b", &[Some(5), Some(0)]),
            process(2, "a", &[Some(7), None]),
            process(3, "c", &[Some(0), Some(u64::MAX)]),
            process(4, "d", &[Some(0), Some(2)]),
        ];
        let mut board = Board::of(processes, Vec::new());
        let sums: Vec<_> = board.cards.iter().map(|card| (card.bytes_reserved, card.processes)).collect();
        assert_eq!(sums, [(12, 2), (u64::MAX, 2)]);
        // What the second process was told, which asked last.
        let card = &board.cards[0];
        assert_eq!((card.bytes_used, card.bytes_elsewhere(), card.used_us), (Some(20), Some(8), 2));
        board.add_driver(card.uuid, "card", MemoryInfo { bytes_free: 900, bytes_total: 1000 }, 9);
        assert_eq!((board.cards[0].bytes_used, board.cards[0].bytes_elsewhere()), (Some(100), Some(88)));
        board.add_driver(device(9).uuid, "unused", MemoryInfo { bytes_free: 1, bytes_total: 2 }, 9);
        assert_eq!((board.cards.len(), board.cards[2].bytes_used), (3, Some(1)));
    }

    #[test]
    fn rows_are_those_with_memory_or_the_first() {
        let processes = vec![
            process(1, "b", &[Some(0), Some(5), Some(6)]),
            process(2, "a", &[Some(0), Some(0)]),
            process(3, "c", &[Some(7), None]),
        ];
        let board = Board::of(processes, Vec::new());
        let shown =
            |order| board.rows(order).iter().map(|row| (row.process.pid, row.device.ordinal)).collect::<Vec<_>>();
        assert_eq!(shown(BoardOrder::Pid), [(1, 1), (1, 2), (2, 0), (3, 0), (3, 1)]);
        assert_eq!(shown(BoardOrder::Reserved), [(3, 0), (1, 2), (1, 1), (2, 0), (3, 1)]);
        assert_eq!(shown(BoardOrder::Command), [(2, 0), (1, 1), (1, 2), (3, 0), (3, 1)]);
        for order in BoardOrder::ALL {
            assert_eq!(shown(order).len(), 5, "{}", order.name());
        }
    }
}
