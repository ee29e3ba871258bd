//! The categories of the memory allocated at a moment, with the rules that decided.

use std::collections::BTreeMap;
use std::sync::Arc;

use warpool::memory::report::{BlockState, Frame, TraceEntry};

use crate::category::{Categories, Category, Rule};
use crate::replay::{HeapState, StateBlock};

/// The blocks of one category.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CategoryShare {
    /// The category.
    pub category: Category,
    /// Their requested bytes.
    pub bytes: u64,
    /// The number of blocks.
    pub count: u64,
    /// The rules that decided, with the bytes that each decided about; the most first.
    pub rules: Vec<(Rule, u64)>,
}

/// An allocated block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatedBlock {
    /// Its address.
    pub addr: u64,
    /// Its requested bytes.
    pub bytes: u64,
    /// The event of its allocation; `None` if that is not in the history.
    pub event: Option<u32>,
    /// Its category.
    pub category: Category,
    /// The rule that decided.
    pub rule: Rule,
}

pub(super) struct BlockCategories<'a> {
    categories: &'a mut Categories,
    events: &'a [TraceEntry],
    stacks: &'a [Arc<[Frame]>],
}

impl<'a> BlockCategories<'a> {
    pub fn new(categories: &'a mut Categories, events: &'a [TraceEntry], stacks: &'a [Arc<[Frame]>]) -> Self {
        Self { categories, events, stacks }
    }

    /// The category of an allocated block, and the rule that decided.
    pub fn of(&mut self, block: &StateBlock) -> (Category, Rule) {
        match block.event.map(|event| self.categories.at(self.events, event)) {
            // The events have no stacks; only blocks that were still allocated at the end have one.
            Some((_, Rule::NoStack)) if block.stack.is_some() => self.categories.by_stack(block.stack, self.stacks),
            Some(known) => known,
            None => self.categories.by_stack(block.stack, self.stacks),
        }
    }

    /// All allocated blocks of a state, by address.
    pub fn blocks(&mut self, state: &HeapState) -> Vec<AllocatedBlock> {
        let allocated = state.blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated);
        let of_block = |block: &StateBlock| {
            let (category, rule) = self.of(block);
            AllocatedBlock { addr: block.addr, bytes: block.requested, event: block.event, category, rule }
        };
        let mut blocks: Vec<AllocatedBlock> = allocated.map(of_block).collect();
        blocks.sort_unstable_by_key(|block| block.addr);
        blocks
    }

    /// The shares of the categories, over all allocated blocks of a state.
    pub fn shares(&mut self, state: &HeapState) -> Vec<CategoryShare> {
        let mut sums: BTreeMap<Category, (u64, u64, BTreeMap<Rule, u64>)> = BTreeMap::new();
        for block in state.blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated) {
            let (category, rule) = self.of(block);
            let (bytes, count, rules) = sums.entry(category).or_default();
            *bytes = bytes.saturating_add(block.requested);
            *count += 1;
            let by_rule = rules.entry(rule).or_default();
            *by_rule = by_rule.saturating_add(block.requested);
        }
        let share = |(category, (bytes, count, rules)): (Category, (u64, u64, BTreeMap<Rule, u64>))| {
            let mut rules: Vec<(Rule, u64)> = rules.into_iter().collect();
            rules.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
            CategoryShare { category, bytes, count, rules }
        };
        sums.into_iter().map(share).collect()
    }
}
