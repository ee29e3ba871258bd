//! Generators in captures: what a graph consumes is counted while it is captured, and where it starts is told anew at
//! every replay.
//!
//! A graph cannot have its seed and offset in it. So each stream that draws numbers in a capture gets a slot of 16
//! bytes (seed, offset), and at its first draw a *head*: a kernel of one thread that writes both into the slot, from
//! its own arguments. Kernels that draw read the slot. Before a replay the arguments of the heads are exchanged in the
//! executable, which costs the host a fraction of what writing the slot would; launches under way keep theirs, so
//! replays on several streams do not disturb each other.
//!
//! The rule: `used` of a capture is locked for its books alone. While a head is captured its own lock is held
//! ([`Heads`]), over driver calls: which node it became is asked right after, and no second head may come between.

use std::sync::{Arc, Mutex};

use warpool_driver::{DevicePtr, Driver, FunctionId, GraphExecId, NodeId, StreamId};

use super::kernels::{HEAD, SOURCE};
use super::state::{State, Taken};
use super::{GeneratorError, Reservation};
use crate::capture::{CaptureRecord, Site};
use crate::memory::{DeviceBlock, Request};
use crate::{Result, Stream, launch, lock};

/// A slot: seed and offset, 8 bytes each.
const SLOT_BYTES: u64 = 16;

/// Held by whoever captures a head. Shared by all generators of a capture.
pub(crate) type Heads = Arc<Mutex<()>>;

/// What one generator's state came to in one capture: how many numbers, and where replays say where they start.
pub(crate) struct GeneratorInCapture {
    state: Arc<State>,
    /// How far the whole graph advances it.
    consumed: u64,
    pub(super) heads: Vec<Head>,
    /// What the last replay took.
    taken: Mutex<Option<Taken>>,
}

/// What tells one stream's kernels where they stand.
pub(super) struct Head {
    stream: StreamId,
    node: NodeId,
    function: FunctionId,
    slot: DeviceBlock,
}

impl GeneratorInCapture {
    /// Before a replay: gives the heads the current seed and offset, and advances the generator by what the graph
    /// consumes. The caller sees to it that no other thread launches the executable between this and its own launch. If
    /// it fails, the generator is as before.
    pub(crate) fn prepare(&self, driver: &dyn Driver, exec: GraphExecId) -> Result<()> {
        if self.consumed == 0 {
            return Ok(());
        }
        let taken = self.state.take(self.consumed);
        for head in &self.heads {
            let start = (taken.seed, taken.offset);
            if let Err(error) = launch::set_seed(driver, exec, head.node, head.function, &head.slot, start) {
                self.state.take_back(taken);
                return Err(error.into());
            }
        }
        *lock(&self.taken) = Some(taken);
        Ok(())
    }

    /// Whether one of its slots is there.
    pub(crate) fn has_slot(&self, ptr: DevicePtr) -> bool {
        self.heads.iter().any(|head| head.slot.ptr() == ptr)
    }

    /// Notes that replays run on `stream`: whoever gets a slot after the graph waits for them.
    pub(crate) fn record_use(&self, stream: &Stream) -> Result<()> {
        self.heads.iter().try_for_each(|head| head.slot.record_use(stream))
    }

    /// The launch failed: takes back the advance, unless somebody drew numbers meanwhile.
    pub(crate) fn take_back(&self) {
        if let Some(taken) = lock(&self.taken).take() {
            self.state.take_back(taken);
        }
    }
}

/// Counts `increment` numbers, a multiple of 4, to the graph that `stream` captures for.
pub(super) fn draw(site: &Site, state: &Arc<State>, stream: &Stream, increment: u64) -> Result<Reservation> {
    if site.in_body {
        return Err(GeneratorError::InBody.into());
    }
    let record = &*site.record;
    if let Some(drawn) = draw_behind_head(record, state, stream.id(), increment)? {
        return Ok(drawn);
    }
    // All that may call back into the caller's code, or take long, before the lock.
    let instance = stream.instance();
    let function = instance.state(stream.device_id()).kernels.get(&**instance.driver(), &SOURCE, HEAD)?;
    let slot = DeviceBlock::allocate(&record.allocator, slot_request(record, stream))?;
    let heads = Arc::clone(&lock(&record.used).heads);
    let _alone = lock(&heads);
    if let Some(drawn) = draw_behind_head(record, state, stream.id(), increment)? {
        return Ok(drawn);
    }
    launch::write_seed(&**instance.driver(), function, &slot, state.get(), stream.id())?;
    let node = match instance.driver().capture_dependencies(stream.id()) {
        Ok(nodes) if nodes.len() == 1 => nodes[0],
        other => {
            // The head is in the graph, and will write to its slot: that must stay as long.
            record.keep(Arc::new(slot));
            other?;
            return Err(GeneratorError::SeedKernelLost { stream: stream.id() }.into());
        }
    };
    let mut used = lock(&record.used);
    let head = Head { stream: stream.id(), node, function, slot };
    match used.generators.iter_mut().find(|entry| Arc::ptr_eq(&entry.state, state)) {
        Some(entry) => entry.heads.push(head),
        None => {
            let state = Arc::clone(state);
            used.generators.push(GeneratorInCapture { state, consumed: 0, heads: vec![head], taken: Mutex::default() });
        }
    }
    drop(used);
    Ok(draw_behind_head(record, state, stream.id(), increment)?.expect("the head was captured just now"))
}

/// Counts the numbers, if the stream has its head already.
fn draw_behind_head(
    record: &CaptureRecord,
    state: &Arc<State>,
    stream: StreamId,
    increment: u64,
) -> Result<Option<Reservation>> {
    let mut used = lock(&record.used);
    let Some(entry) = used.generators.iter_mut().find(|entry| Arc::ptr_eq(&entry.state, state)) else {
        return Ok(None);
    };
    let intragraph = entry.consumed;
    let after = intragraph.checked_add(increment).ok_or(GeneratorError::Increment { increment })?;
    let Some(head) = entry.heads.iter().find(|head| head.stream == stream) else { return Ok(None) };
    entry.consumed = after;
    Ok(Some(Reservation::Captured { slot: head.slot.ptr(), intragraph }))
}

/// Takes back what was counted last, unless others have drawn since.
pub(super) fn take_back(record: &CaptureRecord, state: &Arc<State>, intragraph: u64, increment: u64) {
    let mut used = lock(&record.used);
    let entry = used.generators.iter_mut().find(|entry| Arc::ptr_eq(&entry.state, state));
    if let Some(entry) = entry.filter(|entry| entry.consumed == intragraph.wrapping_add(increment)) {
        entry.consumed = intragraph;
    }
}

/// The graph's pool is on the graph's device; a stream of another device gets its slot from wherever it is routed to.
fn slot_request(record: &CaptureRecord, stream: &Stream) -> Request {
    let request = Request::new(stream.device_id(), stream.id(), SLOT_BYTES);
    if stream.device_id() == record.device && !record.pool.is_default() {
        request.in_pool(record.pool)
    } else {
        request
    }
}
