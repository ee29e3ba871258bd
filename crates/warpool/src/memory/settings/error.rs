//! What can be said of a settings string: problems, which refuse it, and warnings, which do not.
//! Each names the key, where it stands, and what to do.

use std::fmt;

/// Why a settings string was refused: everything that is wrong with it. Nothing of the string applies.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct SettingsError {
    /// What is wrong, in the order of the string; never empty.
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

/// Something wrong, which keeps a string from applying.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The key as it was given; empty where a key is missing.
    pub key: String,
    /// Where in the string, in bytes; `None` if the value did not come from a string.
    pub at: Option<usize>,
    /// What is wrong, and what to do.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(f, &self.key, self.at, &self.text)
    }
}

/// Something that applies, but not as its writer may think.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The key that it is about, by the name that Warpool has for it; in recordings also an unknown one.
    pub key: String,
    /// Where in the string, in bytes; `None` if the value was there before.
    pub at: Option<usize>,
    /// What it means, and what to do.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(f, &self.key, self.at, &self.text)
    }
}

fn show(f: &mut fmt::Formatter<'_>, key: &str, at: Option<usize>, text: &str) -> fmt::Result {
    if let Some(at) = at {
        write!(f, "at byte {at}: ")?;
    }
    if !key.is_empty() {
        write!(f, "`{key}`: ")?;
    }
    f.write_str(text)
}
