//! Executes a section on one device, eagerly or in a capture. The two differ in the owner of temporaries, and in flags:
//! without a graph the host reads them.

use std::collections::BTreeMap;

use warpool::driver::DevicePtr;
use warpool::graph::{BufferKey, Capture, Flag, Fork, GraphArg};
use warpool::memory::{Allocate as _, DeviceBlock};
use warpool::{Event, Stream};

use super::context::{SwarmContext, fill};
use super::program::{Op, Ownership, Var, Work};
use crate::common::launch::capture_kernel;

/// One eager run, or one capture, of one section.
pub struct Executor<'m> {
    context: &'m SwarmContext,
    /// The streams of the branches, or of the bodies that are open.
    pub branches: Vec<Stream>,
    forks: BTreeMap<usize, Fork>,
    /// Whether branches are forks of the capture.
    by_forks: bool,
    temps: BTreeMap<usize, Temp>,
    /// Blocks from before the capture, for temporaries that will be moved into the graph.
    brought: BTreeMap<usize, DeviceBlock>,
    events: BTreeMap<usize, Event>,
    /// The addresses of `Left` variables.
    left: BTreeMap<usize, DevicePtr>,
    /// The keys of outside variables in this capture.
    shared: BTreeMap<usize, BufferKey>,
    /// The keys of the variables that this section leaves.
    pub leaves: Vec<(usize, BufferKey)>,
}

enum Temp {
    Block(DeviceBlock),
    Key(BufferKey),
}

impl<'m> Executor<'m> {
    pub fn new(
        context: &'m SwarmContext,
        branches: Vec<Stream>,
        by_forks: bool,
        left: BTreeMap<usize, DevicePtr>,
    ) -> Self {
        Self {
            context,
            branches,
            forks: BTreeMap::new(),
            by_forks,
            temps: BTreeMap::new(),
            brought: BTreeMap::new(),
            events: BTreeMap::new(),
            left,
            shared: BTreeMap::new(),
            leaves: Vec::new(),
        }
    }

    /// Runs eagerly, and frees everything afterwards.
    pub fn do_now(mut self, ops: &[Op]) {
        self.executor(ops, &mut None);
        for (_, temp) in std::mem::take(&mut self.temps) {
            let Temp::Block(block) = temp else { panic!("no graph owns anything here") };
            // All branches were joined into the first.
            block.record_use(&self.branches[0]).unwrap();
        }
    }

    /// Allocates some of the blocks that will be moved into the graph, before the capture begins: from the default
    /// pool.
    pub fn bring(&mut self, ops: &[Op]) {
        for op in ops {
            match *op {
                Op::Alloc { temp, branch, bytes, how: Ownership::Moved } if temp % 2 == 1 => {
                    let stream = &self.branches[branch];
                    let block = self.context.allocator.allocate(bytes, stream).unwrap();
                    // Replays on other streams must come after earlier uses of the memory on this one.
                    stream.synchronize().unwrap();
                    self.brought.insert(temp, block);
                }
                Op::Elsewhere(ref ops) => self.bring(ops),
                _ => {}
            }
        }
    }

    /// Executes in a capture, to its end.
    pub fn capture(&mut self, ops: &[Op], capture: &mut Capture<'_>) {
        self.begin(ops, capture);
        assert!(self.forks.is_empty(), "all are joined");
    }

    /// Executes in a capture, which may end anywhere.
    pub fn begin(&mut self, ops: &[Op], capture: &mut Capture<'_>) {
        for (index, block) in self.context.outside.iter().enumerate() {
            self.shared.insert(index, capture.share(block.clone()).unwrap());
        }
        self.executor(ops, &mut Some(capture));
    }

    /// The blocks of a capture that the program owns.
    pub fn held(&mut self) -> Vec<DeviceBlock> {
        let block = |temp| match temp {
            Temp::Block(block) => Some(block),
            Temp::Key(_) => None,
        };
        std::mem::take(&mut self.temps).into_values().filter_map(block).collect()
    }

