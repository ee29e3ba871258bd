//! The conditions of a run: the recorded ones with the changes of a what-if, and their description for the report.
//!
//! A what-if that changes nothing has the recorded conditions, however it is written, so its result is the recorded
//! one.

use warpool::driver::sim::SimDevice;
use warpool::memory::Settings;
use warpool::memory::settings::{Backend, Lint, Reserve, SettingsError, lint};

use super::options::{AllocatorChoice, WhatIf};
use super::prove::{CAPACITY_MAX, recorded_allocator};
use super::report::{InForce, InferredLimit, LimitOrigin, SettingChange};
use crate::cards::DeviceMemory;

/// What is known about the recorded program.
#[derive(Clone, Copy)]
pub(super) struct RecordedConditions<'a> {
    /// The settings of the snapshot.
    pub settings: &'a Settings,
    /// The same as they were inferred: with the order of free blocks, and as they were before the first event.
    pub settings_inferred: &'a Settings,
    pub limit: Option<InferredLimit>,
    /// The device, as far as known.
    pub device: &'a DeviceMemory,
    /// The memory of the simulated device: that of the recorded one, or enough for the recording.
    pub capacity: u64,
    /// The memory of a device whose address ranges of expandable segments are not longer than the recorded ones.
    pub capacity_of_ranges: u64,
}

/// The conditions of a run.
#[derive(Clone, Debug)]
pub(super) struct Conditions {
    pub settings: Settings,
    /// Whether the settings are the recorded ones, with all changes that the program made while it ran.
    pub settings_are_recorded: bool,
    pub allocator: AllocatorChoice,
    pub capacity: u64,
    /// A limit beside that of the settings.
    pub memory_limit: Option<u64>,
    /// Whether everything is as recorded.
    pub is_recorded: bool,
    pub in_force: InForce,
    /// Warnings about the settings of the what-if.
    pub warnings: Vec<String>,
}

impl Conditions {
    /// The recorded conditions with the changes of a what-if.
    ///
    /// # Errors
    /// If its changes are not valid settings.
    pub fn new(recorded: RecordedConditions<'_>, what_if: &WhatIf) -> Result<Self, SettingsError> {
        let allocator_recorded = recorded_allocator(recorded.settings);
        let allocator = match what_if.allocator {
            AllocatorChoice::Caching => allocator_recorded,
            other => other,
        };
        let asked = asked_settings(recorded.settings, what_if)?;
        let given = given_entries(what_if);
        let settings_are_recorded = asked.as_ref().is_none_or(|asked| {
            let names_order = names(&given, "free_block_order");
            let order = if names_order { asked.free_block_order } else { recorded.settings.free_block_order };
            let same = Settings { text: recorded.settings.text.clone(), free_block_order: order, ..asked.clone() };
            same == *recorded.settings && (!names_order || order == recorded.settings_inferred.free_block_order)
        });
        let settings = match asked {
            Some(asked) if !settings_are_recorded => {
                let named = names(&given, "free_block_order");
                let order = if named { asked.free_block_order } else { recorded.settings_inferred.free_block_order };
                Settings { free_block_order: order, ..asked }
            }
            _ => recorded.settings_inferred.clone(),
        };
        let capacity_asked = what_if.capacity.map(|bytes| bytes.min(CAPACITY_MAX));
        let other_device = capacity_asked.filter(|&bytes| !is_same_device(bytes, recorded.device));
        let capacity = other_device.unwrap_or(recorded.capacity);
        let names_limit = names(&given, "per_process_memory_fraction") || names(&given, "memory_cap_mb");
        let is_lifted = names_limit || other_device.is_some();
        let memory_limit = recorded.limit.filter(|_| !is_lifted).map(|limit| limit.used);
        let is_recorded = settings_are_recorded
            && allocator == allocator_recorded
            && other_device.is_none()
            && (recorded.limit.is_none() || !is_lifted);
        let mut conditions = Self {
            settings,
            settings_are_recorded,
            allocator,
            capacity,
            memory_limit,
            is_recorded,
            in_force: InForce::default(),
            warnings: Vec::new(),
        };
        conditions.in_force = conditions.in_words(recorded, capacity_asked);
        conditions.warnings = conditions.warnings_about(&given);
        conditions.keep_address_ranges(recorded);
        Ok(conditions)
    }

