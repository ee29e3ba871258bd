//! Which changes would have made the program fit, replayed from the smallest change to the largest: settings of
//! PyTorch, then Warpool's own allocator, then less use of the device by others, then a larger device.

use warpool::memory::Settings;
use warpool::memory::report::Action;
use warpool::memory::settings::Backend;

use super::{ExplainOptions, Explanation};
use crate::parallel::threads_available;
use crate::replay::{
    AddressOrders, AllocatorChoice, DeviceReplay, LimitOrigin, ReplayError, ReplayOptions, ReplayReport, WhatIf,
};
use crate::tune::{Candidate, SmallestDevice, TrialOptions, try_all};

/// What kind of change it is, the smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// A setting of PyTorch.
    Settings,
    /// The memory limit is lifted.
    Limit,
    /// Another allocator.
    Allocator,
    /// The same device, with less memory used by others.
    Others,
    /// A larger device.
    Device,
}

impl Change {
    /// Its name: `settings`, `limit`, `allocator`, `others`, `device`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Settings => "settings",
            Self::Limit => "limit",
            Self::Allocator => "allocator",
            Self::Others => "others",
            Self::Device => "device",
        }
    }
}

/// A change, replayed.
#[derive(Clone, Debug)]
pub struct Fit {
    /// What kind of change it is.
    pub change: Change,
    /// The settings string to set, or how much the device must have for the program.
    pub set: String,
    /// The environment variable that takes the string; empty for a device.
    pub variable: &'static str,
    /// Whether it fits in every address order.
    pub fits: bool,
    /// The result over the orders.
    pub orders: AddressOrders,
    /// The modelled time of the driver calls.
    pub driver_seconds: f64,
    /// How much more that is than in the recorded program.
    pub driver_seconds_more: f64,
    /// How often everything cached was released to make room.
    pub retries: u64,
    /// The memory of the device; `None` if it is not known.
    pub device_bytes_total: Option<u64>,
}

/// Whether changes are worth replays: memory ran out, it would run out on the device that was asked about, or much more
/// is reserved than is ever allocated.
pub(super) fn are_worth_trying(explanation: &Explanation) -> bool {
    let Some(peaks) = explanation.peaks else { return false };
    let (reserved, allocated) = (peaks.reserved.bytes, peaks.allocated.bytes);
    let overhead = reserved.saturating_sub(allocated);
    // If nothing ran out of memory, the answer does not justify replays of a long history.
    let is_wasteful = overhead >= OVERHEAD_MIN && overhead >= reserved / 10 && explanation.events <= EVENTS_MAX;
    let does_not_fit = explanation.on_device.is_some_and(|on| !on.orders.all_fit());
    explanation.ooms > 0 || does_not_fit || is_wasteful
}

/// The longest history for which changes are tried although nothing ran out of memory; `warpool tune` has no such
/// limit.
const EVENTS_MAX: u64 = 1_000_000;

/// Less than this is not worth a change of settings.
pub(super) const OVERHEAD_MIN: u64 = 256 << 20;

/// In how many address orders changes are replayed.
pub(super) fn orders(options: &ExplainOptions<'_>) -> u32 {
    options.address_orders.unwrap_or(8)
}

/// Replays the changes. The result has all that were tried: those that fit first, the smallest change first.
pub(super) fn find(
    replay: &DeviceReplay<'_>,
    options: &ExplainOptions<'_>,
    capacity: Option<u64>,
    recorded: &ReplayReport,
) -> Result<Vec<Fit>, ReplayError> {
    let settings = replay.recorded_settings();
    let mut changes: Vec<(Change, Candidate)> = Vec::new();
    let limit_is_set = replay.limit().is_some_and(|limit| !limit.device_full) && capacity.is_none();
    if !options.not_of_pytorch {
        for entries in entries(replay, settings, limit_is_set) {
            changes.push((Change::Settings, Candidate::changed(settings, entries)));
        }
    }
    if limit_is_set {
        // Not by a variable: the call that set the limit overrides it.
        let lifted = Candidate::changed(settings, "per_process_memory_fraction:1.0");
        changes.push((Change::Limit, Candidate { variable: "", ..lifted }));
    }
    if recorded.in_force.allocator_recorded != AllocatorChoice::Paged {
        changes.push((Change::Allocator, Candidate::allocator(AllocatorChoice::Paged, "")));
    }
    let trial_options = TrialOptions {
        capacity,
        address_orders: orders(options),
        threads: options.threads.unwrap_or_else(threads_available),
        progress: None,
    };
    let candidates: Vec<Candidate> = changes.iter().map(|(_, candidate)| candidate.clone()).collect();
    let reports = try_all(&[replay], &candidates, &trial_options)?;
    let mut fits: Vec<Fit> = changes
        .into_iter()
        .zip(reports.into_iter().flatten())
        .map(|((change, candidate), report)| fit(change, candidate.set, candidate.variable, &report, recorded))
        .collect();
    let card = replay.card();
    let has_at_least = options.capacity.or(card.bytes_total).unwrap_or(card.bytes_at_least);
    let ran_out = !recorded.orders.all_fit();
    if ran_out || capacity.is_some() {
        fits.extend(device(replay, &trial_options, has_at_least, recorded)?);
    }
    // Among changes of one kind, the one that leaves the most memory; those within a hundredth are ordered by driver
    // time.
    let step = recorded.in_force.bytes_available.unwrap_or(recorded.peak_reserved_bytes) / 100 + 1;
    let key = |fit: &Fit| {
        let margin = fit.orders.margin_bytes_least.unwrap_or(0) / step;
        (!fit.fits, fit.change, std::cmp::Reverse(margin))
    };
    fits.sort_by(|a, b| key(a).cmp(&key(b)).then(a.driver_seconds.total_cmp(&b.driver_seconds)));
    Ok(fits)
}

