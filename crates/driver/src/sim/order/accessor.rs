//! Who accessed memory: an operation of a stream, a node of a launched graph, or the host.

use std::fmt;

use super::clock::{Epoch, TimelineId, VectorClock};
use super::node_order::{NodeInstance, NodeOrder};
use crate::StreamId;

/// The kind of an operation, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Kernel(&'static str),
    Fill,
    WriteRegistered,
    Copy,
    PoolAlloc,
    PoolFree,
    Upload,
    Download,
    HostRead,
    HostWrite,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(name) => write!(f, "kernel {name}"),
            Self::Fill => f.write_str("fill"),
            Self::WriteRegistered => f.write_str("write_registered"),
            Self::Copy => f.write_str("copy"),
            Self::PoolAlloc => f.write_str("pool_alloc"),
            Self::PoolFree => f.write_str("pool_free"),
            Self::Upload => f.write_str("upload"),
            Self::Download => f.write_str("download"),
            Self::HostRead => f.write_str("host_read"),
            Self::HostWrite => f.write_str("host_write"),
        }
    }
}

/// Who accessed memory.
#[derive(Clone, Copy, Debug)]
pub struct Accessor {
    pub operation: Operation,
    /// All nodes of one launch share the epoch of the launch.
    pub epoch: Epoch,
    /// The number of the operation in its stream, from 1; that of the launch for a node.
    pub number: u64,
    pub node: Option<NodeInstance>,
    /// Unused for the host.
    pub stream: StreamId,
    /// The number of the call that queued it.
    pub queued_at: u64,
}

impl Accessor {
    /// Identifies the operation.
    pub fn key(&self) -> (u64, u32) {
        (self.queued_at, self.node.map_or(0, |instance| instance.node + 1))
    }

    pub fn is_host(&self) -> bool {
        self.epoch.timeline == TimelineId::HOST
    }
}

impl fmt::Display for Accessor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, queued_at, stream, .. } = self;
        match self.node {
            Some(NodeInstance { exec, node, .. }) => {
                write!(f, "{operation} (node {node} of {exec}, launch #{queued_at})")?;
            }
            None => write!(f, "{operation} #{queued_at}")?,
        }
        if self.is_host() { f.write_str(" on the host") } else { write!(f, " in {stream}") }
    }
}

const UNORDERED: &str = "no event, default stream or wait of the host orders the two";

/// What is ordered before the operation that runs now.
#[derive(Clone, Copy)]
pub struct HappensBefore<'a> {
    /// The epoch of the operation itself.
    pub epoch: Epoch,
    /// What it is ordered after on other timelines.
    pub clock: &'a VectorClock,
    /// The graph, if the operation is one of its nodes.
    pub graph: Option<(&'a NodeOrder, NodeInstance)>,
}

impl HappensBefore<'_> {
    /// Whether `earlier`, which has run, is ordered before this operation.
    pub fn includes(&self, earlier: &Accessor) -> bool {
        if earlier.epoch.timeline != self.epoch.timeline {
            return self.clock.covers(earlier.epoch);
        }
        if earlier.epoch.seq != self.epoch.seq {
            return earlier.epoch.seq < self.epoch.seq;
        }
        match (self.graph, earlier.node) {
            (Some((order, this)), Some(other)) => order.is_before(other, this),
            _ => true,
        }
    }

    /// In words, why `earlier` is not ordered before `later`, the operation that this is about.
    pub fn why_not(&self, earlier: &Accessor, later: &Accessor) -> String {
        let (before, after) = (earlier.stream, later.stream);
        if earlier.is_host() {
            return format!(
                "it was queued in {after} before the host accessed the memory, and the host did not wait for it"
            );
        }
        if let (Some(this), Some(other)) = (later.node, earlier.node)
            && earlier.epoch == later.epoch
        {
            return format!("the graph has no path from node {} to node {}", other.node, this.node);
        }
        if earlier.queued_at > later.queued_at && !later.is_host() {
            // It took effect first, but was queued second: its own stream is the one that should have waited.
            return format!("{before} has not waited for operation {} of {after} ({UNORDERED})", later.number);
        }
        // Counted in the stream: its timeline may have served another stream before.
        let first = earlier.epoch.seq - earlier.number;
        let waited = match self.clock.get(earlier.epoch.timeline).saturating_sub(first) {
            0 => format!("has not waited for any work of {before}"),
            last => {
                format!("has waited for {before} only up to operation {last}; this was operation {}", earlier.number)
            }
        };
        if later.is_host() { format!("the host {waited}") } else { format!("{after} {waited} ({UNORDERED})") }
    }
}
