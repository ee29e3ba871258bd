//! The Markdown files of the repository.

use std::path::{Path, PathBuf};
use std::process::Command;

use mdbook_driver::errors::Result;

/// Pages below `source` that are in no chapter. (The summary is none.)
pub fn without_chapter(source: &Path, chapters: &[PathBuf]) -> Result<Vec<String>> {
    let pages = tracked(source, "*.md")?.into_iter().filter(|page| page != Path::new("SUMMARY.md"));
    let lost = pages.filter(|page| !chapters.contains(page));
    Ok(lost.map(|page| format!("{}: in no chapter of docs/SUMMARY.md", source.join(page).display())).collect())
}

/// The files that git tracks, or would if they were added, below a folder and relative to it. One that was deleted and
/// is not yet committed is left out.
pub fn tracked(folder: &Path, pattern: &str) -> Result<Vec<PathBuf>> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard", pattern];
    let listed = Command::new("git").args(arguments).current_dir(folder).output()?;
    if !listed.status.success() {
        return Err(std::io::Error::other(format!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr))).into());
    }
    let names = String::from_utf8(listed.stdout)?;
    let mut files: Vec<PathBuf> = names.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect();
    files.retain(|file| folder.join(file).is_file());
    files.sort();
    files.dedup();
    Ok(files)
}
