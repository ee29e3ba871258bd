//! Copies and fills of typed memory, as methods of [`Stream`].

use std::panic::Location;

use bytemuck::Pod;
use warpool_driver::{Address, DevicePtr, Driver, Pattern};

use super::endpoint::{CopySource, CopyTarget, SourceMemory, TargetMemory};
use super::submit::{Reach, direct, submit, submit_direct, submit_ordinary};
use super::view::{IntoView, IntoViewMut, Part, Rows, RowsMut, View, ViewMut};
use crate::capture::CaptureSafe;
use crate::error::BufferError;
use crate::{Result, Stream};

/// Typed copies and fills. Lengths, element types and devices are checked before the driver is called. The stream waits
/// for other streams that used the memory before, and the use is recorded.
impl Stream {
    /// Copies all elements of `source` to `target` in this stream: between any two of [`DeviceVec`], [`PinnedVec`],
    /// views of them, and ordinary host memory, also between devices.
    ///
    /// It returns at once, except with ordinary host memory: then it returns when the copy is complete, and cannot be
    /// captured.
    ///
    /// [`DeviceVec`]: super::DeviceVec
    /// [`PinnedVec`]: super::PinnedVec
    #[inline]
    #[track_caller]
    pub fn copy<'a, 'b, T: Pod>(&self, source: impl CopySource<'a, T>, target: impl CopyTarget<'b, T>) -> Result<()> {
        let line = Location::caller();
        match (source.source(), target.target()) {
            (SourceMemory::Typed(source), TargetMemory::Typed(target)) => self.copy_typed(source, target, line),
            (source, target) => self.copy_ordinary(source, target, line),
        }
    }

    #[inline]
    fn copy_typed<T: Pod>(
        &self,
        source: View<'_, T>,
        target: ViewMut<'_, T>,
        line: &'static Location<'static>,
    ) -> Result<()> {
        let (from, to) = (&source.part, &target.part);
        let fits = from.len() == to.len() && from.len() > 0;
        if let Some(frozen) = direct(self, || fits && from.is_private_to(self) && to.is_private_to(self)) {
            let late = || {
                from.access(false).add_late(self);
                to.access(true).add_late(self);
            };
            return submit_direct(frozen, self, line, late, || {
                Ok(self.driver().copy(to.address(), from.address(), from.bytes(), self.id())?)
            });
        }
        self.copy_in_order(source, target, line)
    }

    #[inline(never)]
    fn copy_in_order<T: Pod>(
        &self,
        source: View<'_, T>,
        target: ViewMut<'_, T>,
        line: &'static Location<'static>,
    ) -> Result<()> {
        if !expect_same_len(source.len(), target.len())? {
            return Ok(());
        }
        let accesses = [Some(source.part.access(false)), Some(target.part.access(true))];
        submit(self, &accesses, Reach::AnyDevice, line, &mut || self.queue_copy(&source.part, &target.part))
    }

    /// A copy from or to ordinary host memory.
    fn copy_ordinary<T: Pod>(
        &self,
        source: SourceMemory<'_, T>,
        target: TargetMemory<'_, T>,
        line: &'static Location<'static>,
    ) -> Result<()> {
        if !expect_same_len(source.len(), target.len())? {
            return Ok(());
        }
        match (source, target) {
            (SourceMemory::Typed(source), TargetMemory::Typed(target)) => self.copy_in_order(source, target, line),
            (SourceMemory::Ordinary(source), TargetMemory::Typed(target)) => {
                submit_ordinary(self, target.part.access(true), line, || self.upload(source, &target.part))
            }
            (SourceMemory::Typed(source), TargetMemory::Ordinary(target)) => {
                submit_ordinary(self, source.part.access(false), line, || self.download(&source.part, target))
            }
            (SourceMemory::Ordinary(source), TargetMemory::Ordinary(target)) => {
                target.copy_from_slice(source);
                Ok(())
            }
        }
    }

