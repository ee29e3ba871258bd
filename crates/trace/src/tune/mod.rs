//! Which settings serve a recorded program best: candidates are replayed under the same conditions and ranked.
//!
//! Not an exhaustive grid: `candidates.rs` leaves out settings that have no effect on the recording. Every candidate is
//! replayed like any what-if, in several address orders where these matter. The recorded settings are one of the
//! candidates.

mod candidates;
mod smallest;

use std::sync::atomic::{AtomicUsize, Ordering};

pub use candidates::{Candidate, candidates};
pub use smallest::SmallestDevice;

use crate::parallel::in_parallel;
use crate::replay::{DeviceReplay, ReplayError, ReplayOptions, ReplayReport};

/// How to try candidates.
#[derive(Clone, Copy)]
pub struct TrialOptions<'a> {
    /// The memory of the device; `None` is as recorded.
    pub capacity: Option<u64>,
    /// In how many address orders.
    pub address_orders: u32,
    /// On how many threads.
    pub threads: usize,
    /// Called with the number of finished trials and the number of all trials, on any thread.
    pub progress: Option<&'a (dyn Fn(usize, usize) + Sync)>,
}

/// Replays every candidate on every device, in parallel. The result has the reports of the devices for each candidate.
///
/// # Errors
/// If a replay fails other than for lack of device memory.
pub fn try_all(
    devices: &[&DeviceReplay<'_>],
    candidates: &[Candidate],
    options: &TrialOptions<'_>,
) -> Result<Vec<Vec<ReplayReport>>, ReplayError> {
    let trials = devices.len() * candidates.len();
    let done = AtomicUsize::new(0);
    let reports = in_parallel(trials, threads(devices, options), |number| {
        let (candidate, device) = (&candidates[number / devices.len()], devices[number % devices.len()]);
        let report = device.report(&candidate.on(options.capacity), &replay_options(options.address_orders));
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(progress) = options.progress {
            progress(done, trials);
        }
        report
    });
    let reports = reports.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(reports.chunks(devices.len().max(1)).map(<[ReplayReport]>::to_vec).collect())
}

/// Options for one replay on one thread.
fn replay_options(address_orders: u32) -> ReplayOptions<'static> {
    ReplayOptions { address_orders: Some(address_orders), threads: Some(1), ..ReplayOptions::default() }
}

/// How many replays run at once: there must be memory for all.
fn threads(devices: &[&DeviceReplay<'_>], options: &TrialOptions<'_>) -> usize {
    devices.iter().map(|device| device.runs_at_once()).min().unwrap_or(1).min(options.threads)
}

/// A candidate with its results.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// What was tried.
    pub candidate: Candidate,
    /// A report for each device of each recording.
    pub reports: Vec<ReplayReport>,
    /// The smallest device on which every recording fits in every address order, found by replays; `None` if it
    /// does not fit on any.
    pub smallest_device: Option<SmallestDevice>,
}

impl Tuned {
    /// Whether it fits everywhere, in every address order.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.reports.iter().all(|report| report.orders.all_fit())
    }

    /// Whether it is another allocator than the recorded one.
    #[must_use]
    pub fn switches_allocator(&self) -> bool {
        self.reports.iter().any(|report| report.in_force.allocator != report.in_force.allocator_recorded)
    }

    /// The peaks of reserved bytes, added up.
    #[must_use]
    pub fn peak_reserved_bytes(&self) -> u64 {
        self.reports.iter().map(|report| report.orders.peak_reserved_bytes_most).sum()
    }

    /// The modelled time of all driver calls.
    #[must_use]
    pub fn driver_seconds(&self) -> f64 {
        self.reports.iter().map(|report| report.driver_seconds_modelled).sum()
    }

    /// What the recorded programs reserve in other address orders, if these matter: the sums of the least and of the
    /// most.
    #[must_use]
    pub fn control_range(&self) -> Option<(u64, u64)> {
        let controls: Option<Vec<_>> = self.reports.iter().map(|report| report.control).collect();
        let controls = controls.filter(|controls| !controls.is_empty())?;
        let least = controls.iter().map(|control| control.peak_reserved_bytes_least).sum();
        Some((least, controls.iter().map(|control| control.peak_reserved_bytes_most).sum()))
    }
}

