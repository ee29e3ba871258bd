//! How blocks go back to the driver: in stream order, behind every stream that used them, and never into a capture that
//! they are not of.

use warpool_driver::{CaptureId, ErrorCode, EventScope, PoolAttribute, StreamId};

use super::{Cell, DriverPoolAllocator, Ready};
use crate::capture::RelaxedMode;
use crate::memory::books::Entry;
use crate::memory::journal::Cause;
use crate::memory::standing::Standing;
use crate::{Device, Result, lock};

/// What became of a free.
pub(super) enum Released {
    /// The driver has the block, in the order of this stream.
    Into(StreamId),
    /// It belongs to a graph that never ran: there is nothing to give back.
    Nowhere,
    /// Not now: a stream that used it captures.
    Later,
    /// A stream that used it is gone, and only the device can be waited for.
    Orphaned,
}

impl DriverPoolAllocator {
    /// Gives everything that waits to the driver, as far as captures allow. What fails stays, and is tried again by the
    /// next call.
    pub(super) fn settle(&self, cell: &Cell, cause: &Cause) {
        if self.with(cell, |books| books.has_chores()) {
            self.settle_all(cell, cause);
        }
    }

    /// Returns the numbers of those whose streams are gone.
    fn settle_all(&self, cell: &Cell, cause: &Cause) -> Vec<u64> {
        let mut orphans = Vec::new();
        for number in self.with(cell, |books| books.chores()) {
            let Some(entry) = self.with(cell, |books| books.take_in_hand(number)) else { continue };
            if let Some(Released::Orphaned) = self.give_back(cell, &entry, cause) {
                orphans.push(number);
            }
        }
        orphans
    }

    /// Gives a block that the calling thread has in hand to the driver, or puts it out of hand. `None` is a failure.
    pub(super) fn give_back(&self, cell: &Cell, entry: &Entry, cause: &Cause) -> Option<Released> {
        let (number, released) = (entry.number, self.release(cell, entry));
        self.with(cell, |books| match &released {
            Ok(released @ (Released::Into(_) | Released::Nowhere)) => {
                lock(&cell.freed_on).extend(released.stream());
                books.complete_free(number, cause);
            }
            Ok(Released::Later | Released::Orphaned) | Err(_) => books.put_out_of_hand(number),
        });
        released
            .inspect_err(|error| tracing::warn!(%error, ptr = %entry.ptr, "a freed block could not be given back; it is tried again"))
            .ok()
    }

    /// Waits for every stream that frees were put into, and has the pool give back all that is unused. This is what a
    /// second attempt after "out of memory" and [`trim`](crate::memory::DeviceAllocator::trim) do.
    pub(super) fn drain(&self, cell: &Cell, ready: &Ready, cause: &Cause) -> Result<()> {
        let orphans = self.settle_all(cell, cause);
        self.release_orphans(cell, ready, &orphans, cause)?;
        let streams: Vec<StreamId> = std::mem::take(&mut *lock(&cell.freed_on)).into_iter().collect();
        let waited = self.wait_for(&streams);
        if waited.is_err() {
            lock(&cell.freed_on).extend(&streams);
        }
        waited?;
        let _lax = self.lax()?;
        Ok(self.driver().pool_trim(ready.pool, 0)?)
    }

    fn wait_for(&self, streams: &[StreamId]) -> Result<()> {
        for &stream in streams {
            if self.standing(stream)? == Standing::Working {
                let _lax = self.lax()?;
                self.driver().stream_synchronize(stream)?;
            }
        }
        Ok(())
    }

    /// Frees blocks whose streams are gone: once the devices are idle, nothing uses them.
    fn release_orphans(&self, cell: &Cell, ready: &Ready, orphans: &[u64], cause: &Cause) -> Result<()> {
        if orphans.is_empty() {
            return Ok(());
        }
        for device in self.instance.devices() {
            if self.driver().context_is_active(device.id())? {
                device.synchronize()?;
            }
        }
        for &number in orphans {
            let Some(entry) = self.with(cell, |books| books.take_in_hand(number)) else { continue };
            let freed = self.free_into(&entry, ready.joined.id());
            self.with(cell, |books| match &freed {
                Ok(released) => {
                    lock(&cell.freed_on).extend(released.stream());
                    books.complete_free(number, cause);
                }
                Err(_) => books.put_out_of_hand(number),
            });
            freed?;
        }
        Ok(())
    }

