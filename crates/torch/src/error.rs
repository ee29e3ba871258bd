//! Why a call through the C interface failed. C callers and PyTorch's users read the text, so each says what to do.

use std::io;
use std::path::PathBuf;

use warpool::memory::settings::SettingsError;
use warpool_cuda::OpenError;
use warpool_driver::{DevicePtr, DriverError};

use crate::torch_pool::TorchPoolId;

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library or the driver failed, for example out of memory.
    #[error(transparent)]
    Warpool(#[from] warpool::Error),

    /// A settings string is invalid.
    #[error(transparent)]
    Settings(#[from] SettingsError),

    /// The settings string in an environment variable is invalid.
    #[error("{variable}: {source}")]
    SettingsOf {
        /// The variable.
        variable: &'static str,
        /// What is wrong.
        source: SettingsError,
    },

    /// The CUDA driver cannot be opened.
    #[error("the driver 'cuda' cannot be opened: {0} (WARPOOL_DRIVER=sim needs none)")]
    Cuda(#[from] OpenError),

    /// `WARPOOL_DRIVER` names no driver.
    #[error("WARPOOL_DRIVER: unknown driver {name:?}; choose cuda, the default, or sim")]
    UnknownDriver {
        /// Its value.
        name: String,
    },

    /// `WARPOOL_SIM` is invalid.
    #[error(
        "WARPOOL_SIM: {why}; it takes devices:N, memory_mb:N, seed:N and track_suballocations:True, separated by commas"
    )]
    Sim {
        /// What is wrong.
        why: String,
    },

    /// `WARPOOL_PUBLISH` is invalid.
    #[error("WARPOOL_PUBLISH: {value:?} is none of True, read-only and False")]
    Publish {
        /// Its value.
        value: String,
    },

    /// No elastic memory begins at an address.
    #[error("no elastic memory begins at {ptr}: pass what warpool_elastic_reserve returned, until it is released")]
    NotElastic {
        /// The address.
        ptr: DevicePtr,
    },

    /// A second tensor over elastic memory.
    #[error("the elastic memory at {ptr} has a tensor already, which owns it; use that one, or a view of it")]
    ElasticHasTensor {
        /// The address.
        ptr: DevicePtr,
    },

    /// A tensor that is not all of its elastic memory.
    #[error("a tensor of shape {shape:?} with elements of {bits} bits is not the elastic memory of {bytes} bytes")]
    ElasticShape {
        /// Its shape.
        shape: Vec<i64>,
        /// The bits of an element.
        bits: u8,
        /// The bytes of the memory.
        bytes: u64,
    },

    /// An environment variable is not UTF-8.
    #[error("{variable}: the value is not valid UTF-8")]
    Variable {
        /// The variable.
        variable: &'static str,
    },

    /// A negative size.
    #[error("cannot allocate {bytes} bytes; check how the size was computed")]
    NegativeSize {
        /// The size.
        bytes: isize,
    },

    /// A negative device index.
    #[error("device index {device} is negative; devices are numbered from 0")]
    NegativeDevice {
        /// The index.
        device: i32,
    },

    /// A backend whose memory cannot sleep.
    #[error(
        "memory of backend:{backend} cannot sleep: its addresses are the driver's; \
         choose backend:native or backend:paged"
    )]
    CannotSleep {
        /// The backend.
        backend: &'static str,
    },

    /// A tag's name is empty or too long.
    #[error("a tag's name has 1 to 63 bytes, not {length}; choose another")]
    TagName {
        /// How many bytes it has.
        length: usize,
    },

    /// The end of a tag's scope that is not open.
    #[error("this scope of a tag is not open; end each once")]
    TagNotOpen,

    /// A pointer argument is null.
    #[error("the argument '{argument}' is null; pass a valid pointer")]
    Null {
        /// The argument's name.
        argument: &'static str,
    },

    /// A string argument is not UTF-8.
    #[error("the argument '{argument}' is not valid UTF-8")]
    NotUtf8 {
        /// The argument's name.
        argument: &'static str,
    },

    /// An unknown stack level.
    #[error("unknown stack level {level}; choose 0 (never), 1 (state), 2 (alloc) or 3 (all)")]
    StackLevel {
        /// The level.
        level: i32,
    },

    /// The end of a capture scope that is not open.
    #[error("pool {pool} is not being allocated to on device {device}; begin and end must be paired")]
    PoolNotOpen {
        /// PyTorch's id of the pool.
        pool: TorchPoolId,
        /// The device.
        device: u32,
    },

    /// A capture's first allocation came from a thread that began no capture, while several scopes are unbound.
    #[error(
        "several captures began on device {device}, and this allocation could belong to any of them; make the first \
         allocation of a capture on the thread that began it"
    )]
    CaptureUnclear {
        /// The device.
        device: u32,
    },

    /// A release of a pool that is not in use.
    #[error("pool {pool} is unknown on device {device}; each begin can be released once")]
    PoolUnknown {
        /// PyTorch's id of the pool.
        pool: TorchPoolId,
        /// The device.
        device: u32,
    },

    /// A pool that is being allocated to already.
    #[error("already recording to mempool_id {pool}; end it first")]
    PoolOpen {
        /// PyTorch's id of the pool.
        pool: TorchPoolId,
    },

    /// An upstream for a pool that already exists.
    #[error("pool {pool} exists already, and its allocator cannot be changed")]
    PoolExists {
        /// PyTorch's id of the pool.
        pool: TorchPoolId,
    },

    /// An option of a pool was to be set after it was used.
    #[error("pool {pool} is in use already; {option} is chosen when a pool is created")]
    OptionTooLate {
        /// PyTorch's id of the pool.
        pool: TorchPoolId,
        /// The option.
        option: &'static str,
    },

    /// A pool with an allocator of its own was to be stable.
    #[error("pool {pool} has an allocator of its own, whose memory cannot be made stable")]
    StableWithAllocator {
        /// PyTorch's id of the pool.
        pool: TorchPoolId,
    },

    /// The end of a capture's pinned memory that did not begin.
    #[error("pinned memory is not being allocated to pool {pool}; begin and end must be paired")]
    PinnedPoolNotOpen {
        /// PyTorch's id of the pool.
        pool: TorchPoolId,
    },

    /// A release of pinned memory of a pool that is not in use.
    #[error("pool {pool} has no pinned memory; each begin can be released once")]
    PinnedPoolUnknown {
        /// PyTorch's id of the pool.
        pool: TorchPoolId,
    },

    /// A filter of PyTorch failed. The C++ layer has its exception.
    #[error("the filter of a memory pool failed")]
    Filter,

    /// Memory that another process cannot open.
    #[error(
        "this memory cannot be shared with other processes: it has a tag, is of a stable pool or of one with an \
         allocator of its own, of the driver's pools, or mapped on a device that cannot share such memory. Share \
         memory without a tag, choose backend:native without expandable_segments, or send a copy in host memory"
    )]
    NotShareable,

    /// Pages cannot be sent to other processes.
    #[error("pages cannot be shared with other processes, because no socket can be opened for that: {source}")]
    ShareServer {
        /// Why not.
        source: io::Error,
    },

    /// The process that shared memory does not answer.
    #[error(
        "process {process}, which shared this memory, does not answer: {source}. It must be alive, of the same user, \
         and in the same network namespace (container)"
    )]
    SharedProcess {
        /// Its id.
        process: u32,
        /// What happened.
        source: io::Error,
    },

    /// A descriptor of another process that this one may not take.
    #[error(
        "this process may not take the file descriptors by which process {process}, with PyTorch's own allocator, \
         shares memory of expandable segments: the system allows it to those only that may debug that process \
         (kernel.yama.ptrace_scope). Use Warpool there too, or no expandable_segments"
    )]
    SharedDescriptor {
        /// The process's id.
        process: u32,
    },

    /// Shared memory that does not exist any more.
    #[error(
        "memory that process {process} shared is gone: the process that shared it has freed it; keep the tensor there \
         until the other process is done with it"
    )]
    SharedMemoryGone {
        /// The process's id.
        process: u32,
    },

    /// Bytes that are no handle of shared memory.
    #[error("{length} bytes are no handle of shared memory that this version knows; use one version in all processes")]
    SharedHandle {
        /// How many.
        length: usize,
    },

    /// An operation that the backend does not have.
    #[error("{what}: not available with backend:{backend}; choose {choose}")]
    NotInBackend {
        /// The operation.
        what: &'static str,
        /// The backend.
        backend: &'static str,
        /// What to choose instead.
        choose: &'static str,
    },

    /// A snapshot could not be written. No partial file is left.
    #[error("the snapshot cannot be written to {}: {source}", path.display())]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },

    /// A recording was asked for while none can be made.
    #[error("recordings are off; call warpool.torch.enable(record=\"oom\"), or set WARPOOL_CONF=record:oom")]
    NotRecording,

    /// A recording that was asked for could not be written.
    #[error("{why}")]
    Record {
        /// Why not.
        why: String,
    },

    /// The recordings' folder cannot be found.
    #[error("the current folder, in which recordings would be written, is not there: {source}; set WARPOOL_RECORD_DIR")]
    RecordFolder {
        /// Why not.
        source: io::Error,
    },

    /// Signals or the memory in use cannot be watched.
    #[error("record_signal or record_above cannot be watched: {source}; remove them from the settings")]
    RecordWatcher {
        /// Why not.
        source: io::Error,
    },

    /// The process was forked after it had started Warpool.
    #[error(
        "this process was forked after Warpool was started, and CUDA does not survive fork: start processes by 'spawn' \
         or 'forkserver', or fork before the GPU is first used"
    )]
    Forked,

    /// The paged allocator maps memory, which a device here cannot.
    #[error("backend:paged needs virtual memory management, which a device here does not have; choose backend:native")]
    NoVirtualMemory,

    /// The name of a backend that does not exist.
    #[error("unknown backend {name:?}; choose native, paged or cudaMallocAsync")]
    UnknownBackend {
        /// The name.
        name: String,
    },

    /// A bug in Warpool.
    #[error("internal error in Warpool: {text}; please report it")]
    Panic {
        /// The panic message.
        text: String,
    },
}

impl Error {
    /// Whether it is out of memory, for which PyTorch has its own exception type.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Warpool(warpool::Error::Driver(error)) => error.is_out_of_memory(),
            Self::Warpool(error) => {
                matches!(error, warpool::Error::OutOfMemory(_) | warpool::Error::RequestTooLarge { .. })
            }
            _ => false,
        }
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Self::Warpool(error.into())
    }
}
