//! The state of a simulated driver: everything that its lock protects, with lookups and rules that many calls share.
//! The effects of single calls are in `api/`.

use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use rustc_hash::FxHashMap;

use super::config::SimConfig;
use super::memory::{AccessContext, Memory, Pool};
use super::object_counts::ObjectCounts;
use super::objects::{Captures, CurrentCall, Exec, Graphs, Libraries, Modules};
use super::order::{Accessor, Epoch, HappensBefore, HazardKind, HazardLog};
use super::refuse::{refusal, refuse, unnamed};
use super::table::Missing;
use super::work::{DueWork, Event, KernelWork, ReturnedCallback, Scheduler, Step, StreamKind, Template, Work, execute};
use crate::{
    Call, CaptureId, DeviceId, DevicePtr, DriverError, ErrorCode, EventId, FunctionId, GraphExecId, GraphId,
    HostKernel, PoolId, Result, StreamId,
};

/// The state of a simulated driver.
#[derive(Debug)]
pub struct SimState {
    pub config: SimConfig,
    /// Distinguishes handles of this driver from those of another in the same process.
    pub driver_id: u64,
    pub memory: Memory,
    pub hazards: HazardLog,
    pub scheduler: Scheduler,
    pub captures: Captures,
    pub graphs: Graphs,
    pub modules: Modules,
    pub libraries: Libraries,
    pub contexts: Vec<Context>,
    pub current_devices: FxHashMap<ThreadId, DeviceId>,
    pub current_call: CurrentCall,
    calls_made: u64,
    /// How often each call was made, in the order of [`Call::ALL`].
    calls_by_kind: Vec<u64>,
}

/// The primary context of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Context {
    /// How often it is retained.
    pub retained: u32,
    /// Whether a call needed it.
    pub used: bool,
}

impl SimState {
    pub fn new(config: SimConfig, driver_id: u64) -> Self {
        Self {
            memory: Memory::new(&config),
            hazards: HazardLog::new(config.max_hazards),
            scheduler: Scheduler::new(&config),
            captures: Captures::default(),
            graphs: Graphs::default(),
            modules: Modules::default(),
            libraries: Libraries::default(),
            contexts: vec![Context::default(); config.devices.len()],
            current_devices: FxHashMap::default(),
            current_call: CurrentCall { call: Call::DeviceCount, number: 0 },
            calls_made: 0,
            calls_by_kind: vec![0; Call::ALL.len()],
            driver_id,
            config,
        }
    }

    /// Counts a call and lets the time pass that it takes at its start. Returns its number.
    pub fn count_call(&mut self, call: Call) -> u64 {
        self.calls_made += 1;
        self.calls_by_kind[call as usize] += 1;
        let number = self.calls_made;
        let nanos = self.config.latencies.flat_nanos(call);
        self.advance_to(self.scheduler.now().saturating_add(nanos));
        number
    }

    /// How often `call` was made.
    pub fn call_count(&self, call: Call) -> u64 {
        self.calls_by_kind[call as usize]
    }

    /// How many calls were made, without reports of suballocations.
    pub fn calls_made(&self) -> u64 {
        let reports =
            [Call::Suballocated, Call::SuballocatedInPlace, Call::SuballocationFreed].map(|call| self.call_count(call));
        self.calls_made - reports.iter().sum::<u64>()
    }

    /// The number of the current call.
    pub fn call_number(&self) -> u64 {
        self.current_call.number
    }

    pub fn object_counts(&self) -> ObjectCounts {
        let (graphs, graph_execs) = self.graphs.counts();
        let mut counts = ObjectCounts {
            streams: self.scheduler.streams.created(),
            events: self.scheduler.events.len(),
            graphs,
            graph_execs,
            modules: self.modules.len(),
            handles: self.libraries.len(),
            captures: self.captures.len(),
            ..ObjectCounts::default()
        };
        self.memory.count(&mut counts);
        counts
    }

    // Time and work.

    /// Lets the time pass that the current call takes for that many bytes.
    pub fn spend(&mut self, bytes: u64) {
        let nanos = self.config.latencies.sized_nanos(self.current_call.call, bytes);
        self.advance_to(self.scheduler.now() + nanos);
    }

    /// Moves the virtual time on, and completes what ends until then.
    pub fn advance_to(&mut self, time: u64) {
        while self.scheduler.next_completion().is_some_and(|end| end <= time) {
            self.step();
        }
        self.scheduler.advance(time);
    }

    /// Completes the work that ends next. Returns whether there was any.
    pub fn step(&mut self) -> bool {
        match self.scheduler.step() {
            Step::Idle => return false,
            Step::Done => {}
            Step::Due(due) => {
                self.run(&due);
                self.scheduler.complete(due.running, due.time);
            }
        }
        self.release_ended_launches();
        true
    }

    /// A host callback has returned.
    pub fn callback_returned(&mut self, callback: ReturnedCallback) {
        self.scheduler.callback_returned(callback);
        self.release_ended_launches();
    }

