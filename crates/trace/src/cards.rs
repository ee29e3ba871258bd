//! How much memory common cards have, and which card a recording was made on.
//!
//! A recording does not contain the size of the device. It contains the free memory at an out-of-memory event. Free
//! plus reserved memory is what the device had for the program, and the card has that plus a context. A card is named
//! only if that matches; if others use part of the card, or the table lacks it, the card stays unknown.

use std::fmt;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A card, with the memory that CUDA reports for it. That is less than the memory it is sold with, and differs by some
/// tenths of a percent between drivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its name on the command line, such as `a100-80gb`.
    pub key: &'static str,
    /// Its name for people.
    pub name: &'static str,
    /// Its advertised memory, in GB.
    pub gigabytes: u32,
    /// The total that CUDA reports, in MiB: the least of all drivers, that of current ones under Linux, and the most.
    mib: [u64; 3],
}

const fn card(key: &'static str, name: &'static str, gigabytes: u32, mib: [u64; 3]) -> Card {
    Card { key, name, gigabytes, mib }
}

impl Card {
    /// All cards of the table, by size.
    ///
    /// The figures are from public logs of PyTorch: "GPU 0 has a total capacity of 79.15 GiB", the `total_memory` of
    /// `torch.cuda.get_device_properties`, and the banner of Ultralytics, which prints the same in MiB. Estimates are
    /// those of the GH200, from the 97,871 MiB of nvidia-smi, and the most of the H800, GB200 and B300. The most of
    /// GeForce and RTX cards is that of Windows, which keeps nothing back. A card with ECC in its own memory, such as
    /// an A10, reports about a twelfth less than it is sold with.
    pub const ALL: &[Self] = &[
        card("rtx4060", "RTX 4060", 8, [7_806, 7_806, 8_188]),
        card("rtx3080-10gb", "RTX 3080", 10, [9_871, 9_871, 10_240]),
        card("rtx2080ti", "RTX 2080 Ti", 11, [11_011, 11_019, 11_264]),
        card("gtx1080ti", "GTX 1080 Ti", 11, [11_170, 11_178, 11_264]),
        card("rtx3060-12gb", "RTX 3060", 12, [11_910, 11_931, 12_288]),
        card("rtx4070", "RTX 4070", 12, [11_994, 11_994, 12_282]),
        card("t4", "T4", 16, [14_912, 14_912, 15_110]),
        card("v100-16gb", "V100 16GB", 16, [16_130, 16_144, 16_160]),
        card("rtx4080", "RTX 4080", 16, [15_882, 15_934, 16_376]),
        card("rtx5080", "RTX 5080", 16, [15_831, 15_841, 16_303]),
        card("rtx4060ti-16gb", "RTX 4060 Ti 16GB", 16, [15_882, 15_934, 16_380]),
        card("rtx4070ti-super", "RTX 4070 Ti Super", 16, [15_882, 15_934, 16_376]),
        card("rtx5060ti-16gb", "RTX 5060 Ti 16GB", 16, [15_831, 15_841, 16_311]),
        card("p100", "P100", 16, [16_276, 16_280, 16_280]),
        card("a10", "A10", 24, [22_478, 22_587, 22_723]),
        card("l4", "L4", 24, [22_478, 22_560, 22_693]),
        card("rtx4090", "RTX 4090", 24, [24_081, 24_081, 24_564]),
        card("rtx3090", "RTX 3090", 24, [24_084, 24_114, 24_576]),
        card("a5000", "RTX A5000", 24, [24_114, 24_114, 24_564]),
        card("rtx5090", "RTX 5090", 32, [32_102, 32_109, 32_607]),
        card("v100-32gb", "V100 32GB", 32, [32_480, 32_494, 32_510]),
        card("a100-40gb", "A100 40GB", 40, [40_326, 40_442, 40_654]),
        card("l40s", "L40S", 48, [45_403, 45_458, 45_742]),
        card("l40", "L40", 48, [45_403, 45_458, 45_742]),
        card("a40", "A40", 48, [45_403, 45_486, 45_742]),
        card("a6000", "RTX A6000", 48, [48_537, 48_570, 49_140]),
        card("rtx6000-ada", "RTX 6000 Ada", 48, [48_520, 48_539, 49_140]),
        card("h100-80gb", "H100 80GB", 80, [80_994, 81_079, 81_110]),
        card("a100-80gb", "A100 80GB", 80, [81_038, 81_152, 81_251]),
        card("h800", "H800", 80, [80_994, 81_079, 81_110]),
        card("a800-80gb", "A800 80GB", 80, [81_038, 81_051, 81_251]),
        card("h100-nvl", "H100 NVL", 94, [95_320, 95_330, 95_360]),
        card("h20", "H20", 96, [97_280, 97_285, 97_372]),
        card("rtx-pro-6000", "RTX PRO 6000", 96, [97_249, 97_250, 97_887]),
        card("gh200", "GH200 96GB", 96, [96_768, 96_768, 97_871]),
        card("h200", "H200", 141, [143_073, 143_156, 143_166]),
        card("b200", "B200", 180, [182_630, 182_631, 183_359]),
        card("gb200", "GB200", 186, [188_733, 188_733, 189_471]),
        card("b300", "B300", 288, [274_114, 274_114, 275_040]),
    ];

