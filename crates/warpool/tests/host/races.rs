//! Calls of other threads during a driver call of the host allocator, made by hooks of the driver at exactly that
//! point.
//!
//! If the other thread has to wait for the driver call, the hook cannot wait for the thread: it gives a wrong
//! implementation some time to fail. No assertion depends on time.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use warpool::driver::decorate::{Arguments, Hook, Hooked, Outcome};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, Driver, ForeignStream, Memory as _, StreamOptions, Streams as _};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::report::{Action, HistoryOptions, Snapshot};
use warpool::memory::{CachingAllocator, DeviceAllocator, HostAllocator, PinnedSettings, Settings};
use warpool::{Instance, Stream};

const MIB: u64 = 1 << 20;
/// How long a hook gives another thread to do something wrong.
const GRACE_PERIOD: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Before,
    After,
}

type Callback = Box<dyn FnOnce() + Send>;

/// Callbacks that run once, before or after a driver call.
#[derive(Default)]
struct Callbacks(Mutex<Vec<(When, Call, Callback)>>);

impl Callbacks {
    fn add(&self, when: When, call: Call, callback: impl FnOnce() + Send + 'static) {
        self.0.lock().unwrap().push((when, call, Box::new(callback)));
    }

    fn run(&self, when: When, call: Call) {
        let callback = {
            let mut all = self.0.lock().unwrap();
            let at = all.iter().position(|(at, of, _)| (*at, *of) == (when, call));
            at.map(|at| all.remove(at).2)
        };
        if let Some(callback) = callback {
            callback();
        }
    }
}

impl Hook for Callbacks {
    type CallState = ();

    fn before(&self, _: &dyn Driver, call: Call, _: Arguments<'_>) -> warpool::driver::Result<()> {
        self.run(When::Before, call);
        Ok(())
    }

    fn after(&self, _: &dyn Driver, call: Call, (): (), _: Outcome<'_>) {
        self.run(When::After, call);
    }

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}

struct TestContext {
    sim: Arc<SimDriver>,
    hooked: Arc<Hooked<Callbacks>>,
    instance: Instance,
    host: HostAllocator,
}

impl TestContext {
    fn new(settings: PinnedSettings) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let hooked = Arc::new(Hooked::with_hook(sim.clone(), Callbacks::default()));
        let instance = Instance::new(hooked.clone()).unwrap();
        let host = HostAllocator::new(&instance, settings);
        Self { sim, hooked, instance, host }
    }

    fn at(&self, when: When, call: Call, callback: impl FnOnce() + Send + 'static) {
        self.hooked.hook().add(when, call, callback);
    }

    /// Every callback ran, and nothing stays pinned.
    fn finish(self) {
        self.host.check();
        assert!(self.hooked.hook().0.lock().unwrap().is_empty(), "a callback never ran");
        self.host.close().unwrap();
        assert_eq!(self.sim.object_counts().pinned, 0);
    }
}

#[test]
fn the_last_handle_may_be_dropped_while_a_segment_is_unpinned() {
    let context = TestContext::new(PinnedSettings { max_cached_bytes: Some(MIB), ..PinnedSettings::default() });
    let [block, other] = [5, 6].map(|mib| context.host.allocate(mib * MIB).unwrap());
    let TestContext { sim, hooked, instance, host } = context;
    hooked.hook().add(When::Before, Call::HostFree, move || drop(host));
    block.free().unwrap();
    assert_eq!(sim.object_counts().pinned, 1);
    // The allocator is gone, so the block stays pinned, and is still valid.
    other.write(0, &[1; 8]).unwrap();
    other.free().unwrap();
    drop(instance);
    assert_eq!(Arc::strong_count(&hooked), 1, "no reference to the driver is left");
}

/// Once unpinned, the address may belong to another thread: the free comes first in the history.
#[test]
fn the_history_has_a_segments_free_before_the_address_is_reused() {
    let context = TestContext::new(PinnedSettings::default());
    context.host.record_history(Some(HistoryOptions::default()));
    drop(context.host.allocate(5 * MIB).unwrap());
    let host = context.host.clone();
    context.at(When::After, Call::HostFree, move || drop(host.allocate(5 * MIB).unwrap()));
    assert_eq!(context.host.trim(0).unwrap(), 5 * MIB);
    let mut snapshot = Snapshot::default();
    context.host.add_to(&mut snapshot);
    let traces = snapshot.host_traces.unwrap();
    let segments = traces.iter().map(|entry| entry.action);
    let segments: Vec<_> =
        segments.filter(|action| [Action::SegmentAlloc, Action::SegmentFree].contains(action)).collect();
    assert_eq!(segments, [Action::SegmentAlloc, Action::SegmentFree, Action::SegmentAlloc]);
    context.finish();
}

