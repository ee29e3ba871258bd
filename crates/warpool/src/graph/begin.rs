//! The begin of a capture: all checks first, then every step with its undoing at hand, so that a failure at any of them
//! leaves nothing behind.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use warpool_driver::{CaptureId, CaptureMode};

use super::buffers::Buffers;
use super::graph::{Graph, Stage};
use super::shelf::{Doomed, Ended, Orphan};
use super::{CaptureOptions, GraphError};
use crate::capture::guards_of_thread;
use crate::capture::{CaptureRecord, CaptureStatus, Site, Used};
use crate::memory::{DeviceAllocator, MemPoolId, PrivatePools, Route};
use crate::{Device, Error, Result, Stream, StreamLease, lock};

/// A capture under way.
pub(super) struct UnderWay {
    pub(super) booking: Booking,
    /// Where it began.
    pub(super) stream: Stream,
    pub(super) id: CaptureId,
    pub(super) mode: CaptureMode,
    /// Where it has to end, unless it is relaxed.
    pub(super) thread: ThreadId,
    pub(super) record: Arc<CaptureRecord>,
    pub(super) buffers: Buffers,
    /// Why it can come to nothing, whatever the driver says.
    pub(super) broken: Option<Error>,
    /// Streams that bodies were captured on. Nobody else has them before the end: what others do on them need not be
    /// behind the bodies, and would get their memory.
    pub(super) body_streams: Vec<StreamLease>,
}

/// What a capture has noted in books other than the driver's. Dropping it strikes all of that out, without a driver
/// call.
pub(super) struct Booking {
    pub(super) allocator: Arc<dyn DeviceAllocator>,
    pub(super) device: Device,
    /// Each with one use of the graph's. The first is where its memory comes from.
    pools: Vec<MemPoolId>,
    routing: bool,
    /// Whether the allocator counts it, and the registry does.
    counted: bool,
    /// In the registry: the capture, then the bodies that are open in it.
    registered: Vec<CaptureId>,
}

impl Graph {
    /// Begins a capture on `stream`: what is put there from now on is written down instead of being done, and memory
    /// that is asked for on streams of the capture comes from the graph's pool. To be ended by
    /// [`capture_end`](Self::capture_end), also after an error in between. [`capture`](Self::capture) does both, and
    /// cannot be left half done.
    pub fn capture_begin(&mut self, stream: &Stream, options: CaptureOptions) -> Result<()> {
        self.check_begin(stream, &options)?;
        let driver = &**self.device.instance().driver();
        let captures = self.device.instance().captures();
        self.device.state().graphs.settle(driver, captures);
        if stream.is_capturing()? {
            return Err(GraphError::StreamCaptures { stream: stream.id() }.into());
        }
        let mut booking = Booking::new(&self.allocator, &self.device, options.pool)?;
        // Before the driver's own begin: another thread that frees memory of this stream in between would put a mark
        // into it.
        booking.route(Route::Stream(stream.id()))?;
        booking.count()?;
        let excluded = captures.pollers.exclude(options.poller_patience)?;
        driver.capture_begin(stream.id(), options.mode)?;
        drop(excluded);
        let id = match CaptureStatus::of_existing(driver, stream.id()) {
            Ok(CaptureStatus::Capturing(id)) => id,
            // The second can only be somebody else's doing, between the two calls.
            failed => {
                booking.give_up(stream);
                failed?;
                return Err(GraphError::StreamCaptures { stream: stream.id() }.into());
            }
        };
        let record = Arc::new(CaptureRecord {
            device: self.device.id(),
            allocator: Arc::clone(&self.allocator),
            pool: booking.pool(),
            used: Default::default(),
        });
        if let Err(error) = booking.register(id, Site { record: Arc::clone(&record), in_body: false }) {
            booking.give_up(stream);
            return Err(error);
        }
        self.stage = Stage::Capturing(Box::new(UnderWay {
            booking,
            stream: stream.clone(),
            id,
            mode: options.mode,
            thread: thread::current().id(),
            record,
            buffers: Buffers::new(),
            broken: None,
            body_streams: Vec::new(),
        }));
        Ok(())
    }

    /// Everything that can be wrong with a begin, as far as it can be seen without changing anything.
    fn check_begin(&self, stream: &Stream, options: &CaptureOptions) -> Result<()> {
        match &self.stage {
            Stage::New => {}
            Stage::Capturing(under_way) => {
                return Err(GraphError::AlreadyCapturing { stream: under_way.stream.id() }.into());
            }
            Stage::Captured(_) => return Err(GraphError::AlreadyCaptured.into()),
        }
        self.expect_own(stream)?;
        if stream.is_default()? {
            return Err(GraphError::DefaultStream.into());
        }
        if options.pool.is_some_and(MemPoolId::is_default) {
            return Err(GraphError::DefaultPool.into());
        }
        if guards_of_thread(self.device.instance()) > 0 {
            return Err(GraphError::PollsItself.into());
        }
        Ok(())
    }
}