    /// The memory that CUDA reports under Linux with a current driver.
    #[must_use]
    pub const fn bytes_total(&self) -> u64 {
        self.mib[1] * MIB
    }

    /// The card of that name: its key, or the beginning of one key only. Case, blanks and dashes do not count.
    ///
    /// # Errors
    /// If there is none, or several.
    pub fn find(name: &str) -> Result<&'static Self, UnknownCard> {
        let wanted = letters(name);
        if let Some(card) = Self::ALL.iter().find(|card| letters(card.key) == wanted) {
            return Ok(card);
        }
        let choices: Vec<&'static Self> =
            Self::ALL.iter().filter(|card| !wanted.is_empty() && letters(card.key).starts_with(&wanted)).collect();
        match choices.as_slice() {
            [only] => Ok(only),
            _ => Err(UnknownCard { name: name.to_owned(), choices }),
        }
    }

    /// The total that this card reports, if it has that much for one program and a context.
    fn total_with(&self, bytes_usable: u64) -> Option<u64> {
        let [least, usual, most] = self.mib.map(|mib| mib * MIB);
        let least = least.max(bytes_usable.saturating_add(CONTEXT_LEAST));
        let most = most.min(bytes_usable.saturating_add(CONTEXT_MOST));
        (least <= most).then(|| usual.clamp(least, most))
    }
}

/// The part of a name that is compared: `RTX 4090` is `rtx4090`.
fn letters(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_lowercase()).collect()
}

/// No card has that name, or several have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownCard {
    /// The name.
    name: String,
    /// The cards whose keys begin with it.
    choices: Vec<&'static Card>,
}

impl fmt::Display for UnknownCard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = |cards: &[&Card]| cards.iter().map(|card| card.key).collect::<Vec<_>>().join(", ");
        if !self.choices.is_empty() {
            return write!(f, "'{}' may be one of {}", self.name, keys(&self.choices));
        }
        let all: Vec<&Card> = Card::ALL.iter().collect();
        write!(f, "'{}' is not in the table: give the memory as a size, or one of {}", self.name, keys(&all))
    }
}

impl std::error::Error for UnknownCard {}

/// The memory of a device, as far as known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The total that CUDA reports; `None` if it is not known.
    pub bytes_total: Option<u64>,
    /// It has at least this: the memory that was used plus the memory that was free.
    pub bytes_at_least: u64,
    /// Where the total comes from.
    pub origin: DeviceOrigin,
    /// The card, or the cards that it may be: "H200", or "a 24 GB card, such as RTX 4090 or RTX 3090". There may be a
    /// name without a total, where cards of one size report different totals.
    pub name: Option<String>,
}

