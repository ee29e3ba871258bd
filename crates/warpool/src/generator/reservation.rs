//! Where a kernel's random numbers start: the value that a reservation returns, and the CUDA code that reads it.

use warpool_driver::{DevicePtr, KernelArg};

/// CUDA C++ for kernels that draw: `WarpoolPosition`, `warpool_position(slot, seed, offset)`,
/// `warpool_words(position, subsequence)`, `warpool_uniform(word)`, `warpool_normals(first, second)`. As a literal, for
/// `concat!`, it is [`philox_cuda!`](crate::philox_cuda).
pub const PHILOX_CUDA: &str = crate::philox_cuda!();

/// Seed and offset of a replay in device memory, 8 bytes each. Owned by the graph of one capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeneratorSlot(pub(crate) DevicePtr);

/// Where reserved numbers start. See [`Generator::reserve`](super::Generator::reserve).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reservation {
    /// Seed and offset are known now.
    Immediate {
        /// The seed.
        seed: u64,
        /// The first number's offset.
        offset: u64,
    },
    /// Seed and offset are set at every replay, for kernels on the stream that was passed.
    Captured {
        /// Where seed and offset of the replay are, 8 bytes each. Owned by the graph.
        slot: DevicePtr,
        /// The number to add to that offset.
        intragraph: u64,
    },
}

impl Reservation {
    /// The three arguments of `warpool_position` in [`PHILOX_CUDA`], in CUDA `(const unsigned long long *slot, unsigned
    /// long long seed, unsigned long long offset)`. In captures use [`graph_args`](Self::graph_args).
    #[must_use]
    pub const fn args(&self) -> [KernelArg; 3] {
        match *self {
            Self::Immediate { seed, offset } => {
                [KernelArg::Ptr(DevicePtr(0)), KernelArg::U64(seed), KernelArg::U64(offset)]
            }
            Self::Captured { slot, intragraph } => {
                [KernelArg::Ptr(slot), KernelArg::U64(0), KernelArg::U64(intragraph)]
            }
        }
    }
}
