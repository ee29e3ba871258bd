//! Stream capture: beginning, ending, asking, and callbacks that are captured.
//!
//! The graph that a capture writes into is the capture's until it ends. Whoever uses it before that holds `graph_gate`,
//! and so does whoever may end it.

use std::ffi::c_uint;
use std::ptr;
use std::thread::{self, ThreadId};

use cudarc::driver::sys;
use cudarc::driver::sys::CUstreamCaptureMode_enum as Mode;
use rustc_hash::FxHashMap;
use warpool_driver::{
    Call, CaptureId, CaptureMode, CaptureState, Captures, DeviceId, ErrorCode, GraphId, GraphTopology, HostCallback,
    NodeId, Result, StreamId,
};

use crate::CudaDriver;
use crate::blame::Mark;
use crate::callback;
use crate::context::Context;
use crate::error::Site;
use crate::graph::{Graph, Owner};
use crate::stream::{Stream, StreamKind};
use crate::table::{Handle, lock};

/// A graph's handle, and a node's.
pub(crate) type GraphHandle = Handle<sys::CUgraph_st>;
pub(crate) type NodeHandle = Handle<sys::CUgraphNode_st>;

/// `CUstreamCaptureStatus` as numbers: a newer driver may know more of them.
pub(crate) const NOT_CAPTURING: u32 = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
const ACTIVE: u32 = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32;
const INVALIDATED: u32 = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as u32;

/// The captures that began through this driver, by the stream that they began on.
pub(crate) type Origins = FxHashMap<OriginKey, Origin>;

/// A stream as CUDA numbers them, which holds also if an adopted one is forgotten and adopted again. The threads' own
/// default streams have no such number, but a device and a thread.
type OriginKey = (u64, Option<(DeviceId, ThreadId)>);

/// One capture.
#[derive(Clone, Copy)]
pub(crate) struct Origin {
    /// The graph that it writes into.
    pub(crate) graph: GraphHandle,
    /// The graph with which that goes away: itself, or for the body of a conditional node the outermost one around it.
    pub(crate) root: GraphHandle,
    stream: Handle<sys::CUstream_st>,
    context: Context,
    /// When it began.
    since: Mark,
}

impl Origin {
    /// Whether it is of that context.
    pub(crate) fn is_of(&self, context: Context) -> bool {
        self.context == context
    }
}

/// A capture as the stream sees it.
pub(crate) struct Capture {
    /// The graph so far. Good while `graph_gate` is held.
    pub(crate) graph: GraphHandle,
    /// The nodes that the next work depends on.
    pub(crate) dependencies: Vec<NodeHandle>,
}

