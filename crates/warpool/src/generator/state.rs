//! What a generator is: a seed and an offset, under a lock that is never held for more than a few assignments.
//! No driver, no captures here.

use std::sync::Mutex;

use crate::lock;

/// Seed and offset, shared by all generators on it and by the graphs that draw from it.
#[derive(Debug)]
pub(crate) struct State {
    numbers: Mutex<Numbers>,
}

#[derive(Debug)]
struct Numbers {
    seed: u64,
    offset: u64,
    /// Counts every change, so that only the last one can be taken back.
    changes: u64,
}

/// A stretch of a generator's numbers that somebody has now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) seed: u64,
    /// Where it starts.
    pub(crate) offset: u64,
    change: u64,
}

impl State {
    pub(crate) fn new(seed: u64, offset: u64) -> Self {
        Self { numbers: Mutex::new(Numbers { seed, offset, changes: 0 }) }
    }

    /// Seed and offset, as they belong together.
    pub(crate) fn get(&self) -> (u64, u64) {
        let numbers = lock(&self.numbers);
        (numbers.seed, numbers.offset)
    }

    /// Sets the offset, and the seed where one is given.
    pub(crate) fn set(&self, seed: Option<u64>, offset: u64) {
        let mut numbers = lock(&self.numbers);
        numbers.seed = seed.unwrap_or(numbers.seed);
        numbers.offset = offset;
        numbers.changes += 1;
    }

    /// Takes `increment` numbers, a multiple of 4. After 2⁶⁴ the offset begins again at 0.
    pub(crate) fn take(&self, increment: u64) -> Taken {
        debug_assert!(increment.is_multiple_of(4));
        let mut numbers = lock(&self.numbers);
        let offset = numbers.offset;
        numbers.offset = offset.wrapping_add(increment);
        numbers.changes += 1;
        Taken { seed: numbers.seed, offset, change: numbers.changes }
    }

    /// Gives back what was taken, unless anything was changed since.
    pub(crate) fn take_back(&self, taken: Taken) {
        let mut numbers = lock(&self.numbers);
        if numbers.changes == taken.change {
            numbers.offset = taken.offset;
            numbers.changes += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_take_is_taken_back() {
        let state = State::new(1, 0);
        let first = state.take(8);
        state.take_back(first);
        assert_eq!(state.get(), (1, 0));
        state.take_back(first);
        let second = state.take(4);
        let third = state.take(4);
        state.take_back(second);
        assert_eq!(state.get(), (1, 8), "somebody has what comes after it");
        state.set(Some(1), 8);
        state.take_back(third);
        assert_eq!(state.get(), (1, 8), "set anew, be it to the same");
    }

    #[test]
    fn the_offset_begins_again() {
        let state = State::new(1, u64::MAX - 7);
        assert_eq!(state.take(16).offset, u64::MAX - 7);
        assert_eq!(state.get(), (1, 8));
    }
}
