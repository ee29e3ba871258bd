//! Which settings serve a recorded program best: candidates are replayed under the same conditions and ranked.
//!
//! Not a blind grid: `candidates.rs` leaves out what has no effect on the recording. Every candidate is replayed like
//! any what-if, in several orders of addresses where these matter, and the recorded settings are one of them.

mod candidates;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use candidates::{Candidate, candidates};

use crate::replay::{DeviceReplay, ReplayError, ReplayOptions, ReplayReport, WhatIf};

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
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let found: Mutex<Vec<(usize, Result<ReplayReport, ReplayError>)>> = Mutex::new(Vec::new());
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= trials {
                return;
            }
            let (candidate, device) = (&candidates[number / devices.len()], devices[number % devices.len()]);
            let what_if = WhatIf { capacity: options.capacity, ..candidate.what_if.clone() };
            let replay_options = ReplayOptions {
                address_orders: Some(options.address_orders),
                threads: Some(1),
                ..ReplayOptions::default()
            };
            let report = device.report(&what_if, &replay_options);
            found.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((number, report));
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            if let Some(progress) = options.progress {
                progress(done, trials);
            }
        }
    };
    let threads = devices.iter().map(|device| device.runs_at_once()).min().unwrap_or(1).min(options.threads);
    std::thread::scope(|scope| {
        for _ in 1..threads.min(trials) {
            scope.spawn(work);
        }
        work();
    });
    let mut found = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    found.sort_unstable_by_key(|&(number, _)| number);
    let mut reports = Vec::with_capacity(candidates.len());
    for (number, report) in found {
        if number % devices.len() == 0 {
            reports.push(Vec::with_capacity(devices.len()));
        }
        reports.last_mut().expect("pushed for the first device").push(report?);
    }
    Ok(reports)
}

/// A candidate with its results.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// What was tried.
    pub candidate: Candidate,
    /// A report for each device of each recording.
    pub reports: Vec<ReplayReport>,
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

    /// The smallest device that fits every recording without a retry: what was reserved, and a context.
    #[must_use]
    pub fn smallest_device_bytes(&self) -> u64 {
        let peaks = self.reports.iter().map(|report| report.orders.peak_reserved_bytes_most);
        peaks.max().unwrap_or(0) + crate::replay::bytes_context()
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
    let mut tuned: Vec<Tuned> =
        candidates.into_iter().zip(reports).map(|(candidate, reports)| Tuned { candidate, reports }).collect();
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
