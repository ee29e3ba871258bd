//! The environment variables: driver, settings, simulated GPU, recordings. Read once, when the runtime starts, and
//! nowhere else in the crate. An invalid value is an error; there is no fallback.

use std::env::{self, VarError};
use std::path::PathBuf;
use std::sync::Arc;

use warpool::memory::Settings;
use warpool::memory::settings::{Backend, SettingsError};
use warpool_cuda::CudaDriver;
use warpool_driver::Driver;
use warpool_driver::sim::{SimConfig, SimDriver};

use crate::error::{Error, Result};

/// The variables with PyTorch's settings, in PyTorch's order: the first that is set is used. `WARPOOL_CONF` is applied
/// on top of it.
const PYTORCH_VARIABLES: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];
const OWN_VARIABLE: &str = "WARPOOL_CONF";

/// The driver that `WARPOOL_DRIVER` names: `cuda` (the default) or `sim`.
pub(crate) fn driver() -> Result<Arc<dyn Driver>> {
    match variable("WARPOOL_DRIVER")?.as_deref() {
        None | Some("" | "cuda") => Ok(Arc::new(CudaDriver::open()?)),
        Some("sim") => Ok(Arc::new(SimDriver::new(sim(variable("WARPOOL_SIM")?.as_deref().unwrap_or(""))?))),
        Some(name) => Err(Error::UnknownDriver { name: name.to_owned() }),
    }
}

/// The settings in the environment, with `backend` if they name none.
pub(crate) fn settings(backend: Backend) -> Result<Settings> {
    let mut settings = Settings { backend, ..Settings::default() };
    for name in PYTORCH_VARIABLES {
        if let Some(string) = variable(name)? {
            settings = Settings::parse_for(backend, &string).map_err(refused(name))?;
            break;
        }
    }
    match variable(OWN_VARIABLE)? {
        Some(string) => settings.overridden(&string).map_err(refused(OWN_VARIABLE)),
        None => Ok(settings),
    }
}

/// Whether the process publishes a page, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Publish {
    pub(crate) is_on: bool,
    /// Whether other processes of the user may change the limits of this one.
    pub(crate) accepts_limits: bool,
    /// `None` is the usual one.
    pub(crate) folder: Option<PathBuf>,
}

/// What `WARPOOL_PUBLISH` (`True`, the default, `read-only` or `False`) and `WARPOOL_PAGES` say.
pub(crate) fn publish() -> Result<Publish> {
    let folder = env::var_os("WARPOOL_PAGES").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    publish_as(variable("WARPOOL_PUBLISH")?.as_deref().unwrap_or(""), folder)
}

fn publish_as(value: &str, folder: Option<PathBuf>) -> Result<Publish> {
    let (is_on, accepts_limits) = match value {
        "" | "True" => (true, true),
        "read-only" => (true, false),
        "False" => (false, false),
        _ => return Err(Error::Publish { value: value.to_owned() }),
    };
    Ok(Publish { is_on, accepts_limits, folder })
}

/// The folder of recordings, if `WARPOOL_RECORD_DIR` names one.
pub(crate) fn record_folder() -> Option<PathBuf> {
    env::var_os("WARPOOL_RECORD_DIR").filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The rank of this process in its job, by the variables of those who start jobs; 0 without one.
pub(crate) fn rank() -> u64 {
    let rank = |name: &&str| env::var(name).ok()?.trim().parse().ok();
    ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"].iter().find_map(rank).unwrap_or(0)
}

fn refused(variable: &'static str) -> impl Fn(SettingsError) -> Error {
    move |source| Error::SettingsOf { variable, source }
}

fn variable(name: &'static str) -> Result<Option<String>> {
    match env::var(name) {
        Ok(value) => Ok(Some(value)),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => Err(Error::Variable { variable: name }),
    }
}

/// Parses `WARPOOL_SIM`. Suballocations are not tracked by default: only the hazard detector needs them, and they cost
/// time on every call.
fn sim(string: &str) -> Result<SimConfig> {
    let mut config = SimConfig::default().without_suballocation_tracking();
    for entry in string.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let wrong = |why: String| Error::Sim { why };
        let (key, value) = entry.split_once(':').ok_or_else(|| wrong(format!("{entry:?} has no value")))?;
        let number = |range: std::ops::RangeInclusive<u64>| match value.trim().parse() {
            Ok(number) if range.contains(&number) => Ok(number),
            _ => {
                Err(wrong(format!("{key}: {value:?} is not a whole number from {} to {}", range.start(), range.end())))
            }
        };
        config = match key.trim() {
            "devices" => config.with_devices(u32::try_from(number(1..=64)?).expect("at most 64")),
            // A context takes 0.5 GiB.
            "memory_mb" => config.with_capacity(number(1024..=16 << 20)? << 20),
            "seed" => config.with_seed(number(0..=u64::MAX)?),
            "track_suballocations" => match value.trim() {
                "True" => SimConfig { track_suballocations: true, ..config },
                "False" => config.without_suballocation_tracking(),
                _ => return Err(wrong(format!("{key}: {value:?} is neither True nor False"))),
            },
            _ => return Err(wrong(format!("unknown key {key:?}"))),
        };
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sim_string_is_parsed() {
        let config = sim("devices:3, memory_mb:2048,seed:7,track_suballocations:True").unwrap();
        assert_eq!(config.devices.len(), 3);
        assert!(config.devices.iter().all(|device| device.properties.bytes_total == 2 << 30));
        assert_eq!((config.seed, config.track_suballocations), (7, true));
        assert!(!sim("").unwrap().track_suballocations);
    }

    #[test]
    fn publishing_is_on_unless_it_is_switched_off() {
        let of = |value: &str| publish_as(value, None).map(|how| (how.is_on, how.accepts_limits));
        assert_eq!(of("").unwrap(), (true, true));
        assert_eq!(of("True").unwrap(), (true, true));
        assert_eq!(of("read-only").unwrap(), (true, false));
        assert_eq!(of("False").unwrap(), (false, false));
        let text = of("yes").unwrap_err().to_string();
        assert_eq!(text, "WARPOOL_PUBLISH: \"yes\" is none of True, read-only and False");
    }

    #[test]
    fn sim_string_errors_name_the_problem() {
        for (string, part) in [
            ("devices", "\"devices\" has no value"),
            ("devices:0", "\"0\" is not a whole number from 1 to 64"),
            ("memory_mb:big", "\"big\" is not a whole number"),
            ("track_suballocations:yes", "neither True nor False"),
            ("cores:2", "unknown key \"cores\""),
        ] {
            let text = sim(string).unwrap_err().to_string();
            assert!(text.starts_with("WARPOOL_SIM: ") && text.contains(part), "{string}: {text}");
        }
    }
}
