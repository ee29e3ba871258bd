//! What callers hold through a layer, in the bytes that they asked for. What they got past it is not here, and does not
//! count when it comes back through it.

use rustc_hash::FxHashMap;

use super::GivenBack;
use crate::memory::Allocation;

#[derive(Default)]
pub(super) struct Held {
    by_ptr: FxHashMap<u64, Allocation>,
    bytes: u64,
}

impl Held {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn blocks(&self) -> usize {
        self.by_ptr.len()
    }

    pub(super) fn add(&mut self, allocation: Allocation) {
        if allocation.ptr.is_null() {
            return;
        }
        self.bytes += allocation.bytes_requested;
        // Whatever stood there was given back past us.
        if let Some(lost) = self.by_ptr.insert(allocation.ptr.0, allocation) {
            self.bytes -= lost.bytes_requested;
        }
    }

    /// Takes out what comes back, if it is here: before the inner allocator has it, since from then on the address may
    /// be given out again.
    pub(super) fn take(&mut self, what: GivenBack) -> Option<Allocation> {
        let known = *self.by_ptr.get(&what.ptr().0)?;
        let is_it = match what {
            GivenBack::At(_) | GivenBack::On(..) => true,
            GivenBack::Owned(allocation) | GivenBack::Later(allocation) => allocation == known,
        };
        if !is_it {
            return None;
        }
        self.by_ptr.remove(&known.ptr.0);
        self.bytes -= known.bytes_requested;
        Some(known)
    }
}
