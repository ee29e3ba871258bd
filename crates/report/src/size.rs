//! Parsing and formatting of sizes in bytes.

/// The units, largest first. Binary units have an `i`.
const UNITS: &[(&str, u64)] = &[
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];

/// Parses `80GiB`, `139.8 GiB`, `512MiB`, `4096B` or `6G` (GiB, as PyTorch's settings mean it). A fraction of a unit is
/// rounded down to whole bytes. Without a unit it is an error: `--capacity 24` is meant as GiB, and nothing fits on a
/// device of 24 bytes.
///
/// # Errors
/// If it is not a size, with a sentence that quotes it.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim());
    let unit = match unit {
        "" if rounded(number, 1).is_some() => {
            return Err(format!("'{text}' has no unit: write {number}GiB or {number}B"));
        }
        "" if rounded(number, 1 << 30).is_some() => return Err(format!("'{text}' has no unit: write {number}GiB")),
        _ => {
            let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
            let short =
                UNITS.iter().find(|(name, _)| name.strip_suffix("iB").is_some_and(|it| it.eq_ignore_ascii_case(unit)));
            known
                .or(short)
                .ok_or_else(|| format!("'{text}' is not a size: write a number with B, KiB, MiB, GiB or TiB"))?
                .1
        }
    };
    rounded(number, unit).ok_or_else(|| format!("'{text}' is not a size: it must be a number of bytes below 2^64"))
}

/// The decimal `number` times `unit`, rounded down; `None` if that is not below 2^64, or a fraction of a byte.
fn rounded(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let scale = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let scaled = digits.checked_mul(u128::from(unit))?;
    if unit == 1 && scaled % scale != 0 {
        return None;
    }
    u64::try_from(scaled / scale).ok()
}

/// Formats `bytes` in the largest binary unit that is not larger.
pub use warpool_trace::bytes_text::text as format;

/// The same, rounded up to the shown precision, so that the shown size still suffices.
pub fn format_up(bytes: u64) -> String {
    let shown = format(bytes);
    let Some((name, unit)) = UNITS.iter().find(|(name, unit)| name.contains('i') && bytes >= *unit) else {
        return shown;
    };
    let tenths = (u128::from(bytes) * 10).div_ceil(u128::from(*unit));
    if bytes.is_multiple_of(*unit) { shown } else { format!("{}.{} {name}", tenths / 10, tenths % 10) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_where_they_have_to_suffice() {
        for (bytes, shown) in [(0, "0 B"), (6 << 30, "6 GiB"), ((6 << 30) + 1, "6.1 GiB"), ((7 << 30) - 1, "7.0 GiB")] {
            assert_eq!(format_up(bytes), shown);
            assert!(parse(shown).expect("a size") >= bytes, "{shown}");
        }
    }

    #[test]
    fn sizes_are_parsed() {
        let check = |text: &str, bytes: u64| assert_eq!(parse(text), Ok(bytes), "{text}");
        check("0B", 0);
        check("4096B", 4096);
        check("512MiB", 512 << 20);
        check("80GiB", 80 << 30);
        check(" 80 gib ", 80 << 30);
        check("1.5GiB", 3 << 29);
        check("2TiB", 2 << 40);
        check("3kB", 3000);
        check("7B", 7);
        check("18446744073709551615B", u64::MAX);
        check("139.8GiB", 150_109_106_995);
        check("6G", 6 << 30);
        check("1.5m", 3 << 19);
        check("0.3KiB", 307);
    }

    #[test]
    fn invalid_size_is_an_error_that_quotes_it() {
        for text in
            ["", "GiB", "-1", "1.2.3GiB", "80Gi", "80 apples", "0.3B", "18446744073709551616B", "99999999TiB", "1e9"]
        {
            let error = parse(text).unwrap_err();
            assert!(error.contains(&format!("'{text}' is not a size")), "{text}: {error}");
        }
    }

    #[test]
    fn size_without_a_unit_is_an_error_that_says_what_to_write() {
        assert_eq!(parse("24").unwrap_err(), "'24' has no unit: write 24GiB or 24B");
        assert_eq!(parse(" 0 ").unwrap_err(), "'0' has no unit: write 0GiB or 0B");
        assert_eq!(parse("1.5").unwrap_err(), "'1.5' has no unit: write 1.5GiB");
    }

    #[test]
    fn sizes_are_formatted() {
        let check = |bytes: u64, text: &str| assert_eq!(format(bytes), text);
        check(0, "0 B");
        check(1023, "1023 B");
        check(2 << 20, "2 MiB");
        check(150_109_880_320, "139.8 GiB");
        check(1536, "1.5 KiB");
        check(1 << 40, "1 TiB");
    }
}
