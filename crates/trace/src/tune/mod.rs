//! Which settings serve a recorded program best: candidates are replayed under the same conditions and ranked.
//!
//! Not a blind grid: `candidates.rs` leaves out what has no effect on the recording. Every candidate is replayed like
//! any what-if, in several orders of addresses where these matter, and the recorded settings are one of them.

mod candidates;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

pub use candidates::{Candidate, candidates};

use crate::replay::{DeviceReplay, ReplayError, ReplayOptions, ReplayReport, bytes_context};

/// How to try candidates.
#[derive(Clone, Copy)]
pub struct TrialOptions<'a> {
    /// The memory of the device; `None` is as recorded.
    pub capacity: Option<u64>,
    /// In how many orders of addresses.
    pub address_orders: u32,
    /// On how many threads.
    pub threads: usize,
    /// Called with the number of trials that are done, and of all, on any thread.
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

/// The results of `work` for all numbers below `count`, in their order.
fn in_parallel<T: Send>(count: usize, threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<(usize, T)>> = Mutex::new(Vec::with_capacity(count));
    let worker = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            let result = work(number);
            found.lock().unwrap_or_else(PoisonError::into_inner).push((number, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            scope.spawn(worker);
        }
        worker();
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_unstable_by_key(|&(number, _)| number);
    found.into_iter().map(|(_, result)| result).collect()
}

/// A candidate with its results.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// What was tried.
    pub candidate: Candidate,
    /// A report for each device of each recording.
    pub reports: Vec<ReplayReport>,
    /// The smallest device on which every recording fits in every order of addresses, found by replays to within an
    /// eighth of what is not live; `None` if it was not found.
    pub smallest_device_bytes: Option<u64>,
}

impl Tuned {
    /// Whether it fits everywhere, in every order of addresses.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.reports.iter().all(|report| report.orders.all_fit())
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

    /// What the recorded programs reserve in other orders of addresses, if these matter: least and most, added up.
    #[must_use]
    pub fn control_range(&self) -> Option<(u64, u64)> {
        let controls: Option<Vec<_>> = self.reports.iter().map(|report| report.control).collect();
        let controls = controls.filter(|controls| !controls.is_empty())?;
        let least = controls.iter().map(|control| control.peak_reserved_bytes_least).sum();
        Some((least, controls.iter().map(|control| control.peak_reserved_bytes_most).sum()))
    }
}

/// The candidates, the best first: those that fit, by the least reserved bytes, then by the least driver time.
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
        smallest_device(devices, &candidates[number], &reports[number], options.address_orders)
    });
    let mut tuned = Vec::with_capacity(candidates.len());
    for ((candidate, reports), smallest) in candidates.into_iter().zip(reports).zip(smallest) {
        tuned.push(Tuned { candidate, reports, smallest_device_bytes: smallest? });
    }
    // What reserves equally much to within a thousandth is ordered by driver time.
    let step = tuned.iter().map(Tuned::peak_reserved_bytes).min().unwrap_or(0) / 1000 + 1;
    let key = |tuned: &Tuned| (!tuned.fits(), tuned.candidate.is_lower_bound, tuned.peak_reserved_bytes() / step);
    // Then by driver time to a millisecond, and the shorter string.
    let rest = |tuned: &Tuned| ((tuned.driver_seconds() * 1e3).round(), tuned.candidate.set.len());
    tuned.sort_by(|a, b| {
        let ((a_time, a_length), (b_time, b_length)) = (rest(a), rest(b));
        key(a).cmp(&key(b)).then(a_time.total_cmp(&b_time)).then(a_length.cmp(&b_length))
    });
    Ok(tuned)
}

/// The smallest device on which all recordings fit with a candidate.
fn smallest_device(
    devices: &[&DeviceReplay<'_>],
    candidate: &Candidate,
    reports: &[ReplayReport],
    address_orders: u32,
) -> Result<Option<u64>, ReplayError> {
    let mut smallest = 0;
    for (device, report) in devices.iter().zip(reports) {
        match smallest_for(device, candidate, report, address_orders)? {
            Some(bytes) => smallest = smallest.max(bytes),
            None => return Ok(None),
        }
    }
    Ok(Some(smallest))
}

/// Between what is live and what is reserved at most, by halves: with less than that, cached memory is released for
/// requests that need it.
fn smallest_for(
    device: &DeviceReplay<'_>,
    candidate: &Candidate,
    report: &ReplayReport,
    address_orders: u32,
) -> Result<Option<u64>, ReplayError> {
    const HALVES: u32 = 3;
    let fits = |capacity: u64, orders: u32| -> Result<bool, ReplayError> {
        let options = ReplayOptions { without_control: true, ..replay_options(orders) };
        Ok(device.report(&candidate.on(Some(capacity)), &options)?.orders.all_fit())
    };
    let mut most = report.orders.peak_reserved_bytes_most + bytes_context();
    if candidate.is_lower_bound {
        return Ok(Some(most));
    }
    // Under a limit less was reserved than would have been; without one, it fits by definition.
    if !report.orders.all_fit() || report.in_force.memory_limit.is_some() {
        let ample = device.report(&candidate.on(Some(1 << 46)), &replay_options(address_orders))?;
        if !ample.orders.all_fit() {
            return Ok(None);
        }
        most = ample.orders.peak_reserved_bytes_most + bytes_context();
    }
    let mut least = (report.peak_live_bytes + bytes_context()).min(most);
    // Little to gain.
    if most - least < most / 50 {
        return Ok(Some(most));
    }
    let mut found = vec![most];
    for _ in 0..HALVES {
        let middle = least.midpoint(most);
        if fits(middle, 1)? {
            most = middle;
            found.push(middle);
        } else {
            least = middle;
        }
    }
    // In one order; the smallest that fits in all is the answer.
    while let Some(bytes) = found.pop() {
        if found.is_empty() || fits(bytes, address_orders)? {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}