    /// Expandable segments reserve addresses in proportion to the device. On a larger device they would not fit between
    /// the recorded addresses of other segments, so the ranges keep their recorded length, which is enough for the
    /// recorded program.
    fn keep_address_ranges(&mut self, recorded: RecordedConditions<'_>) {
        let both = self.settings.expandable_segments && recorded.settings_inferred.expandable_segments;
        let is_longer = self.capacity > recorded.capacity_of_ranges;
        if both && is_longer && self.settings.expandable_segments_reserve.is_none() {
            let bytes = recorded.capacity_of_ranges / 8 * 9;
            self.settings.expandable_segments_reserve = Some(Reserve::Bytes(bytes));
        }
    }

    fn in_words(&self, recorded: RecordedConditions<'_>, capacity_asked: Option<u64>) -> InForce {
        let (limit, limit_origin) = self.limit_in_force(recorded);
        let device = capacity_asked.map_or_else(|| recorded.device.clone(), DeviceMemory::given);
        let usable = device.bytes_total.map(|_| self.capacity.saturating_sub(bytes_context()));
        let settings_before = recorded.settings;
        let shown = if self.settings_are_recorded { settings_before } else { &self.settings };
        InForce {
            settings_recorded: conf_string(settings_before, recorded_allocator(settings_before)),
            settings: conf_string(shown, self.allocator),
            changes: changes(settings_before, shown, self.allocator),
            allocator: self.allocator,
            allocator_recorded: recorded_allocator(settings_before),
            device_bytes_total: device.bytes_total,
            device_origin: device.origin,
            device_name: device.name,
            device_bytes_simulated: self.capacity,
            bytes_available: [limit, usable].into_iter().flatten().min(),
            memory_limit: limit,
            limit_origin,
            limit_lifted: recorded.limit.filter(|_| self.memory_limit.is_none()).map(|limit| limit.used),
        }
    }

    /// The lowest limit, and where it comes from.
    fn limit_in_force(&self, recorded: RecordedConditions<'_>) -> (Option<u64>, LimitOrigin) {
        let own = settings_limit(&self.settings, self.capacity);
        match (self.memory_limit, own) {
            (None, None) => (None, LimitOrigin::None),
            (Some(limit), own) if own.is_none_or(|own| limit <= own) => {
                let is_full = recorded.limit.is_some_and(|limit| limit.device_full);
                let origin = if is_full { LimitOrigin::RecordedDeviceFull } else { LimitOrigin::Recorded };
                (Some(limit), origin)
            }
            (_, own) if self.settings_are_recorded => (own, LimitOrigin::Recorded),
            (_, own) => (own, LimitOrigin::Settings),
        }
    }

    /// Warnings about given entries that have no effect with this allocator and this limit.
    fn warnings_about(&self, given: &str) -> Vec<String> {
        if given.is_empty() {
            return Vec::new();
        }
        let backend = backend_entry(self.allocator);
        // With a limit in force, settings that need one have an effect.
        let limit = match self.memory_limit {
            Some(limit) => format!(",memory_cap_mb:{}", (limit >> 20).max(2)),
            None => String::new(),
        };
        let given_at = backend.len()..backend.len() + given.len();
        let Lint { problems, warnings, .. } = lint(&format!("{backend}{given}{limit}"));
        let is_given = |at: Option<usize>| at.is_some_and(|at| given_at.contains(&at));
        // A program with this combination would not start; a replay ignores the entry.
        let excluded = "expandable_segments";
        let problems = problems.iter().filter(|_| !backend.is_empty() && names(given, excluded)).take(1);
        let problems =
            problems.map(|_| (excluded.to_owned(), format!("no effect: {} has none", self.allocator.name())));
        let warnings = warnings.into_iter().filter(|warning| is_given(warning.at));
        problems
            .chain(warnings.map(|warning| (warning.key, warning.text)))
            .map(|(key, text)| format!("`{key}`: {text}"))
            .collect()
    }
}

/// The memory that a context takes on the device.
pub(crate) fn bytes_context() -> u64 {
    SimDevice::h200().bytes_context
}

/// The settings of a what-if; `None` if it changes none.
fn asked_settings(recorded: &Settings, what_if: &WhatIf) -> Result<Option<Settings>, SettingsError> {
    let Some(changes) = what_if.changes.as_deref().filter(|changes| !changes.trim().is_empty()) else {
        return Ok(what_if.settings.clone());
    };
    // Parsed alone first, so that an error is about the given entries only.
    parse(changes)?;
    let base = what_if.settings.as_ref().unwrap_or(recorded);
    let conf = base.to_conf_string();
    let separator = if conf.is_empty() { "" } else { "," };
    Ok(Some(parse(&format!("{conf}{separator}{changes}"))?))
}

