//! All streams, and the order between them: default-stream rules, waits for events, waits of the host. No time here.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;

use rustc_hash::FxHashMap;

use super::stream::{Stream, StreamKind, StreamPoint};
use super::timelines::Timelines;
use crate::sim::order::{Epoch, TimelineId, VectorClock};
use crate::sim::steps;
use crate::sim::table::{Missing, Table};
use crate::{DeviceId, StreamId};

#[derive(Debug)]
struct DeviceStreams {
    legacy: StreamId,
    /// What `stream_per_thread` returns; names a different stream on each thread.
    per_thread: StreamId,
    /// Streams with operations or waits that the host may not have waited for. In a program with many streams, most
    /// have nothing new since the last wait.
    changed: BTreeSet<StreamId>,
    /// Blocking streams, those of threads included, with operations that the legacy default stream may not be ordered
    /// after yet.
    unordered: BTreeSet<StreamId>,
    /// Work of streams that no longer exist and that the host has not waited for.
    retired: VectorClock,
    /// The same for blocking streams, if the legacy default stream is not ordered after it yet.
    retired_blocking: VectorClock,
}

/// The work that the host has observed to be done.
#[derive(Debug, Default)]
struct HostClock {
    clock: VectorClock,
    /// How often it has changed.
    version: u64,
}

/// A position in a stream, taken by the next operation.
#[derive(Debug)]
pub struct QueuePosition {
    pub point: StreamPoint,
    /// What is ordered before it and may not be done yet.
    pub waits: Vec<Epoch>,
}

/// A stream that the host waits for, up to its last operation when the wait began.
#[derive(Debug)]
pub struct AwaitedStream {
    stream: StreamId,
    changes: u64,
    last: StreamPoint,
}

impl AwaitedStream {
    pub fn epoch(&self) -> Epoch {
        self.last.epoch
    }
}

/// The lowest raw handle. Handles look like pointers, and are none of the three special ones.
const RAW_BASE: u64 = 0x5000_0000;

/// The distance between raw handles.
const RAW_STEP: u64 = 0x40;

#[derive(Debug, Default)]
pub struct Streams {
    table: Table<Stream>,
    devices: Vec<DeviceStreams>,
    /// The per-thread default stream of each thread and device.
    by_thread: FxHashMap<(ThreadId, DeviceId), StreamId>,
    pub(super) timelines: Timelines,
    host: HostClock,
}

impl Streams {
    /// The default streams of each device.
    pub fn new(devices: u32) -> Self {
        let mut streams = Self::default();
        for device in (0..devices).map(DeviceId) {
            streams.devices.push(DeviceStreams {
                legacy: StreamId(0),
                per_thread: StreamId(0),
                changed: BTreeSet::new(),
                unordered: BTreeSet::new(),
                retired: VectorClock::default(),
                retired_blocking: VectorClock::default(),
            });
            let legacy = streams.create(device, StreamKind::Legacy, 0);
            let per_thread = streams.create(device, StreamKind::NonBlocking, 0);
            let state = streams.device_mut(device);
            (state.legacy, state.per_thread) = (legacy, per_thread);
        }
        streams
    }

    pub fn create(&mut self, device: DeviceId, kind: StreamKind, priority: i32) -> StreamId {
        let id = StreamId(self.table.next_id());
        let (timeline, done) = self.timelines.assign(id, &self.host.clock);
        self.table.insert(Stream {
            device,
            kind,
            priority,
            raw: RAW_BASE + id.0 * RAW_STEP,
            attributes_hidden: false,
            destroyed: false,
            timeline,
            before_first: done,
            queue: VecDeque::new(),
            running: false,
            last: done,
            clock: Arc::new(self.host.clock.clone()),
            clock_changed: false,
            host_version: self.host.version,
            changes: 0,
            is_listed_changed: false,
            paused_after: None,
        });
        id
    }

    /// The stream of that id, if it exists; also one that was destroyed and has work left.
    pub fn find(&self, stream: StreamId) -> Option<&Stream> {
        self.table.get(stream.0)
    }

    /// The same, to be changed.
    pub fn find_mut(&mut self, stream: StreamId) -> Option<&mut Stream> {
        self.table.get_mut(stream.0)
    }

