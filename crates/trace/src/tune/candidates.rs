//! The settings and allocators that are worth a trial on a recording.

use warpool::memory::Settings;
use warpool::memory::report::Action;
use warpool::memory::settings::{Backend, Lint, SettingsError, lint};

use crate::replay::{AllocatorChoice, DeviceReplay, WhatIf};

/// Settings or an allocator to try.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What is changed, in a few words; `as recorded` for the control.
    pub name: String,
    /// The settings string to set; empty for the defaults.
    pub set: String,
    /// The environment variable that takes it.
    pub variable: &'static str,
    /// The what-if.
    pub what_if: WhatIf,
    /// Whether the figures are a lower bound only.
    pub is_lower_bound: bool,
}

impl Candidate {
    /// The recorded settings: the control.
    #[must_use]
    pub fn recorded(settings: &Settings) -> Self {
        Self {
            name: "as recorded".to_owned(),
            set: settings.to_conf_string(),
            variable: "PYTORCH_CUDA_ALLOC_CONF",
            what_if: WhatIf::default(),
            is_lower_bound: false,
        }
    }

    /// The recorded settings with some entries changed.
    #[must_use]
    pub fn changed(settings: &Settings, entries: &str) -> Self {
        let set = merged(settings, entries);
        let what_if = WhatIf { changes: Some(entries.to_owned()), ..WhatIf::default() };
        Self { name: entries.to_owned(), set, variable: "PYTORCH_CUDA_ALLOC_CONF", what_if, is_lower_bound: false }
    }

    /// Settings in place of the recorded ones.
    ///
    /// # Errors
    /// If the string is not valid.
    pub fn replaced(string: &str) -> Result<Self, SettingsError> {
        let Lint { problems, effective, .. } = lint(string);
        let settings = effective.ok_or(SettingsError { problems })?;
        let allocator = match settings.backend {
            Backend::Native => AllocatorChoice::Caching,
            Backend::Paged => AllocatorChoice::Paged,
            Backend::CudaMallocAsync => AllocatorChoice::DriverPool,
        };
        let what_if = WhatIf { settings: Some(settings), allocator, ..WhatIf::default() };
        let name = if string.is_empty() { "defaults" } else { string };
        let variable = variable(allocator);
        let is_lower_bound = allocator == AllocatorChoice::DriverPool;
        Ok(Self { name: name.to_owned(), set: string.to_owned(), variable, what_if, is_lower_bound })
    }

    /// The what-if on a device of that size; `None` is the recorded one.
    pub(super) fn on(&self, capacity: Option<u64>) -> WhatIf {
        WhatIf { capacity, ..self.what_if.clone() }
    }

    /// Whether nothing is changed.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.what_if == WhatIf::default()
    }

    /// How to switch it on: lines for the shell, or for the program.
    #[must_use]
    pub fn apply(&self) -> String {
        match self.variable {
            _ if self.is_recorded() => "keep the settings as they are".to_owned(),
            "WARPOOL_CONF" => {
                // The paged allocator is the default of `enable`.
                let entries = if self.set == "backend:paged" { String::new() } else { format!("{:?}", self.set) };
                format!("pip install warpool\nimport warpool.torch; warpool.torch.enable({entries})")
            }
            variable if self.set.is_empty() => format!("unset {variable}"),
            variable => format!("export {variable}={}", quoted(&self.set)),
        }
    }

    /// Another allocator.
    #[must_use]
    pub fn allocator(allocator: AllocatorChoice, entries: &str) -> Self {
        let backend = match allocator {
            AllocatorChoice::Caching => "native",
            AllocatorChoice::Paged => "paged",
            AllocatorChoice::DriverPool => "cudaMallocAsync",
        };
        let variable = variable(allocator);
        let separator = if entries.is_empty() { "" } else { "," };
        let set = format!("backend:{backend}{separator}{entries}");
        let changes = (!entries.is_empty()).then(|| entries.to_owned());
        let what_if = WhatIf { allocator, changes, ..WhatIf::default() };
        let is_lower_bound = allocator == AllocatorChoice::DriverPool;
        Self { name: set.clone(), set, variable, what_if, is_lower_bound }
    }
}

/// A string for a shell. Lists of `roundup_power2_divisions` have brackets.
fn quoted(string: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_:,.".contains(letter);
    if string.chars().all(is_plain) { string.to_owned() } else { format!("'{string}'") }
}

