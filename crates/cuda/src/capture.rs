//! Stream capture: begin, end, queries, captured callbacks.
//!
//! CUDA does not synchronize a `CUgraph`, not even one that is being captured: while one call reads or changes it
//! through the graph functions, no other may put work into the capture. So both hold `graph_lock`, and so does a call
//! that may end the capture. Work for a stream that does not capture takes no lock that other streams' work takes:
//! [`CudaDriver::begin_work`]. Nor may a stream be asked for its capture while that begins or ends: `capture_queries`.

use std::ffi::c_uint;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread::{self, ThreadId};

use cudarc::driver::sys;
use cudarc::driver::sys::CUstreamCaptureMode_enum as Mode;
use rustc_hash::FxHashMap;
use warpool_driver::{
    Call, CaptureId, CaptureMode, CaptureState, Captures, DeviceId, ErrorCode, GraphId, GraphTopology, HostCallback,
    NodeId, Result, StreamId,
};

use crate::CudaDriver;
use crate::callback;
use crate::capture_errors::ErrorCount;
use crate::error::CallSite;
use crate::graph::{Graph, GraphOwner};
use crate::graph_family::GraphFamily;
use crate::handle::{Context, CudaHandle, GraphHandle, NodeHandle, StreamHandle};
use crate::stream::{Stream, StreamKind, WorkLock};
use crate::sync::{lock, read, write};

/// `CUstreamCaptureStatus` as numbers: a newer driver may have more of them.
const NOT_CAPTURING: u32 = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
const ACTIVE: u32 = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32;
const INVALIDATED: u32 = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as u32;

/// The captures that began through this driver.
#[derive(Default)]
pub(crate) struct ActiveCaptures {
    by_origin: Mutex<FxHashMap<OriginKey, ActiveCapture>>,
    /// How many there are, including those that are just beginning.
    count: AtomicUsize,
    /// Whether captures may exist that began elsewhere.
    foreign: AtomicBool,
}

/// The stream that a capture began on, by CUDA's id, which also identifies an adopted stream that is forgotten and
/// adopted again. Per-thread default streams have no id, but a device and a thread.
type OriginKey = (u64, Option<(DeviceId, ThreadId)>);

/// A capture that began through this driver.
#[derive(Clone)]
pub(crate) struct ActiveCapture {
    /// The graph that it captures into.
    graph: GraphHandle,
    /// The graph that owns that one: itself, or for the body of a conditional node the outermost graph around it.
    root: GraphHandle,
    /// `None` for a body in a graph whose capture began elsewhere.
    family: Option<GraphFamily>,
    stream: StreamHandle,
    context: Context,
    /// How many errors were recorded when it began.
    since: ErrorCount,
}

impl ActiveCaptures {
    /// From now on captures may exist that began elsewhere.
    pub(crate) fn expect_foreign(&self) {
        self.foreign.store(true, Ordering::Release);
    }

    /// Whether any stream of this driver may be capturing.
    fn may_exist(&self) -> bool {
        self.foreign.load(Ordering::Acquire) || self.count.load(Ordering::Acquire) > 0
    }

    /// Counts a capture that is about to begin, until the result is dropped.
    pub(crate) fn beginning(&self) -> Beginning<'_> {
        self.count.fetch_add(1, Ordering::AcqRel);
        Beginning(self)
    }

    fn insert(&self, key: OriginKey, capture: ActiveCapture) {
        if lock(&self.by_origin).insert(key, capture).is_none() {
            self.count.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn remove(&self, key: &OriginKey) -> Option<ActiveCapture> {
        let removed = lock(&self.by_origin).remove(key);
        if removed.is_some() {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
        removed
    }

    fn get(&self, key: &OriginKey) -> Option<ActiveCapture> {
        lock(&self.by_origin).get(key).cloned()
    }

    /// The capture into `graph`.
    fn by_graph(&self, graph: GraphHandle) -> Option<ActiveCapture> {
        lock(&self.by_origin).values().find(|capture| capture.graph == graph).cloned()
    }

    /// Whether a stream of that context captures.
    pub(crate) fn exist_in(&self, context: Context) -> bool {
        lock(&self.by_origin).values().any(|capture| capture.context == context)
    }

    /// Removes the body captures inside the capture into `root`.
    fn remove_bodies_of(&self, root: GraphHandle) -> Vec<(OriginKey, ActiveCapture)> {
        let mut captures = lock(&self.by_origin);
        let bodies = captures.extract_if(|_, body| body.root == root && body.graph != root).collect::<Vec<_>>();
        self.count.fetch_sub(bodies.len(), Ordering::AcqRel);
        bodies
    }
}

/// A capture that is about to begin.
pub(crate) struct Beginning<'a>(&'a ActiveCaptures);

impl Drop for Beginning<'_> {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A capture as CUDA describes it for one of its streams.
pub(crate) struct CaptureInfo {
    /// The graph so far. Valid while `graph_lock` is held.
    pub(crate) graph: GraphHandle,
    /// The nodes that the stream's next work depends on.
    pub(crate) dependencies: Vec<NodeHandle>,
}

/// Held while work is put into a stream.
pub(crate) struct StreamWork<'a> {
    /// The graph that the stream captures into, which no other call uses meanwhile.
    capture: Option<(GraphHandle, MutexGuard<'a, ()>)>,
    _work_lock: WorkLock<'a>,
}

impl StreamWork<'_> {
    /// The graph that the work is captured into, if it is.
    pub(crate) fn captured_into(&self) -> Option<GraphHandle> {
        self.capture.as_ref().map(|&(graph, _)| graph)
    }
}

