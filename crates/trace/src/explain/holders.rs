//! Who holds memory: the allocated blocks of one moment, grouped by call stack, or without stacks by size and age.

use std::collections::BTreeMap;
use std::sync::Arc;

use warpool::memory::{BlockState, Frame, StackId};

use crate::bytes_text::text;
use crate::replay::{HeapState, StateBlock};
use crate::stacks::{CallSite, Frameworks};

/// A group of allocated blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// What they have in common: the call that allocated them, or their size.
    pub name: String,
    /// The innermost line of the program's own code.
    pub line: Option<String>,
    /// The calls from that line to the allocation.
    pub path: Vec<String>,
    /// Their bytes, as requested.
    pub bytes: u64,
    /// How many they are.
    pub count: u64,
}

/// Who holds the memory of one moment.
#[derive(Clone, Debug, Default)]
pub struct Holders {
    /// By call stack, or without stacks by size; the largest first.
    pub groups: Vec<Holder>,
    /// By line of the program's own code.
    pub by_line: Vec<Holder>,
    /// By the Python module of the innermost call.
    pub by_module: Vec<Holder>,
    /// By age: when in the history they were allocated.
    pub by_age: Vec<Holder>,
    /// Bytes whose stack is known.
    pub bytes_with_stack: u64,
    /// All bytes.
    pub bytes: u64,
}

impl Holders {
    /// Whether most bytes have a stack.
    #[must_use]
    pub fn has_stacks(&self) -> bool {
        self.bytes_with_stack > self.bytes / 2
    }
}

/// What is needed to name stacks.
pub(super) struct CallSites<'a> {
    stacks: &'a [Arc<[Frame]>],
    frameworks: &'a Frameworks,
    known: BTreeMap<StackId, Option<Arc<CallSite>>>,
}

impl<'a> CallSites<'a> {
    pub fn new(stacks: &'a [Arc<[Frame]>], frameworks: &'a Frameworks) -> Self {
        Self { stacks, frameworks, known: BTreeMap::new() }
    }

    pub fn of(&mut self, stack: Option<StackId>) -> Option<Arc<CallSite>> {
        let stack = stack?;
        let Self { stacks, frameworks, known } = self;
        let site = || CallSite::of(stacks.get(stack.0 as usize)?, frameworks).map(Arc::new);
        known.entry(stack).or_insert_with(site).clone()
    }
}

/// Groups the allocated blocks of a state. `events` is the number of events up to it.
pub(super) fn holders(state: &HeapState, sites: &mut CallSites<'_>, events: usize) -> Holders {
    let mut by_site: BTreeMap<Arc<CallSite>, (u64, u64)> = BTreeMap::new();
    let (mut by_size, mut by_age) = (Groups::default(), Groups::default());
    let (mut by_line, mut by_module) = (Groups::default(), Groups::default());
    let mut found = Holders::default();
    for block in state.blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated) {
        found.bytes = found.bytes.saturating_add(block.requested);
        by_age.add(&age(block, events), block.requested);
        let Some(site) = sites.of(block.stack) else {
            by_size.add(&size_name(block), block.requested);
            continue;
        };
        found.bytes_with_stack = found.bytes_with_stack.saturating_add(block.requested);
        if let Some(line) = &site.line {
            by_line.add(line, block.requested);
        }
        by_module.add(&site.module, block.requested);
        let (bytes, count) = by_site.entry(site).or_default();
        *bytes = bytes.saturating_add(block.requested);
        *count += 1;
    }
    let of_site = |(site, (bytes, count)): (Arc<CallSite>, (u64, u64))| Holder {
        name: site.call.clone(),
        line: site.line.clone(),
        path: site.path.clone(),
        bytes,
        count,
    };
    found.groups = by_site.into_iter().map(of_site).chain(by_size.into_holders()).collect();
    sort(&mut found.groups);
    found.by_line = by_line.into_holders();
    found.by_module = by_module.into_holders();
    found.by_age = by_age.into_holders();
    found
}

/// What grew between two moments: groups of blocks that were allocated between two events and are still allocated.
pub(super) fn grown(state: &HeapState, sites: &mut CallSites<'_>, since: usize) -> Vec<Holder> {
    let is_new = |block: &&StateBlock| block.event.is_some_and(|event| event as usize >= since);
    let blocks = state.blocks.iter().filter(is_new).copied().collect();
    holders(&HeapState { blocks, ..HeapState::default() }, sites, since).groups
}

/// Bytes and counts by name.
#[derive(Default)]
struct Groups(BTreeMap<String, (u64, u64)>);

impl Groups {
    fn add(&mut self, name: &str, bytes: u64) {
        match self.0.get_mut(name) {
            Some((sum, count)) => {
                *sum = sum.saturating_add(bytes);
                *count += 1;
            }
            None => drop(self.0.insert(name.to_owned(), (bytes, 1))),
        }
    }

    fn into_holders(self) -> Vec<Holder> {
        let holder = |(name, (bytes, count))| Holder { name, line: None, path: Vec::new(), bytes, count };
        let mut holders: Vec<Holder> = self.0.into_iter().map(holder).collect();
        sort(&mut holders);
        holders
    }
}

/// The largest first; equal ones by name.
fn sort(holders: &mut [Holder]) {
    holders.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
}

fn size_name(block: &StateBlock) -> String {
    format!("blocks of {}", text(block.requested))
}

/// When in the history a block was allocated.
fn age(block: &StateBlock, events: usize) -> String {
    match block.event {
        None => "before the history".to_owned(),
        Some(event) => match (event as usize) * 10 / events.max(1) {
            0 => "in the first tenth of the events".to_owned(),
            1..=4 => "in the first half".to_owned(),
            5..=8 => "in the second half".to_owned(),
            _ => "in the last tenth of the events".to_owned(),
        },
    }
}
