//! The cost model: how long calls take on the host, and work on the device, in nanoseconds of virtual time.
//!
//! Figures marked as measured are of one H200 (driver 580.159, CUDA 13.0, November 2026); the others are estimates of
//! the same order. All of them are settings.

use crate::{Call, LaunchShape};

/// How long a call takes on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Latency {
    /// A constant.
    Flat(u64),
    /// By size: points of (bytes, nanoseconds), ascending. Linear between points and beyond the last; constant below
    /// the first.
    BySize(Vec<(u64, u64)>),
}

impl Latency {
    /// The time of a call for `bytes` bytes.
    #[must_use]
    pub fn nanos(&self, bytes: u64) -> u64 {
        match self {
            Self::Flat(nanos) => *nanos,
            Self::BySize(points) => interpolate(points, bytes),
        }
    }
}

fn interpolate(points: &[(u64, u64)], bytes: u64) -> u64 {
    let above = points.partition_point(|&(size, _)| size < bytes);
    match (above, points) {
        (_, []) => 0,
        (0, [first, ..]) => first.1,
        (_, [only]) => only.1,
        _ => {
            let above = above.min(points.len() - 1);
            let ((from, low), (to, high)) = (points[above - 1], points[above]);
            let share = (bytes - from) as f64 / (to - from) as f64;
            (low as f64 + (high as f64 - low as f64) * share).max(0.0) as u64
        }
    }
}

/// How long every call takes on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies {
    by_call: Vec<Latency>,
}

impl Latencies {
    /// An H200 and its host.
    #[must_use]
    pub fn h200() -> Self {
        Self { by_call: Call::ALL.iter().map(|&call| h200(call)).collect() }
    }

    /// The same time for all calls.
    #[must_use]
    pub fn flat(nanos: u64) -> Self {
        Self { by_call: vec![Latency::Flat(nanos); Call::ALL.len()] }
    }

    /// Sets the time of one call.
    #[must_use]
    pub fn with(mut self, call: Call, latency: Latency) -> Self {
        self.by_call[call as usize] = latency;
        self
    }

    /// The time of `call` at its start: the part that does not depend on a size.
    pub(super) fn flat_nanos(&self, call: Call) -> u64 {
        match &self.by_call[call as usize] {
            Latency::BySize(_) if SIZED.contains(&call) => 0,
            latency => latency.nanos(0),
        }
    }

    /// The additional time of `call` for its size.
    pub(super) fn sized_nanos(&self, call: Call, bytes: u64) -> u64 {
        match &self.by_call[call as usize] {
            Latency::Flat(_) => 0,
            sized => sized.nanos(bytes),
        }
    }

    /// How long `call` takes for `bytes` bytes.
    #[must_use]
    pub fn nanos(&self, call: Call, bytes: u64) -> u64 {
        self.by_call[call as usize].nanos(bytes)
    }
}

/// The calls that have a size. For others, a latency by size is that of 0 bytes.
const SIZED: &[Call] = &[
    Call::MemAlloc,
    Call::MemFree,
    Call::VmReserve,
    Call::VmCreate,
    Call::VmRelease,
    Call::VmMap,
    Call::VmUnmap,
    Call::VmSetAccess,
    Call::PoolAlloc,
    Call::HostAlloc,
    Call::HostFree,
    Call::HostRegister,
    Call::HostUnregister,
    Call::HostRead,
    Call::HostWrite,
    Call::Copy,
    Call::Copy2d,
    Call::CopyPeer,
    Call::Fill,
    Call::Upload,
    Call::Download,
];

