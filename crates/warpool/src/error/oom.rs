//! The report of an out-of-memory error: the request, and how the device's memory is used.

use std::fmt;

use warpool_driver::DeviceId;

use super::page_shortage::PageShortage;
use super::size::Size;

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OomCause {
    /// The device is full.
    Device,
    /// A limit that was set: a fraction or a cap. The device may have memory.
    Limit,
    /// A limit that was set. The request failed without a retry because `throw_on_cudamalloc_oom` is set.
    Rejected,
    /// An external allocator or a pool's upstream, which supplies the memory instead of the driver, is full.
    External,
    /// The cap of a [`Limited`](crate::memory::decorate::Limited) allocator, which is the report's `bytes_limit`. The
    /// inner allocator was not called.
    Cap {
        /// Bytes allocated through it.
        held: u64,
    },
    /// The rest of the device is held by other processes that share it, or guaranteed to them.
    Shared,
}

/// The request, and how the device's memory is used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OomReport {
    /// The device.
    pub device: DeviceId,
    /// Why the request failed.
    pub cause: OomCause,
    /// Bytes that the caller requested.
    pub bytes_requested: u64,
    /// Bytes that were, or would have been, requested from the driver.
    pub bytes_segment: u64,
    /// Total bytes of the device's memory.
    pub bytes_total: u64,
    /// Free bytes of the device.
    pub bytes_free: u64,
    /// Bytes that this allocator may reserve, if that is limited.
    pub bytes_limit: Option<u64>,
    /// Bytes that it has reserved.
    pub bytes_reserved: u64,
    /// Reserved bytes that are allocated.
    pub bytes_allocated: u64,
    /// Reserved bytes of pending frees, which wait for streams.
    pub bytes_pending: u64,
    /// Free bytes in private pools, such as those of graphs.
    pub bytes_private_free: u64,
    /// Free bytes in the default pool.
    pub bytes_cached: u64,
    /// The number of blocks that `bytes_cached` consists of.
    pub blocks_cached: u64,
    /// The size of the largest of these blocks.
    pub bytes_largest_cached: u64,
    /// Whether segments are expandable (`expandable_segments`).
    pub expandable_segments: bool,
    /// Whether the stream is capturing, so that nothing could be reclaimed.
    pub capturing: bool,
    /// Where free memory is, if the allocator is the paged one.
    pub pages: Option<PageShortage>,
}

impl OomReport {
    /// Bytes used elsewhere: by other processes, contexts, and other allocators of this process.
    #[must_use]
    pub fn bytes_elsewhere(&self) -> u64 {
        self.bytes_total.saturating_sub(self.bytes_free).saturating_sub(self.bytes_reserved)
    }
}

impl fmt::Display for OomReport {
    /// Begins like PyTorch's message, for programs that look for it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which {} is free.",
            Size(self.bytes_segment),
            self.device.0,
            Size(self.bytes_total),
            Size(self.bytes_free),
        )?;
        if let OomCause::Cap { held } = self.cause {
            let cap = self.bytes_limit.unwrap_or(0);
            let (cap, held) = (Size(cap), Size(held));
            write!(
                f,
                " Refused by a cap of {cap} on allocated memory, of which {held} is allocated; \
                 raise the cap, or free something first."
            )?;
        } else if let Some(limit) = self.bytes_limit {
            write!(
                f,
                " {} allowed; raise the lower of the memory fraction and memory_cap_mb \
                 (without a limit: fraction 1.0 and no cap).",
                Size(limit)
            )?;
        }
        match self.cause {
            OomCause::Device | OomCause::Limit | OomCause::Cap { .. } => {}
            OomCause::Shared => {
                f.write_str(
                    " The rest is held by other processes that share the GPU, or guaranteed to them (share:True); \
                     none of it was idle.",
                )?;
            }
            OomCause::Rejected => {
                f.write_str(" Refused before the driver was called, because throw_on_cudamalloc_oom is set.")?;
            }
            OomCause::External => {
                f.write_str(" The memory's source (an external allocator, or a pool's upstream) is out of memory.")?;
            }
        }
        write!(
            f,
            " Of the allocated memory {} is allocated by Warpool's callers, {} was freed and waits for streams",
            Size(self.bytes_allocated),
            Size(self.bytes_pending),
        )?;
        if self.bytes_private_free > 0 {
            write!(f, ", {} is free in private pools (e.g., CUDA Graphs)", Size(self.bytes_private_free))?;
        }
        write!(
            f,
            ", and {} is reserved by Warpool but unallocated, in {} blocks, the largest {}.",
            Size(self.bytes_cached),
            self.blocks_cached,
            Size(self.bytes_largest_cached),
        )?;
        write!(f, " {} is held by others (contexts, other libraries, other processes).", Size(self.bytes_elsewhere()))?;
        if let Some(pages) = &self.pages {
            // The bytes that the driver could still have supplied.
            let allowed = self.bytes_limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.bytes_reserved));
            let missing = self.bytes_segment.saturating_sub(allowed.min(self.bytes_free));
            return pages.write(f, missing, self.bytes_pending, self.capturing);
        }
        if self.capturing {
            f.write_str(" Nothing could be reclaimed, because the stream captures a graph.")?;
        }
        if self.bytes_cached >= self.bytes_segment {
            f.write_str(" Free memory would have sufficed but is fragmented: ")?;
            f.write_str(if self.expandable_segments {
                "call trim between phases of the program."
            } else {
                "set expandable_segments:True to avoid that."
            })?;
        }
        Ok(())
    }
}
