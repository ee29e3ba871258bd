//! Settings to and from snapshots.
//!
//! A snapshot has the last string and the values of some settings. The values take precedence over the string: earlier
//! strings may have set them, and other versions have other defaults.

use super::Settings;
use super::keys::Key;
use super::reader::{self, Mode};
use crate::error::{Problem, SettingsError, Warning};
use crate::memory::RecordedSettings;

impl Settings {
    /// The settings in the form of a snapshot.
    #[must_use]
    pub fn recorded(&self) -> RecordedSettings {
        let divisions = self.roundup_power2_divisions.iter().enumerate();
        RecordedSettings {
            conf: Some(self.text.clone()),
            max_split_size: Some(limit_recorded(self.max_split_bytes)),
            garbage_collection_threshold: Some(self.garbage_collection_threshold),
            expandable_segments: Some(self.expandable_segments),
            pinned_num_register_threads: Some(count_recorded(self.pinned.num_register_threads)),
            release_lock_on_cudamalloc: Some(self.release_lock_on_cudamalloc),
            pinned_use_cuda_host_register: Some(self.pinned.use_cuda_host_register),
            graph_capture_record_stream_reuse: Some(self.graph_capture_record_stream_reuse),
            max_round_threshold: Some(limit_recorded(self.pinned.max_round_threshold_bytes)),
            max_cached_size: Some(limit_recorded(self.pinned.max_cached_bytes)),
            roundup_power2_divisions: Some(
                divisions.map(|(bucket, &steps)| ((1_u64 << bucket).to_string(), count_recorded(steps))).collect(),
            ),
        }
    }

    /// The settings of a recorded program. Entries of its string that are unknown or invalid here are ignored and
    /// logged as warnings: PyTorch accepted them.
    ///
    /// PyTorch's snapshots do not record the [free block order](Self::free_block_order); it is the default here.
    ///
    /// # Errors
    /// If a recorded value is impossible.
    pub fn from_recorded(recorded: &RecordedSettings) -> Result<Self, SettingsError> {
        let (settings, warnings) = Self::read_recorded(recorded)?;
        warnings.iter().for_each(|warning| tracing::warn!(%warning, "in recorded settings"));
        Ok(settings)
    }

    /// The settings of a recording, and warnings about ignored entries.
    pub(super) fn read_recorded(recorded: &RecordedSettings) -> Result<(Self, Vec<Warning>), SettingsError> {
        let conf = recorded.conf.as_deref().unwrap_or_default();
        let reading = reader::read(&Self::default(), conf, Mode::Recorded);
        let ignored = reading.problems.into_iter().map(|problem| Warning {
            key: problem.key,
            at: problem.at,
            text: format!("ignored: {}", problem.text),
        });
        let warnings = ignored.chain(reading.warnings).collect();
        let mut settings = reading.settings;
        let mut problems = Vec::new();
        settings.apply_recorded(recorded, &mut problems);
        if problems.is_empty() { Ok((settings, warnings)) } else { Err(SettingsError { problems }) }
    }

    /// Applies the values that were recorded in addition to the string.
    fn apply_recorded(&mut self, recorded: &RecordedSettings, problems: &mut Vec<Problem>) {
        let mut reject = |key: Key, text: String| {
            problems.push(Problem {
                key: key.name().into(),
                at: None,
                text: format!("{text}; the recording is damaged"),
            });
        };
        if let Some(limit) = recorded.max_split_size {
            self.max_split_bytes = limit_from(limit);
        }
        if let Some(limit) = recorded.max_round_threshold {
            self.pinned.max_round_threshold_bytes = limit_from(limit);
        }
        if let Some(limit) = recorded.max_cached_size {
            self.pinned.max_cached_bytes = limit_from(limit);
        }
        match recorded.garbage_collection_threshold {
            // 1 and more never collects. No valid string gives it, but a failed one may have set it.
            Some(threshold) if threshold >= 0.0 && threshold.is_finite() => {
                self.garbage_collection_threshold = threshold;
            }
            Some(threshold) => {
                reject(
                    Key::GarbageCollectionThreshold,
                    format!("recorded as {threshold}, which is not a fraction of the limit"),
                );
            }
            None => {}
        }
        match recorded.pinned_num_register_threads.map(u64::try_from) {
            Some(Ok(threads)) if threads > 0 => self.pinned.num_register_threads = threads,
            Some(_) => reject(Key::PinnedNumRegisterThreads, "recorded as less than 1".into()),
            None => {}
        }
        let flags = [
            (&mut self.expandable_segments, recorded.expandable_segments),
            (&mut self.release_lock_on_cudamalloc, recorded.release_lock_on_cudamalloc),
            (&mut self.pinned.use_cuda_host_register, recorded.pinned_use_cuda_host_register),
            (&mut self.graph_capture_record_stream_reuse, recorded.graph_capture_record_stream_reuse),
        ];
        for (flag, value) in flags {
            *flag = value.unwrap_or(*flag);
        }
        for (boundary, steps) in recorded.roundup_power2_divisions.iter().flatten() {
            match (bucket(boundary), u64::try_from(*steps)) {
                (Some(bucket), Ok(steps)) => self.roundup_power2_divisions[bucket] = steps,
                _ => {
                    reject(
                        Key::RoundupPower2Divisions,
                        format!("recorded with `{boundary}`:{steps}, which is impossible"),
                    );
                }
            }
        }
    }
}

