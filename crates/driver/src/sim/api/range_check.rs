//! Checks the memory that a copy, fill or product is to access, when the call is made.

use crate::sim::memory::{AccessFault, report_fault};
use crate::sim::order::{Accessor, Operation};
use crate::sim::refuse::refuse;
use crate::sim::state::SimState;
use crate::{DeviceId, DevicePtr, ErrorCode, Result, StreamId};

/// How a range is accessed.
#[derive(Clone, Copy)]
pub(super) struct RangeUse {
    pub device: DeviceId,
    pub write: bool,
    pub stream: StreamId,
    pub operation: Operation,
}

impl RangeUse {
    pub fn read(device: DeviceId, stream: StreamId, operation: Operation) -> Self {
        Self { device, write: false, stream, operation }
    }

    pub fn write(device: DeviceId, stream: StreamId, operation: Operation) -> Self {
        Self { device, write: true, stream, operation }
    }
}

/// Checks that all of a range may be accessed, and that it does not run from one allocation into the next. Access to
/// freed memory is also a hazard.
pub(super) fn check_range(state: &mut SimState, (ptr, bytes): (DevicePtr, u64), access: RangeUse) -> Result<()> {
    if state.memory.is_graph_memory(ptr, bytes) {
        // It is allocated and freed by a graph: checked when the work runs.
        return Ok(());
    }
    let Err((fault, from)) = state.memory.check(ptr, bytes, access.device, access.write) else {
        return match state.memory.region_end(ptr) {
            Some(end) if bytes > end.0 - ptr.0 => {
                refuse(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr}: the memory ends at {end}"))
            }
            _ => Ok(()),
        };
    };
    let why = match fault {
        AccessFault::NotMapped => "is not mapped",
        AccessFault::Denied => "may not be accessed by this device",
        AccessFault::Freed(_) => "was freed or unmapped",
    };
    if let AccessFault::Freed(_) = fault {
        let queue = state.scheduler.streams.get(access.stream);
        let epoch = queue.next_epoch();
        let by = Accessor {
            operation: access.operation,
            epoch,
            number: queue.number_of(epoch),
            node: None,
            stream: access.stream,
            queued_at: state.call_number(),
        };
        let now = state.scheduler.now();
        report_fault(fault, from, bytes - (from.0 - ptr.0), &by, now, &mut state.hazards);
    }
    refuse(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr}: {from} {why}"))
}
