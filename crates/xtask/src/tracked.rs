//! The files that git tracks.

use std::path::Path;
use std::process::Command;

/// The names and texts of tracked files that match one of the patterns, relative to `root`. A file that was deleted and
/// is not yet committed is left out.
pub fn texts(root: &Path, patterns: &[&str]) -> Result<Vec<(String, String)>, String> {
    let listed = Command::new("git").args(["ls-files", "-z"]).args(patterns).current_dir(root).output();
    let listed = listed.map_err(|error| format!("git ls-files: {error}"))?;
    if !listed.status.success() {
        return Err(format!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr)));
    }
    let names = String::from_utf8_lossy(&listed.stdout);
    let names = names.split('\0').filter(|name| !name.is_empty());
    Ok(names.filter_map(|name| Some((name.to_owned(), std::fs::read_to_string(root.join(name)).ok()?))).collect())
}