    fn executor(&mut self, ops: &[Op], capture: &mut Option<&mut Capture<'_>>) {
        for op in ops {
            self.op(op, capture);
        }
    }

    fn op(&mut self, op: &Op, capture: &mut Option<&mut Capture<'_>>) {
        match *op {
            Op::Work { branch, work, scoped } => self.work(branch, work, scoped, capture),
            Op::Alloc { temp, branch, bytes, how } => self.allocate(temp, branch, bytes, how, capture),
            Op::RecordUse { temp, branch } => {
                let stream = &self.branches[branch];
                match &self.temps[&temp] {
                    Temp::Block(block) => block.record_use(stream).unwrap(),
                    Temp::Key(key) => {
                        let capture = capture.as_deref().expect("keys are of captures");
                        capture.buffer(*key).unwrap().record_use(stream).unwrap();
                    }
                }
            }
            Op::Free { temp } => match self.temps.remove(&temp).expect("a live temporary") {
                Temp::Block(block) if temp % 2 == 0 => drop(block),
                Temp::Block(block) => block.free().unwrap(),
                Temp::Key(_) => panic!("the graph's own are not given back"),
            },
            Op::Fork { branch, from } => match capture {
                Some(capture) if self.by_forks => {
                    let fork = capture.fork().unwrap();
                    self.branches[branch] = Stream::clone(&fork);
                    self.forks.insert(branch, fork);
                }
                _ => self.branches[branch].wait_stream(&self.branches[from]).unwrap(),
            },
            Op::Join { branch } => match (capture, self.forks.remove(&branch)) {
                (Some(capture), Some(fork)) => capture.join(fork).unwrap(),
                _ => self.branches[0].wait_stream(&self.branches[branch]).unwrap(),
            },
            Op::Wait { branch, on } => self.branches[branch].wait_stream(&self.branches[on]).unwrap(),
            Op::Mark { event, branch } => {
                let mut clock = self.context.instance.event();
                clock.record(&self.branches[branch]).unwrap();
                self.events.insert(event, clock);
            }
            Op::Await { event, branch } => self.events[&event].wait(&self.branches[branch]).unwrap(),
            Op::If { flag, byte, ref body } => self.conditional(flag, byte, false, body, capture),
            Op::While { flag, ref body } => self.conditional(flag, false, true, body, capture),
            Op::Elsewhere(ref ops) => {
                // Joined explicitly: the end of a scope does not wait for the thread's destructors.
                let ran = std::thread::scope(|scope| scope.spawn(|| self.executor(ops, capture)).join());
                ran.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        }
    }

    fn allocate(
        &mut self,
        temp: usize,
        branch: usize,
        bytes: u64,
        how: Ownership,
        capture: &mut Option<&mut Capture<'_>>,
    ) {
        let stream = self.branches[branch].clone();
        let made = match (how, capture) {
            (Ownership::Left(_), None) => return,
            (Ownership::Left(section), Some(capture)) => {
                let key = capture.allocate_on(bytes, &stream).unwrap();
                self.left.insert(section, capture.buffer(key).unwrap().ptr());
                self.leaves.push((section, key));
                return;
            }
            (Ownership::Allocated, Some(capture)) => Temp::Key(capture.allocate_on(bytes, &stream).unwrap()),
            (Ownership::Moved, Some(capture)) => {
                let brought = self.brought.remove(&temp);
                let block = brought.unwrap_or_else(|| self.context.allocator.allocate(bytes, &stream).unwrap());
                Temp::Key(capture.keep(block).unwrap())
            }
            _ => Temp::Block(self.context.allocator.allocate(bytes, &stream).unwrap()),
        };
        self.temps.insert(temp, made);
    }

    fn ptr(&self, var: Var, capture: Option<&Capture<'_>>) -> DevicePtr {
        match var {
            Var::Outside(index) => self.context.outside[index].ptr(),
            Var::Left(section) => self.left[&section],
            Var::Temp(temp) => match &self.temps[&temp] {
                Temp::Block(block) => block.ptr(),
                Temp::Key(key) => capture.expect("keys are of captures").buffer(*key).unwrap().ptr(),
            },
        }
    }

    /// The key of a variable, if the graph owns it.
    fn key(&self, var: Var) -> Option<BufferKey> {
        match var {
            Var::Outside(index) => self.shared.get(&index).copied(),
            Var::Left(section) => self.leaves.iter().find(|leaves| leaves.0 == section).map(|leaves| leaves.1),
            Var::Temp(temp) => match self.temps.get(&temp) {
                Some(Temp::Key(key)) => Some(*key),
                _ => None,
            },
        }
    }

    fn work(&mut self, branch: usize, work: Work, scoped: bool, capture: &mut Option<&mut Capture<'_>>) {
        if scoped
            && let Some(capture) = capture.as_deref_mut()
            && self.work_in_scope(branch, work, capture)
        {
            return;
        }
        let at = |var| self.ptr(var, capture.as_deref());
        self.context.issue(work, &at, &self.branches[branch]).unwrap();
    }

    /// Uses the scope's calls, if all variables have keys. Returns whether it did.
    fn work_in_scope(&self, branch: usize, work: Work, capture: &mut Capture<'_>) -> bool {
        let (stream, kernels) = (&self.branches[branch], &self.context.kernels);
        let keys = |vars: &[Var]| vars.iter().map(|&var| self.key(var).map(GraphArg::from)).collect::<Option<Vec<_>>>();
        let (function, args) = match work {
            Work::Fill { to, value, width } => {
                let Some(key) = self.key(to) else { return false };
                let (pattern, count) = fill(value, width);
                capture.fill(key, pattern, count, stream).unwrap();
                return true;
            }
            Work::Copy { to, from } => {
                let (Some(to), Some(from)) = (self.key(to), self.key(from)) else { return false };
                capture.copy(to, from, 4 * super::kernels::WORDS as u64, stream).unwrap();
                return true;
            }
            Work::Add { to, value } => (kernels.add, keys(&[to]).map(|args| [args, vec![value.into()]].concat())),
            Work::Mix { to, a, b } => (kernels.mix, keys(&[to, a, b])),
            Work::Sums { to, from } => (kernels.sums, keys(&[to, from])),
            Work::CountDown { flag } => (kernels.count_down, keys(&[flag])),
            Work::Tame { to, from } => (kernels.tame, keys(&[to, from])),
            _ => return false,
        };
        let Some(args) = args else { return false };
        capture_kernel(capture, function, &args, stream).unwrap();
        true
    }

    fn conditional(
        &mut self,
        flag: Var,
        byte: bool,
        is_while: bool,
        body: &[Op],
        capture: &mut Option<&mut Capture<'_>>,
    ) {
        let Some(capture) = capture else {
            while self.is_set(flag, byte) {
                self.executor(body, &mut None);
                if !is_while {
                    break;
                }
            }
            return;
        };
        let key = self.key(flag).expect("flags have keys");
        let flag = if byte { Flag::byte(key) } else { Flag::word(key) };
        let inside = |capture: &mut Capture<'_>| {
            let outer = std::mem::replace(&mut self.branches[0], capture.stream().clone());
            self.executor(body, &mut Some(capture));
            self.branches[0] = outer;
            Ok(())
        };
        if is_while { capture.while_node(flag, inside) } else { capture.if_node(flag, inside) }.unwrap();
    }

    /// Waits for the first branch, and reads the flag.
    fn is_set(&self, flag: Var, byte: bool) -> bool {
        self.branches[0].synchronize().unwrap();
        let word = self.context.words(self.ptr(flag, None))[0];
        if byte { word as u8 != 0 } else { word != 0 }
    }
}