impl DeviceMemory {
    /// A device of a size that the user named.
    #[must_use]
    pub fn given(bytes_total: u64) -> Self {
        let card = Card::ALL.iter().find(|card| card.bytes_total() == bytes_total);
        Self {
            bytes_total: Some(bytes_total),
            bytes_at_least: bytes_total,
            origin: DeviceOrigin::Argument,
            name: card.map(|card| card.name.to_owned()),
        }
    }

    /// The device of a recording. `bytes_usable` is what it had for the program at an out-of-memory event, reserved
    /// and free, the most of all such events; `bytes_reserved` is the most that was reserved.
    #[must_use]
    pub fn inferred(bytes_usable: Option<u64>, bytes_reserved: u64) -> Self {
        let bytes_at_least = bytes_usable.unwrap_or(0).max(bytes_reserved);
        let unknown = Self { bytes_at_least, ..Self::default() };
        let Some(usable) = bytes_usable else { return unknown };
        // At least what was reserved at another time: others may have used part of the device at the failure.
        let usable = usable.max(bytes_reserved);
        let fitting = Card::ALL.iter().filter_map(|card| Some((card, card.total_with(usable)?)));
        let fitting: Vec<(&Card, u64)> = fitting.collect();
        let Some((first, _)) = fitting.first() else { return unknown };
        if fitting.iter().any(|(card, _)| card.gigabytes != first.gigabytes) {
            return unknown;
        }
        let names: Vec<&str> = fitting.iter().map(|(card, _)| card.name).collect();
        let totals = || fitting.iter().map(|&(_, total)| total);
        let (least, most) = (totals().min().unwrap_or(0), totals().max().unwrap_or(0));
        let named = Self { name: Some(in_words(first.gigabytes, &names)), ..unknown };
        match most - least <= least / TOTALS_DIFFER_BY {
            true => Self { bytes_total: Some(least), origin: DeviceOrigin::Inferred, ..named },
            false => named,
        }
    }
}

/// The least memory of a context. A T4 reported 14.75 GiB in all, of which 14.57 GiB were reserved and 73 MiB free.
const CONTEXT_LEAST: u64 = 80 * MIB;

/// The most memory of a context, with the modules and libraries of one process. On an H200 it is 0.5 GiB at first, and
/// NCCL and eager loading of modules bring it above 1 GiB.
const CONTEXT_MOST: u64 = 3 * GIB / 2;

/// If the matching cards differ in their totals by more than one part in this many, the total is not known.
const TOTALS_DIFFER_BY: u64 = 50;

/// The name of one card, or the size of several with some of their names.
fn in_words(gigabytes: u32, names: &[&str]) -> String {
    const NAMES_MAX: usize = 3;
    let article = if matches!(gigabytes, 8 | 11 | 18 | 80..=89) { "an" } else { "a" };
    match &names[..names.len().min(NAMES_MAX)] {
        [] => format!("{article} {gigabytes} GB card"),
        [only] => (*only).to_owned(),
        [others @ .., last] => {
            format!("{article} {gigabytes} GB card, such as {} or {last}", others.join(", "))
        }
    }
}

/// Where the size of a device comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceOrigin {
    /// The user named it.
    Argument,
    /// The numbers of an out-of-memory event match one size of cards.
    Inferred,
    /// It is not known.
    #[default]
    Unknown,
}

impl DeviceOrigin {
    /// Its name: `argument`, `inferred`, `unknown`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Argument => "argument",
            Self::Inferred => "inferred",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hundredths of GiB, as PyTorch's messages have them.
    fn gib(hundredths: u64) -> u64 {
        hundredths * GIB / 100
    }

