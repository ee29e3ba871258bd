//! The state of a simulated machine: everything that one lock protects. How work moves through it is in `engine.rs`;
//! what the calls of the contract do to it, in the files named after their subjects.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use rustc_hash::FxHashMap;

use super::api::{Handle, LibraryLog, Placements};
use super::config::SimConfig;
use super::memory::{Memory, PieceId};
use super::order::{Frontier, HazardKind, Stamp};
use super::table::{Missing, Table};
use super::work::{Callback, CapturedCallbacks, Due, ExecGraph, Kernels, Lane, Launch, Op, Template, TemplateNode};
use crate::{
    Call, CaptureId, CaptureMode, ConditionalId, DeviceId, DevicePtr, DriverError, ErrorCode, EventId, EventOptions,
    GraphExecId, GraphId, InstantiateOptions, KernelMirror, ModuleId, NodeId, PhysicalOptions, PoolAttribute, PoolId,
    Result, StreamId,
};

/// Whom a stream waits for besides its own work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// The device's default stream: waits for all blocking ones, and they for it.
    Legacy,
    Blocking,
    NonBlocking,
}

/// A stream.
#[derive(Debug)]
pub struct Stream {
    pub device: DeviceId,
    pub lane: u32,
    pub kind: StreamKind,
    pub priority: i32,
    pub raw: u64,
    pub queue: VecDeque<Op>,
    /// Whether the first of the queue has been started.
    pub running: bool,
    /// The number of its last piece of work.
    pub tail: u64,
    /// What its next work comes after, in other lanes.
    pub base: Arc<Frontier>,
    /// The version of the host's knowledge that is in `base`.
    pub host_version: u64,
    /// How often `tail` and `base` have changed, and how often they had when the host last waited for the whole device.
    pub changes: u64,
    pub changes_waited_for: u64,
    pub capture: Option<Joined>,
    /// Somebody else made it, and nobody has asked yet what it is: while it captures it does not say.
    pub untold: bool,
    /// Destroyed, and only here until its work is done.
    pub gone: bool,
    /// While it is held: the number of the last piece of work that may begin.
    pub held: Option<u64>,
}

impl Stream {
    /// What its next work comes after, to learn more.
    pub fn base_mut(&mut self) -> &mut Frontier {
        self.changes += 1;
        Arc::make_mut(&mut self.base)
    }
}

/// A stream's part in a capture.
#[derive(Clone, Debug)]
pub struct Joined {
    pub capture: CaptureId,
    /// The nodes that its next work depends on.
    pub deps: Vec<u32>,
}

/// What an event last marked.
#[derive(Clone, Debug)]
pub enum EventMark {
    Never,
    Recorded { stamp: Stamp, base: Arc<Frontier>, done: Option<u64> },
    Captured { capture: CaptureId, deps: Vec<u32> },
}

/// An event.
#[derive(Debug)]
pub struct Event {
    pub device: DeviceId,
    pub options: EventOptions,
    pub mark: EventMark,
}

/// A capture under way.
#[derive(Debug)]
pub struct Capture {
    pub origin: StreamId,
    pub device: DeviceId,
    pub mode: CaptureMode,
    pub thread: ThreadId,
    /// What broke it.
    pub broken: Option<String>,
    pub nodes: Vec<TemplateNode>,
    /// The streams in it, the first included.
    pub streams: Vec<StreamId>,
    /// What streams that were destroyed meanwhile had as their last nodes.
    pub orphans: Vec<u32>,
    pub flags: Vec<(ConditionalId, u32)>,
    pub memory: Vec<(DevicePtr, PoolId)>,
    /// The capture around it, if it is the body of a conditional node.
    pub parent: Option<CaptureId>,
    /// Where its graph goes then.
    pub body_of: Option<Arc<OnceLock<Arc<Template>>>>,
}

/// A template by id.
#[derive(Debug)]
pub struct Graph {
    /// Also held by its executables, and by its node if it is a conditional's body.
    pub template: Arc<Template>,
}

