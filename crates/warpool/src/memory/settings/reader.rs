//! From a settings string to settings: entries are applied to a copy of the current settings. Reading continues after a
//! problem, so that all of them are reported. The values of single keys are in `value.rs`.

use std::collections::BTreeMap;

use super::keys::{Key, suggestion};
use super::syntax::{Value, Word, entries, problem};
use super::{Backend, MIB, RecordSettings, Settings, value};
use crate::error::{Problem, Warning};

/// The purpose for which a string is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The first settings.
    First,
    /// A change of current settings.
    Update,
    /// The settings of a recorded program: PyTorch accepted the string, so what is invalid here is ignored.
    Recorded,
}

/// The result of reading a string.
#[derive(Debug)]
pub(super) struct Reading {
    /// The settings with everything that could be applied; valid only without problems.
    pub settings: Settings,
    /// The keys that were given, with their positions.
    pub given: BTreeMap<Key, usize>,
    /// Problems, in the order of the string.
    pub problems: Vec<Problem>,
    /// Warnings about the string itself. Those about the resulting settings come from the linter.
    pub warnings: Vec<Warning>,
}

/// Reads a string, starting from `base`.
pub(super) fn read(base: &Settings, string: &str, mode: Mode) -> Reading {
    let (entries, problems) = entries(string);
    let mut reading = Reading {
        settings: Settings { text: string.into(), ..base.clone() },
        given: BTreeMap::new(),
        problems,
        warnings: Vec::new(),
    };
    let known = reading.known(entries);
    let backend = known.iter().rfind(|(key, ..)| *key == Key::Backend);
    let expandable = backend.filter(|(.., value)| value::is_expandable_backend(value)).map(|(_, name, _)| name.at);
    // The size of large segments comes first: it is the minimum of others, and the default of one. The backend may turn
    // expandable segments on, which another entry confirms.
    let is_first = |key| matches!(key, Key::LargeSegmentSize | Key::Backend);
    let (first, others): (Vec<_>, Vec<_>) = known.into_iter().partition(|(key, ..)| is_first(*key));
    reading.apply(first);
    reset(&mut reading.settings);
    reading.settings.expandable_segments |= expandable.is_some();
    reading.apply(others);
    if let Some(at) = expandable {
        reading.given.entry(Key::ExpandableSegments).or_insert(at);
    }
    if mode == Mode::Recorded {
        // How a program was recorded is no condition of it.
        reading.settings.record = RecordSettings::default();
    } else {
        reading.check_pairs(base, mode, expandable.is_some());
    }
    reading.problems.sort_by_key(|problem| problem.at);
    reading
}

/// Resets the keys that every further string resets.
fn reset(settings: &mut Settings) {
    let default = settings.defaults();
    settings.max_split_bytes = default.max_split_bytes;
    settings.max_non_split_rounding_bytes = default.max_non_split_rounding_bytes;
    settings.garbage_collection_threshold = default.garbage_collection_threshold;
    settings.roundup_power2_divisions = default.roundup_power2_divisions;
}

impl Reading {
    /// The entries with known keys.
    fn known(&mut self, entries: Vec<(Word, Value)>) -> Vec<(Key, Word, Value)> {
        let mut known = Vec::new();
        for (name, value) in entries {
            match Key::named(&name.text) {
                Some(key) => known.push((key, name, value)),
                None => self.problems.push(problem(&name, unknown(&name.text))),
            }
        }
        known
    }

    fn apply(&mut self, entries: Vec<(Key, Word, Value)>) {
        for (key, name, value) in entries {
            if let Some(before) = self.given.insert(key, name.at) {
                let text = format!(
                    "given more than once, first at byte {before}; the last one takes effect, remove the others"
                );
                self.warn(key, Some(name.at), text);
            }
            match value::set(&mut self.settings, key, &value) {
                Ok(remarks) => remarks.into_iter().for_each(|remark| self.warn(key, Some(remark.at), remark.text)),
                Err(remark) => {
                    self.problems.push(Problem { key: name.text, at: Some(remark.at), text: remark.text });
                }
            }
        }
    }

    fn warn(&mut self, key: Key, at: Option<usize>, text: String) {
        self.warnings.push(Warning { key: key.name().into(), at, text });
    }

    /// Settings that exclude each other, given by the string or set before.
    fn check_pairs(&mut self, base: &Settings, mode: Mode, expandable_backend: bool) {
        let settings = &self.settings;
        let mut refused = Vec::new();
        if mode == Mode::Update && settings.backend != base.backend {
            refused.push((
                [Key::Backend, Key::Backend],
                format!(
                    "the backend is {} and cannot be changed; remove the key, or restart the program with it",
                    base.backend.name()
                ),
            ));
        } else if settings.backend == Backend::CudaMallocAsync && settings.expandable_segments {
            refused.push((
                [Key::Backend, Key::ExpandableSegments],
                "the driver's pool has no expandable segments; remove either `backend:cudaMallocAsync` or \
                 `expandable_segments:True`"
                    .into(),
            ));
        }
        if expandable_backend && !settings.expandable_segments {
            refused.push((
                [Key::ExpandableSegments, Key::Backend],
                "`backend:expandable` turns expandable segments on; remove either, or choose `backend:native`".into(),
            ));
        }
        let expandable = settings.expandable_segments && settings.backend != Backend::Paged;
        if expandable && !settings.large_segment_bytes.is_multiple_of(2 * MIB) {
            refused.push((
                [Key::LargeSegmentSize, Key::ExpandableSegments],
                "expandable segments are mapped in steps of 2 MiB; give an even number".into(),
            ));
        }
        for (keys, text) in refused {
            // The problem is reported at the key that the string gives, if it gives one.
            let given = keys.into_iter().find_map(|key| Some((key, *self.given.get(&key)?)));
            let (key, at) = given.map_or((keys[0], None), |(key, at)| (key, Some(at)));
            self.problems.push(Problem { key: key.name().into(), at, text });
        }
    }
}

/// The message for an unknown key.
fn unknown(name: &str) -> String {
    if name == "expandable_segments_handle_type" {
        return "unknown key: PyTorch's messages mention it, but PyTorch does not read it; remove it".into();
    }
    if name == "paged_slack" {
        return "no longer a key: it reserved more and saved no time; remove it".into();
    }
    if name.contains(['=', ';']) {
        return "unknown key; write `key:value`, with commas between entries".into();
    }
    if name.contains(['"', '\'']) {
        return "unknown key; remove the quotation marks from the string".into();
    }
    match suggestion(name) {
        Some(key) => format!("unknown key; did you mean `{key}`?"),
        None => "unknown key: neither PyTorch nor Warpool has it; remove it".into(),
    }
}
