//! How work moves: queues, the virtual clock, and what is known to be done.
//!
//! The first of each queue runs as soon as what it waits for is done; it takes effect when the clock reaches its end.
//! The clock moves when a call is made, by what the call costs, and when the host waits, to where the wait is over.

use std::sync::Arc;

use crate::sim::config::Timing;
use crate::sim::cost;
use crate::sim::order::{Frontier, HOST, Stamp};
use crate::sim::work::{Op, Work};
use crate::sim::world::{EventMark, Stream, StreamKind, World};
use crate::{DeviceId, EventId, HostCallback, StreamId};

/// How far a lane is done, and who waits for more.
#[derive(Debug)]
pub struct Lane {
    pub done: u64,
    /// Whose lane it is, or was last.
    pub stream: StreamId,
    /// Streams that wait until the lane is done up to a number.
    waiters: Vec<(u64, StreamId)>,
}

impl Lane {
    pub fn new(stream: StreamId) -> Self {
        Self { done: 0, stream, waiters: Vec::new() }
    }
}

/// Whose work ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Runner {
    /// The first of that stream's queue.
    Stream(StreamId),
    /// A node of a launch.
    Node(u64, u32),
}

/// Work that runs, and when it ends. Ties are broken by luck, then by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Due {
    end: u64,
    luck: u64,
    runner: Runner,
}

/// A place in a stream that the next work takes.
#[derive(Debug)]
pub struct Slot {
    pub stamp: Stamp,
    /// What comes before it in other lanes.
    pub base: Arc<Frontier>,
    /// What of that may not be done yet.
    pub waits: Vec<Stamp>,
}

/// A host callback whose turn has come.
pub struct Callback {
    pub run: HostCallback,
    pub runner: Runner,
    pub time: u64,
}

impl std::fmt::Debug for Callback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Callback").field("runner", &self.runner).finish_non_exhaustive()
    }
}

impl World {
    pub fn add_stream(&mut self, device: DeviceId, kind: StreamKind, priority: i32) -> StreamId {
        let id = StreamId(self.streams.next_id());
        // A lane may serve another stream once the host knows that all in it is done: whatever is queued from then on
        // comes after it anyway.
        let spare = self.spare_lanes.iter().position(|&lane| self.host.seen(lane) >= self.lanes[lane as usize].done);
        let lane = match spare {
            Some(index) => self.spare_lanes.swap_remove(index),
            None => {
                self.lanes.push(Lane::new(id));
                (self.lanes.len() - 1) as u32
            }
        };
        self.lanes[lane as usize].stream = id;
        self.streams.insert(Stream {
            device,
            lane,
            kind,
            priority,
            // Looks like a pointer, and is not one of the three special handles.
            raw: 0x5000_0000 + id.0 * 0x40,
            queue: std::collections::VecDeque::new(),
            running: false,
            tail: self.lanes[lane as usize].done,
            base: Arc::new(self.host.clone()),
            host_version: self.host_version,
            changes: 1,
            changes_waited_for: 0,
            capture: None,
            untold: false,
            gone: false,
            held: None,
        });
        let state = &mut self.devices[device.0 as usize];
        state.streams.push(id);
        if kind == StreamKind::Blocking {
            state.blocking.push(id);
        }
        id
    }

    /// Takes a stream away once its queue is empty.
    pub fn retire_if_drained(&mut self, stream: StreamId) {
        let state = self.stream(stream);
        if state.gone && state.queue.is_empty() && !state.running {
            let (device, lane) = (state.device, state.lane);
            let kind = state.kind;
            let (base, last) = self.last_of(stream);
            self.streams.remove(stream.0);
            let state = &mut self.devices[device.0 as usize];
            // Who waits for the device, and the default stream if it was a blocking one, come after its work, also now
            // that it can no longer be asked.
            state.retired.join(&base);
            state.retired.add(last);
            if kind == StreamKind::Blocking {
                state.retired_blocking.join(&base);
                state.retired_blocking.add(last);
            }
            state.streams.retain(|&other| other != stream);
            state.blocking.retain(|&other| other != stream);
            self.spare_lanes.push(lane);
        }
    }

    /// Puts work into a stream's queue, behind all that it must come after, and says where it stands.
    pub fn enqueue(&mut self, stream: StreamId, work: Work, nanos: u64, waits: Vec<Stamp>) -> Stamp {
        let slot = self.slot(stream, waits);
        let stamp = slot.stamp;
        self.push(stream, slot, work, nanos);
        stamp
    }

    /// Takes the next place in a stream: what is put there comes after all that the stream, the default-stream rules
    /// and the host put before it.
    pub fn slot(&mut self, stream: StreamId, waits: Vec<Stamp>) -> Slot {
        let waits = self.with_default_stream_rules(stream, waits);
        self.learn_from_host(stream);
        let state = self.stream_mut(stream);
        state.tail += 1;
        state.changes += 1;
        Slot { stamp: Stamp { lane: state.lane, seq: state.tail }, base: Arc::clone(&state.base), waits }
    }

