//! The command and the tests of `warpool` and `warpool-soak`, and the list of defects. A build of the whole workspace
//! has the defects, since the package `warpool-tests` turns the feature `planted-defects` on: after
//! `cargo test --workspace` nothing is compiled here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::list::CAUGHT_BY;

/// Where the defects are declared, a line each: `1 NoEventBetweenHeaps: "what the code does wrong";`.
const DECLARED: &str = include_str!("../../../warpool/src/defect.rs");

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
    pub fn new(root: &Path) -> Result<Self, String> {
        let (mut command, mut tests) = (None, BTreeMap::new());
        for executable in executables(root)? {
            let Executable { folder, name, is_test, path } = executable;
            match (folder.as_str(), is_test) {
                ("crates/cli", false) => command = Some(path),
                ("crates/warpool" | "crates/warpool/tests", true) => drop(tests.insert(name, path)),
                ("crates/soak", true) if name == "campaigns" => drop(tests.insert(name, path)),
                _ => {}
            }
        }
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
}

/// All defects, by number.
pub fn planted() -> Result<Vec<Planted>, String> {
    let declared = |line: &str| {
        let (number, rest) = line.trim().split_once(' ')?;
        let (name, rule) = rest.strip_suffix("\";")?.split_once(": \"")?;
        Some((number.parse().ok()?, name.to_owned(), rule.to_owned()))
    };
    let planted = |(number, name, rule): (u64, String, String)| {
        let known = CAUGHT_BY.iter().find(|(of, _, _)| *of == name);
        let (_, test, soak) = known.ok_or_else(|| format!("list.rs says nothing about defect {number}, {name}"))?;
        Ok(Planted { number, name, rule, test: (*test).to_owned(), soak: (*soak).to_owned() })
    };
    DECLARED.lines().filter_map(declared).map(planted).collect()
}

/// The test binaries that the list names.
fn test_binaries() -> impl Iterator<Item = &'static str> {
    let names: BTreeSet<&str> = CAUGHT_BY.iter().filter_map(|(_, test, _)| test.split(' ').next()).collect();
    names.into_iter()
}

/// What cargo built.
struct Executable {
    /// The folder of its package, from the root.
    folder: String,
    /// Its target.
    name: String,
    is_test: bool,
    path: PathBuf,
}

/// The executables of the workspace, built as `cargo test --workspace` does.
fn executables(root: &Path) -> Result<Vec<Executable>, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["test", "--workspace", "--no-run", "--quiet", "--message-format", "json"];
    let built = Command::new(cargo).args(arguments).current_dir(root).output();
    let built = built.map_err(|error| format!("cargo: {error}"))?;
    if !built.status.success() {
        return Err(format!("cargo {} failed: {}", arguments.join(" "), String::from_utf8_lossy(&built.stderr)));
    }
    let messages = String::from_utf8_lossy(&built.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let named = messages.filter_map(|message| {
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
        Some(Executable {
            folder: folder.strip_prefix(root).unwrap_or(folder).display().to_string(),
            name: message["target"]["name"].as_str()?.to_owned(),
            is_test: message["profile"]["test"].as_bool()?,
            path: message["executable"].as_str()?.into(),
        })
    });
    Ok(named.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_declared_defect_is_listed() {
        let found = planted().expect("each has a test");
        assert!(found.iter().map(|planted| planted.number).eq(1..=found.len() as u64));
        assert_eq!(found.len(), CAUGHT_BY.len());
        assert_eq!(found[0].name, "NoEventBetweenHeaps");
        assert!(found.iter().all(|planted| !planted.rule.is_empty() && planted.test.contains(' ')));
    }
}
