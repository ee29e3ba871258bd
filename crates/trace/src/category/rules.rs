//! The rules that decide the category, from what a program was doing when it allocated and what it did until it freed
//! the memory.

use std::collections::BTreeSet;

use rustc_hash::{FxHashMap, FxHashSet};
use warpool::memory::report::StackId;

use super::doing::{Doing, Makes, StackKind};
use super::kind::Category;

/// The rule that decided about a category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// Allocated while a module was made, moved or loaded, and kept.
    ModuleSetup,
    /// Allocated in the backward pass, and still allocated after it.
    KeptAfterBackward,
    /// A bucket in which gradients are exchanged.
    GradientBucket,
    /// Parameters that are sharded over ranks, or gathered from them.
    Sharded,
    /// Allocated in an optimizer's step, and still allocated after it.
    KeptByOptimizer,
    /// Allocated before the backward pass, and still allocated when it begins.
    KeptForBackward,
    /// Allocated by a checkpoint's recomputation, and still allocated after it.
    Recomputed,
    /// Allocated in a backward pass, and freed in a later one: the graph of a gradient.
    KeptForSecondBackward,
    /// Made once and kept while modules are called again and again, in a history without a backward pass.
    Preallocated,
    /// Allocated in a module, and still allocated after its call: a cache, or a result that the program keeps.
    KeptAfterForward,
    /// Freed within the pass that allocated it.
    FreedWithinPass,
    /// A workspace of a library.
    Workspace,
    /// Made or copied to the device by the program, outside of modules.
    MadeByProgram,
    /// Not freed when memory ran out or the history ended; the same call's earlier allocations were of this category.
    AsBefore,
    /// Not freed when memory ran out or the history ended, and as large as a parameter.
    SizeOfParameter,
    /// Not freed when memory ran out or the history ended, many allocations later.
    StillThere,
    /// Allocated before the history.
    BeforeHistory,
    /// The recording has no call stack for it.
    #[default]
    NoStack,
    /// The call stack shows no known part of a training or serving program.
    NoRule,
}

impl Rule {
    /// The rule in a few words, after "because it was".
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::ModuleSetup => "allocated while a module was made, moved or loaded",
            Self::KeptAfterBackward => "allocated in the backward pass and kept after it",
            Self::GradientBucket => "a bucket in which ranks exchange gradients",
            Self::Sharded => "allocated to shard or gather parameters",
            Self::KeptByOptimizer => "allocated by the optimizer and kept after its step",
            Self::KeptForBackward => "kept until the backward pass",
            Self::Recomputed => "computed again for the backward pass and kept for it",
            Self::KeptForSecondBackward => "allocated in a backward pass and freed in a later one",
            Self::Preallocated => "made once and kept while modules are called, without a backward pass",
            Self::KeptAfterForward => "allocated in a module and kept after its call",
            Self::FreedWithinPass => "freed within the pass that allocated it",
            Self::Workspace => "a workspace of a library",
            Self::MadeByProgram => "made or copied to the device outside of modules",
            Self::AsBefore => "allocated by a call whose earlier allocations were of this kind",
            Self::SizeOfParameter => "allocated in the backward pass and as large as a parameter",
            Self::StillThere => "not freed many allocations later",
            Self::BeforeHistory => "allocated before the history",
            Self::NoStack => "recorded without a call stack",
            Self::NoRule => "allocated outside of what is known of training and serving",
        }
    }

    /// Its name in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ModuleSetup => "module_setup",
            Self::KeptAfterBackward => "kept_after_backward",
            Self::GradientBucket => "gradient_bucket",
            Self::Sharded => "sharded",
            Self::KeptByOptimizer => "kept_by_optimizer",
            Self::KeptForBackward => "kept_for_backward",
            Self::Recomputed => "recomputed",
            Self::KeptForSecondBackward => "kept_for_second_backward",
            Self::Preallocated => "preallocated",
            Self::KeptAfterForward => "kept_after_forward",
            Self::FreedWithinPass => "freed_within_pass",
            Self::Workspace => "workspace",
            Self::MadeByProgram => "made_by_program",
            Self::AsBefore => "as_before",
            Self::SizeOfParameter => "size_of_parameter",
            Self::StillThere => "still_there",
            Self::BeforeHistory => "before_history",
            Self::NoStack => "no_stack",
            Self::NoRule => "no_rule",
        }
    }
}

