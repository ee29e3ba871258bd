//! The contents of a finished capture.

use std::sync::{Mutex, OnceLock};

use warpool_driver::{Driver, GraphExecId, GraphId, InstantiateOptions};

use super::buffers::Buffers;
use super::replay_streams::ReplayStreams;
use super::retired::GraphObject;
use crate::capture::{CaptureSlots, RelaxedMode};
use crate::generator::CapturedGenerators;
use crate::memory::{CapturedHostPools, MemPool};
use crate::typed::CapturedBuffers;
use crate::unwind::call_each;
use crate::{Instance, Result};

const INSTANTIATE: InstantiateOptions = InstantiateOptions { auto_free_on_launch: true, use_node_priority: true };

pub(super) struct Captured {
    /// Present if the graph keeps it, or if generators need it: their arguments are set through its nodes.
    pub(super) template: Option<GraphId>,
    pub(super) exec: OnceLock<GraphExecId>,
    pub(super) is_empty: bool,
    pub(super) pools: Vec<MemPool>,
    pub(super) buffers: Buffers,
    /// Objects that other modules stored for the graph, such as workspaces.
    _slots: CaptureSlots,
    host_pools: CapturedHostPools,
    pub(super) generators: CapturedGenerators,
    /// Typed buffers, with whose other uses replays are ordered.
    pub(super) typed: CapturedBuffers,
    /// Held during instantiation, and during a replay with generators.
    pub(super) launch_lock: Mutex<()>,
    /// The streams on which replays may be under way.
    pub(super) replay_streams: ReplayStreams,
}

impl Captured {
    pub(super) fn new(
        template: Option<GraphId>,
        exec: Option<GraphExecId>,
        is_empty: bool,
        pools: Vec<MemPool>,
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
            typed: slots.take::<CapturedBuffers>().finish(),
            _slots: slots,
            launch_lock: Mutex::default(),
            replay_streams: ReplayStreams::default(),
        }
    }

    /// Fails if memory that the graph owns and a replay would use is asleep.
    #[cold]
    pub(super) fn expect_awake(&self, instance: &Instance) -> Result<()> {
        const WHAT: &str = "replay the graph";
        self.pools.iter().try_for_each(|pool| pool.expect_awake(WHAT))?;
        self.buffers.expect_awake(instance, WHAT)?;
        self.typed.expect_awake(instance, WHAT)
    }

    /// Its driver objects.
    pub(super) fn objects(&self) -> impl Iterator<Item = GraphObject> {
        let exec = self.exec.get().copied().map(GraphObject::Exec);
        exec.into_iter().chain(self.template.map(GraphObject::Template))
    }
}

/// Makes the graph's memory wait for the replays that are under way. Makes no driver call.
impl Drop for Captured {
    fn drop(&mut self) {
        let mut streams = self.replay_streams.take();
        if crate::defect::Defect::GraphRemembersOneStream.is_on() {
            streams.truncate(1);
        }
        if streams.is_empty() {
            return;
        }
        // Decorators are user code: all uses are recorded even if one panics.
        let parts: [&dyn Fn(); 4] = [
            &|| call_each(&self.pools, |pool| pool.record_replays(&streams)),
            &|| {
                if !crate::defect::Defect::GraphForgetsHostPools.is_on() {
                    self.host_pools.record_replays(&streams);
                }
            },
            &|| self.generators.record_replays(&streams),
            &|| self.buffers.record_replays(&streams),
        ];
        call_each(parts, |record| record());
    }
}

/// Makes an executable graph of a template.
pub(super) fn instantiate(driver: &dyn Driver, template: GraphId) -> Result<GraphExecId> {
    // In relaxed mode, as it would invalidate another thread's capture.
    RelaxedMode::run(driver, || Ok(driver.graph_instantiate(template, INSTANTIATE)?))
}
