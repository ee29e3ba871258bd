//! [`PluggableAllocator`] beyond the common contract (`allocators.rs`), and external allocators as upstreams.

mod calls;
mod consistency;
mod pools;
mod upstream;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use crate::common::logging_allocator::LoggingAllocator;
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{HazardKind, SimConfig, SimDriver};
use warpool::driver::{
    CaptureMode, Copies as _, DeviceId, DevicePtr, Driver, ErrorCode, ForeignStream, Pattern, StreamId, StreamOptions,
};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::external::{ExternalAllocator, ExternalUpstream, FnAllocator};
use warpool::memory::pools::{PoolOptions, PrivatePools, Route};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{Action, Frame, HistoryOptions, SnapshotOptions, StackLevel, Stats};
use warpool::memory::{
    Allocate, CachingAllocator, DeviceAllocator, MemPool, MemPoolId, OomCause, OomReport, PluggableAllocator, Settings,
};
use warpool::{Device, Error, Instance, Stream};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A pluggable allocator over a logging one, on two simulated devices.
struct TestContext {
    sim: Arc<SimDriver>,
    instance: Instance,
    external: Arc<LoggingAllocator>,
    allocator: Arc<PluggableAllocator>,
}

impl TestContext {
    /// Without hooks.
    fn plain() -> Self {
        Self::with(Settings::default(), LoggingAllocator::plain)
    }

    /// With all hooks.
    fn hooked() -> Self {
        let context = Self::with(Settings::default(), LoggingAllocator::with_hooks);
        context.log();
        context
    }

    fn with(settings: Settings, make: fn(&Arc<LoggingAllocator>) -> FnAllocator) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let instance = Instance::new(sim.clone()).unwrap();
        let external = LoggingAllocator::new(sim.clone());
        let allocator = PluggableAllocator::with_settings(&instance, Arc::new(make(&external)), settings).unwrap();
        Self { sim, instance, external, allocator: Arc::new(allocator) }
    }

    fn shared(&self) -> Arc<dyn DeviceAllocator> {
        self.allocator.clone()
    }

    /// The calls of the external allocator since the last call of this.
    fn log(&self) -> Vec<String> {
        self.external.take_log()
    }

    fn driver(&self) -> &dyn Driver {
        &*self.sim
    }

    fn device(&self) -> Device {
        self.instance.device(0).unwrap()
    }

    fn stream(&self) -> Stream {
        self.device().pool_stream().unwrap()
    }

    fn allocate(&self, bytes: u64, stream: &Stream) -> Allocation {
        self.allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap()
    }

    fn refused(&self, bytes: u64, stream: &Stream) -> Error {
        self.allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap_err()
    }

    fn expect_oom(&self, bytes: u64, stream: &Stream) -> OomReport {
        match self.refused(bytes, stream) {
            Error::OutOfMemory(report) => *report,
            other => panic!("{other}"),
        }
    }

    fn stats(&self) -> Stats {
        self.allocator.stats(DEVICE).unwrap()
    }

    fn trim(&self) -> u64 {
        self.allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap()
    }

    fn fill(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: &Stream) {
        self.driver().fill(ptr, Pattern::U8(value), bytes, stream.id()).unwrap();
    }

    fn byte_at(&self, ptr: DevicePtr) -> u8 {
        self.device().synchronize().unwrap();
        let mut byte = [0];
        self.driver().download(DEVICE, ptr, &mut byte).unwrap();
        byte[0]
    }

    /// Clears the hazards of queries of destroyed streams.
    fn clear_destroyed_stream_hazards(&self) {
        let hazards = self.sim.hazards();
        assert!(hazards.iter().all(|hazard| hazard.kind == HazardKind::UseAfterDestroy), "{hazards:#?}");
        self.sim.clear_hazards();
    }

    /// Everything is freed, there was no hazard, and the thread's capture mode is restored.
    fn finish(self) {
        self.trim();
        assert_eq!(self.driver().capture_mode_exchange(CaptureMode::Global).unwrap(), CaptureMode::Global);
        assert_eq!(self.external.live(), BTreeMap::new(), "not freed");
        let stats = self.stats();
        assert_eq!((stats.active.all.current, stats.reserved_bytes.all.current), (0, 0));
        assert_eq!(self.sim.hazards(), []);
    }
}
