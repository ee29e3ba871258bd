//! The state of a generator: seed and offset, under a lock that is held for a few assignments only. No driver calls and
//! no captures here.

use std::sync::Mutex;

use crate::lock;

/// Seed and offset, shared by all generators that use this state and by the graphs that draw from it.
#[derive(Debug)]
pub(crate) struct PhiloxState {
    values: Mutex<Values>,
}

#[derive(Debug)]
struct Values {
    seed: u64,
    offset: u64,
    /// Counts every change, so that only the last one can be undone.
    changes: u64,
}

/// A range of numbers that was drawn from a state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrawnRange {
    pub(crate) seed: u64,
    /// Where it starts.
    pub(crate) offset: u64,
    change: u64,
}

impl PhiloxState {
    pub(crate) fn new(seed: u64, offset: u64) -> Self {
        Self { values: Mutex::new(Values { seed, offset, changes: 0 }) }
    }

    /// Seed and offset, read together.
    pub(crate) fn get(&self) -> (u64, u64) {
        let values = lock(&self.values);
        (values.seed, values.offset)
    }

    /// Sets the offset, and the seed if one is given.
    pub(crate) fn set(&self, seed: Option<u64>, offset: u64) {
        let mut values = lock(&self.values);
        values.seed = seed.unwrap_or(values.seed);
        values.offset = offset;
        values.changes += 1;
    }

    /// Advances the offset by `increment`, a multiple of 4. It wraps at 2⁶⁴.
    pub(crate) fn draw(&self, increment: u64) -> DrawnRange {
        debug_assert!(increment.is_multiple_of(4));
        let mut values = lock(&self.values);
        let offset = values.offset;
        values.offset = offset.wrapping_add(increment);
        values.changes += 1;
        DrawnRange { seed: values.seed, offset, change: values.changes }
    }

    /// Undoes a draw, unless the state was changed since.
    pub(crate) fn undo(&self, drawn: DrawnRange) {
        let mut values = lock(&self.values);
        if values.changes == drawn.change {
            values.offset = drawn.offset;
            values.changes += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_draw_is_undone() {
        let state = PhiloxState::new(1, 0);
        let first = state.draw(8);
        state.undo(first);
        assert_eq!(state.get(), (1, 0));
        state.undo(first);
        let second = state.draw(4);
        let third = state.draw(4);
        state.undo(second);
        assert_eq!(state.get(), (1, 8), "the numbers after it are drawn");
        state.set(Some(1), 8);
        state.undo(third);
        assert_eq!(state.get(), (1, 8), "set since, though to the same values");
    }

    #[test]
    fn the_offset_wraps() {
        let state = PhiloxState::new(1, u64::MAX - 7);
        assert_eq!(state.draw(16).offset, u64::MAX - 7);
        assert_eq!(state.get(), (1, 8));
    }
}