/// The candidates, the best first: see `rank`.
///
/// # Errors
/// If a replay fails other than for lack of device memory.
pub fn tune(
    devices: &[&DeviceReplay<'_>],
    candidates: Vec<Candidate>,
    options: &TrialOptions<'_>,
) -> Result<Vec<Tuned>, ReplayError> {
    let reports = try_all(devices, &candidates, options)?;
    let smallest = in_parallel(candidates.len(), threads(devices, options), |number| {
        SmallestDevice::find(devices, &candidates[number], &reports[number], options.address_orders)
    });
    let mut tuned = Vec::with_capacity(candidates.len());
    for ((candidate, reports), smallest) in candidates.into_iter().zip(reports).zip(smallest) {
        tuned.push(Tuned { candidate, reports, smallest_device: smallest? });
    }
    rank(&mut tuned);
    Ok(tuned)
}

/// Another allocator is ranked before PyTorch's settings only if it saves this part of what they reserve, and at least
/// these bytes: it needs a package and a call in the program, not one environment variable. A driver update or another
/// batch can change the result by less than this.
const SWITCH_SAVES_PART: u64 = 50;
const SWITCH_SAVES_BYTES: u64 = 256 << 20;

/// Candidates that fit come first, by reserved bytes, then by driver time. Small gains are not worth a change. So
/// another allocator than the recorded one counts as if it reserved more. The recorded settings count as if they
/// reserved less, by the amount that other addresses alone change.
fn rank(tuned: &mut [Tuned]) {
    let own = tuned.iter().filter(|tuned| tuned.fits() && !tuned.switches_allocator());
    let own = own.map(Tuned::peak_reserved_bytes).min();
    let switch = own.map_or(0, |own| (own / SWITCH_SAVES_PART).max(SWITCH_SAVES_BYTES));
    let noise = tuned.iter().filter_map(Tuned::control_range).map(|(least, most)| most - least).max().unwrap_or(0);
    let counted = |tuned: &Tuned| {
        let bytes = tuned.peak_reserved_bytes();
        match tuned.candidate.is_recorded() {
            true => bytes.saturating_sub(noise),
            false if tuned.switches_allocator() => bytes.saturating_add(switch),
            false => bytes,
        }
    };
    // Candidates whose reserved bytes differ by less than a thousandth are ordered by driver time.
    let step = tuned.iter().map(Tuned::peak_reserved_bytes).min().unwrap_or(0) / 1000 + 1;
    let key = |tuned: &Tuned| {
        let Candidate { is_lower_bound, .. } = tuned.candidate;
        (!tuned.fits(), is_lower_bound, counted(tuned) / step, !tuned.candidate.is_recorded())
    };
    // Then by driver time to a millisecond, and the shorter string.
    let rest = |tuned: &Tuned| ((tuned.driver_seconds() * 1e3).round(), tuned.candidate.set.len());
    tuned.sort_by(|a, b| {
        let ((a_time, a_length), (b_time, b_length)) = (rest(a), rest(b));
        key(a).cmp(&key(b)).then(a_time.total_cmp(&b_time)).then(a_length.cmp(&b_length))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::{AddressOrders, AllocatorChoice, InForce};

    const MIB: u64 = 1 << 20;

    /// A candidate that fits and reserves some MiB; the recorded settings reserve up to `noise` MiB more elsewhere.
    fn fitting(candidate: Candidate, mib: u64, noise: u64) -> Tuned {
        let orders = |least: u64, most: u64| AddressOrders {
            run: 2,
            fit: 2,
            peak_reserved_bytes_least: least * MIB,
            peak_reserved_bytes_most: most * MIB,
            margin_bytes_least: None,
        };
        let allocator = candidate.what_if.allocator;
        let report = ReplayReport {
            orders: orders(mib, mib),
            control: Some(orders(20_000, 20_000 + noise)),
            in_force: InForce { allocator, allocator_recorded: AllocatorChoice::Caching, ..InForce::default() },
            ..ReplayReport::default()
        };
        Tuned { candidate, reports: vec![report], smallest_device: None }
    }

    /// The MiB of the candidates, in their order: settings, the recorded ones, the paged allocator.
    fn ranked(settings: u64, recorded: u64, paged: u64, noise: u64) -> Vec<u64> {
        let mut tuned = [
            fitting(Candidate::replaced("max_split_size_mb:64").expect("valid"), settings, noise),
            fitting(Candidate::recorded(&Default::default()), recorded, noise),
            fitting(Candidate::allocator(AllocatorChoice::Paged, ""), paged, noise),
        ];
        rank(&mut tuned);
        tuned.iter().map(|tuned| tuned.peak_reserved_bytes() / MIB).collect()
    }

    #[test]
    fn no_change_comes_first_for_less_than_it_is_worth() {
        // The least reserved first, if it saves enough.
        assert_eq!(ranked(18_000, 20_000, 16_000, 0), [16_000, 18_000, 20_000]);
        // Another allocator saves 1.9%, or 2.2% but only 222 MiB.
        assert_eq!(ranked(18_000, 20_000, 17_658, 0), [18_000, 17_658, 20_000]);
        assert_eq!(ranked(10_000, 20_000, 9_778, 0), [10_000, 9_778, 20_000]);
        // Other addresses change the recorded settings by as much.
        assert_eq!(ranked(19_900, 20_000, 25_000, 200), [20_000, 19_900, 25_000]);
        assert_eq!(ranked(19_700, 20_000, 25_000, 200), [19_700, 20_000, 25_000]);
        assert_eq!(ranked(20_001, 20_000, 25_000, 0), [20_000, 20_001, 25_000]);
    }
}