/// The index of a size, given in MiB, in the table of divisions.
fn bucket(boundary: &str) -> Option<usize> {
    let mib: u64 = boundary.parse().ok().filter(|mib: &u64| mib.is_power_of_two())?;
    Some(mib.ilog2() as usize).filter(|&bucket| bucket < 16)
}

/// A limit in the form of a snapshot. One that does not fit exceeds any device, so it is unlimited.
fn limit_recorded(limit: Option<u64>) -> i64 {
    limit.and_then(|bytes| i64::try_from(bytes).ok()).unwrap_or(-1)
}

/// Negative is unlimited: snapshots have the largest 64-bit number as -1, and a limit near it as a smaller one.
fn limit_from(limit: i64) -> Option<u64> {
    u64::try_from(limit).ok()
}

fn count_recorded(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::settings::MIB;

    /// Reads a recording with that string and the changes of `change`; checks the resulting settings and the ignored
    /// entries.
    fn check(conf: &str, change: impl FnOnce(&mut RecordedSettings), expected: &str) {
        let mut recorded = RecordedSettings { conf: Some(conf.into()), ..RecordedSettings::default() };
        change(&mut recorded);
        let shown = match Settings::read_recorded(&recorded) {
            Ok((settings, warnings)) => {
                assert_eq!(settings.text, conf);
                let keys: Vec<&str> = warnings.iter().map(|warning| warning.key.as_str()).collect();
                format!("{} | {}", settings.to_conf_string(), keys.join(" "))
            }
            Err(error) => error.to_string(),
        };
        assert_eq!(shown.trim(), expected, "recorded {conf:?}");
    }

    #[test]
    fn values_count_more_than_the_string() {
        check("", |_| {}, "|");
        check("max_split_size_mb:200", |_| {}, "max_split_size_mb:200 |");
        check("max_split_size_mb:200", |recorded| recorded.max_split_size = Some(-1), "|");
        check("", |recorded| recorded.max_split_size = Some(40 << 20), "max_split_size_mb:40 |");
        check("expandable_segments:True", |recorded| recorded.expandable_segments = Some(false), "|");
        check("", |recorded| recorded.expandable_segments = Some(true), "expandable_segments:True |");
        check("per_process_memory_fraction:0.5", |_| {}, "per_process_memory_fraction:0.5 |");
        check("", |recorded| recorded.max_cached_size = Some(3 << 20), "pinned_max_cached_size_mb:3 |");
        check(
            "roundup_power2_divisions:4",
            |recorded| recorded.roundup_power2_divisions = Some(vec![("1".into(), 0), ("32768".into(), 8)]),
            "roundup_power2_divisions:[1:0,2:4,4:4,8:4,16:4,32:4,64:4,128:4,256:4,512:4,1024:4,2048:4,4096:4,8192:4,\
             16384:4,>:8] |",
        );
    }

    #[test]
    fn what_pytorch_took_is_passed_over() {
        check("brand_new:1,max_split_size_mb:30", |_| {}, "max_split_size_mb:30 | brand_new");
        check(
            "max_split_size_mb=30,expandable_segments:True",
            |_| {},
            "expandable_segments:True | max_split_size_mb=30",
        );
        check(
            "backend:cudaMallocAsync,expandable_segments:True",
            |_| {},
            "backend:cudaMallocAsync,expandable_segments:True |",
        );
    }

    #[test]
    fn damaged_values_are_refused() {
        check(
            "",
            |recorded| recorded.garbage_collection_threshold = Some(f64::NAN),
            "settings: `garbage_collection_threshold`: recorded as NaN, which is not a fraction of the limit; the \
             recording is damaged",
        );
        check(
            "",
            |recorded| {
                recorded.pinned_num_register_threads = Some(0);
                recorded.roundup_power2_divisions = Some(vec![("3".into(), 1), ("65536".into(), 1), ("2".into(), -1)]);
            },
            "settings: 4 problems
  `pinned_num_register_threads`: recorded as less than 1; the recording is damaged
  `roundup_power2_divisions`: recorded with `3`:1, which is impossible; the recording is damaged
  `roundup_power2_divisions`: recorded with `65536`:1, which is impossible; the recording is damaged
  `roundup_power2_divisions`: recorded with `2`:-1, which is impossible; the recording is damaged",
        );
    }

    #[test]
    fn a_snapshot_tells_what_one_string_set() {
        let string = "max_split_size_mb:200,roundup_power2_divisions:[2:4,>:8],pinned_max_cached_size_mb:7,\
                      pinned_cap_mb:32,pinned_device_cap_mb:16,free_block_order:address,memory_cap_mb:64,\
                      large_segment_size_mb:32";
        let settings = Settings::parse(string).unwrap();
        let recorded = settings.recorded();
        assert_eq!(recorded.max_split_size, Some(200 * MIB as i64));
        assert_eq!(recorded.max_round_threshold, Some(-1));
        assert_eq!(Settings::from_recorded(&recorded).unwrap(), settings);
    }
}