/// A recording may end before an allocation is freed. It counts as kept once the same pass made this many others after
/// it: a layer of a transformer makes about thirty.
const LATER_MIN: u32 = 48;

/// Memory that is kept for this number of module calls is not a batch.
const PASSES_MIN: usize = 3;

/// Other threads may allocate during a backward pass. It has ended once this many allocations in a row do not belong to
/// it.
const OUTSIDE_MIN: usize = 3;

/// The allocations of a history with their lifetimes.
#[derive(Default)]
pub(super) struct Lives {
    lives: Vec<Life>,
    ooms: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Life {
    from: u32,
    /// The event of its free; `u32::MAX` if there is none.
    until: u32,
    kind: StackKind,
    stack: Option<StackId>,
    bytes: u64,
}

impl Lives {
    /// Adds an allocation; returns its number.
    pub fn add(&mut self, from: u32, bytes: u64, stack: Option<StackId>, kind: StackKind) -> u32 {
        self.lives.push(Life { from, until: u32::MAX, kind, stack, bytes });
        self.count() - 1
    }

    pub fn count(&self) -> u32 {
        u32::try_from(self.lives.len()).expect("fewer than 2^32 events")
    }

    pub fn freed(&mut self, allocation: u32, at: u32) {
        self.lives[allocation as usize].until = at;
    }

    pub fn out_of_memory(&mut self, at: u32) {
        self.ooms.push(at);
    }

    /// The category of each, and the events at which calls of modules begin; `end` is the number of events.
    pub fn judge(mut self, end: u32) -> (Vec<(Category, Rule)>, Vec<u32>) {
        self.name_threads_without_python();
        let passes = Passes::new(&self.lives);
        let mut found: Vec<Judged> = (0..self.lives.len()).map(|number| self.judge_one(number, &passes, end)).collect();
        self.settle_open(&mut found);
        (found.into_iter().map(|judged| (judged.category, judged.rule)).collect(), passes.forwards)
    }

    /// In a recording of Python stacks alone, an allocation without a Python frame was made by autograd's thread.
    fn name_threads_without_python(&mut self) {
        let with_stack = self.lives.iter().filter(|life| life.stack.is_some()).count();
        let is_python_only = self.lives.iter().all(|life| life.stack.is_none() || is_python_only(life.kind));
        let runs_modules = self.lives.iter().any(|life| life.kind.doing == Doing::Forward);
        if with_stack * 4 < self.lives.len() || !is_python_only || !runs_modules {
            return;
        }
        for life in self.lives.iter_mut().filter(|life| life.kind.doing == Doing::Unknown) {
            life.kind.doing = Doing::Backward;
        }
    }

