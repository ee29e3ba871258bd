//! Cleanup of the objects that a check created and did not destroy. The list is exact: a check that destroys something
//! itself takes it off the list, so that the cleanup destroys nothing twice.

use warpool_driver::{
    CaptureMode, CaptureState, DevicePtr, EventId, GraphExecId, GraphId, HandleId, HostPtr, ModuleId, PhysicalId,
    PoolId, StreamId,
};

use super::TestContext;
use crate::expect::CheckResult;

/// One object of the driver to clean up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    Stream(StreamId),
    /// A default stream: never destroyed, but must not be left capturing.
    DefaultStream(StreamId),
    Event(EventId),
    /// From `mem_alloc` or a pool.
    Memory(DevicePtr),
    Pinned(HostPtr),
    Registered(HostPtr),
    /// Reserved addresses and their size in bytes.
    AddressRange(DevicePtr, u64),
    /// Mapped addresses and their size in bytes.
    Mapping(DevicePtr, u64),
    Physical(PhysicalId),
    Pool(PoolId),
    /// A default pool: never destroyed, but trimmed.
    DefaultPool(PoolId),
    Graph(GraphId),
    GraphExec(GraphExecId),
    Module(ModuleId),
    Handle(HandleId),
}

/// Ends captures, waits for all work and destroys everything, the youngest first. Continues after an error and returns
/// the first.
pub(super) fn cleanup(context: &TestContext, resources: Vec<Resource>) -> CheckResult {
    if resources.is_empty() {
        return Ok(());
    }
    let driver = &context.driver;
    end_captures(context, &resources);
    driver.capture_mode_exchange(CaptureMode::Global)?;
    let mut first = driver.device_synchronize(context.device_id);
    if let Some(second) = context.second_device_used() {
        first = first.and(driver.device_synchronize(second));
    }
    for resource in resources.into_iter().rev() {
        let result = match resource {
            Resource::Stream(stream) => driver.stream_destroy(stream),
            Resource::DefaultStream(_) => Ok(()),
            Resource::Event(event) => driver.event_destroy(event),
            Resource::Memory(ptr) => driver.mem_free(ptr),
            Resource::Pinned(ptr) => driver.host_free(ptr),
            Resource::Registered(ptr) => driver.host_unregister(ptr),
            Resource::AddressRange(ptr, bytes) => context.free_range(ptr, bytes),
            Resource::Mapping(ptr, bytes) => driver.vm_unmap(ptr, bytes),
            Resource::Physical(physical) => driver.vm_release(physical),
            Resource::Pool(pool) => driver.pool_destroy(pool),
            Resource::DefaultPool(pool) => driver.pool_trim(pool, 0),
            Resource::Graph(graph) => driver.graph_destroy(graph),
            Resource::GraphExec(exec) => driver.graph_exec_destroy(exec),
            Resource::Module(module) => driver.module_unload(module),
            Resource::Handle(handle) => driver.library_destroy(handle),
        };
        first = first.and(result);
    }
    Ok(first?)
}

/// Ends every capture that a check left active. Ending one on a stream that only joined fails and invalidates it; the
/// stream that it began on is later in the list or comes in the second round.
fn end_captures(context: &TestContext, resources: &[Resource]) {
    for _round in 0..2 {
        for resource in resources.iter().rev() {
            let (Resource::Stream(stream) | Resource::DefaultStream(stream)) = *resource else {
                continue;
            };
            let idle = matches!(context.driver.capture_state(stream), Ok(CaptureState::None));
            if !idle && let Ok(graph) = context.driver.capture_end(stream) {
                // Only after a failed check, whose own failure is the one to report.
                let _ = context.driver.graph_destroy(graph);
            }
        }
    }
}
