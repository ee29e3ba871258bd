//! The memory of one vector.
//!
//! Device memory that only its own stream has used, outside of captures, is private to that stream, and its uses need
//! no record: stream order protects it, and the allocator knows the stream. So a new buffer is only a block. From its
//! first use in another stream or in a capture it is tracked (`tracked.rs`), which costs an allocation, and its uses
//! are recorded. A buffer with a label is tracked too, but stays private. Pinned and elastic memory is tracked from the
//! start: the host, and decommits, check its uses.

use std::fmt;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, OnceLock};

use warpool_driver::{Address, DeviceId, DevicePtr};

use super::tracked::Tracked;
use crate::error::BufferError;
use crate::memory::elastic::ElasticMemory;
use crate::memory::{DeviceBlock, HostBlock};
use crate::{Instance, Result, Stream};

pub(super) struct Buffer {
    /// The block, if it is ordinary device memory. Owned here until it is tracked; then `tracked` owns it.
    block: Option<DeviceBlock>,
    tracked: OnceLock<Arc<Tracked>>,
}

impl Buffer {
    #[inline]
    pub(super) fn device(block: DeviceBlock) -> Self {
        Self { block: Some(block), tracked: OnceLock::new() }
    }

    pub(super) fn elastic(memory: Arc<ElasticMemory>) -> Self {
        Self { block: None, tracked: OnceLock::from(Tracked::elastic_memory(memory)) }
    }

    pub(super) fn pinned(block: HostBlock, instance: Instance) -> Self {
        Self { block: None, tracked: OnceLock::from(Tracked::pinned(block, instance)) }
    }

    /// Its uses, which are recorded from now on.
    #[inline]
    pub(super) fn tracked(&self) -> &Arc<Tracked> {
        match self.tracked.get() {
            Some(tracked) => tracked,
            None => self.track(),
        }
    }

    #[cold]
    fn track(&self) -> &Arc<Tracked> {
        self.tracked.get_or_init(|| {
            let block = self.block.as_ref().expect("other memory is tracked from the start");
            Tracked::device(block.second_owner())
        })
    }

    /// Whether the buffer is private to `stream`, so that a use there, outside of captures, needs no record.
    #[inline]
    pub(super) fn is_private_to(&self, stream: &Stream) -> bool {
        self.block.as_ref().is_some_and(|block| block.is_of_stream(stream))
            && self.tracked.get().is_none_or(|tracked| tracked.is_private())
    }

    /// Its uses, if it stopped being private after work was enqueued whose use was not recorded. The fence is one half
    /// of the protocol described at [`Tracked::share`].
    #[inline]
    pub(super) fn shared_meanwhile(&self) -> Option<&Arc<Tracked>> {
        fence(Ordering::SeqCst);
        self.tracked.get().filter(|tracked| !tracked.is_private())
    }

    pub(super) fn instance(&self) -> &Instance {
        match &self.block {
            Some(block) => block.instance(),
            None => self.tracked().instance(),
        }
    }

    /// Its address, if it is device memory.
    pub(super) fn device_ptr(&self) -> Option<DevicePtr> {
        match &self.block {
            Some(block) => Some(block.ptr()),
            None => self.tracked().device_ptr(),
        }
    }

    /// The address `offset` bytes from its start.
    #[inline]
    pub(super) fn address(&self, offset: u64) -> Address {
        match &self.block {
            Some(block) => block.ptr().offset(offset).into(),
            None => self.tracked().address(offset),
        }
    }

    /// The same address as kernels see it: pinned memory has one address for the host and all devices.
    #[inline]
    pub(super) fn device_address(&self, offset: u64) -> DevicePtr {
        match self.address(offset) {
            Address::Device(ptr) => ptr,
            Address::Host(ptr) => DevicePtr(ptr.0),
        }
    }

    /// Its device; `None` for pinned memory, which all devices can use.
    #[inline]
    pub(super) fn device_id(&self) -> Option<DeviceId> {
        match &self.block {
            Some(block) => Some(block.device_id()),
            None => self.tracked().device_id(),
        }
    }

    /// Fails if it is memory of another device than the stream's.
    pub(super) fn expect_device_of(&self, stream: &Stream) -> Result<()> {
        match self.device_id() {
            Some(owner) if owner != stream.device_id() => {
                Err(BufferError::Device { buffer: self.tracked().name(), owner, stream: stream.device_id() }.into())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn set_label(&self, label: &str) {
        self.tracked().set_label(label);
    }

    pub(super) fn label(&self) -> Option<&str> {
        self.tracked.get().and_then(|tracked| tracked.label())
    }
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        if self.tracked.get().is_some()
            && let Some(block) = self.block.take()
        {
            // The other owner frees it.
            let _ = block.into_raw();
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tracked.get(), &self.block) {
            (Some(tracked), _) => tracked.fmt(f),
            (None, Some(block)) => write!(f, "device memory without a label: {block:?}"),
            (None, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::sim::{SimConfig, SimDriver};

    use super::super::order::Span;
    use super::*;
    use crate::memory::{Allocate, CachingAllocator, DeviceAllocator, Settings};

    #[test]
    fn it_is_private_until_another_stream_uses_it() -> Result<()> {
        let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
        let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let device = instance.device(0)?;
        let (own, other) = (device.lease_stream()?, device.lease_stream()?);
        let allocated = || allocator.stats(device.id()).map(|stats| stats.allocated_bytes.all.current);
        for (labelled, shared) in [(false, false), (true, false), (true, true), (false, true)] {
            let buffer = Buffer::device(allocator.allocate(4096, &own)?);
            if labelled {
                buffer.set_label("weights");
            }
            assert!(buffer.is_private_to(&own) && !buffer.is_private_to(&other));
            assert!(buffer.shared_meanwhile().is_none());
            assert_eq!(buffer.tracked.get().is_some(), labelled);
            if shared {
                let span = Span { start: 0, end: 4096, write: false };
                let tracked = buffer.tracked();
                tracked.prepare(&mut *tracked.lock_uses()?, &other, span)?;
                assert!(!buffer.is_private_to(&own) && buffer.shared_meanwhile().is_some());
            }
            // It is freed once, by one of the owners.
            assert_eq!(allocated()?, 4096);
            drop(buffer);
            assert_eq!(allocated()?, 0);
        }
        Ok(())
    }
}
