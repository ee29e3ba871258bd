//! Numbers for users' own kernels: a range of a generator is reserved, and its start is passed to the kernel.

use std::sync::Arc;

use super::Generator;
use super::in_capture;
use super::reservation::Reservation;
use super::state::{DrawnRange, PhiloxState};
use crate::capture::CaptureRecord;
use crate::error::GeneratorError;
use crate::{Result, Stream};

/// A reservation that can still be undone.
pub(super) struct UndoableReservation {
    pub(super) reservation: Reservation,
    source: Source,
}

/// Where the numbers were drawn from.
enum Source {
    State(Arc<PhiloxState>, DrawnRange),
    Capture(Arc<CaptureRecord>, Arc<PhiloxState>, u64),
}

impl UndoableReservation {
    /// Undoes the reservation, unless others have drawn since. For numbers that no kernel uses.
    pub(super) fn undo(self) {
        match self.source {
            Source::State(state, drawn) => state.undo(drawn),
            Source::Capture(record, state, increment) => {
                if let Reservation::Captured { intragraph, .. } = self.reservation {
                    in_capture::undo(&record, &state, intragraph, increment);
                }
            }
        }
    }
}

impl Generator {
    /// Reserves the next `increment` numbers of every subsequence for a kernel on `stream`, and returns where they
    /// start. `increment` is rounded up to a multiple of 4; the offset wraps at 2⁶⁴, as PyTorch's does. Which threads
    /// use which subsequences is up to the kernel.
    ///
    /// If the stream is capturing, the numbers are counted for its graph, and each replay starts at the generator's
    /// position at that time. The first reservation of a generator on a stream of a capture captures a seed kernel on
    /// that stream, before the work that uses it: no other thread may enqueue work in the stream meanwhile, as the
    /// kernel's node could not be distinguished from that of the other work. A graph that reserves only 0 numbers is
    /// not updated at replays.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use warpool::driver::sim::{SimConfig, SimDriver};
    /// # use warpool::driver::KernelSource;
    /// # use warpool::{Instance, generator::{Generator, Reservation}};
    /// // As KernelSource::cuda, with its host implementation beside it:
    /// const SHUFFLE: &str = concat!(warpool::philox_cuda!(), r#"
    ///     extern "C" __global__ void shuffle(
    ///         unsigned *x, const unsigned long long *slot, unsigned long long seed, unsigned long long offset) {
    ///         x[threadIdx.x] ^= warpool_words(warpool_position(slot, seed, offset), threadIdx.x).x;
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
        Ok(self.reserve_undoable(increment, stream)?.reservation)
    }

    pub(super) fn reserve_undoable(&self, increment: u64, stream: &Stream) -> Result<UndoableReservation> {
        self.expect_stream(stream)?;
        let increment = increment.checked_next_multiple_of(4).ok_or(GeneratorError::Increment { increment })?;
        let state = self.current();
        // Always reads the status from the driver: numbers captured by mistake would be the same at every replay.
        let Some(capture) = self.device().instance().captures().find(stream)? else {
            let drawn = state.draw(increment);
            let reservation = Reservation::Immediate { seed: drawn.seed, offset: drawn.offset };
            return Ok(UndoableReservation { reservation, source: Source::State(state, drawn) });
        };
        let reservation = in_capture::draw(&capture, &state, stream, increment)?;
        Ok(UndoableReservation { reservation, source: Source::Capture(capture.record, state, increment) })
    }
}
