//! What a check works at: a driver, a device, luck from the seed, and hands that make things and remember them.
//! Everything made here is taken away by [`Bench::clear`], see `owned.rs`.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::Options;
use super::kernels::{Conditional, Kit, Plain};
use super::luck::Luck;
use super::owned::{self, Owned};
use crate::expect::{Checked, Stop, expect_eq, need, skip};
use crate::launch::{launch_graph, launch_kernel};
use warpool_driver::{
    CaptureMode, CaptureState, DeviceId, DeviceProperties, DevicePtr, Driver, DriverError, ErrorCode, EventId,
    EventOptions, EventScope, FunctionId, GraphExecId, GraphId, HandleId, HostOptions, HostPtr, HostRange,
    InstantiateOptions, KernelArg, LaunchShape, Library, PoolId, StreamId, StreamOptions,
};

/// Where a check works.
pub struct Bench<'a> {
    /// The driver under test.
    pub driver: &'a dyn Driver,
    /// The device that the check works on.
    pub device: DeviceId,
    kit: &'a Kit<'a>,
    pub(super) luck: Luck,
    owned: Mutex<Vec<Owned>>,
    second: OnceLock<DeviceId>,
    /// Pages that were or may be pinned: they must outlive the clearing up.
    pages: Mutex<Vec<Vec<Page>>>,
}

/// One page of host memory, zeroed.
#[derive(Clone)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "drivers touch it, by its address")] [u8; 4096]);

/// How long a spinning kernel runs where something else must be seen to finish first. Long for a host thread, short for
/// a suite.
const LONG_NANOS: u64 = 150_000_000;

/// How long one runs where it only has to be late, so that a missing wait would show.
const SHORT_NANOS: u64 = 5_000_000;

/// A list in device memory that kernels append to; what it holds in the end is the order in which they ran.
#[derive(Clone, Copy, Debug)]
pub(super) struct Log {
    pub(super) ptr: DevicePtr,
    capacity: u32,
}

impl<'a> Bench<'a> {
    pub(super) fn new(driver: &'a dyn Driver, options: &Options, kit: &'a Kit<'a>, name: &[&str]) -> Self {
        Self {
            driver,
            device: options.device,
            kit,
            luck: Luck::new(options.seed, name),
            owned: Mutex::new(Vec::new()),
            second: OnceLock::new(),
            pages: Mutex::new(Vec::new()),
        }
    }

    /// Takes away everything that the check made and still holds.
    pub(super) fn clear(&self) -> Checked {
        let owned = std::mem::take(&mut *self.list());
        owned::clear(self, owned)
    }

    fn list(&self) -> MutexGuard<'_, Vec<Owned>> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers to take `thing` away.
    pub(super) fn own(&self, thing: Owned) {
        self.list().push(thing);
    }

    /// Forgets `thing`: the check took it away, or will.
    pub(super) fn disown(&self, thing: Owned) {
        let mut list = self.list();
        let at = list.iter().rposition(|each| *each == thing);
        list.remove(at.unwrap_or_else(|| panic!("a check disowned {thing:?}, which it did not own")));
    }

    // ---- the device

    /// What the device is and can do.
    pub fn properties(&self) -> Checked<DeviceProperties> {
        Ok(self.driver.device_properties(self.device)?)
    }

    /// A device number that no device has.
    pub(super) fn no_device(&self) -> Checked<DeviceId> {
        Ok(DeviceId(self.driver.device_count()?))
    }

    /// Another device, or a skip.
    pub(super) fn second_device(&self) -> Checked<DeviceId> {
        let count = self.driver.device_count()?;
        match (0..count).map(DeviceId).find(|device| *device != self.device) {
            Some(device) => Ok(*self.second.get_or_init(|| device)),
            None => skip("there is only one device"),
        }
    }

    /// Another device that this one can reach directly, or a skip.
    pub(super) fn peer(&self) -> Checked<DeviceId> {
        let peers = self.properties()?.peers;
        self.second_device()?;
        match peers.first() {
            Some(peer) => Ok(*peer),
            None => skip("no other device can be reached directly"),
        }
    }

    pub(super) fn second_device_used(&self) -> Option<DeviceId> {
        self.second.get().copied()
    }

    // ---- streams and events

    /// A non-blocking stream.
    pub fn stream(&self) -> Checked<StreamId> {
        self.stream_with(StreamOptions::default())
    }

    /// A stream that waits for the legacy default stream, and that one for it.
    pub(super) fn blocking_stream(&self) -> Checked<StreamId> {
        self.stream_with(StreamOptions { non_blocking: false, priority: 0 })
    }