    /// A stream that was looked up.
    pub fn get(&self, stream: StreamId) -> &Stream {
        self.find(stream).expect("a stream that was looked up")
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, stream: StreamId) -> &mut Stream {
        self.find_mut(stream).expect("a stream that was looked up")
    }

    /// A stream that exists and was not destroyed; else why it cannot be used.
    pub fn live(&self, stream: StreamId) -> Result<&Stream, Missing> {
        match self.find(stream) {
            Some(state) if !state.destroyed => Ok(state),
            Some(_) => Err(Missing::Destroyed),
            None => Err(self.table.why_missing(stream.0)),
        }
    }

    pub fn legacy(&self, device: DeviceId) -> StreamId {
        self.device(device).legacy
    }

    pub fn per_thread(&self, device: DeviceId) -> StreamId {
        self.device(device).per_thread
    }

    /// The calling thread's own default stream on `device`.
    pub fn of_this_thread(&mut self, device: DeviceId) -> StreamId {
        let key = (std::thread::current().id(), device);
        if let Some(&own) = self.by_thread.get(&key) {
            return own;
        }
        let own = self.create(device, StreamKind::Blocking, 0);
        self.by_thread.insert(key, own);
        own
    }

    /// The live stream of `device` with that raw handle.
    pub fn with_raw(&self, device: DeviceId, raw: u64) -> Option<StreamId> {
        let stream = StreamId(raw.checked_sub(RAW_BASE)? / RAW_STEP);
        self.live(stream).is_ok_and(|state| state.raw == raw && state.device == device).then_some(stream)
    }

    /// The number of streams that a program created.
    pub fn created(&self) -> usize {
        let is_default = |stream: StreamId| {
            self.devices.iter().any(|device| device.legacy == stream || device.per_thread == stream)
                || self.by_thread.values().any(|&own| own == stream)
        };
        let ids = self.table.ids().into_iter().map(StreamId);
        ids.filter(|&id| self.live(id).is_ok() && !is_default(id)).count()
    }

    /// Whether it is a blocking stream of that device.
    pub fn is_blocking(&self, stream: StreamId, device: DeviceId) -> bool {
        self.find(stream).is_some_and(|state| state.kind == StreamKind::Blocking && state.device == device)
    }

    /// Removes a destroyed stream once its queue is empty.
    pub(super) fn remove_if_drained(&mut self, stream: StreamId) {
        let state = self.get(stream);
        if !state.destroyed || !state.queue.is_empty() || state.running {
            return;
        }
        let (device, timeline, kind, last) = (state.device, state.timeline, state.kind, state.last());
        self.table.remove(stream.0);
        let state = self.device_mut(device);
        // A wait for the device is ordered after its work, and so is the default stream if it was a blocking one.
        state.retired.join(&last.clock);
        state.retired.add(last.epoch);
        if kind == StreamKind::Blocking {
            state.retired_blocking.join(&last.clock);
            state.retired_blocking.add(last.epoch);
        }
        state.changed.remove(&stream);
        state.unordered.remove(&stream);
        self.timelines.release(timeline);
    }

    /// Takes the next position in a stream: ordered after `waits` and after all that the stream, the default-stream
    /// rules and the host order before it.
    pub fn next_position(&mut self, stream: StreamId, waits: Vec<Epoch>) -> QueuePosition {
        let waits = self.apply_default_stream_rules(stream, waits);
        self.order_after_host(stream);
        let state = self.get_mut(stream);
        state.last += 1;
        state.clock_changed = false;
        let (device, kind, point) = (state.device, state.kind, state.last());
        self.set_changed(stream);
        if kind == StreamKind::Blocking {
            self.device_mut(device).unordered.insert(stream);
        }
        QueuePosition { point, waits }
    }

    /// The stream's last operation, or the order before it, has changed: the host has not waited for it yet.
    fn set_changed(&mut self, stream: StreamId) {
        let state = self.get_mut(stream);
        state.changes += 1;
        let device = state.device;
        if !std::mem::replace(&mut state.is_listed_changed, true) {
            self.device_mut(device).changed.insert(stream);
        }
    }

