//! The memory that a copy can read and write: typed memory, and ordinary host memory.

use bytemuck::Pod;

use super::device_vec::DeviceVec;
use super::pinned_vec::PinnedVec;
use super::view::{IntoView, IntoViewMut, View, ViewMut};

/// Memory that [`Stream::copy`](crate::Stream::copy) can read: a [`DeviceVec`], a [`PinnedVec`], a view of one, or
/// ordinary host memory, by reference. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not memory of `{T}` that a copy can read",
    note = "both sides of a copy have the same element type; pass them by reference"
)]
pub trait CopySource<'a, T>: sealed::Source<'a, T> {}

/// Memory that [`Stream::copy`](crate::Stream::copy) can write: a [`DeviceVec`], a [`PinnedVec`], a view of one, or
/// ordinary host memory, by exclusive reference. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not memory of `{T}` that a copy can write",
    note = "both sides of a copy have the same element type; pass the target by `&mut`"
)]
pub trait CopyTarget<'a, T>: sealed::Target<'a, T> {}

/// The source of a copy.
#[derive(Debug)]
pub enum SourceMemory<'a, T> {
    Typed(View<'a, T>),
    Ordinary(&'a [T]),
}

/// The target of a copy.
#[derive(Debug)]
pub enum TargetMemory<'a, T> {
    Typed(ViewMut<'a, T>),
    Ordinary(&'a mut [T]),
}

impl<T: Pod> SourceMemory<'_, T> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Typed(view) => view.len(),
            Self::Ordinary(slice) => slice.len(),
        }
    }
}

impl<T: Pod> TargetMemory<'_, T> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Typed(view) => view.len(),
            Self::Ordinary(slice) => slice.len(),
        }
    }
}

mod sealed {
    use super::{SourceMemory, TargetMemory};

    pub trait Source<'a, T> {
        fn source(self) -> SourceMemory<'a, T>;
    }

    pub trait Target<'a, T> {
        fn target(self) -> TargetMemory<'a, T>;
    }
}

/// Declares the types of typed memory.
macro_rules! typed {
    (source $($source:ty),*; target $($target:ty),*;) => {
        $(
            impl<'a, T: Pod> sealed::Source<'a, T> for $source {
                fn source(self) -> SourceMemory<'a, T> {
                    SourceMemory::Typed(self.into_view())
                }
            }

            impl<'a, T: Pod> CopySource<'a, T> for $source {}
        )*
        $(
            impl<'a, T: Pod> sealed::Target<'a, T> for $target {
                fn target(self) -> TargetMemory<'a, T> {
                    TargetMemory::Typed(self.into_view_mut())
                }
            }

            impl<'a, T: Pod> CopyTarget<'a, T> for $target {}
        )*
    };
}

typed! {
    source &'a DeviceVec<T>, &'a PinnedVec<T>, View<'a, T>, &View<'a, T>, &'a ViewMut<'_, T>;
    target &'a mut DeviceVec<T>, &'a mut PinnedVec<T>, ViewMut<'a, T>, &'a mut ViewMut<'_, T>;
}

/// Declares the types of ordinary host memory.
macro_rules! ordinary {
    ($(($($generics:tt)*) $slice:ty;)*) => {$(
        impl<'a, T: Pod, $($generics)*> sealed::Source<'a, T> for &'a $slice {
            fn source(self) -> SourceMemory<'a, T> {
                SourceMemory::Ordinary(self)
            }
        }

        impl<'a, T: Pod, $($generics)*> CopySource<'a, T> for &'a $slice {}

        impl<'a, T: Pod, $($generics)*> sealed::Target<'a, T> for &'a mut $slice {
            fn target(self) -> TargetMemory<'a, T> {
                TargetMemory::Ordinary(self)
            }
        }

        impl<'a, T: Pod, $($generics)*> CopyTarget<'a, T> for &'a mut $slice {}
    )*};
}

ordinary! {
    () [T];
    () Vec<T>;
    (const N: usize) [T; N];
}
