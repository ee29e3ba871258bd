//! Settings of cuBLAS: sizes of workspaces, precision, determinism; and the parsing of PyTorch's environment variables.
//! The environment itself is not read here: callers pass the values.

use warpool_driver::DeviceProperties;

use crate::memory::Warning;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// PyTorch's default workspace of cuBLASLt.
const LT_BYTES: u64 = MIB;

/// The initial settings of a [`Blas`](super::Blas).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlasSettings {
    /// The size of workspaces; 0 is no workspace. `None` depends on the device: 32 MiB for compute capability 9 to 12,
    /// as NVIDIA recommends, and 8 MiB + 128 KiB (`:4096:2:16:8`) for others.
    pub workspace_bytes: Option<u64>,
    /// The size of cuBLASLt's workspaces.
    pub lt_workspace_bytes: u64,
    /// Whether cuBLASLt uses the workspaces of cuBLAS.
    pub unified_workspaces: bool,
    /// Whether matrix multiplications may round their inputs to TF32. See [`Blas::set_tf32`](super::Blas::set_tf32).
    pub tf32: bool,
    /// Whether the same call must give the same bits every time. See
    /// [`Blas::set_deterministic`](super::Blas::set_deterministic).
    pub deterministic: bool,
}

impl Default for BlasSettings {
    /// Depending on the device, 1 MiB for cuBLASLt, unified, without TF32, deterministic.
    fn default() -> Self {
        Self {
            workspace_bytes: None,
            lt_workspace_bytes: LT_BYTES,
            unified_workspaces: true,
            tf32: false,
            deterministic: true,
        }
    }
}

impl BlasSettings {
    /// Parses PyTorch's variables, each optional: `CUBLAS_WORKSPACE_CONFIG` (the sum of every `:<KiB>:<count>` in it),
    /// `CUBLASLT_WORKSPACE_SIZE` (in KiB) and `TORCH_CUBLASLT_UNIFIED_WORKSPACE` (0 or 1). A value that cannot be
    /// parsed is a warning, and its setting keeps the default.
    #[must_use]
    pub fn from_texts(
        cublas_workspace_config: Option<&str>,
        cublaslt_workspace_size: Option<&str>,
        torch_cublaslt_unified_workspace: Option<&str>,
    ) -> (Self, Vec<Warning>) {
        let (mut settings, mut warnings) = (Self::default(), Vec::new());
        let mut warn = |key: &str, text: &str, wanted: &str, instead: &str| {
            let text = format!("cannot parse {text:?}; set it to {wanted}. {instead} is used instead");
            warnings.push(Warning { key: key.to_owned(), at: None, text });
        };
        if let Some(text) = cublas_workspace_config {
            settings.workspace_bytes = sum_of_pairs(text);
            if settings.workspace_bytes.is_none() {
                let wanted = "pairs of KiB and count that fit into 64 bits, such as :4096:2:16:8";
                warn("CUBLAS_WORKSPACE_CONFIG", text, wanted, "The device's default");
            }
        }
        if let Some(text) = cublaslt_workspace_size {
            match text.trim().parse::<u64>().ok().and_then(|kib| kib.checked_mul(KIB)) {
                Some(bytes) => settings.lt_workspace_bytes = bytes,
                None => warn("CUBLASLT_WORKSPACE_SIZE", text, "a number of KiB", "1024"),
            }
        }
        if let Some(text) = torch_cublaslt_unified_workspace {
            match text.trim() {
                "0" => settings.unified_workspaces = false,
                "1" => settings.unified_workspaces = true,
                _ => warn("TORCH_CUBLASLT_UNIFIED_WORKSPACE", text, "0 or 1", "1"),
            }
        }
        (settings, warnings)
    }
}

/// The default size of workspaces on a device.
pub(super) fn default_bytes(device: &DeviceProperties) -> u64 {
    match device.compute_capability.0 {
        9..=12 => 32 * MIB,
        _ => 8 * MIB + 128 * KIB,
    }
}

