//! What processes of one user on one machine tell each other: each *publishes* a page of words in a folder of the
//! user's, with its counters per card; any other may read them at any time, without a lock.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::prelude::*;
//! use warpool::share::{LEDGER_WORDS, ShareError, now_us};
//! use warpool::share::{Counters, Listing, OomEvent, PageDirectory, PageOptions, ProcessPage, UsageOf, UsageRow};
//!
//! # fn main() -> warpool::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("warpool-doc-share-{}", std::process::id()));
//! # if cfg!(not(any(target_os = "linux", target_os = "macos"))) { return Ok(()) }
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! println!("usually in {}", PageDirectory::default_path().display());
//! let pages = PageDirectory::open(&folder)?; // made, accessible by the user alone
//! let options = PageOptions { command: "python train.py".to_owned(), ..PageOptions::default() };
//! let page: ProcessPage = pages.publish(&instance, &options)?; // until it is dropped, or the process ends
//! let counters = Counters { bytes_reserved: 20 << 20, ..Counters::default() };
//! let mut stream = UsageRow::of(UsageOf::Stream(0));
//! stream.bytes_reserved = 20 << 20;
//! page.write(0, &counters, &[stream]);
//! let mut event = OomEvent::default();
//! (event.time_us, event.bytes_requested) = (now_us(), 80 << 30);
//! page.write_oom(0, event);
//! assert_eq!(page.ledger(0).len(), LEDGER_WORDS);
//! let refused = PageDirectory::open(&folder.join("missing/folder"));
//! assert!(matches!(refused, Err(warpool::Error::Share(ShareError::Folder { .. }))));
//!
//! let Listing { pages: others, problems, .. } = pages.list()?; // those of other processes
//! for other in &others {
//!     let identity = other.identity();
//!     println!("{} {}: {:?}", identity.pid, identity.command, other.read(0));
//! }
//! # assert!(others.is_empty() && problems.is_empty());
//! # drop(page);
//! # std::fs::remove_dir(&folder).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! A [`Publisher`] writes the page of an allocator, from a thread of its own, and answers requests for another limit:
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::share::{
//!     LimitAnswer, LimitRequest, OtherPage, PageDirectory, PageOptions, PublishOptions, Publisher, TagSource,
//! };
//!
//! # fn main() -> warpool::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("warpool-doc-publisher-{}", std::process::id()));
//! # if cfg!(not(any(target_os = "linux", target_os = "macos"))) { return Ok(()) }
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let tags: TagSource = Arc::new(Vec::new); // the `info` of the program's `Tags`, if it has any
//! let options = PublishOptions { tags: Some(tags), accepts_limits: true, ..PublishOptions::default() };
//! let page = Arc::new(PageDirectory::open(&folder)?.publish(&instance, &PageOptions::default())?);
//! let publisher = Publisher::start(&page, &allocator, options)?; // until it is dropped
//! publisher.write_now();
//!
//! /// What another process does with the page.
//! fn halve(other: &OtherPage) -> Option<LimitAnswer> {
//!     let request: LimitRequest = other.request_limit(0, Some(40 << 30));
//!     other.limit_answer(0, request) // after some time
//! }
//! # drop((publisher, page));
//! # std::fs::remove_dir(&folder).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! - `layout.rs` has the places of the words, `values.rs` what is written there, `page.rs` the page of this process,
//!   `other.rs` those of others, `directory.rs` the folder. No `unsafe` here: the words come from
//!   [`warpool_driver::platform`].
//! - A page belongs to its process as long as that lives, not to children that it forks.
//! - Whatever is in a file, reading it makes no more than an error: its length is checked before it is mapped, all
//!   numbers when they are read. (If its user truncates a file *while* it is mapped, the kernel ends the processes that
//!   access it.)
//! - A section of each card's words, its *ledger*, is not written here.

mod board;
mod directory;
mod layout;
mod ledger_pages;
#[cfg(all(test, any(target_os = "linux", target_os = "macos")))]
mod ledger_tests;
mod limit;
mod other;
mod page;
mod publisher;
#[cfg(all(test, any(target_os = "linux", target_os = "macos")))]
mod tests;
mod values;

pub use crate::error::ShareError;
pub use crate::ledger::{LedgerPages, OtherLedger};
pub use board::{Board, BoardOrder, BoardProcess, BoardRow, Card};
pub use directory::{Listing, PageDirectory, PageProblem};
pub use layout::LEDGER_WORDS;
pub use ledger_pages::SharedPages;
pub use limit::{LimitAnswer, LimitRequest};
pub use other::{DeviceOfPage, OtherPage, PageIdentity, Reading};
pub use page::{PageOptions, ProcessPage};
pub use publisher::{PublishOptions, Publisher, TagSource};
pub use values::{Counters, DeviceValues, OomEvent, UsageOf, UsageRow};

use std::time::{SystemTime, UNIX_EPOCH};

/// What the processes of a machine look like together.
///
/// ```
/// # if cfg!(not(any(target_os = "linux", target_os = "macos"))) { return }
/// # let folder = std::env::temp_dir().join(format!("warpool-doc-board-{}", std::process::id()));
/// use warpool::share::{Board, BoardOrder, BoardProcess, BoardRow, Card, PageDirectory, PageProblem};
///
/// let board = Board::read(PageDirectory::open(&folder).and_then(|pages| pages.list()).unwrap());
/// let (processes, cards): (&[BoardProcess], &[Card]) = (&board.processes, &board.cards);
/// let rows: Vec<BoardRow<'_>> = board.rows(BoardOrder::Reserved);
/// let problems: &[PageProblem] = &board.problems;
/// assert!(processes.is_empty() && cards.is_empty() && rows.is_empty() && problems.is_empty());
/// # std::fs::remove_dir(&folder).unwrap();
/// ```
#[cfg(doctest)]
struct BoardExample;

/// The time, in microseconds since 1970.
pub fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}
