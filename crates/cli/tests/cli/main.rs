//! The built binary: exit status, stdout and stderr, and the keys of the JSON objects.

mod command;
mod explain;
mod ranks;
#[cfg(target_os = "linux")]
mod record;
mod replay;
mod soak;
mod streams;
#[cfg(unix)]
mod top;
mod view;

use std::process::{Command, Output};

use serde_json::Value;

/// Runs the command, without settings from the environment.
fn warpool(arguments: &[&str]) -> Output {
    let command = Command::new(env!("CARGO_BIN_EXE_warpool"))
        .args(arguments)
        .env_remove("WARPOOL_CONF")
        .env_remove("PYTORCH_CUDA_ALLOC_CONF")
        .output();
    command.expect("the binary was built for this test")
}

/// Runs the command with arguments that are separated by spaces.
fn run(arguments: &str) -> Output {
    warpool(&arguments.split_whitespace().collect::<Vec<_>>())
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("output is UTF-8")
}

/// The command must exit with `status` and print one JSON object per line, with a version, and nothing else.
fn objects(arguments: &[&str], status: i32) -> Vec<Value> {
    let output = warpool(arguments);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {}", text(&output.stderr));
    let parse = |line: &str| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    let objects: Vec<Value> = text(&output.stdout).lines().map(parse).collect();
    assert!(objects.iter().all(Value::is_object), "{arguments:?}");
    assert!(objects.iter().all(|object| object["schema_version"].is_u64()), "{arguments:?}");
    objects
}

/// The command must exit with 2, print one line with all of `parts` on stderr, and nothing on stdout.
fn assert_usage_error(arguments: &[&str], parts: &[&str]) {
    let output = warpool(arguments);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
    assert_eq!(text(&output.stdout), "", "{arguments:?}");
    assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{arguments:?}: no '{part}' in: {stderr}");
    }
}
