//! What can go wrong with generators.

use warpool_driver::{CaptureState, DeviceId, DevicePtr, StreamId};

/// Wrong use of a generator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeneratorError {
    /// Offsets count blocks of four numbers.
    #[error("offset must be a multiple of 4, not {offset}")]
    Offset {
        /// What was given.
        offset: u64,
    },

    /// Saved states have one of two lengths.
    #[error("RNG state is wrong size: it has 16 bytes (seed and offset) or 8 (the seed alone), not {bytes}")]
    StateSize {
        /// How many bytes came.
        bytes: usize,
    },

    /// What cannot be done while the thread's current stream captures.
    #[error(
        "cannot {what} during graph capture: the current stream's state is {state:?}; do it before the capture begins or after it ended"
    )]
    InCapture {
        /// What was tried.
        what: &'static str,
        /// Where the stream stands.
        state: CaptureState,
    },

    /// A graph follows its generator at every replay, so another seed in the middle of it means nothing.
    #[error(
        "cannot set the seed to {wanted} during graph capture, where it is {seed}: only the same seed is allowed there, and changes nothing; \
         set it before the capture, or before a replay"
    )]
    SeedInCapture {
        /// What was given.
        wanted: u64,
        /// What it is.
        seed: u64,
    },

    /// A body runs any number of times, and nobody can know how many numbers it draws.
    #[error(
        "random numbers are not supported in data-dependent bodies of conditional nodes; draw them outside of the body"
    )]
    InBody,

    /// A kernel of ours went into a capture, and somebody else's work into the same stream at the same moment.
    #[error(
        "cannot tell which node of the capture is ours: another thread works on {stream}; put work into a stream from one thread at a time"
    )]
    HeadLost {
        /// The stream.
        stream: StreamId,
    },

    /// A generator and a stream of two devices.
    #[error(
        "foreign generator: it belongs to {generator}, and the work is for {wanted}; use a generator of that device"
    )]
    ForeignDevice {
        /// The generator's device.
        generator: DeviceId,
        /// Where it was used.
        wanted: DeviceId,
    },

    /// A generator was brought from elsewhere.
    #[error(
        "foreign generator: it belongs to another Instance than what it is used with; use things of one Instance together"
    )]
    ForeignGpu,

    /// More than an offset can count.
    #[error(
        "cannot reserve {increment} numbers: offsets, and what one graph consumes, are counted in 64 bits; reserve fewer at a time"
    )]
    Increment {
        /// How many were asked for.
        increment: u64,
    },

    /// A chance is between 0 and 1.
    #[error("the probability to keep must be within [0, 1], not {keep}")]
    Probability {
        /// What was given, as text.
        keep: String,
    },

    /// More than one launch can make.
    #[error("cannot draw {count} numbers at once; {most} is the most")]
    Count {
        /// How many were asked for.
        count: u64,
        /// How many are possible.
        most: u64,
    },

    /// Numbers of four bytes need addresses of four bytes.
    #[error("cannot draw numbers of {bytes} bytes to {ptr}: the address is not a multiple of {bytes}")]
    Alignment {
        /// The address.
        ptr: DevicePtr,
        /// The size of a number.
        bytes: u64,
    },
}
