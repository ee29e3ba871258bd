//! Errors of driver calls: the call, CUDA's code, and details beyond the code.

use std::fmt;

/// The result of a driver call.
pub type Result<T> = std::result::Result<T, DriverError>;

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct DriverError {
    /// The call of the contract that failed, by the name of its method.
    pub call: &'static str,
    /// CUDA's code.
    pub code: ErrorCode,
    /// Details beyond the code: the missing library, the compiler's log, the violated rule.
    pub detail: Option<Box<str>>,
}

impl DriverError {
    /// A failure of `call` with `code`, without details.
    #[must_use]
    pub const fn new(call: &'static str, code: ErrorCode) -> Self {
        Self { call, code, detail: None }
    }

    /// Adds details.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into().into_boxed_str());
        self
    }

    /// There was not enough memory. Freeing memory and trying again may help.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self.code, ErrorCode::OutOfMemory)
    }

    /// The queried work has not finished yet. Not a failure of the device.
    #[must_use]
    pub const fn is_not_ready(&self) -> bool {
        matches!(self.code, ErrorCode::NotReady)
    }

    /// A rule of stream capture was violated. The capture that forbade the call is usually invalidated.
    #[must_use]
    pub const fn is_capture_forbidden(&self) -> bool {
        matches!(self.code.number(), 900..=908)
    }

    /// The context is unusable: every later call on that device fails with this code until the process ends.
    #[must_use]
    pub const fn is_sticky(&self) -> bool {
        matches!(
            self.code,
            ErrorCode::IllegalAddress
                | ErrorCode::LaunchTimeout
                | ErrorCode::ContextIsDestroyed
                | ErrorCode::Assert
                | ErrorCode::HardwareStackError
                | ErrorCode::IllegalInstruction
                | ErrorCode::MisalignedAddress
                | ErrorCode::InvalidAddressSpace
                | ErrorCode::InvalidPc
                | ErrorCode::LaunchFailed
                | ErrorCode::EccUncorrectable
                | ErrorCode::NvlinkUncorrectable
                | ErrorCode::ExternalDevice
        )
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.code)?;
        match &self.detail {
            Some(detail) => write!(f, ": {detail}"),
            None => Ok(()),
        }
    }
}

/// Declares the codes: our name, CUDA's number, CUDA's name, and the meaning.
macro_rules! codes {
    ($($name:ident = $number:literal $cuda:ident $meaning:literal;)*) => {
        /// CUDA's result codes. Unlisted numbers are [`ErrorCode::Unknown`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode {
            $(#[doc = concat!("`", stringify!($cuda), "`: ", $meaning, ".")] $name,)*
            /// An unlisted code, most likely of a newer driver.
            Unknown(u32),
        }

        impl ErrorCode {
            /// The code with CUDA's number `number`.
            #[must_use]
            pub const fn from_number(number: u32) -> Self {
                match number {
                    $($number => Self::$name,)*
                    other => Self::Unknown(other),
                }
            }

            /// CUDA's number.
            #[must_use]
            pub const fn number(self) -> u32 {
                match self {
                    $(Self::$name => $number,)*
                    Self::Unknown(number) => number,
                }
            }

            /// CUDA's name, if the code is listed.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$name => Some(stringify!($cuda)),)*
                    Self::Unknown(_) => None,
                }
            }

            /// The meaning, in a few words.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => $meaning,)*
                    Self::Unknown(_) => "unknown to this version",
                }
            }

            /// Every listed code, by number.
            pub const NAMED: &'static [Self] = &[$(Self::$name,)*];
        }
    };
}