/// An executable by id.
#[derive(Debug)]
pub struct Exec {
    pub graph: Arc<ExecGraph>,
    /// The template, and its name, which must be alive for nodes of it to be named.
    pub template: Arc<Template>,
    pub of: GraphId,
    /// Kernels that were given other arguments since.
    pub kernels: Arc<Kernels>,
    pub options: InstantiateOptions,
    /// The last launch, which the next one comes after.
    pub last: Option<(Stamp, Arc<Frontier>)>,
}

/// A conditional node's flag.
#[derive(Clone, Copy, Debug)]
pub struct Conditional {
    pub capture: CaptureId,
    pub used: bool,
}

/// Physical memory by id.
#[derive(Clone, Copy, Debug)]
pub struct Physical {
    pub piece: PieceId,
    pub options: PhysicalOptions,
}

/// A pool.
#[derive(Clone, Debug)]
pub struct Pool {
    pub device: DeviceId,
    pub is_default: bool,
    pub attributes: [u64; 8],
    /// Destroyed, and only here until its memory has been freed.
    pub gone: bool,
}

impl Pool {
    pub fn get(&self, attribute: PoolAttribute) -> u64 {
        self.attributes[attribute as usize]
    }

    pub fn set(&mut self, attribute: PoolAttribute, value: u64) {
        self.attributes[attribute as usize] = value;
    }
}

/// A kernel by id.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    pub module: ModuleId,
    pub mirror: KernelMirror,
}

/// A device.
#[derive(Debug)]
pub struct Device {
    pub legacy: StreamId,
    /// What `stream_per_thread` gives; stands for another stream on each thread.
    pub per_thread: StreamId,
    /// The blocking streams, the threads' own included.
    pub blocking: Vec<StreamId>,
    /// All streams that have not been drained.
    pub streams: Vec<StreamId>,
    /// What is done in streams that are gone, and the host has not waited for.
    pub retired: Frontier,
    /// What is done in blocking streams that are gone, and the default stream has not come after yet.
    pub retired_blocking: Frontier,
    pub default_pool: PoolId,
    pub bytes_used: u64,
    pub retained: u32,
    /// Whether something has needed a context.
    pub context: bool,
    /// The code that every call gives once the device is broken.
    pub broken: Option<ErrorCode>,
}

/// The whole machine.
#[derive(Debug)]
pub struct World {
    pub config: SimConfig,
    /// Tells this machine's handles from another's.
    pub machine: u64,
    pub clock: u64,
    /// How many calls have been made.
    pub calls_made: u64,
    /// How many of each, in the order of [`Call::ALL`].
    pub calls_by_name: Vec<u64>,
    /// The number of the call that is under way. Work is named by the call that queued it.
    pub calls: u64,
    /// The call that is under way.
    pub call: Call,
    pub devices: Vec<Device>,
    pub streams: Table<Stream>,
    pub events: Table<Event>,
    pub captures: Table<Capture>,
    pub graphs: Table<Graph>,
    pub execs: Table<Exec>,
    pub conditionals: Table<Conditional>,
    pub physical: Table<Physical>,
    pub pools: Table<Pool>,
    pub modules: Table<&'static [KernelMirror]>,
    pub functions: Table<Function>,
    pub handles: Table<Handle>,
    pub library_log: LibraryLog,
    pub memory: Memory,
    pub placed: Placements,
    /// How often each piece of physical memory is held: by ids and by mappings.
    pub holds: FxHashMap<PieceId, u32>,
    /// The streams behind the threads' own default streams.
    pub thread_streams: FxHashMap<(ThreadId, DeviceId), StreamId>,
    /// For each pinned range, the device that it was pinned with.
    pub pinned_device: FxHashMap<u64, DeviceId>,
    pub thread_devices: FxHashMap<ThreadId, DeviceId>,
    pub thread_modes: FxHashMap<ThreadId, CaptureMode>,
    pub last_node: u64,
    // The engine's part.
    pub lanes: Vec<Lane>,
    pub spare_lanes: Vec<u32>,
    pub heap: BinaryHeap<Reverse<Due>>,
    /// How many streams are held.
    pub streams_held: usize,
    pub launches: FxHashMap<u64, Launch>,
    pub last_launch: u64,
    /// What the host knows to be done, and how often that has changed.
    pub host: Frontier,
    pub host_version: u64,
    /// Callbacks whose turn has come.
    pub callbacks: VecDeque<Callback>,
    pub captured_callbacks: CapturedCallbacks,
    /// How many callbacks run right now.
    pub callbacks_running: usize,
}

