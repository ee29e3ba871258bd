//! The folder of the pages: one file per process, `PID-NUMBER.page`. Other files there are left alone. A page that no
//! living process owns is removed by whoever sees it.
//!
//! A process cannot open its own files (`SharedWords`). So the folder, with all its clones, keeps what was published
//! through it: allocators of one process find each other there.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use warpool_driver::platform::{Instant, Opened, SharedWords, private_directory, shared_memory_directory, user_id};

use super::layout::{DEVICES_MAX, words};
use super::now_us;
use super::other::{OtherPage, Reading, Refused};
use super::page::{PageOptions, ProcessPage};
use crate::error::ShareError;
use crate::{Instance, Result, lock};

const EXTENSION: &str = "page";

/// A file of length 0 is being made, unless its process ended at that moment: then it is this old.
const UNFINISHED: Duration = Duration::from_secs(60);

/// A folder of pages that only one user can access.
#[derive(Clone, Debug)]
pub struct PageDirectory {
    path: PathBuf,
    /// The pages that were published through this value and its clones.
    own: Arc<Mutex<Vec<OwnPage>>>,
}

/// A page of this process.
#[derive(Debug)]
struct OwnPage {
    path: PathBuf,
    words: Weak<SharedWords>,
    /// As long as the page exists. Those who read it keep its words a little longer.
    exists: Weak<()>,
}

/// The pages of a folder.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Listing {
    /// Those of other processes that are alive, by process id.
    pub pages: Vec<OtherPage>,
    /// Files that cannot be read, by name.
    pub problems: Vec<PageProblem>,
}

/// A file that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageProblem {
    /// Its name.
    pub file: String,
    /// What is wrong.
    pub why: String,
}

impl PageDirectory {
    /// The folder that processes of this user use unless they are told otherwise: `/dev/shm/warpool-UID`.
    #[must_use]
    pub fn default_path() -> PathBuf {
        let user = user_id().map_or_else(|_| "unknown".to_owned(), |user| user.to_string());
        shared_memory_directory().join(format!("warpool-{user}"))
    }

    /// Opens the folder; makes it if it is missing. Its parent must exist.
    /// [`ShareError::Folder`] if others can access it, or where processes cannot share memory.
    pub fn open(path: &Path) -> Result<Self> {
        private_directory(path).map_err(|error| folder_error(path, &error))?;
        Ok(Self { path: path.to_owned(), own: Arc::default() })
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the page of this process, for the devices of `instance`. A process may have several, one for each driver.
    pub fn publish(&self, instance: &Instance, options: &PageOptions) -> Result<ProcessPage> {
        instance.expect_own_process("publish")?;
        let count = instance.device_count() as usize;
        if count > DEVICES_MAX {
            let why = format!("a page has room for {DEVICES_MAX} devices, not for {count}");
            return Err(ShareError::Page { file: self.path.display().to_string(), why }.into());
        }
        loop {
            let number = random();
            let path = self.path.join(format!("{}-{number:016x}.{EXTENSION}", std::process::id()));
            match SharedWords::create(&path, words(count)) {
                Ok(words) => {
                    let words = Arc::new(words);
                    let page = ProcessPage::new(Arc::clone(&words), path.clone(), number, instance, options);
                    let (words, exists) = (Arc::downgrade(&words), page.exists());
                    lock(&self.own).push(OwnPage { path, words, exists });
                    return Ok(page);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(ShareError::Page { file: path.display().to_string(), why: error.to_string() }.into());
                }
            }
        }
    }

    /// The pages of this process that were published through this value or a clone of it.
    pub(super) fn own(&self) -> Vec<OtherPage> {
        let mut own = lock(&self.own);
        own.retain(|page| page.exists.strong_count() > 0);
        own.iter().filter_map(|page| OtherPage::new(page.words.upgrade()?, page.path.clone()).ok()).collect()
    }

    /// The pages of other processes. Removes those whose process has ended.
    pub fn list(&self) -> Result<Listing> {
        let failed = |error: io::Error| folder_error(&self.path, &error);
        let mut listing = Listing::default();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|extension| extension == EXTENSION)
                && let Err(why) = listing.add(&path)
            {
                let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                listing.problems.push(PageProblem { file, why });
            }
        }
        let identity = |page: &OtherPage| (page.identity().pid, page.identity().number);
        listing.pages.sort_by_key(identity);
        listing.problems.sort_by(|a, b| a.file.cmp(&b.file));
        Ok(listing)
    }
}

impl Listing {
    /// Asks every process for fresh values, and waits until all have written some, or for so long: a process may be
    /// stopped.
    pub fn refresh(&self, at_most: Duration) {
        let (asked, begun) = (now_us(), Instant::now());
        self.pages.iter().for_each(OtherPage::ask);
        let is_fresh = |page: &OtherPage| {
            page.identity().devices.is_empty()
                || matches!(page.read(0), Reading::Values(values) if values.counters.read_us >= asked)
        };
        while !self.pages.iter().all(is_fresh) && begun.elapsed() < at_most {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn add(&mut self, path: &Path) -> std::result::Result<(), String> {
        match SharedWords::open(path, words(0)..=words(DEVICES_MAX)) {
            Ok(Opened::Words(words)) => match OtherPage::new(Arc::new(words), path.to_owned()) {
                Ok(page) => self.pages.push(page),
                Err(Refused::Unfinished) => {}
                Err(Refused::Damaged(why)) => return Err(why),
            },
            Ok(Opened::Own) => {}
            Ok(Opened::Abandoned) => remove(path),
            Ok(Opened::Unfinished) => {
                let made = path.symlink_metadata().and_then(|found| found.modified());
                if made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > UNFINISHED)) {
                    remove(path);
                }
            }
            Ok(Opened::Foreign) => return Err("it belongs to another user".to_owned()),
            Ok(Opened::Malformed) => return Err("it has not the length of a page".to_owned()),
            // Its process ended meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.to_string()),
        }
        Ok(())
    }
}

/// Another reader may have removed it already. Names are not used again.
fn remove(path: &Path) {
    let _ = std::fs::remove_file(path);
}

/// Different in every process.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn folder_error(path: &Path, error: &io::Error) -> crate::Error {
    ShareError::Folder { path: path.display().to_string(), why: error.to_string() }.into()
}
