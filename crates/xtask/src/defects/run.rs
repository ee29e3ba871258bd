//! Runs of tests, `soak` and `selftest` with one planted defect, and what they found.

use std::fmt;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::build::Built;

/// A test, a single program of `soak` or a selftest that takes longer is considered hung.
const HANGS: Duration = Duration::from_secs(200);

/// What a run found.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    Nothing,
    /// What failed.
    This(String),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::This(what) => f.write_str(what),
        }
    }
}

pub struct Runner<'a> {
    pub built: &'a Built,
    /// Where programs run.
    pub folder: &'a Path,
}

/// How a process ended.
struct Ended {
    success: bool,
    /// It took too long, and was ended here.
    is_killed: bool,
    text: String,
}

impl Runner<'_> {
    /// The tests of one binary whose names contain the filter: `binary filter`.
    pub fn test(&self, defect: u64, test: &str) -> Result<Found, String> {
        let (binary, filter) = test.split_once(' ').unwrap_or((test, ""));
        let executable = self.built.tests.get(binary).ok_or_else(|| format!("no test binary {binary:?}"))?;
        let ended = self.run(executable, defect, &[filter], HANGS)?;
        if ended.text.contains("running 0 tests") {
            return Err(format!("no test of {binary} has {filter:?} in its name"));
        }
        let failed = |line: &str| line.strip_prefix("test ")?.strip_suffix(" ... FAILED").map(str::to_owned);
        Ok(Found::of(&ended, ended.text.lines().find_map(failed)))
    }

    /// Random programs, until one finds something: of the campaign that `soak` names first, then of all.
    pub fn soak(&self, defect: u64, soak: &str, time: Duration) -> Result<Found, String> {
        let seconds = time.as_secs().to_string();
        let campaign = soak.split(':').next().unwrap_or_default();
        if !campaign.is_empty() {
            let found = self.soak_with(defect, &["--campaign", campaign, "--seconds", &seconds], time + HANGS)?;
            if found != Found::Nothing {
                return Ok(found);
            }
        }
        self.soak_with(defect, &["--seconds", &seconds], time + HANGS)
    }

    /// The first programs of a campaign, until one finds something.
    pub fn programs(&self, defect: u64, (campaign, count): (&str, u64)) -> Result<Found, String> {
        let time = HANGS + Duration::from_secs(count);
        self.soak_with(defect, &["--campaign", campaign, "--programs", &count.to_string()], time)
    }

    fn soak_with(&self, defect: u64, arguments: &[&str], time: Duration) -> Result<Found, String> {
        let arguments: Vec<&str> = ["soak", "--json"].iter().chain(arguments).copied().collect();
        let ended = self.run(&self.built.command, defect, &arguments, time)?;
        let objects: Vec<Value> = ended.text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let of_kind = |kind: &str| objects.iter().find(|object| object["kind"] == kind);
        let found = of_kind("violation").map(|violation| {
            let text = |key: &str| violation[key].as_str().unwrap_or_default();
            let programs = of_kind("summary").map_or(0, |summary| summary["programs"].as_u64().unwrap_or_default());
            let message = text("message").lines().last().unwrap_or_default();
            format!("{}:{} after {programs} programs: {message}", text("campaign"), violation["program"])
        });
        // A program that hangs is a violation, which `soak` reports itself.
        if ended.is_killed && found.is_none() {
            return Err(format!("warpool {} did not end within {time:?}", arguments.join(" ")));
        }
        Ok(Found::of(&ended, found))
    }

    /// The conformance checks on the simulated GPU.
    pub fn selftest(&self, defect: u64) -> Result<Found, String> {
        let ended = self.run(&self.built.command, defect, &["selftest", "--driver", "sim", "--json"], HANGS)?;
        let objects = ended.text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut failed = objects.filter(|object| object["outcome"] == "failed");
        let name = |check: Value| {
            format!("{}.{}", check["suite"].as_str().unwrap_or("?"), check["check"].as_str().unwrap_or("?"))
        };
        let failed = failed.next().map(name);
        Ok(Found::of(&ended, failed))
    }

    fn run(&self, program: &Path, defect: u64, arguments: &[&str], time: Duration) -> Result<Ended, String> {
        let begin = Instant::now();
        let mut child = Command::new(program)
            .args(arguments)
            .env("WARPOOL_DEFECT", defect.to_string())
            .current_dir(self.folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let mut stdout = child.stdout.take().expect("it is piped");
        let reader = std::thread::spawn(move || {
            let mut text = Vec::new();
            // What was written before it was killed is enough.
            let _ = stdout.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        let mut success = None;
        while success.is_none() && begin.elapsed() < time {
            success = child.try_wait().map_err(|error| error.to_string())?.map(|status| status.success());
            std::thread::sleep(Duration::from_millis(10));
        }
        if success.is_none() {
            child.kill().map_err(|error| error.to_string())?;
            child.wait().map_err(|error| error.to_string())?;
        }
        let text = reader.join().map_err(|_| "a reader panicked")?;
        Ok(Ended { success: success == Some(true), is_killed: success.is_none(), text })
    }
}

impl Found {
    /// A process that fails without naming a failure was ended by a signal, or hung.
    fn of(ended: &Ended, what: Option<String>) -> Self {
        match (ended.success, what) {
            (true, _) => Self::Nothing,
            (false, Some(what)) => Self::This(what),
            (false, None) => Self::This("it crashed or hung".to_owned()),
        }
    }
}
