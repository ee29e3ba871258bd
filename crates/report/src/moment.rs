//! The moments that a reader can name.

use warpool_trace::explain::MomentChoice;

/// Parses `allocated`, `reserved`, `oom`, the number of an event, or a time such as `1.5s` or `300ms`.
///
/// # Errors
/// If it is none of these, with a sentence that quotes it.
pub fn parse(text: &str) -> Result<MomentChoice, String> {
    let error = || {
        format!("'{text}' is not a moment: write allocated, reserved, oom, the number of an event, or a time as 1.5s")
    };
    match text.trim() {
        "allocated" => return Ok(MomentChoice::Allocated),
        "reserved" => return Ok(MomentChoice::Reserved),
        "oom" => return Ok(MomentChoice::OutOfMemory),
        _ => {}
    }
    if let Ok(event) = text.parse() {
        return Ok(MomentChoice::Event(event));
    }
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
    let (number, unit) =
        units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit))).ok_or_else(error)?;
    let time: f64 = number.trim().parse().map_err(|_| error())?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be a time")]
    match time * unit {
        time_us if (0.0..1e18).contains(&time_us) => Ok(MomentChoice::Time(time_us as u64)),
        _ => Err(error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_parsed() {
        assert_eq!(parse("oom"), Ok(MomentChoice::OutOfMemory));
        assert_eq!(parse("20121"), Ok(MomentChoice::Event(20_121)));
        assert_eq!(parse("1.5s"), Ok(MomentChoice::Time(1_500_000)));
        assert_eq!(parse("300ms"), Ok(MomentChoice::Time(300_000)));
        for text in ["", "peak", "-3", "-1s", "nans", "1.5"] {
            let error = parse(text).unwrap_err();
            assert!(error.contains("is not a moment"), "{text}: {error}");
        }
    }
}
