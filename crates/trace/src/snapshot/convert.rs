//! Values of a pickle as the types of a snapshot's fields.

use warpool::memory::report::TextId;

use super::invalid::Invalid;
use super::schema::Keyword;
use crate::pickle::Value;

#[inline]
pub(super) fn unsigned(value: Value) -> Result<u64, Invalid> {
    match value {
        Value::Int(number) => u64::try_from(number).map_err(|_| Invalid::new(format!("{number} is negative"))),
        Value::Large(number) => Ok(number),
        _ => Err(Invalid::unexpected("an int", value)),
    }
}

#[inline]
pub(super) fn signed(value: Value) -> Result<i64, Invalid> {
    match value {
        Value::Int(number) => Ok(number),
        _ => Err(Invalid::unexpected("an int of 64 bits", value)),
    }
}

pub(super) fn device(value: Value) -> Result<i32, Invalid> {
    let device = signed(value)?;
    i32::try_from(device).map_err(|_| Invalid::new(format!("{device} is not a device")))
}

pub(super) fn float(value: Value) -> Result<f64, Invalid> {
    match value {
        Value::Float(number) => Ok(number),
        Value::Int(number) => Ok(number as f64),
        _ => Err(Invalid::unexpected("a float", value)),
    }
}

pub(super) fn boolean(value: Value) -> Result<bool, Invalid> {
    match value {
        Value::Bool(boolean) => Ok(boolean),
        _ => Err(Invalid::unexpected("a bool", value)),
    }
}

pub(super) fn text(value: Value) -> Result<u32, Invalid> {
    match value {
        Value::Text(text) => Ok(text),
        _ => Err(Invalid::unexpected("a text", value)),
    }
}

/// A text that may be absent, which is also written as `absent`. The number is that of the reader's table.
#[inline]
pub(super) fn optional_text(value: Value, absent: Keyword) -> Result<Option<TextId>, Invalid> {
    match value {
        Value::Text(text) if text == absent as u32 => Ok(None),
        // An id always fits: the reader refuses a file with more texts.
        Value::Text(text) => Ok(TextId::new(text as usize)),
        Value::None => Ok(None),
        _ => Err(Invalid::unexpected("a text", value)),
    }
}
