//! The statistics of a device as one structure, for PyTorch's allocator class.

use std::ffi::{c_int, c_void};

use warpool::memory::report::{SegmentKind, Stat, StatByKind};

use crate::boundary;
use crate::error::Error;
use crate::runtime;
use crate::torch_pool::TorchPoolId;

/// A statistic with its peak.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct StatValues {
    /// The current value.
    pub current: i64,
    /// The highest value.
    pub peak: i64,
    /// The sum of all increases.
    pub allocated: i64,
    /// The sum of all decreases.
    pub freed: i64,
}

/// A statistic of all blocks, of small pools and of large pools.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct StatsByKind {
    /// Both.
    pub all: StatValues,
    /// Small pools.
    pub small_pool: StatValues,
    /// Large pools.
    pub large_pool: StatValues,
}

/// The statistics of a device, by their names in `torch.cuda.memory_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "the names are PyTorch's, documented there and at `warpool::memory::report::Stats`")]
pub struct DeviceStats {
    pub allocation: StatsByKind,
    pub segment: StatsByKind,
    pub active: StatsByKind,
    pub inactive_split: StatsByKind,
    pub allocated_bytes: StatsByKind,
    pub reserved_bytes: StatsByKind,
    pub active_bytes: StatsByKind,
    pub inactive_split_bytes: StatsByKind,
    pub requested_bytes: StatsByKind,
    pub oversize_allocations: StatValues,
    pub oversize_segments: StatValues,
    pub num_alloc_retries: i64,
    pub num_ooms: i64,
    pub num_sync_all_streams: i64,
    pub num_device_alloc: i64,
    pub num_device_free: i64,
    pub num_oom_rejections: i64,
    pub max_split_size: i64,
}

/// Receives the reserved bytes of a private pool.
pub type PoolStatVisitor =
    Option<unsafe extern "C" fn(user: *mut c_void, pool: TorchPoolId, reserved_bytes: *const StatsByKind)>;

/// Writes the statistics of a device to `stats`, and calls `visit`, unless that is NULL, with the reserved bytes of
/// each private pool.
///
/// # Safety
/// `stats` is NULL, which is an error, or writable. `visit` is NULL or may be called with `user`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_device_stats(
    device: c_int,
    stats: *mut DeviceStats,
    visit: PoolStatVisitor,
    user: *mut c_void,
) -> c_int {
    boundary::status(|| {
        let found = runtime::get()?.stats(device)?;
        let plain = DeviceStats {
            allocation: by_kind(found.allocation),
            segment: by_kind(found.segment),
            active: by_kind(found.active),
            inactive_split: by_kind(found.inactive_split),
            allocated_bytes: by_kind(found.allocated_bytes),
            reserved_bytes: by_kind(found.reserved_bytes),
            active_bytes: by_kind(found.active_bytes),
            inactive_split_bytes: by_kind(found.inactive_split_bytes),
            requested_bytes: by_kind(found.requested_bytes),
            oversize_allocations: values(found.oversize_allocations),
            oversize_segments: values(found.oversize_segments),
            num_alloc_retries: signed(found.num_alloc_retries),
            num_ooms: signed(found.num_ooms),
            num_sync_all_streams: signed(found.num_sync_all_streams),
            num_device_alloc: signed(found.num_device_alloc),
            num_device_free: signed(found.num_device_free),
            num_oom_rejections: signed(found.num_oom_rejections),
            max_split_size: found.max_split_size,
        };
        // SAFETY: null or writable by this function's contract.
        unsafe { boundary::write_output(stats, "stats", plain) }?;
        if let Some(visit) = visit {
            for (pool, reserved) in &found.reserved_bytes_by_private_pools {
                let pool = TorchPoolId { graph: u64::from(pool.graph), user: u64::from(pool.user) };
                let reserved = by_kind(*reserved);
                // SAFETY: callable by this function's contract; the values live during the call.
                unsafe { visit(user, pool, &raw const reserved) };
            }
        }
        Ok(())
    })
}

/// Receives an expandable segment, or the mapped memory of the paged allocator: stream, whether it serves small
/// requests, mapped bytes.
pub type SegmentSizeVisitor =
    Option<unsafe extern "C" fn(user: *mut c_void, stream: *mut c_void, is_small: bool, bytes: usize)>;

/// Calls `visit` with the mapped bytes of every stream but the default one, by kind of request.
///
/// # Safety
/// `visit` is NULL, which is an error, or may be called with `user`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpool_expandable_sizes(
    device: c_int,
    visit: SegmentSizeVisitor,
    user: *mut c_void,
) -> c_int {
    boundary::status(|| {
        let visit = visit.ok_or(Error::Null { argument: "visit" })?;
        let runtime = runtime::get()?;
        let device = runtime.device_id(device)?;
        let snapshot = runtime.snapshot_of(TorchPoolId { graph: 0, user: 0 }, false)?;
        let mut sums = std::collections::BTreeMap::<(u64, bool), u64>::new();
        for segment in snapshot.segments.iter().filter(|segment| segment.is_expandable && segment.stream != 0) {
            if u32::try_from(segment.device) == Ok(device.0) {
                *sums.entry((segment.stream, segment.kind == SegmentKind::Small)).or_default() += segment.total_size;
            }
        }
        for ((stream, is_small), bytes) in sums {
            let stream = std::ptr::without_provenance_mut(stream as usize);
            // SAFETY: callable by this function's contract.
            unsafe { visit(user, stream, is_small, bytes as usize) };
        }
        Ok(())
    })
}

fn by_kind(stat: StatByKind) -> StatsByKind {
    StatsByKind { all: values(stat.all), small_pool: values(stat.small_pool), large_pool: values(stat.large_pool) }
}

pub(super) fn values(stat: Stat) -> StatValues {
    StatValues {
        current: signed(stat.current),
        peak: signed(stat.peak),
        allocated: signed(stat.allocated),
        freed: signed(stat.freed),
    }
}

pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
