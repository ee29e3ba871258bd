//! What others do while the host allocator is in the middle of a driver call. The driver has a hook here that does it
//! at exactly that moment.
//!
//! Where something has to wait for the call, the hook cannot wait for that; it gives it a while to go wrong. No
//! assertion is about time.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use warpool::driver::decorate::{Arguments, Hook, Hooked, Outcome};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, Driver, ForeignStream, Memory as _, StreamOptions, Streams as _};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{
    Action, CachingAllocator, DeviceAllocator, HistoryOptions, HostAllocator, PinnedSettings, Settings, Snapshot,
};
use warpool::{Instance, Stream};

const MIB: u64 = 1 << 20;
/// How long something that must wait is given to go wrong.
const A_WHILE: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Before,
    After,
}

type Act = Box<dyn FnOnce() + Send>;

/// What is to be done once, at which call.
#[derive(Default)]
struct Moments(Mutex<Vec<(When, Call, Act)>>);

impl Moments {
    fn at(&self, when: When, call: Call, act: impl FnOnce() + Send + 'static) {
        self.0.lock().unwrap().push((when, call, Box::new(act)));
    }

    fn come(&self, when: When, call: Call) {
        let act = {
            let mut acts = self.0.lock().unwrap();
            let due = acts.iter().position(|(due, of, _)| (*due, *of) == (when, call));
            due.map(|index| acts.remove(index).2)
        };
        if let Some(act) = act {
            act();
        }
    }
}

impl Hook for Moments {
    type CallState = ();

    fn before(&self, _: &dyn Driver, call: Call, _: Arguments<'_>) -> warpool::driver::Result<()> {
        self.come(When::Before, call);
        Ok(())
    }

    fn after(&self, _: &dyn Driver, call: Call, (): (), _: Outcome<'_>) {
        self.come(When::After, call);
    }

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}

struct Lab {
    sim: Arc<SimDriver>,
    tapped: Arc<Hooked<Moments>>,
    instance: Instance,
    host: HostAllocator,
}

impl Lab {
    fn new(settings: PinnedSettings) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let tapped = Arc::new(Hooked::with_hook(sim.clone(), Moments::default()));
        let instance = Instance::new(tapped.clone()).unwrap();
        let host = HostAllocator::new(&instance, settings);
        Self { sim, tapped, instance, host }
    }

    fn at(&self, when: When, call: Call, act: impl FnOnce() + Send + 'static) {
        self.tapped.hook().at(when, call, act);
    }

    /// Everything was done that was to be done, and nothing stays pinned.
    fn finish(self) {
        self.host.check();
        assert!(self.tapped.hook().0.lock().unwrap().is_empty(), "a moment never came");
        self.host.close().unwrap();
        assert_eq!(self.sim.object_counts().pinned, 0);
    }
}

#[test]
fn the_last_handle_may_go_while_a_segment_goes_back() {
    let lab = Lab::new(PinnedSettings { max_cached_bytes: Some(MIB), ..PinnedSettings::default() });
    let [block, other] = [5, 6].map(|mib| lab.host.allocate(mib * MIB).unwrap());
    let Lab { sim, tapped, instance, host } = lab;
    tapped.hook().at(When::Before, Call::HostFree, move || drop(host));
    block.free().unwrap();
    assert_eq!(sim.object_counts().pinned, 1);
    // Its books are gone, so it stays pinned, and is still good.
    other.write(0, &[1; 8]).unwrap();
    other.free().unwrap();
    drop(instance);
    assert_eq!(Arc::strong_count(&tapped), 1, "nobody holds the driver any more");
}

/// The address may be another thread's as soon as the driver has it: the history says first that it is gone.
#[test]
fn a_segment_is_written_down_as_gone_before_it_can_come_again() {
    let lab = Lab::new(PinnedSettings::default());
    lab.host.record_history(Some(HistoryOptions::default()));
    drop(lab.host.allocate(5 * MIB).unwrap());
    let host = lab.host.clone();
    lab.at(When::After, Call::HostFree, move || drop(host.allocate(5 * MIB).unwrap()));
    assert_eq!(lab.host.trim(0).unwrap(), 5 * MIB);
    let mut snapshot = Snapshot::default();
    lab.host.add_to(&mut snapshot);
    let traces = snapshot.host_traces.unwrap();
    let segments = traces.iter().map(|entry| entry.action);
    let segments: Vec<_> =
        segments.filter(|action| [Action::SegmentAlloc, Action::SegmentFree].contains(action)).collect();
    assert_eq!(segments, [Action::SegmentAlloc, Action::SegmentFree, Action::SegmentAlloc]);
    lab.finish();
}

