//! Stream capture on the simulated machine: CUDA's rules, as an H200 showed them.

use std::sync::Arc;

use crate::sim::SimDriver;
use crate::sim::memory::Region;
use crate::sim::order::HazardKind;
use crate::sim::work::{Template, TemplateNode, Work, topology};
use crate::sim::world::{Capture, Graph, Joined, StreamKind, World};
use crate::{
    Call, CaptureId, CaptureMode, CaptureState, Captures, DeviceId, DevicePtr, ErrorCode, GraphId, GraphTopology,
    NodeId, PoolId, Result, StreamId,
};

impl Captures for SimDriver {
    fn capture_begin(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        self.call(Call::CaptureBegin, |world| {
            let stream = world.live_stream(stream)?;
            if world.stream(stream).kind == StreamKind::Legacy {
                return world.fail(ErrorCode::StreamCaptureUnsupported, "the legacy default stream cannot capture");
            }
            if world.stream(stream).capture.is_some() {
                return world.fail(ErrorCode::IllegalState, format!("{stream} captures already"));
            }
            world.begin_capture(stream, mode);
            Ok(())
        })
    }

    fn capture_end(&self, stream: StreamId) -> Result<GraphId> {
        self.call(Call::CaptureEnd, |world| {
            let stream = world.live_stream(stream)?;
            let Some(joined) = world.stream(stream).capture.clone() else {
                return world.fail(ErrorCode::IllegalState, format!("{stream} captures nothing"));
            };
            let origin = world.capture(joined.capture).origin;
            if origin != stream {
                let why = format!("it began on {origin} and was ended on {stream}");
                return world.break_captures(&[joined.capture], ErrorCode::StreamCaptureUnmatched, why);
            }
            let unjoined = world.unjoined(joined.capture, &joined.deps);
            let capture = world.drop_capture(joined.capture);
            if capture.thread != std::thread::current().id() && capture.mode != CaptureMode::Relaxed {
                world.release_addresses(&capture.memory);
                return world.fail(ErrorCode::StreamCaptureWrongThread, "it began on another thread");
            }
            if let Some(why) = capture.broken {
                world.release_addresses(&capture.memory);
                return world.fail(ErrorCode::StreamCaptureInvalidated, why);
            }
            if let Some(lost) = unjoined {
                world.release_addresses(&capture.memory);
                let why = format!("the work of {lost} leads nowhere: {stream} did not wait for it");
                let operation = format!("capture_end #{} on {stream}", world.calls);
                world.memory.log.plain(HazardKind::CaptureUnjoined, operation, why.clone(), world.clock);
                return world.fail(ErrorCode::StreamCaptureUnjoined, why);
            }
            let Capture { device, nodes, flags, memory, body_of, .. } = capture;
            let template = Arc::new(Template { device, nodes, flags, memory });
            if let Some(place) = body_of {
                place.set(Arc::clone(&template)).expect("a body is captured once");
            }
            Ok(GraphId(world.graphs.insert(Graph { template })))
        })
    }

    fn capture_state(&self, stream: StreamId) -> Result<CaptureState> {
        self.call(Call::CaptureState, |world| {
            let stream = world.live_stream(stream)?;
            if !world.blocking_captures(stream).is_empty() {
                return world.fail(ErrorCode::StreamCaptureImplicit, "a blocking stream of the device captures");
            }
            Ok(match &world.stream(stream).capture {
                None => CaptureState::None,
                Some(joined) if world.capture(joined.capture).broken.is_some() => CaptureState::Invalidated,
                Some(joined) => CaptureState::Active(joined.capture),
            })
        })
    }

    fn capture_dependencies(&self, stream: StreamId) -> Result<Vec<NodeId>> {
        self.call(Call::CaptureDependencies, |world| {
            let joined = world.captured_by(stream)?;
            let nodes = &world.capture(joined.capture).nodes;
            Ok(joined.deps.iter().map(|&dep| nodes[dep as usize].id).collect())
        })
    }

