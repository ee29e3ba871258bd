//! Registrations that follow memory, as a communication library keeps them: by address, each with the memory that was
//! there when it was made.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use warpool_driver::sim::SimDriver;
use warpool_driver::{DevicePtr, RegistrationId, StreamId};

/// Registrations on a simulated GPU.
#[derive(Debug)]
pub struct Registered {
    sim: Arc<SimDriver>,
    /// By first address: the size, and the registration.
    ranges: Mutex<BTreeMap<u64, (u64, RegistrationId)>>,
    label: &'static str,
}

impl Registered {
    /// None yet. The label is for hazards.
    #[must_use]
    pub fn new(sim: &Arc<SimDriver>, label: &'static str) -> Self {
        Self { sim: Arc::clone(sim), ranges: Mutex::default(), label }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, (u64, RegistrationId)>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory is at these addresses from now on. Whether all of it was there still: a call may undo what it has done.
    pub fn mapped(&self, ptr: DevicePtr, bytes: u64) -> bool {
        self.gone(ptr, bytes);
        self.register(&mut self.lock(), ptr.0, bytes)
    }

    fn register(&self, ranges: &mut BTreeMap<u64, (u64, RegistrationId)>, start: u64, bytes: u64) -> bool {
        let registered = self.sim.register_memory(DevicePtr(start), bytes, self.label);
        registered.is_ok_and(|id| ranges.insert(start, (bytes, id)).is_none())
    }

    /// Ends registrations of these addresses. What they had beside them is registered again.
    ///
    /// # Panics
    /// If the driver does not know one of them.
    pub fn gone(&self, ptr: DevicePtr, bytes: u64) {
        let (start, end) = (ptr.0, ptr.0 + bytes);
        let mut ranges = self.lock();
        let overlaps = |(&at, &(bytes, _)): (&u64, &(u64, _))| (at < end && at + bytes > start).then_some(at);
        let stale: Vec<u64> = ranges.iter().filter_map(overlaps).collect();
        for at in stale {
            let (bytes, id) = ranges.remove(&at).expect("it was just found");
            self.sim.deregister_memory(id).expect("it is registered");
            if at < start {
                self.register(&mut ranges, at, start - at);
            }
            if at + bytes > end {
                self.register(&mut ranges, end, at + bytes - end);
            }
        }
    }

    /// Whether all of these addresses are registered.
    #[must_use]
    pub fn covers(&self, ptr: DevicePtr, bytes: u64) -> bool {
        self.parts(ptr, bytes).is_some()
    }

    /// Queues a write of all bytes through the registrations.
    ///
    /// # Panics
    /// If a part of it is not registered, or the driver refuses.
    pub fn send(&self, ptr: DevicePtr, bytes: u64, value: u8, stream: StreamId) {
        let parts = self.parts(ptr, bytes).unwrap_or_else(|| panic!("{bytes} bytes at {ptr} are not all registered"));
        for (id, offset, bytes) in parts {
            self.sim.write_registered(id, offset, bytes, value, stream).expect("the registration exists");
        }
    }

    /// The registrations behind a range, with the offset in each and how much of it.
    fn parts(&self, ptr: DevicePtr, bytes: u64) -> Option<Vec<(RegistrationId, u64, u64)>> {
        let (ranges, mut parts, mut at, end) = (self.lock(), Vec::new(), ptr.0, ptr.0 + bytes);
        while at < end {
            let (&start, &(bytes, id)) = ranges.range(..=at).next_back()?;
            if at >= start + bytes {
                return None;
            }
            let size = end.min(start + bytes) - at;
            parts.push((id, at - start, size));
            at += size;
        }
        Some(parts)
    }

    /// Ends all of them.
    ///
    /// # Panics
    /// If the driver does not know one of them.
    pub fn end_all(&self) {
        let all = std::mem::take(&mut *self.lock());
        all.into_values().for_each(|(_, id)| self.sim.deregister_memory(id).expect("it is registered"));
    }
}
