//! A file of 64-bit words that several processes of one user map, and its owner: the process that made it, for as long
//! as that lives. What the words mean is not known here.
//!
//! - The words are only accessible as atomics, so that no access of another process is undefined behaviour.
//! - The owner holds a record lock (`fcntl`) on the file. The kernel releases it when the process ends, in whatever
//!   way; a forked child does not inherit it. Such a lock is also lost when its process closes *any* descriptor of the
//!   file: so a process never opens its own files here ([`Opened::Own`]).
//! - A file gets its length after the lock. So a file of length 0 is being made, and one with a length that nobody has
//!   locked is left over from a process that ended.
//! - The file is as long as the mapping when it is mapped. If the user truncates it later, an access ends the process
//!   (`SIGBUS`).
//!
//! Linux and macOS have all this. Elsewhere every call fails with [`Unsupported`](std::io::ErrorKind::Unsupported).

use std::path::{Path, PathBuf};

pub use target::{SharedWords, private_directory, user_id};

/// What [`SharedWords::open`] found.
#[derive(Debug)]
pub enum Opened {
    /// Words of another process, which is alive.
    Words(SharedWords),
    /// This process made it.
    Own,
    /// It is being made.
    Unfinished,
    /// The process that made it has ended.
    Abandoned,
    /// The file does not belong to the user.
    Foreign,
    /// Its length is not that of an allowed number of words, or it is no file at all.
    Malformed,
}

/// Where files are in memory: `/dev/shm`, or else the folder for temporary files. Empty where words cannot be shared.
#[must_use]
pub fn shared_memory_directory() -> PathBuf {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() {
        shared.to_owned()
    } else if cfg!(unix) {
        std::env::temp_dir()
    } else {
        PathBuf::new()
    }
}

