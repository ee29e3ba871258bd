//! The linter: the problems and warnings of a settings string and the resulting settings, without applying it. An
//! invalid string changes nothing, so the values are then the current ones.

use std::collections::BTreeMap;
use std::fmt;

use super::keys::{KEYS, Key, KeyInfo};
use super::reader::{self, Mode};
use super::{Backend, RecordMode, Settings};
use crate::error::{Problem, SettingsError, Warning};

/// The result of linting a settings string. `Display` is a report for people.
#[derive(Clone, Debug, PartialEq)]
pub struct Lint {
    /// Problems, in the order of the string.
    pub problems: Vec<Problem>,
    /// Settings that have no effect, or an unexpected one.
    pub warnings: Vec<Warning>,
    /// The settings that the string gives; `None` if there are problems.
    pub effective: Option<Settings>,
    /// Every setting with its resulting value.
    pub values: Vec<SettingValue>,
}

/// A setting with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingValue {
    /// Its key.
    pub key: &'static str,
    /// Its value in the form of a string, or in words if it has none.
    pub value: String,
    /// Where the value comes from.
    pub origin: Origin,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// The default.
    Default,
    /// The string.
    Given,
    /// The settings before the string.
    Kept,
    /// Reset to the default, because the string does not name the key.
    Reset,
}

impl Origin {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Given => "given",
            Self::Kept => "kept",
            Self::Reset => "reset",
        }
    }
}

/// Lints a string that is applied to the defaults. [`Settings::lint_update`] lints a further string.
#[must_use]
pub fn lint(string: &str) -> Lint {
    Lint::of(&Settings::default(), string, Mode::First)
}

impl Lint {
    /// Whether there are no problems and no warnings.
    #[must_use]
    pub const fn is_clean(&self) -> bool {
        self.problems.is_empty() && self.warnings.is_empty()
    }

    pub(super) fn of(base: &Settings, string: &str, mode: Mode) -> Self {
        let reading = reader::read(base, string, mode);
        let accepted = reading.problems.is_empty();
        let mut warnings = reading.warnings;
        let values = if accepted {
            warnings.extend(without_effect(&reading.settings, &reading.given));
            values(base, &reading.settings, &reading.given)
        } else {
            values(base, base, &BTreeMap::new())
        };
        // Those of the string first, in its order; then those of settings from before.
        warnings.sort_by_key(|warning| (warning.at.is_none(), warning.at));
        Self { problems: reading.problems, warnings, effective: accepted.then_some(reading.settings), values }
    }

    /// The settings. Logs the warnings.
    pub(super) fn into_result(self) -> Result<Settings, SettingsError> {
        let settings = self.effective.ok_or(SettingsError { problems: self.problems })?;
        self.warnings.iter().for_each(|warning| tracing::warn!(%warning, "in settings"));
        Ok(settings)
    }
}

impl fmt::Display for Lint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problems.iter().try_for_each(|problem| writeln!(f, "error: {problem}"))?;
        self.warnings.iter().try_for_each(|warning| writeln!(f, "warning: {warning}"))?;
        if self.effective.is_none() {
            writeln!(f, "the settings stay unchanged:")?;
        }
        let width = |column: fn(&SettingValue) -> &str| self.values.iter().map(|value| column(value).len()).max();
        let keys = width(|value| value.key).unwrap_or(0);
        let origins = width(|value| value.origin.name()).unwrap_or(0);
        let lines = self
            .values
            .iter()
            .map(|SettingValue { key, value, origin }| format!("{key:keys$}  {:origins$}  {value}", origin.name()));
        f.write_str(&lines.collect::<Vec<_>>().join("\n"))
    }
}

/// Every setting with its value in `after` and its origin.
fn values(before: &Settings, after: &Settings, given: &BTreeMap<Key, usize>) -> Vec<SettingValue> {
    let (default_before, default_after) = (before.defaults(), after.defaults());
    let value = |info: &'static KeyInfo| {
        let key = info.key;
        let (old, new) = (key.value(before), key.value(after));
        let origin = if given.contains_key(&key) {
            Origin::Given
        } else if info.resets && old != new && old != key.value(&default_before) {
            Origin::Reset
        } else if new == key.value(&default_after) {
            Origin::Default
        } else {
            Origin::Kept
        };
        SettingValue { key: info.name, value: new.unwrap_or_else(|| info.unset.into()), origin }
    };
    KEYS.iter().map(value).collect()
}

