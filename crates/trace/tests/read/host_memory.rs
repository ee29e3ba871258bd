//! Snapshots with device memory and pinned host memory in one file are read back as they were written.

use std::sync::Arc;

use warpool::driver::Copies as _;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::report::{
    Action, BlockState, Frame, HistoryOptions, SegmentInfo, Snapshot, SnapshotOptions, StackLevel, set_user_metadata,
};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, HostAllocator, HostBlock, Settings};
use warpool::{Instance, Stream};
use warpool_trace::replay::{ReplayOptions, replay};

use crate::common::{MIB, read, written};

/// A device allocator and a host allocator, each with a history.
struct Allocators {
    instance: Instance,
    sim: Arc<SimDriver>,
    device: Arc<dyn DeviceAllocator>,
    host: HostAllocator,
    stream: Stream,
}

impl Allocators {
    fn new() -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let instance = Instance::new(sim.clone()).unwrap();
        let settings = Settings::parse("pinned_use_cuda_host_register:True,pinned_num_register_threads:4").unwrap();
        let device: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, settings.clone()));
        let host = HostAllocator::new(&instance, settings.pinned);
        let stream = instance.device(0).unwrap().pool_stream().unwrap();
        for observers in [device.observers(), host.observers()] {
            observers.set_stack_hook(Some(Arc::new(|| {
                let frame = |name: &str, line| Frame { name: name.into(), filename: "loader.py".into(), line };
                Some([frame("stage", 12), frame("main", 3)].into())
            })));
        }
        let allocators = Self { instance, sim, device, host, stream };
        allocators.record();
        allocators
    }

    fn record(&self) {
        let options = HistoryOptions { stacks: StackLevel::All, epoch_us: 1_700_000_000_000_000, ..Default::default() };
        self.device.record_history(Some(options.clone())).unwrap();
        self.host.record_history(Some(options));
    }

    fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.device.snapshot(SnapshotOptions::default()).unwrap();
        self.host.add_to(&mut snapshot);
        snapshot
    }

    fn staged(&self, bytes: u64) -> HostBlock {
        let block = self.host.allocate(bytes).unwrap();
        let to = self.device.allocate(bytes, &self.stream).unwrap();
        block.record_use(&self.stream).unwrap();
        self.sim.copy(to.ptr().into(), block.ptr().into(), bytes, self.stream.id()).unwrap();
        block
    }
}

fn written_and_read(snapshot: &Snapshot) -> Snapshot {
    read(&written(snapshot)).unwrap().snapshot
}

#[test]
fn device_and_host_memory_are_read_from_one_file() {
    let allocators = Allocators::new();
    // Empty is not the same as absent.
    let empty = allocators.snapshot();
    assert_eq!((&empty.host_segments, &empty.host_traces), (&Some(Vec::new()), &Some(Vec::new())));
    assert_eq!(written_and_read(&empty), empty);

    allocators.sim.pause_stream(allocators.stream.id()).unwrap();
    set_user_metadata("epoch 1");
    let kept = allocators.staged(5000);
    drop(allocators.staged(3 * MIB + 1));
    set_user_metadata("");
    drop(allocators.host.allocate(100).unwrap());
    let taken = allocators.snapshot();
    let again = written_and_read(&taken);
    assert_eq!(again, taken);

    let segments = again.host_segments.as_deref().unwrap();
    assert_eq!(segments.iter().map(|segment| segment.device).collect::<Vec<_>>(), [-1, -1]);
    let states = |segment: &SegmentInfo| segment.blocks.iter().map(|block| block.state).collect::<Vec<_>>();
    let all: Vec<BlockState> = segments.iter().flat_map(states).collect();
    assert!(all.contains(&BlockState::ActiveAllocated) && all.contains(&BlockState::ActivePendingFree), "{all:?}");
    let trace = again.host_traces.as_deref().unwrap();
    let actions: Vec<Action> = trace.iter().map(|entry| entry.action).collect();
    let [segment, alloc, requested, completed] =
        [Action::SegmentAlloc, Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
    assert_eq!(actions, [segment, alloc, segment, alloc, requested, alloc, requested, completed]);
    let text = trace[1].user_metadata.map(|text| again.texts.get(text).to_owned());
    assert_eq!((text.as_deref(), trace[5].user_metadata), (Some("epoch 1"), None));
    assert!(trace.iter().all(|entry| entry.time_us > 1_700_000_000_000_000));
    // Device and host share one stack.
    assert_eq!(again.stacks.len(), 1);
    assert!(again.traces[0].iter().chain(trace).all(|entry| entry.stack == again.traces[0][0].stack));

    // The host's entries do not change the replay.
    let report = replay(&again, &ReplayOptions::default()).unwrap();
    assert!(report.fidelity.exact, "{:?}", report.fidelity.first_difference);
    allocators.sim.resume_stream(allocators.stream.id()).unwrap();
    allocators.stream.synchronize().unwrap();
    drop(kept);
    allocators.host.close().unwrap();
}

#[test]
fn memory_of_graphs_is_in_the_file() {
    let allocators = Allocators::new();
    let device = allocators.instance.device(0).unwrap();
    let stream = device.lease_stream().unwrap();
    let mut graph = Graph::new(&allocators.device, &device, GraphOptions::default()).unwrap();
    let freed = graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let (to, pinned) = (capture.allocate(4096)?, capture.allocate_host(&allocators.host, 4096)?);
            let stream = capture.stream().clone();
            capture.copy(to, pinned, 4096, &stream)?;
            let freed = allocators.host.allocate_on(600, &stream)?;
            freed.record_use(&stream)?;
            Ok(freed.ptr().0)
        })
        .unwrap();
    let taken = allocators.snapshot();
    let again = written_and_read(&taken);
    assert_eq!(again, taken);
    let blocks = again.host_segments.iter().flatten().flat_map(|segment| &segment.blocks);
    let pending: Vec<u64> =
        blocks.filter(|block| block.state == BlockState::ActivePendingFree).map(|block| block.address).collect();
    assert_eq!(pending, [freed], "the graph still uses it");
    drop(graph);
    allocators.host.close().unwrap();
}
