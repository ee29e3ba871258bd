//! Programs as text, one step per line, for failure messages.

use std::fmt;

use super::model::{Conflict, Name};
use super::program::{GraphStep, Operation, Program, Span, Step};

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "program {} (care {}), streams 0 legacy, 1 per-thread, 2-3 blocking, 4-7 non-blocking:",
            self.seed, self.care
        )?;
        for (at, step) in self.steps.iter().enumerate() {
            writeln!(f, "  {at:3}  {step:?}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = ["plain", "mapped", "pinned"].get(self.arena).copied().unwrap_or("pool");
        write!(f, "{name}{}/{}[{}..{}]", self.arena, self.view, self.start, self.start + self.len)
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fill { to, value } => write!(f, "{to:?} = {value}"),
            Self::Copy { to, from } => write!(f, "{to:?} = {from:?}"),
            Self::Mix { to, from, salt } => write!(f, "{to:?} mix= {from:?} {salt}"),
        }
    }
}

impl fmt::Debug for GraphStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(branch, operation) => write!(f, "b{branch}: {operation:?}"),
            Self::Record { event, branch } => write!(f, "b{branch}: record e{event}"),
            Self::Wait { branch, event } => write!(f, "b{branch}: wait e{event}"),
            Self::Conditional { branch, is_while, runs, body } => {
                write!(f, "b{branch}: {} {runs} times {body:?}", if *is_while { "while" } else { "if" })
            }
        }
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(stream, operation) => write!(f, "s{stream}: {operation:?}"),
            Self::Record { event, stream } => write!(f, "s{stream}: record e{event}"),
            Self::Wait { stream, event } => write!(f, "s{stream}: wait e{event}"),
            Self::EventSync(event) => write!(f, "host: sync e{event}"),
            Self::EventQuery(event) => write!(f, "host: query e{event}"),
            Self::StreamSync(stream) => write!(f, "host: sync s{stream}"),
            Self::StreamQuery(stream) => write!(f, "host: query s{stream}"),
            Self::DeviceSync => f.write_str("host: sync all"),
            Self::HostRead(span) => write!(f, "host: read {span:?}"),
            Self::HostWrite(span, value) => write!(f, "host: {span:?} = {value}"),
            Self::Upload(span, value) => write!(f, "upload {span:?} = {value}"),
            Self::Download(span) => write!(f, "download {span:?}"),
            Self::PoolAlloc { arena, stream } => write!(f, "s{stream}: alloc pool{arena}"),
            Self::PoolFree { arena, stream } => write!(f, "s{stream}: free pool{arena}"),
            Self::Capture(plan) => write!(f, "capture on {:?}, mode {}: {:?}", plan.branches, plan.mode, plan.steps),
            Self::Launch { graph, stream } => write!(f, "s{stream}: launch g{graph}"),
            Self::Suballocate(span, stream) => write!(f, "suballocate {span:?} for s{stream}"),
            Self::FreeSuballocation(span) => write!(f, "free suballocation {span:?}"),
            Self::Replace(stream) => write!(f, "s{stream}: destroy, create a new one"),
        }
    }
}

impl fmt::Debug for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |(step, node): Name| node.map_or(format!("step {step}"), |node| format!("step {step} node {node}"));
        write!(f, "{:?}: {} and {} over {:?}", self.kind, name(self.first), name(self.second), self.span)
    }
}
