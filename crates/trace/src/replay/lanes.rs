//! Streams of our own that stand for the uses a recording does not name. A block that was given back and became free
//! later had been used by other streams; which ones is not recorded, only when they were done. Such a block gets one
//! use on a *lane*, a stream that is held, and the recorded moment lets it through.
//!
//! A stream is done in order, so the blocks of a lane must have become free in the order in which they were given back.
//! As few lanes as possible.

use std::collections::BTreeMap;

/// A lane by its number.
pub(super) type Lane = u16;

/// Where a block waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub lane: Lane,
    /// It is the so-manieth block of its lane, from 1 on.
    pub turn: u32,
}

/// Puts each block on a lane, and says how many lanes there are. `done` is when each became free, in the order of their
/// giving back; `None` is never.
pub(super) fn assign(done: &[Option<u32>]) -> (Vec<Place>, usize) {
    // The moment at which the last of each lane is done.
    let mut lasts: BTreeMap<u32, Lane> = BTreeMap::new();
    let mut turns: Vec<u32> = Vec::new();
    let mut never: Option<Lane> = None;
    let places = done.iter().map(|done| {
        // The lane that was done last before: others stay open for earlier moments.
        let found = match done {
            Some(done) => lasts.range(..done).next_back().map(|(&last, &lane)| (Some(last), lane)),
            None => never.map(|lane| (None, lane)),
        };
        let (last, lane) = found.unwrap_or_else(|| {
            turns.push(0);
            (None, Lane::try_from(turns.len() - 1).expect("fewer than 65536 lanes"))
        });
        last.map(|last| lasts.remove(&last));
        match done {
            Some(done) => drop(lasts.insert(*done, lane)),
            None => never = Some(lane),
        }
        turns[usize::from(lane)] += 1;
        Place { lane, turn: turns[usize::from(lane)] }
    });
    let places = places.collect();
    (places, turns.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_lane_are_done_in_order() {
        let cases: [(&[Option<u32>], &[Lane]); 5] = [
            (&[], &[]),
            (&[Some(1), Some(2), Some(3)], &[0, 0, 0]),
            (&[Some(3), Some(2), Some(4)], &[0, 1, 0]),
            (&[Some(5), None, Some(6), None], &[0, 1, 0, 1]),
            (&[Some(9), Some(1), Some(2), Some(10)], &[0, 1, 1, 0]),
        ];
        for (done, lanes) in cases {
            let places = assign(done).0;
            assert_eq!(places.iter().map(|place| place.lane).collect::<Vec<_>>(), lanes, "{done:?}");
        }
    }

    #[test]
    fn blocks_of_a_lane_have_turns() {
        let turns: Vec<u32> = assign(&[Some(3), Some(2), Some(4), None]).0.iter().map(|place| place.turn).collect();
        assert_eq!(turns, [1, 1, 2, 1]);
    }
}
