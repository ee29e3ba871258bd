//! The page of another process. Whatever its words are, reading them makes no more than an error.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::DeviceUuid;
use warpool_driver::platform::SharedWords;

use super::layout::{
    ASKED_AT, COMMAND, DEVICES_AT, DEVICES_MAX, LEDGER, MAGIC, MAGIC_AT, NAME, NUMBER_AT, ORDINAL_AT, PID_AT, SINCE_AT,
    TOTAL_AT, UUID, VALUE_WORDS, VALUES, VERSION, VERSION_AT, WORDS_AT, load_text, section, words,
};
use super::limit::{self, LimitAnswer, LimitRequest};
use super::now_us;
use super::values::DeviceValues;
use crate::sync::sequence::{ReadError, Sequenced};

/// What a page says of its process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageIdentity {
    /// The process id, as the process itself sees it.
    pub pid: u32,
    /// Identifies the page: process ids are used again.
    pub number: u64,
    /// When the page was made, in microseconds since 1970.
    pub since_us: u64,
    /// The command that it runs.
    pub command: String,
    /// Its devices, by their ordinals in that process.
    pub devices: Vec<DeviceOfPage>,
}

/// A device of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceOfPage {
    /// Which card it is: the same for all processes.
    pub uuid: DeviceUuid,
    /// Its ordinal in the process.
    pub ordinal: u32,
    /// Its name, cut after 64 bytes.
    pub name: String,
    /// The size of its memory.
    pub bytes_total: u64,
}

/// What a page says of a device now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reading {
    /// As the process wrote it.
    Values(Box<DeviceValues>),
    /// The process has written nothing yet.
    Nothing,
    /// The process writes at every attempt: it was stopped in the middle.
    Busy,
    /// Something else wrote there.
    Damaged,
}

/// The page of another process that was alive when the page was found.
#[derive(Debug)]
pub struct OtherPage {
    words: Arc<SharedWords>,
    path: PathBuf,
    identity: PageIdentity,
}

/// Why a file is no page that can be read.
pub(super) enum Refused {
    /// The process is still writing its head.
    Unfinished,
    Damaged(String),
}

impl OtherPage {
    pub(super) fn new(shared: Arc<SharedWords>, path: PathBuf) -> Result<Self, Refused> {
        let identity = identity(shared.words())?;
        Ok(Self { words: shared, path, identity })
    }

    /// Its process and devices.
    #[must_use]
    pub fn identity(&self) -> &PageIdentity {
        &self.identity
    }

    /// Its file.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Whether its process is alive.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.words.has_owner().unwrap_or(false)
    }

    /// Asks for fresh values. The process may write more rarely while none asks.
    pub fn ask(&self) {
        self.words.words()[ASKED_AT].store(now_us(), Ordering::Relaxed);
    }

    /// What it says of a device, by the ordinal in that process.
    ///
    /// # Panics
    /// If there is no such device.
    #[must_use]
    pub fn read(&self, device: usize) -> Reading {
        assert!(device < self.identity.devices.len(), "a device of the page");
        reading(section(self.words.words(), device))
    }

    /// Asks the process for another limit on what it may reserve on a device; `None` is no limit. The process answers
    /// when it next writes its page: [`limit_answer`](Self::limit_answer). A later request replaces one that is not
    /// answered.
    ///
    /// # Panics
    /// As [`read`](Self::read).
    #[must_use]
    pub fn request_limit(&self, device: usize, bytes: Option<u64>) -> LimitRequest {
        assert!(device < self.identity.devices.len(), "a device of the page");
        limit::request(section(self.words.words(), device), bytes)
    }

    /// The answer to a request, when there is one.
    ///
    /// # Panics
    /// As [`read`](Self::read).
    #[must_use]
    pub fn limit_answer(&self, device: usize, request: LimitRequest) -> Option<LimitAnswer> {
        assert!(device < self.identity.devices.len(), "a device of the page");
        limit::answer_to(section(self.words.words(), device), request)
    }

    /// The ledger of a device.
    ///
    /// # Panics
    /// As [`read`](Self::read).
    #[must_use]
    pub fn ledger(&self, device: usize) -> &[AtomicU64] {
        assert!(device < self.identity.devices.len(), "a device of the page");
        &section(self.words.words(), device)[LEDGER]
    }
}

/// Reads the values of a section.
pub(super) fn reading(section: &[AtomicU64]) -> Reading {
    let mut values = [0; VALUE_WORDS];
    match Sequenced::new(&section[VALUES]).read(&mut values) {
        Ok(()) => match DeviceValues::from_words(&values) {
            Some(values) => Reading::Values(Box::new(values)),
            None => Reading::Damaged,
        },
        Err(ReadError::NeverWritten) => Reading::Nothing,
        Err(ReadError::Busy) => Reading::Busy,
        Err(ReadError::Damaged) => Reading::Damaged,
    }
}

