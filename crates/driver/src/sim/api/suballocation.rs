//! Reports of an allocator about the parts of its memory that are in use.

use std::sync::Arc;

use crate::sim::driver::SimDriver;
use crate::sim::memory::AccessContext;
use crate::sim::order::{Accessor, HappensBefore, Operation};
use crate::{Call, DevicePtr, StreamId, Suballocations};

impl Suballocations for SimDriver {
    fn tracks_suballocations(&self) -> bool {
        Self::tracks_suballocations(self)
    }

    fn suballocated(&self, ptr: DevicePtr, bytes: u64, stream: StreamId) {
        self.report_suballocated(Call::Suballocated, ptr, bytes, stream);
    }

    fn suballocated_in_place(&self, ptr: DevicePtr, bytes: u64, stream: StreamId) {
        self.report_suballocated(Call::SuballocatedInPlace, ptr, bytes, stream);
    }

    fn label_memory(&self, ptr: DevicePtr, bytes: u64, label: &str) {
        if bytes > 0 {
            self.lock().hazards.names_mut().set_memory(ptr, bytes, label);
        }
    }

    fn label_stream(&self, stream: StreamId, label: &str) {
        self.lock().hazards.names_mut().set_stream(stream, label);
    }

    fn suballocation_freed(&self, ptr: DevicePtr, bytes: u64) {
        if !Self::tracks_suballocations(self) {
            return;
        }
        let Ok(mut state) = self.enter(Call::SuballocationFreed) else { return };
        let at = state.call_number();
        state.memory.suballocation_freed(ptr, bytes, at);
    }
}

impl SimDriver {
    /// Handles the report `call` of a suballocation.
    fn report_suballocated(&self, call: Call, ptr: DevicePtr, bytes: u64, stream: StreamId) {
        if !Self::tracks_suballocations(self) {
            return;
        }
        let Ok(mut state) = self.enter(call) else { return };
        let Ok(stream) = state.live_stream(stream) else { return };
        let state = &mut *state;
        if state.captures.is_capturing(stream) {
            // The order of the new work is not known before the graph is launched. But the range is no longer free.
            let at = state.call_number();
            state.memory.forget_suballocations(ptr, bytes, at);
            return;
        }
        let streams = &mut state.scheduler.streams;
        let clock = Arc::new(streams.clock_of_next(stream));
        let queue = streams.get(stream);
        let epoch = queue.last().epoch;
        let mut by = AccessContext {
            device: queue.device,
            accessor: Accessor {
                operation: Operation::PoolAlloc,
                epoch,
                number: queue.number_of(epoch),
                node: None,
                stream,
                queued_at: state.current_call.number,
            },
            before: HappensBefore { epoch, clock: &clock, graph: None },
            now: state.scheduler.now(),
            any_device: true,
            hazards: &mut state.hazards,
        };
        state.memory.suballocated(ptr, bytes, &clock, &mut by, call == Call::SuballocatedInPlace);
    }
}