    pub(super) fn stream_with(&self, options: StreamOptions) -> Checked<StreamId> {
        self.stream_on(self.device, options)
    }

    pub(super) fn stream_on(&self, device: DeviceId, options: StreamOptions) -> Checked<StreamId> {
        let stream = self.driver.stream_create(device, options)?;
        self.own(Owned::Stream(stream));
        Ok(stream)
    }

    pub(super) fn destroy_stream(&self, stream: StreamId) -> Checked {
        self.disown(Owned::Stream(stream));
        Ok(self.driver.stream_destroy(stream)?)
    }

    /// The legacy default stream.
    pub(super) fn default_stream(&self) -> Checked<StreamId> {
        let stream = self.driver.stream_default(self.device)?;
        self.own(Owned::Watched(stream));
        Ok(stream)
    }

    /// The calling thread's own default stream.
    pub(super) fn thread_stream(&self) -> Checked<StreamId> {
        let stream = self.driver.stream_per_thread(self.device)?;
        self.own(Owned::Watched(stream));
        Ok(stream)
    }

    pub(super) fn sync(&self, stream: StreamId) -> Checked {
        Ok(self.driver.stream_synchronize(stream)?)
    }

    /// The stream must still have work.
    #[track_caller]
    pub(super) fn expect_busy(&self, what: &str, stream: StreamId) -> Checked {
        match self.driver.stream_query(stream)? {
            false => Ok(()),
            true => crate::expect::expect(false, &format!("{what} still at work")),
        }
    }

    /// The stream must have none left.
    #[track_caller]
    pub(super) fn expect_idle(&self, what: &str, stream: StreamId) -> Checked {
        match self.driver.stream_query(stream)? {
            true => Ok(()),
            false => crate::expect::expect(false, &format!("{what} done")),
        }
    }

    /// An event without timing.
    pub(super) fn event(&self) -> Checked<EventId> {
        self.event_with(EventOptions::default())
    }

    /// An event for several processes, or a skip.
    pub fn interprocess_event(&self) -> Checked<EventId> {
        need(self.properties()?.ipc_events, "the device shares no events between processes")?;
        self.event_with(EventOptions { interprocess: true, ..EventOptions::default() })
    }

    pub(super) fn timed_event(&self) -> Checked<EventId> {
        self.event_with(EventOptions { timing: true, ..EventOptions::default() })
    }

    pub(super) fn event_with(&self, options: EventOptions) -> Checked<EventId> {
        let event = self.driver.event_create(self.device, options)?;
        self.own(Owned::Event(event));
        Ok(event)
    }

    pub(super) fn destroy_event(&self, event: EventId) -> Checked {
        self.disown(Owned::Event(event));
        Ok(self.driver.event_destroy(event)?)
    }

    /// Marks the work that is in `stream` now.
    pub fn record(&self, event: EventId, stream: StreamId) -> Checked {
        Ok(self.driver.event_record(event, stream, EventScope::Plain)?)
    }

    pub(super) fn wait(&self, stream: StreamId, event: EventId) -> Checked {
        Ok(self.driver.stream_wait_event(stream, event, EventScope::Plain)?)
    }

    /// Makes `later` wait for what is in `earlier` now.
    pub(super) fn order(&self, earlier: StreamId, later: StreamId) -> Checked {
        let event = self.event()?;
        self.record(event, earlier)?;
        self.wait(later, event)
    }

    // ---- memory

    pub(super) fn memory(&self, bytes: u64) -> Checked<DevicePtr> {
        self.memory_on(self.device, bytes)
    }

    pub(super) fn memory_on(&self, device: DeviceId, bytes: u64) -> Checked<DevicePtr> {
        let ptr = self.driver.mem_alloc(device, bytes)?;
        self.own(Owned::Memory(ptr));
        Ok(ptr)
    }

    pub(super) fn free_memory(&self, ptr: DevicePtr) -> Checked {
        self.disown(Owned::Memory(ptr));
        Ok(self.driver.mem_free(ptr)?)
    }

    /// Device memory that holds `bytes`.
    pub(super) fn memory_of(&self, bytes: &[u8]) -> Checked<DevicePtr> {
        let ptr = self.memory(bytes.len() as u64)?;
        self.driver.upload(self.device, ptr, bytes)?;
        Ok(ptr)
    }

    /// Device memory that holds `words`.
    pub(super) fn words_of(&self, words: &[u32]) -> Checked<DevicePtr> {
        self.memory_of(&to_bytes(words))
    }

