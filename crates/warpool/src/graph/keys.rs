//! Keys of the memory that a graph owns. A key is a number, so it can be stored next to the graph without borrowing it.
//! It is valid only for the capture that returned it, and for the graph of that capture.

/// Declares the key of one kind of memory, and addresses in it.
macro_rules! keys {
    ($($key:ident, $offset:ident in $kind:ident: $memory:literal;)*) => {$(
        #[doc = concat!("A buffer of ", $memory, " in one capture, and in its graph.")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $key {
            pub(super) capture: u64,
            pub(super) index: u32,
        }

        #[doc = concat!("An address in a buffer of ", $memory, ".")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $offset {
            /// The buffer.
            pub key: $key,
            /// Bytes from its start.
            pub offset: u64,
        }

        impl $key {
            /// The address `offset` bytes after its start.
            #[must_use]
            pub const fn at(self, offset: u64) -> $offset {
                $offset { key: self, offset }
            }
        }

        impl From<$key> for $offset {
            fn from(key: $key) -> Self {
                key.at(0)
            }
        }

        impl From<$key> for CopyEndpoint {
            fn from(key: $key) -> Self {
                Self::$kind(key.into())
            }
        }

        impl From<$offset> for CopyEndpoint {
            fn from(at: $offset) -> Self {
                Self::$kind(at)
            }
        }
    )*};
}

keys! {
    BufferKey, BufferOffset in Device: "device memory";
    HostKey, HostOffset in Host: "pinned host memory";
}

/// Source or destination of a captured copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEndpoint {
    /// Device memory.
    Device(BufferOffset),
    /// Pinned host memory.
    Host(HostOffset),
}
