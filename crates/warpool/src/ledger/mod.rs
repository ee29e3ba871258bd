//! Several processes on one card: each says in its page what it holds, and takes no more than the others leave.
//!
//! - `rules.rs` decides, as functions of what all entries say; `admission.rs` has the words of an entry and the order
//!   in which they are written and read. This file finds the entries of other processes, and reads what the card has.
//! - The allocator asks before it takes memory from the driver ([`CardShare::admit`]), says what it has
//!   ([`CardShare::settle`]), and gives free pages to others ([`CardShare::to_give`]). Which pages is its business.
//! - Nothing here waits for another process but [`CardShare::wait_for_others`], for a bounded time.

mod admission;
#[cfg(all(test, any(target_os = "linux", target_os = "macos")))]
mod processes;
mod rules;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::{DeviceId, DeviceUuid, Driver};

use self::admission::{JOINED, WORDS, Words};
use self::rules::{Entry, Verdict, capacity, others_can_give, to_give};
use crate::error::ShareError;
use crate::share::{LEDGER_WORDS, OtherPage, PageDirectory, ProcessPage, now_us};
use crate::sync::primitives as sync;
use crate::{Instance, Result, lock};

const _: () = assert!(WORDS <= LEDGER_WORDS, "an entry fits");

/// Grants are raised to multiples of this, where there is room: so most requests read no other process's words.
const CHUNK: u64 = 64 << 20;

/// For how long a request for memory counts after it was last made: its process may have been stopped.
const ASKED_FOR_US: u64 = 1_000_000;

/// How many times others are given the time that they have to answer.
const ROUNDS: u64 = 4;

/// What a process has a right to, and how fast it gives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) guaranteed: u64,
    pub(crate) priority: u64,
    pub(crate) reclaim_ms: u64,
}

/// This process's part of one card.
#[derive(Debug)]
pub(crate) struct CardShare {
    directory: PageDirectory,
    page: Arc<ProcessPage>,
    device: DeviceId,
    uuid: DeviceUuid,
    number: u64,
    terms: Terms,
    /// Other processes that share, as of the last look into the folder.
    peers: Mutex<Vec<Peer>>,
    /// What the last refused claim lacked.
    missing: AtomicU64,
    /// The folder cannot be used any more.
    is_off: AtomicBool,
}

/// The page of another process, and the number of the card in it.
#[derive(Debug)]
struct Peer {
    page: OtherPage,
    device: usize,
}

impl Peer {
    fn words(&self) -> Words<'_> {
        Words(self.page.ledger(self.device))
    }

    /// What it says. What it asked for long ago does not count.
    fn entry(&self) -> Entry {
        let mut entry = self.words().entry(self.page.identity().number);
        if now_us().abs_diff(self.words().asked_us()) > ASKED_FOR_US {
            entry.wanted = 0;
        }
        entry
    }
}

impl CardShare {
    /// Joins the processes that share a card. `held` is what this one has already. An error if they have another
    /// layout, or if more would be guaranteed than the card has: then this process shares nothing.
    pub(crate) fn join(
        (directory, page): (&PageDirectory, &Arc<ProcessPage>),
        instance: &Instance,
        device: DeviceId,
        terms: Terms,
        held: u64,
    ) -> Result<Self> {
        let properties = instance.device(device.0)?.properties().clone();
        let share = Self {
            directory: directory.clone(),
            page: Arc::clone(page),
            device,
            uuid: properties.uuid,
            number: page.number(),
            terms,
            peers: Mutex::default(),
            missing: AtomicU64::new(0),
            is_off: AtomicBool::new(false),
        };
        // First, so that of two processes that join at the same time at least one sees the other.
        share.words().join(terms.guaranteed, terms.priority, held);
        match share.check(properties.bytes_total) {
            Ok(()) => Ok(share),
            Err(error) => {
                share.words().leave();
                Err(error)
            }
        }
    }

    fn check(&self, bytes_total: u64) -> Result<()> {
        let listing = self.directory.list()?;
        if let Some(problem) = listing.problems.into_iter().next() {
            return Err(ShareError::Other { file: problem.file, why: problem.why }.into());
        }
        self.refresh()?;
        let mut guaranteed = self.terms.guaranteed;
        for peer in &*lock(&self.peers) {
            let joined = peer.words().joined();
            if joined != JOINED {
                let why = format!("its ledger has layout {joined}, and this Warpool reads layout {JOINED}");
                return Err(ShareError::Other { file: peer.page.path().display().to_string(), why }.into());
            }
            guaranteed = guaranteed.saturating_add(peer.entry().guaranteed);
        }
        if guaranteed > bytes_total {
            return Err(ShareError::Guarantees { guaranteed, bytes_total }.into());
        }
        Ok(())
    }