/// Reads a head, which is not written any more.
fn identity(page: &[AtomicU64]) -> Result<PageIdentity, Refused> {
    let damaged = |why: &str| Refused::Damaged(why.to_owned());
    match page[MAGIC_AT].load(Ordering::Acquire) {
        MAGIC => {}
        0 => return Err(Refused::Unfinished),
        _ => return Err(damaged("it does not begin as a page does")),
    }
    let word = |at: usize| page[at].load(Ordering::Relaxed);
    if word(VERSION_AT) != VERSION {
        let why = format!("it has layout {}, and this Warpool reads layout {VERSION}", word(VERSION_AT));
        return Err(Refused::Damaged(why));
    }
    let devices = usize::try_from(word(DEVICES_AT)).ok().filter(|&devices| devices <= DEVICES_MAX);
    let devices = devices.filter(|&devices| words(devices) == page.len() && word(WORDS_AT) == page.len() as u64);
    let Some(devices) = devices else {
        return Err(damaged("its length is not that of a page with so many devices"));
    };
    let pid = u32::try_from(word(PID_AT)).map_err(|_| damaged("its process id is none"))?;
    let devices = (0..devices).map(|index| {
        let section = section(page, index);
        let word = |at: usize| section[at].load(Ordering::Relaxed);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&word(UUID.start).to_be_bytes());
        uuid[8..].copy_from_slice(&word(UUID.start + 1).to_be_bytes());
        let ordinal = u32::try_from(word(ORDINAL_AT)).map_err(|_| damaged("the ordinal of a device is none"))?;
        let (name, bytes_total) = (load_text(&section[NAME]), word(TOTAL_AT));
        Ok(DeviceOfPage { uuid: DeviceUuid(uuid), ordinal, name, bytes_total })
    });
    let devices = devices.collect::<Result<_, _>>()?;
    let (number, since_us, command) = (word(NUMBER_AT), word(SINCE_AT), load_text(&page[COMMAND]));
    Ok(PageIdentity { pid, number, since_us, command, devices })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::layout::HEAD_WORDS;

    /// A page of two devices, the first of which has values.
    fn page() -> Vec<AtomicU64> {
        let page: Vec<AtomicU64> = (0..words(2)).map(|_| AtomicU64::new(0)).collect();
        let length = page.len() as u64;
        let head = [(MAGIC_AT, MAGIC), (VERSION_AT, VERSION), (WORDS_AT, length), (PID_AT, 7), (DEVICES_AT, 2)];
        head.into_iter().for_each(|(at, word)| page[at].store(word, Ordering::Relaxed));
        Sequenced::new(&section(&page, 0)[VALUES]).write(&DeviceValues::default().words());
        page
    }

    #[test]
    fn any_words_give_an_answer() {
        let page = page();
        assert!(identity(&page).is_ok_and(|identity| identity.pid == 7 && identity.devices.len() == 2));
        assert_eq!(reading(section(&page, 1)), Reading::Nothing);
        // Each word of the head and of the first section but the sequence number, with each of these.
        for at in (0..HEAD_WORDS + 1024).filter(|&at| at != HEAD_WORDS + VALUES.start) {
            let right = page[at].load(Ordering::Relaxed);
            for wrong in [0, 1, u64::MAX, right ^ (1 << 63), 0x80] {
                page[at].store(wrong, Ordering::Relaxed);
                let (head, values) = (identity(&page), reading(section(&page, 0)));
                let is_value = (HEAD_WORDS + VALUES.start..HEAD_WORDS + VALUES.end).contains(&at);
                assert_eq!(matches!(values, Reading::Values(_)), !is_value || wrong == right, "word {at}: {wrong:#x}");
                if [MAGIC_AT, VERSION_AT, WORDS_AT, DEVICES_AT].contains(&at) {
                    assert_eq!(head.is_ok(), wrong == right, "word {at}: {wrong:#x}");
                }
            }
            page[at].store(right, Ordering::Relaxed);
        }
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            page[HEAD_WORDS..].iter().for_each(|word| word.store(random.u64(..), Ordering::Relaxed));
            let _ = (identity(&page), reading(section(&page, 0)), reading(section(&page, 1)));
        }
    }

    #[test]
    fn another_layout_and_another_length_are_named() {
        let why = |page: &[AtomicU64]| match identity(page) {
            Ok(_) => panic!("a page"),
            Err(Refused::Unfinished) => "unfinished".to_owned(),
            Err(Refused::Damaged(why)) => why,
        };
        let page = page();
        assert_eq!(why(&page[..words(1)]), "its length is not that of a page with so many devices");
        page[VERSION_AT].store(9, Ordering::Relaxed);
        assert_eq!(why(&page), "it has layout 9, and this Warpool reads layout 1");
        page[MAGIC_AT].store(0, Ordering::Relaxed);
        assert_eq!(why(&page), "unfinished");
    }
}
