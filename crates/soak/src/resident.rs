//! The memory of this process, as Linux reports it.

use std::time::Duration;

use crate::unsafe_calls::trim_heap;

/// Resident memory of this process in bytes, without what the C heap keeps for later. All zero where the system does
/// not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Before the first program.
    pub start: u64,
    /// The highest minimum of a window within the warm-up; 0 if the run was shorter.
    pub warm: u64,
    /// The most so far (`VmHWM`).
    pub peak: u64,
    /// The last reading.
    pub end: u64,
}

impl Resident {
    /// The limit for the minimum of a window after the warm-up: a tenth and 64 MiB more than [`warm`](Self::warm). A
    /// page of the C heap in which anything is left stays, and the campaigns take turns.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.warm + self.warm / 10 + (64 << 20)
    }
}

/// Checks that resident memory stays flat.
///
/// One high reading is no leak: whatever else uses memory in this process at that moment is in it. Leaked memory is in
/// every later reading. So readings form windows, and only the minimum of each window counts.
#[derive(Debug)]
pub struct FlatMemory {
    resident: Resident,
    warm_up: Duration,
    /// The number of readings in a window.
    window: usize,
    readings: usize,
    /// The minimum of the window so far.
    minimum: u64,
    is_warm: bool,
}

impl FlatMemory {
    /// `start` and `peak` are the first reading. The warm-up ends with the first window that ends after `warm_up`.
    #[must_use]
    pub fn new((start, peak): (u64, u64), warm_up: Duration, window: usize) -> Self {
        let resident = Resident { start, warm: 0, peak, end: start };
        Self { resident, warm_up, window: window.max(1), readings: 0, minimum: u64::MAX, is_warm: false }
    }

    /// Adds a reading of resident memory and its peak, `elapsed` after the start of the run.
    ///
    /// # Errors
    /// If memory has grown.
    pub fn add(&mut self, (now, peak): (u64, u64), elapsed: Duration) -> Result<(), String> {
        self.resident.end = now;
        self.resident.peak = self.resident.peak.max(peak);
        self.minimum = self.minimum.min(now);
        self.readings += 1;
        if self.readings < self.window {
            return Ok(());
        }
        let minimum = std::mem::replace(&mut self.minimum, u64::MAX);
        self.readings = 0;
        if !self.is_warm {
            self.resident.warm = self.resident.warm.max(minimum);
            self.is_warm = elapsed >= self.warm_up;
            return Ok(());
        }
        let limit = self.resident.limit();
        if minimum <= limit {
            return Ok(());
        }
        Err(format!(
            "memory has grown: at least {minimum} bytes were resident after each of the last {} turns; the limit is \
             {limit} bytes, from {} in the warm-up",
            self.window, self.resident.warm
        ))
    }

    /// The readings so far.
    #[must_use]
    pub fn resident(&self) -> Resident {
        self.resident
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
