//! Paused streams: what has not started stays queued until the host waits for it, or lets it run.

use std::collections::BTreeMap;

use super::Scheduler;
use crate::StreamId;
use crate::sim::order::{Epoch, TimelineId};
use crate::sim::work::item::Work;

impl Scheduler {
    /// Pauses a stream: what has not started stays queued.
    pub fn pause(&mut self, stream: StreamId) {
        let done = self.streams.timelines.done(self.streams.get(stream).timeline);
        let state = self.streams.get_mut(stream);
        if state.paused_after.is_none() {
            state.paused_after = Some(done + u64::from(state.running));
            self.paused_streams += 1;
        }
    }

    /// Ends the pause of a stream, if it is paused.
    pub fn resume(&mut self, stream: StreamId) {
        if let Some(last) = self.streams.get_mut(stream).paused_after.take() {
            self.paused_streams -= 1;
            self.start_if_was_paused(stream, last);
        }
    }

    /// Runs up to `count` queued operations of a paused stream, which take no time. Returns how many; `None` if the
    /// stream is not paused.
    pub fn run_paused(&mut self, stream: StreamId, count: u64) -> Option<u64> {
        let state = self.streams.get_mut(stream);
        let before = state.paused_after?;
        let last = before.saturating_add(count).min(state.last);
        for queued in state.queued_between_mut(before, last) {
            queued.nanos = 0;
            if let Work::Launch(launch) = queued.work {
                self.launches.get_mut(&launch).expect("a queued launch").instant = true;
            }
        }
        self.allow(stream, last);
        Some(last - before)
    }

    /// How many operations are queued in `stream` because it is paused.
    pub fn paused_work(&self, stream: StreamId) -> u64 {
        let state = self.streams.get(stream);
        state.paused_after.map_or(0, |last| state.last.saturating_sub(last))
    }

    /// Lets the operations of a paused stream up to number `last` start. Returns whether this allows new ones.
    fn allow(&mut self, stream: StreamId, last: u64) -> bool {
        let Some(state) = self.streams.find_mut(stream) else { return false };
        let Some(before) = state.paused_after.filter(|&before| before < last) else { return false };
        state.paused_after = Some(last);
        self.start_if_was_paused(stream, before);
        true
    }

    /// Starts the first operation of the queue if only the pause after number `last` held it back. Otherwise it is
    /// already running, or waits for other streams.
    fn start_if_was_paused(&mut self, stream: StreamId, last: u64) {
        if self.streams.get(stream).queue.front().is_some_and(|first| first.seq > last) {
            self.try_start(stream, self.now);
        }
    }

    /// Lets operations of paused streams start if the host waits for them, directly or through other operations.
    /// Returns whether any were paused.
    pub fn allow_awaited(&mut self, awaited: impl Iterator<Item = Epoch>) -> bool {
        if self.paused_streams == 0 {
            return false;
        }
        // How far each timeline must come. Ordered, since the order of starting has an effect.
        let mut needed: BTreeMap<TimelineId, u64> = BTreeMap::new();
        let mut open: Vec<Epoch> = awaited.collect();
        while let Some(epoch) = open.pop() {
            let done = self.streams.timelines.done(epoch.timeline);
            let needed = needed.entry(epoch.timeline).or_insert(done);
            if *needed >= epoch.seq {
                continue;
            }
            let before = std::mem::replace(needed, epoch.seq);
            let Some(state) = self.streams.find(self.streams.timelines.stream(epoch.timeline)) else { continue };
            let queued = state.queued_between(before, epoch.seq);
            open.extend(queued.flat_map(|queued| queued.waits.iter().copied()));
        }
        let mut allowed = false;
        for (timeline, last) in needed {
            allowed |= self.allow(self.streams.timelines.stream(timeline), last);
        }
        allowed
    }
}
