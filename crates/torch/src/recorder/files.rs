//! The files of recordings: their names, and how many are kept. A recording is a snapshot and, beside it, a text with
//! the same name.
//!
//! Names have the rank and the process, and a number that no file of the folder has, so that no process writes over a
//! file of another. Files of earlier processes of the rank count too: a job that is restarted over and over does not
//! fill the disk.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

/// Unfinished files that are older are removed: their process was killed.
const UNFINISHED_MAX: Duration = Duration::from_secs(600);

/// The text beside a snapshot.
pub(super) fn text_beside(snapshot: &Path) -> PathBuf {
    if snapshot.extension().is_some_and(|extension| extension == "txt") {
        let mut name = snapshot.as_os_str().to_owned();
        name.push(".txt");
        return name.into();
    }
    snapshot.with_extension("txt")
}

/// Makes the folder, removes the oldest recordings of the rank until another one may be written, and reserves a name
/// for it: its text exists then, and is empty. Returns the path of the snapshot.
///
/// `numbers` counts the recordings of this process, so that no name is used twice.
pub(super) fn reserve(
    folder: &Path,
    rank: u64,
    reason: &str,
    files_max: u64,
    numbers: &AtomicU32,
) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let prefix = format!("warpool-rank{rank}-pid");
    remove_oldest(folder, &prefix, usize::try_from(files_max).unwrap_or(usize::MAX).saturating_sub(1))?;
    loop {
        let number = 1 + numbers.fetch_add(1, Ordering::Relaxed);
        let name = format!("{prefix}{}-{number}-{reason}.txt", std::process::id());
        let text = folder.join(name);
        match File::create_new(&text) {
            Ok(_) => return Ok(text.with_extension("pickle")),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes recordings with this prefix, the oldest first, until `keep` are left; and what killed processes have left.
fn remove_oldest(folder: &Path, prefix: &str, keep: usize) -> io::Result<()> {
    let mut recordings: Vec<(SystemTime, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder)? {
        // Another process may remove files at the same time.
        let Ok(entry) = entry else { continue };
        let (name, path) = (entry.file_name(), entry.path());
        let Some(name) = name.to_str() else { continue };
        let Ok(written) = entry.metadata().and_then(|data| data.modified()) else { continue };
        if name.starts_with(prefix) && name.ends_with(".txt") {
            recordings.push((written, path));
        } else if name.strip_prefix('.').is_some_and(|name| name.starts_with(prefix) && name.ends_with(".part"))
            && written.elapsed().is_ok_and(|age| age > UNFINISHED_MAX)
        {
            let _ = fs::remove_file(path);
        }
    }
    recordings.sort();
    for (_, text) in &recordings[..recordings.len().saturating_sub(keep)] {
        let _ = fs::remove_file(text.with_extension("pickle"));
        let _ = fs::remove_file(text);
    }
    Ok(())
}

/// Removes a name that was reserved and is not used.
pub(super) fn give_up(snapshot: &Path) {
    let _ = fs::remove_file(text_beside(snapshot));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_recordings_of_a_rank_are_kept() {
        let folder = std::env::temp_dir().join(format!("warpool-record-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let inside = folder.join("made");
        let (mut made, numbers) = (Vec::new(), AtomicU32::new(0));
        for number in 0..5_u64 {
            let snapshot = reserve(&inside, 3, "oom", 2, &numbers).unwrap();
            fs::write(&snapshot, "snapshot").unwrap();
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + number);
            File::options().append(true).open(text_beside(&snapshot)).unwrap().set_modified(time).unwrap();
            made.push(snapshot);
        }
        let other = reserve(&inside, 30, "oom", 1, &numbers).unwrap();
        let unfinished = inside.join(".warpool-rank3-pid1-1-oom.pickle.1-0.part");
        fs::write(&unfinished, "").unwrap();
        let long_ago = SystemTime::now() - 2 * UNFINISHED_MAX;
        File::options().append(true).open(&unfinished).unwrap().set_modified(long_ago).unwrap();
        // As another process with the same number.
        let last = reserve(&inside, 3, "oom", 2, &AtomicU32::new(4)).unwrap();
        assert!(last.to_str().unwrap().ends_with("-6-oom.pickle"), "the fifth is there");
        let exist: Vec<bool> = made.iter().map(|path| path.exists() && text_beside(path).exists()).collect();
        assert_eq!(exist, [false, false, false, false, true]);
        assert!(text_beside(&last).exists() && text_beside(&other).exists() && !unfinished.exists());
        give_up(&last);
        assert!(!text_beside(&last).exists());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_text_is_another_file() {
        assert_eq!(text_beside(Path::new("a/b.pickle")), Path::new("a/b.txt"));
        assert_eq!(text_beside(Path::new("a/b.txt")), Path::new("a/b.txt.txt"));
        assert_eq!(text_beside(Path::new("a/b")), Path::new("a/b.txt"));
    }
}
