//! Numbers for one's own kernels: a stretch of a generator is reserved, and the kernel is told where it starts.

use std::sync::Arc;

use warpool_driver::{DevicePtr, KernelArg};

use super::capture;
use super::state::{State, Taken};
use super::{Generator, GeneratorError};
use crate::capture::CaptureRecord;
use crate::graph::{GeneratorSlot, GraphArg};
use crate::{Result, Stream};

/// CUDA C++ for kernels that draw: `WarpoolPlace`, `warpool_place(slot, seed, offset)`,
/// `warpool_words(place, subsequence)`, `warpool_uniform(word)`, `warpool_normals(first, second)`. As a literal, for
/// `concat!`, it is [`philox_cuda!`](crate::philox_cuda).
pub const PHILOX_CUDA: &str = crate::philox_cuda!();

/// Where reserved numbers start. See [`Generator::reserve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reservation {
    /// Known now.
    Immediate {
        /// The seed.
        seed: u64,
        /// The first number's offset.
        offset: u64,
    },
    /// Told at every replay, for kernels on the stream that was named.
    Captured {
        /// Where seed and offset of the replay stand, 8 bytes each. Belongs to the graph.
        slot: DevicePtr,
        /// What to add to that offset.
        intragraph: u64,
    },
}

impl Reservation {
    /// The three arguments that `warpool_place` of [`PHILOX_CUDA`] takes, in CUDA's words
    /// `(const unsigned long long *slot, unsigned long long seed, unsigned long long offset)`.
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

    /// The same for [`Capture::launch`](crate::graph::Capture::launch), where memory has an owner.
    #[must_use]
    pub const fn graph_args(&self) -> [GraphArg; 3] {
        match *self {
            Self::Immediate { seed, offset } => [GraphArg::Slot(None), GraphArg::U64(seed), GraphArg::U64(offset)],
            Self::Captured { slot, intragraph } => {
                [GraphArg::Slot(Some(GeneratorSlot(slot))), GraphArg::U64(0), GraphArg::U64(intragraph)]
            }
        }
    }
}

/// A reservation that can still be taken back.
pub(super) struct Reserved {
    pub(super) reservation: Reservation,
    from: From,
}

enum From {
    State(Arc<State>, Taken),
    Capture(Arc<CaptureRecord>, Arc<State>, u64),
}

impl Reserved {
    /// Nothing was done with it: as if it had not been, unless others have drawn since.
    pub(super) fn take_back(self) {
        match self.from {
            From::State(state, taken) => state.take_back(taken),
            From::Capture(record, state, increment) => {
                if let Reservation::Captured { intragraph, .. } = self.reservation {
                    capture::take_back(&record, &state, intragraph, increment);
                }
            }
        }
    }
}

impl Generator {
    /// Takes the next `increment` numbers of every subsequence for a kernel of one's own on `stream`, and says where
    /// they start. `increment` is rounded up to a multiple of 4; what comes after 2⁶⁴ begins again at 0, as PyTorch's
    /// does. Which threads take which subsequences is the kernel's affair.
    ///
    /// If the stream captures, the numbers are counted to its graph, and each replay starts where the generator then
    /// is. The first reservation of a generator on a stream of a capture captures a kernel of its own, on that stream,
    /// before what uses it: two threads must not put work into one stream during that, as nobody could say then whose
    /// work is whose. Nothing is told to a graph that reserved only 0 numbers.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use warpool::driver::sim::{SimConfig, SimDriver};
    /// # use warpool::driver::KernelSource;
    /// # use warpool::{Instance, generator::{Generator, Reservation}};
    /// // As KernelSource::cuda, with its double beside it:
    /// const SHUFFLE: &str = concat!(warpool::philox_cuda!(), r#"
    ///     extern "C" __global__ void shuffle(unsigned *x, const unsigned long long *slot, unsigned long long seed, unsigned long long offset) {
    ///         x[threadIdx.x] ^= warpool_words(warpool_place(slot, seed, offset), threadIdx.x).x;
    ///     }"#);
    /// # fn main() -> warpool::Result<()> {
    /// # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
    /// let device = instance.device(0)?;
    /// let generator = Generator::new(&device)?;
    /// generator.set_seed(7)?;
    /// let reserved = generator.reserve(1, &device.pool_stream()?)?;
    /// assert_eq!(reserved, Reservation::Immediate { seed: 7, offset: 0 });
    /// assert_eq!(generator.offset()?, 4);
    /// let [slot, seed, offset] = reserved.args(); // the kernel's last three arguments
    /// # Ok(())
    /// # }
    /// ```
    pub fn reserve(&self, increment: u64, stream: &Stream) -> Result<Reservation> {
        Ok(self.reserve_for(increment, stream)?.reservation)
    }

    pub(super) fn reserve_for(&self, increment: u64, stream: &Stream) -> Result<Reserved> {
        self.expect_stream(stream)?;
        let increment = increment.checked_next_multiple_of(4).ok_or(GeneratorError::Increment { increment })?;
        let state = self.current();
        // The driver is always asked: numbers that went into a capture unseen would be the same at every replay.
        let Some(site) = self.device().instance().captures().find(stream)? else {
            let taken = state.take(increment);
            let reservation = Reservation::Immediate { seed: taken.seed, offset: taken.offset };
            return Ok(Reserved { reservation, from: From::State(state, taken) });
        };
        let reservation = capture::draw(&site, &state, stream, increment)?;
        Ok(Reserved { reservation, from: From::Capture(site.record, state, increment) })
    }
}
