//! Stream-ordered reuse: a freed block that several streams used is reclaimed once the work that those streams held at
//! the time of the free is done. All allocators use it. A *fence* here is an event that a freed block waits for, not a
//! memory fence; it has *passed* when the event has completed.
//!
//! # How an allocator uses it
//! 1. Each block has [`StreamUses`]. While it is allocated, [`StreamUses::add`] records the streams that use it; at its
//!    free, [`StreamUses::mark_freed`].
//! 2. [`fence`] records an event, the *fence*, after the work of each of these streams and queues it in the owner's
//!    [`StreamFences`]. [`fence_later`] only lists the block as *unfenced*, for callers that must not call the driver
//!    (destructors).
//! 3. Later calls run [`retry_unfenced`] with [`fence_postponed`], and [`poll`] or [`poll_some`]; [`wait_all`] waits
//!    for the fences instead.
//! 4. Passed fences go to [`FenceOwner::complete`]; a block with no fences left is reclaimed there.
//!
//! The allocator implements [`FenceOwner`], which gives access to both structures under its locks. [`wait_for_stream`],
//! [`wait_for_devices`], [`wait_for_event`] and the functions that order one stream after another can be used without a
//! block.
//!
//! # Rules
//! - The driver is called without the owner's lock. Fences have sequence numbers, so that a result that arrives after
//!   another thread completed the same fence is dropped.
//! - Only the oldest fence of each stream is queried, so a busy stream delays only the blocks that it used. A passed
//!   fence completes itself and none before it: two threads may queue fences in another order than they recorded them.
//! - An error in one stream does not stop the others; the first error is returned.
//! - The extra cost of an allocation or free is bounded ([`PENDING_PER_CALL`]), however many streams have fences: each
//!   call polls some of the streams, round robin. [`poll_of`] polls all that one stream's blocks wait for.
//! - A stream may be destroyed as soon as the call that frees the block has returned, unless it lives as long as the
//!   [`Instance`](crate::Instance). So a fence that a destructor, a capture or an error left to a later call is not
//!   recorded in such a stream, but as an event after all work of the devices, once no capture is active.
//! - A driver call may unwind, because users can implement the driver trait. No block is leaked when it does.
//! - No fence is recorded in a stream that takes part in a capture: the event would belong to the capture, and querying
//!   it would invalidate that. Such a block stays unfenced until the capture is over. No capture begins between the
//!   check and the event.

mod fencing;
mod owner;
mod poll;
mod queues;
mod record;
#[cfg(test)]
mod tests;
mod uses;

pub(crate) use fencing::{DeviceEvents, fence, fence_later, fence_postponed, retry_unfenced};
pub(crate) use owner::FenceOwner;
pub(crate) use poll::{poll, poll_of, poll_some, wait_all};
pub(crate) use queues::{Fence, PENDING_PER_CALL, StreamFences};
pub(crate) use record::{
    Recorded, order_after, order_outside_captures, record, record_bystander, record_outside_captures, synchronize,
    wait_for_devices, wait_for_event, wait_for_stream,
};
pub(crate) use uses::StreamUses;
