//! Numbers of what a device has, each a type of its own.

/// A number that is the index of something in a list.
macro_rules! ids {
    ($($(#[$about:meta])* $name:ident)*) => {
        $(
            $(#[$about])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
            pub(super) struct $name(pub(super) u32);

            impl $name {
                /// The number of what is at this place in a list.
                pub(super) fn at(index: usize) -> Self {
                    Self(u32::try_from(index).expect("fewer than 2^32"))
                }

                #[inline]
                pub(super) fn index(self) -> usize {
                    self.0 as usize
                }
            }
        )*
    };
}

ids! {
    /// A heap of a device.
    HeapId
    /// A block of a heap.
    BlockId
    /// A range of addresses, among those of an area of a heap.
    RangeInHeap
    /// A page of physical memory.
    PageId
    /// A range of addresses, among all of the device.
    RangeId
}
