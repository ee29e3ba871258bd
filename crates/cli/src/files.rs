//! Names of input files: `-` for the standard input or a list on it, folders, patterns, and short names that
//! distinguish files.

use std::io::BufRead as _;
use std::path::{Path, PathBuf};

use warpool_trace::ranks::{natural_order, short_names as short_paths};
use warpool_trace::{ReadError, ReadOptions, Recording, read, read_file};

use crate::output::{CommandError, Result, printable};

/// The endings of recordings in a folder, before that of a compression. Not `.pt`, although torch.save may have written
/// a recording: in most folders these are models.
const ENDINGS: [&str; 9] = [".pickle", ".pkl", ".csv", ".zip", ".tar", ".tgz", ".txz", ".tbz2", ".tzst"];

/// The endings of compressed files.
const COMPRESSIONS: [&str; 4] = [".xz", ".gz", ".zst", ".bz2"];

/// The name of a recording without its endings; `None` if it has none of a recording.
fn stem(name: &str) -> Option<&str> {
    let plain = COMPRESSIONS.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(name);
    ENDINGS.iter().find_map(|ending| plain.strip_suffix(ending))
}

/// The name for a file made from a recording: its own name without endings.
pub fn name_without_endings(file: &Path) -> String {
    let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let saved = || [".pt", ".pth"].iter().find_map(|ending| name.strip_suffix(ending));
    let stem = stem(&name).or_else(saved).unwrap_or(&name);
    if stem.is_empty() || stem == "-" { "recording".to_owned() } else { stem.to_owned() }
}

/// Whether a file name stands for the standard input.
pub fn is_stdin(file: &Path) -> bool {
    file.as_os_str() == "-"
}

/// Reads a recording: a file, or with `-` the standard input.
pub fn read_recording(file: &Path, options: &ReadOptions<'_>) -> std::result::Result<Recording, ReadError> {
    if is_stdin(file) { read(std::io::stdin().lock(), options) } else { read_file(file, options) }
}

/// The recordings: every folder's and every pattern's in its place, in natural order; `-` is a recording, or a list of
/// files, one in a line.
pub fn expand(files: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut listed = Vec::new();
    for file in files {
        match is_stdin(file) && stdin_is_list() {
            true => listed.extend(stdin_lines()?),
            false => listed.push(file.clone()),
        }
    }
    expand_with(&listed, &|name| stem(name).is_some(), "recordings", ".pickle or .pkl")
}

/// Parts of summaries, likewise.
pub fn expand_parts(parts: &[PathBuf]) -> Result<Vec<PathBuf>> {
    expand_with(parts, &|name| name.ends_with(".json"), "parts", ".json")
}

fn expand_with(files: &[PathBuf], is_wanted: &dyn Fn(&str) -> bool, what: &str, endings: &str) -> Result<Vec<PathBuf>> {
    let mut expanded = Vec::new();
    for file in files {
        if is_stdin(file) || file.is_file() {
            expanded.push(file.clone());
            continue;
        }
        if !file.is_dir() {
            expanded.extend(of_pattern(file)?);
            continue;
        }
        let error = |error: std::io::Error| CommandError::Usage(format!("{}: {error}", file.display()));
        let entries = std::fs::read_dir(file).map_err(error)?;
        let entries = entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>();
        let is_wanted = |path: &PathBuf| {
            let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
            path.is_file() && !name.starts_with('.') && is_wanted(&name)
        };
        let found: Vec<PathBuf> = entries.map_err(error)?.into_iter().filter(is_wanted).collect();
        if found.is_empty() {
            let message = format!("{}: no {what} in this folder (files that end in {endings})", file.display());
            return Err(CommandError::Usage(printable(&message)));
        }
        expanded.extend(in_natural_order(found));
    }
    Ok(expanded)
}

fn in_natural_order(mut files: Vec<PathBuf>) -> Vec<PathBuf> {
    files.sort_by(|a, b| natural_order(&a.to_string_lossy(), &b.to_string_lossy()));
    files
}

/// The files of a pattern that no shell has expanded. A name that is no pattern, and of no file, stays: the error that
/// it cannot be opened comes later, beside the answers about the others.
fn of_pattern(pattern: &Path) -> Result<Vec<PathBuf>> {
    let text = pattern.to_string_lossy();
    if !text.contains(['*', '?', '[']) {
        return Ok(vec![pattern.to_owned()]);
    }
    let wrong = |error: String| CommandError::Usage(printable(&format!("{text}: {error}")));
    let found = glob::glob(&text).map_err(|error| wrong(error.to_string()))?;
    let found = found.collect::<std::result::Result<Vec<PathBuf>, _>>().map_err(|error| wrong(error.to_string()))?;
    let files: Vec<PathBuf> = found.into_iter().filter(|path| path.is_file()).collect();
    if files.is_empty() {
        return Err(wrong("no file has such a name".to_owned()));
    }
    Ok(in_natural_order(files))
}

/// Whether the standard input is a list: its first line names a file or a folder. No recording begins like that. What
/// is looked at stays in the buffer.
fn stdin_is_list() -> bool {
    let mut stdin = std::io::stdin().lock();
    let Ok(start) = stdin.fill_buf() else { return false };
    let line = start.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return false };
    let line = line.trim_end_matches('\r');
    // A path with a zero in it is an error of the system, not a panic.
    !line.is_empty() && Path::new(line).exists()
}

fn stdin_lines() -> Result<Vec<PathBuf>> {
    let lines = std::io::stdin().lock().lines();
    let lines = lines.collect::<std::io::Result<Vec<String>>>();
    let lines = lines.map_err(|error| CommandError::Usage(format!("the list on the standard input: {error}")))?;
    Ok(lines.into_iter().filter(|line| !line.is_empty()).map(PathBuf::from).collect())
}

/// The shortest names that distinguish the files: the file's own, with as much of its path as needed.
pub fn short_names(files: &[PathBuf]) -> Vec<String> {
    let paths: Vec<String> = files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
    let name = |(file, name): (&PathBuf, String)| {
        if is_stdin(file) { "(stdin)".to_owned() } else { printable(&name) }
    };
    files.iter().zip(short_paths(&paths)).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_are_known_by_their_endings() {
        for (name, expected) in [
            ("a.pickle", Some("a")),
            ("a.b.pkl.bz2", Some("a.b")),
            ("log.csv.zst", Some("log")),
            ("ranks.tar", Some("ranks")),
            ("ranks.tar.xz", Some("ranks")),
            ("ranks.tgz", Some("ranks")),
            ("saved.zip", Some("saved")),
            ("model.pt", None),
            ("notes.txt.gz", None),
            ("pickle", None),
        ] {
            assert_eq!(stem(name), expected, "{name}");
        }
    }

    fn check(files: &[&str], names: &[&str]) {
        let files: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
        assert_eq!(short_names(&files), names);
    }

    #[test]
    fn names_have_as_much_of_the_path_as_tells_them_apart() {
        check(&["a/b/one.pickle", "a/b/two.pickle"], &["one.pickle", "two.pickle"]);
        check(
            &["run1/rank0/s.pickle", "run2/rank0/s.pickle", "t"],
            &["run1/rank0/s.pickle", "run2/rank0/s.pickle", "t"],
        );
        check(&["s.pickle", "a/s.pickle"], &["s.pickle", "a/s.pickle"]);
        check(&["/s.pickle", "/a/s.pickle", "-"], &["/s.pickle", "a/s.pickle", "(stdin)"]);
        check(&["same", "same"], &["same", "same"]);
    }
}