    fn judge_one(&self, number: usize, passes: &Passes, end: u32) -> Judged {
        let life = &self.lives[number];
        // Freed after the memory ran out, in the same pass: the failure freed it.
        let oom = self.ooms[self.ooms.partition_point(|&oom| oom < life.from)..].first().copied();
        let cut_off = oom.unwrap_or(end);
        let until = life.until.min(cut_off);
        let is_open = until == cut_off;
        let pass_end = passes.end_of[number];
        let ended_in_pass = until <= pass_end;
        let open = |guess| Judged { category: Category::Unknown, rule: Rule::NoRule, open: Some(guess) };
        match life.kind.makes {
            Makes::Workspace => return Judged::new(Category::Temporaries, Rule::Workspace),
            Makes::GradientBucket if !ended_in_pass || is_open => {
                return Judged::new(Category::Gradients, Rule::GradientBucket);
            }
            Makes::ShardedParameter => return Judged::new(Category::Parameters, Rule::Sharded),
            _ => {}
        }
        match life.kind.doing {
            Doing::Unknown => Judged::new(Category::Unknown, Rule::NoStack),
            Doing::ModuleSetup if ended_in_pass && !is_open => Judged::temporary(),
            Doing::ModuleSetup => Judged::new(Category::Parameters, Rule::ModuleSetup),
            Doing::OptimizerSetup | Doing::OptimizerStep => match (ended_in_pass, is_open) {
                (true, true) => open(match life.kind.doing {
                    Doing::OptimizerSetup => Guess::OptimizerState,
                    _ if passes.later_in_pass(&self.lives, number, until) >= LATER_MIN => Guess::OptimizerState,
                    _ => Guess::Temporary,
                }),
                (true, false) => Judged::temporary(),
                (false, _) => Judged::new(Category::OptimizerState, Rule::KeptByOptimizer),
            },
            Doing::Backward => match (ended_in_pass, is_open) {
                (true, true) => open(Guess::Gradient),
                (true, false) => Judged::temporary(),
                // Gradients are freed before the next backward pass, or in it after another forward pass.
                (false, false)
                    if passes.is_in_backward(until) && passes.forward_passes_between(life.from, until) == 0 =>
                {
                    Judged::new(Category::Activations, Rule::KeptForSecondBackward)
                }
                (false, _) => Judged::new(Category::Gradients, Rule::KeptAfterBackward),
            },
            Doing::Recompute => match (ended_in_pass, is_open) {
                (true, true) => open(Guess::Retained { later: passes.later_in_pass(&self.lives, number, until) }),
                (true, false) => Judged::temporary(),
                (false, _) => Judged::new(Category::Activations, Rule::Recomputed),
            },
            Doing::Forward | Doing::Program => self.judge_forward(number, passes, until, is_open),
        }
    }

    /// The category of an allocation of the forward pass, or of the program around it.
    fn judge_forward(&self, number: usize, passes: &Passes, until: u32, is_open: bool) -> Judged {
        let life = &self.lives[number];
        let in_module = life.kind.doing == Doing::Forward;
        let is_kept = passes.forward_passes_between(life.from, until) >= PASSES_MIN;
        if !in_module && life.kind.makes == Makes::Buffer && is_kept && !passes.has_backward() {
            return Judged::new(Category::Activations, Rule::Preallocated);
        }
        let is_input = !in_module
            && match life.kind.makes {
                Makes::Tensor | Makes::Buffer => true,
                // Before the model is called in this iteration.
                Makes::MaybeTensor => passes.is_before_forward[number],
                _ => false,
            };
        if is_input {
            return Judged::new(Category::Inputs, Rule::MadeByProgram);
        }
        let backward = passes.next_backward[number];
        if until > backward {
            return Judged::new(Category::Activations, Rule::KeptForBackward);
        }
        let ended_in_pass = until <= passes.end_of[number];
        match (in_module, is_open) {
            (_, true) => {
                let later = passes.later_in_pass(&self.lives, number, until);
                let guess = Guess::Retained { later };
                Judged { category: Category::Unknown, rule: Rule::NoRule, open: Some(guess) }
            }
            (true, false) if !ended_in_pass => Judged::new(Category::Activations, Rule::KeptAfterForward),
            _ => Judged::temporary(),
        }
    }

