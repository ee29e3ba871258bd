//! The page of this process. Values are written by one thread at a time, under a lock that no allocator knows; nothing
//! here is called by an allocation. In a forked child nothing is written: the page is the parent's.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use warpool_driver::fork::Origin;
use warpool_driver::platform::SharedWords;

use super::layout::{
    ASKED_AT, COMMAND, DEVICES_AT, LEDGER, MAGIC, MAGIC_AT, NAME, NUMBER_AT, ORDINAL_AT, PID_AT, SINCE_AT, TOTAL_AT,
    UUID, VALUES, VERSION, VERSION_AT, WORDS_AT, section, store_text, words,
};
use super::limit::{self, LimitAnswer, LimitRequest};
use super::now_us;
use super::values::{Counters, DeviceValues, OomEvent, UsageRow, bounded};
use crate::sync::sequence::Sequenced;
use crate::{Instance, lock};

/// What a page says of its process.
#[derive(Clone, Debug, Default)]
pub struct PageOptions {
    /// The command that the process runs, as its user would recognize it. Cut after 64 bytes.
    pub command: String,
}

/// The page of this process, until it is dropped or the process ends.
#[derive(Debug)]
pub struct ProcessPage {
    words: Arc<SharedWords>,
    path: PathBuf,
    origin: Origin,
    exists: Arc<()>,
    /// What was last written for each device.
    devices: Vec<Mutex<DeviceValues>>,
}

impl ProcessPage {
    /// The words are new and all 0.
    pub(super) fn new(
        words_of_page: Arc<SharedWords>,
        path: PathBuf,
        number: u64,
        of: &Instance,
        with: &PageOptions,
    ) -> Self {
        let page = words_of_page.words();
        let devices: Vec<_> = of.devices().collect();
        let head = [
            (VERSION_AT, VERSION),
            (WORDS_AT, words(devices.len()) as u64),
            (PID_AT, std::process::id().into()),
            (NUMBER_AT, number),
            (SINCE_AT, now_us()),
            (DEVICES_AT, devices.len() as u64),
        ];
        head.into_iter().for_each(|(at, word)| page[at].store(word, Ordering::Relaxed));
        store_text(&page[COMMAND], &with.command);
        for (index, device) in devices.iter().enumerate() {
            let (section, properties) = (section(page, index), device.properties());
            let (high, low) = properties.uuid.0.split_at(8);
            for (word, half) in section[UUID].iter().zip([high, low]) {
                word.store(u64::from_be_bytes(half.try_into().expect("8 bytes")), Ordering::Relaxed);
            }
            section[ORDINAL_AT].store(device.id().0.into(), Ordering::Relaxed);
            section[TOTAL_AT].store(properties.bytes_total, Ordering::Relaxed);
            store_text(&section[NAME], &properties.name);
        }
        page[MAGIC_AT].store(MAGIC, Ordering::Release);
        let devices = devices.iter().map(|_| Mutex::default()).collect();
        Self { words: words_of_page, path, origin: Origin::here(), exists: Arc::default(), devices }
    }

    /// Ends with it.
    pub(super) fn exists(&self) -> Weak<()> {
        Arc::downgrade(&self.exists)
    }

    /// Identifies it among all pages.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.words.words()[NUMBER_AT].load(Ordering::Relaxed)
    }

    /// Its file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the counters and the rows of a device, by its ordinal in this process. Of each kind, the rows with most
    /// memory are kept, and the others are added up.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn write(&self, device: usize, counters: &Counters, rows: &[UsageRow]) {
        let rows = bounded(rows.to_vec());
        self.change(device, |values| {
            values.counters = counters.clone();
            values.rows = rows;
        });
    }

    /// Writes the last out-of-memory error of a device.
    ///
    /// # Panics
    /// As [`write`](Self::write).
    pub fn write_oom(&self, device: usize, event: OomEvent) {
        self.change(device, |values| values.last_oom = Some(event));
    }

    fn change(&self, device: usize, change: impl FnOnce(&mut DeviceValues)) {
        if !self.origin.is_here() {
            return;
        }
        let mut values = lock(&self.devices[device]);
        change(&mut values);
        Sequenced::new(&section(self.words.words(), device)[VALUES]).write(&values.words());
    }

    /// When a reader last asked for fresh values, in microseconds since 1970; 0 if none did.
    #[must_use]
    pub fn asked_us(&self) -> u64 {
        self.words.words()[ASKED_AT].load(Ordering::Relaxed)
    }

    /// The ledger of a device: words that this page does not write. All processes may read those of each other.
    ///
    /// # Panics
    /// As [`write`](Self::write).
    #[must_use]
    pub fn ledger(&self, device: usize) -> &[AtomicU64] {
        &section(self.words.words(), device)[LEDGER]
    }

    /// The request of another process for another limit on a device, if there is one that is not answered.
    pub(super) fn limit_request(&self, device: usize) -> Option<LimitRequest> {
        limit::pending(section(self.words.words(), device))
    }

    pub(super) fn answer_limit(&self, device: usize, request: LimitRequest, answer: LimitAnswer) {
        if self.origin.is_here() {
            limit::answer(section(self.words.words(), device), request, answer);
        }
    }

    /// To be called from time to time: makes sure that other processes see that this one is alive, even if some library
    /// of this process opened and closed the file. `false` if the file was removed, so that none finds it.
    #[must_use]
    pub fn keep(&self) -> bool {
        !self.origin.is_here() || self.words.keep().unwrap_or(true)
    }
}

/// What another process would read and write.
#[cfg(test)]
impl ProcessPage {
    pub(super) fn read_own(&self, device: usize) -> super::other::Reading {
        super::other::reading(section(self.words.words(), device))
    }

    pub(super) fn request_own(&self, device: usize, bytes: Option<u64>) -> LimitRequest {
        limit::request(section(self.words.words(), device), bytes)
    }

    pub(super) fn answer_own(&self, device: usize, request: LimitRequest) -> Option<LimitAnswer> {
        limit::answer_to(section(self.words.words(), device), request)
    }
}
