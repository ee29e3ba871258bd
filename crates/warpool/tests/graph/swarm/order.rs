//! The order of operations while a program is drawn, so that it has all the waits that it needs, and few others.

use std::collections::BTreeMap;

/// An operation: its branch, and its number in the branch.
pub type WorkPoint = (usize, u32);

/// Branches of operations, and the accesses to each variable.
pub struct Order<K> {
    /// For each branch, a vector clock: the operations of every branch that precede its next operation.
    behind: Vec<Vec<u32>>,
    writes: BTreeMap<K, WorkPoint>,
    reads: BTreeMap<K, Vec<WorkPoint>>,
}

impl<K: Ord + Copy> Order<K> {
    pub fn new(branches: usize) -> Self {
        Self { behind: vec![vec![0; branches]; branches], writes: BTreeMap::new(), reads: BTreeMap::new() }
    }

    /// The vector clock of `branch`.
    pub fn now(&self, branch: usize) -> Vec<u32> {
        self.behind[branch].clone()
    }

    /// `branch` waits for the operations in `clock`.
    pub fn wait_for(&mut self, branch: usize, clock: &[u32]) {
        for (mine, theirs) in self.behind[branch].iter_mut().zip(clock) {
            *mine = (*mine).max(*theirs);
        }
    }

    pub fn wait(&mut self, branch: usize, on: usize) {
        self.wait_for(branch, &self.now(on));
    }

    fn is_after(&self, branch: usize, point: WorkPoint) -> bool {
        self.behind[branch][point.0] >= point.1
    }

    /// A branch that `branch` must wait for before it reads and writes these.
    pub fn missing(&self, branch: usize, reads: &[K], writes: &[K]) -> Option<usize> {
        let written = reads.iter().chain(writes).filter_map(|key| self.writes.get(key));
        let read = writes.iter().filter_map(|key| self.reads.get(key)).flatten();
        written.chain(read).find(|&&point| !self.is_after(branch, point)).map(|point| point.0)
    }

    /// Adds an operation to `branch`.
    pub fn work(&mut self, branch: usize, reads: &[K], writes: &[K]) -> WorkPoint {
        debug_assert_eq!(self.missing(branch, reads, writes), None);
        self.behind[branch][branch] += 1;
        let point = (branch, self.behind[branch][branch]);
        for key in reads {
            self.reads.entry(*key).or_default().push(point);
        }
        for key in writes {
            self.writes.insert(*key, point);
            self.reads.remove(key);
        }
        point
    }

    /// A branch of one of `points` that `branch` does not come after.
    pub fn not_after(&self, branch: usize, points: &[WorkPoint]) -> Option<usize> {
        points.iter().find(|&&point| !self.is_after(branch, point)).map(|point| point.0)
    }
}