/// The sum of every `:<KiB>:<count>` of `text`, in bytes; `None` if there is none, or it does not fit.
fn sum_of_pairs(text: &str) -> Option<u64> {
    let (mut rest, mut sum) = (text, None);
    while let Some(colon) = rest.find(':') {
        rest = &rest[colon + 1..];
        let Some((kib, after)) = digits(rest) else { continue };
        let Some((count, after)) = after.strip_prefix(':').and_then(digits) else { continue };
        rest = after;
        let bytes = number(kib)?.checked_mul(KIB)?.checked_mul(number(count)?)?;
        sum = Some(sum.unwrap_or(0u64).checked_add(bytes)?);
    }
    sum
}

/// The digits that `text` starts with, and the rest; `None` if it starts with none.
fn digits(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

fn number(digits: &str) -> Option<u64> {
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, bytes: Option<u64>) {
        let (settings, warnings) = BlasSettings::from_texts(Some(text), None, None);
        assert_eq!(settings.workspace_bytes, bytes, "{text}");
        assert_eq!(warnings.len(), usize::from(bytes.is_none()), "{text}: {warnings:?}");
        assert!(warnings.iter().all(|warning| warning.key == "CUBLAS_WORKSPACE_CONFIG"));
    }

    #[test]
    fn every_pair_is_added() {
        check(":4096:2:16:8", Some(8 * MIB + 128 * KIB));
        check(":4096:8", Some(32 * MIB));
        check(":16:8", Some(128 * KIB));
        check(":0:0", Some(0));
        check(":0:7", Some(0));
        check("workspaces=:1:1, and then :2:3!", Some(7 * KIB));
        check("::1:2", Some(2 * KIB));
        check(":1:2:3", Some(2 * KIB));
        check(":x:1:5", Some(5 * KIB));
        check(":1::2:3", Some(6 * KIB));
        check(":0001:02", Some(2 * KIB));
        check(":4294967296:1", Some(1 << 42));
    }

    #[test]
    fn an_unparsable_value_is_a_warning_and_the_default() {
        for text in ["", "4096:2", ":4096", ":4096:", "a:b", ":-1:2", ": 1:2", ":٣:1"] {
            check(text, None);
        }
    }

    #[test]
    fn an_overflowing_value_is_a_warning_and_the_default() {
        check(":18014398509481983:1", Some(u64::MAX - 1023));
        check(":18014398509481984:1", None);
        check(":1048576:17592186044416", None);
        check(":99999999999999999999999999:1", None);
        check(":1:99999999999999999999999999", None);
        check(":18014398509481983:1:1:1", None);
    }

    #[test]
    fn cublaslt_has_its_own_variables() {
        let read = |size, unified| {
            let (settings, warnings) = BlasSettings::from_texts(None, size, unified);
            (settings.lt_workspace_bytes, settings.unified_workspaces, warnings.len())
        };
        assert_eq!(read(None, None), (MIB, true, 0));
        assert_eq!(read(Some("2048"), Some("0")), (2 * MIB, false, 0));
        assert_eq!(read(Some(" 0 "), Some("1")), (0, true, 0));
        for bad in ["", "1 MiB", "-1", "1.5", "18014398509481984"] {
            assert_eq!(read(Some(bad), None), (MIB, true, 1), "{bad}");
        }
        assert_eq!(read(None, Some("yes")), (MIB, true, 1));
        let (_, warnings) = BlasSettings::from_texts(None, Some("lots"), None);
        assert_eq!(
            warnings[0].to_string(),
            "`CUBLASLT_WORKSPACE_SIZE`: cannot parse \"lots\"; set it to a number of KiB. 1024 is used instead"
        );
    }

    #[test]
    fn the_default_size_depends_on_the_compute_capability() {
        let instance = crate::Instance::new(std::sync::Arc::new(warpool_driver::sim::SimDriver::new(
            warpool_driver::sim::SimConfig::default(),
        )))
        .unwrap();
        let mut properties = instance.device(0).unwrap().properties().clone();
        for (major, mib) in [(7, 8), (8, 8), (9, 32), (10, 32), (11, 32), (12, 32), (13, 8)] {
            properties.compute_capability = (major, 0);
            assert_eq!(default_bytes(&properties) / MIB, mib, "compute capability {major}");
        }
    }
}
