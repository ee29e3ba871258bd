//! How far each timeline is done, and which streams wait for more.

use crate::StreamId;
use crate::sim::order::{Epoch, TimelineId, VectorClock};

#[derive(Debug)]
struct Timeline {
    /// The number of its last operation that is done.
    done: u64,
    /// The stream that it belongs to, or belonged to last.
    stream: StreamId,
    /// Streams whose next operation waits for an operation of this timeline, by number.
    waiters: Vec<(u64, StreamId)>,
}

#[derive(Debug)]
pub struct Timelines {
    all: Vec<Timeline>,
    /// Timelines of streams that no longer exist.
    unused: Vec<TimelineId>,
}

impl Default for Timelines {
    fn default() -> Self {
        // The host's timeline belongs to no stream.
        Self { all: vec![Timeline { done: 0, stream: StreamId(0), waiters: Vec::new() }], unused: Vec::new() }
    }
}

impl Timelines {
    /// Assigns a timeline to a new stream. Returns it and the number of its last operation.
    pub fn assign(&mut self, stream: StreamId, host: &VectorClock) -> (TimelineId, u64) {
        // A timeline can be reused once the host has observed that all its operations are done: work queued from then
        // on is ordered after them anyway.
        let reusable = self.unused.iter().position(|&id| host.get(id) >= self.all[id.0 as usize].done);
        let id = match reusable {
            Some(index) => self.unused.swap_remove(index),
            None => {
                self.all.push(Timeline { done: 0, stream, waiters: Vec::new() });
                TimelineId((self.all.len() - 1) as u32)
            }
        };
        let timeline = &mut self.all[id.0 as usize];
        timeline.stream = stream;
        (id, timeline.done)
    }

    /// The stream of a timeline no longer exists.
    pub fn release(&mut self, id: TimelineId) {
        self.unused.push(id);
    }

    /// The number of the last operation that is done.
    pub fn done(&self, id: TimelineId) -> u64 {
        self.all[id.0 as usize].done
    }

    pub fn is_done(&self, epoch: Epoch) -> bool {
        self.done(epoch.timeline) >= epoch.seq
    }

    /// The stream of a timeline, which may no longer exist.
    pub fn stream(&self, id: TimelineId) -> StreamId {
        self.all[id.0 as usize].stream
    }

    /// `stream` waits until `epoch` is done.
    pub fn add_waiter(&mut self, epoch: Epoch, stream: StreamId) {
        self.all[epoch.timeline.0 as usize].waiters.push((epoch.seq, stream));
    }

    /// The next operation of a timeline is done. Returns the streams that waited for it.
    pub fn complete_next(&mut self, id: TimelineId) -> Vec<StreamId> {
        let timeline = &mut self.all[id.0 as usize];
        timeline.done += 1;
        let done = timeline.done;
        timeline.waiters.extract_if(.., |&mut (seq, _)| seq <= done).map(|(_, stream)| stream).collect()
    }
}