/// Changes of settings that can have an effect on the recording.
fn entries(replay: &DeviceReplay<'_>, settings: &Settings, limit_is_set: bool) -> Vec<&'static str> {
    if settings.backend != Backend::Native {
        return Vec::new();
    }
    let requests = replay.events().iter().filter(|event| matches!(event.action, Action::Alloc | Action::Oom));
    let largest = requests.map(|event| event.size).max().unwrap_or(0);
    let mut entries = Vec::new();
    if settings.expandable_segments {
        return entries;
    }
    entries.push("expandable_segments:True");
    if limit_is_set && settings.garbage_collection_threshold == 0.0 {
        entries.push("garbage_collection_threshold:0.8");
    }
    let splits = [(64, "max_split_size_mb:64"), (128, "max_split_size_mb:128"), (512, "max_split_size_mb:512")];
    let splits =
        splits.into_iter().filter(|&(mib, _)| mib << 20 <= largest && settings.max_split_bytes != Some(mib << 20));
    entries.extend(splits.map(|(_, entry)| entry));
    if settings.roundup_power2_divisions.iter().all(|&divisions| divisions <= 1) && largest > 1 << 20 {
        entries.push("roundup_power2_divisions:8");
    }
    entries
}

/// The smallest device on which the recorded settings fit, as `tune` finds it. It may be the recorded device without
/// other users, if that is known to be large enough.
fn device(
    replay: &DeviceReplay<'_>,
    options: &TrialOptions<'_>,
    has_at_least: u64,
    recorded: &ReplayReport,
) -> Result<Option<Fit>, ReplayError> {
    let candidate = Candidate::recorded(replay.recorded_settings());
    let reports = std::slice::from_ref(recorded);
    let Some(smallest) = SmallestDevice::find(&[replay], &candidate, reports, options.address_orders)? else {
        return Ok(None);
    };
    let change = if smallest.bytes > has_at_least { Change::Device } else { Change::Others };
    let is_full = recorded.in_force.limit_origin == LimitOrigin::RecordedDeviceFull;
    if change == Change::Others && !is_full {
        return Ok(None);
    }
    let replay_options = ReplayOptions {
        address_orders: Some(options.address_orders),
        threads: Some(options.threads),
        ..ReplayOptions::default()
    };
    let what_if = WhatIf { capacity: Some(smallest.bytes), ..WhatIf::default() };
    let report = replay.report(&what_if, &replay_options)?;
    Ok(Some(fit(change, size_text(smallest.bytes), "", &report, recorded)))
}

/// A size that `--capacity` takes, rounded up.
#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
fn size_text(bytes: u64) -> String {
    const GIB: f64 = (1_u64 << 30) as f64;
    format!("{:.1}GiB", (bytes as f64 / GIB * 10.0).ceil() / 10.0)
}

fn fit(change: Change, set: String, variable: &'static str, report: &ReplayReport, recorded: &ReplayReport) -> Fit {
    Fit {
        change,
        set,
        variable,
        fits: report.orders.all_fit(),
        orders: report.orders,
        driver_seconds: report.driver_seconds_modelled,
        driver_seconds_more: report.driver_seconds_modelled - recorded.driver_seconds_modelled,
        retries: report.retries,
        device_bytes_total: report.in_force.device_bytes_total,
    }
}
