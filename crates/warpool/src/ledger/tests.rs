//! The protocol under many interleavings. The source file is built once more, with `shuttle`'s atomics.

#[path = "admission.rs"]
#[expect(clippy::duplicate_mod, reason = "built a second time, with other primitives")]
#[expect(dead_code, reason = "the models use a part of it")]
mod admission;
use super::rules;

use shuttle::sync::Arc;
use shuttle::thread;
use warpool_testing::scaled;

use self::admission::{WORDS, Words};
use super::rules::Verdict;
use crate::sync::tests::models::primitives as sync;
use sync::AtomicU64;

/// Fewer schedules than for locks: each has many more steps.
fn check(model: impl Fn() + Sync + Send + Copy + 'static) {
    let schedules = usize::try_from(scaled(150)).expect("few");
    shuttle::check_random(model, schedules);
    shuttle::check_pct(model, schedules, 3);
}

/// Processes that share a card of `capacity` units, by number; each with its guarantee.
struct Card {
    capacity: u64,
    words: Vec<Vec<AtomicU64>>,
}

impl Card {
    fn new(capacity: u64, guaranteed: &[u64]) -> Arc<Self> {
        let words = || (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let card = Self { capacity, words: guaranteed.iter().map(|_| words()).collect() };
        for (number, &guaranteed) in guaranteed.iter().enumerate() {
            card.of(number).join(guaranteed, 0, 0);
        }
        Arc::new(card)
    }

    fn of(&self, number: usize) -> Words<'_> {
        Words(&self.words[number])
    }

    fn grow(&self, number: usize, units: u64) -> Verdict {
        let others = || {
            let others = (0..self.words.len()).filter(|&other| other != number);
            (others.map(|other| self.of(other).entry(other as u64)).collect(), self.capacity)
        };
        self.of(number).grow(number as u64, units, others, thread::yield_now)
    }

    fn check(&self) {
        let granted: Vec<u64> = (0..self.words.len()).map(|number| self.of(number).granted()).collect();
        assert!(granted.iter().sum::<u64>() <= self.capacity, "{granted:?} of {}", self.capacity);
    }
}

/// Two processes want what only one can have, again and again: one gets it, and never both.
#[test]
fn together_they_never_have_more_than_the_card() {
    check(|| {
        let card = Card::new(5, &[0, 0, 0]);
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let card = Arc::clone(&card);
                thread::spawn(move || {
                    for units in [3, 2] {
                        if card.grow(number, units) == Verdict::Granted {
                            card.check();
                            let words = card.of(number);
                            words.set_granted(words.granted() - 1);
                        }
                        card.check();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        card.check();
    });
}

/// What is guaranteed is granted, whatever others try at the same time.
#[test]
fn a_guarantee_is_kept_while_others_grow() {
    check(|| {
        let card = Card::new(6, &[3, 1]);
        let greedy = {
            let card = Arc::clone(&card);
            thread::spawn(move || while card.grow(1, 1) == Verdict::Granted {})
        };
        for _ in 0..3 {
            assert_eq!(card.grow(0, 1), Verdict::Granted);
        }
        greedy.join().unwrap();
        card.check();
    });
}

/// Both fit: neither is refused because the other one was in its way.
#[test]
fn claims_that_fit_together_are_both_granted() {
    check(|| {
        let card = Card::new(4, &[0, 0]);
        let other = {
            let card = Arc::clone(&card);
            thread::spawn(move || card.grow(1, 2))
        };
        assert_eq!(card.grow(0, 2), Verdict::Granted);
        assert_eq!(other.join().unwrap(), Verdict::Granted);
    });
}

/// A process that died with a claim, or was stopped: its words stay as they are, and nobody waits for ever.
#[test]
fn a_claim_that_is_never_decided_holds_nobody_up() {
    check(|| {
        let card = Card::new(4, &[0, 0]);
        card.words[0][4].store(3, sync::Ordering::SeqCst);
        let other = {
            let card = Arc::clone(&card);
            thread::spawn(move || assert_eq!(card.grow(1, 2), Verdict::Contended))
        };
        other.join().unwrap();
        assert_eq!(card.grow(1, 1), Verdict::Granted);
    });
}