    /// Decides allocations whose free is not in the history, or that a failure freed: like earlier allocations of the
    /// same call, or by a guess from what is known about them.
    fn settle_open(&self, found: &mut [Judged]) {
        // By call and size, or by the call alone, since another batch has other sizes.
        let mut known: FxHashMap<(StackId, Option<u64>), [u64; Category::ALL.len()]> = FxHashMap::default();
        let mut parameter_sizes: BTreeSet<u64> = BTreeSet::new();
        let open = self.lives.iter().zip(&*found).filter(|(_, judged)| judged.open.is_some());
        let asked: FxHashSet<StackId> = open.filter_map(|(life, _)| life.stack).collect();
        let mut retained = Retention::default();
        for (life, judged) in self.lives.iter().zip(&*found) {
            if judged.category == Category::Parameters {
                parameter_sizes.insert(life.bytes);
            }
            match judged.open {
                Some(guess) => retained.see(guess, life.bytes),
                None => {
                    let Some(stack) = life.stack.filter(|stack| asked.contains(stack)) else { continue };
                    for size in [Some(life.bytes), None] {
                        let counts = known.entry((stack, size)).or_default();
                        counts[judged.category.index()] = counts[judged.category.index()].saturating_add(life.bytes);
                    }
                }
            }
        }
        for (life, judged) in self.lives.iter().zip(found) {
            let Some(guess) = judged.open else { continue };
            let of_size = |size: Option<u64>| known.get(&(life.stack?, size)).and_then(most);
            let before = of_size(Some(life.bytes)).or_else(|| of_size(None));
            *judged = match (before, guess) {
                (Some(category), _) if category != Category::Unknown => Judged::new(category, Rule::AsBefore),
                (_, Guess::Gradient) if parameter_sizes.contains(&life.bytes) => {
                    Judged::new(Category::Gradients, Rule::SizeOfParameter)
                }
                (_, Guess::OptimizerState) => Judged::new(Category::OptimizerState, Rule::KeptByOptimizer),
                (_, Guess::Gradient | Guess::Temporary) => Judged::temporary(),
                (_, Guess::Retained { later }) if later >= LATER_MIN || retained.most_are_kept() => {
                    Judged::new(Category::Activations, Rule::StillThere)
                }
                (_, Guess::Retained { .. }) => Judged::temporary(),
            };
        }
    }
}

/// Whether a stack may be one of Python lines alone.
fn is_python_only(kind: StackKind) -> bool {
    kind.makes == Makes::MaybeTensor
}

fn most(counts: &[u64; Category::ALL.len()]) -> Option<Category> {
    let (category, bytes) = Category::ALL.into_iter().zip(counts).max_by_key(|&(_, bytes)| bytes)?;
    (*bytes > 0).then_some(category)
}

struct Judged {
    category: Category,
    rule: Rule,
    /// A guess, if the free is not known.
    open: Option<Guess>,
}

impl Judged {
    fn new(category: Category, rule: Rule) -> Self {
        Self { category, rule, open: None }
    }

    fn temporary() -> Self {
        Self::new(Category::Temporaries, Rule::FreedWithinPass)
    }
}

#[derive(Clone, Copy)]
enum Guess {
    OptimizerState,
    Gradient,
    Temporary,
    /// Still allocated after `later` further allocations of the pass.
    Retained {
        later: u32,
    },
}

/// Whether a pass that was cut off keeps most of its allocations, as the forward pass of a training does.
#[derive(Default)]
struct Retention {
    kept: u64,
    recent: u64,
}

impl Retention {
    fn see(&mut self, guess: Guess, bytes: u64) {
        if let Guess::Retained { later } = guess {
            let sum = if later >= LATER_MIN { &mut self.kept } else { &mut self.recent };
            *sum = sum.saturating_add(bytes);
        }
    }

