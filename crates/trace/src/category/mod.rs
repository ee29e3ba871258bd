//! The category of each allocation: parameters, gradients, optimizer state, activations, temporaries, inputs.
//!
//! A recording does not contain the category. It is inferred from what the program was doing when it allocated
//! (`doing.rs`, from the call stack, or from a region that the program named), and from when the memory was freed
//! relative to what the program did next (`rules.rs`). An allocation of the backward pass that is still allocated when
//! the optimizer runs is a gradient; one that the forward pass made and the backward pass frees is an activation. Where
//! neither decides, the answer is [`Category::Unknown`].

mod doing;
mod kind;
mod rules;

use rustc_hash::FxHashMap;
use warpool::memory::report::{Action, Annotation, Frame, StackId, TraceEntry};

pub use kind::{Category, CategoryBytes};
pub use rules::Rule;

use doing::{Doing, Regions, StackKind, StackKinds};
use rules::Lives;

/// The category of every allocation of a history.
#[derive(Clone, Debug, Default)]
pub(crate) struct Categories {
    /// For each allocation, in the order of events.
    of_allocation: Vec<(Category, Rule)>,
    /// The number of the first allocation at or after each 1,024th event.
    marks: Vec<u32>,
    /// The events at which calls of modules by the program begin.
    forwards: Vec<u32>,
    kinds: StackKinds,
}

impl Categories {
    /// Categorizes the allocations in the events of one device.
    pub fn new(events: &[TraceEntry], stacks: &[std::sync::Arc<[Frame]>], annotations: &[Annotation]) -> Self {
        let mut kinds = StackKinds::default();
        let regions = Regions::new(annotations);
        let mut lives = Lives::default();
        let mut open: FxHashMap<u64, u32> = FxHashMap::default();
        let mut marks = Vec::with_capacity(events.len() / MARK_EVENTS + 1);
        for (at, event) in (0_u32..).zip(events) {
            if (at as usize).is_multiple_of(MARK_EVENTS) {
                marks.push(lives.count());
            }
            match event.action {
                Action::Alloc => {
                    let mut kind = event.stack.map_or(StackKind::NONE, |stack| kinds.of(stack, stacks));
                    if kind.doing == Doing::Unknown {
                        kind.doing = regions.doing_at(event.time_us);
                    }
                    open.insert(event.addr, lives.add(at, event.size, event.stack, kind));
                }
                Action::FreeRequested | Action::FreeCompleted => {
                    if let Some(allocation) = open.remove(&event.addr) {
                        lives.freed(allocation, at);
                    }
                }
                Action::Oom => lives.out_of_memory(at),
                _ => {}
            }
        }
        let end = u32::try_from(events.len()).unwrap_or(u32::MAX);
        let (of_allocation, forwards) = lives.judge(end);
        Self { of_allocation, marks, forwards, kinds }
    }

    /// The category of the allocation at event `at`, which must be an allocation; unknown beyond the last one.
    pub fn at(&self, events: &[TraceEntry], at: u32) -> (Category, Rule) {
        let Some(&first) = self.marks.get(at as usize / MARK_EVENTS) else { return Default::default() };
        let from = at as usize / MARK_EVENTS * MARK_EVENTS;
        let before = events[from..at as usize].iter().filter(|event| event.action == Action::Alloc).count();
        self.of_allocation.get(first as usize + before).copied().unwrap_or_default()
    }

    /// How many calls of modules by the program began between two events; `None` if no stack of the history shows one.
    pub fn module_calls_between(&self, from: usize, until: usize) -> Option<usize> {
        let before = |event: usize| self.forwards.partition_point(|&start| (start as usize) < event);
        (!self.forwards.is_empty()).then(|| before(until).saturating_sub(before(from)))
    }

    /// The categories of all allocations, in the order of events.
    pub fn all(&self) -> &[(Category, Rule)] {
        &self.of_allocation
    }

    /// The category of a block that was allocated before the history, or recorded without its stack. At most the stack
    /// in the snapshot at the end is known.
    pub fn by_stack(&mut self, stack: Option<StackId>, stacks: &[std::sync::Arc<[Frame]>]) -> (Category, Rule) {
        match stack.map(|stack| self.kinds.of(stack, stacks).doing) {
            Some(Doing::ModuleSetup) => (Category::Parameters, Rule::ModuleSetup),
            Some(Doing::OptimizerSetup | Doing::OptimizerStep) => (Category::OptimizerState, Rule::KeptByOptimizer),
            _ => (Category::Unknown, Rule::BeforeHistory),
        }
    }
}

/// How many events share a mark. Looking up an allocation takes at most this many steps.
const MARK_EVENTS: usize = 1024;
