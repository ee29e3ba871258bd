//! Executes a section, eagerly or in a capture. The two differ in the owners of temporaries.

use std::collections::BTreeMap;

use warpool::driver::{BlasMatrix, DevicePtr, KernelArg, LaunchShape, Sgemm};
use warpool::graph::{BufferKey, Capture, Flag, Fork, GraphArg};
use warpool::memory::{Allocate as _, DeviceBlock};
use warpool::{Event, Result, Stream};

use super::Gpu;
use super::section::{Op, Owner};
use super::work::{BYTES, Var, Work, fill, kernel};
use crate::unsafe_calls::{capture_kernel, raw_target};

/// One eager run, or one capture, of one section.
pub struct Executor<'a> {
    gpu: &'a Gpu,
    /// The streams of the branches. In a body the first one is the body's own.
    pub branches: Vec<Stream>,
    forks: BTreeMap<usize, Fork>,
    /// Whether branches that do not wait for a mark are forks of the capture.
    by_forks: bool,
    temps: BTreeMap<usize, Temp>,
    /// Blocks from before the capture.
    brought: BTreeMap<usize, DeviceBlock>,
    marks: BTreeMap<usize, Event>,
    /// Where the variables are that graphs left.
    left: BTreeMap<usize, DevicePtr>,
    /// The keys of the outside variables in this capture.
    shared: Vec<BufferKey>,
    /// The key of the variable that this section leaves.
    pub leaves: Option<BufferKey>,
}

enum Temp {
    Block(DeviceBlock),
    Key(BufferKey),
}

type InCapture<'c, 's> = Option<&'c mut Capture<'s>>;

impl<'a> Executor<'a> {
    pub fn new(gpu: &'a Gpu, branches: Vec<Stream>, by_forks: bool, left: BTreeMap<usize, DevicePtr>) -> Self {
        Self {
            gpu,
            branches,
            forks: BTreeMap::new(),
            by_forks,
            temps: BTreeMap::new(),
            brought: BTreeMap::new(),
            marks: BTreeMap::new(),
            left,
            shared: Vec::new(),
            leaves: None,
        }
    }

    /// Runs eagerly, and frees everything after that.
    pub fn run(mut self, ops: &[Op]) {
        self.all(ops, &mut None);
        for temp in std::mem::take(&mut self.temps).into_values() {
            let Temp::Block(block) = temp else { panic!("no graph owns anything here") };
            // All branches were joined into the first.
            block.record_use(&self.branches[0]).unwrap();
        }
    }

    /// Allocates the blocks that come from before the capture.
    pub fn bring(&mut self, ops: &[Op]) {
        for op in ops {
            match *op {
                Op::Alloc { temp, branch, bytes, owner: Owner::Brought } => {
                    let stream = &self.branches[branch];
                    let block = self.gpu.allocator.allocate(bytes, stream).unwrap();
                    // Replays in other streams must come after earlier uses of the memory in this one.
                    stream.synchronize().unwrap();
                    self.brought.insert(temp, block);
                }
                Op::Elsewhere(ref ops) => self.bring(ops),
                _ => {}
            }
        }
    }

    /// Executes in a capture.
    pub fn capture(&mut self, ops: &[Op], capture: &mut Capture<'_>) {
        self.shared = self.gpu.outside.iter().map(|block| capture.share(block.clone()).unwrap()).collect();
        self.all(ops, &mut Some(capture));
    }

    /// The blocks of a capture that the program owns.
    pub fn held(&mut self) -> Vec<DeviceBlock> {
        let block = |temp| if let Temp::Block(block) = temp { Some(block) } else { None };
        std::mem::take(&mut self.temps).into_values().filter_map(block).collect()
    }

    fn all(&mut self, ops: &[Op], capture: &mut InCapture<'_, '_>) {
        ops.iter().for_each(|op| self.op(op, capture));
    }

    fn op(&mut self, op: &Op, capture: &mut InCapture<'_, '_>) {
        match *op {
            Op::Work { branch, work, scoped } => {
                let is_done =
                    scoped && capture.as_deref_mut().is_some_and(|capture| self.scoped(branch, work, capture));
                if !is_done {
                    let at = |var| self.ptr(var, capture.as_deref());
                    self.gpu.issue(work, &at, &self.branches[branch]).unwrap();
                }
            }
            Op::Alloc { temp, branch, bytes, owner } => self.allocate(temp, branch, bytes, owner, capture),
            Op::RecordUse { temp, branch } => {
                self.block(temp, capture.as_deref()).record_use(&self.branches[branch]).unwrap();
            }
            Op::Free { temp } => match self.temps.remove(&temp) {
                Some(Temp::Block(block)) if temp % 2 == 0 => drop(block),
                Some(Temp::Block(block)) => block.free().unwrap(),
                _ => panic!("the section owns it"),
            },
            Op::Fork { branch, mark: Some(mark) } => self.marks[&mark].wait(&self.branches[branch]).unwrap(),
            Op::Fork { branch, mark: None } => match capture {
                Some(capture) if self.by_forks => {
                    let fork = capture.fork().unwrap();
                    self.branches[branch] = Stream::clone(&fork);
                    self.forks.insert(branch, fork);
                }
                _ => self.branches[branch].wait_stream(&self.branches[0]).unwrap(),
            },
            Op::Join { branch } => match (capture, self.forks.remove(&branch)) {
                (Some(capture), Some(fork)) => capture.join(fork).unwrap(),
                _ => self.branches[0].wait_stream(&self.branches[branch]).unwrap(),
            },
            Op::Wait { branch, on } => self.branches[branch].wait_stream(&self.branches[on]).unwrap(),
            Op::Mark { mark, branch } => {
                let mut event = self.gpu.instance.event();
                event.record(&self.branches[branch]).unwrap();
                self.marks.insert(mark, event);
            }
            Op::Body { flag, byte, is_while, ref ops } => {
                let capture = capture.as_deref_mut().expect("bodies are captured");
                let key = self.key(flag).expect("flags have keys");
                let flag = if byte { Flag::byte(key) } else { Flag::word(key) };
                let body = |capture: &mut Capture<'_>| {
                    let outer = std::mem::replace(&mut self.branches[0], capture.stream().clone());
                    self.all(ops, &mut Some(capture));
                    self.branches[0] = outer;
                    Ok(())
                };
                if is_while { capture.while_node(flag, body) } else { capture.if_node(flag, body) }.unwrap();
            }
            Op::Elsewhere(ref ops) => {
                // Joined explicitly: the end of a scope does not wait for the thread's destructors.
                let ran = std::thread::scope(|scope| scope.spawn(|| self.all(ops, capture)).join());
                ran.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        }
    }