/// CUDA's name for a mode.
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
        let row = self.stream(site, stream)?;
        let _current = self.on_stream(site, &row)?;
        let _gate = lock(&self.graph_gate);
        let since = self.blame.mark();
        // SAFETY: the stream is live.
        site.check_harmless(unsafe { (self.api.stream_begin_capture)(row.raw.raw(), mode_of(mode)) })?;
        match self.capturing_graph(site, &row) {
            Some(graph) => self.capture_began(site, &row, graph, graph, since),
            None => {
                self.capture_dropped(&row);
                Ok(())
            }
        }
    }

    fn capture_end(&self, stream: StreamId) -> Result<GraphId> {
        let site = self.enter(Call::CaptureEnd)?;
        let row = self.stream(site, stream)?;
        let context = self.context_of_stream(site, &row)?;
        let _current = self.make_current(site, context)?;
        let _gate = lock(&self.graph_gate);
        self.end_bodies_of_capture(&row);
        let mut raw = ptr::null_mut();
        // SAFETY: the stream is live; `raw` takes the handle.
        let code = unsafe { (self.api.stream_end_capture)(row.raw.raw(), &raw mut raw) };
        let known = lock(&self.origins).get(&origin_key(&row)).copied();
        let broken = |code| match known {
            Some(origin) => site.explain(code, self.blame.explain(origin.since)),
            None => site.error(code),
        };
        match ErrorCode::from_number(code) {
            // The capture is broken but still under way, on the stream where it began.
            ErrorCode::StreamCaptureUnmatched => return Err(site.refused(ErrorCode::StreamCaptureUnmatched)),
            other if code != 0 => {
                self.capture_dropped(&row);
                let is_broken = other == ErrorCode::StreamCaptureInvalidated;
                return Err(if is_broken { broken(other) } else { site.error(other) });
            }
            _ => {}
        }
        let graph = GraphHandle::new(raw);
        let origin = lock(&self.origins).remove(&origin_key(&row)).filter(|origin| origin.graph == graph);
        if raw.is_null() {
            return Err(broken(ErrorCode::StreamCaptureInvalidated));
        }
        let root = origin.map_or(graph, |origin| origin.root);
        let owner = if root == graph { Owner::Id } else { Owner::Inside(root) };
        Ok(GraphId(self.graphs.insert(Graph::new(graph, context, owner))))
    }

    fn capture_state(&self, stream: StreamId) -> Result<CaptureState> {
        let site = self.enter(Call::CaptureState)?;
        let row = self.stream(site, stream)?;
        let _current = self.on_stream(site, &row)?;
        let (status, id, _) = self.capture_status(site, &row)?;
        Ok(match status {
            ACTIVE => CaptureState::Active(CaptureId(id)),
            INVALIDATED => CaptureState::Invalidated,
            _ => CaptureState::None,
        })
    }

    fn capture_dependencies(&self, stream: StreamId) -> Result<Vec<NodeId>> {
        let site = self.enter(Call::CaptureDependencies)?;
        let row = self.stream(site, stream)?;
        let _current = self.on_stream(site, &row)?;
        let _gate = lock(&self.graph_gate);
        let capture = self.capture(site, &row)?;
        Ok(capture.dependencies.into_iter().map(|node| NodeId(node.number())).collect())
    }

    fn capture_topology(&self, stream: StreamId) -> Result<GraphTopology> {
        let site = self.enter(Call::CaptureTopology)?;
        let row = self.stream(site, stream)?;
        let _current = self.on_stream(site, &row)?;
        let _gate = lock(&self.graph_gate);
        let capture = self.capture(site, &row)?;
        self.topology(site, capture.graph)
    }

    fn capture_mode_exchange(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let site = self.enter(Call::CaptureModeExchange)?;
        match self.exchange_mode(site, mode_of(mode) as u32)? {
            0 => Ok(CaptureMode::Global),
            1 => Ok(CaptureMode::ThreadLocal),
            2 => Ok(CaptureMode::Relaxed),
            other => Err(site.explain(ErrorCode::UnknownError, format!("CUDA knows a capture mode {other}"))),
        }
    }
}

/// The thread's own strictness, put aside until this is dropped.
pub(crate) struct Relaxed<'a> {
    driver: &'a CudaDriver,
    site: Site<'a>,
    before: u32,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.driver.exchange_mode(self.site, self.before) {
            tracing::warn!("the thread's capture mode could not be put back: {error}");
        }
    }
}

impl CudaDriver {
    /// Lets the calling thread make calls that captures would forbid, for as long as the result lives.
    pub(crate) fn relax<'a>(&'a self, site: Site<'a>) -> Result<Relaxed<'a>> {
        let before = self.exchange_mode(site, Mode::CU_STREAM_CAPTURE_MODE_RELAXED as u32)?;
        Ok(Relaxed { driver: self, site, before })
    }

    /// Swaps the calling thread's mode, by number.
    fn exchange_mode(&self, site: Site<'_>, mut mode: u32) -> Result<u32> {
        // SAFETY: `mode` is read and then takes the mode before; it has the size of the C enum.
        site.check(unsafe { (self.api.thread_exchange_stream_capture_mode)((&raw mut mode).cast()) })?;
        Ok(mode)
    }

    /// Whether a stream captures (by CUDA's number), under which id, into which graph.
    pub(crate) fn capture_status(&self, site: Site<'_>, stream: &Stream) -> Result<(u32, u64, GraphHandle)> {
        let (mut status, mut id, mut graph) = (0_u32, 0, ptr::null_mut());
        // SAFETY: the stream is live. `status` has the size of the C enum, `id` and `graph` take what they are for; the
        // rest is not wanted.
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
        Ok((status, id, Handle::new(graph)))
    }

