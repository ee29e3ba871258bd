//! When work runs: virtual time, the queues of streams, launched graphs, host callbacks.
//!
//! The first operation of a queue starts as soon as what it waits for is done, and takes effect when the virtual time
//! reaches its end. The scheduler does not touch memory: [`Scheduler::step`] returns the work that takes effect next,
//! and [`Scheduler::complete`] is called once it has.

mod callbacks;
mod pause;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use self::callbacks::Callbacks;
pub use self::callbacks::ReturnedCallback;
use super::event::{Event, EventState};
use super::exec_graph::ExecGraph;
use super::item::{Template, Work};
use super::launch::{Launch, LaunchAction};
use super::stream::{QueuedWork, StreamKind, StreamPoint};
use super::streams::{QueuePosition, Streams};
use crate::sim::config::{SimConfig, Timing};
use crate::sim::order::{Epoch, NodeInstance, VectorClock};
use crate::sim::rng;
use crate::sim::table::Table;
use crate::{ConditionalId, DeviceId, ErrorCode, EventId, StreamId};

/// A running operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Running {
    /// The first operation of a stream's queue.
    Stream(StreamId),
    /// A node of a launch.
    Node { launch: u64, node: u32 },
}

/// When something that runs ends. At equal times a random number decides, then age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Completion {
    end: u64,
    tie_break: u64,
    running: Running,
}

/// Work that takes effect now.
#[derive(Debug)]
pub struct DueWork {
    pub running: Running,
    pub work: Work,
    pub device: DeviceId,
    pub stream: StreamId,
    pub epoch: Epoch,
    /// The number of the operation in its stream.
    pub number: u64,
    /// What it is ordered after on other timelines.
    pub clock: Arc<VectorClock>,
    /// The graph and the node, if it is a node of a launch.
    pub node: Option<(Arc<ExecGraph>, NodeInstance)>,
    pub queued_at: u64,
    pub time: u64,
}

/// The result of a step.
#[derive(Debug)]
pub enum Step {
    /// Nothing is running.
    Idle,
    /// Something that does not access memory. Nothing is left to do.
    Done,
    /// Work that takes effect now. [`Scheduler::complete`] must be called after it has.
    Due(DueWork),
}

/// Streams and events in virtual time.
#[derive(Debug)]
pub struct Scheduler {
    pub streams: Streams,
    pub events: Table<Event>,
    now: u64,
    seed: u64,
    timing: Timing,
    /// How long testing the flag of a conditional node takes again.
    retest_nanos: u64,
    completions: BinaryHeap<Reverse<Completion>>,
    launches: FxHashMap<u64, Launch>,
    last_launch: u64,
    paused_streams: usize,
    /// For each device, why it failed, if it did.
    failures: Vec<Option<ErrorCode>>,
    pub callbacks: Callbacks,
    /// The templates of launches that have ended.
    ended: Vec<Arc<Template>>,
}

impl Scheduler {
    pub fn new(config: &SimConfig) -> Self {
        let devices = config.devices.len();
        Self {
            streams: Streams::new(devices as u32),
            events: Table::default(),
            now: 0,
            seed: config.seed,
            timing: config.timing,
            retest_nanos: config.work.conditional,
            completions: BinaryHeap::new(),
            launches: FxHashMap::default(),
            last_launch: 0,
            paused_streams: 0,
            failures: vec![None; devices],
            callbacks: Callbacks::default(),
            ended: Vec::new(),
        }
    }

    /// The virtual time, in nanoseconds.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Moves the time on. Nothing may end before `time`.
    pub fn advance(&mut self, time: u64) {
        self.now = self.now.max(time);
    }

    /// When the next completion is.
    pub fn next_completion(&self) -> Option<u64> {
        self.completions.peek().map(|completion| completion.0.end)
    }

