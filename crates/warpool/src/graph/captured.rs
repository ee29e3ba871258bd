//! What a finished capture consists of.

use std::sync::{Arc, Mutex, OnceLock};

use warpool_driver::{Driver, GraphExecId, GraphId, InstantiateOptions};

use super::buffers::Buffers;
use super::retired::GraphObject;
use super::stream_set::StreamSet;
use crate::capture::{CaptureSlots, RelaxedMode};
use crate::generator::CapturedGenerators;
use crate::memory::{CapturedHostPools, DeviceAllocator, MemPoolId};
use crate::{Result, Stream};

const INSTANTIATE: InstantiateOptions = InstantiateOptions { auto_free_on_launch: true, use_node_priority: true };

pub(super) struct Captured {
    /// There if the graph keeps it, or if generators need it: their arguments are set through its nodes.
    pub(super) template: Option<GraphId>,
    pub(super) exec: OnceLock<GraphExecId>,
    pub(super) is_empty: bool,
    pub(super) pools: Vec<MemPoolId>,
    pub(super) buffers: Buffers,
    /// What other modules stored for the graph, such as workspaces.
    _slots: CaptureSlots,
    host_pools: CapturedHostPools,
    pub(super) generators: CapturedGenerators,
    /// Held while it is instantiated, and over a replay with generators.
    pub(super) launch_lock: Mutex<()>,
    /// The streams that it was replayed on.
    pub(super) replay_streams: StreamSet,
}

impl Captured {
    pub(super) fn new(
        template: Option<GraphId>,
        exec: Option<GraphExecId>,
        is_empty: bool,
        pools: Vec<MemPoolId>,
        buffers: Buffers,
        generators: CapturedGenerators,
        mut slots: CaptureSlots,
    ) -> Self {
        Self {
            template,
            exec: exec.map_or_else(OnceLock::new, OnceLock::from),
            is_empty,
            pools,
            buffers,
            generators,
            host_pools: slots.take(),
            _slots: slots,
            launch_lock: Mutex::default(),
            replay_streams: StreamSet::default(),
        }
    }

    /// Records that replays use the graph's memory on `stream`.
    pub(super) fn record_use(&self, allocator: &Arc<dyn DeviceAllocator>, stream: &Stream) -> Result<()> {
        let keeper = allocator.pools()?;
        for &pool in &self.pools {
            keeper.record_pool_use(stream.device_id(), pool, stream.id())?;
        }
        self.host_pools.record_replay(stream);
        self.generators.record_use(stream)?;
        self.buffers.record_use(stream)
    }

    /// Its driver objects.
    pub(super) fn objects(&self) -> impl Iterator<Item = GraphObject> {
        let exec = self.exec.get().copied().map(GraphObject::Exec);
        exec.into_iter().chain(self.template.map(GraphObject::Template))
    }
}

/// Makes an executable graph of a template.
pub(super) fn instantiate(driver: &dyn Driver, template: GraphId) -> Result<GraphExecId> {
    // In relaxed mode, as it would invalidate another thread's capture.
    RelaxedMode::run(driver, || Ok(driver.graph_instantiate(template, INSTANTIATE)?))
}
