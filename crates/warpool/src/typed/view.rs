//! Views of typed memory: [`View`] and [`ViewMut`], which borrow their vector like slices do, and [`Rows`] and
//! [`RowsMut`], evenly spaced parts of one, for 2D copies.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};

use bytemuck::Pod;
use warpool_driver::{Address, DevicePtr};

use super::buffer::Buffer;
use super::operation::{Access, Memory};
use super::order::Span;
use crate::error::BufferError;
use crate::{Result, Stream};

/// Shared access to a range of a [`DeviceVec`](super::DeviceVec) or [`PinnedVec`](super::PinnedVec): like `&[T]` of a
/// `Vec`.
pub struct View<'a, T> {
    pub(super) part: Part<'a, T>,
}

/// Exclusive access to a range, like `&mut [T]` of a `Vec`.
pub struct ViewMut<'a, T> {
    pub(super) part: Part<'a, T>,
}

/// A range of a buffer.
pub(super) struct Part<'a, T> {
    buffer: &'a Buffer,
    range: Range<usize>,
    /// Whether the vector itself is borrowed exclusively for it, so that no other view of any part is in use.
    exclusive: bool,
    elements: PhantomData<&'a T>,
}

impl<T> Clone for Part<'_, T> {
    fn clone(&self) -> Self {
        Self { buffer: self.buffer, range: self.range.clone(), exclusive: self.exclusive, elements: PhantomData }
    }
}

impl<T> fmt::Debug for Part<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "elements {:?} of {:?}", self.range, self.buffer)
    }
}

impl<T> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.part.fmt(f)
    }
}

impl<T> fmt::Debug for ViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.part.fmt(f)
    }
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        Self { part: self.part.clone() }
    }
}

impl<'a, T: Pod> Part<'a, T> {
    #[inline]
    pub(super) fn shared(buffer: &'a Buffer, len: usize) -> Self {
        Self { buffer, range: 0..len, exclusive: false, elements: PhantomData }
    }

    #[inline]
    pub(super) fn exclusive(buffer: &'a mut Buffer, len: usize) -> Self {
        Self { buffer, range: 0..len, exclusive: true, elements: PhantomData }
    }

    /// The same part, while other views exist.
    fn beside_others(&self) -> Self {
        Self { exclusive: false, ..self.clone() }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.range.len()
    }

    #[inline]
    pub(super) fn bytes(&self) -> u64 {
        (self.len() * size_of::<T>()) as u64
    }

    #[inline]
    fn offset(&self) -> u64 {
        if crate::defect::Defect::ViewStartsEarly.is_on() && self.range.start > 0 && !self.exclusive {
            return ((self.range.start - 1) * size_of::<T>()) as u64;
        }
        (self.range.start * size_of::<T>()) as u64
    }

    #[inline]
    pub(super) fn buffer(&self) -> &'a Buffer {
        self.buffer
    }

    #[inline]
    pub(super) fn address(&self) -> Address {
        self.buffer.address(self.offset())
    }

    #[inline]
    pub(super) fn device_address(&self) -> DevicePtr {
        self.buffer.device_address(self.offset())
    }

    /// Whether a use in `stream`, outside of captures, needs no record.
    #[inline]
    pub(super) fn is_private_to(&self, stream: &Stream) -> bool {
        self.buffer.is_private_to(stream)
    }

    /// A use of all of it.
    #[inline]
    pub(super) fn access(&self, write: bool) -> Access<'a> {
        let start = self.offset();
        let span = Span { start, end: start + self.bytes(), write };
        Access { memory: Memory::Buffer(self.buffer), span, exclusive: self.exclusive }
    }

    pub(super) fn sub(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let start = match range.start_bound() {
            Bound::Included(&start) => Some(start),
            Bound::Excluded(&before) => before.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.checked_add(1),
            Bound::Excluded(&end) => Some(end),
            Bound::Unbounded => Some(self.len()),
        };
        match (start, end) {
            (Some(start), Some(end)) if start <= end && end <= self.len() => {
                let range = self.range.start + start..self.range.start + end;
                Ok(Self { range, ..self.clone() })
            }
            _ => {
                let (start, end) = (start.unwrap_or(usize::MAX), end.unwrap_or(usize::MAX));
                Err(BufferError::Range { start, end, len: self.len() }.into())
            }
        }
    }
}

impl<'a, T: Pod> View<'a, T> {
    /// How many elements it has.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.part.len()
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A part of it. [`BufferError::Range`] if the range does not lie in it.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'a, T>> {
        Ok(Self { part: self.part.sub(range)? })
    }

    /// The parts before `middle` and from `middle` on.
    pub fn split_at(&self, middle: usize) -> Result<(View<'a, T>, View<'a, T>)> {
        Ok((self.slice(..middle)?, self.slice(middle..)?))
    }

    /// `rows` rows of `columns` elements, each `stride` elements after the one before it.
    pub fn rows(&self, rows: usize, columns: usize, stride: usize) -> Result<Rows<'a, T>> {
        Ok(Rows { shape: RowShape::new(&self.part, rows, columns, stride)?, part: self.part.clone() })
    }
}