    /// Work takes effect, unless its device has failed.
    fn run(&mut self, due: &DueWork) {
        let DueWork { running, work, device, stream, epoch, number, clock, node, queued_at, time } = due;
        if self.scheduler.failure(*device).is_some() {
            return;
        }
        let instance = node.as_ref().map(|(_, instance)| *instance);
        let mut by = AccessContext {
            device: *device,
            accessor: Accessor {
                operation: work.operation(),
                epoch: *epoch,
                number: *number,
                node: instance,
                stream: *stream,
                queued_at: *queued_at,
            },
            before: HappensBefore {
                epoch: *epoch,
                clock,
                graph: node.as_ref().map(|(graph, instance)| (&graph.order, *instance)),
            },
            now: *time,
            any_device: !matches!(work, Work::Kernel(_)),
            hazards: &mut self.hazards,
        };
        let mut no_flags = Vec::new();
        let flags = self.scheduler.flags_mut(*running).unwrap_or(&mut no_flags);
        if let Err(code) = execute(work, &mut by, &mut self.memory, flags) {
            self.scheduler.set_failed(*device, code);
        }
    }

    fn release_ended_launches(&mut self) {
        for template in self.scheduler.take_ended() {
            self.release_template(template);
        }
    }

    /// Drops one reference to a template. The last one releases the addresses that its nodes allocated.
    pub fn release_template(&mut self, template: Arc<Template>) {
        let Ok(template) = Arc::try_unwrap(template) else { return };
        self.captures.graph_destroyed();
        self.release_graph_addresses(&template.memory);
        for node in template.nodes {
            if let Work::Conditional { body, .. } = node.work
                && let Some(body) = Arc::try_unwrap(body).ok().and_then(OnceLock::into_inner)
            {
                self.release_template(body);
            }
        }
    }

    /// Releases the addresses of a graph that will not be launched again.
    pub fn release_graph_addresses(&mut self, memory: &[(DevicePtr, PoolId)]) {
        self.memory.release_graph_addresses(memory, self.current_call.number);
    }

    /// Gives work to a stream: as a node if it captures, otherwise into its queue.
    pub fn submit(&mut self, stream: StreamId, work: Work, nanos: u64) -> Result<()> {
        let at = self.call_number();
        if self.captures.is_capturing(stream) {
            return self.captures.add_node(stream, work, nanos, at);
        }
        self.scheduler.enqueue(stream, work, nanos, Vec::new(), at);
        Ok(())
    }

    /// The operation that must end before there is room in a stream's queue, if that is as long as its limit. The queue
    /// of a paused stream has no limit: making room would run work that nothing waits for.
    pub fn operation_before_room(&self, stream: StreamId) -> Option<Epoch> {
        let queue = self.scheduler.streams.find(stream).filter(|queue| !queue.is_paused())?;
        queue.operation_before_room(self.config.queue_depth.max(1))
    }

    // Lookups.

    /// Checks that there is such a device.
    pub fn check_device(&self, device: DeviceId) -> Result<()> {
        let count = self.config.devices.len();
        if device.0 as usize >= count {
            let why = format!("{device} does not exist: the number of devices is {count}");
            return refuse(ErrorCode::InvalidDevice, why);
        }
        Ok(())
    }

    /// Checks that a device exists and works. Makes its context.
    pub fn use_device(&mut self, device: DeviceId) -> Result<()> {
        self.check_device(device)?;
        if let Some(code) = self.scheduler.failure(device) {
            return Err(unnamed(code));
        }
        self.contexts[device.0 as usize].used = true;
        Ok(())
    }

    /// The error for an id without an object. If the object was destroyed, that is a hazard.
    pub fn missing(&mut self, why: Missing, what: impl std::fmt::Display) -> DriverError {
        match why {
            Missing::Unknown => refusal(ErrorCode::InvalidHandle, format!("{what} does not exist")),
            Missing::Destroyed => {
                let CurrentCall { call, number } = self.current_call;
                let why = format!("{what} was destroyed before call #{number}");
                let operation = format!("{call} #{number} with {what}");
                self.hazards.add(HazardKind::UseAfterDestroy, operation, why.clone(), self.scheduler.now());
                refusal(ErrorCode::InvalidHandle, why)
            }
        }
    }

    /// The stream that `stream` names on this thread. It exists, and its device works.
    pub fn live_stream(&mut self, stream: StreamId) -> Result<StreamId> {
        let device = match self.scheduler.streams.live(stream) {
            Ok(state) => state.device,
            Err(why) => return Err(self.missing(why, stream)),
        };
        self.use_device(device)?;
        if stream != self.scheduler.streams.per_thread(device) {
            return Ok(stream);
        }
        Ok(self.scheduler.streams.of_this_thread(device))
    }

