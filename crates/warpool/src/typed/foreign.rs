//! Typed memory in work of other libraries, which take raw addresses.

use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};

use bytemuck::Pod;
use warpool_driver::DevicePtr;

use super::submit::{Reach, direct, submit, submit_direct};
use super::view::{IntoView, IntoViewMut, Part};
use crate::{Result, Stream};

/// Work of other libraries on typed memory.
impl Stream {
    /// Calls `queue` with the address of `memory`, to enqueue work in this stream that reads it. This stream first
    /// waits for uses in other streams, and the use is recorded. If the stream is capturing, the graph keeps the
    /// memory. An empty view is at address 0.
    ///
    /// The caller is responsible for what the work does with the address. `queue` runs under the lock of this memory,
    /// so it must not use the same memory in another typed call. No capture begins or ends meanwhile: inside `queue`
    /// that fails with [`GraphError::InTypedCall`](crate::graph::GraphError::InTypedCall), and other threads wait. So
    /// `queue` must not wait for a thread that begins or ends a capture.
    #[track_caller]
    pub fn with_address<'a, T: Pod, R>(
        &self,
        memory: impl IntoView<'a, T>,
        queue: impl FnOnce(DevicePtr) -> Result<R>,
    ) -> Result<R> {
        let line = Location::caller();
        self.with_part(&memory.into_view().part, false, line, queue)
    }

    /// As [`with_address`](Self::with_address), for work that writes it.
    #[track_caller]
    pub fn with_address_mut<'a, T: Pod, R>(
        &self,
        memory: impl IntoViewMut<'a, T>,
        queue: impl FnOnce(DevicePtr) -> Result<R>,
    ) -> Result<R> {
        let line = Location::caller();
        self.with_part(&memory.into_view_mut().part, true, line, queue)
    }

    fn with_part<T: Pod, R>(
        &self,
        part: &Part<'_, T>,
        write: bool,
        line: &'static Location<'static>,
        queue: impl FnOnce(DevicePtr) -> Result<R>,
    ) -> Result<R> {
        if part.len() == 0 {
            part.buffer().expect_device_of(self)?;
            return queue(DevicePtr(0));
        }
        // Work that was enqueued before a panic is a use too.
        let queue = || catch_unwind(AssertUnwindSafe(|| queue(part.device_address())));
        if let Some(frozen) = direct(self, || part.is_private_to(self)) {
            let late = || part.access(write).add_late(self);
            return submit_direct(frozen, self, line, late, queue).unwrap_or_else(|panic| resume_unwind(panic));
        }
        let (mut queue, mut outcome) = (Some(queue), None);
        submit(self, &[Some(part.access(write))], Reach::OwnDevice, line, &mut || {
            outcome = queue.take().map(|queue| queue());
            Ok(())
        })?;
        outcome.expect("work is queued once").unwrap_or_else(|panic| resume_unwind(panic))
    }
}
