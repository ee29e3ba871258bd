//! Where the memory of a device was at one moment: parts that add up to the device's total, to the byte.

use warpool::memory::report::BlockState;

use crate::replay::{HeapState, RequestInfo, StateBlock};

/// Where the memory of a device was. The parts add up to the device's total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Requested bytes of allocated blocks.
    pub allocated: u64,
    /// Rounding: bytes of allocated blocks beyond their requests.
    pub rounding: u64,
    /// Free in the pool, the stream and the size class of the request, in blocks that are too small for it.
    pub free_too_small: u64,
    /// Free there, in blocks that are large enough.
    pub free_large_enough: u64,
    /// Free in the same pool and stream, in segments for requests of the other size class: small or large.
    pub free_other_size: u64,
    /// Free in the same pool, for other streams.
    pub free_other_streams: u64,
    /// Free in other pools: those of graphs and `MemPool`s, or the default pool for a request in one of them.
    pub free_other_pools: u64,
    /// Pending free: waiting for streams that may still use it.
    pub waiting_for_streams: u64,
    /// Not reserved by the allocator, and free on the device.
    pub not_reserved: u64,
    /// Used by others: contexts, libraries, other processes.
    pub outside: u64,
}

impl Parts {
    /// The names, in the order in which they are shown.
    pub const NAMES: [&'static str; 10] = [
        "allocated",
        "rounding",
        "free_too_small",
        "free_large_enough",
        "free_other_size",
        "free_other_streams",
        "free_other_pools",
        "waiting_for_streams",
        "not_reserved",
        "outside",
    ];

    /// The parts by name, in that order.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 10] {
        let bytes = [
            self.allocated,
            self.rounding,
            self.free_too_small,
            self.free_large_enough,
            self.free_other_size,
            self.free_other_streams,
            self.free_other_pools,
            self.waiting_for_streams,
            self.not_reserved,
            self.outside,
        ];
        std::array::from_fn(|at| (Self::NAMES[at], bytes[at]))
    }

    /// Their sum.
    #[must_use]
    pub fn total(&self) -> u64 {
        // A recording that is not of a real program may have any sizes.
        self.named().into_iter().fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// Allocated bytes, with rounding.
    #[must_use]
    pub const fn live(&self) -> u64 {
        self.allocated.saturating_add(self.rounding)
    }

    /// Bytes that the allocator has reserved.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.total().saturating_sub(self.not_reserved).saturating_sub(self.outside)
    }

    /// Free memory that the request cannot use: in another size class, stream or pool.
    #[must_use]
    pub const fn kept_elsewhere(&self) -> u64 {
        let kept = self.free_other_size.saturating_add(self.free_other_streams);
        kept.saturating_add(self.free_other_pools).saturating_add(self.waiting_for_streams)
    }

    /// The parts of a state, seen from a request. `device_free` is what the device had free, if known; the total is
    /// raised if it is less than what was in use.
    pub(super) fn new(
        state: &HeapState,
        request: Option<&RequestInfo>,
        total: u64,
        device_free: Option<u64>,
        bytes_context: u64,
    ) -> Self {
        let mut parts = Self::default();
        for block in &state.blocks {
            parts.add(block, request);
        }
        let reserved = parts.total();
        match device_free {
            Some(free) => {
                parts.not_reserved = free;
                parts.outside = total.saturating_sub(reserved).saturating_sub(free);
            }
            None => {
                let rest = total.saturating_sub(reserved);
                parts.outside = rest.min(bytes_context);
                parts.not_reserved = rest - parts.outside;
            }
        }
        parts
    }

    fn add(&mut self, block: &StateBlock, request: Option<&RequestInfo>) {
        let part = match block.state {
            BlockState::ActiveAllocated => {
                self.allocated = self.allocated.saturating_add(block.requested);
                self.rounding = self.rounding.saturating_add(block.bytes.saturating_sub(block.requested));
                return;
            }
            BlockState::ActivePendingFree => &mut self.waiting_for_streams,
            BlockState::Inactive => match request {
                None => &mut self.free_large_enough,
                Some(request) if request.pool != block.pool => &mut self.free_other_pools,
                Some(request) if request.stream != block.stream => &mut self.free_other_streams,
                Some(request) if request.kind != block.kind => &mut self.free_other_size,
                Some(request) if request.bytes_rounded > block.bytes => &mut self.free_too_small,
                Some(_) => &mut self.free_large_enough,
            },
        };
        *part = part.saturating_add(block.bytes);
    }
}
