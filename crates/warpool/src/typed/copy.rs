//! Copies and fills of typed memory, as methods of [`Stream`].

use std::panic::Location;

use bytemuck::Pod;
use warpool_driver::{Address, DevicePtr, Driver, Pattern};

use super::endpoint::{CopySource, CopyTarget, SourceMemory, TargetMemory};
use super::operation::capture_of;
use super::submit::submit;
use super::view::{IntoView, IntoViewMut, Part, Rows, RowsMut};
use crate::capture::CaptureSafe;
use crate::error::BufferError;
use crate::{Result, Stream};

/// Typed copies and fills. Lengths, element types and devices are checked before the driver is called; streams that
/// used the memory before are waited for, and the use is recorded.
impl Stream {
    /// Copies all elements of `source` to `target`, in the order of this stream: between any two of [`DeviceVec`],
    /// [`PinnedVec`], views of them, and ordinary host memory, also between devices.
    ///
    /// It returns at once, except with ordinary host memory: then it returns when the copy is complete, and cannot be
    /// captured.
    ///
    /// [`DeviceVec`]: super::DeviceVec
    /// [`PinnedVec`]: super::PinnedVec
    #[track_caller]
    pub fn copy<'a, 'b, T: Pod>(&self, source: impl CopySource<'a, T>, target: impl CopyTarget<'b, T>) -> Result<()> {
        let line = Location::caller();
        let (source, target) = (source.source(), target.target());
        let (source_len, target_len) = (source.len(), target.len());
        if source_len != target_len {
            return Err(BufferError::Length { source_len, target_len }.into());
        }
        if source_len == 0 {
            return Ok(());
        }
        match (source, target) {
            (SourceMemory::Typed(source), TargetMemory::Typed(target)) => {
                let mut accesses = [source.part.access(false), target.part.access(true)];
                submit(self, &mut accesses, line, &mut || self.queue_copy(&source.part, &target.part))
            }
            (SourceMemory::Ordinary(source), TargetMemory::Typed(target)) => {
                self.expect_no_capture()?;
                submit(self, &mut [target.part.access(true)], line, &mut || self.upload(source, &target.part))
            }
            (SourceMemory::Typed(source), TargetMemory::Ordinary(target)) => {
                self.expect_no_capture()?;
                submit(self, &mut [source.part.access(false)], line, &mut || self.download(&source.part, target))
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
        source.part.buffer().expect_device_of(self)?;
        target.part.buffer().expect_device_of(self)?;
        if from.rows == 0 || from.columns == 0 {
            return Ok(());
        }
        let bytes = |elements: usize| (elements * size_of::<T>()) as u64;
        let mut accesses = [source.part.access(false), target.part.access(true)];
        submit(self, &mut accesses, line, &mut || {
            let (dst, src) = (target.part.address(), source.part.address());
            let (width, rows) = (bytes(from.columns), from.rows as u64);
            Ok(self.driver().copy_2d(dst, bytes(to.stride), src, bytes(from.stride), width, rows, self.id())?)
        })
    }

    /// Sets every element of `target` to `value`. Elements of 1, 2 and 4 bytes are one fill; others are a fill of the
    /// first element and copies that double what is filled.
    #[track_caller]
    pub fn fill<'a, T: Pod>(&self, target: impl IntoViewMut<'a, T>, value: T) -> Result<()> {
        let line = Location::caller();
        let target = target.into_view_mut();
        target.part.buffer().expect_device_of(self)?;
        if target.is_empty() {
            return Ok(());
        }
        let (ptr, len) = (target.part.device_address(), target.len() as u64);
        submit(self, &mut [target.part.access(true)], line, &mut || self.queue_fill(ptr, len, &value))
    }

    /// The contents of `source`, once the work that writes them is done: this stream waits for that work, and the host
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
        let own = Some(self.device_id());
        if let (Address::Device(dst), Address::Device(src)) = (dst, src)
            && let (to, from) = (target.buffer().device_id(), source.buffer().device_id())
            && (to != own || from != own)
            && let Some((to, from)) = to.zip(from)
        {
            return Ok(self.driver().copy_peer(dst, to, src, from, bytes, self.id())?);
        }
        for part in [source, target] {
            part.buffer().expect_device_of(self)?;
        }
        Ok(self.driver().copy(dst, src, bytes, self.id())?)
    }

    /// Copies ordinary host memory, which the driver does in the order of the default stream: so everything before it
    /// is waited for first.
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

    fn expect_no_capture(&self) -> Result<()> {
        match capture_of(self)? {
            Some(_) => Err(BufferError::OrdinaryMemoryInCapture.into()),
            None => Ok(()),
        }
    }

    fn queue_fill<T: Pod>(&self, ptr: DevicePtr, len: u64, value: &T) -> Result<()> {
        let (driver, stream) = (self.driver(), self.id());
        let value = bytemuck::bytes_of(value);
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

/// The bytes of a value as the widest patterns that divide it. Elements are aligned to their pattern: memory starts at
/// a multiple of 256, and an element has a multiple of the pattern's size.
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

/// The pattern that a value repeats, and how often; `None` if it is not a repetition of one.
fn repeated(value: &[u8]) -> Option<(Pattern, u64)> {
    match *value {
        [byte] => return Some((Pattern::U8(byte), 1)),
        [a, b] => return Some((Pattern::U16(u16::from_ne_bytes([a, b])), 1)),
        [a, b, c, d] => return Some((Pattern::U32(u32::from_ne_bytes([a, b, c, d])), 1)),
        _ => {}
    }
    let words = words(value);
    let first = words[0];
    words.iter().all(|&word| word == first).then_some((first, words.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_split_into_patterns() {
        assert_eq!(repeated(&[7]), Some((Pattern::U8(7), 1)));
        assert_eq!(repeated(&[1, 2]), Some((Pattern::U16(0x0201), 1)));
        assert_eq!(repeated(&[7, 7, 7]), Some((Pattern::U8(7), 3)));
        assert_eq!(repeated(&[0; 16]), Some((Pattern::U32(0), 4)));
        assert_eq!(repeated(&[1, 0, 0, 0, 2, 0, 0, 0]), None);
        assert_eq!(words(&[1, 0, 2, 0, 3, 0]), [Pattern::U16(1), Pattern::U16(2), Pattern::U16(3)]);
    }
}
