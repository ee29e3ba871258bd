//! Names that the program gives to its blocks, for readers of the history.

use warpool_driver::DevicePtr;

use super::PagedAllocator;
use crate::memory::{Action, StackLevel, with_metadata};
use crate::{Error, Result};

impl PagedAllocator {
    /// Writes `text` into the history, with the allocated block that starts at `ptr`.
    /// [`Error::UnknownPointer`] if none does.
    pub(super) fn record_annotation(&self, ptr: DevicePtr, text: &str) -> Result<()> {
        let (device, at) = self
            .devices
            .iter()
            .find_map(|device| Some((device, device.space.locate(ptr)?)))
            .ok_or(Error::UnknownPointer { ptr })?;
        // An entry carries the metadata of the thread.
        with_metadata(text, || {
            let details = device.timed_details(StackLevel::Alloc);
            {
                let heap = device.heaps.get(at.heap).lock();
                let block = heap.allocated_at(at.kind, at.range, ptr.0).ok_or(Error::UnknownPointer { ptr })?;
                device.record(Action::Annotate, ptr.0, heap.block(block).requested(), &heap, &details);
            }
            device.report();
            Ok(())
        })
    }
}