    /// The graph that the stream captures into, if it does. A stream that cannot tell does not: the call that follows
    /// will say why.
    pub(crate) fn capturing_graph(&self, site: Site<'_>, stream: &Stream) -> Option<GraphHandle> {
        match self.capture_status(site, stream) {
            Ok((ACTIVE, _, graph)) => Some(graph),
            _ => None,
        }
    }

    /// What captures have against work on the stream: the code that CUDA gives to it. None if they have nothing.
    pub(crate) fn capture_trouble(&self, site: Site<'_>, stream: &Stream) -> Option<ErrorCode> {
        match self.capture_status(site, stream) {
            Ok((INVALIDATED, ..)) => Some(ErrorCode::StreamCaptureInvalidated),
            Err(error) if error.is_capture_forbidden() => Some(error.code),
            _ => None,
        }
    }

    /// Whether a capture, broken or not, has to end on the stream before another can begin.
    pub(crate) fn is_capturing(&self, site: Site<'_>, stream: &Stream) -> Result<bool> {
        Ok(self.capture_status(site, stream)?.0 != NOT_CAPTURING)
    }

    /// The capture under way. `IllegalState` if there is none, `StreamCaptureInvalidated` if it is broken.
    pub(crate) fn capture(&self, site: Site<'_>, stream: &Stream) -> Result<Capture> {
        let (mut status, mut graph, mut first, mut count) = (0_u32, ptr::null_mut(), ptr::null(), 0);
        // SAFETY: the stream is live. `status` has the size of the C enum, the others take what they are for; the id is
        // not wanted.
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
            // SAFETY: CUDA gave the array and its length, and keeps it until the next call that uses the stream; that
            // none comes now from another thread is asked of callers in the crate's docs.
            unsafe { std::slice::from_raw_parts(first, count) }
        };
        let dependencies = nodes.iter().map(|&node| Handle::new(node)).collect();
        Ok(Capture { graph: Handle::new(graph), dependencies })
    }

    /// Notes that `stream` captures into `graph`, which goes away with `root`, and did so from `since` on.
    pub(crate) fn capture_began(
        &self,
        site: Site<'_>,
        stream: &Stream,
        graph: GraphHandle,
        root: GraphHandle,
        since: Mark,
    ) -> Result<()> {
        let context = self.context_of_stream(site, stream)?;
        lock(&self.origins).insert(origin_key(stream), Origin { graph, root, stream: stream.raw, context, since });
        Ok(())
    }

    /// Notes that the capture which began on `stream` is over without a graph. The body of a conditional node stays, in
    /// the node; any other graph is gone.
    pub(crate) fn capture_dropped(&self, stream: &Stream) {
        let origin = lock(&self.origins).remove(&origin_key(stream));
        if let Some(origin) = origin.filter(|origin| origin.root == origin.graph) {
            self.forget_inside(origin.root);
        }
    }

    /// The graph with which one that is being captured goes away.
    pub(crate) fn root_of(&self, graph: GraphHandle) -> GraphHandle {
        lock(&self.origins).values().find(|origin| origin.graph == graph).map_or(graph, |origin| origin.root)
    }

    /// Ends the captures of bodies that are still under way inside the capture which began on `stream` and is about to
    /// end: if that leaves no graph, CUDA would go on to write into freed memory. The caller holds `graph_gate`.
    pub(crate) fn end_bodies_of_capture(&self, stream: &Stream) {
        let mut origins = lock(&self.origins);
        let Some(root) = origins.get(&origin_key(stream)).filter(|own| own.root == own.graph).map(|own| own.root)
        else {
            return;
        };
        let here = thread::current().id();
        origins.retain(|&(_, place), body| {
            if body.root != root || body.graph == root {
                return true;
            }
            // Another thread's own default stream is out of reach from here.
            if place.is_none_or(|(_, thread)| thread == here) {
                self.end_body(body);
            }
            false
        });
    }

    fn end_body(&self, body: &Origin) {
        let site = self.site(Call::CaptureEnd);
        let mut graph = ptr::null_mut();
        let ended = self.make_current(site, body.context).and_then(|_current| {
            // SAFETY: the stream is live: whoever destroys it holds the gate, and takes it out of `origins`. `graph`
            // takes the handle, which stays the node's. The capture ends on any thread, whatever the code (seen on an
            // H200).
            site.check(unsafe { (self.api.stream_end_capture)(body.stream.raw(), &raw mut graph) })
        });
        if let Err(error) = ended {
            tracing::debug!("the body of a conditional node was cut short: {error}");
        }
    }

    /// Captures a callback. The graph owns it from then on: it goes when the graph, its executables and their launches
    /// have gone.
    pub(crate) fn capture_callback(
        &self,
        site: Site<'_>,
        stream: &Stream,
        graph: GraphHandle,
        callback: HostCallback,
    ) -> Result<()> {
        const NO_SYNC: c_uint = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
        const MOVE: c_uint = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;
        let ticket = callback::keep(callback);
        let mut object = ptr::null_mut();
        // SAFETY: `object` takes the handle; the destructor takes its data for a number, whenever it runs.
        let code = unsafe {
            let destroy = Some(callback::on_graph_gone as unsafe extern "C" fn(_));
            (self.api.user_object_create)(&raw mut object, ticket.user_data(), destroy, 1, NO_SYNC)
        };
        if code != 0 {
            callback::forget(ticket);
            return site.check(code);
        }
        // SAFETY: the function takes its data for a number, whenever and however often it runs.
        let code =
            unsafe { (self.api.launch_host_func)(stream.raw.raw(), Some(callback::run_captured), ticket.user_data()) };
        if code != 0 {
            // SAFETY: the one reference is ours; giving it up runs the destructor.
            let released = unsafe { (self.api.user_object_release)(object, 1) };
            if released != 0 {
                tracing::warn!("a callback could not be dropped: {}", ErrorCode::from_number(released));
            }
            return site.check(code);
        }
        // If this fails the callback is never dropped: the node that calls it exists already. SAFETY: the graph is
        // being captured and cannot end while the caller holds `graph_gate`; it takes over our one reference.
        site.check(unsafe { (self.api.graph_retain_user_object)(graph.raw(), object, 1, MOVE) })
    }
}

