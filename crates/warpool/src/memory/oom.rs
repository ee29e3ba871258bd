//! Why a request could not be met: the report that an out-of-memory error carries.

use std::fmt;

use warpool_driver::DeviceId;

/// What stood in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OomCause {
    /// The device has no room.
    Device,
    /// A limit that was set: a fraction or a cap. The device may have room.
    Limit,
    /// The limit, before anything was tried, because `throw_on_cudamalloc_oom` is set.
    Rejected,
    /// The memory does not come from the driver, and where it comes from has no room: a pool's own source, or a plug.
    Upstream,
    /// A cap on what callers hold through [`Limited`](super::Limited), which is the report's `bytes_limit`. Nothing
    /// else was asked.
    Cap {
        /// What callers held through it.
        held: u64,
    },
}

/// What was asked for, what there is, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OomReport {
    /// On which device.
    pub device: DeviceId,
    /// What stood in the way.
    pub cause: OomCause,
    /// What the caller asked for.
    pub bytes_requested: u64,
    /// What the driver was, or would have been, asked for.
    pub bytes_segment: u64,
    /// What the device has.
    pub bytes_total: u64,
    /// What of it nobody has.
    pub bytes_free: u64,
    /// What this allocator may hold, if that is limited.
    pub bytes_limit: Option<u64>,
    /// What it holds.
    pub bytes_reserved: u64,
    /// What of it callers have.
    pub bytes_allocated: u64,
    /// What callers have given back and streams may still use.
    pub bytes_pending: u64,
    /// What lies free in private pools, such as those of graphs.
    pub bytes_private_free: u64,
    /// What lies free in the default pool.
    pub bytes_cached: u64,
    /// In how many pieces it lies free there.
    pub pieces_cached: u64,
    /// The largest of them.
    pub bytes_largest_cached: u64,
    /// Whether segments grow (`expandable_segments`).
    pub expandable_segments: bool,
    /// Whether the stream captures, so that nothing could be given back.
    pub capturing: bool,
}

impl OomReport {
    /// What others have of the device: other processes, contexts, other allocators of this process.
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
                " Refused by a cap of {cap} on what callers may hold, of which they hold {held}; raise the cap, or free something first."
            )?;
        } else if let Some(limit) = self.bytes_limit {
            write!(f, " {} allowed; raise the limit, or set it to 1.0 to remove it.", Size(limit))?;
        }
        match self.cause {
            OomCause::Device | OomCause::Limit | OomCause::Cap { .. } => {}
            OomCause::Rejected => {
                f.write_str(" Refused before the driver was asked, because throw_on_cudamalloc_oom is set.")?;
            }
            OomCause::Upstream => {
                f.write_str(" Its own source of memory (a pool's upstream, or a plugged allocator) had none.")?;
            }
        }
        write!(
            f,
            " Of the allocated memory {} is allocated by Warpool's callers, {} waits for streams",
            Size(self.bytes_allocated),
            Size(self.bytes_pending),
        )?;
        if self.bytes_private_free > 0 {
            write!(f, ", {} lies free in private pools (e.g., CUDA Graphs)", Size(self.bytes_private_free))?;
        }
        write!(
            f,
            ", and {} is reserved by Warpool but unallocated, in {} pieces, the largest {}.",
            Size(self.bytes_cached),
            self.pieces_cached,
            Size(self.bytes_largest_cached),
        )?;
        write!(f, " {} is held by others (contexts, other libraries, other processes).", Size(self.bytes_elsewhere()))?;
        if self.capturing {
            f.write_str(" Nothing could be given back, because the stream captures a graph.")?;
        }
        if self.bytes_cached >= self.bytes_segment {
            f.write_str(if self.expandable_segments {
                " Free memory would have sufficed but lies in the wrong places: call trim between phases of the program."
            } else {
                " Free memory would have sufficed but lies in the wrong places: set expandable_segments:True to avoid that."
            })?;
        }
        Ok(())
    }
}

/// Bytes for people, as PyTorch writes them.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
        let bytes = self.0 as f64;
        match self.0 {
            0..=1024 => write!(f, "{} bytes", self.0),
            1025..=1_048_576 => write!(f, "{:.2} KiB", bytes / 1024.0),
            1_048_577..=1_073_741_824 => write!(f, "{:.2} MiB", bytes / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", bytes / 1_073_741_824.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_in_pytorch() {
        let cases = [
            (0, "0 bytes"),
            (1024, "1024 bytes"),
            (1536, "1.50 KiB"),
            (1 << 20, "1024.00 KiB"),
            (20 << 20, "20.00 MiB"),
            (80 << 30, "80.00 GiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
