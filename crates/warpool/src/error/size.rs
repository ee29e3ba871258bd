//! Sizes in messages.

use std::fmt;

/// A number of bytes as PyTorch writes it.
pub(super) struct Size(pub(super) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
        let bytes = self.0 as f64;
        match self.0 {
            0..=1024 => write!(f, "{} bytes", self.0),
            1025..=1_048_576 => write!(f, "{:.2} KiB", bytes / 1024.0),
            1_048_577..=1_073_741_824 => write!(f, "{:.2} MiB", bytes / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", bytes / 1_073_741_824.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_in_pytorch() {
        let cases = [
            (0, "0 bytes"),
            (1024, "1024 bytes"),
            (1536, "1.50 KiB"),
            (1 << 20, "1024.00 KiB"),
            (20 << 20, "20.00 MiB"),
            (80 << 30, "80.00 GiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