    /// Orders the next operation of `stream` as the default-stream rules say: the legacy default stream after the
    /// blocking streams of its device, and they after it.
    fn apply_default_stream_rules(&mut self, stream: StreamId, mut waits: Vec<Epoch>) -> Vec<Epoch> {
        let Stream { kind, device, .. } = *self.get(stream);
        if kind == StreamKind::NonBlocking {
            return waits;
        }
        for point in self.implicit_waits(stream) {
            self.order_after(stream, &point);
            waits.push(point.epoch);
        }
        if kind == StreamKind::Legacy {
            let state = self.device_mut(device);
            state.unordered.clear();
            let retired = std::mem::take(&mut state.retired_blocking);
            self.get_mut(stream).order_after_all(&retired);
        }
        waits
    }

    /// Points that the default-stream rules order before the next operation of `stream` and that it is not ordered
    /// after yet.
    fn implicit_waits(&self, stream: StreamId) -> Vec<StreamPoint> {
        let state = self.get(stream);
        let device = self.device(state.device);
        let (legacy, blocking) = match state.kind {
            StreamKind::NonBlocking => (None, None),
            StreamKind::Legacy => (None, Some(&device.unordered)),
            StreamKind::Blocking => (Some(&device.legacy), None),
        };
        let is_new = |last: &StreamPoint| {
            steps::count();
            last.epoch.seq != 0 && !state.clock.covers(last.epoch)
        };
        let others = legacy.into_iter().chain(blocking.into_iter().flatten());
        others.map(|&other| self.get(other).last()).filter(is_new).collect()
    }

    /// What the next operation of `stream` would be ordered after, on all timelines.
    pub fn clock_of_next(&mut self, stream: StreamId) -> VectorClock {
        self.order_after_host(stream);
        let state = self.get(stream);
        let mut clock = VectorClock::clone(&state.clock);
        clock.add(state.last().epoch);
        for point in self.implicit_waits(stream) {
            clock.join(&point.clock);
            clock.add(point.epoch);
        }
        if state.kind == StreamKind::Legacy {
            clock.join(&self.device(state.device).retired_blocking);
        }
        clock
    }

    /// Orders what is queued in `stream` from now on after `point`.
    pub fn order_after(&mut self, stream: StreamId, point: &StreamPoint) {
        if self.get_mut(stream).order_after(point) {
            self.set_changed(stream);
        }
    }

    /// Orders what is queued in `stream` from now on after all work of its device. Returns what may not be done yet.
    pub fn order_after_device(&mut self, stream: StreamId) -> Vec<Epoch> {
        let device = self.device(self.get(stream).device);
        let retired = device.retired.clone();
        let points: Vec<StreamPoint> = device.changed.iter().map(|&other| self.await_all(other).last).collect();
        self.get_mut(stream).order_after_all(&retired);
        points.iter().for_each(|point| self.order_after(stream, point));
        points.into_iter().map(|point| point.epoch).collect()
    }

    /// Orders what is queued in `stream` from now on after all that the host has observed to be done.
    fn order_after_host(&mut self, stream: StreamId) {
        let Self { host, table, .. } = self;
        let state = table.get_mut(stream.0).expect("a live stream");
        if state.host_version != host.version {
            state.host_version = host.version;
            state.order_after_all(&host.clock);
        }
    }

    /// The host has observed that `point` is done, and with it all that is ordered before it.
    pub fn host_observed(&mut self, point: &StreamPoint) {
        if !self.host.clock.covers(point.epoch) || !self.host.clock.covers_all(&point.clock) {
            self.host.clock.join(&point.clock);
            self.host.clock.add(point.epoch);
            self.host.version += 1;
        }
    }

    fn host_observed_all(&mut self, clock: &VectorClock) {
        if !self.host.clock.covers_all(clock) {
            self.host.clock.join(clock);
            self.host.version += 1;
        }
    }

    /// An epoch for an operation of the host itself, and what that is ordered after.
    pub fn next_host_operation(&mut self) -> (Epoch, VectorClock) {
        let epoch = Epoch { timeline: TimelineId::HOST, seq: self.host.clock.get(TimelineId::HOST) + 1 };
        self.host.clock.add(epoch);
        self.host.version += 1;
        (epoch, self.host.clock.clone())
    }