    fn inferred(usable: u64) -> String {
        let DeviceMemory { bytes_total, name, .. } = DeviceMemory::inferred(Some(usable), 0);
        let total = bytes_total.map_or_else(|| "-".to_owned(), |bytes| format!("{:.1}", bytes as f64 / GIB as f64));
        format!("{total} {}", name.unwrap_or_default())
    }

    #[test]
    fn card_follows_from_what_a_device_had_for_the_program() {
        // Reserved and free, from public messages whose total is known.
        assert_eq!(inferred(gib(13_927)), "139.8 H200");
        assert_eq!(inferred(gib(7_867)), "79.2 an 80 GB card, such as H100 80GB, A100 80GB or H800");
        assert_eq!(inferred(gib(2_315)), "23.5 a 24 GB card, such as RTX 4090, RTX 3090 or RTX A5000");
        assert_eq!(inferred(gib(2_165)), "22.0 a 24 GB card, such as A10 or L4");
        assert_eq!(inferred(gib(4_410)), "44.4 a 48 GB card, such as L40S, L40 or A40");
        assert_eq!(inferred(gib(3_900)), "39.5 A100 40GB");
        assert_eq!(inferred(gib(3_095)), "31.4 a 32 GB card, such as RTX 5090 or V100 32GB");
        assert_eq!(inferred(gib(17_770)), "178.4 B200");
    }

    #[test]
    fn what_does_not_follow_is_unknown() {
        // Others use part of the card, or the table lacks it.
        for usable in [gib(1_900), gib(2_700), gib(5_500), gib(6_000), gib(11_000), gib(20_000), 0, u64::MAX] {
            let memory = DeviceMemory::inferred(Some(usable), 0);
            assert_eq!((memory.bytes_total, memory.origin), (None, DeviceOrigin::Unknown), "{usable}: {memory:?}");
            assert_eq!(memory.bytes_at_least, usable);
        }
        // Cards of one size whose totals differ too much.
        assert_eq!(inferred(gib(1_464)), "- a 16 GB card, such as T4, V100 16GB or RTX 4080");
        let none = DeviceMemory::inferred(None, gib(7_867));
        assert_eq!((none.bytes_total, none.bytes_at_least, none.name), (None, gib(7_867), None));
    }

    #[test]
    fn no_card_is_smaller_than_what_was_used() {
        for card in Card::ALL {
            for share in 90..=100 {
                let usable = card.bytes_total() / 100 * share;
                let total = DeviceMemory::inferred(Some(usable), 0).bytes_total;
                assert!(total.is_none_or(|total| total > usable), "{}: {usable}", card.key);
            }
        }
    }

    #[test]
    fn cards_are_found_by_name() {
        for (name, key) in [
            ("a100-80gb", "a100-80gb"),
            ("RTX 4090", "rtx4090"),
            ("H200", "h200"),
            ("a10", "a10"),
            ("rtx_pro_6000", "rtx-pro-6000"),
            ("rtx3060", "rtx3060-12gb"),
            ("l4", "l4"),
        ] {
            assert_eq!(Card::find(name).map(|card| card.key), Ok(key));
        }
        let error = |name: &str| Card::find(name).expect_err("not one card").to_string();
        assert_eq!(error("a100"), "'a100' may be one of a100-40gb, a100-80gb");
        assert_eq!(error("V100"), "'V100' may be one of v100-16gb, v100-32gb");
        for name in ["list", "", "mi300x"] {
            assert!(error(name).contains(", h200, b200"), "{}", error(name));
        }
    }

    #[test]
    fn table_is_sorted_and_its_ranges_are_ranges() {
        assert!(Card::ALL.is_sorted_by_key(|card| card.gigabytes));
        for (number, card) in Card::ALL.iter().enumerate() {
            assert!(card.mib.is_sorted(), "{}", card.key);
            assert!(u64::from(card.gigabytes) * 1_073 > card.mib[1], "{}: it reports no more than it has", card.key);
            assert!(Card::ALL[..number].iter().all(|other| other.key != card.key), "{} twice", card.key);
        }
    }
}
