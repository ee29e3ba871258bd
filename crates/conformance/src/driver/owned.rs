//! What a check made and still holds, and how that is taken away behind it. Kept exactly: what a check destroys itself
//! it must take off the list, so that clearing up never touches what is gone.

use super::bench::Bench;
use crate::expect::Checked;
use crate::launch::free_range;
use warpool_driver::{
    CaptureMode, CaptureState, DevicePtr, EventId, GraphExecId, GraphId, HandleId, HostPtr, ModuleId, PhysicalId,
    PoolId, StreamId,
};

/// One thing to take away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owned {
    /// Destroyed.
    Stream(StreamId),
    /// Not destroyed, but must not be left capturing or busy: a default or an adopted stream.
    Watched(StreamId),
    /// Destroyed.
    Event(EventId),
    /// Freed; from `mem_alloc` or a pool.
    Memory(DevicePtr),
    /// Freed; pinned.
    Pinned(HostPtr),
    /// Unregistered.
    Registered(HostPtr),
    /// Address space, given back whole.
    Range(DevicePtr, u64),
    /// Unmapped.
    Mapping(DevicePtr, u64),
    /// Released.
    Physical(PhysicalId),
    /// Destroyed.
    Pool(PoolId),
    /// A default pool: trimmed.
    Trimmed(PoolId),
    /// Destroyed.
    Graph(GraphId),
    /// Destroyed.
    Exec(GraphExecId),
    /// Unloaded.
    Module(ModuleId),
    /// Destroyed.
    Handle(HandleId),
}

/// Ends captures, waits for the work, and takes everything away, the youngest first.
/// Goes on after a failure and returns the first.
pub(super) fn clear(bench: &Bench<'_>, owned: Vec<Owned>) -> Checked {
    if owned.is_empty() {
        return Ok(());
    }
    let driver = bench.driver;
    end_captures(bench, &owned);
    driver.capture_mode_exchange(CaptureMode::Global)?;
    let mut first = driver.device_synchronize(bench.device);
    if let Some(second) = bench.second_device_used() {
        first = first.and(driver.device_synchronize(second));
    }
    for thing in owned.into_iter().rev() {
        let gone = match thing {
            Owned::Stream(stream) => driver.stream_destroy(stream),
            Owned::Watched(_) => Ok(()),
            Owned::Event(event) => driver.event_destroy(event),
            Owned::Memory(ptr) => driver.mem_free(ptr),
            Owned::Pinned(ptr) => driver.host_free(ptr),
            Owned::Registered(ptr) => driver.host_unregister(ptr),
            Owned::Range(ptr, bytes) => free_range(driver, ptr, bytes),
            Owned::Mapping(ptr, bytes) => driver.vm_unmap(ptr, bytes),
            Owned::Physical(physical) => driver.vm_release(physical),
            Owned::Pool(pool) => driver.pool_destroy(pool),
            Owned::Trimmed(pool) => driver.pool_trim(pool, 0),
            Owned::Graph(graph) => driver.graph_destroy(graph),
            Owned::Exec(exec) => driver.graph_exec_destroy(exec),
            Owned::Module(module) => driver.module_unload(module),
            Owned::Handle(handle) => driver.library_destroy(handle),
        };
        first = first.and(gone);
    }
    Ok(first?)
}

/// Ends every capture that a check left behind. Ending one on a stream that only joined fails and breaks it; its first
/// stream comes later in the list or in the second round.
fn end_captures(bench: &Bench<'_>, owned: &[Owned]) {
    for _round in 0..2 {
        for thing in owned.iter().rev() {
            let (Owned::Stream(stream) | Owned::Watched(stream)) = *thing else {
                continue;
            };
            let idle = matches!(bench.driver.capture_state(stream), Ok(CaptureState::None));
            if !idle && let Ok(graph) = bench.driver.capture_end(stream) {
                // Only a check that failed gets here; whatever this says, the check's own failure is what counts.
                let _ = bench.driver.graph_destroy(graph);
            }
        }
    }
}
