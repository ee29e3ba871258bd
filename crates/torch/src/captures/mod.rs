//! CUDA graph captures of PyTorch, and the pools that their memory comes from.
//!
//! PyTorch calls `beginAllocateToPool` *before* the capture begins, with a filter over streams that cannot be called
//! from here. So a scope is opened without its capture, and *bound* by the first allocation for a capturing stream: to
//! the newest unbound scope of the same thread, else to the only one of other threads. From then on all allocations of
//! that capture, on any of its streams, come from the pool; all others are unaffected.
//!
//! Opening a scope cannot fail: PyTorch would ignore the failure, and the graph would share memory with the rest of the
//! program. What can fail is done, or repeated, by the allocation that binds the scope, which reports the error.
//!
//! While no scope is unbound, an allocation pays one atomic load for all this.

mod graph_pools;
mod scopes;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use warpool::memory::pools::{PrivatePools, Route};
use warpool::memory::{DeviceAllocator, MemPoolId};
use warpool_driver::{CaptureState, DeviceId, ErrorCode, StreamId};

use crate::error::Result;
use crate::torch_pool::TorchPoolId;
use graph_pools::{GraphPools, Released};
use scopes::{BoundCapture, EndedScope, Scopes};

/// The capture scopes and graph pools of a runtime.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    state: Mutex<State>,
    /// The number of open scopes without a capture.
    unbound: AtomicU32,
}

#[derive(Debug, Default)]
struct State {
    scopes: Scopes,
    pools: GraphPools,
}

impl Captures {
    /// Whether an open scope is not yet bound to a capture.
    #[inline]
    pub(crate) fn has_unbound_scope(&self) -> bool {
        self.unbound.load(Ordering::Acquire) > 0
    }

    pub(crate) fn open_scopes(&self) -> usize {
        self.lock().scopes.len()
    }

    /// Opens a scope and adds a use to its pool; a new pool's memory carries the tag.
    pub(crate) fn begin(
        &self,
        allocator: &dyn DeviceAllocator,
        device: DeviceId,
        torch_pool: TorchPoolId,
        tag: Option<String>,
    ) {
        let Ok(pools) = allocator.pools() else { return };
        if let Err(error) = self.close_finished(allocator) {
            tracing::warn!(%error, "the status of earlier captures could not be queried");
        }
        self.close_unbound(pools, device);
        let announced = pools.capture_began(device);
        if let Err(error) = &announced {
            tracing::warn!(%error, "preparing for a capture failed; its first allocation tries again");
        }
        let mut state = self.lock();
        state.pools.add_use(device, torch_pool, tag);
        state.scopes.open(device, torch_pool, announced.is_ok());
        self.unbound.fetch_add(1, Ordering::Release);
    }

    /// Called before an allocation on `stream`: if it is capturing and no scope is bound to that capture, binds one. A
    /// pool that is new is made by `create`, with its tag.
    #[cold]
    pub(crate) fn bind(
        &self,
        allocator: &dyn DeviceAllocator,
        device: DeviceId,
        stream: StreamId,
        create: impl FnOnce(Option<&str>) -> Result<MemPoolId>,
    ) -> Result<()> {
        let CaptureState::Active(capture) = capture_state(allocator, stream)? else { return Ok(()) };
        let Ok(pools) = allocator.pools() else { return Ok(()) };
        // Locked until the pool is routed, so that other threads of the same capture wait for it. Under the lock the
        // driver is called only if `capture_began` failed before.
        let mut state = self.lock();
        if state.scopes.is_bound(capture) {
            return Ok(());
        }
        let Some(index) = state.scopes.position_for_new_capture(device)? else { return Ok(()) };
        if !state.scopes.get(index).is_announced() {
            pools.capture_began(device)?;
            state.scopes.set_announced(index);
        }
        let torch_pool = state.scopes.get(index).torch_pool();
        let pool = state.pools.get_or_create(pools, device, torch_pool, create)?;
        let mut routes = state.scopes.routes(device, pool);
        routes.push(Route::Capture(capture));
        if let [only] = routes[..] {
            pools.begin_routing(device, pool, only)?;
        } else {
            pools.reroute(device, pool, &routes)?;
        }
        state.scopes.bind(index, BoundCapture { pool, capture, stream });
        self.unbound.fetch_sub(1, Ordering::Release);
        Ok(())
    }

    /// Closes a scope after its capture: the newest of that pool that this thread opened, else the newest.
    pub(crate) fn end(&self, allocator: &dyn DeviceAllocator, device: DeviceId, torch_pool: TorchPoolId) -> Result<()> {
        let Ok(pools) = allocator.pools() else { return Ok(()) };
        let mut state = self.lock();
        match state.scopes.take_ended(device, torch_pool)? {
            EndedScope::Open(index) => self.close(state, pools, index),
            EndedScope::ClosedEarly => Ok(()),
        }
    }

