//! Statistics of the pages of a paged allocator.

/// What a device's pages are used for. Pools with an upstream, and those whose blocks are whole segments, have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageStats {
    /// Pages that there are.
    pub pages: u64,
    /// Their bytes.
    pub reserved_bytes: u64,
    /// Bytes of allocated blocks and pending frees.
    pub active_bytes: u64,
    /// Those of them that are committed [elastic memory](crate::memory::elastic), in slots of 2 MiB.
    pub elastic_bytes: u64,
    /// Bytes that are free and mapped.
    pub free_mapped_bytes: u64,
    /// Bytes of pages that belong to no address.
    pub spare_bytes: u64,
    /// Bytes of addresses at which pages are mapped that belong to others.
    pub bytes_mapped_twice: u64,
    /// How often things were done with pages.
    pub totals: PageTotals,
}

impl PageStats {
    /// Every value with its name, as `warpool_page_stats` and `warpool.torch.page_stats` name it.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 13] {
        let totals = &self.totals;
        [
            ("pages", self.pages),
            ("reserved_bytes", self.reserved_bytes),
            ("active_bytes", self.active_bytes),
            ("elastic_bytes", self.elastic_bytes),
            ("free_mapped_bytes", self.free_mapped_bytes),
            ("spare_bytes", self.spare_bytes),
            ("bytes_mapped_twice", self.bytes_mapped_twice),
            ("pages_created", totals.created),
            ("pages_released", totals.released),
            ("pages_taken", totals.taken),
            ("pages_taken_back", totals.taken_back),
            ("pages_mapped", totals.mapped),
            ("pages_unmapped", totals.unmapped),
        ]
    }
}

/// How often things were done with pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageTotals {
    /// Pages that were created.
    pub created: u64,
    /// Pages that were released to the driver.
    pub released: u64,
    /// Pages that were taken from free addresses to be mapped elsewhere.
    pub taken: u64,
    /// Those of them that were still mapped where they were needed.
    pub taken_back: u64,
    /// Pages that were mapped.
    pub mapped: u64,
    /// Mappings that were undone.
    pub unmapped: u64,
}
