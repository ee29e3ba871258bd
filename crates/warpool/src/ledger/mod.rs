//! Several processes on one card: each says in its page what it holds, and takes no more than the others leave.
//!
//! - `rules.rs` decides, as functions of what all entries say; `admission.rs` has the words of an entry and the order
//!   in which they are written and read. This file finds the entries of other processes, and reads what the card has.
//! - The allocator asks before it takes memory from the driver ([`CardShare::admit`]), says what it has
//!   ([`CardShare::settle`]), and gives free pages to others ([`CardShare::to_give`]). Which pages is its business.
//! - Nothing here waits for another process but [`CardShare::wait_for_others`], for a bounded time.

mod admission;
mod pages;
mod rules;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::{DeviceId, DeviceUuid, Driver};

pub use self::pages::{LedgerPages, OtherLedger};

use self::admission::{JOINED, Words};
use self::rules::{Entry, Verdict, capacity, others_can_give, room, to_give};
use crate::defect::Defect;
use crate::error::ShareError;
use crate::sync::primitives as sync;
use crate::{Instance, Result, lock};

/// How many words an entry has.
pub(crate) const WORDS: usize = admission::WORDS;

/// Grants are raised to multiples of this, where there is room: so most requests read no other process's words.
const CHUNK: u64 = 64 << 20;

/// What all processes together leave for memory that no allocator has: the context of a process that starts, handles of
/// libraries, modules, graphs. A part of small cards.
const OUTSIDE_MAX: u64 = 1 << 30;
const OUTSIDE_PART: u64 = 32;

/// A process that asks for memory asks for this part of what it has beside: one that grows by small steps then waits a
/// few times, and not at each step.
const GROWTH_PART: u64 = 8;

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
    pages: Arc<dyn LedgerPages>,
    device: DeviceId,
    uuid: DeviceUuid,
    number: u64,
    terms: Terms,
    /// What is left for memory that no allocator has.
    outside: u64,
    /// Other processes that share, as of the last look into the folder.
    peers: Mutex<Vec<Box<dyn OtherLedger>>>,
    /// What the last refused claim lacked.
    missing: AtomicU64,
    /// The folder cannot be used any more.
    is_off: AtomicBool,
}

impl CardShare {
    /// Joins the processes that share a card. `held` is what this one has already. An error if they have another
    /// layout, or if more would be guaranteed than the card has: then this process shares nothing.
    pub(crate) fn join(
        pages: &Arc<dyn LedgerPages>,
        instance: &Instance,
        device: DeviceId,
        terms: Terms,
        held: u64,
    ) -> Result<Self> {
        let properties = instance.device(device.0)?.properties().clone();
        let share = Self {
            pages: Arc::clone(pages),
            device,
            uuid: properties.uuid,
            number: pages.number(),
            terms,
            outside: OUTSIDE_MAX.min(properties.bytes_total / OUTSIDE_PART),
            peers: Mutex::default(),
            missing: AtomicU64::new(0),
            is_off: AtomicBool::new(false),
        };
        // First, so that of two processes that join at the same time at least one sees the other.
        share.words().join(terms.guaranteed, terms.priority, held);
        match share.check(properties.bytes_total) {
            Ok(()) => {
                share.keep_guarantee(&**instance.driver());
                Ok(share)
            }
            Err(error) => {
                share.words().leave();
                Err(error)
            }
        }
    }

    fn check(&self, bytes_total: u64) -> Result<()> {
        *lock(&self.peers) = self.sharing(true)?;
        let mut guaranteed = self.terms.guaranteed;
        for peer in &*lock(&self.peers) {
            let joined = Words(peer.words()).joined();
            if joined != JOINED {
                let why = format!("its ledger has layout {joined}, and this Warpool reads layout {JOINED}");
                return Err(ShareError::Other { file: peer.file(), why }.into());
            }
            guaranteed = guaranteed.saturating_add(self.entry(&**peer).guaranteed);
        }
        if guaranteed > bytes_total {
            return Err(ShareError::Guarantees { guaranteed, bytes_total }.into());
        }
        Ok(())
    }