/// Settings that have no effect, or an unexpected one, in combination with the others.
fn without_effect(settings: &Settings, given: &BTreeMap<Key, usize>) -> Vec<Warning> {
    let default = settings.defaults();
    let is_given = |key: Key| given.contains_key(&key);
    let is_set = |key: Key| is_given(key) || key.value(settings) != key.value(&default);
    let limited = settings.per_process_memory_fraction < 1.0 || settings.memory_cap_bytes.is_some();
    let splits = settings.max_split_bytes.is_some();
    let expandable = settings.expandable_segments;
    let collects = settings.garbage_collection_threshold > 0.0;
    let native = settings.backend == Backend::Native;
    let pinned = &settings.pinned;

    // Settings of one backend have no effect on the others.
    let ignored = KEYS.iter().filter(|info| !info.backends.contains(&settings.backend) && is_set(info.key));
    let without_effect = match settings.backend {
        Backend::Native => "no effect; add `backend:paged`, or remove it",
        Backend::Paged => "no effect: the backend paged has no such setting; remove it",
        Backend::CudaMallocAsync => "no effect: the backend cudaMallocAsync has no such setting; remove it",
    };
    let mut found: Vec<(Key, &str)> = ignored.map(|info| (info.key, without_effect)).collect();
    let mut warn = |condition: bool, key: Key, text: &'static str| {
        if condition {
            found.push((key, text));
        }
    };
    warn(
        native && collects && !limited,
        Key::GarbageCollectionThreshold,
        "no effect without a memory limit; add `per_process_memory_fraction` below 1.0 or `memory_cap_mb`",
    );
    warn(
        native && collects && expandable,
        Key::GarbageCollectionThreshold,
        "no effect on expandable segments; remove it, or turn off `expandable_segments`",
    );
    warn(
        native && is_given(Key::MaxNonSplitRounding) && !splits,
        Key::MaxNonSplitRounding,
        "no effect while all blocks may be split; add `max_split_size_mb`, or remove it",
    );
    warn(
        native && splits && expandable,
        Key::MaxSplitSize,
        "with `expandable_segments:True` blocks are split regardless, but requests below the limit may not use free \
         blocks above it, so more memory is mapped; remove it",
    );
    warn(
        native && settings.throw_on_cudamalloc_oom && !limited,
        Key::ThrowOnCudamallocOom,
        "without a limit it only refuses requests larger than the device; add `per_process_memory_fraction` below 1.0 \
         or `memory_cap_mb`",
    );
    for key in [Key::ExpandableSegmentsReserve, Key::ExpandableSegmentsReserveByClass] {
        warn(native && is_set(key) && !expandable, key, "no effect; add `expandable_segments:True`, or remove it");
    }
    warn(
        native && settings.release_lock_on_cudamalloc,
        Key::ReleaseLockOnCudamalloc,
        "no effect: Warpool never holds the lock during a driver call; remove it",
    );
    warn(
        native
            && settings.roundup_power2_divisions.iter().all(|&steps| steps <= 1)
            && is_given(Key::RoundupPower2Divisions),
        Key::RoundupPower2Divisions,
        "no effect: one division does not round; give 2 or more, or remove it",
    );
    warn(
        settings.per_process_memory_fraction == 0.0,
        Key::PerProcessMemoryFraction,
        "with 0.0 no device memory can be allocated; give a larger number",
    );
    warn(
        pinned.num_register_threads != 1 && !pinned.use_cuda_host_register,
        Key::PinnedNumRegisterThreads,
        "no effect; add `pinned_use_cuda_host_register:True`, or remove it",
    );
    let share = &settings.share;
    for key in [Key::ShareGuaranteed, Key::ShareLimit, Key::SharePriority, Key::ShareReclaim] {
        let paged = settings.backend == Backend::Paged;
        warn(paged && is_set(key) && !share.enabled, key, "no effect; add `share:True`, or remove it");
    }
    warn(
        share.enabled && share.limit_bytes.is_some_and(|limit| limit < share.guaranteed_bytes),
        Key::ShareGuaranteed,
        "no effect above `share_limit`, which is lower; lower this one, or raise that",
    );
    let rounds_above_cached = pinned
        .max_cached_bytes
        .is_some_and(|cached| pinned.max_round_threshold_bytes.is_some_and(|round| round > cached));
    warn(
        rounds_above_cached,
        Key::PinnedMaxRoundThreshold,
        "blocks above `pinned_max_cached_size_mb` are never rounded, so that limit applies; lower this one to it",
    );
    warn(
        pinned.cap_bytes.is_some_and(|all| pinned.device_cap_bytes.is_some_and(|each| each > all)),
        Key::PinnedDeviceCap,
        "no effect: `pinned_cap_mb` is lower and covers all devices; lower this one, or remove it",
    );
    warn(
        pinned.lowest_cap().is_some_and(|cap| pinned.reserve_segment_bytes > cap),
        Key::PinnedReserveSegmentSize,
        "no effect: it exceeds what may be pinned; lower it, or raise `pinned_cap_mb` or `pinned_device_cap_mb`",
    );
    for key in [
        Key::RecordEvents,
        Key::RecordAbove,
        Key::RecordAtExit,
        Key::RecordSignal,
        Key::RecordFiles,
        Key::RecordFileSize,
        Key::RecordInterval,
    ] {
        let is_off = settings.record.mode == RecordMode::Off;
        warn(is_off && is_set(key), key, "no effect; add `record:oom`, or remove it");
    }
    let warning =
        |(key, text): (Key, &str)| Warning { key: key.name().into(), at: given.get(&key).copied(), text: text.into() };
    found.into_iter().map(warning).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lints a string and compares the warnings.
    fn check_warnings(string: &str, expected: &str) {
        let found = lint(string);
        assert_eq!(found.problems, [], "settings {string:?}");
        let shown: Vec<String> = found.warnings.iter().map(ToString::to_string).collect();
        assert_eq!(shown.join("\n"), expected, "settings {string:?}");
    }

    /// Every setting of the caching allocator alone is reported once, and no other.
    #[test]
    fn the_paged_allocator_reports_each_setting_that_it_ignores() {
        let values = [
            "large_segment_size_mb:32",
            "max_split_size_mb:200",
            "max_non_split_rounding_mb:64",
            "garbage_collection_threshold:0.8",
            "roundup_power2_divisions:4",
            "expandable_segments:True",
            "expandable_segments_reserve:0.5",
            "expandable_segments_reserve_by_class:[a:1G]",
            "release_lock_on_cudamalloc:True",
            "graph_capture_record_stream_reuse:True",
            "throw_on_cudamalloc_oom:True",
            "free_block_order:address",
        ];
        let ignored = KEYS.iter().filter(|info| !info.backends.contains(&Backend::Paged)).map(|info| info.name);
        let named = values.map(|value| value.split(':').next().unwrap_or_default());
        assert_eq!(named.to_vec(), ignored.collect::<Vec<_>>(), "the list names them all");
        let found = lint(&format!("backend:paged,{}", values.join(",")));
        let reported: Vec<&str> = found.warnings.iter().map(|warning| warning.key.as_str()).collect();
        assert_eq!(reported, named);
        assert!(found.warnings.iter().all(|warning| warning.text.contains("the backend paged has no such setting")));
    }

    #[test]
    fn settings_without_effect_are_warnings() {
        let quiet = [
            "",
            "backend:cudaMallocAsync,per_process_memory_fraction:0.5",
            "expandable_segments:True,large_segment_size_mb:12,graph_capture_record_stream_reuse:True",
            "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5",
            "garbage_collection_threshold:0.8,memory_cap_mb:100",
            "max_split_size_mb:200,max_non_split_rounding_mb:40",
            "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
            "pinned_max_round_threshold_mb:8,pinned_max_cached_size_mb:8",
            "expandable_segments:True,expandable_segments_reserve:1.125",
            "pinned_cap_mb:8,pinned_device_cap_mb:8,pinned_reserve_segment_size_mb:8",
            "record:oom,record_above:0.9,record_signal:SIGUSR2",
            "backend:expandable,large_segment_size_mb:12",
            "backend:paged,per_process_memory_fraction:0.5,memory_cap_mb:100,idle_decay_ms:5000",
            "backend:paged,share:True,share_guaranteed:20GiB,share_limit:60GiB,share_priority:1,share_reclaim_ms:20",
        ];
        for string in quiet {
            assert!(lint(string).is_clean(), "settings {string:?}");
        }
        check_warnings(
            "garbage_collection_threshold:0.8",
            "at byte 0: `garbage_collection_threshold`: no effect without a memory limit; add \
             `per_process_memory_fraction` below 1.0 or `memory_cap_mb`",
        );
        check_warnings(
            "garbage_collection_threshold:0.8,memory_cap_mb:9,expandable_segments:True",
            "at byte 0: `garbage_collection_threshold`: no effect on expandable segments; remove it, or turn off \
             `expandable_segments`",
        );
        check_warnings(
            "backend:paged,share_limit:2GiB",
            "at byte 14: `share_limit`: no effect; add `share:True`, or remove it",
        );
        check_warnings(
            "backend:paged,share:True,share_guaranteed:3GiB,share_limit:2GiB",
            "at byte 25: `share_guaranteed`: no effect above `share_limit`, which is lower; lower this one, or raise \
             that",
        );
        check_warnings("idle_decay_ms:100", "at byte 0: `idle_decay_ms`: no effect; add `backend:paged`, or remove it");
        check_warnings(
            "max_non_split_rounding_mb:20",
            "at byte 0: `max_non_split_rounding_mb`: no effect while all blocks may be split; add \
             `max_split_size_mb`, or remove it",
        );
        check_warnings(
            "throw_on_cudamalloc_oom:True",
            "at byte 0: `throw_on_cudamalloc_oom`: without a limit it only refuses requests larger than the device; \
             add `per_process_memory_fraction` below 1.0 or `memory_cap_mb`",
        );
        check_warnings(
            "expandable_segments:True,max_split_size_mb:200",
            "at byte 25: `max_split_size_mb`: with `expandable_segments:True` blocks are split regardless, but \
             requests below the limit may not use free blocks above it, so more memory is mapped; remove it",
        );
        check_warnings(
            "expandable_segments_reserve:0.5,expandable_segments_reserve_by_class:[]",
            "at byte 0: `expandable_segments_reserve`: no effect; add `expandable_segments:True`, or remove it
at byte 32: `expandable_segments_reserve_by_class`: no effect; add `expandable_segments:True`, or remove it",
        );
        check_warnings(
            "expandable_segments:True,expandable_segments_reserve:40",
            "at byte 53: `expandable_segments_reserve`: 40 times the device is limited to 9/8 of it; for GiB, write \
             `40G`",
        );
        check_warnings(
            "expandable_segments:True,expandable_segments_reserve_by_class:[a:1G,a:2G]",
            "at byte 68: `expandable_segments_reserve_by_class`: the class `a` is given more than once; the last one \
             takes effect, remove the others",
        );
        check_warnings(
            "backend:cudaMallocAsync,max_split_size_mb:200",
            "at byte 24: `max_split_size_mb`: no effect: the backend cudaMallocAsync has no such setting; remove it",
        );
        let paged = "no effect: the backend paged has no such setting; remove it";
        check_warnings(
            "expandable_segments:True,backend:paged,max_split_size_mb:200,free_block_order:address",
            &format!(
                "at byte 0: `expandable_segments`: {paged}\nat byte 39: `max_split_size_mb`: {paged}\nat byte 61: \
                 `free_block_order`: {paged}"
            ),
        );
        check_warnings(
            "release_lock_on_hipmalloc:True",
            "at byte 0: `release_lock_on_cudamalloc`: no effect: Warpool never holds the lock during a driver call; \
             remove it",
        );
        check_warnings(
            "roundup_power2_divisions:1",
            "at byte 0: `roundup_power2_divisions`: no effect: one division does not round; give 2 or more, or remove \
             it",
        );
        check_warnings(
            "per_process_memory_fraction:0",
            "at byte 0: `per_process_memory_fraction`: with 0.0 no device memory can be allocated; give a larger \
             number",
        );
        check_warnings("record_files:9", "at byte 0: `record_files`: no effect; add `record:oom`, or remove it");
        check_warnings(
            "pinned_num_register_threads:8",
            "at byte 0: `pinned_num_register_threads`: no effect; add `pinned_use_cuda_host_register:True`, or remove \
             it",
        );
        check_warnings(
            "pinned_max_round_threshold_mb:9,pinned_max_cached_size_mb:8",
            "at byte 0: `pinned_max_round_threshold_mb`: blocks above `pinned_max_cached_size_mb` are never rounded, \
             so that limit applies; lower this one to it",
        );
        check_warnings(
            "pinned_cap_mb:8,pinned_device_cap_mb:9",
            "at byte 16: `pinned_device_cap_mb`: no effect: `pinned_cap_mb` is lower and covers all devices; lower \
             this one, or remove it",
        );
        check_warnings(
            "pinned_device_cap_mb:8,pinned_reserve_segment_size_mb:9",
            "at byte 23: `pinned_reserve_segment_size_mb`: no effect: it exceeds what may be pinned; lower it, or \
             raise `pinned_cap_mb` or `pinned_device_cap_mb`",
        );
        check_warnings(
            "expandable_segments:True,expandable_segments:False",
            "at byte 25: `expandable_segments`: given more than once, first at byte 0; the last one takes effect, \
             remove the others",
        );
    }

    #[test]
    fn a_warning_about_earlier_settings_has_no_position() {
        let before = Settings::parse("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5").unwrap();
        let found = before.lint_update("per_process_memory_fraction:1.0");
        let places: Vec<_> = found.warnings.iter().map(|warning| (warning.key.as_str(), warning.at)).collect();
        assert_eq!(places, [("throw_on_cudamalloc_oom", None)]);
    }

    #[test]
    fn a_lint_lists_every_value_with_its_origin() {
        let before = Settings::parse("max_split_size_mb:200,memory_cap_mb:64").unwrap();
        let found = before.lint_update("expandable_segments:True,pinned_num_register_threads:8");
        let expected = "\
warning: at byte 25: `pinned_num_register_threads`: no effect; add `pinned_use_cuda_host_register:True`, or remove it
backend                               default  native
large_segment_size_mb                 default  20
max_split_size_mb                     reset    unlimited
max_non_split_rounding_mb             default  20
garbage_collection_threshold          default  off
roundup_power2_divisions              default  off
expandable_segments                   given    True
expandable_segments_reserve           default  9/8 of the device
expandable_segments_reserve_by_class  default  none
release_lock_on_cudamalloc            default  False
graph_capture_record_stream_reuse     default  False
per_process_memory_fraction           default  1.0
throw_on_cudamalloc_oom               default  False
pinned_use_cuda_host_register         default  False
pinned_num_register_threads           given    8
pinned_use_background_threads         default  False
pinned_reserve_segment_size_mb        default  none
pinned_max_round_threshold_mb         default  unlimited
pinned_max_cached_size_mb             default  unlimited
pinned_free_catch_all                 default  False
pinned_cap_mb                         default  unlimited
pinned_device_cap_mb                  default  unlimited
free_block_order                      default  registration
memory_cap_mb                         kept     64
idle_decay_ms                         default  never
share                                 default  False
share_guaranteed                      default  0B
share_limit                           default  unlimited
share_priority                        default  0
share_reclaim_ms                      default  50
record                                default  off
record_events                         default  250000
record_above                          default  off
record_at_exit                        default  False
record_signal                         default  none
record_files                          default  4
record_file_mb                        default  64
record_interval_s                     default  60";
        assert_eq!(found.to_string(), expected);

        let refused = before.lint_update("expandable_segments:on");
        let lines = refused.to_string();
        assert_eq!(refused.effective, None);
        assert!(
            lines.starts_with(
                "error: at byte 20: `expandable_segments`: invalid value `on`; expected True or \
                                   False; did you mean `True`?\nthe settings stay unchanged:\n"
            ),
            "{lines}"
        );
        assert!(lines.contains("\nmax_split_size_mb                     kept     200\n"), "{lines}");
    }
}