    fn capture_topology(&self, stream: StreamId) -> Result<GraphTopology> {
        self.call(Call::CaptureTopology, |world| {
            let joined = world.captured_by(stream)?;
            Ok(topology(&world.capture(joined.capture).nodes))
        })
    }

    fn capture_mode_exchange(&self, mode: CaptureMode) -> Result<CaptureMode> {
        self.call(Call::CaptureModeExchange, |world| {
            let thread = std::thread::current().id();
            let before = match mode {
                CaptureMode::Global => world.thread_modes.remove(&thread),
                _ => world.thread_modes.insert(thread, mode),
            };
            Ok(before.unwrap_or_default())
        })
    }
}

impl Capture {
    /// For each node, whether it is one of `ends` or comes before one.
    fn up_to(&self, mut ends: Vec<u32>) -> Vec<bool> {
        let mut reached = vec![false; self.nodes.len()];
        while let Some(node) = ends.pop() {
            if !std::mem::replace(&mut reached[node as usize], true) {
                ends.extend(&self.nodes[node as usize].deps);
            }
        }
        reached
    }
}

impl World {
    pub fn capture(&self, capture: CaptureId) -> &Capture {
        self.captures.get(capture.0).expect("a stream captures into a live capture")
    }

    pub fn begin_capture(&mut self, stream: StreamId, mode: CaptureMode) -> CaptureId {
        let capture = CaptureId(self.captures.insert(Capture {
            origin: stream,
            device: self.stream(stream).device,
            mode,
            thread: std::thread::current().id(),
            broken: None,
            nodes: Vec::new(),
            streams: vec![stream],
            orphans: Vec::new(),
            flags: Vec::new(),
            memory: Vec::new(),
            parent: None,
            body_of: None,
        }));
        self.stream_mut(stream).capture = Some(Joined { capture, deps: Vec::new() });
        capture
    }

    /// Ends a capture for all its streams, and with it the bodies of its conditional nodes that are still under way.
    fn drop_capture(&mut self, capture: CaptureId) -> Capture {
        let state = self.captures.remove(capture.0).expect("a live capture");
        self.captured_callbacks.graph_gone();
        for id in self.captures.ids() {
            if self.captures.get(id).is_some_and(|other| other.parent == Some(capture)) {
                let body = self.drop_capture(CaptureId(id));
                self.release_addresses(&body.memory);
            }
        }
        for &stream in &state.streams {
            if let Some(stream) = self.streams.get_mut(stream.0) {
                stream.capture = None;
            }
        }
        // No more nodes will ask for its flags.
        for &(flag, _) in &state.flags {
            self.conditionals.remove(flag.0);
        }
        state
    }

    /// A stream is destroyed: the capture that began on it goes with it, any other loses a member.
    pub fn leave_capture(&mut self, stream: StreamId) {
        let Some(joined) = self.stream_mut(stream).capture.take() else { return };
        if self.capture(joined.capture).origin == stream {
            let capture = self.drop_capture(joined.capture);
            self.release_addresses(&capture.memory);
            return;
        }
        let capture = self.captures.get_mut(joined.capture.0).expect("a live capture");
        capture.streams.retain(|&other| other != stream);
        capture.orphans.extend(joined.deps);
    }

    /// What the stream captures into, if that is not broken.
    pub fn captured_by(&mut self, stream: StreamId) -> Result<Joined> {
        let stream = self.live_stream(stream)?;
        let Some(joined) = self.stream(stream).capture.clone() else {
            return self.fail(ErrorCode::IllegalState, format!("{stream} captures nothing"));
        };
        self.check_unbroken(joined.capture)?;
        Ok(joined)
    }

    pub fn check_unbroken(&self, capture: CaptureId) -> Result<()> {
        match &self.capture(capture).broken {
            None => Ok(()),
            Some(why) => self.fail(ErrorCode::StreamCaptureInvalidated, why.clone()),
        }
    }

