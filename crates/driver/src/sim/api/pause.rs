//! Held streams: work that completes when a replay says so, and not by the clock.
//!
//! Not part of the contract. A held stream takes work as ever, but begins none of it before it is let through. Work
//! that had begun when the hold came goes on to its end. A host that waits overrides the hold: what it waits for, and
//! what that waits for in turn, is let through, no more, and takes the time that it would have taken. So nobody waits
//! for ever.

use std::collections::BTreeMap;

use crate::sim::SimDriver;
use crate::sim::order::Stamp;
use crate::sim::work::Work;
use crate::sim::world::World;
use crate::{DriverError, ErrorCode, Result, StreamId};

impl SimDriver {
    /// From now on nothing begins in `stream` before it is [let through](Self::run_paused), be it queued already or
    /// later: an event recorded there stays unreached, and other streams that wait for it wait. Its queue takes as much
    /// as comes. Holding twice is holding once; destroying the stream ends it.
    ///
    /// `InvalidHandle` if there is no such stream.
    pub fn pause_stream(&self, stream: StreamId) -> Result<()> {
        let mut world = self.lock();
        let stream = world.stream_to_hold("hold", stream)?;
        let World { streams, lanes, streams_held, .. } = &mut *world;
        let state = streams.get_mut(stream.0).expect("just found");
        if state.held.is_none() {
            state.held = Some(lanes[state.lane as usize].done + u64::from(state.running));
            *streams_held += 1;
        }
        Ok(())
    }

    /// Lets the next `count` pieces of work through that are queued in `stream`, in their order, and says how many
    /// there were: what is queued later is held again. Each record, wait for an event, copy, fill, launch, callback,
    /// allocation or free in a pool is a piece. They take no time (but rounds of loops in graphs do): unless one waits
    /// for another stream, the next call finds them done.
    ///
    /// `InvalidHandle` if there is no such stream, `InvalidValue` if it is not held.
    pub fn run_paused(&self, stream: StreamId, count: u64) -> Result<u64> {
        const NAME: &str = "run_paused";
        let mut world = self.lock();
        let stream = world.stream_to_hold(NAME, stream)?;
        let state = world.stream(stream);
        let Some(held) = state.held else {
            return Err(DriverError::new(NAME, ErrorCode::InvalidValue)
                .with_detail(format!("{stream} is not held: hold it before its work is queued")));
        };
        let through = held.saturating_add(count).min(state.tail);
        world.hurry(stream, held, through);
        world.raise(stream, through);
        Ok(through - held)
    }

    /// How many pieces of work wait in `stream` because it is held: what was queued, less what was let through, or what
    /// a host's wait let through.
    ///
    /// `InvalidHandle` if there is no such stream.
    pub fn paused_work(&self, stream: StreamId) -> Result<u64> {
        let mut world = self.lock();
        let stream = world.stream_to_hold("paused_work", stream)?;
        let state = world.stream(stream);
        Ok(state.held.map_or(0, |held| state.tail.saturating_sub(held)))
    }

    /// Ends the hold: what was held begins now, and takes the time that it takes. A stream that is not held stays as it
    /// is.
    ///
    /// `InvalidHandle` if there is no such stream.
    pub fn resume_stream(&self, stream: StreamId) -> Result<()> {
        let mut world = self.lock();
        let stream = world.stream_to_hold("resume_stream", stream)?;
        world.end_hold(stream);
        Ok(())
    }
}

impl World {
    fn stream_to_hold(&mut self, name: &'static str, stream: StreamId) -> Result<StreamId> {
        if self.streams.get(stream.0).is_none_or(|state| state.gone) {
            return Err(DriverError::new(name, ErrorCode::InvalidHandle).with_detail(format!("there is no {stream}")));
        }
        // Alive, so all that can be wrong is its device.
        self.live_stream(stream).map_err(|error| DriverError::new(name, error.code))
    }

    /// The work of `stream` after number `from`, up to `through`, takes no time. None of it has begun.
    fn hurry(&mut self, stream: StreamId, from: u64, through: u64) {
        let Self { streams, launches, .. } = self;
        let queue = &mut streams.get_mut(stream.0).expect("a live stream").queue;
        let first = queue.partition_point(|op| op.seq <= from);
        for op in queue.range_mut(first..).take_while(|op| op.seq <= through) {
            op.nanos = 0;
            if let Work::Launch(launch) = op.work {
                launches.get_mut(&launch).expect("a launch under way").hurried = true;
            }
        }
    }

    /// Lets the work of a held stream begin up to number `through`. Says whether that was news.
    fn raise(&mut self, stream: StreamId, through: u64) -> bool {
        let Some(state) = self.streams.get_mut(stream.0) else { return false };
        let Some(held) = state.held.filter(|&held| held < through) else { return false };
        state.held = Some(through);
        self.start_if_held_back(stream, held);
        true
    }

    /// Ends a stream's hold, if it is held.
    pub fn end_hold(&mut self, stream: StreamId) {
        if let Some(held) = self.stream_mut(stream).held.take() {
            self.streams_held -= 1;
            self.start_if_held_back(stream, held);
        }
    }

    /// Starts the first of the queue if the hold alone kept it, at number `held`. Else it runs already, or waits for
    /// other streams and is known to.
    fn start_if_held_back(&mut self, stream: StreamId, held: u64) {
        if self.stream(stream).queue.front().is_some_and(|op| op.seq > held) {
            self.try_start(stream, self.clock);
        }
    }

    /// Lets through what a host waits for that waits for `awaited`, over all streams. Says whether anything was held.
    pub fn lift(&mut self, awaited: impl Iterator<Item = Stamp>) -> bool {
        if self.streams_held == 0 {
            return false;
        }
        // How far each lane must come. Ordered, since the order of beginning shows.
        let mut needed: BTreeMap<u32, u64> = BTreeMap::new();
        let mut open: Vec<Stamp> = awaited.collect();
        while let Some(stamp) = open.pop() {
            let lane = &self.lanes[stamp.lane as usize];
            let needed = needed.entry(stamp.lane).or_insert(lane.done);
            if *needed >= stamp.seq {
                continue;
            }
            let before = std::mem::replace(needed, stamp.seq);
            let Some(state) = self.streams.get(lane.stream.0) else { continue };
            let first = state.queue.partition_point(|op| op.seq <= before);
            let ops = state.queue.range(first..).take_while(|op| op.seq <= stamp.seq);
            open.extend(ops.flat_map(|op| op.waits.iter().copied()));
        }
        let mut lifted = false;
        for (lane, through) in needed {
            lifted |= self.raise(self.lanes[lane as usize].stream, through);
        }
        lifted
    }
}
