//! Recordings of the runtime: what the recorder reads of it, and the calls of programs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use warpool::memory::DeviceAllocator;
use warpool::memory::report::{DeviceAccount, Snapshot};
use warpool::memory::settings::RecordSettings;
use warpool_driver::DeviceId;
use warpool_report::account::Known;

use crate::account;
use crate::error::{Error, Result};
use crate::recorder::{Program, PythonInterface, Recorder};
use crate::runtime::{self, Runtime};

impl Program for Runtime {
    fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    fn allocator(&self) -> &dyn DeviceAllocator {
        self.allocator()
    }

    fn settings(&self) -> RecordSettings {
        self.settings().record
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let mut snapshot = self.snapshot()?;
        let accounts = self.devices_in_use().into_iter().filter_map(|device| self.account(device, &snapshot));
        snapshot.accounts = accounts.collect();
        Ok(snapshot)
    }

    fn has_own_history(&self) -> bool {
        self.is_history_on()
    }

    fn epoch_us(&self) -> i64 {
        self.epoch_us()
    }

    fn devices_in_use(&self) -> Vec<DeviceId> {
        self.devices_in_use()
    }
}

impl Runtime {
    /// Whose the memory of a device is; `None` if nobody but the allocator is known.
    fn account(&self, device: DeviceId, snapshot: &Snapshot) -> Option<DeviceAccount> {
        let driver = self.instance().driver();
        let memory = driver.mem_info(device).ok()?;
        let uuid = driver.device_properties(device).ok().map(|properties| properties.uuid);
        let index = i32::try_from(device.0).ok()?;
        let of_device = snapshot.segments.iter().filter(|segment| segment.device == index);
        let known = Known {
            device: device.0,
            total: memory.bytes_total,
            free: memory.bytes_free,
            reserved: Some(of_device.map(|segment| segment.total_size).sum()),
            ..Known::default()
        };
        let found = account::of(known, uuid);
        found.rows.iter().any(|row| !row.is_reserved()).then_some(found)
    }

    /// Recordings go to this folder from here on; it is made when the first one is written.
    pub fn set_record_folder(&self, folder: &Path) -> Result<()> {
        self.recorder.set_folder(folder).map_err(|source| Error::RecordFolder { source })
    }

    /// Sets or removes the interpreter whose call stacks recordings show.
    pub fn set_python(&self, python: Option<PythonInterface>) {
        self.recorder.python.set(python);
    }

    /// Writes a recording, to `path` or to the folder of recordings, with what `explain` says about it beside it.
    /// Returns the path of the snapshot. [`Error::NotRecording`] unless the settings have `record:oom`.
    pub fn record_now(&self, path: Option<&Path>) -> Result<PathBuf> {
        self.recorder.record_now(self, path)
    }

    /// Writes a recording at the end of the program, if the settings have `record_at_exit:True`.
    pub fn record_at_exit(&self) -> Result<()> {
        self.recorder.record_at_exit(self)
    }

    /// Records that memory ran out, as the C interface does before it reports such an error. Returns what that adds to
    /// the error's text; empty unless the settings have `record:oom`.
    #[must_use]
    pub fn record_out_of_memory(&self, error: &Error) -> String {
        match self.recorder.is_on() && error.is_out_of_memory() {
            true => self.recorder.out_of_memory(self, error),
            false => String::new(),
        }
    }

    /// What to add to the driver's clock to get Unix time, as in PyTorch's snapshots. The simulated GPU's own clock is
    /// kept, so that runs are reproducible.
    pub(crate) fn epoch_us(&self) -> i64 {
        let driver = self.instance().driver();
        if driver.kind() == "sim" {
            return 0;
        }
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since_1970.saturating_sub(driver.now()).as_micros()).unwrap_or(0)
    }
}

/// What to add to the text of an error that the program gets. Empty unless it is out of memory and recordings are on.
#[cold]
pub(crate) fn note(error: &Error) -> String {
    if !error.is_out_of_memory() {
        return String::new();
    }
    let noted = catch_unwind(AssertUnwindSafe(|| match runtime::started() {
        // Not in a forked child.
        Some(_) => runtime::get().map_or_else(|_| String::new(), |runtime| runtime.record_out_of_memory(error)),
        None => String::new(),
    }));
    noted.unwrap_or_else(|_| " It is not recorded: there is a bug in Warpool's recorder, please report it.".to_owned())
}