    /// Why a device failed, if it did. A failed device does nothing any more.
    pub fn failure(&self, device: DeviceId) -> Option<ErrorCode> {
        self.failures[device.0 as usize]
    }

    pub fn set_failed(&mut self, device: DeviceId, code: ErrorCode) {
        self.failures[device.0 as usize] = Some(code);
    }

    /// Queues work of call number `at` in a stream, and returns its point.
    pub fn enqueue(&mut self, stream: StreamId, work: Work, nanos: u64, waits: Vec<Epoch>, at: u64) -> StreamPoint {
        let position = self.streams.next_position(stream, waits);
        let point = position.point.clone();
        self.push(stream, position, work, nanos, at);
        point
    }

    /// Queues a record of an event that exists, by call number `at`.
    pub fn enqueue_record(&mut self, stream: StreamId, event: EventId, at: u64) {
        let position = self.streams.next_position(stream, Vec::new());
        let point = position.point.clone();
        // Reached at once if nothing is queued before it. If it were scheduled, it would be reached as soon as time
        // passes, which is equivalent. Most events of an allocator are of this kind.
        let is_next = position.waits.is_empty() && self.streams.get(stream).is_idle();
        if is_next {
            let waiting = self.streams.timelines.complete_next(point.epoch.timeline);
            debug_assert!(waiting.is_empty(), "nothing waits for what was not queued");
        } else {
            self.push(stream, position, Work::Record(event), 0, at);
        }
        let recorded = self.events.get_mut(event.0).expect("an event that was looked up");
        recorded.state = EventState::Recorded { point, done_at: is_next.then_some(self.now) };
    }

    /// The same for all work of a device: in a stream that waits for the others and is then destroyed.
    pub fn enqueue_record_of_device(&mut self, device: DeviceId, event: EventId, at: u64) {
        let stream = self.streams.create(device, StreamKind::NonBlocking, 0);
        let waits = self.streams.order_after_device(stream);
        let position = self.streams.next_position(stream, waits);
        let recorded = self.events.get_mut(event.0).expect("an event that was looked up");
        recorded.state = EventState::Recorded { point: position.point.clone(), done_at: None };
        self.push(stream, position, Work::Record(event), 0, at);
        self.destroy_stream(stream);
    }

    /// Queues a launch of call number `at`. `launch` makes it for its point.
    pub fn enqueue_launch(
        &mut self,
        stream: StreamId,
        waits: Vec<Epoch>,
        at: u64,
        launch: impl FnOnce(StreamPoint) -> Launch,
    ) -> StreamPoint {
        let position = self.streams.next_position(stream, waits);
        let point = position.point.clone();
        self.last_launch += 1;
        self.launches.insert(self.last_launch, launch(point.clone()));
        self.push(stream, position, Work::Launch(self.last_launch), 0, at);
        point
    }

    fn push(&mut self, stream: StreamId, position: QueuePosition, work: Work, nanos: u64, at: u64) {
        let QueuePosition { point: StreamPoint { epoch, clock }, waits } = position;
        let nanos = self.duration(&work, nanos, || self.draw(epoch, 0));
        let queue = &mut self.streams.get_mut(stream).queue;
        queue.push_back(QueuedWork { seq: epoch.seq, queued_at: at, clock, waits, nanos, work });
        if queue.len() == 1 {
            self.try_start(stream, self.now);
        }
    }

    fn draw(&self, epoch: Epoch, salt: u64) -> u64 {
        rng::draw(self.seed, u64::from(epoch.timeline.0), epoch.seq, salt)
    }

    /// The duration of work whose cost is `nanos`.
    fn duration(&self, work: &Work, nanos: u64, random: impl FnOnce() -> u64) -> u64 {
        match self.timing {
            Timing::Seeded if !work.has_fixed_duration() => rng::stretch(nanos, random()),
            _ => nanos,
        }
    }

