//! The stack of the pickle interpreter: values, and marks at which a batch of values began.
//! Writers that do not batch put a whole trace on it.

use crate::budget::{Budget, Exceeded};
use crate::pickle::Value;

/// Values and marks.
pub(super) struct PickleStack {
    values: Vec<Value>,
    /// Lengths of `values` at which a mark was set.
    marks: Vec<usize>,
    budget: Budget,
}

impl PickleStack {
    pub fn new(budget: &Budget) -> Self {
        Self { values: Vec::new(), marks: Vec::new(), budget: budget.clone() }
    }

    #[inline]
    pub fn push(&mut self, value: Value) -> Result<(), Exceeded> {
        self.budget.reserve_one(&mut self.values)?;
        self.values.push(value);
        Ok(())
    }

    pub fn mark(&mut self) -> Result<(), Exceeded> {
        self.budget.reserve_one(&mut self.marks)?;
        self.marks.push(self.values.len());
        Ok(())
    }

    pub fn pop_mark(&mut self) -> Option<usize> {
        self.marks.pop()
    }

    /// The last value above the last mark.
    #[inline]
    pub fn top(&self) -> Option<Value> {
        if self.values.len() > self.floor() { self.values.last().copied() } else { None }
    }

    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// The values from `start` on.
    #[inline]
    pub fn values_from(&self, start: usize) -> &[Value] {
        &self.values[start..]
    }

    pub fn values(&self) -> &[Value] {
        &self.values
    }

    #[inline]
    pub fn truncate(&mut self, length: usize) {
        self.values.truncate(length);
    }

    /// The last `count` values, if there are as many above the last mark: the index of the first.
    pub fn last(&self, count: usize) -> Option<usize> {
        (self.values.len() - self.floor() >= count).then(|| self.values.len() - count)
    }

    /// The container below the values at the top, and the index of the first of these. They start at the last mark,
    /// which is removed, or are the last `count`.
    #[inline]
    pub fn container(&mut self, count: Option<usize>) -> Result<(Value, usize), &'static str> {
        let start = match count {
            Some(count) => self.values.len().saturating_sub(count),
            None => self.marks.pop().ok_or("items for a container without MARK")?,
        };
        if start <= self.floor() || start > self.values.len() {
            return Err("items for a container that is not there");
        }
        Ok((self.values[start - 1], start))
    }

    /// The only value, at the end of a pickle.
    pub fn only_value(&self) -> Option<Value> {
        match self.values[..] {
            [value] if self.marks.is_empty() => Some(value),
            _ => None,
        }
    }

    /// The last mark at or below the index `at`.
    pub fn mark_below(&self, at: usize) -> Option<usize> {
        self.marks.iter().rev().find(|&&mark| mark <= at).copied()
    }

    /// Values below this are not accessible.
    #[inline]
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }
}
