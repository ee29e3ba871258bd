//! The command and the tests of `warpool` and `warpool-soak`, built with the feature `planted-defects`, and the list of
//! defects.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::list::CAUGHT_BY;

/// The built binaries.
pub struct Built {
    pub command: PathBuf,
    /// The test binaries, by the name of their target.
    pub tests: BTreeMap<String, PathBuf>,
}

/// A planted defect.
pub struct Planted {
    pub number: u64,
    pub name: String,
    /// What the code does wrong.
    pub rule: String,
    /// A test binary, and a filter of the names of its tests.
    pub test: String,
    /// A campaign of `soak` and a number of its first programs, or the campaign alone if its programs differ from run
    /// to run.
    pub soak: String,
}

impl Planted {
    /// The campaign of `soak` and the number of programs of which one catches it in every run.
    pub fn programs(&self) -> Option<(&str, u64)> {
        let (campaign, count) = self.soak.split_once(':')?;
        Some((campaign, count.parse().expect("list.rs has a number after the colon")))
    }
}

impl Built {
    pub fn new(root: &Path, has_tests: bool) -> Result<Self, String> {
        let command = executables(root, &["build", "--package", "warpool-cli"])?.into_values().next();
        let tests = match has_tests {
            true => executables(
                root,
                &[
                    "test",
                    "--no-run",
                    "--lib",
                    "--tests",
                    "--package",
                    "warpool",
                    "--package",
                    "warpool-tests",
                    "--package",
                    "warpool-soak",
                ],
            )?,
            false => BTreeMap::new(),
        };
        Ok(Self { command: command.ok_or("cargo names no command")?, tests })
    }

    /// What [`prepare`](Self::prepare) copied to a folder.
    pub fn prepared(folder: &Path) -> Result<Self, String> {
        let folder = folder.canonicalize().map_err(|error| format!("{}: {error}", folder.display()))?;
        let tests = test_binaries().map(|name| (name.to_owned(), folder.join(format!("test-{name}")))).collect();
        Ok(Self { command: folder.join("warpool"), tests })
    }

    /// Copies all that a run needs, without symbols.
    pub fn prepare(&self, folder: &Path) -> Result<(), String> {
        std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let own = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut all = vec![("xtask".to_owned(), &own), ("warpool".to_owned(), &self.command)];
        for name in test_binaries() {
            let test = self.tests.get(name).ok_or_else(|| format!("no test binary {name:?}"))?;
            all.push((format!("test-{name}"), test));
        }
        for (name, from) in all {
            let to = folder.join(name);
            let stripped = Command::new("strip").arg("-o").args([&to, from]).status();
            if !stripped.map_err(|error| format!("strip: {error}"))?.success() {
                return Err(format!("strip could not write {}", to.display()));
            }
        }
        Ok(())
    }

    /// The list, which the command has.
    pub fn planted(&self) -> Result<Vec<Planted>, String> {
        let listed = Command::new(&self.command).arg("defects").output();
        let listed = listed.map_err(|error| format!("{}: {error}", self.command.display()))?;
        if !listed.status.success() {
            let error = String::from_utf8_lossy(&listed.stderr);
            return Err(format!("{} has no list of defects: {error}", self.command.display()));
        }
        let text = String::from_utf8_lossy(&listed.stdout);
        let planted = |line: &str| {
            let object: Value = serde_json::from_str(line).map_err(|error| format!("{line}: {error}"))?;
            let text = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
            let (number, name) = (object["number"].as_u64().unwrap_or_default(), text("name"));
            let known = CAUGHT_BY.iter().find(|(of, _, _)| *of == name);
            let (_, test, soak) = known.ok_or_else(|| format!("list.rs says nothing about defect {number}, {name}"))?;
            Ok(Planted { number, name, rule: text("rule"), test: (*test).to_owned(), soak: (*soak).to_owned() })
        };
        text.lines().map(planted).collect()
    }
}

/// The test binaries that the list names.
fn test_binaries() -> impl Iterator<Item = &'static str> {
    let names: BTreeSet<&str> = CAUGHT_BY.iter().filter_map(|(_, test, _)| test.split(' ').next()).collect();
    names.into_iter()
}

/// The executables that a call of cargo builds, by the name of their target.
fn executables(root: &Path, arguments: &[&str]) -> Result<BTreeMap<String, PathBuf>, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let feature = ["--quiet", "--features", "planted-defects", "--message-format", "json"];
    let built = Command::new(cargo).args(arguments).args(feature).current_dir(root).output();
    let built = built.map_err(|error| format!("cargo: {error}"))?;
    if !built.status.success() {
        return Err(format!("cargo {} failed: {}", arguments[0], String::from_utf8_lossy(&built.stderr)));
    }
    let messages = String::from_utf8_lossy(&built.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let named = messages.filter_map(|message| {
        let (name, file) = (message["target"]["name"].as_str()?, message["executable"].as_str()?);
        Some((name.to_owned(), PathBuf::from(file)))
    });
    Ok(named.collect())
}
