//! Locks: the spin lock of the allocators, the gate between captures and typed calls, mutexes without
//! poisoning, and words that are read without a lock.

mod capture_gate;
pub(crate) mod primitives;
pub(crate) mod sequence;
pub(crate) mod spin_lock;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use capture_gate::{CaptureChange, CaptureGate, FrozenCaptures, FrozenForCall};
pub(crate) use primitives::{lock, try_lock};
