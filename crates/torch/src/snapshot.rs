//! Writes a snapshot to a file atomically: to a temporary file in the same folder, then by rename. On error nothing is
//! left. Only a target that is not a regular file, such as a pipe, is written to directly.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use warpool::memory::report::Snapshot;
use warpool_trace::write_snapshot;

use crate::error::{Error, Result};

/// Writes `snapshot` to `path`.
pub(crate) fn write(snapshot: &Snapshot, path: &Path) -> Result<()> {
    let error = |source| Error::Snapshot { path: path.to_owned(), source };
    let target = match fs::canonicalize(path) {
        Ok(existing) if !existing.is_file() => return write_to(snapshot, &existing).map_err(error),
        // The target of a symbolic link is replaced, not the link.
        Ok(existing) => existing,
        Err(_) => path.to_owned(),
    };
    let temporary = temporary_beside(&target).ok_or_else(|| error(io::Error::other("not a file name")))?;
    let written = write_new(snapshot, &temporary).and_then(|()| fs::rename(&temporary, &target));
    written.map_err(|source| {
        // Fails if the file could not be created; the first error is the one to report.
        let _ = fs::remove_file(&temporary);
        error(source)
    })
}

fn write_to(snapshot: &Snapshot, path: &Path) -> io::Result<()> {
    write_snapshot(snapshot, File::options().write(true).open(path)?)
}

fn write_new(snapshot: &Snapshot, path: &Path) -> io::Result<()> {
    let file = File::create_new(path)?;
    write_snapshot(snapshot, &file)?;
    // A full disk may be reported only here.
    file.sync_all()
}

/// An unused file name in the same folder.
fn temporary_beside(path: &Path) -> Option<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = OsString::from(".");
    name.push(path.file_name()?);
    name.push(format!(".{}-{}.part", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    Some(path.with_file_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("warpool-torch-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        folder
    }

    fn names(folder: &Path) -> Vec<OsString> {
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn file_is_replaced_and_symbolic_link_is_kept() {
        let folder = folder("replaced");
        let (file, link) = (folder.join("file"), folder.join("link"));
        fs::write(&file, "before").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&Snapshot::default(), &link).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap()[..2], [0x80, 2], "a pickle");
        assert_eq!(names(&folder), ["file", "link"]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn failed_write_leaves_no_file() {
        let folder = folder("refused");
        for path in [folder.join("no/file"), folder.clone(), folder.join(".."), PathBuf::new()] {
            let text = write(&Snapshot::default(), &path).unwrap_err().to_string();
            assert!(text.starts_with(&format!("the snapshot cannot be written to {}: ", path.display())), "{text}");
        }
        assert!(names(&folder).is_empty());
        fs::remove_dir(&folder).unwrap();
    }
}
