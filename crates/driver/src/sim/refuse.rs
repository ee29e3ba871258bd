//! Errors of the simulation, before the call that they end is named.

use crate::{Call, DriverError, ErrorCode, Result};

/// A refusal. Parts of the simulation do not know which call they work for: [`named`] adds that where the error leaves
/// the simulation.
pub fn refusal(code: ErrorCode, detail: impl Into<String>) -> DriverError {
    unnamed(code).with_detail(detail)
}

/// The same as a result.
pub fn refuse<T>(code: ErrorCode, detail: impl Into<String>) -> Result<T> {
    Err(refusal(code, detail))
}

/// A refusal whose code says everything.
pub fn unnamed(code: ErrorCode) -> DriverError {
    DriverError::new("", code)
}

/// Names the call in the error, if `result` is one.
pub fn named<T>(call: Call, result: Result<T>) -> Result<T> {
    named_as(call.name(), result)
}

/// The same for a method that is not a call of the contract.
pub fn named_as<T>(name: &'static str, result: Result<T>) -> Result<T> {
    result.map_err(|error| DriverError { call: name, ..error })
}
