//! Who holds memory: the allocated blocks of one moment, grouped by call stack, or without stacks by size and age.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use warpool::memory::report::{Action, BlockState, Frame, StackId, TraceEntry};

use super::categories::BlockCategories;
use crate::bytes_text::text;
use crate::category::{Category, CategoryBytes};
use crate::replay::{HeapState, StateBlock};
use crate::stacks::{CallSite, Frameworks, is_backward_of, operators};

/// A group of allocated blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// What they have in common: the call that allocated them, or their size.
    pub name: String,
    /// The innermost line of the program's own code.
    pub line: Option<String>,
    /// In the backward pass, the line of the forward pass whose gradient it computes, where that can be determined.
    pub forward_line: Option<String>,
    /// The calls from the line to the allocation.
    pub path: Vec<String>,
    /// Their requested bytes.
    pub bytes: u64,
    /// The number of blocks.
    pub count: u64,
    /// The category of most of its bytes.
    pub category: Category,
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
    /// Bytes that were allocated before the history, and whose stack is not known.
    pub bytes_before_history: u64,
    /// Whether stacks show that some of it was allocated in mixed precision.
    pub uses_autocast: bool,
}

impl Holders {
    /// Whether most bytes have a stack.
    #[must_use]
    pub fn has_stacks(&self) -> bool {
        self.bytes_with_stack > self.bytes / 2
    }
}

/// The tables that name stacks.
pub(super) struct CallSites<'a> {
    stacks: &'a [Arc<[Frame]>],
    frameworks: &'a Frameworks,
    events: &'a [TraceEntry],
    known: FxHashMap<StackId, Option<Arc<CallSite>>>,
    /// The lines that call each operator; made when a node of the backward pass is first named.
    lines_of_operators: Option<BTreeMap<String, Vec<String>>>,
}

impl<'a> CallSites<'a> {
    pub fn new(stacks: &'a [Arc<[Frame]>], frameworks: &'a Frameworks, events: &'a [TraceEntry]) -> Self {
        Self { stacks, frameworks, events, known: FxHashMap::default(), lines_of_operators: None }
    }

    /// Whether a stack goes through mixed precision.
    fn uses_autocast(&self, stack: StackId) -> bool {
        let casts = |frame: &Frame| {
            frame.name.starts_with("at::autocast::") || frame.filename.ends_with("torch/amp/autocast_mode.py")
        };
        self.stacks.get(stack.index()).is_some_and(|frames| frames.iter().any(casts))
    }

    /// The line of the forward pass for a block of the backward pass: as recorded, or the only line that calls the
    /// operator.
    fn forward_line(&mut self, site: &CallSite, event: Option<u32>) -> Option<String> {
        let event = event.and_then(|event| self.events.get(event as usize));
        if let Some(forward) = self.of(event.and_then(|event| event.forward_stack)) {
            return forward.line.clone();
        }
        if site.line.is_some() || site.module != "autograd" {
            return None;
        }
        if self.lines_of_operators.is_none() {
            self.lines_of_operators = Some(self.operators());
        }
        let lines = self.lines_of_operators.iter().flatten();
        let mut found = lines.filter(|(operator, _)| is_backward_of(&site.call, operator));
        match (found.next(), found.next()) {
            (Some((_, lines)), None) => lines.first().filter(|_| lines.len() == 1).cloned(),
            _ => None,
        }
    }

    /// The lines of Python from which each operator was called, in allocations with their stacks.
    fn operators(&mut self) -> BTreeMap<String, Vec<String>> {
        let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let allocations = self.events.iter().filter(|event| event.action == Action::Alloc);
        let stacks: std::collections::BTreeSet<StackId> = allocations.filter_map(|event| event.stack).collect();
        for stack in stacks {
            let Some(frames) = self.stacks.get(stack.index()) else { continue };
            // Composite operators call others, and each of these has a node of its own.
            let Some(line) = self.of(Some(stack)).and_then(|site| site.line.clone()) else { continue };
            for name in operators(frames) {
                let lines = found.entry(name.to_owned()).or_default();
                if !lines.contains(&line) {
                    lines.push(line.clone());
                }
            }
        }
        found
    }