    fn words(&self) -> Words<'_> {
        Words(self.pages.own(self.device.0 as usize))
    }

    /// This process holds nothing any more, or does not share.
    pub(crate) fn leave(&self) {
        self.is_off.store(true, Ordering::Relaxed);
        self.words().leave();
    }

    /// The other processes that share the card now.
    fn sharing(&self, strict: bool) -> Result<Vec<Box<dyn OtherLedger>>> {
        let mut others = self.pages.others(self.uuid, strict)?;
        others.retain(|other| Words(other.words()).joined() != 0);
        Ok(others)
    }

    /// Looks which other processes share the card now.
    fn refresh(&self) -> Result<()> {
        let others = self.sharing(false)?;
        let mut peers = lock(&self.peers);
        let before = std::mem::replace(&mut *peers, others);
        if Defect::DeadKeepGrants.is_on() {
            let ended = before.into_iter().filter(|peer| peers.iter().all(|other| other.number() != peer.number()));
            let ended: Vec<_> = ended.collect();
            peers.extend(ended);
        }
        Ok(())
    }

    /// What another process says. What it asked for long ago does not count.
    fn entry(&self, of: &dyn OtherLedger) -> Entry {
        let words = Words(of.words());
        let mut entry = words.entry(of.number());
        if self.pages.now_us().abs_diff(words.asked_us()) > ASKED_FOR_US {
            entry.wanted = 0;
        }
        entry
    }

    /// To be called from time to time: looks for other processes, and makes sure that they see this one.
    pub(crate) fn keep(&self, driver: &dyn Driver) {
        let is_found = self.pages.keep();
        if !is_found || self.refresh().is_err() {
            self.switch_off();
        }
        self.keep_guarantee(driver);
    }

    /// Of what this process is guaranteed, what is there now is its own from now on.
    fn keep_guarantee(&self, driver: &dyn Driver) {
        if self.words().kept() < self.terms.guaranteed && !self.is_off.load(Ordering::Relaxed) {
            self.words().keep(self.number, || self.read(driver));
        }
    }

    /// To the others this process is then like any other program: what it has is not free.
    fn switch_off(&self) {
        if !self.is_off.swap(true, Ordering::Relaxed) {
            self.words().leave();
            let folder = self.pages.folder();
            tracing::warn!(%folder, "the folder of the pages is gone: this process shares its GPU without a ledger");
        }
    }

    fn others(&self) -> Vec<Entry> {
        let peers = lock(&self.peers);
        let sharing = peers.iter().filter(|peer| Words(peer.words()).joined() == JOINED);
        sharing.map(|peer| self.entry(&**peer)).collect()
    }

    /// Lets the process, which holds `held` bytes, hold `total`, if the others leave that much. `missing` has what is
    /// missing if not.
    pub(crate) fn admit(&self, driver: &dyn Driver, held: u64, total: u64) -> bool {
        let granted = self.words().granted();
        if total <= granted || self.is_off.load(Ordering::Relaxed) {
            return true;
        }
        self.set_held(held);
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

    /// What this process could take now, of what the driver has free.
    pub(crate) fn room(&self, driver: &dyn Driver) -> u64 {
        let (others, capacity) = self.read(driver);
        if self.is_off.load(Ordering::Relaxed) {
            u64::MAX
        } else {
            let own = self.words().entry(self.number);
            room(&own, &others, capacity).max(own.guaranteed.saturating_sub(own.held))
        }
    }

    /// What the others say, and what all may have together. A page may be created or released while this reads: then
    /// it counts as nobody's and not as free.
    fn read(&self, driver: &dyn Driver) -> (Vec<Entry>, u64) {
        let peers = lock(&self.peers);
        let peers: Vec<_> = peers.iter().filter(|peer| Words(peer.words()).joined() == JOINED).collect();
        let entries = || peers.iter().map(|peer| self.entry(&***peer)).collect::<Vec<_>>();
        let before = entries();
        // Without an answer nothing is known to be free.
        let free = driver.mem_info(self.device).map_or(0, |info| info.bytes_free);
        let after = entries();
        let both = before.iter().zip(&after).map(|(before, after)| Entry {
            granted: before.granted.max(after.granted),
            kept: before.kept.max(after.kept),
            claim: before.claim.max(after.claim),
            held: before.held.min(after.held),
            ..*after
        });
        let mut entries: Vec<Entry> = both.collect();
        let own = self.words().entry(self.number);
        let is_guaranteed = own.claim > 0 && own.granted.saturating_add(own.claim) <= own.guaranteed;
        let left = if is_guaranteed { 0 } else { self.outside };
        entries.push(own);
        let capacity = capacity(free.saturating_sub(left), &entries);
        entries.pop();
        (entries, capacity)
    }

    /// Says what the process holds. Before memory is released, so that nothing counts as free and as held.
    pub(crate) fn set_held(&self, held: u64) {
        let words = self.words();
        words.set_held(held, words.idle().min(held));
    }

    /// Says what the process holds, and how much of that is idle. `limited` is that and what it is about to take. What
    /// was granted beyond that is for others; a small part stays, unless others ask.
    pub(crate) fn settle(&self, held: u64, limited: u64, idle: u64) {
        let words = self.words();
        words.set_held(held, idle);
        let is_asked = self.others().iter().any(|other| other.wanted > 0);
        let keeps = if is_asked { limited } else { limited.next_multiple_of(CHUNK) };
        let keeps = if Defect::GivenStaysGranted.is_on() { u64::MAX } else { keeps };
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

    /// What to ask for beside `missing` bytes. What others owe to a guarantee ends there.
    fn growth(&self, missing: u64) -> u64 {
        let own = self.words().entry(self.number);
        let growth = own.held / GROWTH_PART;
        let owed = own.guaranteed.saturating_sub(own.granted.saturating_add(missing));
        if own.granted < own.guaranteed { growth.min(owed) } else { growth }
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
            words.ask(missing.saturating_add(self.growth(missing)), rounds, self.pages.now_us());
            let must_wait = is_last && rounds == 0;
            let is_over = !must_wait && !others_can_give(&words.entry(self.number), &self.others());
            if is_over && step == 0 {
                break;
            }
            if !is_over {
                sync::sleep_us(1000);
            }
            match attempt() {
                Ok(Ok(done)) => outcome = Ok(Some(done)),
                Ok(Err(_)) if !is_over => continue,
                // They may have given all that they had since the attempt before.
                Ok(Err(_)) => {}
                Err(error) => outcome = Err(error),
            }
            break;
        }
        self.words().ask(0, 0, 0);
        outcome
    }
}