    /// Writes work down as a node behind the stream's last ones.
    pub fn add_node(&mut self, stream: StreamId, work: Work, nanos: u64) -> Result<()> {
        let joined = self.stream(stream).capture.clone().expect("a stream that captures");
        self.check_unbroken(joined.capture)?;
        if let Work::Callback(callback) = &work {
            self.captured_callbacks.push(Arc::clone(callback));
        }
        let (id, at) = (self.new_node(), self.calls);
        let nodes = &mut self.captures.get_mut(joined.capture.0).expect("a live capture").nodes;
        nodes.push(TemplateNode { id, at, work, nanos, deps: joined.deps, stream });
        let deps = vec![(nodes.len() - 1) as u32];
        self.stream_mut(stream).capture = Some(Joined { capture: joined.capture, deps });
        Ok(())
    }

    /// A stream waits for an event of a capture, and so becomes part of it.
    pub fn join_capture(&mut self, stream: StreamId, capture: CaptureId, deps: &[u32]) -> Result<()> {
        if self.captures.get(capture.0).is_none() {
            return self.fail(ErrorCode::InvalidValue, "the event was last recorded in a capture that is over");
        }
        if self.stream(stream).kind == StreamKind::Legacy {
            let why = format!("{stream}, the default stream, would depend on it");
            return self.break_captures(&[capture], ErrorCode::StreamCaptureImplicit, why);
        }
        match self.stream(stream).capture.clone() {
            Some(other) if other.capture != capture => {
                let why = format!("{stream} would merge {} and {capture}", other.capture);
                self.break_captures(&[other.capture, capture], ErrorCode::StreamCaptureMerge, why)
            }
            joined => {
                self.check_unbroken(capture)?;
                if joined.is_none() {
                    self.captures.get_mut(capture.0).expect("a live capture").streams.push(stream);
                }
                let mut all = joined.map_or_else(Vec::new, |joined| joined.deps);
                // CUDA adds what is new and takes nothing away, also where one edge then says as much as two.
                all.extend(deps);
                all.sort_unstable();
                all.dedup();
                self.stream_mut(stream).capture = Some(Joined { capture, deps: all });
                Ok(())
            }
        }
    }

    /// A stream whose work does not lead back to the nodes `ends`, if there is one.
    fn unjoined(&self, capture: CaptureId, ends: &[u32]) -> Option<StreamId> {
        let state = self.capture(capture);
        let joined = state.up_to(ends.to_vec());
        let lost = |node: &u32| !joined[*node as usize];
        if let Some(&node) = state.orphans.iter().find(|node| lost(node)) {
            return Some(state.nodes[node as usize].stream);
        }
        let deps = |stream: StreamId| self.stream(stream).capture.as_ref().map_or(&[][..], |joined| &joined.deps);
        state.streams.iter().copied().find(|&stream| deps(stream).iter().any(lost))
    }

    /// Breaks captures, by a call that gives `code`. What happens in them from now on is refused until they are ended,
    /// and the refusals name that call.
    pub fn break_captures<T>(&mut self, captures: &[CaptureId], code: ErrorCode, why: String) -> Result<T> {
        for &capture in captures {
            let (call, calls, now) = (self.call, self.calls, self.clock);
            let state = self.captures.get_mut(capture.0).expect("a live capture");
            if state.broken.is_none() {
                let thread = if state.thread == std::thread::current().id() { "" } else { " of another thread" };
                state.broken = Some(format!("broken by {call}: {code:?}, call #{calls}{thread}: {why}"));
                let operation = format!("{call} #{calls} in {capture} of {}", state.origin);
                self.memory.log.plain(HazardKind::CaptureInvalidated, operation, why.clone(), now);
            }
        }
        self.fail(code, why)
    }

    /// Breaks what `stream` captures.
    pub fn break_capture_of<T>(&mut self, stream: StreamId, code: ErrorCode, why: String) -> Result<T> {
        let capture = self.stream(stream).capture.as_ref().expect("a stream that captures").capture;
        self.break_captures(&[capture], code, why)
    }

