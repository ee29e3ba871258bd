//! Vector clocks.
//!
//! A timeline is a totally ordered sequence of work: every stream has one, and the host has timeline 0. An epoch is a
//! position on a timeline. A vector clock contains for every timeline the last epoch that is known to be done; work
//! that starts with a clock is ordered after everything that the clock covers. Two operations are unordered if neither
//! is covered by the other's clock, whatever the virtual time says.

/// Names a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimelineId(pub u32);

impl TimelineId {
    /// The host's timeline.
    pub const HOST: Self = Self(0);
}

/// A position on a timeline: operation number `seq`, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epoch {
    pub timeline: TimelineId,
    pub seq: u64,
}

/// For every timeline, the number of the last operation known to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VectorClock {
    done: Vec<u64>,
}

impl VectorClock {
    /// The number of the last operation of `timeline` known to be done; 0 if none is.
    pub fn get(&self, timeline: TimelineId) -> u64 {
        self.done.get(timeline.0 as usize).copied().unwrap_or(0)
    }

    /// Whether `epoch` is known to be done.
    pub fn covers(&self, epoch: Epoch) -> bool {
        self.get(epoch.timeline) >= epoch.seq
    }

    /// Whether everything that `other` covers is covered here.
    pub fn covers_all(&self, other: &Self) -> bool {
        other.done.iter().enumerate().all(|(index, &seq)| seq <= self.done.get(index).copied().unwrap_or(0))
    }

    /// Covers `epoch` from now on. Returns whether it was not covered before.
    pub fn add(&mut self, epoch: Epoch) -> bool {
        let index = epoch.timeline.0 as usize;
        if self.done.len() <= index {
            self.done.resize(index + 1, 0);
        }
        let is_new = self.done[index] < epoch.seq;
        self.done[index] = self.done[index].max(epoch.seq);
        is_new
    }

    /// Covers everything that `other` covers from now on.
    pub fn join(&mut self, other: &Self) {
        if self.done.len() < other.done.len() {
            self.done.resize(other.done.len(), 0);
        }
        for (mine, &theirs) in self.done.iter_mut().zip(&other.done) {
            *mine = (*mine).max(theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(timeline: u32, seq: u64) -> Epoch {
        Epoch { timeline: TimelineId(timeline), seq }
    }

    fn clock(epochs: &[(u32, u64)]) -> VectorClock {
        let mut clock = VectorClock::default();
        for &(timeline, seq) in epochs {
            clock.add(epoch(timeline, seq));
        }
        clock
    }

    #[test]
    fn clock_covers_epochs_up_to_its_own() {
        let clock = clock(&[(1, 5), (3, 2)]);
        assert!(clock.covers(epoch(1, 5)));
        assert!(!clock.covers(epoch(1, 6)));
        assert!(!clock.covers(epoch(2, 1)));
        assert!(!clock.covers(epoch(9, 1)));
    }

    #[test]
    fn join_takes_the_later_epoch_of_each_timeline() {
        let mut a = clock(&[(1, 5), (2, 1)]);
        let b = clock(&[(1, 3), (2, 4), (4, 1)]);
        assert!(!a.covers_all(&b));
        a.join(&b);
        assert_eq!(a, clock(&[(1, 5), (2, 4), (4, 1)]));
        assert!(a.covers_all(&b));
        assert!(!a.add(epoch(2, 4)), "covered already");
    }
}