    /// What is at `ptr` now. Waits for blocking streams only: wait for others first.
    pub fn bytes_at(&self, ptr: DevicePtr, n: usize) -> Checked<Vec<u8>> {
        let mut bytes = vec![0; n];
        self.driver.download(self.device, ptr, &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn words_at(&self, ptr: DevicePtr, n: usize) -> Checked<Vec<u32>> {
        Ok(to_words(&self.bytes_at(ptr, 4 * n)?))
    }

    /// Pinned host memory.
    pub(super) fn pinned(&self, bytes: u64) -> Checked<HostPtr> {
        let ptr = self.driver.host_alloc(self.device, bytes, HostOptions::default())?;
        self.own(Owned::Pinned(ptr));
        Ok(ptr)
    }

    /// Pinned host memory that holds `bytes`.
    pub(super) fn pinned_of(&self, bytes: &[u8]) -> Checked<HostPtr> {
        let ptr = self.pinned(bytes.len() as u64)?;
        self.driver.host_write(ptr, bytes)?;
        Ok(ptr)
    }

    pub(super) fn pinned_bytes(&self, ptr: HostPtr, n: usize) -> Checked<Vec<u8>> {
        let mut bytes = vec![0; n];
        self.driver.host_read(ptr, &mut bytes)?;
        Ok(bytes)
    }

    /// Ordinary host memory, page by page, which lives as long as the bench. Nobody touches it but through a driver.
    pub(super) fn pages(&self, n: usize) -> HostRange {
        let mut pages = vec![Page([0; 4096]); n];
        let ptr = HostPtr(pages.as_mut_ptr().expose_provenance() as u64);
        self.pages.lock().unwrap_or_else(PoisonError::into_inner).push(pages);
        // SAFETY: the pages are writable, nobody holds a reference into them, and they live until the bench is gone,
        // which comes after everything that the check registered was unregistered.
        unsafe { HostRange::new(ptr, 4096 * n as u64) }
    }

    /// Pins memory where it is.
    pub(super) fn register(&self, range: HostRange) -> Checked<HostPtr> {
        let ptr = range.ptr();
        self.driver.host_register(self.device, range, HostOptions::default())?;
        self.own(Owned::Registered(ptr));
        Ok(ptr)
    }

    /// A pool of the driver, or a skip.
    pub(super) fn pool(&self) -> Checked<PoolId> {
        if !self.properties()?.async_pools {
            return skip("the device has no stream-ordered pools");
        }
        let pool = self.driver.pool_create(self.device)?;
        self.own(Owned::Pool(pool));
        Ok(pool)
    }

    pub(super) fn pool_memory(&self, pool: PoolId, bytes: u64, stream: StreamId) -> Checked<DevicePtr> {
        let ptr = self.driver.pool_alloc(pool, bytes, stream)?;
        self.own(Owned::Memory(ptr));
        Ok(ptr)
    }

    pub(super) fn pool_free(&self, ptr: DevicePtr, stream: StreamId) -> Checked {
        self.disown(Owned::Memory(ptr));
        Ok(self.driver.pool_free(ptr, stream)?)
    }

    // ---- kernels

    pub(super) fn kernels(&self) -> Checked<Plain> {
        self.kit.plain()
    }

    /// The kernels for conditional nodes, or a skip.
    pub(super) fn conditional_kernels(&self) -> Checked<Conditional> {
        if !self.properties()?.conditional_nodes {
            return skip("graphs of this device have no conditional nodes");
        }
        self.kit.conditional()
    }

    pub(super) fn launch(&self, function: FunctionId, n: u32, args: &[KernelArg], stream: StreamId) -> Checked {
        Ok(launch_kernel(self.driver, function, LaunchShape::linear(n), args, stream)?)
    }

    /// Launches a kernel of one thread.
    pub(super) fn launch_one(&self, function: FunctionId, args: &[KernelArg], stream: StreamId) -> Checked {
        Ok(launch_kernel(self.driver, function, LaunchShape::ONE, args, stream)?)
    }

    /// Keeps `stream` at work for long: what else the check does will be done first.
    pub fn spin_long(&self, stream: StreamId) -> Checked {
        self.launch_one(self.kernels()?.spin, &[KernelArg::U64(LONG_NANOS)], stream)
    }

    /// Keeps `stream` at work for a while: who forgets to wait for it comes too early.
    pub(super) fn spin(&self, stream: StreamId) -> Checked {
        self.launch_one(self.kernels()?.spin, &[KernelArg::U64(SHORT_NANOS)], stream)
    }

    pub(super) fn add(&self, ptr: DevicePtr, n: u32, value: u32, stream: StreamId) -> Checked {
        self.launch(self.kernels()?.add_u32, n, &[ptr.into(), KernelArg::U32(n), KernelArg::U32(value)], stream)
    }

    /// An empty log. Loads the kernels too, so that this need not happen in the middle of a capture.
    pub(super) fn log(&self, capacity: u32) -> Checked<Log> {
        self.kernels()?;
        let ptr = self.words_of(&vec![0; capacity as usize + 1])?;
        Ok(Log { ptr, capacity })
    }

    pub(super) fn append(&self, log: Log, value: u32, stream: StreamId) -> Checked {
        self.launch_one(self.kernels()?.append, &[log.ptr.into(), KernelArg::U32(value)], stream)
    }

    /// What was appended so far, in order.
    pub(super) fn entries(&self, log: Log) -> Checked<Vec<u32>> {
        let words = self.words_at(log.ptr, log.capacity as usize + 1)?;
        let n = words[0].min(log.capacity) as usize;
        Ok(words[1..=n].to_vec())
    }

    #[track_caller]
    pub(super) fn expect_log(&self, log: Log, want: &[u32]) -> Checked {
        let got = self.entries(log)?;
        expect_eq("the order of work", got.as_slice(), want)
    }

    // ---- libraries

    /// A handle of a library, or a skip.
    pub(super) fn handle(&self, library: Library) -> Checked<HandleId> {
        self.handle_on(library, self.device)
    }

    pub(super) fn handle_on(&self, library: Library, device: DeviceId) -> Checked<HandleId> {
        match self.driver.library_create(library, device) {
            Ok(handle) => {
                self.own(Owned::Handle(handle));
                Ok(handle)
            }
            Err(error) if is_absent(&error) => skip(format!("{library} is not there: {error}")),
            Err(error) => Err(error.into()),
        }
    }

    /// A handle of a library, unless that is not there.
    pub(super) fn handle_if_there(&self, library: Library) -> Checked<Option<HandleId>> {
        match self.handle(library) {
            Err(Stop::Skipped(_)) => Ok(None),
            other => other.map(Some),
        }
    }

    pub(super) fn destroy_handle(&self, handle: HandleId) -> Checked {
        self.disown(Owned::Handle(handle));
        Ok(self.driver.library_destroy(handle)?)
    }

    // ---- captures and graphs

    /// Starts a capture that forbids nothing.
    pub(super) fn begin(&self, stream: StreamId) -> Checked {
        Ok(self.driver.capture_begin(stream, CaptureMode::Relaxed)?)
    }

    pub(super) fn end(&self, stream: StreamId) -> Checked<GraphId> {
        let graph = self.driver.capture_end(stream)?;
        self.own(Owned::Graph(graph));
        Ok(graph)
    }

    /// The graph of what `body` puts into `stream`.
    pub(super) fn captured(&self, stream: StreamId, body: impl FnOnce() -> Checked) -> Checked<GraphId> {
        self.begin(stream)?;
        body()?;
        self.end(stream)
    }

    pub(super) fn instantiate(&self, graph: GraphId) -> Checked<GraphExecId> {
        self.instantiate_with(graph, InstantiateOptions::default())
    }

    pub(super) fn instantiate_with(&self, graph: GraphId, options: InstantiateOptions) -> Checked<GraphExecId> {
        let exec = self.driver.graph_instantiate(graph, options)?;
        self.own(Owned::Exec(exec));
        Ok(exec)
    }

    /// Captures `body` and makes it ready.
    pub(super) fn ready(&self, stream: StreamId, body: impl FnOnce() -> Checked) -> Checked<GraphExecId> {
        self.instantiate(self.captured(stream, body)?)
    }

    /// Launches and waits.
    pub(super) fn replay(&self, exec: GraphExecId, stream: StreamId) -> Checked {
        launch_graph(self.driver, exec, stream)?;
        self.sync(stream)
    }

    #[track_caller]
    pub(super) fn expect_state(&self, stream: StreamId, want: Capturing) -> Checked {
        let got = match self.driver.capture_state(stream)? {
            CaptureState::None => Capturing::No,
            CaptureState::Active(_) => Capturing::Yes,
            CaptureState::Invalidated => Capturing::Broken,
        };
        expect_eq("the stream's capture", got, want)
    }

    // ---- threads

    /// Runs `body` on a thread that never touched the driver.
    pub(super) fn elsewhere<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| match scope.spawn(body).join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }
}

/// Whether a stream captures, without saying what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capturing {
    No,
    Yes,
    Broken,
}

/// Whether a library could not be used because it, or what is needed of it, is not installed.
fn is_absent(error: &DriverError) -> bool {
    matches!(error.code, ErrorCode::SharedObjectInitFailed | ErrorCode::SharedObjectSymbolNotFound)
}

pub(super) fn to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn to_words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&chunk| u32::from_le_bytes(chunk)).collect()
}
