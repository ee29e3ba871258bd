//! Which blocks of an elastic range have memory, and what that means for its slots: a slot needs a page while any
//! committed block touches it.

use std::ops::Range;

use super::ElasticLayout;
use crate::defect::Defect;

/// The committed blocks of one range, and how many of them touch each slot. Slots are numbered from the range's start.
#[derive(Debug)]
pub(crate) struct ElasticBlocks {
    layout: ElasticLayout,
    slot_bytes: u64,
    /// One bit per block.
    committed: Vec<u64>,
    count: u64,
    /// How often committed blocks touch each slot: a block does once for each of its rows.
    touches: Vec<u32>,
}

/// What a commit or a decommit changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ElasticChange {
    /// The blocks whose state changes, in runs.
    pub(crate) blocks: Vec<Range<u64>>,
    /// The slots that no block touched before or touches afterwards, in runs.
    pub(crate) slots: Vec<Range<u32>>,
}

impl ElasticBlocks {
    /// Nothing is committed.
    pub(crate) fn new(layout: ElasticLayout, slot_bytes: u64) -> Self {
        let words = usize::try_from(layout.blocks.div_ceil(64)).expect("they are counted in memory");
        let slots = usize::try_from(layout.bytes().div_ceil(slot_bytes)).expect("they are counted in memory");
        Self { layout, slot_bytes, committed: vec![0; words], count: 0, touches: vec![0; slots] }
    }

    /// How many blocks are committed.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn is_committed(&self, block: u64) -> bool {
        self.committed[(block / 64) as usize] >> (block % 64) & 1 == 1
    }

    /// The committed blocks, in runs.
    pub(crate) fn committed(&self) -> Vec<Range<u64>> {
        self.runs(0..self.layout.blocks, true)
    }

    /// Commits those of the blocks that are not committed.
    pub(crate) fn commit(&mut self, blocks: Range<u64>) -> ElasticChange {
        self.change(blocks, true)
    }

    /// Decommits those of the blocks that are committed.
    pub(crate) fn decommit(&mut self, blocks: Range<u64>) -> ElasticChange {
        self.change(blocks, false)
    }

    /// Undoes a commit.
    pub(crate) fn undo(&mut self, commit: &ElasticChange) {
        for blocks in &commit.blocks {
            self.decommit(blocks.clone());
        }
    }

    fn change(&mut self, blocks: Range<u64>, to: bool) -> ElasticChange {
        let runs = self.runs(blocks, !to);
        let mut slots = Vec::new();
        for run in &runs {
            for block in run.clone() {
                self.committed[(block / 64) as usize] ^= 1 << (block % 64);
            }
            let len = run.end - run.start;
            self.count = if to { self.count + len } else { self.count - len };
            for row in 0..self.layout.rows {
                self.touch_row(row, run, to, &mut slots);
            }
        }
        ElasticChange { blocks: runs, slots: runs_of(slots) }
    }

    /// The runs of blocks in that state.
    fn runs(&self, blocks: Range<u64>, committed: bool) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for block in blocks.filter(|&block| self.is_committed(block) == committed) {
            match runs.last_mut() {
                Some(run) if run.end == block => run.end += 1,
                _ => runs.push(block..block + 1),
            }
        }
        runs
    }

    /// Adds or removes what the blocks of a run in one row touch. Adds the slots that begin or cease to be touched.
    fn touch_row(&mut self, row: u64, run: &Range<u64>, add: bool, changed: &mut Vec<u32>) {
        let bytes = self.layout.block_bytes;
        let base = row * self.layout.blocks * bytes;
        let [first, last] = [base + run.start * bytes, base + run.end * bytes - 1].map(|byte| byte / self.slot_bytes);
        for slot in first..=last {
            // The blocks of the run that touch this slot.
            let from = (slot * self.slot_bytes).saturating_sub(base) / bytes;
            let until = ((slot + 1) * self.slot_bytes - base).div_ceil(bytes);
            let touching = until.min(run.end) - from.max(run.start);
            let touching = u32::try_from(touching).expect("a slot has fewer bytes");
            let touches = &mut self.touches[usize::try_from(slot).expect("an index")];
            let was_zero = *touches == 0;
            *touches = if add { *touches + touching } else { *touches - touching };
            let leaves_early = Defect::SharedPageLeavesEarly.is_on() && !add;
            if was_zero || *touches == 0 || leaves_early {
                changed.push(u32::try_from(slot).expect("fewer than 2^32 slots"));
            }
        }
    }
}

