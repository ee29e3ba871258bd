//! The part of an out-of-memory report that only the paged allocator has: where free memory is that could not serve the
//! request.

use std::fmt;

use super::size::Size;

/// Where the paged allocator has free memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageShortage {
    /// Free bytes in mapped pages of streams and pools whose pages may be taken.
    pub bytes_free_mapped: u64,
    /// The part of `bytes_free_mapped` in whole pages. The rest shares pages with allocated blocks.
    pub bytes_whole_pages: u64,
    /// Bytes in pages that are not mapped to any address.
    pub bytes_spare: u64,
    /// Free bytes in pools in use, whose pages are not moved: graphs contain their addresses.
    pub bytes_fixed: u64,
    /// The size of a page.
    pub bytes_page: u64,
}

impl PageShortage {
    /// Free bytes in pages that also hold allocated blocks.
    #[must_use]
    pub fn bytes_in_used_pages(&self) -> u64 {
        self.bytes_free_mapped.saturating_sub(self.bytes_whole_pages)
    }

    /// Writes where free memory is, and what can be done about it. `missing` bytes could not be obtained from the
    /// driver; `pending` bytes wait for streams.
    pub(super) fn write(&self, f: &mut fmt::Formatter<'_>, missing: u64, pending: u64, capturing: bool) -> fmt::Result {
        let whole = self.bytes_whole_pages + self.bytes_spare;
        write!(
            f,
            " Free: {} in whole pages (of it {} in spare ones), {} beside allocated blocks in pages that are partly in \
             use, {} in pools in use, whose pages stay where they are.",
            Size(whole),
            Size(self.bytes_spare),
            Size(self.bytes_in_used_pages()),
            Size(self.bytes_fixed),
        )?;
        if capturing && whole + pending > 0 {
            f.write_str(
                " The stream captures a graph, so free pages of other streams could not be taken and pending frees not \
                 be waited for: allocate as much once before the capture begins, or trim.",
            )?;
        }
        let missing = missing.saturating_sub(whole);
        if self.bytes_fixed > 0 && self.bytes_fixed >= missing {
            f.write_str(
                " Pages of pools in use would have sufficed: drop graphs and pools that are not needed any more, or \
                 create pools without graphs with use_on_oom.",
            )?;
        }
        if self.bytes_in_used_pages() > 0 && self.bytes_in_used_pages() >= missing {
            write!(
                f,
                " Free memory in partly used pages would have sufficed: blocks that live long keep pages of {} from \
                 others; allocate them before those that live short.",
                Size(self.bytes_page)
            )?;
        }
        Ok(())
    }
}
