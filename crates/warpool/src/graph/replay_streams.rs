//! The streams on which replays of a graph may be under way. A stream is removed once its work is found to be done: a
//! graph may be replayed on tens of thousands of streams in its life.
//!
//! For the streams of recent replays, reading takes no lock. Streams are removed while other threads replay. So a
//! replay reads [`ReplayStreams::ticket`] before the launch and calls [`ReplayStreams::launched`] after it. If streams
//! were removed in between, its own is added again.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustc_hash::FxHashMap;
use warpool_driver::StreamId;

use crate::capture::CaptureStatus;
use crate::{Instance, lock};

/// How many streams are found without a lock.
const RECENT: usize = 8;

/// With fewer streams than this, none is removed.
const FORGET_AT: usize = 64;

pub(super) struct ReplayStreams {
    /// Streams that are in the table, each plus 1, by the low bits of their numbers.
    recent: [AtomicU64; RECENT],
    /// How many rounds of removing streams have begun.
    rounds: AtomicU64,
    table: Mutex<Table>,
}

struct Table {
    /// Each with the number of the replay that was last recorded.
    streams: FxHashMap<StreamId, u64>,
    replays: u64,
    /// At this number of streams, those whose work is done are removed.
    forget_at: usize,
}

/// A token from before the launch, to be passed to [`ReplayStreams::launched`].
#[derive(Clone, Copy)]
pub(super) struct Ticket {
    round: u64,
    is_recent: bool,
}

impl Default for ReplayStreams {
    fn default() -> Self {
        let table = Table { streams: FxHashMap::default(), replays: 0, forget_at: FORGET_AT };
        Self { recent: Default::default(), rounds: AtomicU64::new(0), table: Mutex::new(table) }
    }
}

impl ReplayStreams {
    /// Called before a launch on `stream`.
    #[inline]
    pub(super) fn ticket(&self, stream: StreamId) -> Ticket {
        let round = self.rounds.load(Ordering::SeqCst);
        Ticket { round, is_recent: self.recent(stream).load(Ordering::SeqCst) == stream.0 + 1 }
    }

    /// Called after the launch. May remove streams whose work is done, with driver calls.
    #[inline]
    pub(super) fn launched(&self, stream: StreamId, ticket: Ticket, instance: &Instance) {
        // Either a thread that removes streams sees the launch, or this thread sees that a round has begun.
        fence(Ordering::SeqCst);
        if !ticket.is_recent || self.rounds.load(Ordering::SeqCst) != ticket.round {
            self.add(stream, instance);
        }
    }

    #[cold]
    fn add(&self, stream: StreamId, instance: &Instance) {
        let mut table = lock(&self.table);
        table.replays += 1;
        let replay = table.replays;
        table.streams.insert(stream, replay);
        self.recent(stream).store(stream.0 + 1, Ordering::SeqCst);
        if table.streams.len() >= table.forget_at {
            // Keeps other threads from doing the same meanwhile, unless there are many more streams.
            table.forget_at = table.streams.len() * 2;
            let candidates: Vec<(StreamId, u64)> =
                table.streams.iter().map(|(&stream, &replay)| (stream, replay)).collect();
            self.begin_round();
            drop(table);
            self.forget(&candidates, instance);
        }
    }