/// CUDA's number of a mode.
pub(crate) const fn mode_of(mode: CaptureMode) -> Mode {
    match mode {
        CaptureMode::Global => Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        CaptureMode::ThreadLocal => Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CaptureMode::Relaxed => Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    }
}

impl Captures for CudaDriver {
    fn capture_begin(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        let site = self.enter(Call::CaptureBegin)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        let _no_work = stream.lock_capture();
        let _graphs = lock(&self.graph_lock);
        let _beginning = self.captures.beginning();
        let since = self.capture_errors.count();
        let code = {
            let _no_queries = write(&self.capture_queries);
            // SAFETY: the stream is live.
            unsafe { (self.api.stream_begin_capture)(stream.raw.raw(), mode_of(mode)) }
        };
        site.check_harmless(code)?;
        match self.capturing_graph(site, &stream) {
            Some(graph) => self.capture_began(site, &stream, (graph, graph), Some(GraphFamily::default()), since),
            None => {
                self.capture_dropped(&stream);
                Ok(())
            }
        }
    }

    fn capture_end(&self, stream: StreamId) -> Result<GraphId> {
        let site = self.enter(Call::CaptureEnd)?;
        let stream = self.stream(site, stream)?;
        let context = self.context_of_stream(site, &stream)?;
        let _current = self.make_current(site, context)?;
        let _graphs = lock(&self.graph_lock);
        self.end_body_captures_of(&stream);
        let mut raw = ptr::null_mut();
        let code = {
            let _no_queries = write(&self.capture_queries);
            // SAFETY: the stream is live; CUDA writes the handle to `raw`.
            unsafe { (self.api.stream_end_capture)(stream.raw.raw(), &raw mut raw) }
        };
        let known = self.captures.get(&origin_key(&stream));
        let invalidated = |code| match &known {
            Some(capture) => site.explain(code, self.capture_errors.explain(capture.since)),
            None => site.error(code),
        };
        match ErrorCode::from_number(code) {
            // The capture is invalidated but still active, on the stream where it began.
            ErrorCode::StreamCaptureUnmatched => return Err(site.refused(ErrorCode::StreamCaptureUnmatched)),
            other if code != 0 => {
                self.capture_dropped(&stream);
                let was_invalidated = other == ErrorCode::StreamCaptureInvalidated;
                return Err(if was_invalidated { invalidated(other) } else { site.error(other) });
            }
            _ => {}
        }
        let graph = GraphHandle::new(raw);
        let capture = self.captures.remove(&origin_key(&stream)).filter(|capture| capture.graph == graph);
        if raw.is_null() {
            return Err(invalidated(ErrorCode::StreamCaptureInvalidated));
        }
        let (root, family) = capture.map_or((graph, None), |capture| (capture.root, capture.family));
        let owner = if root == graph { GraphOwner::Id } else { GraphOwner::Node { root } };
        Ok(GraphId(self.graphs.insert(Graph::new(graph, context, owner, family.unwrap_or_default()))))
    }

