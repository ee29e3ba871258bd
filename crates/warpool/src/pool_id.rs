//! Ids of memory pools.

use std::fmt;

/// Which pool a block belongs to: PyTorch's pair of numbers.
///
/// `(0, 0)` is the default pool, `(n, 0)` a pool made by a graph, `(0, n)` a pool made by the user. No pool has two
/// nonzero numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemPoolId {
    /// The number of a graph's pool, or 0.
    pub graph: u32,
    /// The number of a user's pool, or 0.
    pub user: u32,
}

impl MemPoolId {
    /// The default pool.
    pub const DEFAULT: Self = Self { graph: 0, user: 0 };

    /// Whether it is the default pool.
    #[must_use]
    pub const fn is_default(self) -> bool {
        self.graph == 0 && self.user == 0
    }
}

impl fmt::Display for MemPoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.graph, self.user)
    }
}