/// Where the capture of a stream is noted.
fn origin_key(stream: &Stream) -> OriginKey {
    let place = (stream.kind == StreamKind::PerThread).then(|| (stream.device, thread::current().id()));
    (stream.serial, place)
}

#[cfg(test)]
mod tests {
    use warpool_driver::{Graphs, LaunchShape, Memory, Streams};

    use super::*;
    use crate::fake::{self, DEVICE};

    #[test]
    fn the_end_of_a_broken_capture_names_the_call_that_broke_it() -> Result<()> {
        let driver = fake::driver();
        let stream = driver.stream_create(DEVICE, Default::default())?;
        let function = fake::kernel(&driver, &[]);
        let end = || {
            let error = driver.capture_end(stream).expect_err("it is broken");
            assert_eq!(error.code, ErrorCode::StreamCaptureInvalidated);
            error.detail.unwrap_or_default().into_string()
        };
        let alloc = || driver.mem_alloc(DEVICE, 256).expect_err("it is forbidden");

        driver.capture_begin(stream, CaptureMode::Global)?;
        assert_eq!(alloc().code, ErrorCode::StreamCaptureUnsupported);
        let late = fake::launch(&driver, function, LaunchShape::ONE, &[], stream);
        assert_eq!(late.expect_err("it is broken").code, ErrorCode::StreamCaptureInvalidated);
        assert_eq!(end(), "most likely broken by mem_alloc: StreamCaptureUnsupported");

        // The next one is told nothing about the one before.
        driver.capture_begin(stream, CaptureMode::Global)?;
        fake::break_captures();
        assert!(end().starts_with("no call of this driver was refused"));

        driver.capture_begin(stream, CaptureMode::Global)?;
        alloc();
        alloc();
        assert!(end().ends_with("the first of 2 calls that were refused since it began"));

        // And all is well again.
        driver.capture_begin(stream, CaptureMode::Global)?;
        driver.graph_destroy(driver.capture_end(stream)?)
    }
}
