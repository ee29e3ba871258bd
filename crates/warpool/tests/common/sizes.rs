//! Sizes in the scripts of placement tests, such as `a=1.5M`, and in their pictures, such as `[a 1536K]`.

const UNITS: [(char, u64); 3] = [('G', 1 << 30), ('M', 1 << 20), ('K', 1 << 10)];

/// The bytes that a size means.
pub fn bytes(text: &str) -> u64 {
    let text = text.trim();
    let unit = UNITS.iter().find(|(unit, _)| text.ends_with(*unit));
    let (number, scale) = unit.map_or((text, 1), |&(unit, scale)| (text.trim_end_matches(unit), scale));
    (number.parse::<f64>().unwrap() * scale as f64) as u64
}

/// A number of bytes in its largest unit.
pub fn short(bytes: u64) -> String {
    match UNITS.iter().find(|&&(_, scale)| bytes >= scale && bytes.is_multiple_of(scale)) {
        Some((unit, scale)) => format!("{}{unit}", bytes / scale),
        None => bytes.to_string(),
    }
}
