//! The memory that a graph owns, of the device and of the host: blocks that were moved or lent into it, by keys.
//!
//! A key is a number, so it can be kept beside the graph without borrowing it; the block itself is only ever lent by
//! the graph. Keys of one capture mean nothing to another. What is special about the host's is in `host.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::{DevicePtr, HostPtr, KernelArg};

use super::GraphError;
use super::host::{HostAt, HostKey};
use crate::memory::{DeviceBlock, HostBlock};
use crate::{Result, Stream};

/// The name of a buffer in one capture, and in the graph that comes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferKey {
    capture: u64,
    index: u32,
}

impl BufferKey {
    /// A place in the buffer, `offset` bytes from its start.
    #[must_use]
    pub const fn at(self, offset: u64) -> BufferAt {
        BufferAt { key: self, offset }
    }
}

/// A place in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferAt {
    /// The buffer.
    pub key: BufferKey,
    /// How many bytes from its start.
    pub offset: u64,
}

impl From<BufferKey> for BufferAt {
    fn from(key: BufferKey) -> Self {
        key.at(0)
    }
}

/// The slot of a generator in one capture. It belongs to the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeneratorSlot(pub(crate) DevicePtr);

/// An argument of a captured kernel. Memory is named by buffers that the graph owns, so it cannot be gone when the
/// graph is replayed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GraphArg {
    /// The address of a place in a buffer.
    Buffer(BufferAt),
    /// The address, for the device, of a place in pinned host memory.
    Host(HostAt),
    /// Where a generator tells replays where they start; `None` where it told the kernel by value. See
    /// [`Reservation::graph_args`](crate::generator::Reservation::graph_args).
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
    BufferAt => Buffer,
    HostKey => Host,
    HostAt => Host,
    u32 => U32,
    i32 => I32,
    u64 => U64,
    i64 => I64,
    f32 => F32,
    f64 => F64,
}

/// The buffers of one capture.
pub(super) struct Buffers {
    capture: u64,
    device: Vec<Owned<DeviceBlock>>,
    host: Vec<Owned<HostBlock>>,
}

/// A block that a graph needs.
pub(super) enum Owned<B> {
    Moved(B),
    Shared(Arc<B>),
}

impl<B> Owned<B> {
    fn block(&self) -> &B {
        match self {
            Self::Moved(block) => block,
            Self::Shared(block) => block,
        }
    }
}

impl Buffers {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { capture: NEXT.fetch_add(1, Ordering::Relaxed), device: Vec::new(), host: Vec::new() }
    }

    pub(super) fn add(&mut self, block: Owned<DeviceBlock>) -> BufferKey {
        self.device.push(block);
        BufferKey { capture: self.capture, index: last(&self.device) }
    }

    pub(super) fn add_host(&mut self, block: Owned<HostBlock>) -> HostKey {
        self.host.push(block);
        HostKey { capture: self.capture, index: last(&self.host) }
    }

    pub(super) fn get(&self, key: BufferKey) -> Result<&DeviceBlock> {
        let owned = self.device.get(key.index as usize).filter(|_| key.capture == self.capture);
        Ok(owned.ok_or(GraphError::UnknownBuffer)?.block())
    }

    pub(super) fn get_host(&self, key: HostKey) -> Result<&HostBlock> {
        let owned = self.host.get(key.index as usize).filter(|_| key.capture == self.capture);
        Ok(owned.ok_or(GraphError::UnknownBuffer)?.block())
    }

    /// The address of a place with `bytes` behind it.
    pub(super) fn address(&self, at: BufferAt, bytes: u64) -> Result<DevicePtr> {
        let block = self.get(at.key)?;
        expect_room(at.offset, bytes, block.bytes())?;
        Ok(block.ptr().offset(at.offset))
    }

    /// The same on the host.
    pub(super) fn host_address(&self, at: HostAt, bytes: u64) -> Result<HostPtr> {
        let block = self.get_host(at.key)?;
        expect_room(at.offset, bytes, block.bytes())?;
        Ok(block.ptr().offset(at.offset))
    }

    /// The argument as a driver takes it.
    pub(super) fn argument(&self, arg: GraphArg) -> Result<KernelArg> {
        Ok(match arg {
            // How far a kernel goes from there, nobody can check.
            GraphArg::Buffer(at) => KernelArg::Ptr(self.address(at, 0)?),
            // Pinned memory has one address for everybody.
            GraphArg::Host(at) => KernelArg::Ptr(DevicePtr(self.host_address(at, 0)?.0)),
            GraphArg::Slot(slot) => KernelArg::Ptr(slot.map_or(DevicePtr(0), |slot| slot.0)),
            GraphArg::U32(value) => KernelArg::U32(value),
            GraphArg::I32(value) => KernelArg::I32(value),
            GraphArg::U64(value) => KernelArg::U64(value),
            GraphArg::I64(value) => KernelArg::I64(value),
            GraphArg::F32(value) => KernelArg::F32(value),
            GraphArg::F64(value) => KernelArg::F64(value),
        })
    }

    /// Notes that replays run on `stream`: whoever gets the memory after the graph waits for them.
    pub(super) fn record_use(&self, stream: &Stream) -> Result<()> {
        self.device.iter().try_for_each(|owned| owned.block().record_use(stream))?;
        self.host.iter().try_for_each(|owned| owned.block().record_use(stream))
    }
}

/// The number of the newest.
fn last<B>(blocks: &[Owned<B>]) -> u32 {
    u32::try_from(blocks.len() - 1).expect("fewer than 2^32 buffers in one graph")
}

/// Fails unless a buffer of `available` bytes has `bytes` behind `offset`.
fn expect_room(offset: u64, bytes: u64, available: u64) -> Result<()> {
    match offset.checked_add(bytes) {
        Some(end) if end <= available => Ok(()),
        _ => Err(GraphError::OutOfBounds { offset, bytes, available }.into()),
    }
}
