//! The options of a request, each taken once by the command that knows it; one that is left is an error.

use std::ops::RangeInclusive;

use crate::{moment, size};
use serde_json::{Map, Value};
use warpool_trace::cards::Card;
use warpool_trace::explain::{Frameworks, MomentChoice};

use crate::request::error::{Error, Result};

/// Options by name. A null value counts as absent.
pub struct Options(Map<String, Value>);

impl Options {
    /// The options of an object.
    #[must_use]
    pub fn new(object: Map<String, Value>) -> Self {
        Self(object.into_iter().filter(|(_, value)| !value.is_null()).collect())
    }

    /// An error if an option is left: the command does not know it.
    ///
    /// # Errors
    /// If one is left.
    pub fn finish(self, command: &str) -> Result<()> {
        match self.0.keys().next() {
            Some(name) => Err(Error::Option(format!("{command} has no option {name}"))),
            None => Ok(()),
        }
    }

    /// Takes an option, which must be what `read` accepts.
    fn take<T>(&mut self, name: &str, expected: &str, read: impl FnOnce(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        match read(&value) {
            Some(value) => Ok(Some(value)),
            None => Err(Error::Option(format!("{name} is {value}: it must be {expected}"))),
        }
    }

    /// A flag; false by default.
    pub fn flag(&mut self, name: &str) -> Result<bool> {
        Ok(self.take(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// A text.
    pub fn text(&mut self, name: &str) -> Result<Option<String>> {
        self.take(name, "a text", |value| value.as_str().map(str::to_owned))
    }

    /// A list of texts; empty by default.
    pub fn texts(&mut self, name: &str) -> Result<Vec<String>> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let read = |value: &Value| value.as_array()?.iter().map(text).collect();
        Ok(self.take(name, "a list of texts", read)?.unwrap_or_default())
    }

    /// A whole number in a range.
    pub fn count(&mut self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        let read = |value: &Value| u32::try_from(value.as_u64()?).ok().filter(|count| range.contains(count));
        self.take(name, &expected, read)
    }

    /// A size: a number of bytes, or a text with its unit.
    pub fn size(&mut self, name: &str) -> Result<Option<u64>> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        if let Some(bytes) = value.as_u64() {
            return Ok(Some(bytes));
        }
        let Some(text) = value.as_str() else {
            let expected = "bytes as a number below 2^64, or a text with a unit such as \"80GiB\"";
            return Err(Error::Option(format!("{name} is {value}: it must be {expected}")));
        };
        // "80" may be meant as gigabytes, and 80 bytes are no size of a device.
        if text.trim().chars().all(|letter| letter.is_ascii_digit() || letter == '.') && !text.trim().is_empty() {
            let message = format!("{name} is '{text}', without a unit: write '{text}GiB', or bytes as a number");
            return Err(Error::Option(message));
        }
        size::parse(text).map(Some).map_err(|message| Error::Option(format!("{name}: {message}")))
    }

    /// The memory of the device: `capacity`, or that of the card `gpu`.
    pub fn capacity(&mut self) -> Result<Option<u64>> {
        let (capacity, gpu) = (self.size("capacity")?, self.text("gpu")?);
        match (capacity, gpu) {
            (Some(_), Some(_)) => Err(Error::Option("give capacity or gpu, not both".to_owned())),
            (None, Some(name)) => card_bytes(&name).map(Some),
            (capacity, None) => Ok(capacity),
        }
    }

    /// The moment to explain: `at`.
    pub fn moment(&mut self) -> Result<Option<MomentChoice>> {
        let Some(text) = self.text("at")? else { return Ok(None) };
        moment::parse(&text).map(Some).map_err(|message| Error::Option(format!("at: {message}")))
    }

    /// Which code is not the program's own: `frameworks` beside the usual ones, or none with `all_frames`.
    pub fn frameworks(&mut self) -> Result<Frameworks> {
        let names = self.texts("frameworks")?;
        match (self.flag("all_frames")?, names.is_empty()) {
            (true, true) => Ok(Frameworks::only(&[])),
            (true, false) => Err(Error::Option("give frameworks or all_frames, not both".to_owned())),
            (false, _) => Ok(Frameworks::default().with(&names)),
        }
    }

    /// The most memory of this machine that one recording may take.
    pub fn memory_limit(&mut self) -> Result<Option<u64>> {
        self.size("memory_limit")
    }
}

/// The memory of a card by its name.
fn card_bytes(name: &str) -> Result<u64> {
    Card::find(name).map(Card::bytes_total).map_err(|error| Error::Option(format!("gpu: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn options(value: Value) -> Options {
        Options::new(value.as_object().expect("an object").clone())
    }

    /// The message about the option.
    fn message<T>(result: Result<T>) -> String {
        match result {
            Err(Error::Option(message)) => message,
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("it was accepted"),
        }
    }

    #[test]
    fn size_is_a_number_or_has_a_unit() {
        let size = |value: Value| options(json!({ "capacity": value })).size("capacity");
        assert_eq!(size(json!(4096)).unwrap(), Some(4096));
        assert_eq!(size(json!("79.5GiB")).unwrap(), Some(159 << 29));
        assert_eq!(size(Value::Null).unwrap(), None);
        assert!(message(size(json!("80"))).contains("without a unit"));
        assert!(message(size(json!("80 apples"))).contains("is not a size"));
        for wrong in [json!(-1), json!(1.5), json!(1e30), json!(true), json!([1])] {
            assert!(message(size(wrong)).contains("below 2^64"));
        }
    }

    #[test]
    fn option_that_no_one_took_is_an_error() {
        let mut given = options(json!({ "orders": 4, "colour": "red", "rounds": null }));
        assert_eq!(given.count("orders", 1..=1000).unwrap(), Some(4));
        assert_eq!(message(given.finish("explain")), "explain has no option colour");
    }

    #[test]
    fn value_of_another_kind_is_an_error_that_names_both() {
        let mut given = options(json!({ "orders": "8", "frameworks": ["a", 1], "all_frames": 1, "allocator": 2 }));
        assert_eq!(message(given.count("orders", 1..=9)), "orders is \"8\": it must be a whole number from 1 to 9");
        assert!(message(given.texts("frameworks")).contains("a list of texts"));
        assert!(message(given.flag("all_frames")).contains("true or false"));
        assert!(message(given.text("allocator")).contains("a text"));
        assert!(message(options(json!({ "orders": 0 })).count("orders", 1..=9)).contains("from 1 to 9"));
    }

    #[test]
    fn options_that_exclude_each_other() {
        let both = |value: Value| options(value);
        assert!(message(both(json!({ "capacity": 1, "gpu": "h200" })).capacity()).contains("not both"));
        let frames = json!({ "frameworks": ["a"], "all_frames": true });
        assert!(message(both(frames).frameworks().map(drop)).contains("not both"));
        assert!(message(both(json!({ "gpu": "nosuch" })).capacity()).contains("gpu: 'nosuch' is not in the table"));
    }
}