/// Runs of numbers.
fn runs_of(mut numbers: Vec<u32>) -> Vec<Range<u32>> {
    numbers.sort_unstable();
    let mut runs: Vec<Range<u32>> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The numbers of blocks and slots that change.
    fn numbers(change: &ElasticChange) -> (Vec<u64>, Vec<u32>) {
        (change.blocks.iter().cloned().flatten().collect(), change.slots.iter().cloned().flatten().collect())
    }

    fn blocks(rows: u64, blocks: u64, block_bytes: u64, slot_bytes: u64) -> ElasticBlocks {
        ElasticBlocks::new(ElasticLayout { rows, blocks, block_bytes }, slot_bytes)
    }

    #[test]
    fn a_slot_is_needed_from_its_first_block_to_its_last() {
        // Two rows of eight blocks of 3 bytes in slots of 8: the rows begin at bytes 0 and 24.
        let mut range = blocks(2, 8, 3, 8);
        assert_eq!(numbers(&range.commit(1..3)), (vec![1, 2], vec![0, 1, 3, 4]));
        assert_eq!(numbers(&range.commit(0..4)), (vec![0, 3], vec![]));
        assert_eq!(range.count(), 4);
        // Byte 8 is in block 2, byte 11 in block 3: slot 1 stays for block 3.
        assert_eq!(numbers(&range.decommit(1..3)), (vec![1, 2], vec![]));
        assert_eq!(numbers(&range.decommit(2..8)), (vec![3], vec![1, 4]));
        assert_eq!(numbers(&range.decommit(0..8)), (vec![0], vec![0, 3]));
        assert_eq!(range.count(), 0);
    }

    #[test]
    fn a_slot_that_two_rows_share_is_taken_once() {
        // Rows of 12 bytes: block 3 of the first row and block 0 of the second are in slot 1.
        let mut range = blocks(2, 4, 3, 8);
        let all = range.commit(0..4);
        assert_eq!((numbers(&all).1, all.slots.len()), (vec![0, 1, 2], 1));
        assert_eq!(numbers(&range.decommit(1..4)), (vec![1, 2, 3], vec![2]));
        assert_eq!(numbers(&range.commit(1..2)), (vec![1], vec![2]));
        assert_eq!(numbers(&range.decommit(0..1)), (vec![0], vec![]));
        assert_eq!(numbers(&range.decommit(0..4)), (vec![1], vec![0, 1, 2]));
    }

    proptest! {
        /// Against counting byte by byte.
        #[test]
        fn slots_are_those_of_the_committed_bytes(
            (rows, count, block_bytes, slot_log) in (1_u64..4, 1_u64..40, 1_u64..30, 0_u32..6),
            calls in proptest::collection::vec((any::<bool>(), 0_u64..40, 0_u64..40), 1..30),
        ) {
            let slot_bytes = 1 << slot_log;
            let mut range = blocks(rows, count, block_bytes, slot_bytes);
            let mut committed = vec![false; count as usize];
            let mut used = vec![false; range.touches.len()];
            for (commits, from, len) in calls {
                let wanted = from.min(count)..(from + len).min(count);
                let change = if commits { range.commit(wanted.clone()) } else { range.decommit(wanted.clone()) };
                let mut changed = Vec::new();
                for block in wanted {
                    if committed[block as usize] != commits {
                        changed.push(block);
                    }
                    committed[block as usize] = commits;
                }
                let expected: Vec<bool> = (0..used.len() as u64)
                    .map(|slot| {
                        (slot * slot_bytes..(slot + 1) * slot_bytes)
                            .filter(|&byte| byte < rows * count * block_bytes)
                            .any(|byte| committed[(byte / block_bytes % count) as usize])
                    })
                    .collect();
                let slots: Vec<u32> =
                    (0..used.len()).filter(|&slot| used[slot] != expected[slot]).map(|slot| slot as u32).collect();
                used = expected;
                prop_assert_eq!(numbers(&change), (changed, slots));
                prop_assert_eq!(range.count(), committed.iter().filter(|&&committed| committed).count() as u64);
            }
        }
    }
}
