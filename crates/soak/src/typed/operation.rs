//! Operations on vectors: queued in a stream, or in a capture, and applied to the model.

use std::ops::Range;

use warpool::{DeviceVec, Result, Stream};

use super::Run;

/// An operation of a typed call.
#[derive(Clone, Debug)]
pub enum Operation {
    Fill {
        to: usize,
        range: Range<usize>,
        value: u32,
    },
    /// From one vector to another.
    Copy {
        from: usize,
        start: usize,
        to: usize,
        range: Range<usize>,
    },
    /// The first half of a vector to its second.
    CopyWithin {
        to: usize,
    },
    /// The elements of one vector are added to those of another.
    Add {
        from: usize,
        start: usize,
        to: usize,
        range: Range<usize>,
    },
    /// Random bits.
    Random {
        to: usize,
    },
}

impl Operation {
    /// The vector that it writes.
    pub fn target(&self) -> usize {
        match *self {
            Self::Fill { to, .. }
            | Self::Copy { to, .. }
            | Self::CopyWithin { to }
            | Self::Add { to, .. }
            | Self::Random { to } => to,
        }
    }

    /// The other vector that it reads, if there is one.
    pub fn source(&self) -> Option<usize> {
        match *self {
            Self::Copy { from, .. } | Self::Add { from, .. } => Some(from),
            Self::Fill { .. } | Self::CopyWithin { .. } | Self::Random { .. } => None,
        }
    }
}

impl Run<'_> {
    /// Mostly a small part, so that many parts of a vector have uses of their own.
    pub fn draw_range(&mut self, len: usize) -> Range<usize> {
        let rng = &mut self.context.rng;
        if rng.one_in(4) {
            return 0..len;
        }
        let start = rng.below(len);
        let most = if rng.one_in(3) { len - start } else { (len - start).min(1 + len / 8) };
        start..start + 1 + rng.below(most)
    }

    pub fn draw_operation(&mut self) -> Option<Operation> {
        let to = self.any_vector()?;
        let mut range = self.draw_range(self.models[&to].len());
        let others: Vec<usize> = self.vectors.keys().copied().filter(|&number| number != to).collect();
        let kind = self.context.rng.below(8);
        if kind < 5 && !others.is_empty() {
            let from = self.context.rng.pick(&others);
            let len = range.len().min(self.models[&from].len());
            let start = self.context.rng.below(self.models[&from].len() - len + 1);
            range.end = range.start + len;
            return Some(match kind {
                0..3 => Operation::Copy { from, start, to, range },
                _ => Operation::Add { from, start, to, range },
            });
        }
        Some(match kind {
            6 if self.models[&to].len() > 1 => Operation::CopyWithin { to },
            7 if self.context.rng.one_in(3) => Operation::Random { to },
            _ => Operation::Fill { to, range, value: self.context.rng.u32() },
        })
    }

    /// Queues it in a stream.
    pub fn queue(&mut self, operation: &Operation, stream: &Stream) -> Result<()> {
        let to = operation.target();
        let mut target = self.vectors.remove(&to).expect("it is there");
        let outcome = self.queue_on(operation, stream, &mut target);
        self.vectors.insert(to, target);
        outcome
    }

    fn queue_on(&self, operation: &Operation, stream: &Stream, target: &mut DeviceVec<u32>) -> Result<()> {
        match operation {
            Operation::Fill { range, value, .. } => stream.fill(target.slice_mut(range.clone())?, *value),
            Operation::Copy { from, start, range, .. } => {
                let source = self.vectors[from].slice(*start..start + range.len())?;
                stream.copy(source, target.slice_mut(range.clone())?)
            }
            Operation::CopyWithin { .. } => {
                let half = target.len() / 2;
                let (left, right) = target.split_at_mut(half)?;
                let mut right = right;
                stream.copy(&left, right.slice_mut(..half)?)
            }
            Operation::Add { from, start, range, .. } => {
                let source = self.vectors[from].slice(*start..start + range.len())?;
                self.add.launch_linear(stream, range.len(), (source, target.slice_mut(range.clone())?))
            }
            Operation::Random { .. } => stream.random_bits(&self.generator, target),
        }
    }

    /// Applies it to the model.
    pub fn apply(&mut self, operation: &Operation) {
        let drawn = match operation {
            Operation::Random { to } => self.draw_twin(self.models[to].len()),
            _ => Vec::new(),
        };
        let source = match operation {
            Operation::Copy { from, start, range, .. } | Operation::Add { from, start, range, .. } => {
                self.models[from][*start..start + range.len()].to_vec()
            }
            _ => Vec::new(),
        };
        let model = self.models.get_mut(&operation.target()).expect("every vector has a model");
        match operation {
            Operation::Fill { range, value, .. } => model[range.clone()].fill(*value),
            Operation::Copy { range, .. } => model[range.clone()].copy_from_slice(&source),
            Operation::CopyWithin { .. } => {
                let half = model.len() / 2;
                model.copy_within(..half, half);
            }
            Operation::Add { range, .. } => {
                model[range.clone()].iter_mut().zip(source).for_each(|(to, from)| *to = to.wrapping_add(from));
            }
            Operation::Random { .. } => model.copy_from_slice(&drawn),
        }
    }

    /// Draws from the twin the numbers that the generator has drawn.
    fn draw_twin(&self, len: usize) -> Vec<u32> {
        let stream = self.machine.stream(0, 0);
        let mut drawn = DeviceVec::<u32>::zeroed(&self.subject.allocator, len, stream).unwrap();
        stream.random_bits(&self.twin, &mut drawn).unwrap();
        stream.to_vec(&drawn).unwrap()
    }
}
