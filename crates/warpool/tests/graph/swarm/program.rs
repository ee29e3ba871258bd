//! A program as data: sections that are captured, or just done, and what happens between them. Both machines read the
//! same one. How a section is captured (mode, streams, threads of its begin and end) is not part of it: that must not
//! make a difference.

/// A variable: [`WORDS`](super::kernels::WORDS) words of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Var {
    /// There from the beginning to the end, and compared after every round.
    Outside(usize),
    /// Of one run of one section.
    Temp(usize),
    /// Made by the section of that number, and read by later sections of its group. A graph owns it.
    Left(usize),
}

/// A whole program.
#[derive(Debug)]
pub struct Program {
    pub settings: &'static str,
    /// `None` is what the device wants.
    pub workspace_bytes: Option<u64>,
    pub outside: usize,
    pub generators: usize,
    /// Whether the last generator is on the state of the first.
    pub shared_state: bool,
    pub sections: Vec<Section>,
    pub groups: Vec<Group>,
    pub rounds: Vec<Vec<Step>>,
}

/// Graphs that share a pool.
#[derive(Debug)]
pub struct Group {
    /// Those from `first` on, so many.
    pub first: usize,
    pub count: usize,
    /// Whether later sections read what earlier ones left: then all are replayed in order, and captured anew together.
    pub linked: bool,
    /// Whether it is a pool of the program's own.
    pub mem_pool: bool,
}

/// What becomes one graph.
#[derive(Debug)]
pub struct Section {
    pub group: usize,
    pub lanes: usize,
    /// Whether all lanes branch off the first.
    pub forks: bool,
    pub ops: Vec<Op>,
}

/// One thing that happens in a section. Lanes are streams; the first is where the capture begins, or, in a body, the
/// body's own.
#[derive(Clone, Debug)]
pub enum Op {
    Work {
        lane: usize,
        work: Work,
        scoped: bool,
    },
    Alloc {
        temp: usize,
        lane: usize,
        bytes: u64,
        how: How,
    },
    RecordUse {
        temp: usize,
        lane: usize,
    },
    Free {
        temp: usize,
    },
    /// `lane` comes in, behind `from`.
    Fork {
        lane: usize,
        from: usize,
    },
    Wait {
        lane: usize,
        on: usize,
    },
    Mark {
        event: usize,
        lane: usize,
    },
    Await {
        event: usize,
        lane: usize,
    },
    /// The last that happens on a lane: the first waits for it.
    Join {
        lane: usize,
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
    /// By another thread, while this one waits.
    Elsewhere(Vec<Op>),
}

/// Whose a temporary is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Given back in the section.
    Freed,
    /// The graph's, from the scope's own call.
    Allocated,
    /// The graph's, moved into it.
    Moved,
    /// The program's, for a while after the capture.
    Held,
    /// The graph's, and for later sections to read: the variable `Left` of that section.
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

/// What happens between captures. Streams are numbers; 0 is the default stream.
#[derive(Debug)]
pub enum Step {
    /// A replay; captured first, if the graph holds nothing.
    Run {
        section: usize,
        stream: usize,
    },
    /// Work without a graph, on both machines.
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
    /// The graphs of these sections are captured anew before their next run.
    Reset {
        sections: Vec<usize>,
        by_drop: bool,
    },
    /// Cached memory goes back to the driver.
    Trim,
    ClearWorkspaces,
    /// What the program held of captures goes.
    LetGo,
}
