//! Expectations: how a check says what should have come, and how it stops when something else did.

use std::fmt::{self, Debug};
use std::panic::Location;

use warpool_driver::{DriverError, ErrorCode};

/// Why a check stopped before its end.
#[derive(Clone, Debug)]
pub enum Stop {
    /// An expectation did not hold: what was expected, what came, and where.
    Failed(String),
    /// A call failed that should not have.
    Unexpected {
        /// The failure.
        error: DriverError,
        /// The place in the check.
        place: &'static Location<'static>,
    },
    /// The device lacks what the check needs.
    Skipped(String),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(text) | Self::Skipped(text) => f.write_str(text),
            Self::Unexpected { error, place } => write!(f, "{error} (at {})", short(place)),
        }
    }
}

impl From<DriverError> for Stop {
    #[track_caller]
    fn from(error: DriverError) -> Self {
        Self::Unexpected { error, place: Location::caller() }
    }
}

/// The result of a check, or of a part of one.
pub type Checked<T = ()> = Result<T, Stop>;

/// Stops with a skip, saying what the device lacks.
pub fn skip<T>(reason: impl Into<String>) -> Checked<T> {
    Err(Stop::Skipped(reason.into()))
}

/// Skips unless the device `can`.
pub fn need(can: bool, lacking: &str) -> Checked {
    if can { Ok(()) } else { skip(lacking) }
}

/// `what` must hold.
#[track_caller]
pub fn expect(holds: bool, what: &str) -> Checked {
    if holds { Ok(()) } else { fail(&format!("expected: {what}")) }
}

/// `got` must equal `want`.
#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "what a call returns is compared at once and needed no more")]
pub fn expect_eq<T: PartialEq + Debug>(what: &str, got: T, want: T) -> Checked {
    if got == want { Ok(()) } else { fail(&format!("{what}: expected {want:?}, got {got:?}")) }
}

/// The call must fail with `want`.
#[track_caller]
pub(crate) fn expect_code<T: Debug>(result: warpool_driver::Result<T>, want: ErrorCode) -> Checked {
    match result {
        Err(error) if error.code == want => Ok(()),
        Err(error) => fail(&format!("expected {want:?}, got {error}")),
        Ok(value) => fail(&format!("expected {want:?}, but the call worked and gave {value:?}")),
    }
}

/// The same, for a call of a table: the text names it.
#[track_caller]
pub(crate) fn expect_code_of(what: &str, result: warpool_driver::Result<()>, want: ErrorCode) -> Checked {
    match result {
        Err(error) if error.code == want => Ok(()),
        Err(error) => fail(&format!("{what}: expected {want:?}, got {error}")),
        Ok(()) => fail(&format!("{what}: expected {want:?}, but the call worked")),
    }
}

/// Two stretches of memory must hold the same; the text names the first place where they do not.
#[track_caller]
pub fn expect_same<T: PartialEq + Debug>(what: &str, got: &[T], want: &[T]) -> Checked {
    if got.len() != want.len() {
        return fail(&format!("{what}: expected {} values, got {}", want.len(), got.len()));
    }
    match got.iter().zip(want).position(|(got, want)| got != want) {
        None => Ok(()),
        Some(at) => {
            let wrong = got.iter().zip(want).filter(|(got, want)| got != want).count();
            fail(&format!(
                "{what}: at {at} expected {:?}, got {:?} ({wrong} of {} differ)",
                want[at],
                got[at],
                got.len()
            ))
        }
    }
}

#[track_caller]
fn fail(text: &str) -> Checked {
    Err(Stop::Failed(format!("{text} (at {})", short(Location::caller()))))
}

/// A place by its file's name and line.
fn short(place: &Location<'_>) -> String {
    let file = place.file().rsplit(['/', '\\']).next().unwrap_or_default();
    format!("{file}:{}", place.line())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_names_its_place() {
        let text = expect_eq("sum", 1, 2).unwrap_err().to_string();
        assert!(text.starts_with("sum: expected 2, got 1 (at expect.rs:"), "{text}");

        let line = line!() + 2;
        let stopped = || -> Checked {
            Err(DriverError::new("mem_alloc", ErrorCode::OutOfMemory))?;
            Ok(())
        };
        let text = stopped().unwrap_err().to_string();
        assert!(text.ends_with(&format!("(at expect.rs:{line})")), "{text} should name line {line}");
    }

    #[test]
    fn the_first_difference_is_named() {
        let text = expect_same("bytes", &[1, 2, 3], &[1, 5, 6]).unwrap_err().to_string();
        assert!(text.starts_with("bytes: at 1 expected 5, got 2 (2 of 3 differ)"), "{text}");
    }
}
