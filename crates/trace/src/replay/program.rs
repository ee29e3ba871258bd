//! The requests of a recorded program, for any allocator on any driver. No comparisons or lookups are made meanwhile,
//! so that the measured time is the allocator's: see `warpool bench alloc --recording`.

use warpool::driver::{DeviceId, DevicePtr, StreamId};
use warpool::memory::raw::Request;
use warpool::memory::report::Snapshot;
use warpool::memory::{DeviceAllocator, Settings};

use super::infer::Inference;
use super::plan::{Plan, Slot, Step, StreamIndex};
use super::recording::Survey;
use super::{ReplayError, bytes_in_memory};
use crate::budget::Budget;

/// The allocations and frees of a recorded program on one device, all in the default pool. Left out are blocks
/// allocated before the first event, failed requests, and releases of cached memory.
#[derive(Clone, Debug)]
pub struct Program {
    steps: Vec<ProgramStep>,
    events: u64,
    streams: usize,
    /// The address of each allocation while it is live.
    slots: Vec<DevicePtr>,
}

#[derive(Clone, Copy, Debug)]
enum ProgramStep {
    Alloc {
        bytes: u64,
        slot: Slot,
        stream: StreamIndex,
    },
    Free {
        slot: Slot,
    },
    /// Another stream used it.
    RecordUseAndFree {
        slot: Slot,
    },
}

impl Program {
    /// The program that ran on the device with the most events.
    ///
    /// # Errors
    /// If there are no events, or their numbers are not those of a real program.
    pub fn new(snapshot: &Snapshot) -> Result<Self, ReplayError> {
        let traces = snapshot.traces.iter().zip(0..);
        let Some((events, device)) = traces.max_by_key(|(events, _)| events.len()).filter(|(it, _)| !it.is_empty())
        else {
            return Err(ReplayError::NoHistory);
        };
        let survey = Survey::new(device, events, &[])?;
        let budget = Budget::new(None);
        budget.set_bytes_needed(bytes_in_memory(snapshot));
        let plan = Plan::new(events, &survey.streams, &Inference::none(Settings::default()), &budget)?;
        let step = |step: &Step| match *step {
            Step::Alloc { bytes, slot, stream, .. } => Some(ProgramStep::Alloc { bytes, slot, stream }),
            Step::Free { slot, .. } => Some(ProgramStep::Free { slot }),
            Step::FreeInUse { slot, .. } => Some(ProgramStep::RecordUseAndFree { slot }),
            Step::Complete { .. } | Step::FailedAlloc { .. } | Step::ReleasePool { .. } | Step::Trim { .. } => None,
        };
        let steps = plan.steps.iter().filter_map(step).collect();
        let slots = vec![DevicePtr(0); plan.slots];
        Ok(Self { steps, events: events.len() as u64, streams: plan.streams.len(), slots })
    }

    /// Events of the recording. An allocation is one event, and its free two.
    #[must_use]
    pub const fn events(&self) -> u64 {
        self.events
    }

    /// How many streams it uses; at least 1.
    #[must_use]
    pub const fn streams(&self) -> usize {
        self.streams
    }

    /// Makes all requests, on [`streams`](Self::streams) streams. Blocks that the recorded program used on a second
    /// stream are used on `other`. [`free_rest`](Self::free_rest) must follow before the next run.
    ///
    /// # Errors
    /// That of the allocator.
    ///
    /// # Panics
    /// With fewer streams than the program uses.
    pub fn run(
        &mut self,
        allocator: &dyn DeviceAllocator,
        device: DeviceId,
        streams: &[StreamId],
        other: StreamId,
    ) -> warpool::Result<()> {
        let streams = &streams[..self.streams];
        for step in &self.steps {
            match *step {
                ProgramStep::Alloc { bytes, slot, stream } => {
                    let request = Request::new(device, streams[usize::from(stream)], bytes);
                    self.slots[slot as usize] = allocator.allocate_raw(request)?.ptr;
                }
                ProgramStep::Free { slot } => {
                    allocator.free_raw(std::mem::replace(&mut self.slots[slot as usize], DevicePtr(0)))?;
                }
                ProgramStep::RecordUseAndFree { slot } => {
                    let ptr = std::mem::replace(&mut self.slots[slot as usize], DevicePtr(0));
                    allocator.record_use_raw(ptr, other)?;
                    allocator.free_raw(ptr)?;
                }
            }
        }
        Ok(())
    }

    /// Frees what the program had not freed at its end.
    ///
    /// # Errors
    /// That of the allocator.
    pub fn free_rest(&mut self, allocator: &dyn DeviceAllocator) -> warpool::Result<()> {
        self.slots.iter_mut().try_for_each(|slot| allocator.free_raw(std::mem::replace(slot, DevicePtr(0))))
    }
}