    /// Refuses a possibly unsafe call while a capture forbids it to this thread, and breaks that capture.
    pub fn forbid_guarded(&mut self) -> Result<()> {
        if self.captures.len() == 0 {
            return Ok(());
        }
        let me = std::thread::current().id();
        let mine = self.thread_modes.get(&me).copied().unwrap_or_default();
        let forbids = |capture: &Capture| match mine {
            CaptureMode::Relaxed => false,
            _ if capture.thread == me => capture.mode != CaptureMode::Relaxed,
            CaptureMode::Global => capture.mode == CaptureMode::Global,
            CaptureMode::ThreadLocal => false,
        };
        self.refuse_for(forbids, "while a stream captures it may not be called")
    }

    /// Refuses a call that is illegal while any stream of the device captures.
    pub fn forbid_on_capturing_device(&mut self, device: DeviceId) -> Result<()> {
        self.refuse_for(
            |capture| capture.device == device,
            "while any stream of the device captures it may not be called",
        )
    }

    fn refuse_for(&mut self, forbids: impl Fn(&Capture) -> bool, why: &str) -> Result<()> {
        let ids = self.captures.ids().into_iter().map(CaptureId);
        let broken: Vec<CaptureId> = ids.filter(|&id| forbids(self.capture(id))).collect();
        if broken.is_empty() {
            return Ok(());
        }
        let why = format!("{}: {why}", self.call);
        self.break_captures(&broken, ErrorCode::StreamCaptureUnsupported, why)
    }

    /// Refuses to ask about, or wait for, a stream whose work is only being written down.
    pub fn forbid_waiting(&mut self, stream: StreamId) -> Result<()> {
        if self.stream(stream).capture.is_some() {
            let why = format!("{} on {stream}, which captures", self.call);
            return self.break_capture_of(stream, ErrorCode::StreamCaptureUnsupported, why);
        }
        self.forbid_guarded()?;
        self.forbid_implicit(stream)
    }

    /// The captures of blocking streams that the default stream would have to wait for.
    fn blocking_captures(&self, stream: StreamId) -> Vec<CaptureId> {
        let state = self.stream(stream);
        if state.kind != StreamKind::Legacy || self.captures.len() == 0 {
            return Vec::new();
        }
        let blocking = &self.devices[state.device.0 as usize].blocking;
        let mut captures: Vec<CaptureId> = blocking
            .iter()
            .filter_map(|&other| self.stream(other).capture.as_ref().map(|joined| joined.capture))
            .collect();
        captures.dedup();
        captures
    }

    /// Refuses work on the default stream while a stream that it would wait for captures.
    pub fn forbid_implicit(&mut self, stream: StreamId) -> Result<()> {
        let broken = self.blocking_captures(stream);
        if broken.is_empty() {
            return Ok(());
        }
        let why = format!("{} on the default stream would wait for a blocking stream that captures", self.call);
        self.break_captures(&broken, ErrorCode::StreamCaptureImplicit, why)
    }

    /// An allocation as a node: its address is fixed now, its memory comes when the graph runs.
    pub fn capture_pool_alloc(&mut self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<DevicePtr> {
        let capture = self.captured_by(stream)?.capture;
        let Some(start) = self.memory.space.find(bytes, crate::sim::api::GRAIN) else {
            return self.fail(ErrorCode::OutOfMemory, "the address space is used up");
        };
        let ptr = DevicePtr(start);
        self.add_node(stream, Work::PoolAlloc { ptr, bytes, pool }, 0)?;
        self.memory.space.insert(start, bytes, Region::OfGraph { piece: None, pool, held: false });
        self.captures.get_mut(capture.0).expect("a live capture").memory.push((ptr, pool));
        Ok(ptr)
    }

    /// A free as a node: of memory that this graph allocates, or that was there before.
    pub fn capture_pool_free(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        let capture = self.captured_by(stream)?.capture;
        let own = self.capture(capture).memory.iter().any(|&(known, _)| known == ptr);
        let nodes = &self.capture(capture).nodes;
        let twice = nodes.iter().any(|node| matches!(node.work, Work::PoolFree { ptr: known } if known == ptr));
        if !own || twice {
            return self.fail(ErrorCode::InvalidValue, format!("{ptr} starts no live allocation of this graph"));
        }
        self.add_node(stream, Work::PoolFree { ptr }, 0)
    }
}
