//! Errors, and the plain data that they carry. This is the bottom module of the crate: every module may use it, and it
//! uses none.
//!
//! Each kind of failure has its own variant; the error of a failed driver call is passed on unchanged.

mod buffer;
mod generator;
mod graph;
mod oom;
mod page_shortage;
mod pinned_cap;
mod settings;
mod share;
mod size;
mod sleep;

use std::fmt;

use warpool_driver::{DeviceId, DevicePtr, DriverError, ErrorCode, HostPtr, StreamId};

pub use buffer::BufferError;
pub use generator::GeneratorError;
pub use graph::GraphError;
pub use oom::{OomCause, OomReport};
pub use page_shortage::PageShortage;
pub use pinned_cap::PinnedCapReport;
pub use settings::{Problem, SettingsError, Warning};
pub use share::ShareError;
pub use sleep::{SleepCall, SleepFailure, SleepShortage};

use crate::pool_id::MemPoolId;

/// The result of a call into this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed, and, if that helps, what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),

    /// An invalid settings string.
    #[error(transparent)]
    Settings(#[from] SettingsError),

    /// The driver reports no device.
    #[error("the {driver} driver has no device; check that a GPU is installed and visible to this process")]
    NoDevice {
        /// The driver's [kind](warpool_driver::Driver::kind).
        driver: &'static str,
    },

    /// There is no device with that index.
    #[error("device index {index} is out of range [0, {count})")]
    DeviceOutOfRange {
        /// The index.
        index: u32,
        /// How many devices there are.
        count: u32,
    },

    /// An object of another [`Instance`](crate::Instance) was passed.
    #[error("{object} belongs to another Instance; only objects of one Instance can be used together")]
    ForeignInstance {
        /// Which argument it was.
        object: &'static str,
    },

    /// An event belongs to one device, and only streams of that device can record it.
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

    /// An event belongs to one device and cannot be created on a second.
    #[error("event of {event} cannot be created again on {wanted}; make another event")]
    EventExists {
        /// The event's device.
        event: DeviceId,
        /// The device that it should have been created on.
        wanted: DeviceId,
    },

    /// An event with timing cannot be shared between processes.
    #[error("an event cannot be both timing and interprocess; drop one of the two options")]
    TimingInterprocess,

    /// An event without the option `interprocess` cannot be exported.
    #[error("the event cannot be exported; make it with the option interprocess")]
    NotInterprocess,

    /// An exported event is 64 bytes.
    #[error("an exported event has 64 bytes, not {bytes}; pass exactly what the export returned")]
    IpcHandleLength {
        /// How many bytes were passed.
        bytes: usize,
    },

    /// The elapsed time of an event without timing.
    #[error("no elapsed time: the {which} event was made without timing; make both with the option timing")]
    ElapsedWithoutTiming {
        /// Which of the two.
        which: Endpoint,
    },

    /// The elapsed time of an event that was never recorded.
    #[error("no elapsed time: the {which} event was never recorded; record both first")]
    ElapsedNotRecorded {
        /// Which of the two.
        which: Endpoint,
    },

    /// The elapsed time before both events are done.
    #[error("no elapsed time yet: the work before one of the events is not done; synchronize with the end event first")]
    ElapsedNotReady,

    /// The elapsed time between events of two devices, whose clocks do not compare.
    #[error("no elapsed time between events of {start} and {end}; record both on one device")]
    ElapsedAcrossDevices {
        /// The start event's device.
        start: DeviceId,
        /// The end event's device.
        end: DeviceId,
    },

    /// The handle of the per-thread default stream.
    #[error(
        "the per-thread default stream is not supported: its handle is a different stream on each thread; \
         create a stream, or pass one by a handle of its own"
    )]
    PerThreadStream,

    /// A request names a stream of another device.
    #[error(
        "a request for {device} names {stream}, which belongs to {owner}; \
         allocate on the stream's own device, and record the use"
    )]
    StreamDevice {
        /// The device of the request.
        device: DeviceId,
        /// The stream.
        stream: StreamId,
        /// The stream's device.
        owner: DeviceId,
    },

    /// There is no device memory for a request.
    #[error("{0}")]
    OutOfMemory(Box<OomReport>),

    /// A request for more memory than any device has.
    #[error(
        "CUDA out of memory. Tried to allocate more than 1EB memory: {bytes} bytes; check how the size was computed"
    )]
    RequestTooLarge {
        /// The requested bytes.
        bytes: u64,
    },

    /// A request for more pinned memory than any machine has.
    #[error("cannot pin {bytes} bytes: more than 1EB of host memory was requested; check how the size was computed")]
    PinnedRequestTooLarge {
        /// The requested bytes.
        bytes: u64,
    },

    /// Host memory cannot be pinned by registering it.
    #[error("host memory cannot be pinned by registering it: {why}; set pinned_use_cuda_host_register:False")]
    HostRegister {
        /// The driver's reason.
        why: String,
    },

    /// No live allocation starts at an address.
    #[error(
        "invalid device pointer: {ptr} starts no live allocation of this allocator; \
         it was freed already, lies inside an allocation, or belongs to another allocator"
    )]
    UnknownPointer {
        /// The address.
        ptr: DevicePtr,
    },

    /// Memory that a graph owns.
    #[error("the memory at {ptr} belongs to a graph, which frees it when it is reset or dropped")]
    HeldByGraph {
        /// The address.
        ptr: DevicePtr,
    },

    /// There is no such pool, or no longer.
    #[error(
        "could not find pool of id {pool} on {device}; pools are per device, and are destroyed with their last use"
    )]
    UnknownPool {
        /// The pool.
        pool: MemPoolId,
        /// The device.
        device: DeviceId,
    },

    /// A pool of another allocator.
    #[error("pool {pool} belongs to another allocator; pass a pool of the allocator that is used")]
    ForeignAllocator {
        /// The pool.
        pool: MemPoolId,
    },

    /// A pool of another device.
    #[error("pool {pool} belongs to {owner} and cannot be used on {device}; pools are per device")]
    PoolDevice {
        /// The pool.
        pool: MemPoolId,
        /// The pool's device.
        owner: DeviceId,
        /// The device that it should have been used on.
        device: DeviceId,
    },

    /// More releases of a pool than uses that were begun by raw calls.
    #[error(
        "pool {pool} has no use that this call could end; those that are left belong to handles, scopes and graphs, \
         which end them when they are dropped"
    )]
    PoolNotRetained {
        /// The pool.
        pool: MemPoolId,
    },

    /// The open scope of a pool was opened in another way.
    #[error(
        "the open scope of pool {pool} is that of a PoolScope, a graph's capture or a raw call, which alone ends it"
    )]
    ForeignScope {
        /// The pool.
        pool: MemPoolId,
    },

    /// A pool that was released by its last user.
    #[error("pool {pool} was released by its last user and cannot be used again; make another")]
    PoolReleased {
        /// The pool.
        pool: MemPoolId,
    },

    /// A pool has at most one open scope.
    #[error("already recording to mempool_id {pool}; close that scope first, or use another pool")]
    AlreadyRouting {
        /// The pool.
        pool: MemPoolId,
    },

    /// The end of a scope that was not opened.
    #[error("not currently recording to mempool_id {pool}; begin and end must be paired")]
    NotRouting {
        /// The pool.
        pool: MemPoolId,
    },

    /// The end of a capture that was not begun.
    #[error("no capture is under way on {device}; begin and end must be paired")]
    NotCapturing {
        /// The device.
        device: DeviceId,
    },

    /// Elastic memory without blocks, or with blocks of no bytes.
    #[error("elastic memory needs at least one block of at least one byte; check the shape")]
    EmptyElastic,

    /// A range of blocks that elastic memory does not have.
    #[error("blocks {start}..{end} are not blocks of elastic memory that has {blocks}")]
    ElasticBlocks {
        /// Where the range starts.
        start: u64,
        /// Where it ends.
        end: u64,
        /// How many blocks there are.
        blocks: u64,
    },

    /// Elastic memory cannot change in a capture: the change would happen now, and the work later.
    #[error(
        "elastic memory cannot be committed or decommitted for {stream} during a capture; \
         do it before or after: the addresses stay the same"
    )]
    ElasticInCapture {
        /// The stream.
        stream: StreamId,
    },

    /// Elastic memory that was released.
    #[error("the elastic memory at {ptr} was released; its addresses may be others' by now")]
    UnknownElastic {
        /// Its first address.
        ptr: DevicePtr,
    },

    /// A memory fraction outside of [0, 1].
    #[error("invalid fraction: {fraction}. Please set within [0, 1]")]
    Fraction {
        /// The value, as text.
        fraction: String,
    },

    /// A history has no action with that name.
    #[error("unknown action {name:?}; the actions of a history are {}", known.join(", "))]
    UnknownAction {
        /// The name.
        name: String,
        /// The names that exist.
        known: Vec<&'static str>,
    },

    /// A feature that an allocator does not have.
    #[error("the {allocator} allocator does not support {what}")]
    Unsupported {
        /// The allocator.
        allocator: &'static str,
        /// The feature.
        what: &'static str,
    },

    /// An external allocator or an upstream returned memory that overlaps live memory.
    #[error(
        "the external allocator returned {bytes} bytes at {ptr}, which overlap {live_bytes} live bytes at {live}; \
         the memory is not used: check the external allocator's bookkeeping"
    )]
    ExternalOverlap {
        /// The address that it returned.
        ptr: DevicePtr,
        /// How many bytes.
        bytes: u64,
        /// The live allocation.
        live: DevicePtr,
        /// Its length.
        live_bytes: u64,
    },

    /// An external allocator or an upstream returned an address at which no memory can be.
    #[error(
        "{bytes} bytes were allocated at {ptr}, which is null or too close to the end of the address space; the memory \
         is not used: return no address if there is no memory"
    )]
    ExternalAddress {
        /// The address that it returned.
        ptr: DevicePtr,
        /// How many bytes.
        bytes: u64,
    },

    /// An external allocator failed.
    #[error("external allocator: {why}")]
    ExternalAllocator {
        /// Its own message.
        why: String,
    },

    /// A pool's state could not be saved or restored.
    #[error("checkpoint of pool {pool}: {why}")]
    Checkpoint {
        /// The pool.
        pool: MemPoolId,
        /// The reason.
        why: String,
    },

    /// An allocation at a given address was not possible.
    #[error("could not allocate {bytes} bytes at exact address {ptr}: {why}")]
    ExactAddress {
        /// The address.
        ptr: DevicePtr,
        /// The requested bytes.
        bytes: u64,
        /// The reason.
        why: &'static str,
    },

    /// The handle pool was closed.
    #[error("cannot create a {library} handle: its pool is closed; make another pool")]
    HandlePoolClosed {
        /// The library.
        library: &'static str,
    },

    /// A handle and a stream of different devices.
    #[error("a handle of {handle} cannot use {stream}, which belongs to {owner}; use a handle of the stream's device")]
    HandleDevice {
        /// The handle's device.
        handle: DeviceId,
        /// The stream.
        stream: StreamId,
        /// The stream's device.
        owner: DeviceId,
    },

    /// The calling thread is ending and has no handles of its own any more.
    #[error("the calling thread is ending and cannot own a handle; lease one instead")]
    ThreadEnding,

    /// A cap on pinned host memory refused a request; the machine may have memory.
    #[error("{0}")]
    PinnedCap(Box<PinnedCapReport>),

    /// A range that does not lie in a pinned block.
    #[error("{bytes} bytes at offset {offset} do not lie in a pinned block of {available} bytes")]
    HostBounds {
        /// Where the range starts.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// The length of the block.
        available: u64,
    },

    /// Pinned memory has another address on a device than on the host.
    #[error(
        "pinned memory at {host} is at {seen} for {device}; Warpool needs one address for both: \
         set pinned_use_cuda_host_register:False"
    )]
    HostAddress {
        /// The address on the host.
        host: HostPtr,
        /// The address on the device.
        seen: DevicePtr,
        /// The device.
        device: DeviceId,
    },

    /// Pinned memory is still in use.
    #[error(
        "cannot close: {handles} more handles of this host allocator are alive, \
         and {blocks} of its blocks are allocated or used by a graph; drop them first"
    )]
    HostMemoryInUse {
        /// Handles besides the one that should have been closed.
        handles: usize,
        /// Blocks that are still in use.
        blocks: usize,
    },

    /// A request for memory of a sleeping tag.
    #[error("the memory of tag {tag:?} sleeps; wake the tag before allocating from it")]
    TagAsleep {
        /// The tag.
        tag: String,
    },

    /// Work on memory that is asleep.
    #[error("cannot {what}: memory that it uses has the tag {tag:?}, which sleeps; wake the tag first")]
    MemoryAsleep {
        /// The tag.
        tag: String,
        /// The operation that failed.
        what: &'static str,
    },

    /// There is no such tag.
    #[error("no memory has the tag {tag:?}; the tags are {known:?}")]
    UnknownTag {
        /// The tag.
        tag: String,
        /// The tags that exist.
        known: Vec<String>,
    },

    /// Memory cannot be put to sleep or woken during a capture, because that requires a wait for all work of the
    /// device.
    #[error("cannot {call} while a graph is captured: end the capture first")]
    SleepInCapture {
        /// The call that was refused.
        call: SleepCall,
    },

    /// Memory could not be put to sleep, or not be woken.
    #[error("{0}")]
    Sleep(Box<SleepFailure>),

    /// Wrong use of a graph, or a capture that failed.
    #[error(transparent)]
    Graph(#[from] GraphError),

    /// Wrong use of typed memory, or of a kernel with typed arguments.
    #[error(transparent)]
    Buffer(#[from] BufferError),

    /// Wrong use of a generator.
    #[error(transparent)]
    Generator(#[from] GeneratorError),

    /// Pages that processes share cannot be used.
    #[error(transparent)]
    Share(#[from] ShareError),

    /// The [`Instance`](crate::Instance) is still in use.
    #[error(
        "cannot close: {references} more handles, devices, streams, leases or events of this Instance are alive; \
         drop them first"
    )]
    StillInUse {
        /// How many.
        references: usize,
    },
}

impl Error {
    /// The driver call that failed, if this is one.
    #[must_use]
    pub const fn driver(&self) -> Option<&DriverError> {
        match self {
            Self::Driver(error) => Some(error),
            _ => None,
        }
    }

    /// Whether there was not enough memory, on a device or on the host, or a cap or limit refused the request. Freeing
    /// memory and trying again may help.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory(_) | Self::PinnedCap(_) => true,
            Self::Sleep(failure) if failure.shortage != SleepShortage::Nothing => true,
            Self::Graph(GraphError::BodyFailed { error }) => error.is_out_of_memory(),
            _ => self.driver_error().is_some_and(DriverError::is_out_of_memory),
        }
    }

    /// Whether a capture failed, or was invalidated by this call or before it. The capture must be ended; the graph can
    /// then be captured again.
    #[must_use]
    pub fn is_capture_broken(&self) -> bool {
        matches!(self, Self::Graph(GraphError::CaptureFailed { .. } | GraphError::BodyFailed { .. }))
            || self.driver_error().is_some_and(DriverError::is_capture_forbidden)
    }

    /// Whether a call that a stream's capture does not allow was refused before it reached the driver: the capture is
    /// still valid.
    #[must_use]
    pub const fn is_refused_in_capture(&self) -> bool {
        matches!(
            self,
            Self::Graph(GraphError::StreamCaptures { .. } | GraphError::ForeignCapture)
                | Self::Generator(
                    GeneratorError::InCapture { .. } | GeneratorError::SeedInCapture { .. } | GeneratorError::InBody
                )
                | Self::SleepInCapture { .. }
                | Self::Buffer(BufferError::OrdinaryMemoryInCapture | BufferError::LastUseCaptures { .. })
        )
    }

    /// Whether the device cannot be used any more by this process: work on it failed, and every later call fails.
    #[must_use]
    pub fn is_device_lost(&self) -> bool {
        self.driver_error().is_some_and(DriverError::is_sticky)
    }

    /// Whether something is not finished or still in use; the same call may succeed later.
    #[must_use]
    pub fn is_not_ready(&self) -> bool {
        match self {
            Self::ElapsedNotReady
            | Self::StillInUse { .. }
            | Self::HostMemoryInUse { .. }
            | Self::Graph(GraphError::PollersBusy { .. })
            | Self::Buffer(
                BufferError::InUse { .. } | BufferError::BeingQueued { .. } | BufferError::BorrowedByHost { .. },
            ) => true,
            _ => self.driver_error().is_some_and(DriverError::is_not_ready),
        }
    }

    /// Whether the memory of the call is asleep: the same call succeeds once its tag is woken.
    #[must_use]
    pub const fn is_asleep(&self) -> bool {
        matches!(self, Self::TagAsleep { .. } | Self::MemoryAsleep { .. })
    }

    /// Whether the driver, the device or the allocator does not support it.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Unsupported { .. } | Self::Graph(GraphError::NoConditionalNodes { .. }))
            || self.driver_error().is_some_and(|error| error.code == ErrorCode::NotSupported)
    }

    /// Whether the program passed an invalid argument: a wrong range, length, device, pointer or pool, or objects that
    /// do not belong together; an invalid settings string. Trying again does not help.
    #[must_use]
    pub const fn is_invalid_argument(&self) -> bool {
        matches!(
            self,
            Self::DeviceOutOfRange { .. }
                | Self::ForeignInstance { .. }
                | Self::EventDevice { .. }
                | Self::EventExists { .. }
                | Self::StreamDevice { .. }
                | Self::RequestTooLarge { .. }
                | Self::PinnedRequestTooLarge { .. }
                | Self::UnknownPointer { .. }
                | Self::UnknownPool { .. }
                | Self::ForeignAllocator { .. }
                | Self::PoolDevice { .. }
                | Self::Fraction { .. }
                | Self::HandleDevice { .. }
                | Self::HostBounds { .. }
                | Self::UnknownTag { .. }
                | Self::Settings(_)
                | Self::Graph(
                    GraphError::StreamDevice { .. }
                        | GraphError::DefaultStream
                        | GraphError::DefaultPool
                        | GraphError::WrongStream { .. }
                        | GraphError::StreamNotInCapture { .. }
                        | GraphError::UnknownBuffer
                        | GraphError::ForeignSlot
                        | GraphError::OutOfBounds { .. }
                        | GraphError::FlagAlignment { .. }
                        | GraphError::CallInputs { .. }
                )
                | Self::Generator(
                    GeneratorError::Offset { .. }
                        | GeneratorError::StateSize { .. }
                        | GeneratorError::ForeignDevice { .. }
                        | GeneratorError::ForeignInstance
                        | GeneratorError::Increment { .. }
                        | GeneratorError::Probability { .. }
                        | GeneratorError::Count { .. }
                        | GeneratorError::OutOfBounds { .. }
                        | GeneratorError::Alignment { .. }
                )
                | Self::Buffer(
                    BufferError::Length { .. }
                        | BufferError::Range { .. }
                        | BufferError::Rows { .. }
                        | BufferError::Shape { .. }
                        | BufferError::Device { .. }
                        | BufferError::ArgumentCount { .. }
                        | BufferError::ArgumentSize { .. }
                        | BufferError::TooManyElements { .. }
                )
        )
    }

    /// The driver's error, also if it is the cause of another.
    fn driver_error(&self) -> Option<&DriverError> {
        match self {
            Self::Driver(error) | Self::Graph(GraphError::CaptureFailed { error }) => Some(error),
            Self::Graph(GraphError::BodyFailed { error }) => error.driver_error(),
            Self::Sleep(failure) => failure.source.as_ref()?.driver_error(),
            _ => None,
        }
    }
}

/// One of the two events of an elapsed time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Where the time starts.
    Start,
    /// Where it ends.
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
    fn messages_name_the_objects_and_the_remedy() {
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
