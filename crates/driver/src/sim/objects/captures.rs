//! Stream captures by CUDA's rules, as measured on an H200: which streams are in which capture, what was captured,
//! what a capture forbids.

use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use rustc_hash::FxHashMap;

use super::call::CurrentCall;
use super::captured_callbacks::CapturedCallbacks;
use crate::sim::order::{HazardKind, HazardLog};
use crate::sim::refuse::{refusal, refuse};
use crate::sim::table::Table;
use crate::sim::work::{Template, TemplateNode, Work, frees, topology};
use crate::{
    CaptureId, CaptureMode, CaptureState, ConditionalId, DeviceId, DevicePtr, DriverError, ErrorCode, GraphTopology,
    HostCallback, NodeId, PoolId, Result, StreamId,
};

/// The place for the graph of a conditional node's body when its capture ends.
pub type BodySlot = Arc<OnceLock<Arc<Template>>>;

/// Addresses that captured nodes allocate, with their pools.
pub type GraphMemory = Vec<(DevicePtr, PoolId)>;

#[derive(Debug)]
pub struct Capture {
    pub origin: StreamId,
    pub device: DeviceId,
    pub mode: CaptureMode,
    pub thread: ThreadId,
    /// Which call invalidated it, and why.
    pub invalidated: Option<String>,
    nodes: Vec<TemplateNode>,
    /// The streams in it, the first included.
    streams: Vec<StreamId>,
    /// The last nodes of streams that were destroyed during the capture.
    last_of_destroyed: Vec<u32>,
    flags: Vec<(ConditionalId, u32)>,
    memory: GraphMemory,
    /// The capture around it, if it captures the body of a conditional node.
    parent: Option<CaptureId>,
    body: Option<BodySlot>,
}

impl Capture {
    /// For each node, whether it is one of `ends` or before one.
    fn up_to(&self, mut ends: Vec<u32>) -> Vec<bool> {
        let mut reached = vec![false; self.nodes.len()];
        while let Some(node) = ends.pop() {
            if !std::mem::replace(&mut reached[node as usize], true) {
                ends.extend(&self.nodes[node as usize].dependencies);
            }
        }
        reached
    }

    /// The graph, which is also put where a conditional node expects it.
    pub fn into_template(self) -> Arc<Template> {
        let Self { device, nodes, flags, memory, body, .. } = self;
        let template = Arc::new(Template { device, nodes, flags, memory });
        if let Some(body) = body {
            body.set(Arc::clone(&template)).expect("a body is captured once");
        }
        template
    }

    pub fn memory(&self) -> &[(DevicePtr, PoolId)] {
        &self.memory
    }
}

/// A stream's part in a capture.
#[derive(Clone, Debug)]
pub struct Membership {
    pub capture: CaptureId,
    /// The nodes that its next node depends on.
    pub dependencies: Vec<u32>,
}

/// The flag of a conditional node.
#[derive(Clone, Copy, Debug)]
pub struct Conditional {
    pub capture: CaptureId,
    /// Whether a node uses it.
    pub used: bool,
}

#[derive(Debug, Default)]
pub struct Captures {
    table: Table<Capture>,
    members: FxHashMap<StreamId, Membership>,
    conditionals: Table<Conditional>,
    /// The modes of threads that changed theirs.
    thread_modes: FxHashMap<ThreadId, CaptureMode>,
    last_node: u64,
    callbacks: CapturedCallbacks,
}

impl Captures {
    pub fn len(&self) -> usize {
        self.table.len()
    }

    pub fn exists(&self, capture: CaptureId) -> bool {
        self.table.get(capture.0).is_some()
    }

    /// A capture that exists.
    pub fn get(&self, capture: CaptureId) -> &Capture {
        self.table.get(capture.0).expect("a capture that was looked up")
    }

    fn get_mut(&mut self, capture: CaptureId) -> &mut Capture {
        self.table.get_mut(capture.0).expect("a capture that was looked up")
    }

    pub fn is_capturing(&self, stream: StreamId) -> bool {
        self.members.contains_key(&stream)
    }

    /// A stream's part in a capture, valid or not.
    pub fn membership(&self, stream: StreamId) -> Option<&Membership> {
        self.members.get(&stream)
    }

    /// A stream's part in a valid capture.
    pub fn valid_membership(&self, stream: StreamId) -> Result<Membership> {
        let Some(member) = self.members.get(&stream) else {
            return refuse(ErrorCode::IllegalState, format!("{stream} is not capturing"));
        };
        self.check_valid(member.capture)?;
        Ok(member.clone())
    }

    pub fn check_valid(&self, capture: CaptureId) -> Result<()> {
        match &self.get(capture).invalidated {
            None => Ok(()),
            Some(why) => refuse(ErrorCode::StreamCaptureInvalidated, why.clone()),
        }
    }