    /// Puts work into its place.
    pub fn push(&mut self, stream: StreamId, slot: Slot, work: Work, nanos: u64) {
        let Slot { stamp, base, waits } = slot;
        let nanos = self.lasting(&work, nanos, cost::draw(self.config.seed, u64::from(stamp.lane), stamp.seq, 0));
        let (at, now) = (self.calls, self.clock);
        let queue = &mut self.stream_mut(stream).queue;
        queue.push_back(Op { seq: stamp.seq, at, base, waits, nanos, work });
        if queue.len() == 1 {
            self.try_start(stream, now);
        }
    }

    /// How long work lasts that the cost model gives `nanos`.
    pub fn lasting(&self, work: &Work, nanos: u64, luck: u64) -> u64 {
        match self.config.timing {
            Timing::Seeded if !work.is_timed() => cost::stretch(nanos, luck),
            _ => nanos,
        }
    }

    /// The legacy default stream comes after the blocking streams of its device, and they after it.
    fn with_default_stream_rules(&mut self, stream: StreamId, mut waits: Vec<Stamp>) -> Vec<Stamp> {
        let Stream { kind, device, .. } = *self.stream(stream);
        if kind == StreamKind::NonBlocking {
            return waits;
        }
        for (theirs, last) in self.implied(stream) {
            self.learn(stream, &theirs, last);
            waits.push(last);
        }
        if kind == StreamKind::Legacy {
            let retired = std::mem::take(&mut self.devices[device.0 as usize].retired_blocking);
            let state = self.stream_mut(stream);
            if !state.base.contains(&retired) {
                state.base_mut().join(&retired);
            }
        }
        waits
    }

    /// What the default-stream rules put before the next work of `stream`, as far as it does not know of it.
    fn implied(&self, stream: StreamId) -> Vec<(Arc<Frontier>, Stamp)> {
        let state = self.stream(stream);
        let device = &self.devices[state.device.0 as usize];
        let others = match state.kind {
            StreamKind::NonBlocking => &[],
            StreamKind::Legacy => device.blocking.as_slice(),
            StreamKind::Blocking => std::slice::from_ref(&device.legacy),
        };
        let news = |&(_, last): &(Arc<Frontier>, Stamp)| last.seq != 0 && !state.base.covers(last);
        others.iter().map(|&other| self.last_of(other)).filter(news).collect()
    }

    /// What the next work of `stream` comes after, in all lanes.
    pub fn knowledge(&mut self, stream: StreamId) -> Frontier {
        self.learn_from_host(stream);
        let mut known = Frontier::clone(&self.stream(stream).base);
        known.add(self.last_of(stream).1);
        for (theirs, last) in self.implied(stream) {
            known.join(&theirs);
            known.add(last);
        }
        if self.stream(stream).kind == StreamKind::Legacy {
            known.join(&self.devices[self.stream(stream).device.0 as usize].retired_blocking);
        }
        known
    }

    /// The last work of `stream`, and what came before it in other lanes.
    pub fn last_of(&self, stream: StreamId) -> (Arc<Frontier>, Stamp) {
        let state = self.stream(stream);
        (Arc::clone(&state.base), Stamp { lane: state.lane, seq: state.tail })
    }

    /// What `stream` queues from now on comes after `stamp` and all that came before that.
    pub fn learn(&mut self, stream: StreamId, base: &Frontier, stamp: Stamp) {
        let state = self.stream_mut(stream);
        if !state.base.contains(base) || !state.base.covers(stamp) {
            let mine = state.base_mut();
            mine.join(base);
            mine.add(stamp);
        }
    }

    /// What is queued from now on comes after all that the host knows to be done.
    pub fn learn_from_host(&mut self, stream: StreamId) {
        let Self { host, host_version, streams, .. } = self;
        let state = streams.get_mut(stream.0).expect("a live stream");
        if state.host_version != *host_version {
            state.host_version = *host_version;
            if !state.base.contains(host) {
                state.base_mut().join(host);
            }
        }
    }

    /// The host has learnt that `stamp` is done, and all before it.
    pub fn host_learns(&mut self, base: &Frontier, stamp: Stamp) {
        if !self.host.covers(stamp) || !self.host.contains(base) {
            self.host.join(base);
            self.host.add(stamp);
            self.host_version += 1;
        }
    }

    /// What waiting for `stream` waits for: its last work, and for the default stream that of the blocking streams too.
    /// A blocking stream is done with its own, whatever the default stream still does.
    pub fn awaited(&self, stream: StreamId) -> Vec<(Arc<Frontier>, Stamp)> {
        let state = self.stream(stream);
        let others: &[StreamId] = match state.kind {
            StreamKind::Legacy => &self.devices[state.device.0 as usize].blocking,
            StreamKind::Blocking | StreamKind::NonBlocking => &[],
        };
        others.iter().chain([&stream]).map(|&stream| self.last_of(stream)).collect()
    }

