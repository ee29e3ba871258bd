//! Bytes in words, for sentences.

/// In the largest binary unit that is not larger, with one decimal.
#[must_use]
pub fn text(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.into_iter().find(|&(_, unit)| bytes >= unit) {
        None => format!("{bytes} B"),
        Some((name, unit)) if bytes.is_multiple_of(unit) => format!("{} {name}", bytes / unit),
        #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn bytes_are_shown_in_the_largest_unit() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (6 << 30, "6 GiB"), (1 << 40, "1 TiB")] {
            assert_eq!(super::text(bytes), text);
        }
    }
}