    fn capture_state(&self, stream: StreamId) -> Result<CaptureState> {
        let site = self.enter(Call::CaptureState)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        let (status, id, _) = self.capture_status(site, &stream)?;
        Ok(match status {
            ACTIVE => CaptureState::Active(CaptureId(id)),
            INVALIDATED => CaptureState::Invalidated,
            _ => CaptureState::None,
        })
    }

    fn capture_dependencies(&self, stream: StreamId) -> Result<Vec<NodeId>> {
        let site = self.enter(Call::CaptureDependencies)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        let _graphs = lock(&self.graph_lock);
        let capture = self.capture_info(site, &stream)?;
        Ok(capture.dependencies.into_iter().map(|node| NodeId(node.number())).collect())
    }

    fn capture_topology(&self, stream: StreamId) -> Result<GraphTopology> {
        let site = self.enter(Call::CaptureTopology)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        let _graphs = lock(&self.graph_lock);
        let capture = self.capture_info(site, &stream)?;
        self.topology(site, capture.graph)
    }

    fn capture_mode_exchange(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let site = self.enter(Call::CaptureModeExchange)?;
        match self.exchange_mode(site, mode_of(mode) as u32)? {
            0 => Ok(CaptureMode::Global),
            1 => Ok(CaptureMode::ThreadLocal),
            2 => Ok(CaptureMode::Relaxed),
            other => Err(site.explain(ErrorCode::UnknownError, format!("CUDA returned the capture mode {other}"))),
        }
    }
}

/// Relaxed capture mode of the calling thread until this is dropped; then the previous mode.
pub(crate) struct RelaxedMode<'a> {
    driver: &'a CudaDriver,
    site: CallSite<'a>,
    previous: u32,
}

impl Drop for RelaxedMode<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.driver.exchange_mode(self.site, self.previous) {
            tracing::warn!("the thread's capture mode could not be restored: {error}");
        }
    }
}

