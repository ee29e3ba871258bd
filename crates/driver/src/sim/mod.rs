//! The simulated GPU: a machine without hardware that keeps the contract, and watches how it is used.
//!
//! - **Memory** has addresses and contents. Terabytes can be reserved and a whole device allocated; pages exist once
//!   they are written.
//! - **Work completes later.** A stream is a queue; each piece of work has a duration, from the cost model and the
//!   seed, and takes effect when the virtual clock reaches its end. The clock moves only in calls: each costs time, and
//!   waiting moves it on. Nothing happens in between, so a program that waits for a host callback must wait through the
//!   driver.
//! - **Host code.** A callback runs on the thread in whose call its turn comes; one that waits for what that thread
//!   does later waits for ever. A panic in a kernel's double is an assert of the device: it breaks the device, and
//!   later calls say so.
//! - **Order** is tracked apart from time. What streams, events, default-stream rules, graphs and waits of the host put
//!   in order is in order; everything else is not, even if the clock happened to separate it.
//! - **The hazard log** names accesses that no order protects ([`SimDriver::hazards`]). Each is compared with the last
//!   write to its bytes and the reads since, so of several clashes over the same bytes one may hide another: put it
//!   right, run again, and the next shows. All threads of the host count as one: what one has waited for, all know. So
//!   a missing hand-over between two host threads goes unnoticed, but nothing is reported that is in order.
//! - **Capture and graphs** obey CUDA's rules, as measured on an H200; replays have real effects.
//! - **Replays** may say where memory lies ([`SimDriver::place_next_alloc`]) and when work completes
//!   ([`SimDriver::hold`]).
//! - The same seed and the same calls give the same run.
//!
//! ```
//! use warpool_driver::sim::{HazardKind, SimConfig, SimDriver};
//! use warpool_driver::*;
//!
//! # fn main() -> Result<()> {
//! let gpu = SimDriver::new(SimConfig::default());
//! let device = DeviceId(0);
//! let (one, two) = (gpu.stream_create(device, StreamOptions::default())?, gpu.stream_create(device, StreamOptions::default())?);
//! let memory = gpu.mem_alloc(device, 1 << 20)?;
//! gpu.fill(memory, Pattern::U8(1), 1 << 20, one)?;
//! gpu.fill(memory, Pattern::U8(2), 1 << 20, two)?; // nobody waited
//! gpu.device_synchronize(device)?;
//! assert_eq!(gpu.hazards()[0].kind, HazardKind::Race);
//! # Ok(())
//! # }
//! ```

mod api;
mod config;
mod cost;
mod memory;
mod order;
mod table;
mod work;
mod world;

pub use api::LibraryCall;
pub use config::{SimConfig, SimDevice, Timing};
pub use cost::{Latencies, Latency, WorkCosts};
pub use order::{Hazard, HazardKind, HazardRange, RangeBase};

use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Call, CaptureRule, Driver, DriverError, ErrorCode, Result, StreamId};
use memory::Region;
use order::Stamp;
use work::{Callback, Work};
use world::World;

/// A simulated machine with one or more GPUs.
#[derive(Debug)]
pub struct SimDriver {
    world: Mutex<World>,
    /// Rings when a callback has returned.
    callback_done: Condvar,
    /// Whether suballocations are tracked.
    track_suballocations: bool,
    /// How many numbers have been asked for that nobody can foresee.
    entropy_asked: AtomicU64,
    seed: u64,
}

/// How many of each kind of thing there are: two equal counts, and nothing was left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectCounts {
    /// Streams that were created or adopted; default streams do not count.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Ids of physical memory.
    pub physical: usize,
    /// Reserved ranges of addresses.
    pub reservations: usize,
    /// Pieces mapped into them.
    pub mappings: usize,
    /// Allocations, plain and from pools.
    pub allocations: usize,
    /// Pools; default pools do not count.
    pub pools: usize,
    /// Pinned ranges of host memory.
    pub pinned: usize,
    /// How much host memory is pinned in all.
    pub bytes_pinned: u64,
    /// Templates of graphs.
    pub graphs: usize,
    /// Executables of graphs.
    pub graph_execs: usize,
    /// Loaded modules.
    pub modules: usize,
    /// Handles of libraries.
    pub handles: usize,
    /// Captures under way.
    pub captures: usize,
    /// Device memory in use, on all devices; unused memory of pools does not count.
    pub bytes_used: u64,
}