fn h200(call: Call) -> Latency {
    const MIB: u64 = 1 << 20;
    let by_size = |points: [(u64, u64); 4]| Latency::BySize(points.to_vec());
    match call {
        // Measured: alloc and free as a pair, 93 us at 64 KiB and 98 us at 8 MiB.
        Call::MemAlloc => by_size([(64 << 10, 46_000), (8 * MIB, 50_000), (512 * MIB, 60_000), (2048 * MIB, 80_000)]),
        Call::MemFree => Latency::Flat(47_000),
        // Measured.
        Call::VmReserve => Latency::Flat(13_000),
        Call::VmCreate => by_size([(2 * MIB, 12_000), (64 * MIB, 16_000), (512 * MIB, 33_000), (2048 * MIB, 177_000)]),
        Call::VmMap => Latency::Flat(1_000),
        // Measured for one mapping of that size; a call over several takes the sum.
        Call::VmSetAccess => {
            by_size([(2 * MIB, 30_000), (64 * MIB, 27_000), (512 * MIB, 51_000), (2048 * MIB, 110_000)])
        }
        Call::VmUnmap => by_size([(2 * MIB, 18_000), (64 * MIB, 16_000), (512 * MIB, 24_000), (2048 * MIB, 44_000)]),
        Call::VmRelease => {
            by_size([(2 * MIB, 14_000), (64 * MIB, 45_000), (512 * MIB, 256_000), (2048 * MIB, 984_000)])
        }
        Call::VmFreeRange => Latency::Flat(8_000),
        // Measured. (A query of an event already reached took 150 to 350 on other days: docs/h200.md.)
        Call::EventRecord => Latency::Flat(140),
        // Not measured: an event for each of a few streams.
        Call::EventRecordContext => Latency::Flat(1_000),
        Call::EventQuery => Latency::Flat(1_290),
        Call::StreamQuery => Latency::Flat(1_290),
        Call::CaptureState | Call::CaptureDependencies => Latency::Flat(21),
        Call::CurrentDevice => Latency::Flat(10),
        Call::SetCurrentDevice => Latency::Flat(22),
        Call::MemInfo => Latency::Flat(5_500),
        Call::KernelLaunch => Latency::Flat(3_260),
        Call::GraphLaunch => Latency::Flat(1_500),
        Call::GraphExecSetKernel => Latency::Flat(132),
        // Measured: create and destroy take 211 us together, nearly all of it in create; a product takes a little
        // longer than a launch.
        Call::LibraryCreate => Latency::Flat(211_000),
        Call::LibrarySetStream => Latency::Flat(21),
        Call::BlasSetWorkspace => Latency::Flat(23),
        Call::BlasSetMath | Call::BlasSetAtomics => Latency::Flat(5),
        Call::BlasSgemm => Latency::Flat(4_000),
        // Measured: a cached pair of cudaMallocAsync takes 800 to 1,250 ns.
        Call::PoolAlloc => Latency::Flat(600),
        Call::PoolFree => Latency::Flat(400),
        // Measured: alloc and free as a pair, 4.5 us at 4 KiB, 1.6 ms at 1 MiB, 42 ms at 64 MiB; 414 ms to pin 1 GiB.
        Call::HostAlloc => {
            by_size([(4 << 10, 3_000), (MIB, 1_100_000), (64 * MIB, 32_600_000), (1024 * MIB, 414_000_000)])
        }
        Call::HostFree => by_size([(4 << 10, 1_500), (MIB, 500_000), (64 * MIB, 9_400_000), (1024 * MIB, 120_000_000)]),
        // Measured: 1.2 ms for 64 MiB and 23 ms for 1 GiB of touched huge pages.
        Call::HostRegister => {
            by_size([(4 << 10, 2_000), (MIB, 25_000), (64 * MIB, 1_200_000), (1024 * MIB, 23_000_000)])
        }
        Call::HostUnregister => {
            by_size([(4 << 10, 1_500), (MIB, 15_000), (64 * MIB, 600_000), (1024 * MIB, 10_000_000)])
        }
        Call::StreamCreate => Latency::Flat(20_000),
        Call::StreamDestroy => Latency::Flat(10_000),
        // Measured: create, record, query and destroy take 3,073 together.
        Call::EventCreate | Call::EventDestroy => Latency::Flat(800),
        Call::GraphInstantiate => Latency::Flat(30_000),
        Call::ModuleLoad => Latency::Flat(2_000_000),
        Call::Copy | Call::Copy2d | Call::CopyPeer | Call::Fill => Latency::Flat(1_500),
        Call::Upload | Call::Download => Latency::Flat(6_000),
        Call::Suballocated | Call::SuballocatedInPlace | Call::SuballocationFreed => Latency::Flat(0),
        Call::HostRead | Call::HostWrite => Latency::Flat(0),
        _ => Latency::Flat(100),
    }
}