    /// The state of a stream.
    pub fn state(&self, stream: StreamId) -> CaptureState {
        match self.membership(stream) {
            None => CaptureState::None,
            Some(member) if self.get(member.capture).invalidated.is_some() => CaptureState::Invalidated,
            Some(member) => CaptureState::Active(member.capture),
        }
    }

    /// Begins a capture on a stream that is not capturing; with `parent`, of the body of a conditional node.
    pub fn begin(
        &mut self,
        stream: StreamId,
        device: DeviceId,
        mode: CaptureMode,
        parent: Option<(CaptureId, BodySlot)>,
    ) {
        let (parent, body) = parent.unzip();
        let capture = CaptureId(self.table.insert(Capture {
            origin: stream,
            device,
            mode,
            thread: std::thread::current().id(),
            invalidated: None,
            nodes: Vec::new(),
            streams: vec![stream],
            last_of_destroyed: Vec::new(),
            flags: Vec::new(),
            memory: Vec::new(),
            parent,
            body,
        }));
        self.members.insert(stream, Membership { capture, dependencies: Vec::new() });
    }

    /// Ends a capture for all its streams, and with it captures of bodies that have not ended. Returns it, and the
    /// memory of these bodies.
    pub fn end(&mut self, capture: CaptureId) -> (Capture, GraphMemory) {
        let mut bodies = Vec::new();
        let state = self.remove(capture, &mut bodies);
        (state, bodies)
    }

    fn remove(&mut self, capture: CaptureId, bodies: &mut GraphMemory) -> Capture {
        let state = self.table.remove(capture.0).expect("a capture that was looked up");
        self.callbacks.graph_destroyed();
        for id in self.table.ids() {
            if self.table.get(id).is_some_and(|other| other.parent == Some(capture)) {
                let body = self.remove(CaptureId(id), bodies);
                bodies.extend(body.memory);
            }
        }
        for stream in &state.streams {
            self.members.remove(stream);
        }
        // No more nodes can use its flags.
        for &(flag, _) in &state.flags {
            self.conditionals.remove(flag.0);
        }
        state
    }

    /// A stream is destroyed: the capture that began on it ends, any other loses a stream. Returns the memory of what
    /// ended.
    pub fn stream_destroyed(&mut self, stream: StreamId) -> GraphMemory {
        let Some(member) = self.members.remove(&stream) else { return Vec::new() };
        if self.get(member.capture).origin == stream {
            let (state, mut memory) = self.end(member.capture);
            memory.extend(state.memory);
            return memory;
        }
        let state = self.get_mut(member.capture);
        state.streams.retain(|&other| other != stream);
        state.last_of_destroyed.extend(member.dependencies);
        Vec::new()
    }

    /// Captures work of call number `at` as a node that depends on the stream's last nodes.
    pub fn add_node(&mut self, stream: StreamId, work: Work, nanos: u64, at: u64) -> Result<()> {
        let Membership { capture, dependencies } = self.valid_membership(stream)?;
        if let Work::Callback(callback) = &work {
            self.callbacks.add(Arc::clone(callback));
        }
        self.last_node += 1;
        let id = NodeId(self.last_node);
        let nodes = &mut self.get_mut(capture).nodes;
        nodes.push(TemplateNode { id, captured_at: at, work, nanos, dependencies, stream });
        let dependencies = vec![(nodes.len() - 1) as u32];
        self.members.insert(stream, Membership { capture, dependencies });
        Ok(())
    }

    /// A stream in no other capture waits for an event of a valid capture, and so joins it.
    pub fn join(&mut self, stream: StreamId, capture: CaptureId, dependencies: &[u32]) {
        let mut all = match self.members.remove(&stream) {
            Some(member) => member.dependencies,
            None => {
                self.get_mut(capture).streams.push(stream);
                Vec::new()
            }
        };
        // CUDA adds new dependencies and removes none, even where one edge then implies another.
        all.extend(dependencies);
        all.sort_unstable();
        all.dedup();
        self.members.insert(stream, Membership { capture, dependencies: all });
    }

    /// A stream whose captured work is not before the nodes `ends`, if there is one.
    pub fn unjoined(&self, capture: CaptureId, ends: &[u32]) -> Option<StreamId> {
        let state = self.get(capture);
        let reached = state.up_to(ends.to_vec());
        let is_unjoined = |node: &u32| !reached[*node as usize];
        if let Some(&node) = state.last_of_destroyed.iter().find(|node| is_unjoined(node)) {
            return Some(state.nodes[node as usize].stream);
        }
        let last = |stream: &StreamId| self.members.get(stream).map_or(&[][..], |member| &member.dependencies);
        state.streams.iter().copied().find(|stream| last(stream).iter().any(is_unjoined))
    }

