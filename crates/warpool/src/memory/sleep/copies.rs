//! Copies between device memory and pinned host memory, in chunks on several streams, and zero fills.

use std::sync::Arc;

use warpool_driver::{Address, DevicePtr, Driver, HostPtr, Pattern, StreamId};

use crate::memory::mapped_segments::SavedRange;
use crate::memory::{HostAllocator, HostBlock};
use crate::{Device, Error, Result, StreamLease};

/// On how many streams copies run. One saturates the bus of most machines; the others hide the gaps between chunks.
const STREAMS: usize = 4;

/// The maximum size of one copy.
const CHUNK: u64 = 64 << 20;

/// The size of the pieces of host memory that contents are packed into. Each is used as soon as it is pinned, so that
/// its copies overlap with the pinning of the next piece.
const PIECE: u64 = 256 << 20;

/// Copies that are under way.
pub(super) struct Copies<'a> {
    device: &'a Device,
    streams: Vec<StreamLease>,
    next: usize,
}

impl<'a> Copies<'a> {
    pub(super) fn new(device: &'a Device) -> Result<Self> {
        let streams = (0..STREAMS).map(|_| device.lease_stream()).collect::<Result<_>>()?;
        Ok(Self { device, streams, next: 0 })
    }

    fn driver(&self) -> &dyn Driver {
        &**self.device.instance().driver()
    }

    /// Enqueues copies in chunks, on the streams in turn.
    fn copy(&mut self, host: &HostBlock, dst: Address, src: Address, bytes: u64) -> Result<()> {
        let mut done = 0;
        while done < bytes {
            if crate::defect::Defect::SleepForgetsTail.is_on() && done > 0 && bytes - done < CHUNK {
                break;
            }
            let chunk = (bytes - done).min(CHUNK);
            let stream = &self.streams[self.next % STREAMS];
            self.next += 1;
            // Recorded before the copy: if that fails half-way, the host memory is not reused too early.
            host.record_use(stream)?;
            self.driver().copy(forward(dst, done), forward(src, done), chunk, stream.id())?;
            done += chunk;
        }
        Ok(())
    }

    /// Copies contents back to the device.
    pub(super) fn restore(&mut self, range: &SavedRange, saved: &[Arc<HostBlock>]) -> Result<()> {
        let is_in = |block: &&Arc<HostBlock>| (block.ptr().0..block.ptr().0 + block.bytes()).contains(&range.host.0);
        let host = saved.iter().find(is_in).expect("saved contents are in one of the pieces");
        self.copy(host, DevicePtr(range.ptr).into(), range.host.into(), range.bytes)
    }

    /// Writes zeroes where the contents were discarded.
    pub(super) fn clear(&mut self, ptr: u64, bytes: u64) -> Result<()> {
        let stream = &self.streams[self.next % STREAMS];
        self.next += 1;
        let words = ptr.is_multiple_of(4) && bytes.is_multiple_of(4);
        let (pattern, count) = if words { (Pattern::U32(0), bytes / 4) } else { (Pattern::U8(0), bytes) };
        Ok(self.driver().fill(DevicePtr(ptr), pattern, count, stream.id())?)
    }

    /// The streams in which they run.
    pub(super) fn streams(&self) -> Vec<StreamId> {
        self.streams.iter().map(|stream| stream.id()).collect()
    }

    /// Waits for all copies.
    pub(super) fn wait(&self) -> Result<()> {
        // Continue after a failed wait.
        let mut outcome = Ok(());
        for stream in &self.streams {
            outcome = outcome.and(stream.synchronize());
        }
        outcome
    }

    /// Waits for all copies after a wait that failed: for each stream again, and if that fails for all work of the
    /// device.
    pub(super) fn wait_again(&self) -> Result<()> {
        self.wait().or_else(|_| self.device.synchronize())
    }
}

fn forward(address: Address, by: u64) -> Address {
    match address {
        Address::Device(ptr) => Address::Device(DevicePtr(ptr.0 + by)),
        Address::Host(ptr) => Address::Host(HostPtr(ptr.0 + by)),
    }
}

/// Host memory that contents are packed into, piece by piece.
pub(super) struct Packer<'a> {
    host: &'a HostAllocator,
    /// The bytes still to be packed, which limit the size of the last piece.
    bytes_left: u64,
    pub(super) pieces: Vec<Arc<HostBlock>>,
    used: u64,
}

impl<'a> Packer<'a> {
    /// A packer for `bytes` in total.
    pub(super) fn new(host: &'a HostAllocator, bytes: u64) -> Self {
        Self { host, bytes_left: bytes, pieces: Vec::new(), used: 0 }
    }

    pub(super) fn bytes_allocated(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes()).sum()
    }

    /// Allocates the next piece.
    fn allocate(&mut self, device: &Device) -> Result<()> {
        let piece = self.bytes_left.min(PIECE);
        let block = self.host.allocate_for(piece, device)?;
        self.bytes_left -= piece;
        self.used = 0;
        self.pieces.push(Arc::new(block));
        Ok(())
    }

    /// Allocates all pieces.
    pub(super) fn allocate_all(&mut self, device: &Device) -> Result<()> {
        while self.bytes_left > 0 {
            self.allocate(device)?;
        }
        Ok(())
    }

    /// Begins to copy a range to the host. Fails with [`SaveError::NoHostMemory`] if there is no pinned memory for it.
    pub(super) fn save(&mut self, ptr: u64, bytes: u64, copies: &mut Copies<'_>) -> Saved {
        let (mut saved, mut done) = (Vec::new(), 0);
        while done < bytes {
            let room = self.pieces.last().map_or(0, |piece| piece.bytes() - self.used);
            if room == 0 {
                self.allocate(copies.device).map_err(SaveError::NoHostMemory)?;
                continue;
            }
            let piece = Arc::clone(self.pieces.last().expect("there is room in it"));
            let range = SavedRange {
                ptr: ptr + done,
                bytes: (bytes - done).min(room),
                host: HostPtr(piece.ptr().0 + self.used),
            };
            copies
                .copy(&piece, range.host.into(), DevicePtr(range.ptr).into(), range.bytes)
                .map_err(SaveError::Copy)?;
            self.used += range.bytes;
            done += range.bytes;
            saved.push(range);
        }
        Ok(saved)
    }
}

/// Where the parts of a range are saved, in order.
type Saved = std::result::Result<Vec<SavedRange>, SaveError>;

/// Why contents could not be saved.
pub(super) enum SaveError {
    /// There is no pinned memory for them.
    NoHostMemory(Error),
    /// A copy failed.
    Copy(Error),
}
