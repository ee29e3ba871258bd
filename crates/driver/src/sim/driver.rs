//! The simulated driver: one lock around its state, calls that take virtual time, waits, host callbacks.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use super::config::SimConfig;
use super::memory::RemapCounts;
use super::object_counts::ObjectCounts;
use super::objects::CurrentCall;
use super::order::{Epoch, Hazard};
use super::refuse::{named, refuse};
use super::rng;
use super::state::SimState;
use super::work::{AwaitedStream, Work, in_host_code, run_host_code};
use crate::fork::{self, Origin};
use crate::{Call, CaptureRule, DeviceId, DevicePtr, Driver, ErrorCode, Result, StreamId, discard_panic, source_line};

/// A driver with one or more simulated GPUs.
#[derive(Debug)]
pub struct SimDriver {
    state: Mutex<SimState>,
    /// Notified when a host callback has returned.
    callback_returned: Condvar,
    track_suballocations: bool,
    /// How many random numbers were drawn for the program.
    entropy_drawn: AtomicU64,
    seed: u64,
    /// In a forked child every call is refused, as by a real driver: another thread may have held the lock.
    origin: Origin,
}

/// The state, locked.
pub(in crate::sim) type Guard<'a> = MutexGuard<'a, SimState>;

impl SimDriver {
    /// Creates a driver.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        static LAST_ID: AtomicU64 = AtomicU64::new(1);
        let driver_id = LAST_ID.fetch_add(1, Ordering::Relaxed);
        let SimConfig { track_suballocations, seed, .. } = config;
        Self {
            state: Mutex::new(SimState::new(config, driver_id)),
            callback_returned: Condvar::new(),
            track_suballocations,
            entropy_drawn: AtomicU64::new(0),
            seed,
            origin: Origin::here(),
        }
    }

    /// The hazards detected so far, in the order of detection. Work that has not run yet is not included: synchronize
    /// first.
    #[must_use]
    pub fn hazards(&self) -> Vec<Hazard> {
        self.lock().hazards.entries().to_vec()
    }

    /// How many hazards were detected beyond [`SimConfig::max_hazards`].
    #[must_use]
    pub fn hazards_dropped(&self) -> u64 {
        self.lock().hazards.dropped()
    }

    /// Empties the hazard log.
    pub fn clear_hazards(&self) {
        self.lock().hazards.clear();
    }

    /// How many calls of the contract were made, without reports of suballocations.
    #[must_use]
    pub fn calls_made(&self) -> u64 {
        self.lock().calls_made()
    }

    /// How often `call` was made. [`Counting`](crate::decorate::Counting) also measures time.
    #[must_use]
    pub fn call_count(&self, call: Call) -> u64 {
        self.lock().call_count(call)
    }

    /// How long all calls took by the cost model, waits included. Virtual time passes only in calls, so this equals
    /// [`Driver::now`].
    #[must_use]
    pub fn time_in_calls(&self) -> Duration {
        self.now()
    }

    /// Remap counts: mappings of physical memory that was mapped before, and their cost.
    #[must_use]
    pub fn remap_counts(&self) -> RemapCounts {
        self.lock().memory.remap_counts()
    }

    /// Sets the remap counts to zero. Calls made until now do not count any more, even if a later call makes one of
    /// them part of a remapping (an unmap, whose memory is then mapped again).
    pub fn restart_remap_counts(&self) {
        self.lock().memory.restart_remap_counts();
    }

    /// Counts the objects of each kind.
    #[must_use]
    pub fn object_counts(&self) -> ObjectCounts {
        self.lock().object_counts()
    }

    pub(in crate::sim) fn tracks_suballocations(&self) -> bool {
        self.track_suballocations
    }

    pub(in crate::sim) fn lock(&self) -> Guard<'_> {
        // Panics in host callbacks and in host implementations of kernels are caught.
        if self.origin.is_here() {
            return self.state.lock().unwrap_or_else(PoisonError::into_inner);
        }
        match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // By a thread that does not exist in this process.
            Err(TryLockError::WouldBlock) => panic!("the simulated GPU is locked: {}", fork::REASON),
        }
    }

    /// Begins a call: time passes, work completes, host callbacks run, captures may forbid the call.
    pub(in crate::sim) fn enter(&self, call: Call) -> Result<Guard<'_>> {
        named(call, self.try_enter(call))
    }

    fn try_enter(&self, call: Call) -> Result<Guard<'_>> {
        if !self.origin.is_here() {
            return Err(fork::error(call.name()));
        }
        if in_host_code() {
            let why = "host callbacks and host implementations of kernels must not call the driver";
            return refuse(ErrorCode::NotPermitted, why);
        }
        let mut state = self.lock();
        let number = state.count_call(call);
        let mut state = self.run_callbacks(state);
        state.current_call = CurrentCall { call, number };
        if self.track_suballocations
            && let Some(line) = source_line::current()
        {
            state.hazards.names_mut().set_line(number, line);
        }
        let checks_captures_itself = matches!(
            call,
            Call::StreamQuery
                | Call::StreamSynchronize
                | Call::EventQuery
                | Call::EventSynchronize
                | Call::PoolAlloc
                | Call::PoolFree
        );
        if call.capture_rule() == CaptureRule::Guarded && !checks_captures_itself {
            state.forbid_unsafe_call()?;
        }
        Ok(state)
    }

    /// A call that does not wait.
    pub(in crate::sim) fn call<R>(&self, call: Call, body: impl FnOnce(&mut SimState) -> Result<R>) -> Result<R> {
        let mut state = self.enter(call)?;
        let outcome = body(&mut state);
        let unused = state.captures.take_unused_callbacks();
        drop(state);
        // Without the lock: what they own may call the driver when it is dropped.
        unused.into_iter().for_each(|callback| catch(|| drop(callback)));
        named(call, outcome)
    }

    /// A call that may wait, for which it gives up the lock.
    pub(in crate::sim) fn waiting_call<'a, R>(
        &'a self,
        call: Call,
        body: impl FnOnce(Guard<'a>) -> Result<R>,
    ) -> Result<R> {
        named(call, body(self.enter(call)?))
    }

    /// A call that gives work to a stream: `prepare` checks the arguments and returns the work and its duration.
    pub(in crate::sim) fn submit(
        &self,
        call: Call,
        stream: StreamId,
        prepare: impl FnOnce(&mut SimState, StreamId) -> Result<(Work, u64)>,
    ) -> Result<()> {
        self.waiting_call(call, |mut state| {
            let stream = state.live_stream(stream)?;
            state.forbid_implicit_wait(stream)?;
            let (work, nanos) = prepare(&mut state, stream)?;
            self.wait_for_queue(state, stream)?.submit(stream, work, nanos)
        })
    }

    /// Waits until there is room in a stream's queue.
    pub(in crate::sim) fn wait_for_queue<'a>(&'a self, mut state: Guard<'a>, stream: StreamId) -> Result<Guard<'a>> {
        let Some(last) = state.operation_before_room(stream) else { return Ok(state) };
        let has_room = |state: &SimState| state.operation_before_room(stream).is_none();
        state = self.wait(state, std::iter::once(last), has_room);
        // Another thread may have destroyed it meanwhile.
        state.live_stream(stream)?;
        Ok(state)
    }

    /// Waits until all work of a device is done.
    pub(in crate::sim) fn wait_for_device<'a>(&'a self, mut state: Guard<'a>, device: DeviceId) -> Guard<'a> {
        let changed = state.scheduler.streams.begin_device_wait(device);
        let done = std::cell::Cell::new(0);
        let mut state = self.wait(state, changed.iter().map(AwaitedStream::epoch), |state| {
            let rest = &changed[done.get()..];
            let newly_done = rest.iter().take_while(|stream| state.scheduler.is_done(stream.epoch())).count();
            done.set(done.get() + newly_done);
            newly_done == rest.len()
        });
        state.scheduler.streams.end_wait(changed);
        state.memory.trim_pools(device);
        state
    }

    /// Lets virtual time pass until `is_over`, which is true once all of `awaited` is done. Paused operations among
    /// them run.
    pub(in crate::sim) fn wait<'a>(
        &'a self,
        mut state: Guard<'a>,
        awaited: impl Iterator<Item = Epoch> + Clone,
        is_over: impl Fn(&SimState) -> bool,
    ) -> Guard<'a> {
        let current_call = state.current_call;
        state.scheduler.allow_awaited(awaited.clone());
        while !is_over(&state) {
            if state.scheduler.callbacks.are_ready() {
                state = self.run_callbacks(state);
            } else if !state.step() {
                // Another thread may have paused a stream while a callback ran.
                if state.scheduler.allow_awaited(awaited.clone()) {
                    continue;
                }
                assert!(state.scheduler.callbacks.are_running(), "a wait without work that could end it");
                state = self.callback_returned.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.current_call = current_call;
        state
    }

    /// Runs host callbacks that can run, without the lock: they may wait for other threads.
    fn run_callbacks<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        while let Some(callback) = state.scheduler.callbacks.take() {
            drop(state);
            // A panic ends the callback and nothing else, as on a thread of a real driver: this call is of a thread
            // that may have nothing to do with the callback. The panic hook has reported it.
            run_host_code(|| catch(|| (callback.run)()));
            let returned = callback.end(|callback| catch(|| drop(callback)));
            state = self.lock();
            state.callback_returned(returned);
            self.callback_returned.notify_all();
        }
        state
    }
}

/// Runs code of others, whose panics end here.
fn catch(body: impl FnOnce()) {
    std::panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(discard_panic);
}

impl Driver for SimDriver {
    fn kind(&self) -> &'static str {
        "sim"
    }

    fn now(&self) -> Duration {
        if !self.origin.is_here() {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.lock().scheduler.now())
    }

    fn entropy(&self) -> u64 {
        // No timeline has this number, so these draws change no other.
        rng::draw(self.seed, u64::MAX, self.entropy_drawn.fetch_add(1, Ordering::Relaxed), 0)
    }

    fn is_device_memory(&self, ptr: DevicePtr, bytes: u64) -> bool {
        self.origin.is_here() && self.lock().memory.is_device_memory(ptr, bytes)
    }
}
