//! The memory that a graph owns, on the device and on the host: blocks that were moved into it or shared with it.
//!
//! The graph hands out references only, by key, so a block cannot outlive its graph.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::{DevicePtr, HostPtr, KernelArg, StreamId};

use super::args::GraphArg;
use super::keys::{BufferKey, BufferOffset, HostKey, HostOffset};
use crate::error::GraphError;
use crate::memory::{BlockHold, DeviceBlock, HostBlock};
use crate::unwind::call_each;
use crate::{Instance, Result};

/// The buffers of one capture.
pub(super) struct Buffers {
    capture: u64,
    /// Each block with its hold, which is dropped first.
    device: Vec<(BlockHold, Owned<DeviceBlock>)>,
    host: Vec<Owned<HostBlock>>,
}

/// A block of a graph.
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

    pub(super) fn add(&mut self, block: Owned<DeviceBlock>) -> Result<BufferKey> {
        let hold = BlockHold::new(block.block())?;
        self.device.push((hold, block));
        Ok(BufferKey { capture: self.capture, index: last_index(&self.device) })
    }

    pub(super) fn add_host(&mut self, block: Owned<HostBlock>) -> HostKey {
        self.host.push(block);
        HostKey { capture: self.capture, index: last_index(&self.host) }
    }

    pub(super) fn get(&self, key: BufferKey) -> Result<&DeviceBlock> {
        let owned = self.device.get(key.index as usize).filter(|_| key.capture == self.capture);
        let (_, owned) = owned.ok_or(GraphError::UnknownBuffer)?;
        Ok(owned.block())
    }

    pub(super) fn get_host(&self, key: HostKey) -> Result<&HostBlock> {
        let owned = self.host.get(key.index as usize).filter(|_| key.capture == self.capture);
        Ok(owned.ok_or(GraphError::UnknownBuffer)?.block())
    }

    /// The address of `bytes` bytes in a buffer.
    pub(super) fn address(&self, at: BufferOffset, bytes: u64) -> Result<DevicePtr> {
        let block = self.get(at.key)?;
        check_bounds(at.offset, bytes, block.bytes())?;
        Ok(block.ptr().offset(at.offset))
    }

    /// The address of `bytes` bytes in a buffer of pinned memory.
    pub(super) fn host_address(&self, at: HostOffset, bytes: u64) -> Result<HostPtr> {
        let block = self.get_host(at.key)?;
        check_bounds(at.offset, bytes, block.bytes())?;
        Ok(block.ptr().offset(at.offset))
    }

    /// The argument as the driver takes it.
    pub(super) fn argument(&self, arg: GraphArg) -> Result<KernelArg> {
        Ok(match arg {
            // The size that the kernel uses is unknown.
            GraphArg::Buffer(at) => KernelArg::Ptr(self.address(at, 0)?),
            // Pinned memory has the same address on the device.
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

    /// Fails if one of them is asleep. `what` names the operation that the caller cannot do then.
    pub(super) fn expect_awake(&self, instance: &Instance, what: &'static str) -> Result<()> {
        self.device.iter().try_for_each(|(_, owned)| instance.expect_awake_at(owned.block().ptr(), what))
    }

    /// Records that replays on `streams` use the buffers: their memory is reused only after the replays. Makes no
    /// driver call.
    pub(super) fn record_replays(&self, streams: &[StreamId]) {
        self.host.iter().for_each(|owned| owned.block().record_replays(streams));
        call_each(&self.device, |(_, owned)| owned.block().record_replays(streams));
    }
}

fn last_index<B>(blocks: &[B]) -> u32 {
    u32::try_from(blocks.len() - 1).expect("fewer than 2^32 buffers in one graph")
}

/// Fails unless `bytes` bytes at `offset` lie in a buffer of `available` bytes.
fn check_bounds(offset: u64, bytes: u64, available: u64) -> Result<()> {
    match offset.checked_add(bytes) {
        Some(end) if end <= available => Ok(()),
        _ => Err(GraphError::OutOfBounds { offset, bytes, available }.into()),
    }
}
