//! Pinned vectors: written by the host and by copies.

use warpool::typed::BufferError;
use warpool::{Error, PinnedVec};

use super::{Run, expect_elements};
use crate::machine::Outcome;

pub struct Pinned {
    vec: PinnedVec<u32>,
    model: Vec<u32>,
}

impl Run<'_> {
    pub fn use_pinned(&mut self) {
        let at = self.context.rng.below(self.pinned.len().max(1));
        match self.context.rng.below(8) {
            0 | 1 if self.pinned.len() < 3 => self.pin(),
            _ if self.pinned.is_empty() => {}
            0 => {
                self.context.step(format!("pinned {at} is dropped"));
                self.pinned.swap_remove(at);
            }
            1 | 2 => self.check_pinned(at),
            3 => self.write_pinned(at),
            4 => self.try_pinned(at),
            kind => self.copy_pinned(at, kind == 5),
        }
    }

    fn pin(&mut self) {
        let len = 1 + self.context.rng.below(2000);
        let model = vec![self.context.rng.u32(); len];
        self.context.step(format!("{len} pinned elements"));
        let host = &self.host;
        if let Outcome::Done(vec) = self.machine.call(self.context, || PinnedVec::from_slice(host, &model)) {
            self.pinned.push(Pinned { vec, model });
        }
    }

    /// The host reads it, once no device writes it.
    pub fn check_pinned(&mut self, at: usize) {
        self.context.step(format!("the host reads pinned {at}"));
        let Pinned { vec, model } = &self.pinned[at];
        expect_elements(vec.wait().unwrap(), model, at);
    }

    /// The host writes it, once no device uses it.
    fn write_pinned(&mut self, at: usize) {
        self.context.step(format!("the host writes pinned {at}"));
        let value = self.context.rng.u32();
        let Pinned { vec, model } = &mut self.pinned[at];
        vec.wait_mut().unwrap().fill(value);
        model.fill(value);
    }

    /// The host writes it if no device uses it now.
    fn try_pinned(&mut self, at: usize) {
        let value = self.context.rng.u32();
        let Pinned { vec, model } = &mut self.pinned[at];
        match vec.try_slice_mut() {
            Ok(elements) => {
                elements.fill(value);
                model.fill(value);
            }
            Err(Error::Buffer(BufferError::InUse { .. })) => {}
            Err(error) => panic!("an error without a fault: {error}"),
        }
    }

    /// A copy of a part to a vector, or from it.
    fn copy_pinned(&mut self, at: usize, to_device: bool) {
        let Some(number) = self.any_vector() else { return };
        let stream = self.any_stream();
        let len = self.pinned[at].model.len().min(self.models[&number].len());
        let range = self.draw_range(len);
        self.context
            .step(format!("pinned {at}, {range:?}, vector {number}, to the device {to_device}, {}", stream.id()));
        let armed = self.machine.arm(self.context);
        let vector = self.vectors.get_mut(&number).expect("it is there");
        let Pinned { vec, model } = &mut self.pinned[at];
        let contents = self.models.get_mut(&number).expect("every vector has a model");
        let outcome = crate::caught::caught(|| match to_device {
            true => stream.copy(vec.slice(range.clone())?, vector.slice_mut(range.clone())?),
            false => stream.copy(vector.slice(range.clone())?, vec.slice_mut(range.clone())?),
        });
        if let Outcome::Done(()) = self.machine.settle(self.context, armed, outcome, false) {
            match to_device {
                true => contents[range.clone()].copy_from_slice(&model[range]),
                false => model[range.clone()].copy_from_slice(&contents[range]),
            }
        } else if to_device {
            self.overwrite(number);
        } else {
            self.write_pinned(at);
        }
    }
}
