//! Every allocation with its lifetime, or the largest and longest of them.

use std::cmp::Reverse;

use rustc_hash::FxHashMap;
use warpool::memory::report::{BlockState, StackId};

use crate::category::{Category, CategoryBytes};
use crate::replay::{HeapState, StateBlock, StateChange};

/// An allocated block, from its allocation until it is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The position after its allocation; 0 if that is not in the history.
    pub from: u64,
    /// The position after the free, from which on it is pending free; `None` if it was never freed.
    pub waits_from: Option<u64>,
    /// The position from which on it is free; `None` if it never was.
    pub until: Option<u64>,
    /// Its address.
    pub addr: u64,
    /// The size of the block.
    pub bytes: u64,
    /// The requested bytes.
    pub requested: u64,
    /// The call stack of the request.
    pub stack: Option<StackId>,
    /// Its category.
    pub category: Category,
}

impl Allocation {
    /// Whether it is allocated or pending free at a position.
    #[must_use]
    pub fn is_active_at(&self, position: u64) -> bool {
        self.from <= position && self.until.is_none_or(|until| position < until)
    }

    /// Whether it is pending free at a position.
    #[must_use]
    pub fn waits_at(&self, position: u64) -> bool {
        self.is_active_at(position) && self.waits_from.is_some_and(|from| from <= position)
    }

    /// Its weight: bytes times duration. The heaviest are kept.
    fn weight(&self) -> u128 {
        let events = self.until.map_or(u64::MAX, |until| until - self.from);
        u128::from(self.bytes) * u128::from(events)
    }
}

/// Leaves out all but the heaviest, in no order.
pub(super) fn keep_heaviest(allocations: &mut Vec<Allocation>, max: usize) {
    if allocations.len() > max {
        let key = |allocation: &Allocation| (Reverse(allocation.weight()), allocation.from, allocation.addr);
        allocations.select_nth_unstable_by_key(max, key);
        allocations.truncate(max);
    }
}

/// The allocations while events are seen.
pub(super) struct AllocationTable {
    max: usize,
    active: FxHashMap<u64, Allocation>,
    /// Those that are free again; at most twice `max`.
    ended: Vec<Allocation>,
    left_out: u64,
    /// Requested bytes of allocated blocks.
    categories: CategoryBytes,
}

fn add(categories: &mut CategoryBytes, category: Category, bytes: u64) {
    let sum = &mut categories[category.index()];
    *sum = sum.saturating_add(bytes);
}

fn remove(categories: &mut CategoryBytes, category: Category, bytes: u64) {
    let sum = &mut categories[category.index()];
    *sum = sum.saturating_sub(bytes);
}

impl AllocationTable {
    /// With the blocks from before the history, of which at most the stack is known.
    pub fn new(start: &HeapState, mut category_of: impl FnMut(Option<StackId>) -> Category, max: usize) -> Self {
        let blocks = start.blocks.iter().filter(|block| block.state != BlockState::Inactive);
        let mut categories = CategoryBytes::default();
        let active = blocks.map(|block| {
            let waits_from = (block.state == BlockState::ActivePendingFree).then_some(0);
            let StateBlock { addr, bytes, requested, stack, .. } = *block;
            let category = category_of(stack);
            if waits_from.is_none() {
                add(&mut categories, category, requested);
            }
            (addr, Allocation { from: 0, waits_from, until: None, addr, bytes, requested, stack, category })
        });
        let active = active.collect();
        Self { max: max.max(1), active, ended: Vec::new(), left_out: 0, categories }
    }

    /// The requested bytes of allocated blocks by category.
    pub fn categories(&self) -> CategoryBytes {
        self.categories
    }

    /// Applies a change; `category` is that of an allocation.
    pub fn see(&mut self, position: u64, change: StateChange, category: Category) {
        match change {
            StateChange::Allocated { addr, bytes, requested, stack } => {
                let (waits_from, until) = (None, None);
                add(&mut self.categories, category, requested);
                let allocation =
                    Allocation { from: position, waits_from, until, addr, bytes, requested, stack, category };
                // There is none at this address unless the recording contradicts itself.
                if let Some(before) = self.active.insert(addr, allocation) {
                    self.end(before, position);
                }
            }
            StateChange::FreeRequested { addr } => {
                if let Some(allocation) = self.active.get_mut(&addr) {
                    allocation.waits_from = Some(position);
                    remove(&mut self.categories, allocation.category, allocation.requested);
                }
            }
            StateChange::Freed { addr } => {
                if let Some(allocation) = self.active.remove(&addr) {
                    self.end(allocation, position);
                }
            }
            StateChange::Nothing | StateChange::Reserved { .. } | StateChange::Released { .. } => {}
        }
    }

    fn end(&mut self, allocation: Allocation, position: u64) {
        if allocation.waits_from.is_none() {
            remove(&mut self.categories, allocation.category, allocation.requested);
        }
        let waits_from = allocation.waits_from.or(Some(position));
        self.ended.push(Allocation { waits_from, until: Some(position), ..allocation });
        if self.ended.len() >= self.max.saturating_mul(2) {
            self.keep_heaviest();
        }
    }

    fn keep_heaviest(&mut self) {
        self.left_out += self.ended.len().saturating_sub(self.max) as u64;
        keep_heaviest(&mut self.ended, self.max);
    }

    /// The allocations in the order of their events, and how many were left out.
    pub fn finish(mut self) -> (Vec<Allocation>, u64) {
        self.ended.extend(self.active.drain().map(|(_, allocation)| allocation));
        self.keep_heaviest();
        self.ended.sort_unstable_by_key(|allocation| (allocation.from, allocation.addr));
        (self.ended, self.left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heaviest_are_kept() {
        let mut table = AllocationTable::new(&HeapState::default(), |_| Category::Unknown, 2);
        let mut position = 0;
        for round in 0..10 {
            for (addr, bytes) in [(1, 100), (2, 10_000 + round), (3, 10)] {
                position += 1;
                table.see(
                    position,
                    StateChange::Allocated { addr, bytes, requested: bytes, stack: None },
                    Category::Activations,
                );
            }
            for addr in [1, 2, 3] {
                position += 1;
                table.see(position, StateChange::FreeRequested { addr }, Category::Activations);
                table.see(position, StateChange::Freed { addr }, Category::Activations);
            }
        }
        position += 1;
        table.see(
            position,
            StateChange::Allocated { addr: 9, bytes: 1, requested: 1, stack: None },
            Category::Activations,
        );
        assert_eq!(table.categories()[Category::Activations.index()], 1, "what is still there");
        let (kept, left_out) = table.finish();
        assert_eq!(
            kept.iter().map(|it| it.bytes).collect::<Vec<_>>(),
            [10_009, 1],
            "the largest, and what is still there"
        );
        assert_eq!(left_out, 29);
        assert!(kept[0].is_active_at(kept[0].from) && !kept[0].is_active_at(kept[0].until.expect("freed")));
    }
}