thread_local! {
    /// Whether this thread is inside a host callback or a kernel's double, from where nothing may be called.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of others from where the driver may not be called: a host callback, or a kernel's double. It must not
/// panic.
fn without_driver<T>(body: impl FnOnce() -> T) -> T {
    let before = IN_CALLBACK.replace(true);
    let outcome = body();
    IN_CALLBACK.set(before);
    outcome
}

impl SimDriver {
    /// Builds the machine.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        static MACHINES: AtomicU64 = AtomicU64::new(1);
        let machine = MACHINES.fetch_add(1, Ordering::Relaxed);
        let SimConfig { track_suballocations, seed, .. } = config;
        let world = Mutex::new(World::new(config, machine));
        Self { world, callback_done: Condvar::new(), track_suballocations, entropy_asked: AtomicU64::new(0), seed }
    }

    /// What has been noticed so far, in the order of noticing. Work that has not run yet is not in it: synchronize
    /// first.
    #[must_use]
    pub fn hazards(&self) -> Vec<Hazard> {
        self.lock().memory.log.entries().to_vec()
    }

    /// How many more there were than the configuration keeps.
    #[must_use]
    pub fn hazards_dropped(&self) -> u64 {
        self.lock().memory.log.dropped()
    }

    /// Empties the log.
    pub fn clear_hazards(&self) {
        self.lock().memory.log.clear();
    }

    /// How many calls of the contract have been made; reports of suballocations do not count.
    #[must_use]
    pub fn calls_made(&self) -> u64 {
        let world = self.lock();
        let reports: u64 =
            [Call::Suballocated, Call::SuballocationFreed].map(|call| world.calls_by_name[call as usize]).iter().sum();
        world.calls_made - reports
    }

    /// How often `call` has been made. Time by call is what [`Counting`](crate::decorate::Counting) adds.
    #[must_use]
    pub fn call_count(&self, call: Call) -> u64 {
        self.lock().calls_by_name[call as usize]
    }

    /// How long all calls took, by the cost model, with the time that the host waited in them. The virtual clock moves
    /// in calls only, so this is what it shows: [`Driver::now`] under the name of its other meaning.
    #[must_use]
    pub fn time_in_calls(&self) -> Duration {
        self.now()
    }

    /// Counts what there is.
    #[must_use]
    pub fn object_counts(&self) -> ObjectCounts {
        let world = self.lock();
        let own_streams = |stream: StreamId| {
            world.devices.iter().all(|device| device.legacy != stream && device.per_thread != stream)
                && !world.thread_streams.values().any(|&own| own == stream)
                && !world.stream(stream).gone
        };
        let mut census = ObjectCounts {
            streams: world.streams.ids().into_iter().filter(|&id| own_streams(StreamId(id))).count(),
            events: world.events.len(),
            physical: world.physical.len(),
            pools: world.pools.len() - world.devices.len(),
            graphs: world.graphs.len(),
            graph_execs: world.execs.len(),
            modules: world.modules.len(),
            handles: world.handles.len(),
            captures: world.captures.len(),
            bytes_used: world.devices.iter().map(|device| device.bytes_used).sum::<u64>() - world.bytes_idle_in_pools(),
            ..ObjectCounts::default()
        };
        for (bytes, region) in world.memory.space.regions.values() {
            match region {
                Region::Plain { .. } => census.allocations += 1,
                Region::Pooled { freed, .. } => census.allocations += usize::from(!freed),
                Region::OfGraph { piece, .. } => census.allocations += usize::from(piece.is_some()),
                Region::Pinned { .. } => {
                    census.pinned += 1;
                    census.bytes_pinned += bytes;
                }
                Region::Reserved { mappings } => {
                    census.reservations += 1;
                    census.mappings += mappings.len();
                }
            }
        }
        census
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        // A panic in a callback leaves nothing half done that later calls would trip over; one in a kernel's double is
        // caught.
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call: time passes, work completes, callbacks whose turn has come are run, and captures are asked.
    fn enter(&self, call: Call) -> Result<MutexGuard<'_, World>> {
        if IN_CALLBACK.get() {
            return Err(DriverError::new(call.name(), ErrorCode::NotPermitted)
                .with_detail("host callbacks and doubles of kernels must not call the driver"));
        }
        let mut world = self.lock();
        world.calls_made += 1;
        world.calls_by_name[call as usize] += 1;
        let number = world.calls_made;
        let nanos = world.config.latencies.flat_nanos(call);
        let now = world.clock.saturating_add(nanos);
        world.advance_to(now);
        let mut world = self.run_callbacks(world);
        (world.call, world.calls) = (call, number);
        let asks_itself = matches!(
            call,
            Call::StreamQuery
                | Call::StreamSynchronize
                | Call::EventQuery
                | Call::EventSynchronize
                | Call::PoolAlloc
                | Call::PoolFree
        );
        if call.capture_rule() == CaptureRule::Guarded && !asks_itself {
            world.forbid_guarded()?;
        }
        Ok(world)
    }

    /// One whole call.
    fn call<R>(&self, call: Call, body: impl FnOnce(&mut World) -> Result<R>) -> Result<R> {
        let mut world = self.enter(call)?;
        let outcome = body(&mut world);
        let unused = world.captured_callbacks.take_unused();
        drop(world);
        // Without the lock, since what they hold may call the driver as it goes.
        drop(unused);
        outcome
    }

    /// One whole call that gives work to a stream: `prepare` checks the arguments and says what is to be done and how
    /// long it takes.
    fn submit(
        &self,
        call: Call,
        stream: StreamId,
        prepare: impl FnOnce(&mut World, StreamId) -> Result<(Work, u64)>,
    ) -> Result<()> {
        let mut world = self.enter(call)?;
        let stream = world.live_stream(stream)?;
        world.forbid_implicit(stream)?;
        let (work, nanos) = prepare(&mut world, stream)?;
        let mut world = self.wait_for_room(world, stream)?;
        world.submit(stream, work, nanos)
    }

    /// Waits until the stream's queue is shorter than its limit. That of a held stream has none: making room would let
    /// work through that nobody waits for.
    fn wait_for_room<'a>(
        &'a self,
        mut world: MutexGuard<'a, World>,
        stream: StreamId,
    ) -> Result<MutexGuard<'a, World>> {
        let depth = world.config.queue_depth.max(1);
        let state = world.stream(stream);
        if state.queue.len() >= depth && state.held.is_none() {
            let leaver = Stamp { lane: state.lane, seq: state.queue[state.queue.len() - depth].seq };
            let has_room = |world: &World| {
                world.streams.get(stream.0).is_none_or(|state| state.queue.len() < depth || state.held.is_some())
            };
            world = self.wait(world, std::iter::once(leaver), has_room);
            // Another thread may have destroyed it meanwhile.
            world.live_stream(stream)?;
        }
        Ok(world)
    }

    /// Lets time pass until `over`, which is once all of `awaited` is done. What of it is held is let through.
    fn wait<'a>(
        &'a self,
        mut world: MutexGuard<'a, World>,
        awaited: impl Iterator<Item = Stamp> + Clone,
        over: impl Fn(&World) -> bool,
    ) -> MutexGuard<'a, World> {
        let under_way = (world.call, world.calls);
        world.lift(awaited.clone());
        while !over(&world) {
            if !world.callbacks.is_empty() {
                world = self.run_callbacks(world);
            } else if !world.step() {
                // Another thread may have held a stream while a callback ran.
                if world.lift(awaited.clone()) {
                    continue;
                }
                assert!(world.callbacks_running > 0, "the simulated device has nothing to do and somebody waits");
                world = self.callback_done.wait(world).unwrap_or_else(PoisonError::into_inner);
            }
        }
        (world.call, world.calls) = under_way;
        world
    }

    /// Runs the host callbacks whose turn has come, without the lock: they may wait for other threads.
    fn run_callbacks<'a>(&'a self, mut world: MutexGuard<'a, World>) -> MutexGuard<'a, World> {
        while let Some(callback) = world.callbacks.pop_front() {
            let Callback { run, runner, time } = callback;
            world.callbacks_running += 1;
            drop(world);
            let outcome = without_driver(|| std::panic::catch_unwind(AssertUnwindSafe(|| run())));
            // Here, since what it holds may call the driver as it goes.
            drop(run);
            world = self.lock();
            world.callbacks_running -= 1;
            world.finish_callback(runner, time);
            self.callback_done.notify_all();
            if let Err(panic) = outcome {
                drop(world);
                std::panic::resume_unwind(panic);
            }
        }
        world
    }
}

impl Driver for SimDriver {
    fn kind(&self) -> &'static str {
        "sim"
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.lock().clock)
    }

    fn entropy(&self) -> u64 {
        // No stream has that lane, so asking changes nobody's luck.
        cost::draw(self.seed, u64::MAX, self.entropy_asked.fetch_add(1, Ordering::Relaxed), 0)
    }
}
