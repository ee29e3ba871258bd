//! Paused streams: work runs on request of a replay or test, not by virtual time. And time that passes without a call.
//!
//! Not part of the contract. A paused stream accepts work but starts none of it. Work that had started when the stream
//! was paused ends as usual. A wait of the host overrides the pause: what it waits for, and what that waits for in
//! turn, runs and takes its usual time. So no wait is endless.

use std::time::Duration;

use crate::sim::driver::SimDriver;
use crate::sim::refuse::{named_as, refuse, unnamed};
use crate::sim::state::SimState;
use crate::{ErrorCode, Result, StreamId};

impl SimDriver {
    /// From now on no operation starts in `stream` before [`run_paused`](Self::run_paused), whether it is queued
    /// already or later: an event recorded there is not reached, and other streams that wait for it wait. The queue has
    /// no limit meanwhile. Pausing twice is the same as once; destroying the stream ends the pause.
    ///
    /// `InvalidHandle` if the stream does not exist.
    pub fn pause_stream(&self, stream: StreamId) -> Result<()> {
        self.with_stream("pause_stream", stream, |state, stream| {
            state.scheduler.pause(stream);
            Ok(())
        })
    }

    /// Runs the next `count` queued operations of a paused stream, in their order, and returns how many there were;
    /// what is queued later is paused again. Each record, wait for an event, copy, fill, launch, callback, pool
    /// allocation or pool free is one operation. They take no time (except iterations of loops in graphs): unless one
    /// waits for another stream, they are done at the next call.
    ///
    /// `InvalidHandle` if the stream does not exist, `InvalidValue` if it is not paused.
    pub fn run_paused(&self, stream: StreamId, count: u64) -> Result<u64> {
        self.with_stream("run_paused", stream, |state, stream| match state.scheduler.run_paused(stream, count) {
            Some(count) => Ok(count),
            None => {
                let why = format!("{stream} is not paused: pause it before its work is queued");
                refuse(ErrorCode::InvalidValue, why)
            }
        })
    }

    /// How many operations are queued in `stream` because it is paused: those that neither
    /// [`run_paused`](Self::run_paused) nor a wait of the host has started.
    ///
    /// `InvalidHandle` if the stream does not exist.
    pub fn paused_work(&self, stream: StreamId) -> Result<u64> {
        self.with_stream("paused_work", stream, |state, stream| Ok(state.scheduler.paused_work(stream)))
    }

    /// Ends the pause: what is queued starts now and takes its usual time. Nothing happens if the stream is not paused.
    ///
    /// `InvalidHandle` if the stream does not exist.
    pub fn resume_stream(&self, stream: StreamId) -> Result<()> {
        self.with_stream("resume_stream", stream, |state, stream| {
            state.scheduler.resume(stream);
            Ok(())
        })
    }

    /// Lets virtual time pass in which the host makes no call, and completes the work that ends until then. Host
    /// callbacks that become due run at the next call.
    pub fn pass_time(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut state = self.lock();
        let until = state.scheduler.now().saturating_add(nanos);
        state.advance_to(until);
    }

    fn with_stream<R>(
        &self,
        name: &'static str,
        stream: StreamId,
        body: impl FnOnce(&mut SimState, StreamId) -> Result<R>,
    ) -> Result<R> {
        let mut state = self.lock();
        let outcome = if state.scheduler.streams.live(stream).is_err() {
            refuse(ErrorCode::InvalidHandle, format!("{stream} does not exist"))
        } else {
            // It exists, so only its device can be wrong.
            match state.live_stream(stream) {
                Ok(stream) => body(&mut state, stream),
                Err(error) => Err(unnamed(error.code)),
            }
        };
        named_as(name, outcome)
    }
}
