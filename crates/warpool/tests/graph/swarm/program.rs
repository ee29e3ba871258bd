//! A program as data: sections that are captured or run eagerly, and the steps between them. How a section is captured
//! (mode, streams, threads of its begin and end) is not part of it, since it must not make a difference.

/// A variable: [`WORDS`](super::kernels::WORDS) words of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Var {
    /// Lives as long as the program, and is compared after every round.
    Outside(usize),
    /// Lives in one run of one section.
    Temp(usize),
    /// Written by the section with that number, and read by later sections of its group. Owned by a graph.
    Left(usize),
}

/// A whole program.
#[derive(Debug)]
pub struct Program {
    pub settings: &'static str,
    /// `None` is the device's default.
    pub workspace_bytes: Option<u64>,
    pub outside: usize,
    pub generators: usize,
    /// Whether the last generator shares the state of the first.
    pub shared_state: bool,
    pub sections: Vec<Section>,
    pub groups: Vec<Group>,
    pub rounds: Vec<Vec<Step>>,
}

/// Graphs that share a pool.
#[derive(Debug)]
pub struct Group {
    /// The first section, and the number of sections.
    pub first: usize,
    pub count: usize,
    /// Whether later sections read what earlier ones left: then all are replayed in order, and recaptured together.
    pub linked: bool,
    /// Whether it is a pool that the program created.
    pub mem_pool: bool,
}

/// The work of one graph.
#[derive(Debug)]
pub struct Section {
    pub group: usize,
    pub branches: usize,
    /// Whether all branches are forked from the first.
    pub forks: bool,
    pub ops: Vec<Op>,
}

/// One operation of a section. Branches are streams; the first is where the capture begins, or, in a body, the body's
/// own.
#[derive(Clone, Debug)]
pub enum Op {
    Work {
        branch: usize,
        work: Work,
        scoped: bool,
    },
    Alloc {
        temp: usize,
        branch: usize,
        bytes: u64,
        how: Ownership,
    },
    RecordUse {
        temp: usize,
        branch: usize,
    },
    Free {
        temp: usize,
    },
    /// Forks `branch` from `from`.
    Fork {
        branch: usize,
        from: usize,
    },
    Wait {
        branch: usize,
        on: usize,
    },
    Mark {
        event: usize,
        branch: usize,
    },
    Await {
        event: usize,
        branch: usize,
    },
    /// Joins a branch into the first.
    Join {
        branch: usize,
    },
    If {
        flag: Var,
        byte: bool,
        body: Vec<Op>,
    },
    While {
        flag: Var,
        body: Vec<Op>,
    },
    /// Executed by another thread, while this one waits.
    Elsewhere(Vec<Op>),
}

/// Who owns a temporary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// Freed in the section.
    Freed,
    /// The graph, allocated by the scope.
    Allocated,
    /// The graph, moved into it.
    Moved,
    /// The program, for a while after the capture.
    Held,
    /// The graph, for later sections to read: the variable `Left` of that section.
    Left(usize),
}

/// Work for a stream.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    Fill { to: Var, value: u32, width: usize },
    Copy { to: Var, from: Var },
    Add { to: Var, value: u32 },
    Mix { to: Var, a: Var, b: Var },
    Sums { to: Var, from: Var },
    Limit { to: Var, from: Var, most: u32 },
    CountDown { flag: Var },
    Tame { to: Var, from: Var },
    Multiply { to: Var, a: Var, b: Var, size: [u32; 3], transposed: [bool; 2], beta: f32 },
    Draw { to: Var, generator: usize, words: u64 },
    Salt { to: Var, generator: usize, increment: u64 },
}

impl Work {
    pub fn reads(self) -> Vec<Var> {
        match self {
            Self::Fill { .. } => vec![],
            Self::Copy { from, .. } | Self::Sums { from, .. } | Self::Limit { from, .. } | Self::Tame { from, .. } => {
                vec![from]
            }
            Self::Add { to, .. } | Self::CountDown { flag: to } | Self::Draw { to, .. } | Self::Salt { to, .. } => {
                vec![to]
            }
            Self::Mix { a, b, .. } => vec![a, b],
            Self::Multiply { to, a, b, .. } => vec![to, a, b],
        }
    }

    pub fn writes(self) -> Var {
        match self {
            Self::Fill { to, .. }
            | Self::Copy { to, .. }
            | Self::Add { to, .. }
            | Self::Mix { to, .. }
            | Self::Sums { to, .. }
            | Self::Limit { to, .. }
            | Self::CountDown { flag: to }
            | Self::Tame { to, .. }
            | Self::Multiply { to, .. }
            | Self::Draw { to, .. }
            | Self::Salt { to, .. } => to,
        }
    }
}

/// A step between captures. Streams are numbers; 0 is the default stream.
#[derive(Debug)]
pub enum Step {
    /// A replay; captured first, if the graph is empty.
    Run {
        section: usize,
        stream: usize,
    },
    /// Eager work, on both devices.
    Eager {
        section: Section,
        stream: usize,
    },
    Wait {
        stream: usize,
        on: usize,
    },
    Seed {
        generator: usize,
        seed: u64,
    },
    Offset {
        generator: usize,
        offset: u64,
    },
    /// The graphs of these sections are recaptured before their next run.
    Reset {
        sections: Vec<usize>,
        by_drop: bool,
    },
    /// Trims the allocator.
    Trim,
    ClearWorkspaces,
    /// Drops the blocks of captures that the program owns.
    DropHeld,
}