    pub fn of(&mut self, stack: Option<StackId>) -> Option<Arc<CallSite>> {
        let stack = stack?;
        let Self { stacks, frameworks, known, .. } = self;
        let site = || CallSite::of(stacks.get(stack.index())?, frameworks).map(Arc::new);
        known.entry(stack).or_insert_with(site).clone()
    }
}

/// Groups the allocated blocks of a state. `events` is the number of events up to it.
pub(super) fn holders(
    state: &HeapState,
    sites: &mut CallSites<'_>,
    categories: &mut BlockCategories<'_>,
    events: usize,
) -> Holders {
    let mut by_site: BTreeMap<(Arc<CallSite>, Option<String>), Sum> = BTreeMap::new();
    let (mut by_size, mut by_age) = (Groups::default(), Groups::default());
    let (mut by_line, mut by_module) = (Groups::default(), Groups::default());
    let mut found = Holders::default();
    for block in state.blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated) {
        found.bytes = found.bytes.saturating_add(block.requested);
        if block.event.is_none() && block.stack.is_none() {
            found.bytes_before_history = found.bytes_before_history.saturating_add(block.requested);
        }
        found.uses_autocast |= block.stack.is_some_and(|stack| sites.uses_autocast(stack));
        let (category, _) = categories.of(block);
        by_age.add(&age(block, events), block.requested, category);
        let Some(site) = sites.of(block.stack) else {
            by_size.add(&size_name(block), block.requested, category);
            continue;
        };
        found.bytes_with_stack = found.bytes_with_stack.saturating_add(block.requested);
        if let Some(line) = &site.line {
            by_line.add(line, block.requested, category);
        }
        by_module.add(&site.module, block.requested, category);
        let forward_line = sites.forward_line(&site, block.event);
        by_site.entry((site, forward_line)).or_default().add(block.requested, category);
    }
    let of_site = |((site, forward_line), sum): ((Arc<CallSite>, Option<String>), Sum)| Holder {
        name: site.call.clone(),
        line: site.line.clone(),
        forward_line,
        path: site.path.clone(),
        bytes: sum.bytes,
        count: sum.count,
        category: sum.category(),
    };
    found.groups = by_site.into_iter().map(of_site).chain(by_size.into_holders()).collect();
    sort(&mut found.groups);
    found.by_line = by_line.into_holders();
    found.by_module = by_module.into_holders();
    found.by_age = by_age.into_holders();
    found
}

/// What grew between two moments: groups of blocks that were allocated between two events and are still allocated.
pub(super) fn grown(
    state: &HeapState,
    sites: &mut CallSites<'_>,
    categories: &mut BlockCategories<'_>,
    since: usize,
) -> Vec<Holder> {
    let is_new = |block: &&StateBlock| block.event.is_some_and(|event| event as usize >= since);
    let blocks = state.blocks.iter().filter(is_new).copied().collect();
    holders(&HeapState { blocks, ..HeapState::default() }, sites, categories, since).groups
}

/// The blocks of a group.
#[derive(Clone, Copy, Default)]
struct Sum {
    bytes: u64,
    count: u64,
    categories: CategoryBytes,
}

impl Sum {
    fn add(&mut self, bytes: u64, category: Category) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.count += 1;
        let of_category = &mut self.categories[category.index()];
        *of_category = of_category.saturating_add(bytes);
    }

    /// The category of most bytes; the first of equals.
    fn category(&self) -> Category {
        let most = self.categories.iter().copied().max().unwrap_or(0);
        let all = Category::ALL.into_iter().zip(self.categories);
        all.into_iter().find(|&(_, bytes)| bytes == most && most > 0).map_or(Category::Unknown, |(it, _)| it)
    }
}

/// Blocks by name.
#[derive(Default)]
struct Groups(BTreeMap<String, Sum>);

impl Groups {
    fn add(&mut self, name: &str, bytes: u64, category: Category) {
        match self.0.get_mut(name) {
            Some(sum) => sum.add(bytes, category),
            None => self.0.entry(name.to_owned()).or_default().add(bytes, category),
        }
    }

    fn into_holders(self) -> Vec<Holder> {
        let holder = |(name, sum): (String, Sum)| Holder {
            name,
            line: None,
            forward_line: None,
            path: Vec::new(),
            bytes: sum.bytes,
            count: sum.count,
            category: sum.category(),
        };
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