/// What another thread is just giving back is room.
#[test]
fn a_request_under_a_cap_waits_for_memory_that_is_on_its_way_back() {
    let lab = Lab::new(PinnedSettings { cap_bytes: Some(10 * MIB), ..PinnedSettings::default() });
    drop(lab.host.allocate(8 * MIB).unwrap());
    let (say, heard) = mpsc::channel();
    let (asked, answered) = mpsc::channel();
    let host = lab.host.clone();
    lab.at(When::Before, Call::HostFree, move || {
        let thread = std::thread::spawn(move || {
            let outcome = host.allocate(9 * MIB).map(drop);
            drop(host);
            let _ = say.send(());
            outcome
        });
        let _ = heard.recv_timeout(A_WHILE);
        asked.send(thread).unwrap();
    });
    lab.host.trim(0).unwrap();
    answered.recv().unwrap().join().unwrap().unwrap();
    lab.finish();
}

/// A replay on a stream that is just being marked is behind the mark, and needs one of its own.
#[test]
fn a_replay_is_waited_for_although_its_stream_is_just_being_marked() {
    let lab = Lab::new(PinnedSettings::default());
    let memory: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&lab.instance, Settings::default()));
    let device = lab.instance.device(0).unwrap();
    let [stream, captured] = [0, 1].map(|_| device.pool_stream().unwrap());
    let to = lab.sim.mem_alloc(device.id(), 64).unwrap();
    let block = lab.host.allocate(MIB).unwrap();
    let ptr = block.ptr();
    let mut graph = Graph::new(&memory, &device, GraphOptions::default()).unwrap();
    graph
        .capture(&captured, CaptureOptions::default(), |_| {
            lab.sim.copy(to.into(), ptr.into(), 64, captured.id())?;
            block.record_use(&captured)
        })
        .unwrap();
    lab.sim.pause_stream(stream.id()).unwrap();
    lab.sim.copy(to.into(), ptr.into(), 64, stream.id()).unwrap();
    block.record_use(&stream).unwrap();
    let (say, heard) = mpsc::channel();
    let (sim, replays) = (Arc::clone(&lab.sim), stream.clone());
    lab.at(When::After, Call::EventRecord, move || {
        say.send(sim.paused_work(replays.id()).unwrap()).unwrap();
        graph.replay(&replays).unwrap();
        drop(graph);
    });
    block.free().unwrap();
    lab.host.process_pending().unwrap();
    // The mark is through, and the replay is not.
    lab.sim.run_paused(stream.id(), heard.recv().unwrap()).unwrap();
    assert_ne!(lab.sim.paused_work(stream.id()).unwrap(), 0);
    lab.host.process_pending().unwrap();
    assert_eq!(lab.host.stats().active_requests.current, 1, "the replay uses it");
    lab.sim.resume_stream(stream.id()).unwrap();
    stream.synchronize().unwrap();
    lab.host.process_pending().unwrap();
    assert_eq!(lab.host.stats().active_requests.current, 0);
    assert_eq!(lab.sim.hazards(), []);
    lab.finish();
}

/// Waiting for all devices would break a capture: one that would begin meanwhile begins later.
#[test]
fn no_capture_begins_while_the_devices_are_waited_for() {
    let lab = Lab::new(PinnedSettings::default());
    let memory: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&lab.instance, Settings::default()));
    let device = lab.instance.device(0).unwrap();
    let captured = device.pool_stream().unwrap();
    let mut graph = Graph::new(&memory, &device, GraphOptions::default()).unwrap();
    let id = lab.sim.stream_create(device.id(), StreamOptions::default()).unwrap();
    // SAFETY: the stream is destroyed through the driver itself, which then knows.
    let foreign = unsafe { ForeignStream::new(lab.sim.stream_info(id).unwrap().raw) };
    let stream = Stream::external(&device, foreign).unwrap();
    let block = lab.host.allocate(MIB).unwrap();
    block.record_use(&stream).unwrap();
    drop(block);
    lab.sim.stream_destroy(stream.id()).unwrap();
    let (begun, has_begun) = mpsc::channel();
    let (done, is_done) = mpsc::channel();
    let (asked, answered) = mpsc::channel();
    lab.at(When::Before, Call::DeviceSynchronize, move || {
        let thread = std::thread::spawn(move || {
            graph.capture(&captured, CaptureOptions::default(), |_| {
                let _ = begun.send(());
                is_done.recv().unwrap();
                Ok(())
            })
        });
        let _ = has_begun.recv_timeout(A_WHILE);
        asked.send(thread).unwrap();
    });
    lab.host.process_pending().unwrap();
    assert_eq!(lab.host.stats().active_requests.current, 0);
    done.send(()).unwrap();
    answered.recv().unwrap().join().unwrap().unwrap();
    lab.finish();
}
