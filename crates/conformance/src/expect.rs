//! Expectations: how a check states what it expects, and the error that ends it when something else happens.

use std::fmt::{self, Debug};
use std::panic::Location;

use warpool_driver::{DriverError, ErrorCode};

/// Why a check ended early.
#[derive(Clone, Debug)]
pub enum CheckError {
    /// An expectation did not hold: what was expected, what happened, and the source line.
    Failed(String),
    /// A driver call failed unexpectedly.
    Driver {
        /// The error.
        error: DriverError,
        /// The source line of the call.
        location: &'static Location<'static>,
    },
    /// The device lacks what the check needs.
    Skipped(String),
}

impl fmt::Display for CheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(text) | Self::Skipped(text) => f.write_str(text),
            Self::Driver { error, location } => write!(f, "{error} (at {})", file_and_line(location)),
        }
    }
}

impl From<DriverError> for CheckError {
    #[track_caller]
    fn from(error: DriverError) -> Self {
        Self::Driver { error, location: Location::caller() }
    }
}

impl From<warpool::Error> for CheckError {
    #[track_caller]
    fn from(error: warpool::Error) -> Self {
        match error {
            warpool::Error::Driver(error) => error.into(),
            other => Self::Failed(format!("{other} (at {})", file_and_line(Location::caller()))),
        }
    }
}

/// The result of a check, or of a part of one.
pub type CheckResult<T = ()> = Result<T, CheckError>;

/// Ends the check as skipped; `reason` says what the device lacks.
pub fn skip<T>(reason: impl Into<String>) -> CheckResult<T> {
    Err(CheckError::Skipped(reason.into()))
}

/// Skips the check unless `supported`; `reason` says what the device lacks.
pub fn require(supported: bool, reason: &str) -> CheckResult {
    if supported { Ok(()) } else { skip(reason) }
}

/// Fails the check unless `condition` holds; `what` states it.
#[track_caller]
pub fn expect(condition: bool, what: &str) -> CheckResult {
    if condition { Ok(()) } else { fail(&format!("expected: {what}")) }
}

/// Fails the check unless `got` equals `want`; `what` names the value.
#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "arguments are mostly results of calls")]
pub fn expect_eq<T: PartialEq + Debug>(what: &str, got: T, want: T) -> CheckResult {
    if got == want { Ok(()) } else { fail(&format!("{what}: expected {want:?}, got {got:?}")) }
}

/// Fails the check unless a call returned the error `want`.
#[track_caller]
pub(crate) fn expect_error<T: Debug>(result: warpool_driver::Result<T>, want: ErrorCode) -> CheckResult {
    match result {
        Err(error) if error.code == want => Ok(()),
        Err(error) => fail(&format!("expected {want:?}, got {error}")),
        Ok(value) => fail(&format!("expected {want:?}, but the call returned {value:?}")),
    }
}

/// The same for one of several calls: `what` names it.
#[track_caller]
pub(crate) fn expect_error_of(what: &str, result: warpool_driver::Result<()>, want: ErrorCode) -> CheckResult {
    match result {
        Err(error) if error.code == want => Ok(()),
        Err(error) => fail(&format!("{what}: expected {want:?}, got {error}")),
        Ok(()) => fail(&format!("{what}: expected {want:?}, but the call succeeded")),
    }
}

/// Fails the check unless two slices are equal; the error names the first difference.
#[track_caller]
pub fn expect_slice_eq<T: PartialEq + Debug>(what: &str, got: &[T], want: &[T]) -> CheckResult {
    if got.len() != want.len() {
        return fail(&format!("{what}: expected {} values, got {}", want.len(), got.len()));
    }
    match got.iter().zip(want).position(|(got, want)| got != want) {
        None => Ok(()),
        Some(index) => {
            let different = got.iter().zip(want).filter(|(got, want)| got != want).count();
            fail(&format!(
                "{what}: at {index} expected {:?}, got {:?} ({different} of {} differ)",
                want[index],
                got[index],
                got.len()
            ))
        }
    }
}

#[track_caller]
fn fail(text: &str) -> CheckResult {
    Err(CheckError::Failed(format!("{text} (at {})", file_and_line(Location::caller()))))
}

fn file_and_line(location: &Location<'_>) -> String {
    let file = location.file().rsplit(['/', '\\']).next().unwrap_or_default();
    format!("{file}:{}", location.line())
}
