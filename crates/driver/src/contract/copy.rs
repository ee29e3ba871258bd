//! Copies and fills.

use crate::{Address, DeviceId, DevicePtr, Result, StreamId};

/// The pattern that a fill writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One byte.
    U8(u8),
    /// Two bytes; the address must be a multiple of 2.
    U16(u16),
    /// Four bytes; the address must be a multiple of 4.
    U32(u32),
}

impl Pattern {
    /// The size of the pattern.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::U8(_) => 1,
            Self::U16(_) => 2,
            Self::U32(_) => 4,
        }
    }
}

/// Copies and fills. A whole range must be in one allocation, in memory mapped in one reservation, or in pinned memory,
/// and the device must have access to it. Otherwise the call gives `InvalidValue`. That includes ordinary host memory,
/// even where the device could access it. Memory that other libraries allocated on the device is accepted.
pub trait Copies {
    /// Copies in the order of `stream`, in any direction. Host memory must be pinned. If source and target overlap, the
    /// result is undefined. *During capture: stream.*
    fn copy(&self, dst: Address, src: Address, bytes: u64, stream: StreamId) -> Result<()>;

    /// Copies between two devices, with or without peer access, in the order of `stream`. *During capture: stream.*
    fn copy_peer(
        &self,
        dst: DevicePtr,
        dst_device: DeviceId,
        src: DevicePtr,
        src_device: DeviceId,
        bytes: u64,
        stream: StreamId,
    ) -> Result<()>;

    /// Copies `rows` rows of `width` bytes, each `pitch` bytes after the one before it, otherwise as
    /// [`copy`](Self::copy). `InvalidValue` if a pitch is less than the width. Without rows or width it does nothing.
    /// *During capture: stream.*
    #[expect(clippy::too_many_arguments, reason = "two addresses with their pitches, and a size")]
    fn copy_2d(
        &self,
        dst: Address,
        dst_pitch: u64,
        src: Address,
        src_pitch: u64,
        width: u64,
        rows: u64,
        stream: StreamId,
    ) -> Result<()>;

    /// Writes `count` copies of `pattern`, in the order of `stream`. *During capture: stream.*
    fn fill(&self, dst: DevicePtr, pattern: Pattern, count: u64, stream: StreamId) -> Result<()>;

    /// Copies ordinary host memory to the device and returns when the copy is complete. In the order of the legacy
    /// default stream, so it does not wait for non-blocking streams. *During capture: stream* (the default one).
    fn upload(&self, device: DeviceId, dst: DevicePtr, bytes: &[u8]) -> Result<()>;

    /// Copies device memory to ordinary host memory, otherwise as [`upload`](Self::upload). *During capture: stream*
    /// (the default one).
    fn download(&self, device: DeviceId, src: DevicePtr, into: &mut [u8]) -> Result<()>;
}