    /// The host has waited for `stream`, and so for all that was `awaited`.
    pub fn host_waited(&mut self, stream: StreamId, awaited: &[(Arc<Frontier>, Stamp)]) {
        for (base, last) in awaited {
            self.host_learns(base, *last);
        }
        if let Some(Stream { kind: StreamKind::Legacy, device, .. }) = self.streams.get(stream.0) {
            let retired = self.devices[device.0 as usize].retired_blocking.clone();
            self.host_learns_all(&retired);
        }
    }

    /// The host has learnt that all of `frontier` is done.
    pub fn host_learns_all(&mut self, frontier: &Frontier) {
        if !self.host.contains(frontier) {
            self.host.join(frontier);
            self.host_version += 1;
        }
    }

    /// A place in the order for something that the host does itself.
    pub fn host_stamp(&mut self) -> Stamp {
        let stamp = Stamp { lane: HOST, seq: self.host.seen(HOST) + 1 };
        self.host.add(stamp);
        self.host_version += 1;
        stamp
    }

    pub fn is_done(&self, stamp: Stamp) -> bool {
        self.lanes[stamp.lane as usize].done >= stamp.seq
    }

    /// Starts the first of the queue if nothing keeps it: a hold, or work that it waits for.
    pub fn try_start(&mut self, stream: StreamId, now: u64) {
        let Self { streams, lanes, .. } = self;
        let Some(state) = streams.get_mut(stream.0) else { return };
        if state.running {
            return;
        }
        let Some(op) = state.queue.front_mut() else { return };
        if state.held.is_some_and(|through| op.seq > through) {
            return;
        }
        op.waits.retain(|wait| lanes[wait.lane as usize].done < wait.seq);
        if let Some(wait) = op.waits.first() {
            lanes[wait.lane as usize].waiters.push((wait.seq, stream));
            return;
        }
        state.running = true;
        let (lane, seq, nanos) = (state.lane, op.seq, op.nanos);
        let launch = match op.work {
            Work::Launch(launch) => Some(launch),
            _ => None,
        };
        // An empty graph goes through the heap like other work: a thousand of them in a row would nest as many calls.
        if let Some(launch) = launch.filter(|&launch| !self.is_empty_launch(launch)) {
            self.start_launch(launch, now);
        } else {
            let luck = cost::draw(self.config.seed, u64::from(lane), seq, 1);
            self.run(Runner::Stream(stream), now.saturating_add(nanos), luck);
        }
    }

    /// Lets work run until `end`.
    pub fn run(&mut self, runner: Runner, end: u64, luck: u64) {
        self.heap.push(std::cmp::Reverse(Due { end, luck, runner }));
    }

    /// Moves the clock on, and completes what ends until then.
    pub fn advance_to(&mut self, time: u64) {
        while self.heap.peek().is_some_and(|due| due.0.end <= time) {
            self.step();
        }
        self.clock = self.clock.max(time);
    }

    /// Completes the work that ends next. Says whether there was any.
    pub fn step(&mut self) -> bool {
        let Some(std::cmp::Reverse(due)) = self.heap.pop() else { return false };
        self.clock = self.clock.max(due.end);
        match due.runner {
            Runner::Stream(stream) => self.finish_first(stream, due.end),
            Runner::Node(launch, node) => self.finish_node(launch, node, due.end),
        }
        true
    }

    /// The first of the queue has ended: it takes effect.
    fn finish_first(&mut self, stream: StreamId, now: u64) {
        let state = self.stream_mut(stream);
        let op = state.queue.pop_front().expect("something ran");
        let device = state.device;
        let stamp = Stamp { lane: state.lane, seq: op.seq };
        if let Work::Callback(run) = op.work {
            self.callbacks.push_back(Callback { run, runner: Runner::Stream(stream), time: now });
            return;
        }
        if let Work::Launch(launch) = op.work {
            self.end_launch(launch);
        }
        self.execute(device, stream, &op, stamp, now);
        self.complete(stream, now);
    }

    /// The first of the queue is done, and has left it.
    pub fn complete(&mut self, stream: StreamId, now: u64) {
        let state = self.streams.get_mut(stream.0).expect("a stream with work stays");
        state.running = false;
        let lane = &mut self.lanes[state.lane as usize];
        lane.done += 1;
        let done = lane.done;
        if !lane.waiters.is_empty() {
            let mut ready: Vec<StreamId> = Vec::new();
            lane.waiters.retain(|&(seq, waiter)| {
                let over = seq <= done;
                if over {
                    ready.push(waiter);
                }
                !over
            });
            for waiter in ready {
                self.try_start(waiter, now);
            }
        }
        self.try_start(stream, now);
        self.retire_if_drained(stream);
    }

    /// A callback has returned: what it held up goes on.
    pub fn finish_callback(&mut self, runner: Runner, time: u64) {
        match runner {
            Runner::Stream(stream) => self.complete(stream, time),
            Runner::Node(launch, node) => self.complete_node(launch, node, time),
        }
    }

    /// An event's mark has been reached.
    pub fn reach(&mut self, event: EventId, at: Stamp, now: u64) {
        if let Some(state) = self.events.get_mut(event.0)
            && let EventMark::Recorded { stamp, done, .. } = &mut state.mark
            && *stamp == at
        {
            *done = Some(now);
        }
    }
}
