//! Who comes after whom, while a program is drawn: so that it has all the waits that it needs, and not many more.

use std::collections::BTreeMap;

/// A place in a lane: its so-manieth piece of work.
pub type Place = (usize, u32);

/// Lanes of work, and who touched what.
pub struct Order<K> {
    /// For each lane, how far in every lane its next work comes after.
    behind: Vec<Vec<u32>>,
    writes: BTreeMap<K, Place>,
    reads: BTreeMap<K, Vec<Place>>,
}

impl<K: Ord + Copy> Order<K> {
    pub fn new(lanes: usize) -> Self {
        Self { behind: vec![vec![0; lanes]; lanes], writes: BTreeMap::new(), reads: BTreeMap::new() }
    }

    /// What `lane` comes after now.
    pub fn now(&self, lane: usize) -> Vec<u32> {
        self.behind[lane].clone()
    }

    /// `lane` waits for what was now when `mark` was taken.
    pub fn wait_for(&mut self, lane: usize, mark: &[u32]) {
        for (mine, theirs) in self.behind[lane].iter_mut().zip(mark) {
            *mine = (*mine).max(*theirs);
        }
    }

    pub fn wait(&mut self, lane: usize, on: usize) {
        self.wait_for(lane, &self.now(on));
    }

    fn is_behind(&self, lane: usize, place: Place) -> bool {
        self.behind[lane][place.0] >= place.1
    }

    /// A lane that `lane` must wait for before it reads and writes these.
    pub fn missing(&self, lane: usize, reads: &[K], writes: &[K]) -> Option<usize> {
        let written = reads.iter().chain(writes).filter_map(|key| self.writes.get(key));
        let read = writes.iter().filter_map(|key| self.reads.get(key)).flatten();
        written.chain(read).find(|&&place| !self.is_behind(lane, place)).map(|place| place.0)
    }

    /// One more piece of work of `lane`.
    pub fn work(&mut self, lane: usize, reads: &[K], writes: &[K]) -> Place {
        debug_assert_eq!(self.missing(lane, reads, writes), None);
        self.behind[lane][lane] += 1;
        let place = (lane, self.behind[lane][lane]);
        for key in reads {
            self.reads.entry(*key).or_default().push(place);
        }
        for key in writes {
            self.writes.insert(*key, place);
            self.reads.remove(key);
        }
        place
    }

    /// A lane of one of `places` that `lane` does not come after.
    pub fn not_behind(&self, lane: usize, places: &[Place]) -> Option<usize> {
        places.iter().find(|&&place| !self.is_behind(lane, place)).map(|place| place.0)
    }
}
