//! The recorded program several times, one after another on the same device: to estimate a long run from a short
//! recording. Between two rounds everything is freed, as if the program began again in the same process.

use warpool::memory::DeviceAllocator as _;
use warpool::{Error, Result};

use super::device::DEVICE;
use super::restore::Restore;
use super::{OnProgress, Run, Runner, live_bytes};
use crate::replay::ReplayError;
use crate::replay::report::Round;

impl Run<'_> {
    /// Runs the program `rounds` times, or up to the first round that cannot be completed for lack of memory.
    pub fn run_rounds(&self, rounds: u32, progress: OnProgress<'_>) -> std::result::Result<Vec<Round>, ReplayError> {
        let mut runner = match self.start(progress)? {
            Ok(runner) => runner,
            Err(result) => {
                let (peak_live_bytes, peak_reserved_bytes) = (result.peak_live_bytes, result.peak_reserved_bytes);
                return Ok(vec![Round { peak_live_bytes, peak_reserved_bytes, ooms: result.ooms.max(1) }]);
            }
        };
        let mut results = Vec::new();
        runner.rounds = rounds;
        for round in 0..rounds {
            runner.round = round;
            let completed = (round == 0 || runner.begin_again()?) && runner.run_steps()?;
            results.push(runner.round()?);
            if !completed {
                break;
            }
        }
        Ok(results)
    }
}

impl Runner<'_> {
    /// Restores the blocks in use of the initial state. `false` if there is no memory for them.
    fn begin_again(&mut self) -> Result<bool> {
        for block in self.slots.iter_mut().filter_map(Option::take) {
            self.device.free(block)?;
        }
        self.device.begin_again(&self.run.plan.pools)?;
        self.device.allocator().reset_peak_stats(DEVICE)?;
        self.device.allocator().reset_accumulated_stats(DEVICE)?;
        // Nothing is as recorded any more.
        (self.segment_events, self.asks_as_recorded) = (&[], false);
        self.completed_late.clear();
        self.toggles = self.run.toggles;
        self.next_toggle = self.toggles.first().copied().unwrap_or(u32::MAX);
        if let Some(caching) = self.device.caching().filter(|_| !self.toggles.is_empty()) {
            caching.set_settings(self.run.settings.clone())?;
        }
        let (run, mut fits) = (self.run, true);
        if let Some(initial) = run.inference.initial.as_ref().filter(|initial| !initial.is_empty()) {
            let restore = Restore { initial, inference: run.inference, plan: run.plan, settings: run.settings };
            fits = match restore.blocks_only(&mut self.device, &mut self.slots) {
                Err(Error::OutOfMemory(_)) => false,
                outcome => outcome.map(|()| true)?,
            };
        }
        self.memory.begin_again(run);
        self.live_bytes = live_bytes(&self.slots);
        self.result.peak_live_bytes = self.live_bytes;
        Ok(fits)
    }

    fn round(&self) -> Result<Round> {
        let stats = self.device.allocator().stats(DEVICE)?;
        Ok(Round {
            peak_live_bytes: self.result.peak_live_bytes,
            peak_reserved_bytes: stats.reserved_bytes.all.peak,
            ooms: stats.num_ooms,
        })
    }
}