impl UnderWay {
    /// What the graph will need; nobody adds to it any more.
    pub(super) fn take_used(&self) -> Used {
        std::mem::take(&mut *lock(&self.record.used))
    }

    /// Leaves a capture that nobody can end any more to whoever calls the driver next. No driver call.
    pub(super) fn orphan(mut self) {
        self.booking.leave_to_shelf(&self.stream, Some(self.id));
    }
}

impl Booking {
    /// With one use of the pool, or of a new one.
    fn new(allocator: &Arc<dyn DeviceAllocator>, device: &Device, pool: Option<MemPoolId>) -> Result<Self> {
        let pools = allocator.pools()?;
        let pool = match pool {
            Some(pool) => pools.retain_pool(device.id(), pool).map(|()| pool)?,
            None => pools.create_graph_pool(device.id())?,
        };
        Ok(Self {
            allocator: Arc::clone(allocator),
            device: device.clone(),
            pools: vec![pool],
            routing: false,
            counted: false,
            registered: Vec::new(),
        })
    }

    /// Where the memory comes from.
    pub(super) fn pool(&self) -> MemPoolId {
        self.pools[0]
    }

    pub(super) fn pools(&self) -> &[MemPoolId] {
        &self.pools
    }

    fn keeper(&self) -> Result<&dyn PrivatePools> {
        self.allocator.pools()
    }

    fn route(&mut self, route: Route) -> Result<()> {
        self.keeper()?.begin_routing(self.device.id(), self.pool(), route)?;
        self.routing = true;
        Ok(())
    }

    fn count(&mut self) -> Result<()> {
        self.keeper()?.capture_began(self.device.id())?;
        self.device.instance().captures().begins();
        self.counted = true;
        Ok(())
    }

    /// Lets others find the graph by this capture, and its memory come from the pool.
    pub(super) fn register(&mut self, id: CaptureId, site: Site) -> Result<()> {
        self.registered.push(id);
        if let Err(error) = self.reroute() {
            self.registered.pop();
            return Err(error);
        }
        self.device.instance().captures().insert(id, site);
        Ok(())
    }

    /// The end of the body that was registered last.
    pub(super) fn unregister(&mut self, id: CaptureId) -> Result<()> {
        self.device.instance().captures().remove(id);
        self.registered.retain(|&other| other != id);
        self.reroute()
    }

    fn reroute(&self) -> Result<()> {
        let routes: Vec<Route> = self.registered.iter().copied().map(Route::Capture).collect();
        self.keeper()?.reroute(self.device.id(), self.pool(), &routes)
    }

    /// One more pool for as long as the graph lives.
    pub(super) fn retain(&mut self, pool: MemPoolId) -> Result<()> {
        if pool.is_default() {
            return Err(GraphError::DefaultPool.into());
        }
        if !self.pools.contains(&pool) {
            self.keeper()?.retain_pool(self.device.id(), pool)?;
            self.pools.push(pool);
        }
        Ok(())
    }

    /// Ends on the driver what began there but is of no use.
    fn give_up(&mut self, stream: &Stream) {
        let shelf = &self.device.state().graphs;
        match shelf.end(stream.driver(), stream.id(), None) {
            Ended::Graph(graph) => shelf.destroy(stream.driver(), Doomed::Template(graph)),
            Ended::Failed(_) => {}
            Ended::StillUnderWay(_) => self.leave_to_shelf(stream, None),
        }
    }

    /// The stream goes on capturing: so does the count, until somebody ends it.
    pub(super) fn leave_to_shelf(&mut self, stream: &Stream, id: Option<CaptureId>) {
        if std::mem::take(&mut self.counted) {
            let allocator = Arc::downgrade(&self.allocator);
            let orphan = Orphan { stream: stream.id(), id, device: self.device.id(), allocator };
            self.device.state().graphs.abandon(orphan);
        }
    }

    /// Strikes out everything but the pools, whose uses are the graph's from here on.
    pub(super) fn close(mut self) -> Vec<MemPoolId> {
        self.strike_out();
        std::mem::take(&mut self.pools)
    }

    fn strike_out(&mut self) {
        let captures = self.device.instance().captures();
        for id in self.registered.drain(..) {
            captures.remove(id);
        }
        let Ok(pools) = self.allocator.pools() else { return };
        // These can only say that nothing was begun, and it was.
        if std::mem::take(&mut self.routing) {
            let _ = pools.end_routing(self.device.id(), self.pools[0]);
        }
        if std::mem::take(&mut self.counted) {
            let _ = pools.capture_ended(self.device.id());
            captures.ended();
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.strike_out();
        release_pools(&self.allocator, &self.device, &self.pools);
    }
}

/// Gives up a graph's uses of its pools. No driver call.
pub(super) fn release_pools(allocator: &Arc<dyn DeviceAllocator>, device: &Device, pools: &[MemPoolId]) {
    let Ok(keeper) = allocator.pools() else { return };
    for &pool in pools {
        // It can only say that the pool is unknown, and it is known: this is one of its uses.
        let _ = keeper.release_pool(device.id(), pool);
    }
}
