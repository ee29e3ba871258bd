//! Counts remapping: mapping physical memory that was mapped before, at this or another address. The first mapping of
//! new memory does not count.

use std::time::Duration;

use crate::Call;
use crate::sim::cost::Latencies;

/// Remapped memory since the driver was made, or since
/// [`SimDriver::restart_remap_counts`](crate::sim::SimDriver::restart_remap_counts).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemapCounts {
    /// Mappings of memory that was mapped before.
    pub mappings: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their cost by the cost model of one mapping: mapping, setting access, and unmapping the mapping before.
    pub time: Duration,
}

/// The number of a mapping among all mappings of its memory, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MappingNumber(u64);

/// How often memory was mapped.
#[derive(Clone, Copy, Debug, Default)]
pub struct MappingHistory {
    mappings: u64,
    /// The period in which its newest mapping was unmapped.
    newest_unmapped_in: Option<u64>,
}

impl MappingHistory {
    /// The number of its next mapping.
    pub fn next_number(self) -> MappingNumber {
        MappingNumber(self.mappings + 1)
    }
}

/// The counts of a driver.
#[derive(Debug)]
pub struct Remaps {
    latencies: Latencies,
    counts: RemapCounts,
    /// How often the counts were restarted.
    period: u64,
}

impl Remaps {
    pub fn new(latencies: &Latencies) -> Self {
        Self { latencies: latencies.clone(), counts: RemapCounts::default(), period: 0 }
    }

    pub fn counts(&self) -> RemapCounts {
        self.counts
    }

    pub fn restart(&mut self) {
        self.counts = RemapCounts::default();
        self.period += 1;
    }

    /// Memory of `bytes` bytes was mapped.
    pub fn mapped(&mut self, memory: &mut MappingHistory, bytes: u64) {
        if memory.mappings > 0 {
            self.counts.mappings += 1;
            self.counts.bytes += bytes;
            self.add_time(Call::VmMap, bytes);
            // Only now it is known that unmapping it was a part of remapping.
            if memory.newest_unmapped_in == Some(self.period) {
                self.add_time(Call::VmUnmap, bytes);
            }
        }
        memory.newest_unmapped_in = None;
        memory.mappings += 1;
    }

    /// The access to a mapping was set.
    pub fn access_set(&mut self, mapping: MappingNumber, bytes: u64) {
        if mapping > MappingNumber(1) {
            self.add_time(Call::VmSetAccess, bytes);
        }
    }

    /// A mapping of this memory was unmapped.
    pub fn unmapped(&mut self, memory: &mut MappingHistory, mapping: MappingNumber, bytes: u64) {
        if mapping < MappingNumber(memory.mappings) {
            self.add_time(Call::VmUnmap, bytes);
        } else {
            memory.newest_unmapped_in = Some(self.period);
        }
    }

    fn add_time(&mut self, call: Call, bytes: u64) {
        self.counts.time += Duration::from_nanos(self.latencies.nanos(call, bytes));
    }
}