    /// Copies rows to rows of the same shape, as one 2D copy. Both are typed memory, and of the stream's device or
    /// pinned.
    #[track_caller]
    pub fn copy_rows<T: Pod>(&self, source: &Rows<'_, T>, target: &mut RowsMut<'_, T>) -> Result<()> {
        let line = Location::caller();
        let (from, to) = (source.shape, target.shape);
        if (from.rows, from.columns) != (to.rows, to.columns) {
            return Err(BufferError::Shape {
                source_rows: from.rows,
                source_columns: from.columns,
                target_rows: to.rows,
                target_columns: to.columns,
            }
            .into());
        }
        if from.rows == 0 || from.columns == 0 {
            source.part.buffer().expect_device_of(self)?;
            return target.part.buffer().expect_device_of(self);
        }
        let bytes = |elements: usize| (elements * size_of::<T>()) as u64;
        let accesses = [Some(source.part.access(false)), Some(target.part.access(true))];
        submit(self, &accesses, Reach::OwnDevice, line, &mut || {
            let (dst, src) = (target.part.address(), source.part.address());
            let (width, rows) = (bytes(from.columns), from.rows as u64);
            Ok(self.driver().copy_2d(dst, bytes(to.stride), src, bytes(from.stride), width, rows, self.id())?)
        })
    }

    /// Sets every element of `target` to `value`. Elements of 1, 2 and 4 bytes are one fill; others are a fill of the
    /// first element and copies that double the filled part.
    #[inline]
    #[track_caller]
    pub fn fill<'a, T: Pod>(&self, target: impl IntoViewMut<'a, T>, value: T) -> Result<()> {
        let line = Location::caller();
        let target = target.into_view_mut();
        let part = &target.part;
        if let Some(frozen) = direct(self, || !target.is_empty() && part.is_private_to(self)) {
            let late = || part.access(true).add_late(self);
            return submit_direct(frozen, self, line, late, || self.queue_fill(part, &value));
        }
        self.fill_in_order(target, value, line)
    }

    #[inline(never)]
    fn fill_in_order<T: Pod>(&self, target: ViewMut<'_, T>, value: T, line: &'static Location<'static>) -> Result<()> {
        if target.is_empty() {
            return target.part.buffer().expect_device_of(self);
        }
        let accesses = [Some(target.part.access(true))];
        submit(self, &accesses, Reach::OwnDevice, line, &mut || self.queue_fill(&target.part, &value))
    }

    /// The contents of `source` after the work that writes them: this stream waits for that work, and the host waits
    /// for this stream. Cannot be captured.
    #[track_caller]
    pub fn to_vec<'a, T: Pod>(&self, source: impl IntoView<'a, T>) -> Result<Vec<T>> {
        let source = source.into_view();
        let mut values = vec![T::zeroed(); source.len()];
        self.copy(source, &mut values)?;
        Ok(values)
    }

    fn queue_copy<T: Pod>(&self, source: &Part<'_, T>, target: &Part<'_, T>) -> Result<()> {
        let (src, dst, bytes) = (source.address(), target.address(), source.bytes());
        if let (Address::Device(dst), Address::Device(src)) = (dst, src)
            && let Some((to, from)) = target.buffer().device_id().zip(source.buffer().device_id())
            && (to != self.device_id() || from != self.device_id())
        {
            return Ok(self.driver().copy_peer(dst, to, src, from, bytes, self.id())?);
        }
        for part in [source, target] {
            part.buffer().expect_device_of(self)?;
        }
        Ok(self.driver().copy(dst, src, bytes, self.id())?)
    }

    /// Copies ordinary host memory. The driver orders this copy in the default stream, so the host first waits for all
    /// earlier work.
    fn upload<T: Pod>(&self, source: &[T], target: &Part<'_, T>) -> Result<()> {
        self.wait_for_own_work()?;
        let device = target.buffer().device_id().unwrap_or(self.device_id());
        Ok(self.driver().upload(device, target.device_address(), bytemuck::cast_slice(source))?)
    }

    fn download<T: Pod>(&self, source: &Part<'_, T>, target: &mut [T]) -> Result<()> {
        self.wait_for_own_work()?;
        let device = source.buffer().device_id().unwrap_or(self.device_id());
        Ok(self.driver().download(device, source.device_address(), bytemuck::cast_slice_mut(target))?)
    }

    fn wait_for_own_work(&self) -> Result<()> {
        let instance = self.instance();
        let _safe = CaptureSafe::begin(instance, || !instance.has_captures())?;
        self.synchronize()
    }

    #[inline]
    fn queue_fill<T: Pod>(&self, target: &Part<'_, T>, value: &T) -> Result<()> {
        let (ptr, len) = (target.device_address(), target.len() as u64);
        let value = bytemuck::bytes_of(value);
        let pattern = match *value {
            [byte] => Pattern::U8(byte),
            [a, b] => Pattern::U16(u16::from_ne_bytes([a, b])),
            [a, b, c, d] => Pattern::U32(u32::from_ne_bytes([a, b, c, d])),
            _ => return self.queue_long_fill(ptr, len, value),
        };
        Ok(self.driver().fill(ptr, pattern, len, self.id())?)
    }

    /// A fill with elements that are not one pattern.
    fn queue_long_fill(&self, ptr: DevicePtr, len: u64, value: &[u8]) -> Result<()> {
        let (driver, stream) = (self.driver(), self.id());
        if let Some((pattern, per_element)) = repeated(value) {
            return Ok(driver.fill(ptr, pattern, len * per_element, stream)?);
        }
        let word = words(value)[0].bytes();
        for (index, pattern) in words(value).into_iter().enumerate() {
            driver.fill(ptr.offset(index as u64 * word), pattern, 1, stream)?;
        }
        self.double(driver, ptr, value.len() as u64, len)
    }

    /// Copies the first of `len` elements to all others.
    fn double(&self, driver: &dyn Driver, ptr: DevicePtr, element: u64, len: u64) -> Result<()> {
        let mut filled = 1;
        while filled < len {
            let more = filled.min(len - filled);
            driver.copy(ptr.offset(filled * element).into(), ptr.into(), more * element, self.id())?;
            filled += more;
        }
        Ok(())
    }
}