    fn most_are_kept(&self) -> bool {
        self.kept > self.recent
    }
}

/// Where the passes of a program begin and end, for each allocation.
struct Passes {
    /// The first event that belongs to another pass.
    end_of: Vec<u32>,
    /// The first event of the next backward pass.
    next_backward: Vec<u32>,
    /// Whether no module has been called since the last backward pass or optimizer's step.
    is_before_forward: Vec<bool>,
    /// The backward passes, as their first event and the first event after them, ascending.
    backwards: Vec<(u32, u32)>,
    /// The first events of calls of modules, ascending.
    forwards: Vec<u32>,
}

impl Passes {
    fn new(lives: &[Life]) -> Self {
        let count = lives.len();
        let (mut end_of, mut next_backward) = (vec![u32::MAX; count], vec![u32::MAX; count]);
        let mut backward = u32::MAX;
        // Backward over the history: the first allocation of another kind.
        let mut next_other = [u32::MAX; Group::ALL.len()];
        let mut outside = 0;
        let mut backward_ends = u32::MAX;
        for number in (0..count).rev() {
            let life = &lives[number];
            let group = Group::of(life.kind.doing);
            next_backward[number] = backward;
            end_of[number] = match life.kind.doing {
                Doing::Backward => backward_ends,
                _ => next_other[group as usize],
            };
            if life.kind.doing.is_backward() {
                backward = life.from;
                outside = 0;
            } else {
                outside += 1;
                // The backward pass before these ends with the first of them.
                if outside >= OUTSIDE_MIN {
                    backward_ends = life.from;
                }
            }
            for other in Group::ALL.into_iter().filter(|&other| other != group) {
                next_other[other as usize] = life.from;
            }
        }
        let mut is_before_forward = vec![false; count];
        let mut before = true;
        for (life, is_before) in lives.iter().zip(&mut is_before_forward) {
            match life.kind.doing {
                Doing::Forward => before = false,
                doing if doing.is_backward() || doing.is_optimizer() => before = true,
                _ => {}
            }
            *is_before = before;
        }
        let mut backwards: Vec<(u32, u32)> = Vec::new();
        let mut forwards = Vec::new();
        let mut in_forward = false;
        for (life, &end) in lives.iter().zip(&end_of) {
            let is_forward = life.kind.doing == Doing::Forward;
            if is_forward && !in_forward {
                forwards.push(life.from);
            }
            in_forward = is_forward;
            if life.kind.doing == Doing::Backward && backwards.last().is_none_or(|&(_, last)| life.from >= last) {
                backwards.push((life.from, end));
            }
        }
        Self { end_of, next_backward, is_before_forward, backwards, forwards }
    }

    /// Whether an event is in a backward pass.
    fn is_in_backward(&self, event: u32) -> bool {
        let after = self.backwards.partition_point(|&(start, _)| start <= event);
        self.backwards[..after].last().is_some_and(|&(_, end)| event < end)
    }

    fn has_backward(&self) -> bool {
        !self.backwards.is_empty()
    }

    /// How many calls of modules began between two events.
    fn forward_passes_between(&self, from: u32, until: u32) -> usize {
        let before = |event: u32| self.forwards.partition_point(|&start| start <= event);
        before(until).saturating_sub(before(from))
    }

    /// How many allocations of the same pass were made after one, up to an event. Counts no further than needed.
    fn later_in_pass(&self, lives: &[Life], number: usize, until: u32) -> u32 {
        let doing = lives[number].kind.doing;
        let later = lives[number + 1..].iter().take_while(|life| life.from < until).take(4 * LATER_MIN as usize);
        let same = later.filter(|life| life.kind.doing == doing);
        u32::try_from(same.count()).unwrap_or(LATER_MIN)
    }
}

/// Passes that follow each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    Setup,
    Optimizer,
    Recompute,
    Forward,
    Other,
}

impl Group {
    const ALL: [Self; 5] = [Self::Setup, Self::Optimizer, Self::Recompute, Self::Forward, Self::Other];

    fn of(doing: Doing) -> Self {
        match doing {
            Doing::ModuleSetup => Self::Setup,
            Doing::OptimizerSetup | Doing::OptimizerStep => Self::Optimizer,
            Doing::Recompute => Self::Recompute,
            Doing::Forward => Self::Forward,
            _ => Self::Other,
        }
    }
}