    /// Starts the first of the queue, unless it is paused or waits for other work.
    fn try_start(&mut self, stream: StreamId, now: u64) {
        let Some(state) = self.streams.find(stream) else { return };
        let Some(first) = state.queue.front() else { return };
        if state.running || state.paused_after.is_some_and(|last| first.seq > last) {
            return;
        }
        let (epoch, nanos) = (Epoch { timeline: state.timeline, seq: first.seq }, first.nanos);
        let launch = match first.work {
            Work::Launch(launch) => Some(launch),
            _ => None,
        };
        let waits = self.streams.pending_waits(stream);
        if let Some(&wait) = waits.first() {
            self.streams.timelines.add_waiter(wait, stream);
            return;
        }
        self.streams.get_mut(stream).running = true;
        // An empty graph is scheduled like other work: starting and ending it here would recurse once for each of a
        // thousand empty launches in a row.
        if let Some(launch) = launch.filter(|launch| !self.launches[launch].is_empty()) {
            let failed = self.launch_failed(launch);
            let actions = self.launch_mut(launch).start(failed);
            self.apply(launch, actions, now);
        } else {
            let tie_break = self.draw(epoch, 1);
            self.run_until(now.saturating_add(nanos), tie_break, Running::Stream(stream));
        }
    }

    fn run_until(&mut self, end: u64, tie_break: u64, running: Running) {
        self.completions.push(Reverse(Completion { end, tie_break, running }));
    }

    /// Completes what ends next.
    pub fn step(&mut self) -> Step {
        let Some(Reverse(Completion { end, running, .. })) = self.completions.pop() else { return Step::Idle };
        self.now = self.now.max(end);
        match running {
            Running::Stream(stream) => self.finish_first(stream, end),
            Running::Node { launch, node } => self.finish_node(launch, node, end),
        }
    }

    fn finish_first(&mut self, stream: StreamId, time: u64) -> Step {
        let running = Running::Stream(stream);
        let state = self.streams.get_mut(stream);
        let QueuedWork { seq, queued_at, clock, work, .. } = state.queue.pop_front().expect("something ran");
        let epoch = Epoch { timeline: state.timeline, seq };
        let (device, number) = (state.device, state.number_of(epoch));
        match work {
            Work::Callback(run) => {
                self.callbacks.push(run, running, time);
                return Step::Done;
            }
            Work::Launch(launch) => _ = self.end_launch(launch),
            Work::Record(event) => self.set_reached(event, epoch, time),
            Work::Marker | Work::EventWait(_) | Work::Conditional { .. } => {}
            work => {
                let node = None;
                let due = DueWork { running, work, device, stream, epoch, number, clock, node, queued_at, time };
                return Step::Due(due);
            }
        }
        self.complete_first(stream, time);
        Step::Done
    }

    fn finish_node(&mut self, launch: u64, node: u32, time: u64) -> Step {
        let running = Running::Node { launch, node };
        let failed = self.launch_failed(launch);
        let state = self.launch_mut(launch);
        let (work, epoch) = (state.work(node).0.clone(), state.point.epoch);
        match work {
            Work::Callback(run) => self.callbacks.push(run, running, time),
            Work::Conditional { flag, .. } => {
                let actions = state.run_conditional(node, flag, failed);
                self.apply(launch, actions, time);
            }
            Work::Record(event) => {
                self.set_reached(event, epoch, time);
                self.complete(running, time);
            }
            Work::Marker | Work::EventWait(_) | Work::Launch(_) => self.complete(running, time),
            work => {
                let instance = state.instance(node);
                let (stream, queued_at) = (state.stream, state.queued_at);
                let (graph, clock) = (Arc::clone(&state.graph), Arc::clone(&state.point.clock));
                let number = self.streams.get(stream).number_of(epoch);
                let (device, node) = (graph.device, Some((graph, instance)));
                let due = DueWork { running, work, device, stream, epoch, number, clock, node, queued_at, time };
                return Step::Due(due);
            }
        }
        Step::Done
    }

