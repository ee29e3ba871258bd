//! The natural order of names: numbers in them by their value, so `rank2` comes before `rank10`.

use std::cmp::Ordering;

/// Compares two names. Names that differ only in leading zeros are ordered as texts.
#[must_use]
pub fn natural_order(one: &str, other: &str) -> Ordering {
    let (mut left, mut right) = (one, other);
    loop {
        let (Some(a), Some(b)) = (left.chars().next(), right.chars().next()) else {
            return left.len().cmp(&right.len()).then_with(|| one.cmp(other));
        };
        let order = match (number(left), number(right)) {
            (Some((a, left_rest)), Some((b, right_rest))) => {
                (left, right) = (left_rest, right_rest);
                // Of any length: more digits are a larger number.
                a.len().cmp(&b.len()).then_with(|| a.cmp(b))
            }
            _ => {
                (left, right) = (&left[a.len_utf8()..], &right[b.len_utf8()..]);
                a.cmp(&b)
            }
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}

/// The digits at the start, without leading zeros, and what follows.
fn number(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    (end > 0).then(|| (digits.trim_start_matches('0'), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_ordered_by_value() {
        let expected =
            ["", "a", "a/2/x", "a/10/x", "rank", "rank0", "rank00", "rank02", "rank2", "rank10", "rank10b", "ränk1"];
        for seed in 0..50 {
            let mut names = expected;
            fastrand::Rng::with_seed(seed).shuffle(&mut names);
            names.sort_by(|a, b| natural_order(a, b));
            assert_eq!(names, expected);
        }
        let large = format!("r{}", "9".repeat(60));
        assert_eq!(natural_order(&large, "r10"), Ordering::Greater);
    }
}
