//! Names of the memory that a graph owns. A key is a number, so it can be kept beside the graph without borrowing it;
//! it is valid only for the capture that returned it, and for the graph of that capture.

/// A buffer of device memory in one capture, and in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferKey {
    pub(super) capture: u64,
    pub(super) index: u32,
}

impl BufferKey {
    /// The address `offset` bytes from its start.
    #[must_use]
    pub const fn at(self, offset: u64) -> BufferOffset {
        BufferOffset { key: self, offset }
    }
}

/// An address in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferOffset {
    /// The buffer.
    pub key: BufferKey,
    /// Bytes from its start.
    pub offset: u64,
}

impl From<BufferKey> for BufferOffset {
    fn from(key: BufferKey) -> Self {
        key.at(0)
    }
}

/// A buffer of pinned host memory in one capture, and in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostKey {
    pub(super) capture: u64,
    pub(super) index: u32,
}

impl HostKey {
    /// The address `offset` bytes from its start.
    #[must_use]
    pub const fn at(self, offset: u64) -> HostOffset {
        HostOffset { key: self, offset }
    }
}

/// An address in a buffer of pinned host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOffset {
    /// The buffer.
    pub key: HostKey,
    /// Bytes from its start.
    pub offset: u64,
}

impl From<HostKey> for HostOffset {
    fn from(key: HostKey) -> Self {
        key.at(0)
    }
}

/// Source or destination of a captured copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEndpoint {
    /// Device memory.
    Device(BufferOffset),
    /// Pinned host memory.
    Host(HostOffset),
}

impl From<BufferKey> for CopyEndpoint {
    fn from(key: BufferKey) -> Self {
        Self::Device(key.into())
    }
}

impl From<BufferOffset> for CopyEndpoint {
    fn from(at: BufferOffset) -> Self {
        Self::Device(at)
    }
}

impl From<HostKey> for CopyEndpoint {
    fn from(key: HostKey) -> Self {
        Self::Host(key.into())
    }
}

impl From<HostOffset> for CopyEndpoint {
    fn from(at: HostOffset) -> Self {
        Self::Host(at)
    }
}
