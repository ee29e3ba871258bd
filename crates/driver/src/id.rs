//! The names of things: newtyped numbers, so that a stream cannot be passed for an event.
//!
//! Ids that a driver hands out are never reused, even where the raw handle behind them is: a stale id is
//! an error ([`ErrorCode::InvalidHandle`](crate::ErrorCode::InvalidHandle)), never another object.

use std::fmt;

/// Declares an id: a number with a name, ordered by age.
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
    /// A piece of physical memory that can be mapped into reserved addresses.
    PhysicalId(u64) = "physical ";
    /// A stream-ordered memory pool of the driver.
    PoolId(u64) = "pool ";
    /// One capture, from begin to end; shared by every stream that joined it.
    CaptureId(u64) = "capture ";
    /// A captured graph, the template.
    GraphId(u64) = "graph ";
    /// A graph made ready to launch.
    GraphExecId(u64) = "graph exec ";
    /// A node of a graph. Valid as long as its graph.
    NodeId(u64) = "node ";
    /// The flag that an `if` or `while` node of a graph tests.
    ConditionalId(u64) = "conditional ";
    /// Loaded code.
    ModuleId(u64) = "module ";
    /// A kernel in a module.
    FunctionId(u64) = "function ";
    /// A handle of a library: cuBLAS, cuDNN and the like.
    HandleId(u64) = "handle ";
}

/// A handle as the driver itself knows it (a `CUstream`, a `CUcontext`, …), for libraries that want one. Only a number
/// here: nothing that is safe to call follows it.
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

/// A stream that somebody else made and keeps alive, so that it can be adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignStream(RawHandle);

impl ForeignStream {
    /// The legacy default stream, as most libraries name it.
    pub const NULL: Self = Self(RawHandle(0));
    /// The legacy default stream by its other name.
    pub const LEGACY: Self = Self(RawHandle(1));
    /// The default stream of whichever thread uses it.
    pub const PER_THREAD: Self = Self(RawHandle(2));

    /// The stream with that handle.
    ///
    /// # Safety
    /// It must be a live stream of the driver that it is given to, and stay alive for as long as it is used through
    /// that driver: a real driver follows the handle like a pointer.
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

/// Declares an address: a number with hexadecimal looks and byte arithmetic.
macro_rules! addresses {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// The address that lies `bytes` further on.
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
    /// An address that the device understands.
    DevicePtr;
    /// An address of pinned host memory. Drivers check it against what they pinned before they use it.
    HostPtr;
}

/// Either side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// Memory that the device addresses.
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
