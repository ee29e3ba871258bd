//! Who is known to come before whom.
//!
//! Every stream is a lane, and so is the host (lane 0). A piece of work is the n-th of its lane: its stamp. A frontier
//! holds, for every lane, how far it is known to be done; work that starts with a frontier comes after all of it. Two
//! pieces of work neither of which knows of the other have no order, whatever the clock says.

/// The host's lane.
pub const HOST: u32 = 0;

/// A place in the order: the `seq`-th of `lane`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    pub lane: u32,
    pub seq: u64,
}

/// For every lane, how far it is known to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frontier {
    seen: Vec<u64>,
}

impl Frontier {
    /// How far `lane` is known to be done.
    pub fn seen(&self, lane: u32) -> u64 {
        self.seen.get(lane as usize).copied().unwrap_or(0)
    }

    /// Whether the work at `stamp` is known to be done.
    pub fn covers(&self, stamp: Stamp) -> bool {
        self.seen(stamp.lane) >= stamp.seq
    }

    /// Whether all of `other` is known here.
    pub fn contains(&self, other: &Self) -> bool {
        other.seen.iter().enumerate().all(|(lane, &seq)| seq <= self.seen.get(lane).copied().unwrap_or(0))
    }

    /// Learns that the work at `stamp` is done. Says whether that was news.
    pub fn add(&mut self, stamp: Stamp) -> bool {
        let lane = stamp.lane as usize;
        if self.seen.len() <= lane {
            self.seen.resize(lane + 1, 0);
        }
        let news = self.seen[lane] < stamp.seq;
        self.seen[lane] = self.seen[lane].max(stamp.seq);
        news
    }

    /// Learns all of `other`.
    pub fn join(&mut self, other: &Self) {
        if self.seen.len() < other.seen.len() {
            self.seen.resize(other.seen.len(), 0);
        }
        for (mine, &theirs) in self.seen.iter_mut().zip(&other.seen) {
            *mine = (*mine).max(theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frontier(stamps: &[(u32, u64)]) -> Frontier {
        let mut frontier = Frontier::default();
        for &(lane, seq) in stamps {
            frontier.add(Stamp { lane, seq });
        }
        frontier
    }

    #[test]
    fn a_frontier_covers_what_it_has_seen_and_no_more() {
        let seen = frontier(&[(1, 5), (3, 2)]);
        assert!(seen.covers(Stamp { lane: 1, seq: 5 }));
        assert!(!seen.covers(Stamp { lane: 1, seq: 6 }));
        assert!(!seen.covers(Stamp { lane: 2, seq: 1 }));
        assert!(!seen.covers(Stamp { lane: 9, seq: 1 }));
    }

    #[test]
    fn joining_takes_the_later_of_each_lane() {
        let mut a = frontier(&[(1, 5), (2, 1)]);
        let b = frontier(&[(1, 3), (2, 4), (4, 1)]);
        assert!(!a.contains(&b));
        a.join(&b);
        assert_eq!(a, frontier(&[(1, 5), (2, 4), (4, 1)]));
        assert!(a.contains(&b));
        assert!(!a.add(Stamp { lane: 2, seq: 4 }), "known already");
    }
}
