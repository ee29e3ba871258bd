//! What a command answers.

use serde_json::Value;

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// The objects.
    pub json: Value,
    /// The page, for commands that make one.
    pub page: Option<String>,
}

impl Answer {
    /// An answer without a page.
    #[must_use]
    pub fn new(json: Value) -> Self {
        Self { json, page: None }
    }
}
