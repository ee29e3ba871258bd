//! How much of a device's memory an allocator may reserve.

/// The lower of the memory fraction and the cap; `None` is no limit.
pub(crate) fn limit_bytes(bytes_total: u64, fraction: f64, cap: Option<u64>) -> Option<u64> {
    let by_fraction = (fraction < 1.0).then(|| share_of(bytes_total, fraction));
    [by_fraction, cap].into_iter().flatten().min()
}

/// A share of `bytes`, to the nearest byte.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a device's memory; the fraction is in [0, 1]"
)]
pub(crate) fn share_of(bytes: u64, fraction: f64) -> u64 {
    (bytes as f64 * fraction).round() as u64
}