    fn allocate(&mut self, temp: usize, branch: usize, bytes: u64, owner: Owner, capture: &mut InCapture<'_, '_>) {
        let stream = self.branches[branch].clone();
        let Some(capture) = capture.as_deref_mut().filter(|_| !matches!(owner, Owner::Section | Owner::Program)) else {
            let block = self.gpu.allocator.allocate(bytes, &stream).unwrap();
            self.temps.insert(temp, Temp::Block(block));
            return;
        };
        let key = match owner {
            Owner::Moved | Owner::Brought => {
                let brought = self.brought.remove(&temp);
                let block = brought.unwrap_or_else(|| self.gpu.allocator.allocate(bytes, &stream).unwrap());
                capture.keep(block).unwrap()
            }
            _ => capture.allocate_on(bytes, &stream).unwrap(),
        };
        if let Owner::Left(number) = owner {
            self.left.insert(number, capture.buffer(key).unwrap().ptr());
            self.leaves = Some(key);
        }
        self.temps.insert(temp, Temp::Key(key));
    }

    fn block<'b>(&'b self, temp: usize, capture: Option<&'b Capture<'_>>) -> &'b DeviceBlock {
        match &self.temps[&temp] {
            Temp::Block(block) => block,
            Temp::Key(key) => capture.expect("keys are of captures").buffer(*key).unwrap(),
        }
    }

    fn ptr(&self, var: Var, capture: Option<&Capture<'_>>) -> DevicePtr {
        match var {
            Var::Outside(index) => self.gpu.outside[index].ptr(),
            Var::Left(number) => self.left[&number],
            Var::Temp(temp) => self.block(temp, capture).ptr(),
        }
    }

    /// The key of a variable, if the graph has it.
    fn key(&self, var: Var) -> Option<BufferKey> {
        match var {
            Var::Outside(index) => self.shared.get(index).copied(),
            Var::Left(_) => None,
            Var::Temp(temp) => match self.temps.get(&temp) {
                Some(Temp::Key(key)) => Some(*key),
                _ => None,
            },
        }
    }

    /// Uses the calls of the scope, if all variables have keys. Returns whether it did.
    fn scoped(&self, branch: usize, work: Work, capture: &mut Capture<'_>) -> bool {
        let stream = &self.branches[branch];
        match work {
            Work::Fill { to, value, width } => {
                let (Some(to), (pattern, count)) = (self.key(to), fill(value, width)) else { return false };
                capture.fill(to, pattern, count, stream).unwrap();
            }
            Work::Copy { to, from } => {
                let (Some(to), Some(from)) = (self.key(to), self.key(from)) else { return false };
                capture.copy(to, from, BYTES, stream).unwrap();
            }
            _ => {
                let mut arg = |var| self.key(var).map(GraphArg::from);
                let Some((function, args)) = kernel(&self.gpu.kernels, work, &mut arg) else { return false };
                capture_kernel(capture, function, &args, stream).unwrap();
            }
        }
        true
    }
}

impl Gpu {
    /// Queues work in a stream.
    pub fn issue(&self, work: Work, at: &dyn Fn(Var) -> DevicePtr, stream: &Stream) -> Result<()> {
        let (driver, id) = (self.instance.driver(), stream.id());
        match work {
            Work::Fill { to, value, width } => {
                let (pattern, count) = fill(value, width);
                driver.fill(at(to), pattern, count, id)?;
            }
            Work::Copy { to, from } => driver.copy(at(to).into(), at(from).into(), BYTES, id)?,
            Work::Draw { to, generator, words } => {
                self.generators[generator].fill_bits(raw_target(&**driver, at(to), words), stream)?;
            }
            Work::Salt { to, generator, increment } => {
                let [slot, seed, offset] = self.generators[generator].reserve(increment, stream)?.args();
                let args = [at(to).into(), slot, seed, offset];
                self.sim.kernel_launch(self.kernels.salt, LaunchShape::ONE, &args, id)?;
            }
            Work::Multiply { to, a, b, size: [m, n, k], transposed: [ta, tb], beta } => {
                let matrix = |var, transposed| BlasMatrix { ptr: at(var), stride: 4, transposed };
                let (a, b, c) = (matrix(a, ta), matrix(b, tb), matrix(to, false));
                self.blas.handle_on(stream)?.sgemm(&Sgemm { m, n, k, alpha: 1.0, a, b, beta, c })?;
            }
            _ => {
                let mut arg = |var| Some(KernelArg::Ptr(at(var)));
                let (function, args) = kernel(&self.kernels, work, &mut arg).expect("it is a kernel");
                self.sim.kernel_launch(function, LaunchShape::ONE, &args, id)?;
            }
        }
        Ok(())
    }
}
