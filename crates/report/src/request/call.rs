//! One call: a request, its progress, and its answer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::request::answer::Answer;
use crate::request::command;
use crate::request::error::{Error, Result};
use crate::request::input::Source;
use crate::request::options::Options;
use crate::request::work::Work;

/// A call. It is run once; other threads may read its [`work`](Self::work) meanwhile.
#[derive(Debug, Default)]
pub struct Call {
    work: Work,
    texts: OnceLock<Texts>,
}

/// An answer as text.
#[derive(Debug)]
struct Texts {
    json: String,
    page: String,
}

impl Call {
    /// A call that tells its progress: see [`Work::watched`].
    #[must_use]
    pub fn watched(watch: fn(u8, u64, u64)) -> Self {
        Self { work: Work::watched(watch), ..Self::default() }
    }

    /// Its progress and its flag to stop.
    #[must_use]
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// Makes the answer. Returns whether there is one, rather than an error. A call that was run before fails and keeps
    /// its answer.
    pub fn run(&self, request: &[u8], sources: &[Source<'_>]) -> bool {
        if self.texts.get().is_some() {
            return false;
        }
        let made = caught(|| self.made(request, sources));
        let succeeded = made.is_ok();
        let answer = made.unwrap_or_else(|error| Answer::new(json!({ "error": error.object() })));
        let texts = Texts { json: answer.json.to_string(), page: answer.page.unwrap_or_default() };
        self.texts.set(texts).is_ok() && succeeded
    }

    fn made(&self, request: &[u8], sources: &[Source<'_>]) -> Result<Answer> {
        let wrong = |what: &str| Error::Internal(format!("the request is wrong: {what}"));
        let Ok(Value::Object(mut request)) = serde_json::from_slice(request) else {
            return Err(wrong("it is not a JSON object"));
        };
        let Some(Value::String(command)) = request.remove("command") else { return Err(wrong("it has no command")) };
        let Some(Value::Object(options)) = request.remove("options") else { return Err(wrong("it has no options")) };
        command::answer(&command, Options::new(options), sources, &self.work)
    }

    /// The answer as JSON, or an object with `error`; empty before it was run.
    #[must_use]
    pub fn json(&self) -> &str {
        self.texts.get().map_or("", |texts| &texts.json)
    }

    /// The answer and the page, as [`json`](Self::json) and [`page`](Self::page) have them.
    #[must_use]
    pub fn into_texts(self) -> (String, String) {
        self.texts.into_inner().map_or_else(Default::default, |Texts { json, page }| (json, page))
    }

    /// The page; empty if there is none.
    #[must_use]
    pub fn page(&self) -> &str {
        self.texts.get().map_or("", |texts| &texts.page)
    }
}

/// The answer of `body`; a panic becomes an error.
fn caught(body: impl FnOnce() -> Result<Answer>) -> Result<Answer> {
    // Unwind safe: nothing is used again after a panic except progress counters.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        Err(Error::Internal(format!("internal error, please report it: {text}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_an_error_with_its_text() {
        for (error, expected) in [
            (caught(|| panic!("a rule is broken")), "a rule is broken"),
            (caught(|| panic!("rule {}", 7)), "rule 7"),
            (caught(|| std::panic::resume_unwind(Box::new(7))), "a panic"),
        ] {
            let Err(Error::Internal(message)) = error else { panic!("{error:?}") };
            assert_eq!(message, format!("internal error, please report it: {expected}"));
        }
    }
}
