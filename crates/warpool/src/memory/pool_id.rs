//! The names of memory pools.

use std::fmt;

/// Which pool a block belongs to: PyTorch's pair of numbers.
///
/// `(0, 0)` is the default pool, `(n, 0)` one that a graph made for itself, `(0, n)` one that a user made. Both numbers
/// at once name nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemPoolId {
    /// The number among those of graphs, or 0.
    pub graph: u32,
    /// The number among those of users, or 0.
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
