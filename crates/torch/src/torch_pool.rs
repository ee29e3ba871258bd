//! PyTorch's pool id, as it crosses the C interface.

use std::fmt;

/// PyTorch's id of a memory pool (`MempoolId_t`): two numbers, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TorchPoolId {
    /// Number of a pool made for graphs, or 0.
    pub graph: u64,
    /// Number of a pool made by the user, or 0.
    pub user: u64,
}

impl fmt::Display for TorchPoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.graph, self.user)
    }
}