impl World {
    pub fn new(config: SimConfig, machine: u64) -> Self {
        let memory = Memory::new(config.devices.len(), config.max_hazards, config.check_uninitialized);
        let mut world = Self {
            machine,
            clock: 0,
            calls_made: 0,
            calls_by_name: vec![0; Call::ALL.len()],
            calls: 0,
            call: Call::DeviceCount,
            devices: Vec::new(),
            streams: Table::default(),
            events: Table::default(),
            captures: Table::default(),
            graphs: Table::default(),
            execs: Table::default(),
            conditionals: Table::default(),
            physical: Table::default(),
            pools: Table::default(),
            modules: Table::default(),
            functions: Table::default(),
            handles: Table::default(),
            library_log: LibraryLog::default(),
            memory,
            placed: Placements::new(config.devices.len()),
            holds: FxHashMap::default(),
            thread_streams: FxHashMap::default(),
            pinned_device: FxHashMap::default(),
            thread_devices: FxHashMap::default(),
            thread_modes: FxHashMap::default(),
            last_node: 0,
            // The host's own: no stream has the number 0.
            lanes: vec![Lane::new(StreamId(0))],
            spare_lanes: Vec::new(),
            heap: BinaryHeap::new(),
            streams_held: 0,
            launches: FxHashMap::default(),
            last_launch: 0,
            host: Frontier::default(),
            host_version: 0,
            callbacks: VecDeque::new(),
            captured_callbacks: CapturedCallbacks::default(),
            callbacks_running: 0,
            config,
        };
        for index in 0..world.config.devices.len() {
            world.add_device(DeviceId(index as u32));
        }
        world
    }

    fn add_device(&mut self, device: DeviceId) {
        let default_pool = PoolId(self.pools.insert(Pool::new(device, true)));
        self.devices.push(Device {
            legacy: StreamId(0),
            per_thread: StreamId(0),
            blocking: Vec::new(),
            streams: Vec::new(),
            retired: Frontier::default(),
            retired_blocking: Frontier::default(),
            default_pool,
            bytes_used: 0,
            retained: 0,
            context: false,
            broken: None,
        });
        let legacy = self.add_stream(device, StreamKind::Legacy, 0);
        let per_thread = self.add_stream(device, StreamKind::NonBlocking, 0);
        let state = &mut self.devices[device.0 as usize];
        state.legacy = legacy;
        state.per_thread = per_thread;
    }

    /// An error of the call that is under way.
    pub fn error(&self, code: ErrorCode) -> DriverError {
        DriverError::new(self.call.name(), code)
    }

    /// The same as a result, with more to say.
    pub fn fail<T>(&self, code: ErrorCode, detail: impl Into<String>) -> Result<T> {
        Err(self.error(code).with_detail(detail))
    }

    /// The device of that number, whatever its state.
    pub fn device_any(&self, device: DeviceId) -> Result<&Device> {
        self.devices.get(device.0 as usize).ok_or_else(|| {
            self.error(ErrorCode::InvalidDevice)
                .with_detail(format!("{device} is out of range: there are {}", self.devices.len()))
        })
    }

    /// The device of that number, with a context; an error if it is broken.
    pub fn device(&mut self, device: DeviceId) -> Result<&mut Device> {
        if let Some(code) = self.device_any(device)?.broken {
            return Err(self.error(code));
        }
        let state = &mut self.devices[device.0 as usize];
        state.context = true;
        Ok(state)
    }

    /// An error for an id that leads nowhere. If its object was destroyed, that is a hazard.
    pub fn missing(&mut self, why: Missing, what: String) -> DriverError {
        let error = self.error(ErrorCode::InvalidHandle);
        match why {
            Missing::Unknown => error.with_detail(format!("there is no {what}")),
            Missing::Destroyed => {
                let why = format!("{what} had been destroyed before call #{}", self.calls);
                let operation = format!("{} #{} with {what}", self.call, self.calls);
                self.memory.log.plain(HazardKind::UseAfterDestroy, operation, why.clone(), self.clock);
                error.with_detail(why)
            }
        }
    }

