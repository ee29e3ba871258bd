//! Whether tests, `soak` and `selftest` catch the planted defects of `crates/warpool/src/defect.rs`. A defect that
//! tests or `soak` miss is a problem, and so is one that is found where none is planted (number 0).
//!
//! The short form builds the command only, and runs for each defect the first programs of `soak` that `list.rs` names.

mod build;
mod list;
mod run;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use self::build::{Built, Planted};
use self::run::{Found, Runner};

/// The options of a run.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    short: bool,
    soak: Duration,
    only: Option<u64>,
}

impl Options {
    /// From the arguments of the command.
    pub fn parse(arguments: &[&str]) -> Option<Self> {
        let mut options = Self { short: false, soak: Duration::from_secs(120), only: None };
        let mut arguments = arguments.iter();
        while let Some(&argument) = arguments.next() {
            match argument {
                "--short" => options.short = true,
                "--soak-seconds" => options.soak = Duration::from_secs(arguments.next()?.parse().ok()?),
                "--only" => options.only = Some(arguments.next()?.parse().ok()?),
                _ => return None,
            }
        }
        Some(options)
    }
}

/// What is missed, one line each.
pub fn check(root: &Path, options: &Options) -> Result<Vec<String>, String> {
    let built = Built::new(root, !options.short)?;
    let all = built.planted()?;
    let runner = Runner { built: &built, root };
    let mut problems = Vec::new();
    if options.only.is_none_or(|only| only == 0) {
        problems.extend(check_none(&runner, &all, options)?);
    }
    for planted in all.iter().filter(|planted| options.only.is_none_or(|only| only == planted.number)) {
        println!("{} {}: {}", planted.number, planted.name, planted.rule);
        let mut found = Vec::new();
        if options.short {
            if let Some(programs) = planted.programs() {
                found.push(("soak", runner.programs(planted.number, programs)?));
            }
        } else {
            found.push(("tests", runner.test(planted.number, &planted.test)?));
            found.push(("soak", runner.soak(planted.number, &planted.soak, options.soak)?));
            // Not every rule can be checked on a device, so what it misses is no problem.
            println!("    selftest: {}", runner.selftest(planted.number)?);
        }
        for (by, found) in found {
            println!("    {by}: {found}");
            if found == Found::Nothing {
                problems.push(format!("defect {} ({}) is missed by {by}", planted.number, planted.name));
            }
        }
    }
    Ok(problems)
}

/// Without a defect nothing is found.
fn check_none(runner: &Runner<'_>, all: &[Planted], options: &Options) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    if options.short {
        let mut most = BTreeMap::<&str, u64>::new();
        for (campaign, count) in all.iter().filter_map(Planted::programs) {
            let most = most.entry(campaign).or_default();
            *most = count.max(*most);
        }
        for (campaign, count) in most {
            found.push((format!("{count} programs of {campaign}"), runner.programs(0, (campaign, count))?));
        }
    } else {
        for test in all.iter().map(|planted| planted.test.as_str()).collect::<BTreeSet<&str>>() {
            found.push((test.to_owned(), runner.test(0, test)?));
        }
        found.push(("soak".to_owned(), runner.soak(0, "", options.soak)?));
        found.push(("selftest".to_owned(), runner.selftest(0)?));
    }
    let is_problem = |(_, found): &(String, Found)| *found != Found::Nothing;
    Ok(found.into_iter().filter(is_problem).map(|(of, found)| format!("without a defect, {of}: {found}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed() {
        let parsed = Options { short: true, soak: Duration::from_secs(5), only: Some(7) };
        assert_eq!(Options::parse(&["--only", "7", "--short", "--soak-seconds", "5"]), Some(parsed));
        assert_eq!(Options::parse(&["--only"]), None);
        assert_eq!(Options::parse(&["--all"]), None);
    }
}
