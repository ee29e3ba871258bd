//! Messages about a settings string: problems, which make it invalid, and warnings. Each names the key, its position
//! and what to do.

use std::fmt;

/// All problems of an invalid settings string. Nothing of the string is applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct SettingsError {
    /// In the order of the string; never empty.
    pub problems: Vec<Problem>,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.problems[..] {
            [only] => write!(f, "settings: {only}"),
            all => {
                write!(f, "settings: {} problems", all.len())?;
                all.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

/// Makes a settings string invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The key as given; empty if a key is missing.
    pub key: String,
    /// The byte position; `None` if the value did not come from a string.
    pub at: Option<usize>,
    /// What is wrong, and what to do.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_message(f, &self.key, self.at, &self.text)
    }
}

/// A setting that has no effect, or an unexpected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The key by its main name; in recordings also an unknown key.
    pub key: String,
    /// The byte position; `None` if the value was set before.
    pub at: Option<usize>,
    /// What has no effect or is unexpected, and what to do.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_message(f, &self.key, self.at, &self.text)
    }
}

fn write_message(f: &mut fmt::Formatter<'_>, key: &str, at: Option<usize>, text: &str) -> fmt::Result {
    if let Some(at) = at {
        write!(f, "at byte {at}: ")?;
    }
    if !key.is_empty() {
        write!(f, "`{key}`: ")?;
    }
    f.write_str(text)
}
