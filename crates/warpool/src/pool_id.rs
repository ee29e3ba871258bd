//! Ids of memory pools.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// Which pool a block belongs to: PyTorch's pair of numbers.
///
/// `(0, 0)` is the default pool, `(n, 0)` a pool created by a graph, `(0, n)` a pool created by the user. No pool has
/// two nonzero numbers.
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

/// The ids that one allocator gives to its pools. None is used twice.
#[derive(Debug, Default)]
pub(crate) struct PoolIds {
    user: AtomicU32,
    graph: AtomicU32,
}

impl PoolIds {
    /// The id of a new pool of the user.
    pub(crate) fn next_user(&self) -> MemPoolId {
        MemPoolId { graph: 0, user: self.user.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// The id of a new pool of a graph.
    pub(crate) fn next_graph(&self) -> MemPoolId {
        MemPoolId { graph: self.graph.fetch_add(1, Ordering::Relaxed) + 1, user: 0 }
    }
}