/// The settings of a string. Nothing is logged: the report has the warnings.
fn parse(string: &str) -> Result<Settings, SettingsError> {
    let Lint { problems, effective, .. } = lint(string);
    effective.ok_or(SettingsError { problems })
}

/// The entries that were given, in the order in which they apply.
fn given_entries(what_if: &WhatIf) -> String {
    let settings = what_if.settings.as_ref().map_or("", |settings| settings.text.as_str());
    let entries = [settings, what_if.changes.as_deref().unwrap_or_default()];
    entries.into_iter().map(str::trim).filter(|entries| !entries.is_empty()).collect::<Vec<_>>().join(",")
}

fn names(entries: &str, key: &str) -> bool {
    entries.contains(key)
}

/// Whether a given size is that of the recorded device, which may be written as 139.8GiB. An unknown device is never
/// the same: the given size is then all that is known about the device.
pub(super) fn is_same_device(bytes: u64, recorded: &DeviceMemory) -> bool {
    recorded.bytes_total.is_some_and(|total| bytes.abs_diff(total) <= total / 1000)
}

/// The limit that the settings set for reserved memory on a device, if any.
fn settings_limit(settings: &Settings, capacity: u64) -> Option<u64> {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "as the allocator computes it"
    )]
    let of_fraction = (capacity as f64 * settings.per_process_memory_fraction) as u64;
    let of_fraction = Some(of_fraction).filter(|_| settings.per_process_memory_fraction < 1.0);
    [of_fraction, settings.memory_cap_bytes].into_iter().flatten().min()
}

/// The entry that selects an allocator, with a comma; empty for the caching allocator.
fn backend_entry(allocator: AllocatorChoice) -> String {
    let backend = match allocator {
        AllocatorChoice::Caching => return String::new(),
        AllocatorChoice::Paged => Backend::Paged,
        AllocatorChoice::DriverPool => Backend::CudaMallocAsync,
    };
    format!("backend:{},", backend.name())
}

/// The keys of `conf` that an allocator does not have.
fn ignored_keys(conf: &str, allocator: AllocatorChoice) -> Vec<String> {
    if allocator == AllocatorChoice::Caching {
        return Vec::new();
    }
    let Lint { problems, warnings, .. } = lint(&format!("{}{conf}", backend_entry(allocator)));
    let warnings = warnings.into_iter().filter(|warning| warning.text.starts_with("no effect: the backend"));
    problems.into_iter().map(|problem| problem.key).chain(warnings.map(|warning| warning.key)).collect()
}

/// The settings as a string, without the allocator and what it does not have.
fn conf_string(settings: &Settings, allocator: AllocatorChoice) -> String {
    let conf = Settings { backend: Backend::Native, ..settings.clone() }.to_conf_string();
    let ignored = ignored_keys(&conf, allocator);
    let values = lint(&conf).values;
    let given = values.into_iter().filter(|value| value.origin.name() == "given");
    let kept = given.filter(|value| !ignored.iter().any(|key| key == value.key) && value.key != "free_block_order");
    kept.map(|value| format!("{}:{}", value.key, value.value)).collect::<Vec<_>>().join(",")
}

/// The settings that differ, of those that the allocator has.
fn changes(recorded: &Settings, used: &Settings, allocator: AllocatorChoice) -> Vec<SettingChange> {
    let conf = |settings: &Settings| {
        let order = recorded.free_block_order;
        Settings { backend: Backend::Native, free_block_order: order, ..settings.clone() }.to_conf_string()
    };
    let (before, after) = (conf(recorded), conf(used));
    let mut ignored = ignored_keys(&after, allocator);
    ignored.extend(ignored_keys(&before, allocator));
    let pairs = lint(&before).values.into_iter().zip(lint(&after).values);
    let changed = pairs.filter(|(before, after)| before.value != after.value);
    let changed = changed.filter(|(before, _)| !ignored.iter().any(|key| key == before.key));
    changed
        .map(|(before, after)| SettingChange { key: before.key, recorded: before.value, used: after.value })
        .collect()
}
