//! Who touched memory: a piece of work or the host, with its place in the order.

use std::fmt;

use crate::sim::order::{Frontier, HOST, Stamp};
use crate::sim::work::ExecGraph;
use crate::{GraphExecId, StreamId};

/// What a piece of work is called in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    Kernel(&'static str),
    Fill,
    Copy,
    PoolAlloc,
    PoolFree,
    Upload,
    Download,
    HostRead,
    HostWrite,
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(name) => write!(f, "kernel {name}"),
            Self::Fill => f.write_str("fill"),
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

/// Which node of a launched graph it was, and in which run of a conditional's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    pub exec: GraphExecId,
    pub node: u32,
    /// Bodies of conditional nodes run many times in one launch; this counts all such runs. 0 outside of bodies.
    pub run: u32,
    /// The number of the call that captured it, or gave it its arguments since.
    pub captured_at: u64,
}

/// Who touched memory.
#[derive(Clone, Copy, Debug)]
pub struct Actor {
    pub label: Label,
    /// Where it stands. All nodes of one launch share the stamp of the launch.
    pub stamp: Stamp,
    pub point: Option<Point>,
    pub stream: StreamId,
    /// The number of the call that queued it.
    pub at: u64,
}

impl Actor {
    /// Tells one operation from another.
    pub fn key(&self) -> (u64, u32) {
        (self.at, self.point.map_or(0, |point| point.node + 1))
    }

    pub fn is_host(&self) -> bool {
        self.stamp.lane == HOST
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.point {
            Some(point) => write!(f, "{} (node {} of {}, launch #{})", self.label, point.node, point.exec, self.at)?,
            None => write!(f, "{} #{}", self.label, self.at)?,
        }
        if self.is_host() { f.write_str(" on the host") } else { write!(f, " in {}", self.stream) }
    }
}

/// What the work that runs now knows about everybody else.
#[derive(Clone, Copy)]
pub struct Order<'a> {
    pub stamp: Stamp,
    pub base: &'a Frontier,
    pub graph: Option<(&'a ExecGraph, Point)>,
}

impl Order<'_> {
    /// Whether `earlier`, which has already run, is known to come before this.
    pub fn covers(&self, earlier: &Actor) -> bool {
        if earlier.stamp.lane != self.stamp.lane {
            return self.base.covers(earlier.stamp);
        }
        if earlier.stamp.seq != self.stamp.seq {
            return earlier.stamp.seq < self.stamp.seq;
        }
        match (self.graph, earlier.point) {
            (Some((graph, here)), Some(there)) => graph.ordered(there, here),
            _ => true,
        }
    }
}
