//! Why a call through the C interface failed. Callers get a text, and PyTorch's users read it, so each says what to do.

use std::io;
use std::path::PathBuf;

use warpool::memory::SettingsError;
use warpool_cuda::OpenError;
use warpool_driver::DriverError;

use crate::captures::TorchPool;

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Something below said no; out of memory is among it.
    #[error(transparent)]
    Warpool(#[from] warpool::Error),

    /// A settings string is wrong.
    #[error(transparent)]
    Settings(#[from] SettingsError),

    /// The variable that settings were taken from has a wrong string.
    #[error("{variable}: {source}")]
    SettingsOf {
        /// Which variable.
        variable: &'static str,
        /// What is wrong.
        source: SettingsError,
    },

    /// The CUDA driver does not open.
    #[error("the driver 'cuda' cannot be opened: {0} (WARPOOL_DRIVER=sim needs none)")]
    Cuda(#[from] OpenError),

    /// There is no driver of that name.
    #[error("WARPOOL_DRIVER: there is no driver {name:?}; choose cuda, the default, or sim")]
    UnknownDriver {
        /// What was asked for.
        name: String,
    },

    /// The variable that describes the simulated GPU is wrong.
    #[error("WARPOOL_SIM: {why}; it takes devices:N, memory_mb:N, seed:N and notes:True, with commas between them")]
    Sim {
        /// What is wrong.
        why: String,
    },

    /// A variable holds something that is no text.
    #[error("{variable}: its value is no UTF-8 text")]
    Variable {
        /// Which.
        variable: &'static str,
    },

    /// Sizes are not negative.
    #[error("cannot allocate {bytes} bytes; check how the size was computed")]
    NegativeSize {
        /// What was asked for.
        bytes: isize,
    },

    /// Nor are devices.
    #[error("there is no device {device}: devices are numbered from 0; name one by its number")]
    NegativeDevice {
        /// What was asked for.
        device: i32,
    },

    /// A pointer that must not be null was.
    #[error("the argument '{what}' is null; pass an address")]
    Null {
        /// Which argument.
        what: &'static str,
    },

    /// A text argument is no UTF-8.
    #[error("the argument '{what}' is no UTF-8 text")]
    NotText {
        /// Which argument.
        what: &'static str,
    },

    /// There are four levels.
    #[error("there is no stack level {level}: choose 0 (never), 1 (state), 2 (alloc) or 3 (all)")]
    StackLevel {
        /// What was asked for.
        level: i32,
    },

    /// A pool's scope was to be closed that is not open.
    #[error("pool {pool} is not being allocated to on device {device}; begin and end must be paired")]
    PoolNotOpen {
        /// PyTorch's name for it.
        pool: TorchPool,
        /// On which device.
        device: u32,
    },

    /// A capture's first allocation came from a thread that began no capture, while several wait for theirs.
    #[error(
        "several captures began on device {device}, and it is unclear whose memory this is for; let the thread that began a capture make \
         its first allocation"
    )]
    CaptureUnclear {
        /// On which device.
        device: u32,
    },

    /// A pool was to be released that nobody uses.
    #[error("pool {pool} is unknown on device {device}; each begin can be released once")]
    PoolUnknown {
        /// PyTorch's name for it.
        pool: TorchPool,
        /// On which device.
        device: u32,
    },

    /// A snapshot could not be written. Nothing is left of it.
    #[error("the snapshot cannot be written to {}: {source}", path.display())]
    Snapshot {
        /// Where to.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },

    /// Only the caching allocator can change its settings while it works.
    #[error("with backend:cudaMallocAsync the settings are those of the start; set them in the environment")]
    FixedSettings,

    /// A bug of ours.
    #[error("internal error in Warpool: {text}; please report it")]
    Panic {
        /// What the panic said.
        text: String,
    },
}

impl Error {
    /// Whether it is for lack of memory, which PyTorch has an exception of its own for.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Warpool(warpool::Error::OutOfMemory(_) | warpool::Error::RequestTooLarge { .. }))
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Self::Warpool(error.into())
    }
}
