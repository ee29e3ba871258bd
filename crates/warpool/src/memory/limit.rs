//! How much of a device's memory an allocator may reserve.

use super::Settings;
use crate::{Error, Result};

/// The limits of one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    fraction: f64,
    /// In bytes; `None` is no cap.
    pub(crate) cap: Option<u64>,
    /// The most of a card that is shared with other processes.
    pub(crate) share: Option<u64>,
}

impl Limits {
    pub(crate) fn of(settings: &Settings) -> Self {
        let share = settings.share.limit_bytes.filter(|_| settings.share.enabled);
        Self { fraction: settings.per_process_memory_fraction, cap: settings.memory_cap_bytes, share }
    }

    pub(crate) fn fraction(self) -> f64 {
        self.fraction
    }

    /// Sets the memory fraction. [`Error::Fraction`] if it is not in [0, 1].
    pub(crate) fn set_fraction(&mut self, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::Fraction { fraction: fraction.to_string() });
        }
        self.fraction = fraction;
        Ok(())
    }

    /// The lowest of the limits; `None` is no limit.
    pub(crate) fn bytes(self, bytes_total: u64) -> Option<u64> {
        let by_fraction = (self.fraction < 1.0).then(|| share_of(bytes_total, self.fraction));
        [by_fraction, self.cap, self.share].into_iter().flatten().min()
    }
}

/// A fraction of `bytes`, rounded to the nearest byte.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a device's memory; the fraction is in [0, 1]"
)]
pub(crate) fn share_of(bytes: u64, fraction: f64) -> u64 {
    (bytes as f64 * fraction).round() as u64
}
