//! The pages of processes as the place of their ledgers: what each says of its part of a card.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use warpool_driver::DeviceUuid;

use super::{OtherPage, PageDirectory, ProcessPage, now_us};
use crate::Result;
use crate::error::ShareError;
use crate::ledger::{LedgerPages, OtherLedger};

const _: () = assert!(crate::ledger::WORDS <= super::LEDGER_WORDS, "an entry fits");

/// A folder of pages, and the page of this process in it: what an allocator needs to
/// [share](crate::memory::DeviceAllocator::share) cards.
///
/// ```
/// # use std::sync::Arc;
/// # use warpool::driver::sim::{SimConfig, SimDriver};
/// # use warpool::prelude::*;
/// use warpool::memory::{BackgroundReclaim, PagedAllocator};
/// use warpool::share::{LedgerPages, OtherLedger, PageDirectory, PageOptions, SharedPages};
///
/// # fn main() -> warpool::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("warpool-doc-ledger-{}", std::process::id()));
/// # if cfg!(not(any(target_os = "linux", target_os = "macos"))) { return Ok(()) }
/// let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// let settings = Settings::parse("backend:paged,share:True,share_guaranteed:20GiB,share_limit:60GiB")?;
/// let allocator = Arc::new(PagedAllocator::new(&instance, settings)?);
/// let directory = PageDirectory::open(&folder)?;
/// let page = Arc::new(directory.publish(&instance, &PageOptions::default())?);
/// let pages: Arc<dyn LedgerPages> = Arc::new(SharedPages::new(directory, page));
/// allocator.share(&pages)?; // from now on it takes no more than the other processes leave
/// let _thread = BackgroundReclaim::start(&allocator); // gives idle pages to them
///
/// let others: Vec<Box<dyn OtherLedger>> = pages.others(instance.device(0)?.properties().uuid, true)?;
/// assert!(others.is_empty());
/// # drop((allocator, pages));
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SharedPages {
    directory: PageDirectory,
    page: Arc<ProcessPage>,
}

impl SharedPages {
    /// `page` is in `directory`.
    #[must_use]
    pub const fn new(directory: PageDirectory, page: Arc<ProcessPage>) -> Self {
        Self { directory, page }
    }
}

/// The page of another process, and the number of the card in it.
#[derive(Debug)]
struct Other {
    page: OtherPage,
    device: usize,
}

impl LedgerPages for SharedPages {
    fn number(&self) -> u64 {
        self.page.number()
    }

    fn own(&self, device: usize) -> &[AtomicU64] {
        self.page.ledger(device)
    }

    fn others(&self, card: DeviceUuid, strict: bool) -> Result<Vec<Box<dyn OtherLedger>>> {
        let listing = self.directory.list()?;
        if let Some(problem) = listing.problems.into_iter().next().filter(|_| strict) {
            return Err(ShareError::Other { file: problem.file, why: problem.why }.into());
        }
        // Other allocators of this process are like other processes.
        let own = self.directory.own().into_iter().filter(|page| page.identity().number != self.page.number());
        let others = listing.pages.into_iter().chain(own).filter_map(|page| {
            let device = page.identity().devices.iter().position(|device| device.uuid == card)?;
            Some(Box::new(Other { page, device }) as Box<dyn OtherLedger>)
        });
        Ok(others.collect())
    }

    fn keep(&self) -> bool {
        self.page.keep()
    }

    fn now_us(&self) -> u64 {
        now_us()
    }

    fn folder(&self) -> String {
        self.directory.path().display().to_string()
    }
}

impl OtherLedger for Other {
    fn number(&self) -> u64 {
        self.page.identity().number
    }

    fn words(&self) -> &[AtomicU64] {
        self.page.ledger(self.device)
    }

    fn file(&self) -> String {
        self.page.path().display().to_string()
    }
}
