//! Does what a section says, on one machine: into streams that work, or into streams that capture. Where the two
//! differ, it is about who owns temporaries, and about flags: without a graph the host looks at them.

use std::collections::BTreeMap;

use warpool::driver::DevicePtr;
use warpool::graph::{BufferKey, Capture, Flag, Fork, GraphArg};
use warpool::memory::{Allocate as _, DeviceBlock};
use warpool::{Event, Stream};

use super::machine::{Machine, fill};
use super::program::{How, Op, Var, Work};
use crate::common::launch::capture_kernel;

/// One run, or one capture, of one section.
pub struct Player<'m> {
    machine: &'m Machine,
    /// The streams of the lanes, or of the bodies that are open.
    pub lanes: Vec<Stream>,
    forks: BTreeMap<usize, Fork>,
    /// Whether lanes come in as forks of the capture.
    by_forks: bool,
    temps: BTreeMap<usize, Temp>,
    /// Blocks from before the capture, for temporaries that are to be moved into the graph.
    brought: BTreeMap<usize, DeviceBlock>,
    events: BTreeMap<usize, Event>,
    /// Where `Left` variables are.
    left: BTreeMap<usize, DevicePtr>,
    /// The keys of outside variables in this capture.
    shared: BTreeMap<usize, BufferKey>,
    /// Those of what this section leaves.
    pub leaves: Vec<(usize, BufferKey)>,
}

enum Temp {
    Block(DeviceBlock),
    Key(BufferKey),
}