    fn words(&self) -> Words<'_> {
        Words(self.page.ledger(self.device.0 as usize))
    }

    /// This process holds nothing any more.
    pub(crate) fn leave(&self) {
        self.words().leave();
    }

    /// Looks which other processes share the card now.
    fn refresh(&self) -> Result<()> {
        let pages = self.directory.list()?.pages.into_iter();
        let peers = pages.filter_map(|page| {
            let device = page.identity().devices.iter().position(|device| device.uuid == self.uuid)?;
            Some(Peer { page, device }).filter(|peer| peer.words().joined() != 0)
        });
        let peers: Vec<Peer> = peers.collect();
        *lock(&self.peers) = peers;
        Ok(())
    }

    /// To be called from time to time: looks for other processes, and makes sure that they see this one.
    pub(crate) fn keep(&self) {
        let is_found = self.page.keep();
        if !is_found || self.refresh().is_err() {
            self.switch_off();
        }
    }

    fn switch_off(&self) {
        if !self.is_off.swap(true, Ordering::Relaxed) {
            let folder = self.directory.path().display();
            tracing::warn!(%folder, "the folder of the pages is gone: this process shares its GPU without a ledger");
        }
    }

    fn others(&self) -> Vec<Entry> {
        lock(&self.peers).iter().filter(|peer| peer.words().joined() == JOINED).map(Peer::entry).collect()
    }

    /// Lets the process hold `total` bytes, if the others leave that much. `missing` has what is missing if not.
    pub(crate) fn admit(&self, driver: &dyn Driver, total: u64) -> bool {
        let granted = self.words().granted();
        if total <= granted || self.is_off.load(Ordering::Relaxed) {
            return true;
        }
        let (exact, rounded) = (total - granted, total.next_multiple_of(CHUNK) - granted);
        for bytes in [rounded, exact].into_iter().take(if rounded == exact { 1 } else { 2 }) {
            let others = || {
                if self.refresh().is_err() {
                    self.switch_off();
                }
                self.read(driver)
            };
            let verdict = self.words().grow(self.number, bytes, others, || sync::sleep_us(20));
            match verdict {
                Verdict::Granted => {
                    self.missing.store(0, Ordering::Relaxed);
                    return true;
                }
                Verdict::Refused(missing) => self.missing.store(missing, Ordering::Relaxed),
                Verdict::Contended => self.missing.store(bytes, Ordering::Relaxed),
            }
        }
        self.is_off.load(Ordering::Relaxed)
    }

    /// What the others say, and what all may have together. A page may be created or released while this reads: then
    /// it counts as nobody's and not as free.
    fn read(&self, driver: &dyn Driver) -> (Vec<Entry>, u64) {
        let peers = lock(&self.peers);
        let peers: Vec<&Peer> = peers.iter().filter(|peer| peer.words().joined() == JOINED).collect();
        let entries = || peers.iter().map(|peer| peer.entry()).collect::<Vec<_>>();
        let before = entries();
        // Without an answer nothing is known to be free.
        let free = driver.mem_info(self.device).map_or(0, |info| info.bytes_free);
        let after = entries();
        let both = before.iter().zip(&after).map(|(before, after)| Entry {
            granted: before.granted.max(after.granted),
            claim: before.claim.max(after.claim),
            held: before.held.min(after.held),
            ..*after
        });
        let mut entries: Vec<Entry> = both.collect();
        entries.push(self.words().entry(self.number));
        let capacity = capacity(free, &entries);
        entries.pop();
        (entries, capacity)
    }

    /// Says what the process holds, and how much of that is idle. `limited` is that and what it is about to take. What
    /// was granted beyond that is for others; a small part stays, unless others ask.
    pub(crate) fn settle(&self, held: u64, limited: u64, idle: u64) {
        let words = self.words();
        words.set_held(held, idle);
        let is_asked = self.others().iter().any(|other| other.wanted > 0);
        let keeps = if is_asked { limited } else { limited.next_multiple_of(CHUNK) };
        words.set_granted(words.granted().min(keeps).max(limited));
    }

    /// How many bytes of free pages others are to get now.
    pub(crate) fn to_give(&self, idle: u64) -> u64 {
        let words = self.words();
        words.set_held(words.held(), idle);
        let own = words.entry(self.number);
        let unused = own.granted.saturating_sub(own.held);
        to_give(&own, &self.others()).saturating_sub(unused)
    }

    /// Asks other processes for `bytes`, or what a claim lacked, and makes attempts until one succeeds. Gives up once
    /// nobody has anything to give, unless `is_last`, and after a bounded time. Not to be called with a lock.
    pub(crate) fn wait_for_others<T, E>(
        &self,
        bytes: u64,
        is_last: bool,
        mut attempt: impl FnMut() -> Result<std::result::Result<T, E>>,
    ) -> Result<Option<T>> {
        let mut outcome = Ok(None);
        for step in 0..ROUNDS * self.terms.reclaim_ms {
            let missing = match self.missing.load(Ordering::Relaxed) {
                0 => bytes,
                missing => missing,
            };
            let (words, rounds) = (self.words(), step / self.terms.reclaim_ms);
            words.ask(missing, rounds, now_us());
            let must_wait = is_last && rounds == 0;
            if !must_wait && !others_can_give(&words.entry(self.number), &self.others()) {
                break;
            }
            sync::sleep_us(1000);
            match attempt() {
                Ok(Ok(done)) => outcome = Ok(Some(done)),
                Ok(Err(_)) => continue,
                Err(error) => outcome = Err(error),
            }
            break;
        }
        self.words().ask(0, 0, 0);
        outcome
    }
}
