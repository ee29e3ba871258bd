//! Memory that sleeps and wakes: [`Tags`].
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::memory::sleep::{Keep, TagInfo, TagState, Tags};
//! use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, HostAllocator, PinnedSettings, Settings};
//!
//! # fn main() -> warpool::Result<()> {
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! let (device, host) = (instance.device(0)?, HostAllocator::new(&instance, PinnedSettings::default()));
//! let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let (stream, tags) = (device.pool_stream()?, Tags::new(&allocator, &host)?);
//!
//! let weights = {
//!     let _scope = tags.tag(&device, "weights")?.enter()?; // this thread's requests carry the tag
//!     allocator.allocate(64 << 20, &stream)?
//! };
//! tags.sleep(&["weights"], Keep::Host)?; // the driver has the memory, the host the contents
//! assert_eq!(allocator.stats(device.id())?.reserved_bytes.all.current, 0);
//! let info: &TagInfo = &tags.info()[0];
//! assert!(matches!(info.state, TagState::Asleep { .. }) && info.bytes_host > 0);
//! tags.wake(&["weights"])?; // at the same address, with the same contents
//! drop(weights);
//! # Ok(())
//! # }
//! ```
//!
//! # How
//! A tag has a private pool on each device, with an upstream that allocates by virtual memory management
//! (`mapped_segments.rs`): every segment is a range of reserved addresses, backed by one physical allocation. No other
//! tag has a block in it. Sleeping copies the contents of allocated blocks to pinned memory, unmaps, and releases the
//! physical memory (`going.rs`). Waking creates physical memory, maps it at the same addresses, and copies the contents
//! back (`waking.rs`). Addresses never change, so captured graphs work again.
//!
//! [Elastic memory](crate::memory::elastic) of a tag ([`Tag::elastic`]) has pages of the common stock instead: asleep,
//! its committed blocks have none (`elastic.rs`).
//!
//! The allocator's state does not change: blocks of a sleeping tag can be freed, and segments without blocks return to
//! the driver. It serves no request from a sleeping pool, and does not count sleeping memory as reserved
//! ([`PoolSleep`](super::PoolSleep)).
//!
//! `docs/sleep.md` lists the result of each call in every state.

mod changing;
mod copies;
mod elastic;
mod going;
mod report;
mod shared;
mod tags;
#[cfg(test)]
mod tests;
mod waking;

pub use report::{Keep, SleepReport, TagInfo, TagState};
pub use tags::{Tag, TagScope, Tags};
