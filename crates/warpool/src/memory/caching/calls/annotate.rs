//! Names that the program gives to its blocks, for readers of the history.

use warpool_driver::DevicePtr;

use crate::Result;
use crate::memory::caching::CachingAllocator;
use crate::memory::{StackLevel, with_metadata};

impl CachingAllocator {
    /// Writes `text` into the history, with the allocated block that starts at `ptr`.
    pub(super) fn record_annotation(&self, ptr: DevicePtr, text: &str) -> Result<()> {
        let (device, _) = self.locate(ptr)?;
        // An entry carries the metadata of the thread.
        with_metadata(text, || {
            let details = device.timed_details(StackLevel::Alloc);
            device.with(|state| state.annotate(ptr, &details), |_, _| ())
        })
    }
}
