//! The capture scopes that are open, and those that were closed before PyTorch closed them. Data only: nothing here
//! calls the allocator or the driver.

use std::thread::{self, ThreadId};

use warpool::memory::MemPoolId;
use warpool::memory::pools::Route;
use warpool_driver::{CaptureId, DeviceId, StreamId};

use crate::error::{Error, Result};
use crate::torch_pool::TorchPoolId;

/// The scopes between a begin and an end of PyTorch.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    /// Oldest first.
    open: Vec<Scope>,
    /// Closed because their capture was found to be over; PyTorch's end may still follow.
    closed_early: Vec<Scope>,
}

/// A capture scope.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope {
    device: DeviceId,
    torch_pool: TorchPoolId,
    opener: ThreadId,
    /// Whether the allocator counts this capture as under way (`capture_began` without `capture_ended`).
    announced: bool,
    bound: Option<BoundCapture>,
}

/// The capture that a scope was found to belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BoundCapture {
    pub(super) pool: MemPoolId,
    pub(super) capture: CaptureId,
    /// A stream that took part in it.
    pub(super) stream: StreamId,
}

/// The scope that an end of PyTorch refers to.
pub(super) enum EndedScope {
    Open(usize),
    /// It was closed before; nothing is left to do.
    ClosedEarly,
}

impl Scope {
    pub(super) fn device(&self) -> DeviceId {
        self.device
    }

    pub(super) fn torch_pool(&self) -> TorchPoolId {
        self.torch_pool
    }

    pub(super) fn is_announced(&self) -> bool {
        self.announced
    }

    pub(super) fn bound(&self) -> Option<BoundCapture> {
        self.bound
    }

    fn is_for(&self, device: DeviceId, torch_pool: TorchPoolId) -> bool {
        (self.device, self.torch_pool) == (device, torch_pool)
    }

    fn is_mine(&self) -> bool {
        self.opener == thread::current().id()
    }
}

impl Scopes {
    /// Opens an unbound scope of this thread.
    pub(super) fn open(&mut self, device: DeviceId, torch_pool: TorchPoolId, announced: bool) {
        self.open.push(Scope { device, torch_pool, opener: thread::current().id(), announced, bound: None });
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn get(&self, index: usize) -> &Scope {
        &self.open[index]
    }

    pub(super) fn set_announced(&mut self, index: usize) {
        self.open[index].announced = true;
    }

    pub(super) fn bind(&mut self, index: usize, capture: BoundCapture) {
        self.open[index].bound = Some(capture);
    }

    /// Removes an open scope.
    pub(super) fn close(&mut self, index: usize) -> Scope {
        self.open.remove(index)
    }

    /// Records that an open scope is about to be closed before PyTorch closes it.
    pub(super) fn expect_late_end(&mut self, index: usize) {
        self.closed_early.push(self.open[index]);
    }

    /// Drops the records of scopes of a pool that were closed early: the pool is released.
    pub(super) fn forget_closed_early(&mut self, device: DeviceId, torch_pool: TorchPoolId) {
        self.closed_early.retain(|scope| !scope.is_for(device, torch_pool));
    }

    /// Whether an open scope is bound to that capture.
    pub(super) fn is_bound(&self, capture: CaptureId) -> bool {
        self.open.iter().any(|scope| scope.bound.is_some_and(|bound| bound.capture == capture))
    }

    /// The captures that open scopes are bound to.
    pub(super) fn bound(&self) -> Vec<BoundCapture> {
        self.open.iter().filter_map(|scope| scope.bound).collect()
    }

    pub(super) fn position_bound(&self, capture: BoundCapture) -> Option<usize> {
        self.open.iter().position(|scope| scope.bound == Some(capture))
    }

    /// The first unbound scope of this thread on `device`.
    pub(super) fn position_unbound_of_this_thread(&self, device: DeviceId) -> Option<usize> {
        self.open.iter().position(|scope| scope.device == device && scope.is_mine() && scope.bound.is_none())
    }

    /// The scope that a new capture belongs to: the newest unbound one of this thread, else the only unbound one of
    /// other threads. With several it is an error, not a guess: a graph would use the memory of another.
    pub(super) fn position_for_new_capture(&self, device: DeviceId) -> Result<Option<usize>> {
        let is_candidate = |scope: &Scope| scope.device == device && scope.bound.is_none();
        if let Some(mine) = self.open.iter().rposition(|scope| is_candidate(scope) && scope.is_mine()) {
            return Ok(Some(mine));
        }
        let all: Vec<usize> = (0..self.open.len()).filter(|&index| is_candidate(&self.open[index])).collect();
        let announced: Vec<usize> = all.iter().copied().filter(|&index| self.open[index].announced).collect();
        match (&announced[..], &all[..]) {
            (&[one], _) | ([], &[one]) => Ok(Some(one)),
            ([], []) => Ok(None),
            _ => Err(Error::CaptureUnclear { device: device.0 }),
        }
    }

    /// The scope that PyTorch ends: the newest of the pool that this thread opened, else the newest of other threads.
    /// A scope that was closed early is taken out here.
    pub(super) fn take_ended(&mut self, device: DeviceId, torch_pool: TorchPoolId) -> Result<EndedScope> {
        let is_meant = |scope: &Scope| scope.is_for(device, torch_pool);
        if let Some(mine) = self.open.iter().rposition(|scope| is_meant(scope) && scope.is_mine()) {
            return Ok(EndedScope::Open(mine));
        }
        // Between the end of a capture and this call another thread may have found that it is over.
        if let Some(mine) = self.closed_early.iter().position(|scope| is_meant(scope) && scope.is_mine()) {
            self.closed_early.swap_remove(mine);
            return Ok(EndedScope::ClosedEarly);
        }
        if let Some(other) = self.open.iter().rposition(is_meant) {
            return Ok(EndedScope::Open(other));
        }
        let other = self.closed_early.iter().position(is_meant);
        self.closed_early.swap_remove(other.ok_or(Error::PoolNotOpen { pool: torch_pool, device: device.0 })?);
        Ok(EndedScope::ClosedEarly)
    }

    /// Marks every announced, unbound scope of this thread as not announced, calling `withdraw` for each.
    pub(super) fn withdraw_unbound(&mut self, mut withdraw: impl FnMut(DeviceId) -> Result<()>) -> Result<()> {
        for scope in &mut self.open {
            if scope.is_mine() && scope.bound.is_none() && std::mem::take(&mut scope.announced) {
                withdraw(scope.device)?;
            }
        }
        Ok(())
    }

    /// The captures that `pool` serves.
    pub(super) fn routes(&self, device: DeviceId, pool: MemPoolId) -> Vec<Route> {
        let bound = self.open.iter().filter(|scope| scope.device == device).filter_map(|scope| scope.bound);
        bound.filter(|bound| bound.pool == pool).map(|bound| Route::Capture(bound.capture)).collect()
    }
}