/// The path of a copy, which determines its speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    OnDevice,
    Host,
    Peer,
}

/// How long work takes on the device; rates are in bytes per microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCosts {
    /// Start of a kernel without a duration of its own.
    pub kernel_start: u64,
    /// Each thousand threads of such a kernel.
    pub kernel_per_1000_threads: u64,
    /// Each million multiplications of a matrix product.
    pub product_per_million: u64,
    /// Start of a copy.
    pub copy_start: u64,
    /// Rate of copies within a device.
    pub copy_on_device: u64,
    /// Rate of copies over the bus, and within the host.
    pub copy_host: u64,
    /// Rate of copies between devices.
    pub copy_peer: u64,
    /// Start of a fill.
    pub fill_start: u64,
    /// Rate of fills.
    pub fill: u64,
    /// Start of a host callback.
    pub callback: u64,
    /// Each test of the flag of a conditional node.
    pub conditional: u64,
}

impl WorkCosts {
    /// An H200. Measured: copies within the device, 4.3 TB/s read plus written. The others are estimates.
    #[must_use]
    pub const fn h200() -> Self {
        Self {
            kernel_start: 2_000,
            kernel_per_1000_threads: 10,
            product_per_million: 40,
            copy_start: 1_500,
            copy_on_device: 2_150_000,
            copy_host: 50_000,
            copy_peer: 400_000,
            fill_start: 1_200,
            fill: 4_000_000,
            callback: 5_000,
            conditional: 1_000,
        }
    }

    pub(super) fn kernel_nanos(&self, shape: &LaunchShape) -> u64 {
        let threads = u128::from(shape.threads()) * u128::from(self.kernel_per_1000_threads) / 1000;
        self.kernel_start.saturating_add(u64::try_from(threads).unwrap_or(u64::MAX))
    }

    pub(super) fn product_nanos(&self, m: u32, n: u32, k: u32) -> u64 {
        let millionths = u128::from(m) * u128::from(n) * u128::from(k) / 1000 * u128::from(self.product_per_million);
        self.kernel_start.saturating_add(u64::try_from(millionths / 1000).unwrap_or(u64::MAX))
    }

    pub(super) fn copy_nanos(&self, bytes: u64, route: Route) -> u64 {
        let rate = match route {
            Route::OnDevice => self.copy_on_device,
            Route::Host => self.copy_host,
            Route::Peer => self.copy_peer,
        };
        self.copy_start.saturating_add(at_rate(bytes, rate))
    }

    pub(super) fn fill_nanos(&self, bytes: u64) -> u64 {
        self.fill_start.saturating_add(at_rate(bytes, self.fill))
    }
}

/// How long `bytes` take at `rate` bytes per microsecond.
fn at_rate(bytes: u64, rate: u64) -> u64 {
    let nanos = u128::from(bytes) * 1000 / u128::from(rate.max(1));
    u64::try_from(nanos).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_is_interpolated_between_points() {
        let latency = Latency::BySize(vec![(10, 100), (20, 200), (40, 240)]);
        let costs: Vec<u64> = [0, 10, 15, 20, 30, 40, 99].iter().map(|&b| latency.nanos(b)).collect();
        assert_eq!(costs, [100, 100, 150, 200, 220, 240, 358]);
    }
}
