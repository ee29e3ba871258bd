//! The order of nodes in a graph that is being captured.

use rustc_hash::FxHashSet;
use warpool_driver::{Driver, NodeId, StreamId};

use crate::Result;

/// The last nodes of all `streams`; empty if one of them is not capturing, or if the driver cannot tell.
pub(super) fn last_nodes(driver: &dyn Driver, streams: &[StreamId]) -> Vec<NodeId> {
    let nodes = streams.iter().map(|&stream| driver.capture_dependencies(stream));
    nodes.collect::<std::result::Result<Vec<_>, _>>().map_or_else(|_| Vec::new(), |nodes| nodes.concat())
}

/// All nodes that precede the next work of `stream`.
pub(super) fn ancestors(driver: &dyn Driver, stream: StreamId) -> Result<FxHashSet<NodeId>> {
    let mut edges = driver.capture_topology(stream)?.edges;
    edges.sort_unstable_by_key(|&(_, to)| to);
    let mut open = driver.capture_dependencies(stream)?;
    let mut seen: FxHashSet<NodeId> = open.iter().copied().collect();
    while let Some(node) = open.pop() {
        let first = edges.partition_point(|&(_, to)| to < node);
        for &(from, _) in edges[first..].iter().take_while(|&&(_, to)| to == node) {
            if seen.insert(from) {
                open.push(from);
            }
        }
    }
    Ok(seen)
}
