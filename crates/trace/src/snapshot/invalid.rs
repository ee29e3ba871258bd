//! What is wrong with a part of a snapshot.

use crate::budget::Exceeded;
use crate::pickle::Value;

impl From<Exceeded> for Invalid {
    fn from(Exceeded: Exceeded) -> Self {
        Self::memory_limit()
    }
}

/// A container is not as it should be.
#[derive(Debug)]
pub(crate) struct Invalid {
    /// The position inside the container, as in `.blocks[2]`; often empty.
    path: String,
    what: String,
}

impl Invalid {
    pub(super) fn new(what: impl Into<String>) -> Self {
        Self { path: String::new(), what: what.into() }
    }

    /// The memory limit was reached. The reader reports that error instead of this one.
    pub(super) fn memory_limit() -> Self {
        Self::new("the memory limit was reached")
    }

    pub(super) fn missing(key: &str) -> Self {
        Self::new(format!("the key `{key}` is missing"))
    }

    /// A value of the wrong type.
    #[cold]
    pub(super) fn unexpected(expected: &str, value: Value) -> Self {
        Self::new(format!("expected {expected}, found {}", value.describe()))
    }

    /// A value where a dict or list of one kind is expected.
    #[cold]
    pub(super) fn container(value: Value) -> Self {
        match value {
            Value::Dict(..) | Value::List(..) => {
                Self::new("a container of another kind is expected here, or it is shared with a part that is not read")
            }
            _ => Self::unexpected("a dict or list", value),
        }
    }

    /// A list that is already part of another container. A pickle that refers to one list many times could otherwise
    /// expand to any amount of memory.
    pub(super) fn shared(what: &str) -> Self {
        Self::new(format!("the {what} is already part of another container"))
    }

    /// A list that is appended to after it became part of a container.
    pub(super) fn appended(what: &str) -> Self {
        Self::new(format!("the {what} is appended to after it was used"))
    }

    /// The same, with `position` in front of the path.
    pub(super) fn within(mut self, position: &str) -> Self {
        self.path.insert_str(0, position);
        self
    }

    /// The same, with the key in front of the message if it has no path.
    pub(super) fn of_key(self, key: &str) -> Self {
        if self.path.is_empty() { Self::new(format!("`{key}`: {}", self.what)) } else { self }
    }

    /// The position of what is wrong, for a container at `path`.
    pub(crate) fn position(&self, path: &str) -> String {
        let position = format!("{path}{}", self.path);
        if position.is_empty() { "the root".to_owned() } else { position.trim_start_matches('.').to_owned() }
    }

    pub(crate) fn into_what(self) -> String {
        self.what
    }
}
