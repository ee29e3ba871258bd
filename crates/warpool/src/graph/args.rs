//! Arguments of captured kernels.

use super::keys::{BufferKey, BufferOffset, HostKey, HostOffset};
use crate::generator::{GeneratorSlot, Reservation};

/// An argument of a captured kernel. Memory is passed as a buffer that the graph owns, so it exists at every replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GraphArg {
    /// The address of device memory.
    Buffer(BufferOffset),
    /// The device address of pinned host memory.
    Host(HostOffset),
    /// The slot with seed and offset of a generator; `None` if the other arguments contain them. See
    /// [`Reservation::graph_args`].
    Slot(Option<GeneratorSlot>),
    /// `unsigned int`.
    U32(u32),
    /// `int`.
    I32(i32),
    /// `unsigned long long`.
    U64(u64),
    /// `long long`.
    I64(i64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
}

/// Declares which values become which arguments.
macro_rules! arguments_from {
    ($($ty:ty => $kind:ident,)*) => {$(
        impl From<$ty> for GraphArg {
            fn from(value: $ty) -> Self {
                Self::$kind(value.into())
            }
        }
    )*};
}

arguments_from! {
    BufferKey => Buffer,
    BufferOffset => Buffer,
    HostKey => Host,
    HostOffset => Host,
    u32 => U32,
    i32 => I32,
    u64 => U64,
    i64 => I64,
    f32 => F32,
    f64 => F64,
}

impl Reservation {
    /// As [`args`](Self::args), for [`Capture::launch`](super::Capture::launch).
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
