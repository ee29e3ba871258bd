//! Generators in captures: the numbers that a graph consumes are counted during the capture, and seed and offset are
//! set at every replay.
//!
//! The seed and offset of a replay cannot be part of the graph. So each stream that draws numbers in a capture gets a
//! slot of 16 bytes (seed, offset), and at its first draw a *seed kernel*: a kernel of one thread that writes both into
//! the slot, from its own arguments. Kernels that draw read the slot. Before a replay the arguments of the seed kernels
//! are replaced in the executable graph, which costs the host a fraction of writing the slot. Launches under way keep
//! their arguments, so replays on several streams do not interfere with each other.
//!
//! Locks: the capture's record is locked only while counts are read and written. While a seed kernel is captured, a
//! separate lock is held over the driver calls: its node is read right after the launch, and no second launch may come
//! between.

use std::sync::{Arc, Mutex};

use warpool_driver::{DevicePtr, Driver, FunctionId, GraphExecId, NodeId, StreamId};

use super::kernels::{SEED, SOURCE};
use super::reservation::Reservation;
use super::state::{DrawnRange, PhiloxState};
use crate::capture::{CaptureRecord, StreamCapture};
use crate::error::GeneratorError;
use crate::memory::{CaptureMemory, DeviceBlock, HeldBlock, Request};
use crate::unwind::call_each;
use crate::{Result, Stream, launch, lock};

/// A slot: seed and offset, 8 bytes each.
const SLOT_BYTES: u64 = 16;

/// The generators that a capture, and later its graph, draws from.
#[derive(Default)]
pub(crate) struct CapturedGenerators {
    /// One entry per state.
    generators: Vec<CapturedGenerator>,
    /// Slots that a seed kernel in the graph writes to, but no draw uses.
    unused_slots: Vec<HeldBlock>,
    /// Held while a seed kernel is captured.
    seed_kernel_lock: Arc<Mutex<()>>,
}

/// One generator's state in one capture.
struct CapturedGenerator {
    state: Arc<PhiloxState>,
    /// The offset by which a replay advances it.
    consumed: u64,
    seed_kernels: Vec<SeedKernel>,
    /// The numbers that the last replay drew.
    drawn: Mutex<Option<DrawnRange>>,
}

/// The kernel that writes seed and offset for the draws of one stream.
struct SeedKernel {
    stream: StreamId,
    node: NodeId,
    function: FunctionId,
    slot: HeldBlock,
}

impl CapturedGenerators {
    pub(crate) fn is_empty(&self) -> bool {
        self.generators.is_empty()
    }