impl<'a, T: Pod> ViewMut<'a, T> {
    /// How many elements it has.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.part.len()
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Shared access to it.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        View { part: self.part.beside_others() }
    }

    /// Exclusive access to it for a shorter time.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { part: self.part.clone() }
    }

    /// Shared access to a part of it.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>> {
        self.view().slice(range)
    }

    /// Exclusive access to a part of it.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>> {
        Ok(ViewMut { part: self.part.sub(range)? })
    }

    /// A part of it, with the same lifetime.
    pub fn into_slice(self, range: impl RangeBounds<usize>) -> Result<ViewMut<'a, T>> {
        Ok(Self { part: self.part.sub(range)? })
    }

    /// The parts before `middle` and from `middle` on. Streams that use different parts do not wait for each other.
    pub fn split_at_mut(self, middle: usize) -> Result<(ViewMut<'a, T>, ViewMut<'a, T>)> {
        let part = self.part.beside_others();
        Ok((Self { part: part.sub(..middle)? }, Self { part: part.sub(middle..)? }))
    }

    /// As [`View::rows`], to be written.
    pub fn rows_mut(&mut self, rows: usize, columns: usize, stride: usize) -> Result<RowsMut<'_, T>> {
        Ok(RowsMut { shape: RowShape::new(&self.part, rows, columns, stride)?, part: self.part.clone() })
    }
}

/// Evenly spaced rows of a view. See [`View::rows`].
#[derive(Clone, Debug)]
pub struct Rows<'a, T> {
    pub(super) part: Part<'a, T>,
    pub(super) shape: RowShape,
}

/// Evenly spaced rows of a view, to be written. See [`ViewMut::rows_mut`].
#[derive(Debug)]
pub struct RowsMut<'a, T> {
    pub(super) part: Part<'a, T>,
    pub(super) shape: RowShape,
}

/// The shape of rows, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowShape {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) stride: usize,
}

impl RowShape {
    fn new<T: Pod>(part: &Part<'_, T>, rows: usize, columns: usize, stride: usize) -> Result<Self> {
        let len = part.len();
        let needed = rows.checked_sub(1).map_or(Some(0), |gaps| gaps.checked_mul(stride)?.checked_add(columns));
        if stride < columns || needed.is_none_or(|needed| needed > len) {
            return Err(BufferError::Rows { rows, columns, stride, len }.into());
        }
        Ok(Self { rows, columns, stride })
    }
}

/// Memory that can be viewed: a vector or a view of it, by reference. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not memory of `{T}` that can be read",
    note = "pass a reference to a `DeviceVec`, `PinnedVec` or `View` of the same element type"
)]
pub trait IntoView<'a, T>: Sealed {
    /// The view of all of it.
    fn into_view(self) -> View<'a, T>;
}

/// Memory that can be viewed exclusively: a vector or a view of it, by exclusive reference. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not memory of `{T}` that can be written",
    note = "pass `&mut` a `DeviceVec`, `PinnedVec` or `ViewMut` of the same element type"
)]
pub trait IntoViewMut<'a, T>: Sealed {
    /// The view of all of it.
    fn into_view_mut(self) -> ViewMut<'a, T>;
}

/// Keeps other crates from implementing a trait.
pub trait Sealed {}

impl<T> Sealed for View<'_, T> {}
impl<T> Sealed for &View<'_, T> {}
impl<T> Sealed for ViewMut<'_, T> {}
impl<T> Sealed for &ViewMut<'_, T> {}
impl<T> Sealed for &mut ViewMut<'_, T> {}

impl<'a, T: Pod> IntoView<'a, T> for View<'a, T> {
    fn into_view(self) -> View<'a, T> {
        self
    }
}

impl<'a, T: Pod> IntoView<'a, T> for &View<'a, T> {
    fn into_view(self) -> View<'a, T> {
        self.clone()
    }
}

impl<'a, T: Pod> IntoView<'a, T> for &'a ViewMut<'_, T> {
    fn into_view(self) -> View<'a, T> {
        self.view()
    }
}

impl<'a, T: Pod> IntoViewMut<'a, T> for ViewMut<'a, T> {
    fn into_view_mut(self) -> ViewMut<'a, T> {
        self
    }
}

impl<'a, T: Pod> IntoViewMut<'a, T> for &'a mut ViewMut<'_, T> {
    fn into_view_mut(self) -> ViewMut<'a, T> {
        self.view_mut()
    }
}
