//! More memory from the driver, within the caps, and back to it.
//!
//! A cap is asked before the driver is: what is about to be pinned counts already, so threads that pin at once cannot
//! exceed it together. Cached segments make room. No lock is held over a driver call: while one thread waits for the
//! driver, the others go on.

use std::sync::{Arc, PoisonError};

use warpool_driver::{DeviceId, ErrorCode};

use super::block::{BlockCell, Standing};
use super::heap::{Kind, Short};
use super::size::{BYTES_MAX, Fit, PAGE, shared_segment};
use super::{HOST, Shared};
use crate::error::PinnedCapReport;
use crate::memory::Action;
use crate::memory::journal::Cause;
use crate::{Error, Result, lock};

impl Shared {
    /// Pins a segment for a request that nothing cached fits, and cuts the block from it. Before it fails, callbacks
    /// that can help are asked once.
    pub(super) fn grow(
        self: &Arc<Self>,
        bytes: u64,
        fit: &Fit,
        device: Option<DeviceId>,
        cause: &Cause,
    ) -> Result<Arc<BlockCell>> {
        match self.try_grow(bytes, fit, device, cause) {
            Err(error) if is_shortage(&error) && self.observers.relieve(HOST) => {
                self.look_after()?;
                self.empty_shards();
                if let Some(cell) = lock(&self.heap).take(fit, device, self) {
                    return Ok(cell);
                }
                self.try_grow(bytes, fit, device, cause)
            }
            outcome => outcome,
        }
    }

    fn try_grow(
        self: &Arc<Self>,
        bytes: u64,
        fit: &Fit,
        device: Option<DeviceId>,
        cause: &Cause,
    ) -> Result<Arc<BlockCell>> {
        let pinning = self.pinning_device(device)?;
        let counted = device.unwrap_or(pinning);
        let least = fit.size.next_multiple_of(PAGE);
        let (kind, most) = if fit.is_small() {
            (Kind::Small, shared_segment(lock(&self.heap).bytes_small))
        } else {
            (Kind::Large, least)
        };
        let granted = self.promise(bytes, least, most, counted, cause)?;
        let outcome = match self.pin_timed(pinning, granted) {
            // The machine has no room: what is cached may make some. Asked for the least, now.
            Err(Error::Driver(error)) if error.code == ErrorCode::OutOfMemory => {
                lock(&self.heap).unpromise(counted, granted);
                // That some of it could not be given back does not matter if the rest is enough.
                let returned = self.return_spare(u64::MAX, None, cause);
                if matches!(returned, Ok(0)) && granted == least {
                    return Err(error.into());
                }
                let granted = self.promise(bytes, least, least, counted, cause)?;
                self.pin_timed(pinning, granted).map_err(|error| (error, granted))
            }
            outcome => outcome.map_err(|error| (error, granted)),
        };
        let (pinned, took) = outcome.map_err(|(error, granted)| {
            lock(&self.heap).unpromise(counted, granted);
            error
        })?;
        let (start, bytes) = (pinned.ptr.0, pinned.bytes);
        let news = self.write_down(Action::SegmentAlloc, start, bytes, cause);
        let cell = {
            let mut heap = lock(&self.heap);
            heap.add(kind, counted, pinned, cause.stack.clone(), took);
            heap.take_from(start, fit, self)
        };
        self.tell(&news);
        Ok(cell)
    }

    /// Room under the caps, made by giving back what is cached if need be, or by waiting for another thread that does.
    fn promise(&self, bytes: u64, least: u64, most: u64, device: DeviceId, cause: &Cause) -> Result<u64> {
        let settings = lock(&self.settings).clone();
        let mut caches_emptied = false;
        loop {
            let mut heap = lock(&self.heap);
            let short = match heap.promise(least, most, device, &settings) {
                Ok(granted) => return Ok(granted),
                Err(short) => short,
            };
            // All or nothing: a request that fails anyhow takes nobody's cache.
            let spare: u64 = heap.spare(short.device).iter().map(|&(size, _)| size).sum();
            if spare >= short.excess {
                drop(heap);
                self.return_spare(short.excess, short.device, cause)?;
            } else if spare + heap.bytes_moving() >= short.excess {
                drop(self.moved.wait(heap).unwrap_or_else(PoisonError::into_inner));
            } else if !caches_emptied {
                // Other threads have given back since the request looked.
                drop(heap);
                self.empty_shards();
                caches_emptied = true;
            } else {
                drop(heap);
                return Err(Error::PinnedCap(Box::new(self.cap_report(bytes, least, short))));
            }
        }
    }

    fn cap_report(&self, bytes: u64, least: u64, short: Short) -> PinnedCapReport {
        let heap = lock(&self.heap);
        let of_device = |cell: &&Arc<BlockCell>| short.device.is_none_or(|device| cell.device == device);
        let sum = |standing: Standing| {
            let cells = heap.blocks().filter(of_device).filter(|cell| cell.standing() == standing);
            cells.map(|cell| cell.size).sum()
        };
        PinnedCapReport {
            bytes_requested: bytes,
            bytes_segment: least,
            bytes_cap: short.cap,
            device: short.device,
            bytes_pinned: short.pinned,
            bytes_allocated: sum(Standing::Taken),
            bytes_pending: sum(Standing::Waiting),
        }
    }

