//! The call that is being made.

use crate::Call;

/// The call that is being made. Work is named by the number of the call that queued it.
#[derive(Clone, Copy, Debug)]
pub struct CurrentCall {
    pub call: Call,
    /// Counted over the whole driver, from 1.
    pub number: u64,
}
