//! The smallest device on which recordings fit with a candidate.
//!
//! Guaranteed: on a device of that size every recording fits in every address order, and on one that is smaller by
//! twice the tolerance some recording does not fit. Both were replayed as `warpool replay --capacity` does. Not
//! guaranteed: that no smaller device suffices. With less memory the allocator returns its cache to the driver earlier
//! and splits its segments differently, so whether a program fits need not be monotonic in the size.

use super::{Candidate, replay_options};
use crate::replay::{DeviceReplay, ReplayError, ReplayOptions, ReplayReport, bytes_context};

const MIB: u64 = 1 << 20;

/// The smallest device that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmallestDevice {
    /// Its memory, with the context.
    pub bytes: u64,
    /// A device that is smaller by twice this does not suffice, and none was found that is smaller by this.
    pub tolerance_bytes: u64,
}

impl SmallestDevice {
    /// Finds it for recordings that fit with a candidate on a device that is large enough; `None` if one does not fit.
    pub(crate) fn find(
        devices: &[&DeviceReplay<'_>],
        candidate: &Candidate,
        reports: &[ReplayReport],
        address_orders: u32,
    ) -> Result<Option<Self>, ReplayError> {
        let mut found: Option<Self> = None;
        for (&device, report) in devices.iter().zip(reports) {
            let mut search = Search { device, candidate, address_orders, failed_last: 0 };
            let Some(needs) = search.needs(report)? else { return Ok(None) };
            let Some(smallest) = search.smallest(needs)? else { return Ok(None) };
            found = found.filter(|found| found.bytes >= smallest.bytes).or(Some(smallest));
        }
        let Some(mut smallest) = found else { return Ok(None) };
        // Each recording fits on its own smallest device; all have to fit on the largest of these.
        for (&device, report) in devices.iter().zip(reports).filter(|_| devices.len() > 1) {
            let mut search = Search { device, candidate, address_orders, failed_last: 0 };
            if !search.fits_in_all(smallest.bytes)? {
                let Some(needs) = search.needs(report)? else { return Ok(None) };
                let Some(bytes) = search.step_up(smallest.bytes.max(needs.most), smallest.tolerance_bytes)? else {
                    return Ok(None);
                };
                smallest.bytes = bytes;
            }
        }
        Ok(Some(smallest))
    }

    /// The tolerance of the search: 1% of the device, but not less than 64 MiB.
    fn tolerance(bytes: u64) -> u64 {
        const LEAST: u64 = 64 * MIB;
        (bytes / 100).max(LEAST)
    }
}

/// The least memory that a device needs, and the memory that is always enough.
#[derive(Clone, Copy)]
struct Needs {
    least: u64,
    most: u64,
}

struct Search<'a, 'r> {
    device: &'a DeviceReplay<'r>,
    candidate: &'a Candidate,
    address_orders: u32,
    /// The order in which it failed last is the first to try on the next device.
    failed_last: u32,
}

impl Search<'_, '_> {
    /// The search range: from what is live to what is reserved on a device with ample memory.
    fn needs(&self, report: &ReplayReport) -> Result<Option<Needs>, ReplayError> {
        /// A device that cannot be full.
        const AMPLE: u64 = 1 << 46;
        let needs = |report: &ReplayReport| Needs {
            least: report.peak_live_bytes.saturating_add(bytes_context()),
            most: report.orders.peak_reserved_bytes_most.saturating_add(bytes_context()),
        };
        // Under a limit, less was reserved than without it.
        if report.orders.all_fit() && report.in_force.memory_limit.is_none() {
            return Ok(Some(needs(report)));
        }
        let options = ReplayOptions { without_control: true, ..replay_options(self.address_orders) };
        let ample = self.device.report(&self.candidate.on(Some(AMPLE)), &options)?;
        Ok(ample.orders.all_fit().then(|| needs(&ample)))
    }

    /// Bisects in one address order, then from the result upwards in all of them.
    fn smallest(&mut self, Needs { least, most }: Needs) -> Result<Option<SmallestDevice>, ReplayError> {
        /// How often a smaller device is taken, if it turns out to suffice after all.
        const TIMES_MAX: u32 = 3;
        let tolerance_bytes = SmallestDevice::tolerance(least);
        let Some(most) = self.step_up(most, tolerance_bytes)? else { return Ok(None) };
        // With less than what is live it cannot fit.
        let (mut low, mut high) = (least.saturating_sub(1), most);
        for _ in 0..TIMES_MAX {
            let in_one = self.halve(low, high, tolerance_bytes, |search, bytes| search.fits_in_one(bytes))?;
            high = match in_one == high || self.fits_in_all(in_one)? {
                true => in_one,
                false => self.halve(in_one, high, tolerance_bytes, Self::fits_in_all)?,
            };
            let smaller = self.device.other_capacity(high.saturating_sub(2 * tolerance_bytes));
            if smaller < least || !self.fits_in_all(smaller)? {
                break;
            }
            (low, high) = (least.saturating_sub(1), smaller);
        }
        Ok(Some(SmallestDevice { bytes: high, tolerance_bytes }))
    }

    /// The smallest size between one that does not fit and one that does, to within the tolerance.
    fn halve(
        &mut self,
        mut low: u64,
        mut high: u64,
        tolerance_bytes: u64,
        fits: impl Fn(&mut Self, u64) -> Result<bool, ReplayError>,
    ) -> Result<u64, ReplayError> {
        while high.saturating_sub(low) > tolerance_bytes {
            // In whole MiB, which a reader can give to a replay.
            let middle = self.device.other_capacity(low.midpoint(high).next_multiple_of(MIB));
            if middle <= low || middle >= high {
                break;
            }
            match fits(self, middle)? {
                true => high = middle,
                false => low = middle,
            }
        }
        Ok(high)
    }

    /// A size from `bytes` on that fits in all orders, if one is near.
    fn step_up(&mut self, bytes: u64, tolerance_bytes: u64) -> Result<Option<u64>, ReplayError> {
        const STEPS: u64 = 4;
        for step in 0..STEPS {
            let larger = bytes.saturating_add(((1 << step) - 1) * tolerance_bytes).next_multiple_of(MIB);
            let larger = self.device.other_capacity(larger);
            if self.fits_in_all(larger)? {
                return Ok(Some(larger));
            }
        }
        Ok(None)
    }

    fn fits_in_one(&self, capacity: u64) -> Result<bool, ReplayError> {
        Ok(self.device.first_failure(&self.candidate.on(Some(capacity)), 1, 0)?.is_none())
    }

    fn fits_in_all(&mut self, capacity: u64) -> Result<bool, ReplayError> {
        let what_if = self.candidate.on(Some(capacity));
        let failed = self.device.first_failure(&what_if, self.address_orders, self.failed_last)?;
        self.failed_last = failed.unwrap_or(self.failed_last);
        Ok(failed.is_none())
    }
}