impl CudaDriver {
    /// Locks what must be locked while work is put into `stream`, whose work lock the caller took.
    pub(crate) fn begin_work<'a>(
        &'a self,
        site: CallSite<'_>,
        stream: &Stream,
        work_lock: WorkLock<'a>,
    ) -> StreamWork<'a> {
        let mut capture = None;
        if self.captures.may_exist()
            && stream.kind != StreamKind::Legacy
            && self.capturing_graph(site, stream).is_some()
        {
            // Queried again under the lock: only now the capture cannot end.
            let graphs = lock(&self.graph_lock);
            capture = self.capturing_graph(site, stream).map(|graph| (graph, graphs));
        }
        StreamWork { capture, _work_lock: work_lock }
    }

    /// The family of the graph that is captured into, if its capture began through this driver.
    pub(crate) fn family_of_capture(&self, graph: GraphHandle) -> Option<GraphFamily> {
        self.captures.by_graph(graph)?.family
    }

    /// Sets the calling thread's capture mode to relaxed until the result is dropped.
    pub(crate) fn relax_capture_mode<'a>(&'a self, site: CallSite<'a>) -> Result<RelaxedMode<'a>> {
        let previous = self.exchange_mode(site, Mode::CU_STREAM_CAPTURE_MODE_RELAXED as u32)?;
        Ok(RelaxedMode { driver: self, site, previous })
    }

    /// Sets the calling thread's mode, by number, and returns the previous one.
    fn exchange_mode(&self, site: CallSite<'_>, mut mode: u32) -> Result<u32> {
        // SAFETY: CUDA reads `mode` and writes the previous mode to it; it has the size of the C enum.
        site.check(unsafe { (self.api.thread_exchange_stream_capture_mode)((&raw mut mode).cast()) })?;
        Ok(mode)
    }

    /// A stream's capture status (CUDA's number), the capture's id and its graph.
    fn capture_status(&self, site: CallSite<'_>, stream: &Stream) -> Result<(u32, u64, GraphHandle)> {
        let (mut status, mut id, mut graph) = (0_u32, 0, ptr::null_mut());
        let _no_change = read(&self.capture_queries);
        // SAFETY: the stream is live. `status` has the size of the C enum; CUDA writes to the three variables, and
        // nothing where the pointer is null.
        site.check_harmless(unsafe {
            (self.api.stream_get_capture_info)(
                stream.raw.raw(),
                (&raw mut status).cast(),
                &raw mut id,
                &raw mut graph,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        })?;
        Ok((status, id, CudaHandle::new(graph)))
    }

    /// The graph that the stream captures into. `None` also if the query fails: the call that follows then reports why.
    fn capturing_graph(&self, site: CallSite<'_>, stream: &Stream) -> Option<GraphHandle> {
        match self.capture_status(site, stream) {
            Ok((ACTIVE, _, graph)) => Some(graph),
            _ => None,
        }
    }

    /// The code that CUDA returns for work on the stream because of a capture, if it does.
    pub(crate) fn capture_refusal(&self, site: CallSite<'_>, stream: &Stream) -> Option<ErrorCode> {
        match self.capture_status(site, stream) {
            Ok((INVALIDATED, ..)) => Some(ErrorCode::StreamCaptureInvalidated),
            Err(error) if error.is_capture_forbidden() => Some(error.code),
            _ => None,
        }
    }

    /// Whether the stream captures, validly or not.
    pub(crate) fn is_capturing(&self, site: CallSite<'_>, stream: &Stream) -> Result<bool> {
        Ok(self.capture_status(site, stream)?.0 != NOT_CAPTURING)
    }

    /// The stream's capture. `IllegalState` if there is none, `StreamCaptureInvalidated` if it is invalid. The caller
    /// holds `graph_lock`.
    pub(crate) fn capture_info(&self, site: CallSite<'_>, stream: &Stream) -> Result<CaptureInfo> {
        let (mut status, mut graph, mut first, mut count) = (0_u32, ptr::null_mut(), ptr::null(), 0);
        let _no_change = read(&self.capture_queries);
        // SAFETY: the stream is live. `status` has the size of the C enum; CUDA writes to the four variables, and
        // nothing where the pointer is null.
        site.check_harmless(unsafe {
            (self.api.stream_get_capture_info)(
                stream.raw.raw(),
                (&raw mut status).cast(),
                ptr::null_mut(),
                &raw mut graph,
                &raw mut first,
                &raw mut count,
            )
        })?;
        match status {
            ACTIVE => {}
            INVALIDATED => return Err(site.error(ErrorCode::StreamCaptureInvalidated)),
            _ => return Err(site.error(ErrorCode::IllegalState)),
        }
        let nodes = if first.is_null() || count == 0 {
            &[]
        } else {
            // SAFETY: CUDA returned the array and its length, and keeps it until the next call on the stream. Calls
            // that put work into the stream wait for `graph_lock`; for others the maker of a `ForeignStream` promises
            // it.
            unsafe { std::slice::from_raw_parts(first, count) }
        };
        let dependencies = nodes.iter().map(|&node| CudaHandle::new(node)).collect();
        Ok(CaptureInfo { graph: CudaHandle::new(graph), dependencies })
    }

    /// Registers that `stream` captures into a graph, which is owned by a root graph, and did so from `since` on.
    pub(crate) fn capture_began(
        &self,
        site: CallSite<'_>,
        stream: &Stream,
        (graph, root): (GraphHandle, GraphHandle),
        family: Option<GraphFamily>,
        since: ErrorCount,
    ) -> Result<()> {
        let context = self.context_of_stream(site, stream)?;
        let capture = ActiveCapture { graph, root, family, stream: stream.raw, context, since };
        self.captures.insert(origin_key(stream), capture);
        Ok(())
    }

    /// Registers that the capture which began on `stream` ended without a graph. The body of a conditional node stays
    /// in the node; any other graph is destroyed.
    pub(crate) fn capture_dropped(&self, stream: &Stream) {
        let capture = self.captures.remove(&origin_key(stream));
        if let Some(capture) = capture.filter(|capture| capture.root == capture.graph) {
            self.forget_graphs_inside(capture.root);
        }
    }

    /// The graph that owns one that is being captured.
    pub(crate) fn root_of(&self, graph: GraphHandle) -> GraphHandle {
        self.captures.by_graph(graph).map_or(graph, |capture| capture.root)
    }

    /// Ends the body captures inside the capture which began on `stream` and is about to end: without a graph around
    /// them CUDA would write into freed memory. The caller holds `graph_lock`.
    pub(crate) fn end_body_captures_of(&self, stream: &Stream) {
        let capture = self.captures.get(&origin_key(stream));
        let Some(root) = capture.filter(|own| own.root == own.graph).map(|own| own.root) else { return };
        for (_, body) in self.captures.remove_bodies_of(root) {
            self.end_body_capture(&body);
        }
    }

    fn end_body_capture(&self, body: &ActiveCapture) {
        let site = self.site(Call::CaptureEnd);
        let mut graph = ptr::null_mut();
        let ended = self.make_current(site, body.context).and_then(|_current| {
            let _no_queries = write(&self.capture_queries);
            // SAFETY: the stream is live: a call that destroys it holds `graph_lock` and removes its capture. CUDA
            // writes the graph's handle to `graph`; the node keeps the graph. The capture ends on any thread, whatever
            // the code (seen on an H200).
            site.check(unsafe { (self.api.stream_end_capture)(body.stream.raw(), &raw mut graph) })
        });
        if let Err(error) = ended {
            tracing::debug!("the capture of a conditional node's body was ended early: {error}");
        }
    }

    /// Captures a callback. The graph owns it from then on: it is dropped when the graph, its executables and their
    /// launches are destroyed. The caller holds `graph_lock`.
    pub(crate) fn capture_callback(
        &self,
        site: CallSite<'_>,
        stream: &Stream,
        graph: GraphHandle,
        callback: HostCallback,
    ) -> Result<()> {
        const NO_SYNC: c_uint = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
        const MOVE: c_uint = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;
        let id = callback::register(callback);
        let mut object = ptr::null_mut();
        // SAFETY: CUDA writes the handle to `object`; the destructor only takes its data as a number, whenever it runs.
        let code = unsafe {
            let destroy = Some(callback::on_graph_gone as unsafe extern "C" fn(_));
            (self.api.user_object_create)(&raw mut object, id.user_data(), destroy, 1, NO_SYNC)
        };
        if code != 0 {
            callback::unregister(id);
            return site.check(code);
        }
        // SAFETY: the stream is live; the function only takes its data as a number, whenever and however often it runs.
        let code =
            unsafe { (self.api.launch_host_func)(stream.raw.raw(), Some(callback::run_captured), id.user_data()) };
        if code != 0 {
            // SAFETY: the only reference is ours; releasing it runs the destructor.
            let released = unsafe { (self.api.user_object_release)(object, 1) };
            if released != 0 {
                tracing::warn!("a callback could not be dropped: {}", ErrorCode::from_number(released));
            }
            return site.check(code);
        }
        // If this fails the callback is never dropped: the node that calls it exists already. SAFETY: the graph is
        // being captured, and the capture cannot end while the caller holds `graph_lock`; it takes over our reference.
        site.check(unsafe { (self.api.graph_retain_user_object)(graph.raw(), object, 1, MOVE) })
    }
}

