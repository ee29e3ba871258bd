//! The words of an entry, and how a process raises its grant without a lock.
//!
//! Each process writes its own words and reads those of others. To grow, it publishes a *claim* first, then reads the
//! others', and lets the rules decide with all claims counted. Of two processes that grow at the same time, at least
//! one sees the other's claim: so both may be refused, but never are both granted what only one can have. A refused
//! claim is withdrawn and made again; of two that are in each other's way, the process with the lower number keeps its
//! claim and waits for the other's to be withdrawn.
//!
//! There is nothing to clean up after a process that dies or is stopped at any instruction: its words count as long as
//! it lives, and then not at all. A process that was stopped with a claim keeps that much from the others until it goes
//! on, and nobody waits for it longer than for any other answer.

use super::rules::{Entry, Verdict, can_keep, decide};
use super::sync::{AtomicU64, Ordering};

/// What the first word of an entry is. Another number is another layout, whose process does not share with this one.
pub(super) const JOINED: u64 = 2;

const JOINED_AT: usize = 0;
const GUARANTEED: usize = 1;
const PRIORITY: usize = 2;
const GRANTED: usize = 3;
const CLAIM: usize = 4;
const HELD: usize = 5;
const IDLE: usize = 6;
const WANTED: usize = 7;
const ROUNDS: usize = 8;
const ASKED_US: usize = 9;
const KEPT: usize = 10;
/// How many words an entry has.
pub(super) const WORDS: usize = 11;

/// How often a claim is looked at again while claims of others are in the way.
const TRIES: u32 = 64;

/// The words of an entry: one's own, or another's, which are only read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words<'a>(pub(super) &'a [AtomicU64]);

impl Words<'_> {
    fn load(&self, at: usize) -> u64 {
        // One order of all accesses: a claim is stored before others' words are loaded.
        self.0[at].load(Ordering::SeqCst)
    }

    fn store(&self, at: usize, value: u64) {
        self.0[at].store(value, Ordering::SeqCst);
    }

    /// Which layout its process uses; 0 if it does not share.
    pub(super) fn joined(&self) -> u64 {
        self.load(JOINED_AT)
    }

    /// Makes it count. `granted` is what the process holds already.
    pub(super) fn join(&self, guaranteed: u64, priority: u64, granted: u64) {
        self.store(GUARANTEED, guaranteed);
        self.store(PRIORITY, priority);
        self.set_held(granted, 0);
        self.store(KEPT, granted.min(guaranteed));
        self.store(GRANTED, granted);
        self.store(JOINED_AT, JOINED);
    }

    pub(super) fn leave(&self) {
        self.store(JOINED_AT, 0);
    }

    /// What it says. The claim is read before the grant, into which it goes: what is read is never too low.
    pub(super) fn entry(&self, number: u64) -> Entry {
        let claim = self.load(CLAIM);
        Entry {
            number,
            guaranteed: self.load(GUARANTEED),
            kept: self.load(KEPT),
            priority: self.load(PRIORITY),
            granted: self.load(GRANTED),
            claim,
            held: self.load(HELD),
            idle: self.load(IDLE),
            wanted: self.load(WANTED),
            rounds: self.load(ROUNDS),
        }
    }

    pub(super) fn granted(&self) -> u64 {
        self.load(GRANTED)
    }

    /// Lowers the grant, or raises it to what the process holds in fact.
    pub(super) fn set_granted(&self, granted: u64) {
        self.store(GRANTED, granted);
    }

    pub(super) fn held(&self) -> u64 {
        self.load(HELD)
    }

    pub(super) fn idle(&self) -> u64 {
        self.load(IDLE)
    }

    pub(super) fn set_held(&self, held: u64, idle: u64) {
        self.store(IDLE, idle);
        self.store(HELD, held);
    }

    pub(super) fn kept(&self) -> u64 {
        self.load(KEPT)
    }

    /// Keeps more of the guarantee, as far as others leave it. `others` as in [`grow`](Self::grow). As a claim, it is
    /// published before the others are read.
    pub(super) fn keep(&self, number: u64, others: impl FnOnce() -> (Vec<Entry>, u64)) {
        let before = self.kept();
        self.store(KEPT, self.load(GUARANTEED));
        let (others, capacity) = others();
        self.store(KEPT, can_keep(&self.entry(number), &others, capacity).max(before));
    }

    /// Asks others for memory; 0 ends it.
    pub(super) fn ask(&self, wanted: u64, rounds: u64, now_us: u64) {
        self.store(ROUNDS, rounds);
        self.store(ASKED_US, now_us);
        self.store(WANTED, wanted);
    }

    pub(super) fn asked_us(&self) -> u64 {
        self.load(ASKED_US)
    }

    /// Tries to raise the grant by `bytes`. `others` reads the entries of all other living processes, whose list is
    /// made after the call; with what all may have together. `pause` lets them go on.
    pub(super) fn grow(
        &self,
        number: u64,
        bytes: u64,
        mut others: impl FnMut() -> (Vec<Entry>, u64),
        mut pause: impl FnMut(),
    ) -> Verdict {
        self.store(CLAIM, bytes);
        let mut verdict = Verdict::Contended;
        for _ in 0..TRIES {
            let (others, capacity) = others();
            verdict = decide(&self.entry(number), &others, capacity);
            if verdict != Verdict::Contended {
                break;
            }
            let is_first = others.iter().all(|other| other.claim == 0 || other.number > number);
            if is_first {
                pause();
            } else {
                self.store(CLAIM, 0);
                pause();
                self.store(CLAIM, bytes);
            }
        }
        if verdict == Verdict::Granted {
            // Before the claim ends: at no moment does it count in neither.
            let granted = self.granted().saturating_add(bytes);
            self.store(GRANTED, granted);
            self.store(KEPT, self.load(KEPT).max(granted.min(self.load(GUARANTEED))));
        }
        self.store(CLAIM, 0);
        verdict
    }
}