    /// Called before a replay: sets seed and offset in the seed kernels, and advances the generators by the numbers
    /// that the graph consumes. The caller must make sure that no other thread launches the executable between this
    /// call and its own launch. After a failure the generators are as before.
    pub(crate) fn prepare(&self, driver: &dyn Driver, exec: GraphExecId) -> Result<()> {
        for (at, generator) in self.generators.iter().enumerate() {
            if let Err(error) = generator.prepare(driver, exec) {
                self.generators[..at].iter().rev().for_each(CapturedGenerator::undo);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Called after a failed launch: undoes the advance of [`prepare`](Self::prepare), unless numbers were drawn since.
    pub(crate) fn undo(&self) {
        self.generators.iter().rev().for_each(CapturedGenerator::undo);
    }

    /// Whether `ptr` is one of the slots.
    pub(crate) fn has_slot(&self, ptr: DevicePtr) -> bool {
        let mut seed_kernels = self.generators.iter().flat_map(|generator| &generator.seed_kernels);
        seed_kernels.any(|kernel| kernel.slot.ptr() == ptr)
    }

    /// Records that replays on `streams` use the slots: their memory is reused only after the replays. Makes no driver
    /// call.
    pub(crate) fn record_replays(&self, streams: &[StreamId]) {
        let seed_kernels = self.generators.iter().flat_map(|generator| &generator.seed_kernels);
        let slots = seed_kernels.map(|kernel| &kernel.slot).chain(&self.unused_slots);
        call_each(slots, |slot| slot.record_replays(streams));
    }

    fn find(&mut self, state: &Arc<PhiloxState>) -> Option<&mut CapturedGenerator> {
        self.generators.iter_mut().find(|generator| Arc::ptr_eq(&generator.state, state))
    }

    fn add(&mut self, state: &Arc<PhiloxState>, kernel: SeedKernel) {
        match self.find(state) {
            Some(generator) => generator.seed_kernels.push(kernel),
            None => self.generators.push(CapturedGenerator {
                state: Arc::clone(state),
                consumed: 0,
                seed_kernels: vec![kernel],
                drawn: Mutex::default(),
            }),
        }
    }

    /// Counts `increment` numbers, if the stream already has its seed kernel.
    fn count(&mut self, state: &Arc<PhiloxState>, stream: StreamId, increment: u64) -> Result<Option<Reservation>> {
        let Some(generator) = self.find(state) else { return Ok(None) };
        let intragraph = generator.consumed;
        let after = intragraph.checked_add(increment).ok_or(GeneratorError::Increment { increment })?;
        let Some(kernel) = generator.seed_kernels.iter().find(|kernel| kernel.stream == stream) else {
            return Ok(None);
        };
        generator.consumed = after;
        Ok(Some(Reservation::Captured { slot: kernel.slot.ptr(), intragraph }))
    }

    #[cfg(test)]
    pub(super) fn seed_kernels_by_generator(&self) -> Vec<usize> {
        self.generators.iter().map(|generator| generator.seed_kernels.len()).collect()
    }

    #[cfg(test)]
    pub(super) fn unused_slots(&self) -> usize {
        self.unused_slots.len()
    }
}

impl CapturedGenerator {
    fn prepare(&self, driver: &dyn Driver, exec: GraphExecId) -> Result<()> {
        if self.consumed == 0 {
            return Ok(());
        }
        let drawn = self.state.draw(if crate::defect::Defect::ReplayKeepsOffset.is_on() { 0 } else { self.consumed });
        for kernel in &self.seed_kernels {
            let start = (drawn.seed, drawn.offset);
            if let Err(error) = launch::set_seed(driver, exec, kernel.node, kernel.function, &kernel.slot, start) {
                self.state.undo(drawn);
                return Err(error.into());
            }
        }
        *lock(&self.drawn) = Some(drawn);
        Ok(())
    }

    fn undo(&self) {
        if let Some(drawn) = lock(&self.drawn).take() {
            self.state.undo(drawn);
        }
    }
}

/// Counts `increment` numbers, a multiple of 4, to the graph of `capture`, for a kernel on `stream`.
pub(super) fn draw(
    capture: &StreamCapture,
    state: &Arc<PhiloxState>,
    stream: &Stream,
    increment: u64,
) -> Result<Reservation> {
    if capture.in_body {
        return Err(GeneratorError::InBody.into());
    }
    let record = &*capture.record;
    let count = || record.with(|captured: &mut CapturedGenerators| captured.count(state, stream.id(), increment));
    if let Some(reservation) = count()? {
        return Ok(reservation);
    }
    // Calls that may run user code, or take long, come before the lock.
    let driver = stream.driver();
    let function = stream.device().kernel(&SOURCE, SEED)?;
    let slot = DeviceBlock::allocate(&CaptureMemory::of(record).allocator, slot_request(record, stream))?;
    let slot = HeldBlock::new(slot)?;
    let seed_kernel_lock = record.with(|captured: &mut CapturedGenerators| Arc::clone(&captured.seed_kernel_lock));
    let _locked = lock(&seed_kernel_lock);
    if let Some(reservation) = count()? {
        return Ok(reservation);
    }
    launch::write_seed(driver, function, &slot, state.get(), stream.id())?;
    let node = match driver.capture_dependencies(stream.id()) {
        Ok(nodes) if nodes.len() == 1 => nodes[0],
        other => {
            // The kernel is in the graph, and every replay writes to its slot: keep the slot.
            record.with(|captured: &mut CapturedGenerators| captured.unused_slots.push(slot));
            other?;
            return Err(GeneratorError::SeedKernelLost { stream: stream.id() }.into());
        }
    };
    let kernel = SeedKernel { stream: stream.id(), node, function, slot };
    record.with(|captured: &mut CapturedGenerators| captured.add(state, kernel));
    Ok(count()?.expect("the seed kernel was captured just now"))
}

/// Undoes the last draw of a capture, unless others have drawn since.
pub(super) fn undo(record: &CaptureRecord, state: &Arc<PhiloxState>, intragraph: u64, increment: u64) {
    record.with(|captured: &mut CapturedGenerators| {
        let generator = captured.find(state);
        if let Some(generator) = generator.filter(|found| found.consumed == intragraph.wrapping_add(increment)) {
            generator.consumed = intragraph;
        }
    });
}

/// The graph's pool is on the graph's device; for a stream of another device the allocator's routing decides.
fn slot_request(record: &CaptureRecord, stream: &Stream) -> Request {
    let request = Request::new(stream.device_id(), stream.id(), SLOT_BYTES);
    let pool = CaptureMemory::of(record).pool;
    if stream.device_id() == record.device && !pool.is_default() { request.in_pool(pool) } else { request }
}