    /// What a wait for `stream` waits for: its last operation, and for the legacy default stream also those of the
    /// blocking streams. A wait for a blocking stream does not wait for the default stream.
    pub fn awaited(&self, stream: StreamId) -> Vec<AwaitedStream> {
        let state = self.get(stream);
        let others = match state.kind {
            StreamKind::Legacy => Some(&self.device(state.device).changed),
            StreamKind::Blocking | StreamKind::NonBlocking => None,
        };
        let is_blocking = |&&other: &&StreamId| self.is_blocking(other, state.device);
        others
            .into_iter()
            .flatten()
            .filter(is_blocking)
            .chain([&stream])
            .map(|&stream| self.await_all(stream))
            .collect()
    }

    fn await_all(&self, stream: StreamId) -> AwaitedStream {
        steps::count();
        let state = self.get(stream);
        AwaitedStream { stream, changes: state.changes, last: state.last() }
    }

    /// The host has waited for `stream`, and so for all of `awaited`.
    pub fn host_waited(&mut self, stream: StreamId, awaited: Vec<AwaitedStream>) {
        self.end_wait(awaited);
        if let Some(Stream { kind: StreamKind::Legacy, device, .. }) = self.find(stream) {
            let retired = self.device(*device).retired_blocking.clone();
            self.host_observed_all(&retired);
        }
    }

    /// A wait for `device` begins. Returns the streams with work that the host must wait for.
    pub fn begin_device_wait(&mut self, device: DeviceId) -> Vec<AwaitedStream> {
        let retired = std::mem::take(&mut self.device_mut(device).retired);
        self.host_observed_all(&retired);
        self.device(device).changed.iter().map(|&stream| self.await_all(stream)).collect()
    }

    /// The host has waited for these.
    pub fn end_wait(&mut self, awaited: Vec<AwaitedStream>) {
        for AwaitedStream { stream, changes, last } in awaited {
            self.host_observed(&last);
            // It may have been destroyed and drained meanwhile, or have more operations.
            if let Some(state) = self.find_mut(stream)
                && state.changes == changes
            {
                state.is_listed_changed = false;
                let device = state.device;
                self.device_mut(device).changed.remove(&stream);
            }
        }
    }

    pub fn is_done(&self, epoch: Epoch) -> bool {
        self.timelines.is_done(epoch)
    }

    /// The pending waits of the first operation in a queue. Removes those that are done.
    pub(super) fn pending_waits(&mut self, stream: StreamId) -> &[Epoch] {
        let Self { table, timelines, .. } = self;
        let first = table.get_mut(stream.0).and_then(|state| state.queue.front_mut());
        let Some(first) = first else { return &[] };
        first.waits.retain(|&wait| !timelines.is_done(wait));
        &first.waits
    }

    fn device(&self, device: DeviceId) -> &DeviceStreams {
        &self.devices[device.0 as usize]
    }

    fn device_mut(&mut self, device: DeviceId) -> &mut DeviceStreams {
        &mut self.devices[device.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceId = DeviceId(0);

    /// Launches of one graph: each is ordered after the previous one, on every stream in turn.
    #[test]
    fn work_that_goes_around_many_streams_compares_few_nodes_of_their_clocks() {
        for &count in if cfg!(miri) { &[20, 200][..] } else { &[200, 2_000, 20_000] } {
            let mut streams = Streams::new(1);
            let around: Vec<StreamId> =
                (0..count).map(|_| streams.create(DEVICE, StreamKind::NonBlocking, 0)).collect();
            let mut last: Option<StreamPoint> = None;
            let mut launch = |streams: &mut Streams, stream| {
                if let Some(last) = &last {
                    streams.order_after(stream, last);
                }
                last = Some(streams.next_position(stream, Vec::new()).point);
                last.clone().expect("it was set")
            };
            around.iter().for_each(|&stream| _ = launch(&mut streams, stream));
            let mut most = 0;
            for &stream in around.iter().chain(&around) {
                let before = steps::steps_taken();
                launch(&mut streams, stream);
                most = most.max(steps::steps_taken() - before);
            }
            let before = steps::steps_taken();
            launch(&mut streams, around[0]);
            // The host waits for one, and the next is ordered after that.
            let point = launch(&mut streams, around[count / 2]);
            streams.host_observed(&point);
            launch(&mut streams, around[count / 3]);
            let with_host = steps::steps_taken() - before;
            assert!(most.max(with_host) <= 60, "{most} and {with_host} for {count} streams");
        }
    }
}
