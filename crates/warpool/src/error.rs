//! What can go wrong above the driver. Each kind of trouble is its own variant; a failed driver call is passed on
//! whole.

use std::fmt;

use warpool_driver::{DeviceId, DevicePtr, DriverError, HostPtr, StreamId};

use crate::generator::GeneratorError;
use crate::graph::GraphError;
use crate::memory::{MemPoolId, OomReport, PinnedCapReport};

/// The result of a call into this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed, and where it helps, what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),

    /// The driver works but has nothing to work with.
    #[error("the {driver} driver sees no device; check that one is plugged in and visible to this process")]
    NoDevice {
        /// The driver's [kind](warpool_driver::Driver::kind).
        driver: &'static str,
    },

    /// There is no device of that number.
    #[error("device index {index} is out of range [0, {count})")]
    DeviceOutOfRange {
        /// What was asked for.
        index: u32,
        /// How many devices there are.
        count: u32,
    },

    /// Two things were used together that belong to different [`Instance`](crate::Instance)s.
    #[error("{thing} belongs to another Instance; use things of one Instance together")]
    ForeignGpu {
        /// What came from elsewhere.
        thing: &'static str,
    },

    /// An event belongs to one device for life, and only streams of that device can record it.
    #[error(
        "event of {event} cannot record on a stream of {stream}; use one event per device \
         (waiting for an event from another device's stream is fine)"
    )]
    EventDevice {
        /// The event's device.
        event: DeviceId,
        /// The stream's device.
        stream: DeviceId,
    },

    /// An event belongs to one device for life and cannot be created on a second.
    #[error("event of {event} cannot be created again on {wanted}; make another event")]
    EventExists {
        /// Where the event is.
        event: DeviceId,
        /// Where it was wanted.
        wanted: DeviceId,
    },

    /// An event that takes the time cannot be shared between processes.
    #[error("an event cannot be both timing and interprocess; drop one of the two options")]
    TimingInterprocess,

    /// Only an event made for it can be shared between processes.
    #[error("event was not made to be shared; make it with the option interprocess")]
    NotInterprocess,

    /// An exported event is 64 bytes, no more and no less.
    #[error("an exported event has 64 bytes, not {bytes}; pass on exactly what the export gave")]
    IpcHandleLength {
        /// How many bytes came.
        bytes: usize,
    },

    /// The time was asked of an event that does not take it.
    #[error("no elapsed time: the {which} event was made without timing; make both with the option timing")]
    ElapsedWithoutTiming {
        /// Which of the two.
        which: Endpoint,
    },

    /// The time was asked of an event that no stream has recorded.
    #[error("no elapsed time: the {which} event was never recorded; record both first")]
    ElapsedNotRecorded {
        /// Which of the two.
        which: Endpoint,
    },

    /// The time was asked too early.
    #[error("no elapsed time yet: the work before one of the events is not done; synchronize with the end event first")]
    ElapsedNotReady,

    /// Clocks of two devices do not compare.
    #[error("no elapsed time between events of {start} and {end}; record both on one device")]
    ElapsedAcrossDevices {
        /// The start event's device.
        start: DeviceId,
        /// The end event's device.
        end: DeviceId,
    },

    /// One handle means another stream on each thread.
    #[error(
        "a thread's own default stream cannot be taken in: its handle means another stream on each thread; make a stream, or adopt one by its own handle"
    )]
    PerThreadStream,

    /// A request names a stream of another device.
    #[error(
        "a request for {device} names {stream}, which belongs to {owner}; allocate on the stream's own device, and record the use"
    )]
    StreamDevice {
        /// Where memory was asked for.
        device: DeviceId,
        /// The stream.
        stream: StreamId,
        /// Its device.
        owner: DeviceId,
    },

    /// There is no memory for a request.
    #[error("{0}")]
    OutOfMemory(Box<OomReport>),

    /// More was asked for than any device will ever have.
    #[error(
        "CUDA out of memory. Tried to allocate more than 1EB memory: {bytes} bytes; check how the size was computed"
    )]
    RequestTooLarge {
        /// How much.
        bytes: u64,
    },

    /// Host memory cannot be pinned where it is.
    #[error("host memory cannot be pinned by registering it: {why}; set pinned_use_cuda_host_register:False")]
    HostRegister {
        /// What is in the way.
        why: String,
    },

    /// Nothing that is given out starts there.
    #[error(
        "invalid device pointer: {ptr} starts no allocation of this allocator; it was freed already, lies inside one, or came from elsewhere"
    )]
    UnknownPointer {
        /// The address.
        ptr: DevicePtr,
    },

    /// There is no such pool, or no more.
    #[error("could not find pool of id {pool} on {device}; pools are per device, and go when nobody uses them")]
    UnknownPool {
        /// The pool.
        pool: MemPoolId,
        /// Where it was looked for.
        device: DeviceId,
    },

    /// Pools are known by their names to their own allocator only.
    #[error("pool {pool} belongs to another allocator; use a pool of the one that memory is asked of")]
    ForeignAllocator {
        /// The pool.
        pool: MemPoolId,
    },

    /// A pool that nobody used any more cannot be used again.
    #[error("pool {pool} was released by its last user and cannot come back; make another")]
    PoolReleased {
        /// The pool.
        pool: MemPoolId,
    },

    /// A pool can have one open scope.
    #[error("already recording to mempool_id {pool}; close that scope first, or use another pool")]
    AlreadyRouting {
        /// The pool.
        pool: MemPoolId,
    },

    /// A pool without an open scope cannot close one.
    #[error("not currently recording to mempool_id {pool}; begin and end must be paired")]
    NotRouting {
        /// The pool.
        pool: MemPoolId,
    },

    /// More captures ended than began.
    #[error("no capture is under way on {device}; begin and end must be paired")]
    NotCapturing {
        /// The device.
        device: DeviceId,
    },

    /// A share of memory is between 0 and 1.
    #[error("invalid fraction: {fraction}. Please set within [0, 1]")]
    Fraction {
        /// What was given, as text.
        fraction: String,
    },

    /// A history can skip only what it knows.
    #[error("unknown action {name:?}; a history has {}", crate::memory::Action::ALL.map(crate::memory::Action::name).join(", "))]
    UnknownAction {
        /// What was named.
        name: String,
    },

    /// An allocator does not have everything.
    #[error("the {allocator} allocator does not support {what}")]
    Unsupported {
        /// Which allocator.
        allocator: &'static str,
        /// What it was asked for.
        what: &'static str,
    },

    /// A plugged allocator gave out what it had given out before.
    #[error(
        "the plugged allocator gave {bytes} bytes at {ptr}, where it has not got back {taken_bytes} bytes at {taken}; the memory is left alone: look at how it keeps its books"
    )]
    PlugAddress {
        /// What it gave now.
        ptr: DevicePtr,
        /// How much of it.
        bytes: u64,
        /// What it gave before, and has not got back.
        taken: DevicePtr,
        /// How much of that.
        taken_bytes: u64,
    },

    /// A plugged allocator said why it failed.
    #[error("the plugged allocator: {why}")]
    ExternalAllocator {
        /// In its words.
        why: String,
    },

    /// The program's allocator can be chosen only before it is used.
    #[error(
        "cannot install the {wanted} allocator: the program uses the {installed} allocator already, which holds {bytes} bytes; install before the first use"
    )]
    AllocatorInUse {
        /// The one in use.
        installed: &'static str,
        /// What it holds, on all devices.
        bytes: u64,
        /// The one that was to take its place.
        wanted: &'static str,
    },

    /// A pool's state could not be kept or put back.
    #[error("checkpoint of pool {pool}: {why}")]
    Checkpoint {
        /// The pool.
        pool: MemPoolId,
        /// What is in the way.
        why: String,
    },

    /// The wanted address is not free.
    #[error("could not allocate {bytes} bytes at exact address {ptr}: {why}")]
    ExactAddress {
        /// The address.
        ptr: DevicePtr,
        /// How much.
        bytes: u64,
        /// What is in the way.
        why: &'static str,
    },

    /// A closed pool gives out no handles.
    #[error("cannot create a {library} handle: its pool is closed, as at the end of the program; make another pool")]
    HandlePoolClosed {
        /// The library.
        library: &'static str,
    },

    /// A handle works on streams of its own device.
    #[error("a handle of {handle} cannot work on {stream}, which belongs to {owner}; fetch the handle of that device")]
    HandleDevice {
        /// The handle's device.
        handle: DeviceId,
        /// The stream.
        stream: StreamId,
        /// Its device.
        owner: DeviceId,
    },

    /// A thread that is ending has no handles of its own any more.
    #[error("the calling thread is ending and cannot hold a handle; lease one instead")]
    ThreadEnding,

    /// A cap on pinned host memory stands in the way; the machine may have room.
    #[error("{0}")]
    PinnedCap(Box<PinnedCapReport>),

    /// A part of a pinned block was named that does not lie in it.
    #[error("{bytes} bytes at offset {offset} do not lie in a pinned block of {available} bytes")]
    HostBounds {
        /// Where the part starts.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// How long the block is.
        available: u64,
    },

    /// Kernels would have to use another address for pinned memory than the host does.
    #[error(
        "pinned memory at {host} is at {seen} for {device}; Warpool needs one address for both: set pinned_use_cuda_host_register:False"
    )]
    HostAddress {
        /// Where the host has it.
        host: HostPtr,
        /// Where the device has it.
        seen: DevicePtr,
        /// The device.
        device: DeviceId,
    },

    /// Pinned memory is still needed.
    #[error(
        "cannot close: {handles} more handles of this host allocator are alive, and {blocks} of its blocks belong to somebody or to a graph; drop them first"
    )]
    HostMemoryInUse {
        /// Handles beside the one that was to be closed.
        handles: usize,
        /// Blocks.
        blocks: usize,
    },

    /// A graph, or its capture, was used wrongly.
    #[error(transparent)]
    Graph(#[from] GraphError),

    /// A generator of random numbers was used wrongly.
    #[error(transparent)]
    Generator(#[from] GeneratorError),

    /// Something still needs what was to be closed.
    #[error(
        "cannot close: {holders} more handles, devices, streams, leases or events of this Instance are alive; drop them first"
    )]
    StillInUse {
        /// How many.
        holders: usize,
    },
}

impl Error {
    /// The driver call that failed, if that was the trouble.
    #[must_use]
    pub const fn driver(&self) -> Option<&DriverError> {
        match self {
            Self::Driver(error) => Some(error),
            _ => None,
        }
    }
}

/// One of the two events that a time is measured between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// The earlier one, by intention.
    Start,
    /// The later one.
    End,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::End => "end",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_what_they_are_about() {
        let cases = [
            (Error::DeviceOutOfRange { index: 7, count: 2 }, "device index 7 is out of range [0, 2)"),
            (
                Error::EventDevice { event: DeviceId(0), stream: DeviceId(1) },
                "event of device 0 cannot record on a stream of device 1; use one event per device \
                 (waiting for an event from another device's stream is fine)",
            ),
            (
                Error::ElapsedWithoutTiming { which: Endpoint::End },
                "no elapsed time: the end event was made without timing; make both with the option timing",
            ),
        ];
        for (error, message) in cases {
            assert_eq!(error.to_string(), message);
        }
    }
}