codes! {
    InvalidValue = 1 CUDA_ERROR_INVALID_VALUE "an argument is out of its range";
    OutOfMemory = 2 CUDA_ERROR_OUT_OF_MEMORY "not enough memory";
    NotInitialized = 3 CUDA_ERROR_NOT_INITIALIZED "the driver was not initialized";
    Deinitialized = 4 CUDA_ERROR_DEINITIALIZED "the driver is shutting down";
    StubLibrary = 34 CUDA_ERROR_STUB_LIBRARY "the driver library is a stub for linking only";
    DeviceUnavailable = 46 CUDA_ERROR_DEVICE_UNAVAILABLE "the device is busy or unavailable";
    NoDevice = 100 CUDA_ERROR_NO_DEVICE "no device was found";
    InvalidDevice = 101 CUDA_ERROR_INVALID_DEVICE "no device has that number";
    InvalidImage = 200 CUDA_ERROR_INVALID_IMAGE "the code image is not valid";
    InvalidContext = 201 CUDA_ERROR_INVALID_CONTEXT "no usable context";
    MapFailed = 205 CUDA_ERROR_MAP_FAILED "mapping failed";
    UnmapFailed = 206 CUDA_ERROR_UNMAP_FAILED "unmapping failed";
    AlreadyMapped = 208 CUDA_ERROR_ALREADY_MAPPED "it is mapped already";
    NotMapped = 211 CUDA_ERROR_NOT_MAPPED "it is not mapped";
    EccUncorrectable = 214 CUDA_ERROR_ECC_UNCORRECTABLE "uncorrectable memory error";
    PeerAccessUnsupported = 217 CUDA_ERROR_PEER_ACCESS_UNSUPPORTED "these devices cannot reach each other";
    InvalidPtx = 218 CUDA_ERROR_INVALID_PTX "the PTX could not be compiled";
    NvlinkUncorrectable = 220 CUDA_ERROR_NVLINK_UNCORRECTABLE "uncorrectable error on the link between devices";
    UnsupportedPtxVersion = 222 CUDA_ERROR_UNSUPPORTED_PTX_VERSION "the code was compiled for a newer driver";
    InvalidSource = 300 CUDA_ERROR_INVALID_SOURCE "the source could not be compiled";
    FileNotFound = 301 CUDA_ERROR_FILE_NOT_FOUND "file not found";
    SharedObjectSymbolNotFound = 302 CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND
        "a symbol is missing in a shared library";
    SharedObjectInitFailed = 303 CUDA_ERROR_SHARED_OBJECT_INIT_FAILED "a shared library could not be loaded";
    OperatingSystem = 304 CUDA_ERROR_OPERATING_SYSTEM "a call to the operating system failed";
    InvalidHandle = 400 CUDA_ERROR_INVALID_HANDLE "the handle is not valid";
    IllegalState = 401 CUDA_ERROR_ILLEGAL_STATE "not allowed in this state";
    NotFound = 500 CUDA_ERROR_NOT_FOUND "no such name";
    NotReady = 600 CUDA_ERROR_NOT_READY "the work has not finished yet";
    IllegalAddress = 700 CUDA_ERROR_ILLEGAL_ADDRESS "the device accessed an address that it may not access";
    LaunchOutOfResources = 701 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES "the launch needs more resources than the device has";
    LaunchTimeout = 702 CUDA_ERROR_LAUNCH_TIMEOUT "a kernel ran too long";
    PeerAccessAlreadyEnabled = 704 CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED "peer access is enabled already";
    PeerAccessNotEnabled = 705 CUDA_ERROR_PEER_ACCESS_NOT_ENABLED "peer access is not enabled";
    PrimaryContextActive = 708 CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE "the primary context is in use";
    ContextIsDestroyed = 709 CUDA_ERROR_CONTEXT_IS_DESTROYED "the context was destroyed";
    Assert = 710 CUDA_ERROR_ASSERT "an assertion in a kernel failed";
    TooManyPeers = 711 CUDA_ERROR_TOO_MANY_PEERS "the limit of peers is reached";
    HostMemoryAlreadyRegistered = 712 CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED "the host memory is pinned already";
    HostMemoryNotRegistered = 713 CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED "the host memory is not pinned";
    HardwareStackError = 714 CUDA_ERROR_HARDWARE_STACK_ERROR "the device's call stack is corrupt";
    IllegalInstruction = 715 CUDA_ERROR_ILLEGAL_INSTRUCTION "a kernel ran an illegal instruction";
    MisalignedAddress = 716 CUDA_ERROR_MISALIGNED_ADDRESS "a kernel used a misaligned address";
    InvalidAddressSpace = 717 CUDA_ERROR_INVALID_ADDRESS_SPACE "a kernel used the wrong kind of memory";
    InvalidPc = 718 CUDA_ERROR_INVALID_PC "a kernel jumped to an invalid address";
    LaunchFailed = 719 CUDA_ERROR_LAUNCH_FAILED "a kernel failed";
    CooperativeLaunchTooLarge = 720 CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        "a cooperative launch is too large for the device";
    NotPermitted = 800 CUDA_ERROR_NOT_PERMITTED "not permitted here";
    NotSupported = 801 CUDA_ERROR_NOT_SUPPORTED "not supported by this device or driver";
    SystemNotReady = 802 CUDA_ERROR_SYSTEM_NOT_READY "the system is not ready";
    SystemDriverMismatch = 803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH "driver library and kernel module do not match";
    CompatNotSupportedOnDevice = 804 CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
        "the device does not support a newer driver library";
    StreamCaptureUnsupported = 900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED "not allowed while a stream captures";
    StreamCaptureInvalidated = 901 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED "an earlier call invalidated the capture";
    StreamCaptureMerge = 902 CUDA_ERROR_STREAM_CAPTURE_MERGE "this would merge two captures";
    StreamCaptureUnmatched = 903 CUDA_ERROR_STREAM_CAPTURE_UNMATCHED "the capture did not begin on this stream";
    StreamCaptureUnjoined = 904 CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        "a stream of the capture was not joined to the first";
    StreamCaptureIsolation = 905 CUDA_ERROR_STREAM_CAPTURE_ISOLATION "this would depend on work outside the capture";
    StreamCaptureImplicit = 906 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT "the default stream would depend on the capture";
    CapturedEvent = 907 CUDA_ERROR_CAPTURED_EVENT "the event was last recorded in a capture";
    StreamCaptureWrongThread = 908 CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD "the capture began on another thread";
    Timeout = 909 CUDA_ERROR_TIMEOUT "it took longer than allowed";
    GraphExecUpdateFailure = 910 CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE "a graph cannot be changed in that way";
    ExternalDevice = 911 CUDA_ERROR_EXTERNAL_DEVICE "an external device failed";
    InvalidClusterSize = 912 CUDA_ERROR_INVALID_CLUSTER_SIZE "the cluster size is not possible";
    UnknownError = 999 CUDA_ERROR_UNKNOWN "the driver does not say why";
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({}): {}", self.number(), self.meaning()),
            None => write!(f, "CUDA error {}: {}", self.number(), self.meaning()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_convert_to_numbers_and_back() {
        for &code in ErrorCode::NAMED {
            assert_eq!(ErrorCode::from_number(code.number()), code);
        }
        assert!(ErrorCode::NAMED.windows(2).all(|pair| pair[0].number() < pair[1].number()));
    }

    #[test]
    fn unknown_codes_keep_their_numbers() {
        let error = DriverError::new("mem_alloc", ErrorCode::from_number(4242));
        assert_eq!(error.code, ErrorCode::Unknown(4242));
        assert_eq!(error.to_string(), "mem_alloc: CUDA error 4242: unknown to this version");
    }

    #[test]
    fn predicates_match_their_codes() {
        let kinds = |code| {
            let e = DriverError::new("x", code);
            (e.is_out_of_memory(), e.is_not_ready(), e.is_capture_forbidden(), e.is_sticky())
        };
        assert_eq!(kinds(ErrorCode::OutOfMemory), (true, false, false, false));
        assert_eq!(kinds(ErrorCode::NotReady), (false, true, false, false));
        assert_eq!(kinds(ErrorCode::StreamCaptureWrongThread), (false, false, true, false));
        assert_eq!(kinds(ErrorCode::IllegalAddress), (false, false, false, true));
        assert_eq!(kinds(ErrorCode::InvalidValue), (false, false, false, false));
    }
}