    /// Work that was due has taken effect, or a callback has returned: what waits for it continues.
    pub fn complete(&mut self, running: Running, time: u64) {
        match running {
            Running::Stream(stream) => self.complete_first(stream, time),
            Running::Node { launch, node } => {
                let failed = self.launch_failed(launch);
                let actions = self.launch_mut(launch).complete(node, failed);
                self.apply(launch, actions, time);
            }
        }
    }

    /// The first operation of a stream is done and has left the queue.
    fn complete_first(&mut self, stream: StreamId, now: u64) {
        let state = self.streams.get_mut(stream);
        state.running = false;
        let timeline = state.timeline;
        for waiter in self.streams.timelines.complete_next(timeline) {
            self.try_start(waiter, now);
        }
        self.try_start(stream, now);
        self.streams.remove_if_drained(stream);
    }

    fn apply(&mut self, launch: u64, actions: Vec<LaunchAction>, now: u64) {
        for action in actions {
            match action {
                LaunchAction::Start { node, iterations } => {
                    // The number of the iteration is part of the draw, so that the iterations of a loop differ.
                    let salt = (u64::from(iterations) << 32) + u64::from(node) + 2;
                    let state = &self.launches[&launch];
                    let random = self.draw(state.point.epoch, salt);
                    let (work, nanos) = state.work(node);
                    let nanos = if state.instant { 0 } else { self.duration(work, nanos, || random) };
                    self.run_until(now.saturating_add(nanos), random, Running::Node { launch, node });
                }
                LaunchAction::Retest { node } => {
                    // The test is a completion of its own, so that an endless loop with an empty body does not keep the
                    // host in one call for ever.
                    let end = now.saturating_add(self.retest_nanos);
                    self.run_until(end, 0, Running::Node { launch, node });
                }
                LaunchAction::End => {
                    let stream = self.end_launch(launch);
                    self.streams.get_mut(stream).queue.pop_front();
                    self.complete_first(stream, now);
                }
            }
        }
    }

    fn end_launch(&mut self, launch: u64) -> StreamId {
        let Launch { stream, template, .. } = self.launches.remove(&launch).expect("a launch in execution");
        self.ended.push(template);
        stream
    }

    /// The templates of launches that have ended, to be released.
    pub fn take_ended(&mut self) -> Vec<Arc<Template>> {
        std::mem::take(&mut self.ended)
    }

    fn launch_mut(&mut self, launch: u64) -> &mut Launch {
        self.launches.get_mut(&launch).expect("a launch in execution")
    }

    fn launch_failed(&self, launch: u64) -> bool {
        self.failure(self.launches[&launch].graph.device).is_some()
    }

    /// The flags of conditional nodes that running work can set.
    pub fn flags_mut(&mut self, running: Running) -> Option<&mut Vec<(ConditionalId, u32)>> {
        match running {
            Running::Stream(_) => None,
            Running::Node { launch, .. } => Some(&mut self.launch_mut(launch).flags),
        }
    }

    fn set_reached(&mut self, event: EventId, epoch: Epoch, time: u64) {
        if let Some(state) = self.events.get_mut(event.0)
            && let EventState::Recorded { point, done_at } = &mut state.state
            && point.epoch == epoch
        {
            *done_at = Some(time);
        }
    }

    /// A callback has returned: what waits for it continues.
    pub fn callback_returned(&mut self, returned: ReturnedCallback) {
        self.callbacks.count_returned();
        self.complete(returned.running, returned.time);
    }

    pub fn is_done(&self, epoch: Epoch) -> bool {
        self.streams.is_done(epoch)
    }

    /// Destroys a stream. What is queued in it still runs.
    pub fn destroy_stream(&mut self, stream: StreamId) {
        self.resume(stream);
        self.streams.get_mut(stream).destroyed = true;
        self.streams.remove_if_drained(stream);
    }
}