impl<'m> Player<'m> {
    pub fn new(machine: &'m Machine, lanes: Vec<Stream>, by_forks: bool, left: BTreeMap<usize, DevicePtr>) -> Self {
        Self {
            machine,
            lanes,
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

    /// Without a graph. All is given back afterwards.
    pub fn do_now(mut self, ops: &[Op]) {
        self.play(ops, &mut None);
        for (_, temp) in std::mem::take(&mut self.temps) {
            let Temp::Block(block) = temp else { panic!("no graph owns anything here") };
            // All lanes were joined into the first.
            block.record_use(&self.lanes[0]).unwrap();
        }
    }

    /// Allocates some of what will be moved into the graph, before the capture begins: memory that everybody else's
    /// comes from and goes back to.
    pub fn bring(&mut self, ops: &[Op]) {
        for op in ops {
            match *op {
                Op::Alloc { temp, lane, bytes, how: How::Moved } if temp % 2 == 1 => {
                    let stream = &self.lanes[lane];
                    let block = self.machine.allocator.allocate(bytes, stream).unwrap();
                    // Replays go to other streams, which must come behind what this one did with the memory before.
                    stream.synchronize().unwrap();
                    self.brought.insert(temp, block);
                }
                Op::Elsewhere(ref ops) => self.bring(ops),
                _ => {}
            }
        }
    }

    /// Into a capture, to its end.
    pub fn capture(&mut self, ops: &[Op], capture: &mut Capture<'_>) {
        self.begin(ops, capture);
        assert!(self.forks.is_empty(), "all are joined");
    }

    /// Into a capture, which may end anywhere.
    pub fn begin(&mut self, ops: &[Op], capture: &mut Capture<'_>) {
        for (index, block) in self.machine.outside.iter().enumerate() {
            self.shared.insert(index, capture.share(block.clone()).unwrap());
        }
        self.play(ops, &mut Some(capture));
    }

    /// What is the program's own of a capture.
    pub fn held(&mut self) -> Vec<DeviceBlock> {
        let block = |temp| match temp {
            Temp::Block(block) => Some(block),
            Temp::Key(_) => None,
        };
        std::mem::take(&mut self.temps).into_values().filter_map(block).collect()
    }

    fn play(&mut self, ops: &[Op], capture: &mut Option<&mut Capture<'_>>) {
        for op in ops {
            self.op(op, capture);
        }
    }

    fn op(&mut self, op: &Op, capture: &mut Option<&mut Capture<'_>>) {
        match *op {
            Op::Work { lane, work, scoped } => self.work(lane, work, scoped, capture),
            Op::Alloc { temp, lane, bytes, how } => self.allocate(temp, lane, bytes, how, capture),
            Op::RecordUse { temp, lane } => {
                let stream = &self.lanes[lane];
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
            Op::Fork { lane, from } => match capture {
                Some(capture) if self.by_forks => {
                    let fork = capture.fork().unwrap();
                    self.lanes[lane] = Stream::clone(&fork);
                    self.forks.insert(lane, fork);
                }
                _ => self.lanes[lane].wait_stream(&self.lanes[from]).unwrap(),
            },
            Op::Join { lane } => match (capture, self.forks.remove(&lane)) {
                (Some(capture), Some(fork)) => capture.join(fork).unwrap(),
                _ => self.lanes[0].wait_stream(&self.lanes[lane]).unwrap(),
            },
            Op::Wait { lane, on } => self.lanes[lane].wait_stream(&self.lanes[on]).unwrap(),
            Op::Mark { event, lane } => {
                let mut mark = self.machine.instance.event();
                mark.record(&self.lanes[lane]).unwrap();
                self.events.insert(event, mark);
            }
            Op::Await { event, lane } => self.events[&event].wait(&self.lanes[lane]).unwrap(),
            Op::If { flag, byte, ref body } => self.conditional(flag, byte, false, body, capture),
            Op::While { flag, ref body } => self.conditional(flag, false, true, body, capture),
            Op::Elsewhere(ref ops) => {
                // Joined by hand: the scope's own end does not wait for what the thread leaves to its destructors.
                let ran = std::thread::scope(|scope| scope.spawn(|| self.play(ops, capture)).join());
                ran.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        }
    }

    fn allocate(&mut self, temp: usize, lane: usize, bytes: u64, how: How, capture: &mut Option<&mut Capture<'_>>) {
        let stream = self.lanes[lane].clone();
        let made = match (how, capture) {
            (How::Left(_), None) => return,
            (How::Left(section), Some(capture)) => {
                let key = capture.allocate_on(bytes, &stream).unwrap();
                self.left.insert(section, capture.buffer(key).unwrap().ptr());
                self.leaves.push((section, key));
                return;
            }
            (How::Allocated, Some(capture)) => Temp::Key(capture.allocate_on(bytes, &stream).unwrap()),
            (How::Moved, Some(capture)) => {
                let brought = self.brought.remove(&temp);
                let block = brought.unwrap_or_else(|| self.machine.allocator.allocate(bytes, &stream).unwrap());
                Temp::Key(capture.keep(block).unwrap())
            }
            _ => Temp::Block(self.machine.allocator.allocate(bytes, &stream).unwrap()),
        };
        self.temps.insert(temp, made);
    }

    fn ptr(&self, var: Var, capture: Option<&Capture<'_>>) -> DevicePtr {
        match var {
            Var::Outside(index) => self.machine.outside[index].ptr(),
            Var::Left(section) => self.left[&section],
            Var::Temp(temp) => match &self.temps[&temp] {
                Temp::Block(block) => block.ptr(),
                Temp::Key(key) => capture.expect("keys are of captures").buffer(*key).unwrap().ptr(),
            },
        }
    }

    /// The key of a variable that the graph knows.
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

    fn work(&mut self, lane: usize, work: Work, scoped: bool, capture: &mut Option<&mut Capture<'_>>) {
        if scoped
            && let Some(capture) = capture.as_deref_mut()
            && self.work_in_scope(lane, work, capture)
        {
            return;
        }
        let at = |var| self.ptr(var, capture.as_deref());
        self.machine.issue(work, &at, &self.lanes[lane]).unwrap();
    }

    /// By the scope's own calls, if the graph knows all of it; whether it did.
    fn work_in_scope(&self, lane: usize, work: Work, capture: &mut Capture<'_>) -> bool {
        let (stream, kernels) = (&self.lanes[lane], &self.machine.kernels);
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
                self.play(body, &mut None);
                if !is_while {
                    break;
                }
            }
            return;
        };
        let key = self.key(flag).expect("flags have keys");
        let flag = if byte { Flag::byte(key) } else { Flag::word(key) };
        let inside = |capture: &mut Capture<'_>| {
            let outer = std::mem::replace(&mut self.lanes[0], capture.stream().clone());
            self.play(body, &mut Some(capture));
            self.lanes[0] = outer;
            Ok(())
        };
        if is_while { capture.while_node(flag, inside) } else { capture.if_node(flag, inside) }.unwrap();
    }

    /// Waits for the first lane, and looks.
    fn is_set(&self, flag: Var, byte: bool) -> bool {
        self.lanes[0].synchronize().unwrap();
        let word = self.machine.words(self.ptr(flag, None))[0];
        if byte { word as u8 != 0 } else { word != 0 }
    }
}