    /// The stream that `stream` stands for on this thread, alive and on a device that works.
    pub fn live_stream(&mut self, stream: StreamId) -> Result<StreamId> {
        let Some(state) = self.streams.get(stream.0).filter(|state| !state.gone) else {
            let why = match self.streams.get(stream.0) {
                Some(_) => Missing::Destroyed,
                None => self.streams.why_missing(stream.0),
            };
            return Err(self.missing(why, stream.to_string()));
        };
        let device = state.device;
        let per_thread = self.device(device)?.per_thread;
        if stream != per_thread {
            return Ok(stream);
        }
        let key = (std::thread::current().id(), device);
        if let Some(&own) = self.thread_streams.get(&key) {
            return Ok(own);
        }
        let own = self.add_stream(device, StreamKind::Blocking, 0);
        self.thread_streams.insert(key, own);
        Ok(own)
    }

    pub fn stream(&self, stream: StreamId) -> &Stream {
        self.streams.get(stream.0).expect("a stream that was looked up")
    }

    pub fn stream_mut(&mut self, stream: StreamId) -> &mut Stream {
        self.streams.get_mut(stream.0).expect("a stream that was looked up")
    }

    /// The event of that id, on a device that works.
    pub fn event(&mut self, event: EventId) -> Result<&mut Event> {
        let Some(device) = self.events.get(event.0).map(|state| state.device) else {
            let why = self.events.why_missing(event.0);
            return Err(self.missing(why, event.to_string()));
        };
        self.device(device)?;
        Ok(self.events.get_mut(event.0).expect("just found"))
    }

    pub fn graph(&mut self, graph: GraphId) -> Result<&Graph> {
        if self.graphs.get(graph.0).is_none() {
            let why = self.graphs.why_missing(graph.0);
            return Err(self.missing(why, graph.to_string()));
        }
        Ok(self.graphs.get(graph.0).expect("just found"))
    }

    pub fn exec(&mut self, exec: GraphExecId) -> Result<&mut Exec> {
        if self.execs.get(exec.0).is_none() {
            let why = self.execs.why_missing(exec.0);
            return Err(self.missing(why, exec.to_string()));
        }
        Ok(self.execs.get_mut(exec.0).expect("just found"))
    }

    pub fn pool(&mut self, pool: PoolId) -> Result<&mut Pool> {
        let Some(device) = self.pools.get(pool.0).map(|state| state.device) else {
            let why = self.pools.why_missing(pool.0);
            return Err(self.missing(why, pool.to_string()));
        };
        self.device(device)?;
        Ok(self.pools.get_mut(pool.0).expect("just found"))
    }

    pub fn new_node(&mut self) -> NodeId {
        self.last_node += 1;
        NodeId(self.last_node)
    }

    /// Lets the time pass that the current call takes for something of that size.
    pub fn spend(&mut self, bytes: u64) {
        let nanos = self.config.latencies.sized_nanos(self.call, bytes);
        self.advance_to(self.clock + nanos);
    }

    /// Takes `bytes` of a device's memory, if it has them.
    pub fn take_bytes(&mut self, device: DeviceId, bytes: u64) -> Result<()> {
        let config = &self.config.devices[device.0 as usize];
        let capacity = config.properties.bytes_total - config.bytes_context.min(config.properties.bytes_total);
        let used = self.devices[device.0 as usize].bytes_used;
        if bytes > capacity - used.min(capacity) {
            return self.fail(
                ErrorCode::OutOfMemory,
                format!("asked for {bytes} bytes on {device}, {} of {capacity} are free", capacity - used),
            );
        }
        self.devices[device.0 as usize].bytes_used += bytes;
        Ok(())
    }

    pub fn give_bytes(&mut self, device: DeviceId, bytes: u64) {
        self.devices[device.0 as usize].bytes_used -= bytes;
    }
}
