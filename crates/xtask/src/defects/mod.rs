//! Whether tests, `soak` and `selftest` catch the planted defects of `crates/warpool/src/defect.rs`. A defect that
//! tests or `soak` miss is a problem, and so is one that is found where none is planted (number 0).
//!
//! `--prepare FOLDER` copies all that a run needs, and `FOLDER/xtask defects --from FOLDER --jobs N` runs it on another
//! machine, which needs neither cargo nor the sources.
//!
//! The short form runs for each defect the first programs of `soak` that `list.rs` names.

mod build;
mod list;
mod run;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use self::build::{Built, Planted, planted};
use self::run::{Found, Runner};

/// The options of a run.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    short: bool,
    soak: Duration,
    /// The numbers of the defects.
    only: RangeInclusive<u64>,
    /// Only builds, and copies what a run needs to this folder.
    prepare: Option<PathBuf>,
    /// Runs what was copied there, without cargo.
    from: Option<PathBuf>,
    /// How many defects at a time.
    jobs: usize,
}

impl Options {
    /// From the arguments of the command.
    pub fn parse(arguments: &[&str]) -> Option<Self> {
        let soak = Duration::from_secs(120);
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let mut options = Self { short: false, soak, only: 0..=u64::MAX, prepare: None, from: None, jobs };
        let mut arguments = arguments.iter();
        while let Some(&argument) = arguments.next() {
            match argument {
                "--short" => options.short = true,
                "--soak-seconds" => options.soak = Duration::from_secs(arguments.next()?.parse().ok()?),
                "--only" => {
                    let only = arguments.next()?;
                    let (first, last) = only.split_once('-').unwrap_or((only, only));
                    options.only = first.parse().ok()?..=last.parse().ok()?;
                }
                "--prepare" => options.prepare = Some(arguments.next()?.into()),
                "--from" => options.from = Some(arguments.next()?.into()),
                "--jobs" => options.jobs = arguments.next()?.parse().ok().filter(|&jobs| jobs > 0)?,
                _ => return None,
            }
        }
        Some(options)
    }
}

/// What is missed, one line each.
pub fn check(root: &Path, options: &Options) -> Result<Vec<String>, String> {
    let (built, folder) = match &options.from {
        Some(folder) => (Built::prepared(folder)?, folder.clone()),
        None => (Built::new(root)?, root.join("crates/warpool")),
    };
    if let Some(folder) = &options.prepare {
        return built.prepare(folder).map(|()| Vec::new());
    }
    let all = planted()?;
    let runner = Runner { built: &built, folder: &folder };
    let numbers = std::iter::once(0).chain(all.iter().map(|planted| planted.number));
    let numbers: Vec<u64> = numbers.filter(|number| options.only.contains(number)).collect();
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Ok(Vec::new())));
    std::thread::scope(|threads| {
        for _ in 0..options.jobs.min(numbers.len()) {
            threads.spawn(|| {
                while let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let planted = all.iter().find(|planted| planted.number == number);
                    let outcome = match planted {
                        Some(planted) => check_one(&runner, planted, options),
                        None => check_none(&runner, &all, options),
                    };
                    let mut missed = missed.lock().expect("no thread panics with it");
                    match (&mut *missed, outcome) {
                        (Ok(missed), Ok(more)) => missed.extend(more),
                        (missed @ Ok(_), Err(error)) => *missed = Err(error),
                        (Err(_), _) => {}
                    }
                }
            });
        }
    });
    missed.into_inner().expect("no thread panicked")
}

/// What misses one defect.
fn check_one(runner: &Runner<'_>, planted: &Planted, options: &Options) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    let mut text = format!("{} {}: {}\n", planted.number, planted.name, planted.rule);
    if options.short {
        if let Some(programs) = planted.programs() {
            found.push(("soak", runner.programs(planted.number, programs)?));
        }
    } else {
        found.push(("tests", runner.test(planted.number, &planted.test)?));
        found.push(("soak", runner.soak(planted.number, &planted.soak, options.soak)?));
        // Not every rule can be checked on a device, so what it misses is no problem.
        let _ = writeln!(text, "    selftest: {}", runner.selftest(planted.number)?);
    }
    let mut problems = Vec::new();
    for (by, found) in found {
        let _ = writeln!(text, "    {by}: {found}");
        if found == Found::Nothing {
            problems.push(format!("defect {} ({}) is missed by {by}", planted.number, planted.name));
        }
    }
    print!("{text}");
    Ok(problems)
}

/// Without a defect nothing is found.
fn check_none(runner: &Runner<'_>, all: &[Planted], options: &Options) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    // In the short form, the tests of `warpool-soak` are this.
    if !options.short {
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
        let parsed = Options {
            short: true,
            soak: Duration::from_secs(5),
            only: 7..=7,
            prepare: None,
            from: Some("/tmp/built".into()),
            jobs: 16,
        };
        let arguments = ["--only", "7", "--short", "--soak-seconds", "5", "--from", "/tmp/built", "--jobs", "16"];
        assert_eq!(Options::parse(&arguments), Some(parsed));
        assert_eq!(Options::parse(&["--only", "3-5"]).map(|options| options.only), Some(3..=5));
        assert_eq!(Options::parse(&["--jobs", "0"]), None);
        assert_eq!(Options::parse(&["--only"]), None);
        assert_eq!(Options::parse(&["--all"]), None);
    }
}
