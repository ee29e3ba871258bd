//! Names of input files: `-` for the standard input, folders, and short names that distinguish files.

use std::path::{Path, PathBuf};

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
fn is_stdin(file: &Path) -> bool {
    file.as_os_str() == "-"
}

/// Reads a recording: a file, or with `-` the standard input.
pub fn read_recording(file: &Path, options: &ReadOptions<'_>) -> std::result::Result<Recording, ReadError> {
    if is_stdin(file) { read(std::io::stdin().lock(), options) } else { read_file(file, options) }
}

/// The files with the recordings of every folder in its place, by name.
pub fn expand_folders(files: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut expanded = Vec::new();
    for file in files {
        if is_stdin(file) || !file.is_dir() {
            expanded.push(file.clone());
            continue;
        }
        let error = |error: std::io::Error| CommandError::Usage(format!("{}: {error}", file.display()));
        let entries = std::fs::read_dir(file).map_err(error)?;
        let entries = entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>();
        let is_recording = |path: &PathBuf| {
            let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
            path.is_file() && !name.starts_with('.') && stem(&name).is_some()
        };
        let mut found: Vec<PathBuf> = entries.map_err(error)?.into_iter().filter(is_recording).collect();
        if found.is_empty() {
            let message =
                format!("{}: no recordings in this folder (files that end in .pickle or .pkl)", file.display());
            return Err(CommandError::Usage(printable(&message)));
        }
        found.sort();
        expanded.extend(found);
    }
    Ok(expanded)
}

/// The shortest names that distinguish the files: the file's own, with as much of its path as needed.
pub fn short_names(files: &[PathBuf]) -> Vec<String> {
    let parts: Vec<Vec<String>> = files
        .iter()
        .map(|file| file.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect())
        .collect();
    let name = |index: usize, count: usize| {
        let parts = &parts[index];
        parts[parts.len().saturating_sub(count)..].join("/").replace("//", "/")
    };
    let same_path = |a: usize, b: usize| files[a] == files[b];
    (0..files.len())
        .map(|index| {
            let is_unique = |count: usize| {
                let own = name(index, count);
                (0..files.len()).all(|other| same_path(index, other) || name(other, count) != own)
            };
            let length = parts[index].len().max(1);
            let count = (1..length).find(|&count| is_unique(count)).unwrap_or(length);
            let name = if is_stdin(&files[index]) { "(stdin)".to_owned() } else { name(index, count) };
            printable(&name)
        })
        .collect()
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
