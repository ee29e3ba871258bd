//! Names that the program gives to its blocks, for readers of the history.

use warpool_driver::DevicePtr;

use super::CachingAllocator;
use crate::memory::{Action, StackLevel, set_user_metadata, user_metadata};
use crate::{Error, Result};

impl CachingAllocator {
    /// Writes `text` into the history, beside what starts at `ptr`. [`Error::UnknownPointer`] if nothing that is given
    /// out does.
    pub fn annotate(&self, ptr: DevicePtr, text: &str) -> Result<()> {
        let (cell, _) = self.locate(ptr)?;
        let cause = self.cause(cell, StackLevel::Alloc).timed(self.driver());
        // An entry's text is the thread's, so it becomes that for this one.
        let before = user_metadata();
        set_user_metadata(text);
        let outcome = self.try_with(cell, |state| {
            let block = state.live_at(ptr).ok_or(Error::UnknownPointer { ptr })?;
            let (requested, segment) = (state.blocks[block].requested, state.blocks[block].segment);
            state.record(Action::Annotate, ptr.0, requested, segment, &cause);
            Ok(())
        });
        set_user_metadata(before.as_deref().unwrap_or_default());
        outcome
    }
}
