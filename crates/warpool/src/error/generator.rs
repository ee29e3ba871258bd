//! Errors of random number generators.

use warpool_driver::{CaptureState, DeviceId, DevicePtr, StreamId};

/// Wrong use of a generator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeneratorError {
    /// An offset counts in steps of four numbers.
    #[error("offset must be a multiple of 4, not {offset}")]
    Offset {
        /// The value.
        offset: u64,
    },

    /// A saved state has 16 or 8 bytes.
    #[error("RNG state is wrong size: it has 16 bytes (seed and offset) or 8 (the seed alone), not {bytes}")]
    StateSize {
        /// How many bytes were passed.
        bytes: usize,
    },

    /// A call that is not possible while the thread's current stream is capturing.
    #[error(
        "cannot {what} during graph capture: the current stream's state is {state:?}; \
         do it before the capture begins or after it ended"
    )]
    InCapture {
        /// The call.
        what: &'static str,
        /// The stream's capture state.
        state: CaptureState,
    },

    /// A graph reads the seed at every replay, so it cannot change in the middle of a capture.
    #[error(
        "cannot set the seed to {wanted} during graph capture, where it is {seed}: only the same seed is allowed, \
         and changes nothing; set it before the capture, or before a replay"
    )]
    SeedInCapture {
        /// The seed that was passed.
        wanted: u64,
        /// The current seed.
        seed: u64,
    },

    /// The body of a conditional node runs any number of times, so how many numbers it draws is unknown.
    #[error(
        "random numbers are not supported in data-dependent bodies of conditional nodes; draw them outside of the body"
    )]
    InBody,

    /// The node of a seed kernel is unknown, because another thread put work into the stream at the same time.
    #[error(
        "cannot find the node of a kernel that was just captured: another thread uses {stream}; \
         put work into a stream from one thread at a time"
    )]
    SeedKernelLost {
        /// The stream.
        stream: StreamId,
    },

    /// A generator and a stream of different devices.
    #[error(
        "foreign generator: it belongs to {generator}, and the work is for {wanted}; use a generator of that device"
    )]
    ForeignDevice {
        /// The generator's device.
        generator: DeviceId,
        /// The device of the work.
        wanted: DeviceId,
    },

    /// A generator of another [`Instance`](crate::Instance).
    #[error("foreign generator: it belongs to another Instance; only objects of one Instance can be used together")]
    ForeignInstance,

    /// An increment that does not fit into 64 bits.
    #[error(
        "cannot reserve {increment} numbers: offsets, and what one graph consumes, are counted in 64 bits; \
         reserve fewer at a time"
    )]
    Increment {
        /// The increment.
        increment: u64,
    },

    /// A probability outside of [0, 1].
    #[error("the probability to keep must be within [0, 1], not {keep}")]
    Probability {
        /// The value, as text.
        keep: String,
    },

    /// More numbers than one launch can draw.
    #[error("cannot draw {count} numbers at once; {most} is the most")]
    Count {
        /// How many were requested.
        count: u64,
        /// The limit.
        most: u64,
    },

    /// More numbers than a block has memory for.
    #[error(
        "{count} numbers are {bytes} bytes, and the block has {available} there; draw fewer, or use a larger block"
    )]
    OutOfBounds {
        /// How many were requested.
        count: u64,
        /// Their size.
        bytes: u64,
        /// The bytes of the block from there on.
        available: u64,
    },

    /// An address that is not aligned to the size of a number.
    #[error("cannot draw numbers of {bytes} bytes to {ptr}: the address is not a multiple of {bytes}")]
    Alignment {
        /// The address.
        ptr: DevicePtr,
        /// The size of a number.
        bytes: u64,
    },
}