    /// From now on every replay records its stream again. [`ticket`](Self::ticket) relies on the order of the two
    /// steps.
    fn begin_round(&self) {
        self.recent.iter().for_each(|recent| recent.store(0, Ordering::SeqCst));
        self.rounds.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Removes the candidates whose work is done and that no replay has used meanwhile.
    fn forget(&self, candidates: &[(StreamId, u64)], instance: &Instance) {
        let done = finished(candidates, instance);
        let mut table = lock(&self.table);
        for (stream, replay) in done {
            if table.streams.get(&stream) == Some(&replay) {
                table.streams.remove(&stream);
            }
        }
        table.forget_at = (table.streams.len() * 2).max(FORGET_AT);
    }

    fn recent(&self, stream: StreamId) -> &AtomicU64 {
        &self.recent[stream.0 as usize % RECENT]
    }

    /// The streams, ascending. None is recorded afterwards.
    pub(super) fn take(&mut self) -> Vec<StreamId> {
        let table = self.table.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut streams: Vec<StreamId> = std::mem::take(&mut table.streams).into_keys().collect();
        streams.sort_unstable();
        streams
    }
}

/// The candidates whose work is done. Of the destroyed streams, whose last work may still run, one is kept for all: a
/// wait for a destroyed stream is a wait for the devices.
fn finished(candidates: &[(StreamId, u64)], instance: &Instance) -> Vec<(StreamId, u64)> {
    // A query would invalidate a capture of the stream.
    let Some(_held_off) = instance.hold_off_captures() else { return Vec::new() };
    let driver = &**instance.driver();
    let mut destroyed = 0;
    let mut is_finished = |stream: StreamId| match CaptureStatus::of(driver, stream) {
        Ok(CaptureStatus::NotCapturing) => driver.stream_query(stream).unwrap_or(false),
        Ok(CaptureStatus::StreamDestroyed) => {
            destroyed += 1;
            destroyed > 1
        }
        _ => false,
    };
    candidates.iter().copied().filter(|&(stream, _)| is_finished(stream)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{Call, CaptureMode, Captures as _, Copies as _, DeviceId, DevicePtr, Pattern};
    use warpool_driver::{Graphs as _, Memory as _, StreamOptions, Streams as _};

    use super::*;

    const DEVICE: DeviceId = DeviceId(0);

    struct Context {
        sim: Arc<SimDriver>,
        instance: Instance,
        ptr: DevicePtr,
    }

    impl Context {
        fn new() -> Self {
            let sim = Arc::new(SimDriver::new(SimConfig::default()));
            let instance = Instance::new(sim.clone()).unwrap();
            let ptr = sim.mem_alloc(DEVICE, 512).unwrap();
            Self { sim, instance, ptr }
        }

        fn stream(&self) -> StreamId {
            self.sim.stream_create(DEVICE, StreamOptions { non_blocking: true, priority: 0 }).unwrap()
        }

        /// A stream that holds work until it is resumed.
        fn busy(&self) -> StreamId {
            let stream = self.stream();
            self.sim.pause_stream(stream).unwrap();
            self.sim.fill(self.ptr, Pattern::U8(0), 1, stream).unwrap();
            stream
        }

        fn replay(&self, streams: &ReplayStreams, stream: StreamId) {
            let ticket = streams.ticket(stream);
            streams.launched(stream, ticket, &self.instance);
        }
    }

    #[test]
    fn idle_streams_are_forgotten_and_busy_ones_are_not() {
        let context = Context::new();
        let mut streams = ReplayStreams::default();
        let busy: Vec<StreamId> = (0..100).map(|_| context.busy()).collect();
        busy.iter().for_each(|&stream| context.replay(&streams, stream));
        let calls = context.sim.calls_made();
        for _ in 0..10_000 {
            let stream = context.stream();
            context.replay(&streams, stream);
            context.replay(&streams, stream);
            assert!(lock(&streams.table).streams.len() <= 2 * (busy.len() + FORGET_AT));
        }
        // One creates the stream; two ask whether its work is done, and those of the busy ones now and then.
        let calls = (context.sim.calls_made() - calls) / 10_000;
        assert!(calls <= 8, "{calls} driver calls for each new stream");
        let kept = streams.take();
        assert!(busy.iter().all(|stream| kept.binary_search(stream).is_ok()));
        assert!(kept.len() <= 2 * (busy.len() + FORGET_AT));
    }

    #[test]
    fn one_destroyed_stream_is_kept_for_all() {
        let context = Context::new();
        let mut streams = ReplayStreams::default();
        for _ in 0..1_000 {
            let stream = context.stream();
            context.replay(&streams, stream);
            context.sim.stream_destroy(stream).unwrap();
        }
        let kept = streams.take();
        assert!(!kept.is_empty() && kept.len() <= FORGET_AT, "{} streams", kept.len());
    }

    #[test]
    fn nothing_is_queried_while_a_capture_is_under_way() {
        let context = Context::new();
        let mut streams = ReplayStreams::default();
        let (capturing, all) = (context.stream(), (0..500).map(|_| context.stream()).collect::<Vec<_>>());
        context.sim.capture_begin(capturing, CaptureMode::Global).unwrap();
        context.instance.count_capture();
        context.replay(&streams, capturing);
        all.iter().for_each(|&stream| context.replay(&streams, stream));
        assert_eq!(context.sim.call_count(Call::StreamQuery), 0);
        context.instance.uncount_capture();
        let graph = context.sim.capture_end(capturing).unwrap();
        context.sim.graph_destroy(graph).unwrap();
        assert_eq!(streams.take().len(), all.len() + 1);
        // A capture that Warpool does not know about: its stream is not queried either.
        let capturing = context.stream();
        context.sim.capture_begin(capturing, CaptureMode::Relaxed).unwrap();
        context.replay(&streams, capturing);
        for _ in 0..1_000 {
            context.replay(&streams, context.stream());
        }
        let graph = context.sim.capture_end(capturing).expect("it was not invalidated");
        context.sim.graph_destroy(graph).unwrap();
        assert!(streams.take().contains(&capturing));
    }

    /// Streams are removed between the ticket and the launch, or between the launch and its record.
    #[test]
    fn a_replay_that_meets_a_round_is_recorded_again() {
        let context = Context::new();
        let streams = ReplayStreams::default();
        let stream = context.stream();
        context.replay(&streams, stream);
        let candidates = || lock(&streams.table).streams.iter().map(|(&at, &replay)| (at, replay)).collect::<Vec<_>>();
        let is_known = || lock(&streams.table).streams.contains_key(&stream);

        let (ticket, seen) = (streams.ticket(stream), candidates());
        streams.begin_round();
        streams.forget(&seen, &context.instance);
        assert!(!is_known(), "its work is done");
        streams.launched(stream, ticket, &context.instance);
        assert!(is_known());

        let (ticket, seen) = (streams.ticket(stream), candidates());
        streams.begin_round();
        let done = finished(&seen, &context.instance);
        assert_eq!(done, seen);
        streams.launched(stream, ticket, &context.instance);
        streams.forget(&seen, &context.instance);
        assert!(is_known(), "it was used since it was found to be done");
        assert!(!streams.ticket(context.stream()).is_recent);
    }
}
