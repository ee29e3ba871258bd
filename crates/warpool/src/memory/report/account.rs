//! Whose the memory of a device is: what an allocator cannot know, since others take it from the driver.

/// What a device has in use, by owner, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAccount {
    /// The device.
    pub device: u32,
    /// Its memory.
    pub total: u64,
    /// In use, by all processes.
    pub used: u64,
    /// Who uses it; the allocator's row is the first, if there is one.
    pub rows: Vec<AccountRow>,
    /// What could not be found out, and why.
    pub remarks: Vec<String>,
}

/// Bytes of one owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccountRow {
    /// A library, CUDA, other processes, or [`ALLOCATOR`](Self::ALLOCATOR).
    pub owner: String,
    /// What they are for: `modules`, for example.
    pub what: String,
    /// How many.
    pub bytes: u64,
    /// How that is known.
    pub known_by: String,
}

impl AccountRow {
    /// The owner of what the allocator has reserved.
    pub const ALLOCATOR: &'static str = "the allocator";
    /// What the allocator has reserved is called so.
    pub const RESERVED: &'static str = "reserved";

    /// Whether it is what the allocator has reserved.
    #[must_use]
    pub fn is_reserved(&self) -> bool {
        self.owner == Self::ALLOCATOR && self.what == Self::RESERVED
    }
}

impl DeviceAccount {
    /// In use outside the allocator: by others, or by nobody who is known.
    #[must_use]
    pub fn outside(&self) -> u64 {
        self.rows.iter().filter(|row| row.is_reserved()).fold(self.used, |used, row| used.saturating_sub(row.bytes))
    }

    /// In use, and not of any owner; negative if the owners have more than is in use.
    #[must_use]
    pub fn unexplained(&self) -> i64 {
        let explained: u64 = self.rows.iter().fold(0, |sum, row| sum.saturating_add(row.bytes));
        i64::try_from(i128::from(self.used) - i128::from(explained)).unwrap_or(i64::MIN)
    }
}