    /// An event whose device works.
    pub fn event(&mut self, event: EventId) -> Result<&mut Event> {
        let Some(device) = self.scheduler.events.get(event.0).map(|state| state.device) else {
            let why = self.scheduler.events.why_missing(event.0);
            return Err(self.missing(why, event));
        };
        self.use_device(device)?;
        Ok(self.scheduler.events.get_mut(event.0).expect("just found"))
    }

    pub fn template(&mut self, graph: GraphId) -> Result<Arc<Template>> {
        match self.graphs.template(graph).cloned() {
            Ok(template) => Ok(template),
            Err(why) => Err(self.missing(why, graph)),
        }
    }

    pub fn exec(&mut self, exec: GraphExecId) -> Result<Exec> {
        match self.graphs.exec(exec).cloned() {
            Ok(state) => Ok(state),
            Err(why) => Err(self.missing(why, exec)),
        }
    }

    /// A pool whose device works; also one that was destroyed while its memory is in use.
    pub fn pool(&mut self, pool: PoolId) -> Result<&mut Pool> {
        let Some(device) = self.memory.pool(pool).map(|state| state.device) else {
            let why = self.memory.why_pool_missing(pool);
            return Err(self.missing(why, pool));
        };
        self.use_device(device)?;
        Ok(self.memory.pool_mut(pool).expect("just found"))
    }

    /// The host implementation of a function.
    pub fn host_kernel(&mut self, function: FunctionId) -> Result<HostKernel> {
        match self.modules.host_kernel(function) {
            Ok(host) => Ok(host),
            Err(why) => Err(self.missing(why, function)),
        }
    }

    /// How long a kernel takes: by its own `nanos` function if it has one, else by the cost model.
    pub fn kernel_nanos(&self, kernel: &KernelWork) -> u64 {
        match kernel.host.nanos {
            Some(nanos) => nanos(&kernel.shape, &kernel.args),
            None => self.config.work.kernel_nanos(&kernel.shape),
        }
    }

    // What captures forbid.

    /// Invalidates captures and returns the error of the call that did.
    pub fn invalidate<T>(&mut self, captures: &[CaptureId], code: ErrorCode, why: &str) -> Result<T> {
        let log = (&mut self.hazards, self.scheduler.now());
        Err(self.captures.invalidate(captures, code, why, self.current_call, log))
    }

    /// Invalidates the capture that `stream` is in.
    pub fn invalidate_capture_of<T>(&mut self, stream: StreamId, code: ErrorCode, why: &str) -> Result<T> {
        let capture = self.captures.membership(stream).expect("a stream that captures").capture;
        self.invalidate(&[capture], code, why)
    }

    /// Refuses a possibly unsafe call while a capture forbids it to this thread, and invalidates that capture.
    pub fn forbid_unsafe_call(&mut self) -> Result<()> {
        let forbidding = self.captures.forbidding_unsafe_calls();
        self.refuse_during(&forbidding, "it may not be called while a stream captures")
    }

    /// Refuses a call that is illegal while any stream of the device captures.
    pub fn forbid_on_capturing_device(&mut self, device: DeviceId) -> Result<()> {
        let forbidding = self.captures.on_device(device);
        self.refuse_during(&forbidding, "it may not be called while any stream of the device captures")
    }

    fn refuse_during(&mut self, captures: &[CaptureId], why: &str) -> Result<()> {
        if captures.is_empty() {
            return Ok(());
        }
        let why = format!("{}: {why}", self.current_call.call);
        self.invalidate(captures, ErrorCode::StreamCaptureUnsupported, &why)
    }

    /// Refuses to query, or wait for, a stream that captures.
    pub fn forbid_wait(&mut self, stream: StreamId) -> Result<()> {
        if self.captures.is_capturing(stream) {
            let why = format!("{} on {stream}, which captures", self.current_call.call);
            return self.invalidate_capture_of(stream, ErrorCode::StreamCaptureUnsupported, &why);
        }
        self.forbid_unsafe_call()?;
        self.forbid_implicit_wait(stream)
    }

    /// The captures that work on `stream` would implicitly wait for: those of blocking streams, if it is the legacy
    /// default stream.
    pub fn implicit_captures(&self, stream: StreamId) -> Vec<CaptureId> {
        let state = self.scheduler.streams.get(stream);
        if state.kind != StreamKind::Legacy {
            return Vec::new();
        }
        self.captures.of_streams(|stream| self.scheduler.streams.is_blocking(stream, state.device))
    }

    /// Refuses work on the legacy default stream while a stream that it would wait for captures.
    pub fn forbid_implicit_wait(&mut self, stream: StreamId) -> Result<()> {
        if self.captures.len() == 0 {
            return Ok(());
        }
        let captures = self.implicit_captures(stream);
        if captures.is_empty() {
            return Ok(());
        }
        let call = self.current_call.call;
        let why = format!("{call} on the default stream would wait for a blocking stream that captures");
        self.invalidate(&captures, ErrorCode::StreamCaptureImplicit, &why)
    }
}
