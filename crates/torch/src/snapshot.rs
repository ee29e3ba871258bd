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
    replace(path, |file| write_snapshot(snapshot, file))
}

/// Writes a file in place of that at `path`.
fn replace(path: &Path, write: impl Fn(&File) -> io::Result<()>) -> Result<()> {
    let error = |source| Error::Snapshot { path: path.to_owned(), source };
    let target = match fs::canonicalize(path) {
        Ok(existing) if !existing.is_file() => return write_to(&write, &existing).map_err(error),
        // The target of a symbolic link is replaced, not the link.
        Ok(existing) => existing,
        Err(_) => path.to_owned(),
    };
    let temporary = temporary_beside(&target).ok_or_else(|| error(io::Error::other("not a file name")))?;
    let written = write_new(&write, &temporary).and_then(|()| fs::rename(&temporary, &target));
    written.map_err(|source| {
        // Fails if the file could not be created; the first error is the one to report.
        let _ = fs::remove_file(&temporary);
        error(source)
    })
}

/// Writes as much of `snapshot` as fits into `bytes_max`: of a history that is too long, the newest events. The rest of
/// it is removed from `snapshot` too.
pub(crate) fn write_at_most(snapshot: &mut Snapshot, path: &Path, bytes_max: u64) -> Result<()> {
    loop {
        let events: usize = snapshot.traces.iter().map(Vec::len).sum();
        match replace(path, |file| write_snapshot(snapshot, AtMost { file, left: bytes_max })) {
            Err(Error::Snapshot { source, .. }) if source.kind() == io::ErrorKind::FileTooLarge && events > 0 => {
                for trace in &mut snapshot.traces {
                    trace.drain(..trace.len().div_ceil(2));
                }
            }
            written => return written,
        }
    }
}

/// A file to which at most `left` bytes may be added.
struct AtMost<'f> {
    file: &'f File,
    left: u64,
}

impl io::Write for AtMost<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it would be larger than it may be"));
        };
        let written = self.file.write(bytes)?;
        self.left = left + (bytes.len() - written) as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn write_to(write: impl Fn(&File) -> io::Result<()>, path: &Path) -> io::Result<()> {
    write(&File::options().write(true).open(path)?)
}

fn write_new(write: impl Fn(&File) -> io::Result<()>, path: &Path) -> io::Result<()> {
    let file = File::create_new(path)?;
    write(&file)?;
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
    use warpool::memory::report::{Action, TraceEntry};

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
    fn the_newest_events_that_fit_are_written() {
        let folder = folder("at-most");
        let path = folder.join("file");
        let entry = |addr| TraceEntry {
            action: Action::Alloc,
            addr,
            size: 512,
            stream: 0,
            time_us: 0,
            pool: None,
            compile_context: None,
            user_metadata: None,
            stack: None,
            forward_stack: None,
        };
        let mut snapshot = Snapshot { traces: vec![(0..10_000).map(entry).collect()], ..Snapshot::default() };
        write_at_most(&mut snapshot, &path, 100 << 10).unwrap();
        let bytes = fs::metadata(&path).unwrap().len();
        assert!((20 << 10..=100 << 10).contains(&bytes), "{bytes} bytes");
        let kept = &snapshot.traces[0];
        assert!(kept.len() > 500 && kept.last().unwrap().addr == 9_999, "{} events", kept.len());
        let text = write_at_most(&mut snapshot, &folder.join("no room"), 10).unwrap_err().to_string();
        assert!(text.contains("larger than it may be"), "{text}");
        assert_eq!(names(&folder), ["file"]);
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
