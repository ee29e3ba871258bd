//! Ids and addresses: newtyped numbers, so that a stream cannot be passed for an event.
//!
//! A driver never reuses an id, even if the raw handle is reused: a stale id is an error
//! ([`ErrorCode::InvalidHandle`](crate::ErrorCode::InvalidHandle)), never another object.

use std::fmt;

/// Declares ids: numbers with a name, ordered by age.
macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident($inner:ty) = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    )*};
}

ids! {
    /// A device, by its ordinal: 0 up to the device count.
    DeviceId(u32) = "device ";
    /// A stream of one device.
    StreamId(u64) = "stream ";
    /// An event of one device.
    EventId(u64) = "event ";
    /// Physical memory that can be mapped into reserved addresses.
    PhysicalId(u64) = "physical ";
    /// A stream-ordered memory pool of the driver.
    PoolId(u64) = "pool ";
    /// A stream capture, from its begin to its end, with all streams that joined it.
    CaptureId(u64) = "capture ";
    /// A captured graph, the template of executables.
    GraphId(u64) = "graph ";
    /// An executable graph.
    GraphExecId(u64) = "graph exec ";
    /// A node of a graph; valid while the graph exists.
    NodeId(u64) = "node ";
    /// The flag of an `if` or `while` node of a graph.
    ConditionalId(u64) = "conditional ";
    /// A loaded module.
    ModuleId(u64) = "module ";
    /// A kernel in a module.
    FunctionId(u64) = "function ";
    /// A handle of a library: cuBLAS, cuDNN and the like.
    HandleId(u64) = "handle ";
    /// Registered memory of the simulated GPU.
    RegistrationId(u64) = "registration ";
}

/// A handle of the system below (a `CUstream`, a `CUcontext`, …), for libraries that need one. Only a number here: no
/// safe function dereferences it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RawHandle(pub u64);

impl fmt::Debug for RawHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for RawHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "raw {:#x}", self.0)
    }
}

/// A stream that was created outside the driver, to be adopted by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignStream(RawHandle);

impl ForeignStream {
    /// The legacy default stream, by its usual handle.
    pub const NULL: Self = Self(RawHandle(0));
    /// The legacy default stream, by its other handle.
    pub const LEGACY: Self = Self(RawHandle(1));
    /// The per-thread default stream.
    pub const PER_THREAD: Self = Self(RawHandle(2));

    /// The stream with that handle.
    ///
    /// # Safety
    /// - It must be a stream of the driver's underlying system, and exist for as long as it is used through that
    ///   driver: a real driver dereferences the handle like a pointer.
    /// - If its capture is begun outside of that driver: while a call of the driver reads or changes the capture
    ///   (`capture_dependencies`, `capture_topology`, `conditional_create`, `conditional_begin`), nothing outside of
    ///   the driver adds work to the capture or ends it. Modules whose kernels the driver put into the capture stay
    ///   loaded as long as graphs and executables made from the capture exist.
    #[must_use]
    pub const unsafe fn new(raw: RawHandle) -> Self {
        Self(raw)
    }

    /// Its handle.
    #[must_use]
    pub const fn raw(self) -> RawHandle {
        self.0
    }
}

/// Declares addresses: numbers shown in hexadecimal, with byte arithmetic.
macro_rules! addresses {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// The address `bytes` bytes higher.
            #[must_use]
            pub const fn offset(self, bytes: u64) -> Self {
                Self(self.0.wrapping_add(bytes))
            }

            /// Whether this is the null address.
            #[must_use]
            pub const fn is_null(self) -> bool {
                self.0 == 0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    )*};
}

addresses! {
    /// A device address.
    DevicePtr;
    /// An address of pinned host memory. Drivers check it against the ranges that they pinned.
    HostPtr;
}

/// The source or target of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// A device address.
    Device(DevicePtr),
    /// Pinned host memory.
    Host(HostPtr),
}

impl From<DevicePtr> for Address {
    fn from(ptr: DevicePtr) -> Self {
        Self::Device(ptr)
    }
}

impl From<HostPtr> for Address {
    fn from(ptr: HostPtr) -> Self {
        Self::Host(ptr)
    }
}