#[cfg(any(target_os = "linux", target_os = "macos"))]
mod target {
    use std::fs::{DirBuilder, File, Metadata};
    use std::io;
    use std::ops::RangeInclusive;
    use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU64, Ordering};

    use memmap2::{MmapOptions, MmapRaw};
    use rustix::fs::{FlockOperation, OFlags};
    use rustix::process::{Flock, FlockType};

    use super::Opened;
    use crate::fork::Origin;

    const WORD: u64 = size_of::<u64>() as u64;

    /// The effective user.
    pub fn user_id() -> io::Result<u32> {
        Ok(rustix::process::geteuid().as_raw())
    }

    /// Makes a folder that only the user can access, unless it exists. `PermissionDenied` if another user owns it or
    /// can access it.
    pub fn private_directory(path: &Path) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let found = path.symlink_metadata()?;
        if !found.is_dir() {
            return Err(io::Error::new(io::ErrorKind::NotADirectory, "it is not a folder"));
        }
        if found.uid() != user_id()? {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user owns it"));
        }
        if found.mode() & 0o077 != 0 {
            let why = "other users can access it (chmod 700)";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        Ok(())
    }

    /// Words that processes share.
    #[derive(Debug)]
    pub struct SharedWords {
        map: MmapRaw,
        count: usize,
        file: File,
        made: Option<Made>,
    }

    /// What the owner knows.
    #[derive(Debug)]
    struct Made {
        path: PathBuf,
        origin: Origin,
        slot: &'static Slot,
    }

    impl SharedWords {
        /// Makes a file of `count` words, all 0, which is removed when this is dropped. `AlreadyExists` if there is a
        /// file of that name.
        pub fn create(path: &Path, count: usize) -> io::Result<Self> {
            let mut options = File::options();
            let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
            let found = file.metadata()?;
            // Before the file has a length: until then, no other thread of this process opens it.
            let slot = Slot::take(&found).inspect_err(|_| drop(std::fs::remove_file(path)))?;
            let made = Made { path: path.to_owned(), origin: Origin::here(), slot };
            let bytes = count as u64 * WORD;
            let map = (|| {
                rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive)?;
                // Reserves the memory: in a full file system the first access would end the process otherwise.
                rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
                file.set_len(bytes)?;
                map(&file, count)
            })();
            match map {
                Ok(map) => Ok(Self { map, count, file, made: Some(made) }),
                Err(error) => {
                    made.remove();
                    Err(error)
                }
            }
        }

        /// Opens a file that another process made, of an allowed number of words.
        pub fn open(path: &Path, counts: RangeInclusive<usize>) -> io::Result<Opened> {
            if let Some(other) = rejected(&path.symlink_metadata()?)? {
                return Ok(other);
            }
            // Without a delay, should it have become something else meanwhile.
            let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
            let file = File::options().read(true).write(true).custom_flags(flags).open(path)?;
            let found = file.metadata()?;
            if let Some(other) = rejected(&found)? {
                return Ok(other);
            }
            if !is_locked(&file)? {
                return Ok(Opened::Abandoned);
            }
            let count = usize::try_from(found.len() / WORD).ok().filter(|count| counts.contains(count));
            let Some(count) = count.filter(|_| found.len() % WORD == 0) else {
                return Ok(Opened::Malformed);
            };
            Ok(Opened::Words(Self { map: map(&file, count)?, count, file, made: None }))
        }

        /// The words.
        #[must_use]
        pub fn words(&self) -> &[AtomicU64] {
            // SAFETY: the mapping is of `count` words, starts at a page, and lives as long as `self`. All accesses of
            // this process are atomic, and any bits are a word.
            unsafe { std::slice::from_raw_parts(self.map.as_mut_ptr().cast::<AtomicU64>(), self.count) }
        }

        /// Whether the process that made it is alive, for words that were opened.
        pub fn has_owner(&self) -> io::Result<bool> {
            if self.made.as_ref().is_some_and(|made| made.origin.is_here()) { Ok(true) } else { is_locked(&self.file) }
        }

        /// Takes the lock again, for the owner: a library that opened and closed the file has released it. Returns
        /// whether the file still has a name.
        pub fn keep(&self) -> io::Result<bool> {
            if self.made.as_ref().is_some_and(|made| made.origin.is_here()) {
                rustix::fs::fcntl_lock(&self.file, FlockOperation::NonBlockingLockExclusive)?;
            }
            Ok(self.file.metadata()?.nlink() > 0)
        }
    }

    impl Drop for SharedWords {
        fn drop(&mut self) {
            if let Some(made) = self.made.take().filter(|made| made.origin.is_here()) {
                made.remove();
            }
        }
    }

    impl Made {
        /// The name first: then no other thread can open the file any more. The lock ends with the file.
        fn remove(self) {
            // Its folder may be gone already.
            let _ = std::fs::remove_file(&self.path);
            self.slot.give_back();
        }
    }

    fn map(file: &File, count: usize) -> io::Result<MmapRaw> {
        MmapOptions::new().len(count * size_of::<u64>()).map_raw(file)
    }

    /// Whether a process other than this one holds the lock.
    fn is_locked(file: &File) -> io::Result<bool> {
        Ok(rustix::process::fcntl_getlk(file, &Flock::from(FlockType::WriteLock))?.is_some())
    }

    fn rejected(found: &Metadata) -> io::Result<Option<Opened>> {
        if !found.is_file() {
            return Ok(Some(Opened::Malformed));
        }
        if found.uid() != user_id()? {
            return Ok(Some(Opened::Foreign));
        }
        if found.len() == 0 {
            return Ok(Some(Opened::Unfinished));
        }
        if Slot::has(found) {
            return Ok(Some(Opened::Own));
        }
        Ok(None)
    }

    /// A file that this process made. No lock, which could be held for ever in a forked child.
    #[derive(Debug)]
    struct Slot {
        /// 0 if it is free, `TAKING`, or 1 plus the generation of the process.
        state: AtomicU64,
        device: AtomicU64,
        file: AtomicU64,
    }

    const TAKING: u64 = u64::MAX;
    static SLOTS: [Slot; 64] =
        [const { Slot { state: AtomicU64::new(0), device: AtomicU64::new(0), file: AtomicU64::new(0) } }; 64];

    impl Slot {
        fn own() -> u64 {
            1 + u64::from(Origin::here().generation())
        }

        fn take(of: &Metadata) -> io::Result<&'static Self> {
            let is_taken =
                |slot: &&Self| slot.state.compare_exchange(0, TAKING, Ordering::SeqCst, Ordering::Relaxed).is_ok();
            let slot = SLOTS.iter().find(is_taken).ok_or_else(|| io::Error::other("it has 64 of them already"))?;
            slot.device.store(of.dev(), Ordering::SeqCst);
            slot.file.store(of.ino(), Ordering::SeqCst);
            slot.state.store(Self::own(), Ordering::SeqCst);
            Ok(slot)
        }

        fn has(found: &Metadata) -> bool {
            let own = Self::own();
            SLOTS.iter().any(|slot| {
                let is_own = slot.state.load(Ordering::SeqCst) == own;
                let id = (slot.device.load(Ordering::SeqCst), slot.file.load(Ordering::SeqCst));
                is_own && id == (found.dev(), found.ino())
            })
        }

        fn give_back(&self) {
            self.state.store(0, Ordering::SeqCst);
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod target {
    use std::io;
    use std::ops::RangeInclusive;
    use std::path::Path;
    use std::sync::atomic::AtomicU64;

    use super::Opened;

    fn unsupported<T>() -> io::Result<T> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "processes cannot share memory by files on this system"))
    }

    /// The effective user: unknown.
    pub fn user_id() -> io::Result<u32> {
        unsupported()
    }

    /// A folder that only the user can access: unknown.
    pub fn private_directory(_path: &Path) -> io::Result<()> {
        unsupported()
    }

    /// Words that processes share: this target has none.
    #[derive(Debug)]
    pub enum SharedWords {}

    impl SharedWords {
        pub fn create(_path: &Path, _count: usize) -> io::Result<Self> {
            unsupported()
        }

        pub fn open(_path: &Path, _counts: RangeInclusive<usize>) -> io::Result<Opened> {
            unsupported()
        }

        #[must_use]
        pub fn words(&self) -> &[AtomicU64] {
            match *self {}
        }

        pub fn has_owner(&self) -> io::Result<bool> {
            match *self {}
        }

        pub fn keep(&self) -> io::Result<bool> {
            match *self {}
        }
    }
}