    /// Hands a block to the driver, if its streams allow it now.
    fn release(&self, cell: &Cell, entry: &Entry) -> Result<Released> {
        let standings = entry.streams().map(|stream| self.standing(stream)).collect::<Result<Vec<_>>>()?;
        if let Some(capture) = entry.capture
            && standings[0] == Standing::Captures(capture)
        {
            return self.release_in_capture(entry, capture, &standings);
        }
        if standings.iter().any(|standing| matches!(standing, Standing::Captures(_) | Standing::Blocked)) {
            return Ok(Released::Later);
        }
        if standings.contains(&Standing::Gone) {
            return Ok(Released::Orphaned);
        }
        if entry.uses.is_empty() {
            return self.free_into(entry, entry.stream);
        }
        let joined = self.ready(cell)?.joined.id();
        for stream in entry.streams() {
            self.order(stream, joined)?;
        }
        self.free_into(entry, joined)
    }

    /// A block of a capture that is still under way: its free becomes a node, behind all uses. There is no stream to
    /// join them in: whatever joins a capture must be led back before it ends, and nobody says when that is. So the
    /// block's own stream waits for the others.
    fn release_in_capture(&self, entry: &Entry, capture: CaptureId, standings: &[Standing]) -> Result<Released> {
        if standings.iter().any(|&standing| standing != Standing::Captures(capture)) {
            // Used outside too; the graph cannot wait for that.
            return Ok(Released::Later);
        }
        for &stream in &entry.uses {
            self.order(stream, entry.stream)?;
        }
        self.driver().pool_free(entry.ptr, entry.stream)?;
        Ok(Released::Into(entry.stream))
    }

    fn free_into(&self, entry: &Entry, stream: StreamId) -> Result<Released> {
        let _lax = self.lax()?;
        match self.driver().pool_free(entry.ptr, stream) {
            Ok(()) => Ok(Released::Into(stream)),
            Err(error) if entry.capture.is_some() && error.code == ErrorCode::InvalidValue => {
                tracing::warn!(ptr = %entry.ptr, "freed outside of the capture that allocated it, whose graph does not have it; free it within");
                Ok(Released::Nowhere)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Makes later work of `later` wait for what is in `earlier` now.
    fn order(&self, earlier: StreamId, later: StreamId) -> Result<()> {
        let device = self.driver().stream_handle(earlier)?.device;
        let event = Device::known(&self.instance, device).event_pool().take()?;
        self.driver().event_record(event.id(), earlier, EventScope::Plain)?;
        Ok(self.driver().stream_wait_event(later, event.id(), EventScope::Plain)?)
    }

    pub(super) fn standing(&self, stream: StreamId) -> Result<Standing> {
        Standing::of(stream, self.driver())
    }

    /// Until the guard is dropped, the calling thread may ask the driver for what a capture elsewhere would forbid.
    /// Nobody tells this allocator of captures, so it has to expect one at any time.
    pub(super) fn lax(&self) -> Result<RelaxedMode<'_>> {
        RelaxedMode::begin(self.driver())
    }

    /// What the pool holds now, and the most that it held. Nothing as long as it was never used.
    pub(super) fn bytes_in_pool(&self, cell: &Cell) -> Result<(u64, u64)> {
        let Some(ready) = cell.ready.get() else { return Ok((0, 0)) };
        let _lax = self.lax()?;
        let ask = |attribute| self.driver().pool_get(ready.pool, attribute);
        Ok((ask(PoolAttribute::ReservedCurrent)?, ask(PoolAttribute::ReservedHigh)?))
    }
}

impl Released {
    fn stream(&self) -> Option<StreamId> {
        match self {
            Self::Into(stream) => Some(*stream),
            Self::Nowhere | Self::Later | Self::Orphaned => None,
        }
    }
}