fn origin_key(stream: &Stream) -> OriginKey {
    let thread = (stream.kind == StreamKind::PerThread).then(|| (stream.device, thread::current().id()));
    (stream.serial, thread)
}

#[cfg(test)]
mod tests {
    use warpool_driver::{Graphs, LaunchShape, Memory, Streams};

    use super::*;
    use crate::fake_cuda::{self, DEVICE};

    #[test]
    fn ending_an_invalidated_capture_names_the_call_that_invalidated_it() -> Result<()> {
        let driver = fake_cuda::driver();
        let stream = driver.stream_create(DEVICE, Default::default())?;
        let function = fake_cuda::kernel(&driver, &[]);
        let end = || {
            let error = driver.capture_end(stream).expect_err("it is invalid");
            assert_eq!(error.code, ErrorCode::StreamCaptureInvalidated);
            error.detail.unwrap_or_default().into_string()
        };
        let alloc = || driver.mem_alloc(DEVICE, 256).expect_err("captures forbid it");

        driver.capture_begin(stream, CaptureMode::Global)?;
        assert_eq!(alloc().code, ErrorCode::StreamCaptureUnsupported);
        let late = fake_cuda::launch(&driver, function, LaunchShape::ONE, &[], stream);
        assert_eq!(late.expect_err("it is invalid").code, ErrorCode::StreamCaptureInvalidated);
        assert_eq!(end(), "most likely invalidated by mem_alloc: StreamCaptureUnsupported");

        // The next capture does not name earlier calls.
        driver.capture_begin(stream, CaptureMode::Global)?;
        fake_cuda::invalidate_captures();
        assert!(end().starts_with("no call of this driver was refused"));

        driver.capture_begin(stream, CaptureMode::Global)?;
        alloc();
        alloc();
        assert!(end().ends_with("the first of 2 calls that were refused since it began"));

        driver.capture_begin(stream, CaptureMode::Global)?;
        driver.graph_destroy(driver.capture_end(stream)?)
    }
}