    /// Pins the reserved segment, once, if the settings want one. Without it everything works, so a failure is a
    /// warning.
    pub(super) fn make_reserve(&self, cause: &Cause) {
        if !self.limits.take_reserve() {
            return;
        }
        let bytes = lock(&self.settings).reserve_segment_bytes.min(BYTES_MAX).next_multiple_of(PAGE);
        if bytes == 0 || lock(&self.heap).has_reserve() {
            return;
        }
        let made = self.pinning_device(None).and_then(|device| {
            self.promise(bytes, bytes, bytes, device, cause)?;
            match self.pin_timed(device, bytes) {
                Ok((pinned, took)) => {
                    let news = self.write_down(Action::SegmentAlloc, pinned.ptr.0, bytes, cause);
                    lock(&self.heap).add(Kind::Reserve, device, pinned, cause.stack.clone(), took);
                    self.tell(&news);
                    Ok(())
                }
                Err(error) => {
                    lock(&self.heap).unpromise(device, bytes);
                    Err(error)
                }
            }
        });
        if let Err(error) = made {
            tracing::warn!(%error, "pinned_reserve_segment_size_mb: nothing was set aside");
        }
    }

    fn pin_timed(&self, device: DeviceId, bytes: u64) -> Result<(super::pin::Pinned, std::time::Duration)> {
        let begun = self.driver().now();
        let pinned = self.pin(device, bytes, self.way())?;
        Ok((pinned, self.driver().now().saturating_sub(begun)))
    }

    /// Gives a segment back, if it is one free piece. Returns its bytes. On failure it stays as it was.
    ///
    /// It is written down before the driver is asked: once that has it, another thread may be given the same address.
    /// Trackers hear of it afterwards, since they may make requests, which wait for segments on their way. One that is
    /// refused is written down as taken back.
    fn return_segment(&self, start: u64, cause: &Cause) -> Result<u64> {
        let Some(segment) = lock(&self.heap).begin_move(start) else { return Ok(0) };
        let bytes = segment.pinned.bytes;
        let mut news = self.write_down(Action::SegmentFree, start, bytes, cause);
        let begun = self.driver().now();
        let outcome = self.unpin(&segment.pinned);
        let took = outcome.is_ok().then(|| self.driver().now().saturating_sub(begun));
        if outcome.is_err() {
            news.extend(self.write_down(Action::SegmentAlloc, start, bytes, cause));
        }
        lock(&self.heap).end_move(segment, took);
        self.moved.notify_all();
        self.tell(&news);
        outcome.map(|()| bytes)
    }

    /// Waits until no segment is on its way to the driver.
    pub(super) fn wait_for_moves(&self) {
        let mut heap = lock(&self.heap);
        while heap.bytes_moving() > 0 {
            heap = self.moved.wait(heap).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives back free segments, of a device or of all, until `bytes` are back or none is left: the smallest that is
    /// enough, or else the largest, and so on. How many bytes it were. Goes on after a failure, and reports the first
    /// if there was not enough.
    pub(super) fn return_spare(&self, bytes: u64, device: Option<DeviceId>, cause: &Cause) -> Result<u64> {
        let mut spare = lock(&self.heap).spare(device);
        let mut returned = 0;
        let mut outcome = Ok(());
        while returned < bytes && !spare.is_empty() {
            let enough = spare.partition_point(|&(size, _)| size < bytes - returned);
            let (_, start) = spare.remove(enough.min(spare.len() - 1));
            match self.return_segment(start, cause) {
                Ok(bytes) => returned += bytes,
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        if returned >= bytes { Ok(returned) } else { outcome.map(|()| returned) }
    }

    /// Gives back the segments that are not to be kept, and adds up their bytes. What fails is tried again by the next
    /// call.
    pub(super) fn return_doomed(&self, returned: &mut u64, cause: &Cause) -> Result<()> {
        let doomed = std::mem::take(&mut lock(&self.pending).doomed);
        let mut outcome = Ok(());
        for start in doomed {
            match self.return_segment(start, cause) {
                Ok(bytes) => *returned += bytes,
                Err(error) => {
                    lock(&self.pending).doomed.push(start);
                    outcome = outcome.and(Err(error));
                }
            }
        }
        outcome
    }

    /// Gives back everything, the reserved segment too, and reports the first failure. Nobody may have any of it.
    pub(super) fn return_everything(&self, cause: &Cause) -> Result<()> {
        let starts: Vec<u64> = lock(&self.heap).segments.keys().copied().collect();
        let mut outcome = Ok(());
        for start in starts {
            outcome = outcome.and(self.return_segment(start, cause).map(drop));
        }
        outcome
    }
}

/// Whether more memory would help.
fn is_shortage(error: &Error) -> bool {
    match error {
        Error::PinnedCap(_) => true,
        Error::Driver(error) => error.code == ErrorCode::OutOfMemory,
        _ => false,
    }
}
