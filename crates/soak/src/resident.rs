//! The memory of this process, as Linux reports it.

use crate::unsafe_calls::trim_heap;

/// Resident memory of this process in bytes, without what the C heap keeps for later. All zero where the system does
/// not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Before the first program.
    pub start: u64,
    /// The most after the turn of any campaign up to the end of the warm-up; 0 if the run was shorter.
    pub warm: u64,
    /// The most so far (`VmHWM`).
    pub peak: u64,
    /// After the last turn.
    pub end: u64,
}

impl Resident {
    /// The limit of resident memory after the warm-up: a tenth and 64 MiB more than the maximum within it. A page
    /// of the C heap in which anything is left stays, and the campaigns take turns.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.warm + self.warm / 10 + (64 << 20)
    }
}

/// As [`now`], after the C heap has returned what it can: memory that this process uses.
pub fn in_use() -> Option<(u64, u64)> {
    trim_heap();
    now()
}

/// `VmRSS` and `VmHWM`, in bytes.
pub fn now() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let bytes = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
    };
    Some((bytes("VmRSS:")?, bytes("VmHWM:")?))
}
