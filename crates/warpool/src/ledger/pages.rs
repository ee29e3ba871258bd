//! Where entries are: in the pages of processes. This module knows no pages; `crate::share` has them.

use std::fmt::Debug;
use std::sync::atomic::AtomicU64;

use warpool_driver::DeviceUuid;

use crate::Result;

/// The entries of this process, and those of others. Implemented by [`SharedPages`](crate::share::SharedPages).
pub trait LedgerPages: Debug + Send + Sync {
    /// Identifies this process among all.
    fn number(&self) -> u64;

    /// The words of this process for a device, by its ordinal. Nobody else writes them.
    fn own(&self, device: usize) -> &[AtomicU64];

    /// The other processes that are alive now and have this card. With `strict`, a page that cannot be read is an
    /// error.
    fn others(&self, card: DeviceUuid, strict: bool) -> Result<Vec<Box<dyn OtherLedger>>>;

    /// Makes sure that others see that this process is alive. `false` if they cannot find it any more.
    fn keep(&self) -> bool;

    /// The time, in microseconds, as all processes see it.
    fn now_us(&self) -> u64;

    /// The folder, for messages.
    fn folder(&self) -> String;
}

/// The entry of another process.
pub trait OtherLedger: Debug + Send {
    /// Identifies the process among all.
    fn number(&self) -> u64;

    /// Its words for the card.
    fn words(&self) -> &[AtomicU64];

    /// Its file, for messages.
    fn file(&self) -> String;
}
