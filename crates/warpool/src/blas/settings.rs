//! How cuBLAS is set up: sizes of workspaces, precision, determinism. Plain data, and the reading of the texts that
//! PyTorch's users have in their environment. Nobody here looks at the environment: whoever does passes the texts on.

use warpool_driver::DeviceProperties;

use crate::memory::Warning;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// What PyTorch gives cuBLASLt.
const LT_BYTES: u64 = MIB;

/// How a [`Blas`](super::Blas) starts out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlasSettings {
    /// How large workspaces are; 0 is none at all. `None` goes by what the device is: 32 MiB for compute capability 9
    /// to 12, as NVIDIA recommends, and 8 MiB and 128 KiB (`:4096:2:16:8`) for others.
    pub workspace_bytes: Option<u64>,
    /// How large those of cuBLASLt are.
    pub lt_workspace_bytes: u64,
    /// Whether cuBLASLt works in those of cuBLAS.
    pub unified_workspaces: bool,
    /// Whether products may round their numbers to TF32. See [`Blas::set_tf32`](super::Blas::set_tf32).
    pub tf32: bool,
    /// Whether the same product must give the same bits every time. See
    /// [`Blas::set_deterministic`](super::Blas::set_deterministic).
    pub deterministic: bool,
}

impl Default for BlasSettings {
    /// By device, 1 MiB for cuBLASLt, unified, exact and deterministic.
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
    /// Reads what PyTorch reads, all of it optional: `CUBLAS_WORKSPACE_CONFIG` (every `:<KiB>:<count>` anywhere in it
    /// is added up), `CUBLASLT_WORKSPACE_SIZE` (in KiB) and `TORCH_CUBLASLT_UNIFIED_WORKSPACE` (0 or 1). A text that
    /// means nothing is a warning, and its setting stays as by default.
    #[must_use]
    pub fn from_texts(
        cublas_workspace_config: Option<&str>,
        cublaslt_workspace_size: Option<&str>,
        torch_cublaslt_unified_workspace: Option<&str>,
    ) -> (Self, Vec<Warning>) {
        let (mut settings, mut warnings) = (Self::default(), Vec::new());
        let mut warn = |key: &str, text: &str, wanted: &str, instead: &str| {
            let text = format!("{text:?} is not understood; give it {wanted}. It is {instead} now");
            warnings.push(Warning { key: key.to_owned(), at: None, text });
        };
        if let Some(text) = cublas_workspace_config {
            settings.workspace_bytes = sum_of_pairs(text);
            if settings.workspace_bytes.is_none() {
                let wanted = "pairs of KiB and count that fit into 64 bits, such as :4096:2:16:8";
                warn("CUBLAS_WORKSPACE_CONFIG", text, wanted, "the device's default");
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

/// How large workspaces are on a device if nobody said.
pub(super) fn default_bytes(device: &DeviceProperties) -> u64 {
    match device.compute_capability.0 {
        9..=12 => 32 * MIB,
        _ => 8 * MIB + 128 * KIB,
    }
}

/// The bytes that every `:<KiB>:<count>` of `text` comes to; `None` if there is none, or too many.
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

/// The digits that `text` starts with, and what comes after them; `None` if it starts with none.
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
    fn every_pair_counts_wherever_it_stands() {
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
    fn what_means_nothing_is_a_warning_and_the_default() {
        for text in ["", "4096:2", ":4096", ":4096:", "a:b", ":-1:2", ": 1:2", ":٣:1"] {
            check(text, None);
        }
    }

    #[test]
    fn what_does_not_fit_is_a_warning_and_the_default() {
        check(":18014398509481983:1", Some(u64::MAX - 1023));
        check(":18014398509481984:1", None);
        check(":1048576:17592186044416", None);
        check(":99999999999999999999999999:1", None);
        check(":1:99999999999999999999999999", None);
        check(":18014398509481983:1:1:1", None);
    }

    #[test]
    fn cublaslt_has_its_own_texts() {
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
            "`CUBLASLT_WORKSPACE_SIZE`: \"lots\" is not understood; give it a number of KiB. It is 1024 now"
        );
    }

    #[test]
    fn sizes_go_by_compute_capability() {
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