/// Fails unless both lengths are the same. Returns whether there are any elements.
fn expect_same_len(source_len: usize, target_len: usize) -> Result<bool> {
    if source_len == target_len {
        Ok(source_len > 0)
    } else {
        Err(BufferError::Length { source_len, target_len }.into())
    }
}

/// The bytes of a value as the widest patterns that divide it. Elements are aligned to their pattern: memory starts at
/// a multiple of 256, and the size of an element is a multiple of the pattern's size.
fn words(value: &[u8]) -> Vec<Pattern> {
    match value.len() {
        len if len.is_multiple_of(4) => {
            value.as_chunks::<4>().0.iter().map(|&word| Pattern::U32(u32::from_ne_bytes(word))).collect()
        }
        len if len.is_multiple_of(2) => {
            value.as_chunks::<2>().0.iter().map(|&word| Pattern::U16(u16::from_ne_bytes(word))).collect()
        }
        _ => value.iter().map(|&byte| Pattern::U8(byte)).collect(),
    }
}

/// The pattern that a value consists of, and the number of repetitions; `None` if it is not a repeated pattern.
fn repeated(value: &[u8]) -> Option<(Pattern, u64)> {
    let words = words(value);
    let first = words[0];
    words.iter().all(|&word| word == first).then_some((first, words.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_split_into_patterns() {
        assert_eq!(repeated(&[7, 7, 7]), Some((Pattern::U8(7), 3)));
        assert_eq!(repeated(&[0; 16]), Some((Pattern::U32(0), 4)));
        assert_eq!(repeated(&[1, 0, 0, 0, 2, 0, 0, 0]), None);
        assert_eq!(words(&[1, 0, 2, 0, 3, 0]), [Pattern::U16(1), Pattern::U16(2), Pattern::U16(3)]);
    }
}
