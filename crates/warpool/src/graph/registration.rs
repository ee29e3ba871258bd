//! The state of a capture outside of the driver: uses of pools, routing of requests, counts, and entries of the capture
//! registry. Dropping it undoes all of that, without a driver call.

use std::sync::Arc;

use warpool_driver::CaptureId;

use super::retired::{AbandonedCapture, EndOutcome, GraphObject, RetiredGraphs};
use crate::error::GraphError;
use crate::memory::{DeviceAllocator, MemPool, PoolUser, PrivatePools, Route};
use crate::{Device, Result, Stream};

pub(super) struct Registration {
    allocator: Arc<dyn DeviceAllocator>,
    device: Device,
    /// Each with one use by the graph. Its memory comes from the first.
    pools: Vec<MemPool>,
    routing: bool,
    /// Whether the allocator and the `Instance` count the capture.
    counted: bool,
    /// Entries of the registry: the capture, then the bodies that are open in it.
    captures: Vec<CaptureId>,
}

impl Registration {
    /// A registration with one use of `pool`, or of a new pool.
    pub(super) fn new(allocator: &Arc<dyn DeviceAllocator>, device: &Device, pool: Option<&MemPool>) -> Result<Self> {
        let pool = match pool {
            Some(pool) => pool.another_use()?,
            None => MemPool::for_graph(allocator, device.id())?,
        };
        Ok(Self {
            allocator: Arc::clone(allocator),
            device: device.clone(),
            pools: vec![pool],
            routing: false,
            counted: false,
            captures: Vec::new(),
        })
    }

    pub(super) fn allocator(&self) -> &Arc<dyn DeviceAllocator> {
        &self.allocator
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// The pool that the memory comes from.
    pub(super) fn pool(&self) -> &MemPool {
        &self.pools[0]
    }

    pub(super) fn pools(&self) -> &[MemPool] {
        &self.pools
    }

    fn keeper(&self) -> Result<&dyn PrivatePools> {
        self.allocator.pools()
    }

    pub(super) fn route(&mut self, route: Route) -> Result<()> {
        self.keeper()?.begin_routing_as(self.device.id(), self.pool().id(), route, PoolUser::HANDLE)?;
        self.routing = true;
        Ok(())
    }

    pub(super) fn count(&mut self) -> Result<()> {
        self.keeper()?.capture_began(self.device.id())?;
        self.device.instance().count_capture();
        self.counted = true;
        Ok(())
    }

    /// Takes over a capture that was added to the registry, and routes the requests of its streams to the pool.
    pub(super) fn register(&mut self, id: CaptureId) -> Result<CaptureId> {
        self.captures.push(id);
        if let Err(error) = self.reroute() {
            self.captures.pop();
            self.device.instance().captures().remove(id);
            return Err(error);
        }
        Ok(id)
    }

    /// Removes the body that was registered last.
    pub(super) fn unregister(&mut self, id: CaptureId) -> Result<()> {
        self.device.instance().captures().remove(id);
        self.captures.retain(|&other| other != id);
        self.reroute()
    }

    fn reroute(&self) -> Result<()> {
        let routes: Vec<Route> = self.captures.iter().copied().map(Route::Capture).collect();
        self.keeper()?.reroute_as(self.device.id(), self.pool().id(), &routes, PoolUser::HANDLE)
    }

    /// Adds a use of another pool, for as long as the graph lives.
    pub(super) fn retain(&mut self, pool: &MemPool) -> Result<()> {
        pool.expect_of(&*self.allocator, self.device.id())?;
        if pool.id().is_default() {
            return Err(GraphError::DefaultPool.into());
        }
        if !self.pools.contains(pool) {
            self.pools.push(pool.another_use()?);
        }
        Ok(())
    }

    /// Ends and discards a capture that has just begun on the driver.
    pub(super) fn discard(&mut self, stream: &Stream) {
        let retired = RetiredGraphs::of(&self.device);
        match retired.end(stream, None) {
            Ok(EndOutcome::Graph(graph)) => retired.destroy(stream.driver(), GraphObject::Template(graph)),
            Ok(EndOutcome::Failed(_)) => {}
            Ok(EndOutcome::StillUnderWay(_)) | Err(_) => self.abandon(stream, None),
        }
    }

    /// Leaves a capture to be ended later. Its stream is still capturing, so it stays counted until then.
    pub(super) fn abandon(&mut self, stream: &Stream, id: Option<CaptureId>) {
        if std::mem::take(&mut self.counted) {
            let allocator = Arc::downgrade(&self.allocator);
            let capture = AbandonedCapture { stream: stream.id(), id, device: self.device.id(), allocator };
            RetiredGraphs::of(&self.device).end_later(capture);
        }
    }

    /// Undoes everything except the uses of pools, which it returns: the graph owns them from now on.
    pub(super) fn close(mut self) -> Vec<MemPool> {
        self.undo();
        std::mem::take(&mut self.pools)
    }

    fn undo(&mut self) {
        let instance = self.device.instance();
        if instance.is_inherited() {
            return;
        }
        for id in self.captures.drain(..) {
            instance.captures().remove(id);
        }
        let Ok(pools) = self.allocator.pools() else { return };
        // The only error of these is an end without a begin.
        if std::mem::take(&mut self.routing) {
            let _ = pools.end_routing_as(self.device.id(), self.pools[0].id(), PoolUser::HANDLE);
        }
        if std::mem::take(&mut self.counted) {
            let _ = pools.capture_ended(self.device.id());
            instance.uncount_capture();
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.undo();
    }
}