#[cfg(all(test, any(target_os = "linux", target_os = "macos"), not(miri)))]
mod tests {
    use std::fs::{self, Permissions};
    use std::io;
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A folder of its own for each test.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let name = format!("warpool-words-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            private_directory(&path).unwrap();
            Self(path)
        }

        fn file(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_owner_never_opens_its_file_and_removes_it() {
        let folder = Folder::new();
        let path = folder.file("a");
        let words = SharedWords::create(&path, 3).unwrap();
        assert_eq!(words.words().len(), 3);
        words.words()[2].store(7, Ordering::Relaxed);
        assert!(matches!(SharedWords::open(&path, 1..=9).unwrap(), Opened::Own));
        assert!(words.has_owner().unwrap() && words.keep().unwrap());
        let again = SharedWords::create(&path, 3).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        fs::remove_file(&path).unwrap();
        assert!(!words.keep().unwrap(), "it has no name any more");
        drop(words);
        // As many as there is room for can be made one after another.
        for _ in 0..100 {
            drop(SharedWords::create(&path, 1).unwrap());
        }
        assert!(!path.exists());
    }

    #[test]
    fn what_no_process_owns_is_not_mapped() {
        let folder = Folder::new();
        let open = |name: &str| SharedWords::open(&folder.file(name), 2..=4).unwrap();
        fs::write(folder.file("left over"), [1; 24]).unwrap();
        assert!(matches!(open("left over"), Opened::Abandoned));
        fs::write(folder.file("empty"), []).unwrap();
        assert!(matches!(open("empty"), Opened::Unfinished));
        symlink(folder.file("left over"), folder.file("link")).unwrap();
        assert!(matches!(open("link"), Opened::Malformed));
        fs::create_dir(folder.file("folder")).unwrap();
        assert!(matches!(open("folder"), Opened::Malformed));
        let missing = SharedWords::open(&folder.file("missing"), 2..=4).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_folder_that_others_can_access_is_refused() {
        let folder = Folder::new();
        private_directory(&folder.0).unwrap();
        fs::set_permissions(&folder.0, Permissions::from_mode(0o750)).unwrap();
        let error = private_directory(&folder.0).unwrap_err();
        assert_eq!(error.to_string(), "other users can access it (chmod 700)");
        fs::set_permissions(&folder.0, Permissions::from_mode(0o700)).unwrap();
        fs::write(folder.file("a"), []).unwrap();
        assert!(private_directory(&folder.file("a")).is_err());
        symlink(&folder.0, folder.file("link")).unwrap();
        assert!(private_directory(&folder.file("link")).is_err());
        assert!(shared_memory_directory().is_dir());
        user_id().unwrap();
    }
}