#[test]
fn a_request_at_the_cap_waits_for_a_segment_in_transit() {
    let context = TestContext::new(PinnedSettings { cap_bytes: Some(10 * MIB), ..PinnedSettings::default() });
    drop(context.host.allocate(8 * MIB).unwrap());
    let (done, is_done) = mpsc::channel();
    let (send_thread, receive_thread) = mpsc::channel();
    let host = context.host.clone();
    context.at(When::Before, Call::HostFree, move || {
        let thread = std::thread::spawn(move || {
            let outcome = host.allocate(9 * MIB).map(drop);
            drop(host);
            let _ = done.send(());
            outcome
        });
        let _ = is_done.recv_timeout(GRACE_PERIOD);
        send_thread.send(thread).unwrap();
    });
    context.host.trim(0).unwrap();
    receive_thread.recv().unwrap().join().unwrap().unwrap();
    context.finish();
}

/// A replay on a stream in which a fence is just being recorded comes after that fence, and needs one of its own.
#[test]
fn a_replay_during_fencing_gets_its_own_fence() {
    let context = TestContext::new(PinnedSettings::default());
    let memory: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&context.instance, Settings::default()));
    let device = context.instance.device(0).unwrap();
    let [stream, captured] = [0, 1].map(|_| device.pool_stream().unwrap());
    let to = context.sim.mem_alloc(device.id(), 64).unwrap();
    let block = context.host.allocate(MIB).unwrap();
    let ptr = block.ptr();
    let mut graph = Graph::new(&memory, &device, GraphOptions::default()).unwrap();
    graph
        .capture(&captured, CaptureOptions::default(), |_| {
            context.sim.copy(to.into(), ptr.into(), 64, captured.id())?;
            block.record_use(&captured)
        })
        .unwrap();
    context.sim.pause_stream(stream.id()).unwrap();
    context.sim.copy(to.into(), ptr.into(), 64, stream.id()).unwrap();
    block.record_use(&stream).unwrap();
    let (send_count, receive_count) = mpsc::channel();
    let (sim, replays) = (Arc::clone(&context.sim), stream.clone());
    context.at(When::After, Call::EventRecord, move || {
        send_count.send(sim.paused_work(replays.id()).unwrap()).unwrap();
        graph.replay(&replays).unwrap();
        drop(graph);
    });
    block.free().unwrap();
    context.host.process_pending().unwrap();
    // The fence has passed, the replay has not run.
    context.sim.run_paused(stream.id(), receive_count.recv().unwrap()).unwrap();
    assert_ne!(context.sim.paused_work(stream.id()).unwrap(), 0);
    context.host.process_pending().unwrap();
    assert_eq!(context.host.stats().active_requests.current, 1, "the replay uses it");
    context.sim.resume_stream(stream.id()).unwrap();
    stream.synchronize().unwrap();
    context.host.process_pending().unwrap();
    assert_eq!(context.host.stats().active_requests.current, 0);
    assert_eq!(context.sim.hazards(), []);
    context.finish();
}

/// An event after all work of the device would invalidate a capture, so none begins meanwhile.
#[test]
fn no_capture_begins_while_an_event_of_the_device_is_recorded() {
    let context = TestContext::new(PinnedSettings::default());
    let memory: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&context.instance, Settings::default()));
    let device = context.instance.device(0).unwrap();
    let captured = device.pool_stream().unwrap();
    let mut graph = Graph::new(&memory, &device, GraphOptions::default()).unwrap();
    let id = context.sim.stream_create(device.id(), StreamOptions::default()).unwrap();
    // SAFETY: the stream is destroyed through the same driver, which refuses its handle afterwards.
    let foreign = unsafe { ForeignStream::new(context.sim.stream_info(id).unwrap().raw) };
    let stream = Stream::external(&device, foreign).unwrap();
    let block = context.host.allocate(MIB).unwrap();
    block.record_use(&stream).unwrap();
    drop(block);
    context.sim.stream_destroy(stream.id()).unwrap();
    let (begun, has_begun) = mpsc::channel();
    let (done, is_done) = mpsc::channel();
    let (send_thread, receive_thread) = mpsc::channel();
    context.at(When::Before, Call::EventRecordContext, move || {
        let thread = std::thread::spawn(move || {
            graph.capture(&captured, CaptureOptions::default(), |_| {
                let _ = begun.send(());
                is_done.recv().unwrap();
                Ok(())
            })
        });
        let _ = has_begun.recv_timeout(GRACE_PERIOD);
        send_thread.send(thread).unwrap();
    });
    context.host.process_pending().unwrap();
    done.send(()).unwrap();
    receive_thread.recv_timeout(GRACE_PERIOD).expect("the event was recorded").join().unwrap().unwrap();
    device.synchronize().unwrap();
    context.host.process_pending().unwrap();
    assert_eq!(context.host.stats().active_requests.current, 0);
    context.finish();
}