    /// Ends one use of a pool. After the last one its memory can be returned to the driver, once replays that PyTorch
    /// started on any stream are done.
    pub(crate) fn release(
        &self,
        allocator: &dyn DeviceAllocator,
        device: DeviceId,
        torch_pool: TorchPoolId,
    ) -> Result<()> {
        let Ok(pools) = allocator.pools() else { return Ok(()) };
        let mut state = self.lock();
        let Released::Last(pool) = state.pools.release(device, torch_pool)? else { return Ok(()) };
        state.scopes.forget_closed_early(device, torch_pool);
        drop(state);
        let Some(pool) = pool else { return Ok(()) };
        pools.record_pool_use_anywhere(device, pool)?;
        Ok(pools.release_pool(device, pool)?)
    }

    /// Closes scopes whose capture has ended although PyTorch did not close them, as happens when ending the capture
    /// fails. Their pools stay in use, since other graphs may share them.
    pub(crate) fn close_finished(&self, allocator: &dyn DeviceAllocator) -> Result<()> {
        let Ok(pools) = allocator.pools() else { return Ok(()) };
        let bound = self.lock().scopes.bound();
        for bound in bound {
            let is_over = match capture_state(allocator, bound.stream)? {
                CaptureState::None => true,
                CaptureState::Active(capture) => capture != bound.capture,
                CaptureState::Invalidated => false,
            };
            let state = self.lock();
            if is_over && let Some(index) = state.scopes.position_bound(bound) {
                self.close_early(state, pools, index)?;
            }
        }
        Ok(())
    }

    /// This thread begins another capture, so its earlier captures that never allocated are over: closes their scopes.
    fn close_unbound(&self, pools: &dyn PrivatePools, device: DeviceId) {
        loop {
            let state = self.lock();
            let Some(index) = state.scopes.position_unbound_of_this_thread(device) else { return };
            if let Err(error) = self.close_early(state, pools, index) {
                tracing::warn!(%error, "closing the scope of an earlier capture failed");
            }
        }
    }

    /// This thread empties the cache, so its captures that never allocated are probably over: the allocator stops
    /// counting them. Their scopes stay open, so an allocation in such a capture still gets its pool.
    pub(crate) fn suspend_unbound(&self, allocator: &dyn DeviceAllocator) -> Result<()> {
        let Ok(pools) = allocator.pools() else { return Ok(()) };
        self.lock().scopes.withdraw_unbound(|device| Ok(pools.capture_ended(device)?))
    }

    /// PyTorch's id of a pool, or ours if it has none there.
    pub(crate) fn torch_id(&self, device: DeviceId, pool: MemPoolId) -> MemPoolId {
        let id = self.lock().pools.torch_id(device, pool);
        let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        id.map_or(pool, |TorchPoolId { graph, user }| MemPoolId { graph: number(graph), user: number(user) })
    }

    fn close_early(&self, mut state: MutexGuard<'_, State>, pools: &dyn PrivatePools, index: usize) -> Result<()> {
        let pool = state.scopes.get(index).torch_pool();
        tracing::warn!(%pool, "a capture ended without endAllocateToPool; allocations to its pool end now");
        state.scopes.expect_late_end(index);
        self.close(state, pools, index)
    }

    fn close(&self, mut state: MutexGuard<'_, State>, pools: &dyn PrivatePools, index: usize) -> Result<()> {
        let scope = state.scopes.close(index);
        let device = scope.device();
        let routed = match scope.bound() {
            Some(BoundCapture { pool, .. }) => match &state.scopes.routes(device, pool)[..] {
                [] => pools.end_routing(device, pool),
                others => pools.reroute(device, pool, others),
            },
            None => {
                self.unbound.fetch_sub(1, Ordering::Release);
                Ok(())
            }
        };
        drop(state);
        if scope.is_announced() {
            pools.capture_ended(device)?;
        }
        Ok(routed?)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn capture_state(allocator: &dyn DeviceAllocator, stream: StreamId) -> Result<CaptureState> {
    match allocator.instance().driver().capture_state(stream) {
        Ok(state) => Ok(state),
        // The default stream cannot capture (the code means that another stream does), nor can a destroyed one.
        Err(error) if matches!(error.code, ErrorCode::StreamCaptureImplicit | ErrorCode::InvalidHandle) => {
            Ok(CaptureState::None)
        }
        Err(error) => Err(error.into()),
    }
}
