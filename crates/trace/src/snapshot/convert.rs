//! From values of a pickle to what a key wants, or what is wrong with them.

use warpool::memory::{MemPoolId, TextId};

use super::build::{SHARED, Wrong};
use super::schema::Word;
use crate::pickle::Value;

#[inline]
pub(super) fn unsigned(value: Value) -> Result<u64, Wrong> {
    match value {
        Value::Int(number) => u64::try_from(number).map_err(|_| Wrong::new(format!("{number} is negative"))),
        Value::Large(number) => Ok(number),
        _ => Err(unexpected("an int", value)),
    }
}

#[inline]
pub(super) fn signed(value: Value) -> Result<i64, Wrong> {
    match value {
        Value::Int(number) => Ok(number),
        _ => Err(unexpected("an int of 64 bits", value)),
    }
}

pub(super) fn device(value: Value) -> Result<i32, Wrong> {
    let device = signed(value)?;
    i32::try_from(device).map_err(|_| Wrong::new(format!("{device} is no device")))
}

pub(super) fn float(value: Value) -> Result<f64, Wrong> {
    match value {
        Value::Float(number) => Ok(number),
        Value::Int(number) => Ok(number as f64),
        _ => Err(unexpected("a float", value)),
    }
}

pub(super) fn boolean(value: Value) -> Result<bool, Wrong> {
    match value {
        Value::Bool(truth) => Ok(truth),
        _ => Err(unexpected("a bool", value)),
    }
}

pub(super) fn text(value: Value) -> Result<u32, Wrong> {
    match value {
        Value::Text(text) => Ok(text),
        _ => Err(unexpected("a text", value)),
    }
}

pub(super) fn pool(value: Value) -> Result<MemPoolId, Wrong> {
    match value {
        Value::Pair(pool) => Ok(pool),
        _ => Err(unexpected("a tuple of two numbers", value)),
    }
}

/// A text that may say nothing. Its number is the reader's until the end.
#[inline]
pub(super) fn note(value: Value, nothing: Word) -> Result<Option<TextId>, Wrong> {
    match value {
        Value::Text(text) => Ok((text != nothing as u32).then_some(TextId(text))),
        Value::None => Ok(None),
        _ => Err(unexpected("a text", value)),
    }
}

#[cold]
fn unexpected(expected: &str, value: Value) -> Wrong {
    Wrong::new(format!("expected {expected}, found {}", value.describe()))
}

#[cold]
pub(super) fn container(value: Value) -> Wrong {
    match value {
        Value::Dict(..) | Value::List(..) => Wrong::new(SHARED),
        _ => unexpected("a dict or list", value),
    }
}