    /// Invalidates captures by a call that fails with `code`. From now on what happens in them is refused until they
    /// are ended, and the refusals name that call.
    pub fn invalidate(
        &mut self,
        captures: &[CaptureId],
        code: ErrorCode,
        why: &str,
        by: CurrentCall,
        (hazards, now): (&mut HazardLog, u64),
    ) -> DriverError {
        let CurrentCall { call, number } = by;
        for &capture in captures {
            let state = self.get_mut(capture);
            if state.invalidated.is_none() {
                let thread = if state.thread == std::thread::current().id() { "" } else { " of another thread" };
                state.invalidated = Some(format!("invalidated by {call} (call #{number}{thread}): {code:?}: {why}"));
                let operation = format!("{call} #{number} in {capture} of {}", state.origin);
                hazards.add(HazardKind::CaptureInvalidated, operation, why.to_owned(), now);
            }
        }
        refusal(code, why)
    }

    /// The captures that forbid a possibly unsafe call to this thread.
    pub fn forbidding_unsafe_calls(&self) -> Vec<CaptureId> {
        // Nearly every call asks, and the thread's id and mode took half of a cheap call's time.
        if self.table.len() == 0 {
            return Vec::new();
        }
        let thread = std::thread::current().id();
        let mode = self.thread_mode();
        self.matching(|capture| match mode {
            CaptureMode::Relaxed => false,
            _ if capture.thread == thread => capture.mode != CaptureMode::Relaxed,
            CaptureMode::Global => capture.mode == CaptureMode::Global,
            CaptureMode::ThreadLocal => false,
        })
    }

    /// The captures of a device's streams.
    pub fn on_device(&self, device: DeviceId) -> Vec<CaptureId> {
        self.matching(|capture| capture.device == device)
    }

    fn matching(&self, predicate: impl Fn(&Capture) -> bool) -> Vec<CaptureId> {
        if self.table.len() == 0 {
            return Vec::new();
        }
        self.table.ids().into_iter().map(CaptureId).filter(|&id| predicate(self.get(id))).collect()
    }

    /// The captures that the selected streams are in, in the order of the streams.
    pub fn of_streams(&self, is_selected: impl Fn(StreamId) -> bool) -> Vec<CaptureId> {
        let selected = self.members.iter().filter(|(stream, _)| is_selected(**stream));
        let mut members: Vec<(StreamId, CaptureId)> =
            selected.map(|(&stream, member)| (stream, member.capture)).collect();
        members.sort_unstable();
        let mut captures: Vec<CaptureId> = members.into_iter().map(|(_, capture)| capture).collect();
        captures.dedup();
        captures
    }

    fn thread_mode(&self) -> CaptureMode {
        self.thread_modes.get(&std::thread::current().id()).copied().unwrap_or_default()
    }

    /// Sets the mode of the calling thread. Returns the mode before.
    pub fn exchange_thread_mode(&mut self, mode: CaptureMode) -> CaptureMode {
        let thread = std::thread::current().id();
        let before = match mode {
            CaptureMode::Global => self.thread_modes.remove(&thread),
            _ => self.thread_modes.insert(thread, mode),
        };
        before.unwrap_or_default()
    }

    pub fn node_ids(&self, capture: CaptureId, nodes: &[u32]) -> Vec<NodeId> {
        let state = self.get(capture);
        nodes.iter().map(|&node| state.nodes[node as usize].id).collect()
    }

    pub fn topology(&self, capture: CaptureId) -> GraphTopology {
        topology(&self.get(capture).nodes)
    }

    /// Creates the flag of a conditional node.
    pub fn create_flag(&mut self, capture: CaptureId, default: u32) -> ConditionalId {
        let flag = ConditionalId(self.conditionals.insert(Conditional { capture, used: false }));
        self.get_mut(capture).flags.push((flag, default));
        flag
    }

    pub fn conditional(&self, flag: ConditionalId) -> Option<Conditional> {
        self.conditionals.get(flag.0).copied()
    }

    /// A conditional node uses the flag.
    pub fn set_used(&mut self, flag: ConditionalId) {
        self.conditionals.get_mut(flag.0).expect("a flag that was looked up").used = true;
    }

    /// A node of the capture allocates `ptr`.
    pub fn add_memory(&mut self, capture: CaptureId, ptr: DevicePtr, pool: PoolId) {
        self.get_mut(capture).memory.push((ptr, pool));
    }

    /// Whether a node of the capture allocates `ptr`, and none frees it.
    pub fn is_live(&self, capture: CaptureId, ptr: DevicePtr) -> bool {
        let Capture { memory, nodes, .. } = self.get(capture);
        memory.iter().any(|&(allocated, _)| allocated == ptr) && !frees(nodes, ptr)
    }

    /// A graph was destroyed, perhaps with callbacks.
    pub fn graph_destroyed(&mut self) {
        self.callbacks.graph_destroyed();
    }

    /// Callbacks that are in no graph any more, to be dropped without the simulation's lock.
    pub fn take_unused_callbacks(&mut self) -> Vec<HostCallback> {
        self.callbacks.take_unused()
    }
}