/// The environment variable that takes the settings of an allocator.
const fn variable(allocator: AllocatorChoice) -> &'static str {
    match allocator {
        AllocatorChoice::Caching | AllocatorChoice::DriverPool => "PYTORCH_CUDA_ALLOC_CONF",
        AllocatorChoice::Paged => "WARPOOL_CONF",
    }
}

/// The candidates for some recordings, the recorded settings first. Settings without an effect on any recording are
/// left out.
#[must_use]
pub fn candidates(devices: &[&DeviceReplay<'_>]) -> Vec<Candidate> {
    let traits: Vec<Traits> = devices.iter().map(|device| Traits::of(device)).collect();
    let largest = traits.iter().map(|traits| traits.largest_request).max().unwrap_or(0);
    let is_limited = traits.iter().any(|traits| traits.is_limited);
    let has_large = largest > 1 << 20;
    let mut candidates = Vec::new();
    if let [first, others @ ..] = devices {
        let same = others
            .iter()
            .all(|other| other.recorded_settings().to_conf_string() == first.recorded_settings().to_conf_string());
        let mut recorded = Candidate::recorded(first.recorded_settings());
        if !same {
            "each as recorded".clone_into(&mut recorded.name);
        }
        candidates.push(recorded);
    }
    let mut add = |string: &str| candidates.extend(Candidate::replaced(string));
    add("");
    add("expandable_segments:True");
    if has_large {
        add("expandable_segments:True,roundup_power2_divisions:8");
        for divisions in [4, 8, 16] {
            add(&format!("roundup_power2_divisions:{divisions}"));
        }
        // They are for requests above 1 MiB and below 10 MiB.
        for mib in [12, 40] {
            add(&format!("large_segment_size_mb:{mib}"));
        }
    }
    // Blocks from this size on are not split: without any of that size it has no effect.
    for mib in [32_u64, 64, 128, 256, 512, 1024].into_iter().filter(|mib| mib << 20 <= largest) {
        add(&format!("max_split_size_mb:{mib}"));
    }
    if is_limited {
        for threshold in ["0.6", "0.8"] {
            add(&format!("garbage_collection_threshold:{threshold}"));
        }
        if largest >= 128 << 20 {
            add("max_split_size_mb:128,garbage_collection_threshold:0.8");
        }
    }
    candidates.push(Candidate::allocator(AllocatorChoice::Paged, ""));
    candidates.push(Candidate::allocator(AllocatorChoice::DriverPool, ""));
    without_repetitions(candidates)
}

/// Leaves out candidates that are the recorded settings again.
fn without_repetitions(mut candidates: Vec<Candidate>) -> Vec<Candidate> {
    let recorded = candidates.first().filter(|first| first.name == "as recorded").map(|first| first.set.clone());
    let is_recorded = |candidate: &Candidate| {
        let normal = lint(&candidate.set).effective.map(|settings| settings.to_conf_string());
        candidate.name != "as recorded" && recorded.is_some() && normal == recorded
    };
    candidates.retain(|candidate| !is_recorded(candidate));
    candidates
}

/// The properties of a recording that decide which settings have an effect.
struct Traits {
    largest_request: u64,
    is_limited: bool,
}

impl Traits {
    fn of(device: &DeviceReplay<'_>) -> Self {
        let requests = device.events().iter().filter(|event| matches!(event.action, Action::Alloc | Action::Oom));
        let largest_request = requests.map(|event| event.size).max().unwrap_or(0);
        Self { largest_request, is_limited: device.limit().is_some_and(|limit| !limit.device_full) }
    }
}

/// The string that gives the settings with some entries changed.
fn merged(settings: &Settings, entries: &str) -> String {
    let conf = settings.to_conf_string();
    let separator = if conf.is_empty() { "" } else { "," };
    let merged = lint(&format!("{conf}{separator}{entries}")).effective;
    let named = merged.map(|settings| settings.to_conf_string()).filter(|conf| !conf.is_empty());
    // An entry that sets a default explicitly, such as a fraction of 1.0, is not in that string.
    named
        .filter(|named| named.contains(entries.split(':').next().unwrap_or(entries)))
        .unwrap_or_else(|| entries.to_owned())
}
