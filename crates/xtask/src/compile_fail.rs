//! Examples in the documentation that must not compile fail for the reason that they name. Stable rustdoc only checks
//! that they fail: a missing import is enough for that. Here the first error must be the one of the example.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::tracked;

/// An example, as a program.
#[derive(Debug, PartialEq, Eq)]
struct Example {
    line: usize,
    code: String,
    program: String,
}

/// Checks the examples of the crate `warpool`.
pub fn check(root: &Path) -> Result<Vec<String>, String> {
    let library = library(root)?;
    let folder = std::env::temp_dir().join(format!("warpool-compile-fail-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let (mut problems, mut count) = (Vec::new(), 0);
    for (name, text) in tracked::texts(root, &["crates/warpool/src/*.rs"])? {
        for example in examples(&text) {
            count += 1;
            let found = first_error(&example.program, &folder, &library)?;
            if found != example.code {
                problems.push(format!("{name}:{}: expected {}, got {found}", example.line, example.code));
            }
        }
    }
    println!("{count} examples that must not compile");
    // Only programs are in it.
    let _ = std::fs::remove_dir_all(&folder);
    Ok(problems)
}

/// The examples of a file that must not compile.
fn examples(text: &str) -> Vec<Example> {
    let mut found = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let Some(code) = prose(line).and_then(|line| line.strip_prefix("```compile_fail")) else { continue };
        let body = lines.by_ref().map_while(|(_, line)| prose(line).filter(|line| !line.starts_with("```")));
        let body: Vec<&str> = body.map(|line| line.strip_prefix('#').unwrap_or(line)).collect();
        let body = body.join("\n");
        let program = if body.contains("fn main()") { body } else { format!("fn main() {{\n{body}\n}}\n") };
        found.push(Example { line: at + 1, code: code.trim_start_matches(',').to_owned(), program });
    }
    found
}

/// The text of a line of documentation.
fn prose(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
    Some(text.strip_prefix(' ').unwrap_or(text))
}

/// The code of the first error that the compiler finds in a program.
fn first_error(program: &str, folder: &Path, library: &Path) -> Result<String, String> {
    let (source, output) = (folder.join("example.rs"), folder.join("example.rmeta"));
    std::fs::write(&source, program).map_err(|error| format!("{}: {error}", source.display()))?;
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let ran = Command::new(rustc)
        .args(["--edition", "2024", "--crate-type", "bin", "--emit", "metadata", "--cap-lints", "allow", "-o"])
        .arg(&output)
        .arg("--extern")
        .arg(format!("warpool={}", library.display()))
        .arg("-L")
        .arg(format!("dependency={}", library.with_file_name("deps").display()))
        .arg(&source)
        .output()
        .map_err(|error| format!("rustc: {error}"))?;
    let errors = String::from_utf8_lossy(&ran.stderr);
    let first = errors.lines().find_map(|line| line.strip_prefix("error"));
    Ok(match first {
        Some(first) => first.trim_start_matches('[').split([']', ':']).next().unwrap_or_default().to_owned(),
        None => "no error".to_owned(),
    })
}

/// Builds the crate `warpool`, with the features that it has in `cargo test --workspace`, so that nothing is compiled
/// twice, and returns the path of its library.
fn library(root: &Path) -> Result<PathBuf, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["build", "--quiet", "--workspace", "--all-targets", "--message-format", "json"];
    let built = Command::new(cargo).args(arguments).current_dir(root).output();
    let built = built.map_err(|error| format!("cargo: {error}"))?;
    if !built.status.success() {
        return Err(format!("cargo build failed: {}", String::from_utf8_lossy(&built.stderr)));
    }
    let messages = String::from_utf8_lossy(&built.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let artifacts = messages.filter(|message| message["target"]["name"] == "warpool");
    let library = artifacts.into_iter().find_map(|artifact| {
        let files = artifact["filenames"].as_array()?;
        files.iter().filter_map(Value::as_str).find(|file| file.ends_with(".rlib")).map(PathBuf::from)
    });
    library.ok_or_else(|| "cargo names no library".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_programs() {
        let text = "\
//! ```
//! compiles();
//! ```
/// ```compile_fail,E0382
/// # use warpool::Graph;
/// #
/// lost(1);
/// ```
struct One;
    /// ```compile_fail
    /// fn main() { two() }
    /// ```";
        let example = |line, code: &str, program: &str| Example { line, code: code.into(), program: program.into() };
        assert_eq!(
            examples(text),
            [
                example(4, "E0382", "fn main() {\n use warpool::Graph;\n\nlost(1);\n}\n"),
                example(10, "", "fn main() { two() }"),
            ]
        );
    }
}
