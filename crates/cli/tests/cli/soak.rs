//! `warpool soak`: a few programs of each campaign, its output, and the detection of a defect.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{assert_usage_error, objects, run, text};

fn rows(arguments: &str, status: i32) -> Vec<Value> {
    objects(&arguments.split_whitespace().collect::<Vec<_>>(), status)
}

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).filter(|&key| key != "schema_version").collect()
}

const COUNTS: [&str; 11] = [
    "programs",
    "operations",
    "allocations",
    "faults",
    "panics",
    "out_of_memory",
    "captures",
    "captures_failed",
    "replays",
    "recordings",
    "recordings_replayed",
];

/// Ctrl-C loses nothing of a long run.
#[test]
#[cfg(unix)]
fn interrupted_run_shows_its_totals() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_warpool"))
        .args(["soak", "--minutes", "60", "--campaign", "placement"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    let mut stdout = BufReader::new(child.stdout.take().expect("it is piped"));
    let mut shown = String::new();
    // The first line is written once Ctrl-C is awaited.
    stdout.read_line(&mut shown).unwrap();
    assert!(shown.starts_with("seed 0, campaigns placement"), "{shown}");
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(killed.expect("every Unix has it").success());
    stdout.read_to_string(&mut shown).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{shown}");
    assert!(shown.ends_with("0 violations; ended by Ctrl-C\n"), "{shown}");
}

#[test]
fn programs_of_every_campaign_find_nothing() {
    let rows = rows("soak --programs 4 --seed 3 --json", 0);
    let (summary, campaigns) = rows.split_last().unwrap();
    let named: Vec<&str> = campaigns.iter().map(|row| row["campaign"].as_str().unwrap()).collect();
    let of_memory = ["device", "placement", "pages", "elastic", "registered", "share", "captures", "replays"];
    assert_eq!(
        named,
        [&of_memory[..], &["streams", "typed", "sleep", "host", "threads", "lifetime", "recordings"]].concat()
    );
    for row in campaigns {
        assert_eq!(keys(row)[..5], ["kind", "campaign", "seed", "deterministic", "seconds"]);
        assert_eq!(keys(row)[5..], COUNTS);
        assert_eq!((&row["programs"], &row["seed"]), (&4.into(), &3.into()), "{row}");
        assert_eq!(row["deterministic"], row["campaign"] != "threads");
    }
    assert_eq!(keys(summary)[..2], ["kind", "seed"]);
    assert_eq!(keys(summary)[2..13], COUNTS);
    let memory = ["bytes_resident_start", "bytes_resident_warm", "bytes_resident_peak", "bytes_resident_end"];
    assert_eq!(keys(summary)[13..17], memory);
    assert_eq!(keys(summary)[17..], ["seconds", "violations", "interrupted"]);
    assert_eq!(summary["violations"], 0);
    for key in COUNTS {
        assert!(summary[key].as_u64() > Some(0), "no {key}: {summary}");
        let sum: u64 = campaigns.iter().map(|row| row[key].as_u64().unwrap()).sum();
        assert_eq!(summary[key], sum, "{key}");
    }
}

#[test]
fn programs_without_threads_do_the_same_in_every_run() {
    let counts = |arguments: &str| {
        let rows = rows(arguments, 0);
        COUNTS.map(|key| rows[0][key].as_u64())
    };
    for campaign in ["device", "placement", "pages", "share", "captures", "replays", "sleep", "host", "recordings"] {
        let arguments = format!("soak --programs 3 --seed 11 --campaign {campaign} --json");
        assert_eq!(counts(&arguments), counts(&arguments), "{campaign}");
    }
}

/// The allocators under test return some memory twice.
#[test]
fn defect_is_found_and_its_program_can_be_run_again() {
    let found = rows("soak --broken --programs 50 --seed 5 --campaign device --json", 1);
    let [campaign, violation, summary] = &found[..] else { panic!("{found:?}") };
    assert_eq!((&campaign["kind"], &summary["kind"]), (&"campaign".into(), &"summary".into()));
    assert_eq!((&summary["violations"], &summary["seed"]), (&1.into(), &5.into()));
    let expected = ["kind", "campaign", "seed", "program", "message", "reproduced", "steps", "command"];
    assert_eq!(keys(violation), expected);
    assert_eq!((&violation["kind"], &violation["reproduced"]), (&"violation".into(), &true.into()), "{violation}");
    assert!(violation["message"].as_str().unwrap().contains("overlaps"), "{violation}");
    let command = violation["command"].as_str().unwrap();
    assert!(command.starts_with("warpool soak --seed 5 --campaign device --program "), "{command}");
    let again = rows(&format!("{} --json", command.trim_start_matches("warpool ")), 1);
    assert_eq!(again[1]["message"], violation["message"]);
    let steps = |row: &Value| row["steps"].as_array().unwrap().clone();
    assert!(steps(&again[1]).ends_with(&steps(violation)), "all its steps, of which these were the last");
}

#[test]
fn text_names_the_seed_and_the_command() {
    let output = run("soak --broken --programs 50 --seed 5 --campaign device");
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{stdout}");
    assert!(stdout.contains("VIOLATION in program ") && stdout.ends_with("1 violations\n"), "{stdout}");
    assert!(stdout.contains("\n  warpool soak --seed 5 --campaign device --program "), "{stdout}");
    assert_eq!(text(&output.stderr), "");
    let clean = run("soak --programs 1 --campaign threads");
    assert!(text(&clean.stdout).contains("interleave differently in every run"), "{}", text(&clean.stdout));
}

#[test]
fn wrong_usage_is_an_error() {
    assert_usage_error(&["soak", "--campaign", "disk"], &["no campaign 'disk'", "device", "recordings"]);
    assert_usage_error(&["soak", "--program", "3"], &["--program needs one --campaign"]);
    assert_usage_error(&["soak", "--minutes", "0"], &["--minutes"]);
    assert_usage_error(&["soak", "--minutes", "1", "--programs", "2"], &["--programs"]);
    let help = run("soak --help");
    for part in ["--minutes", "--campaign", "threads", "Examples:", "Exit status"] {
        assert!(text(&help.stdout).contains(part), "no '{part}'");
    }
    assert!(!text(&help.stdout).contains("--broken"));
}
