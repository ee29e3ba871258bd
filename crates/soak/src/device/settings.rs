//! Steps that change how the allocator works: settings, limits, caching, peer access.

use warpool::driver::{DeviceId, Memory as _};
use warpool::memory::DeviceAllocator as _;

use super::{DEVICES, Run};
use crate::allocators::{draw_settings, extreme_settings};
use crate::machine::{Outcome, device_id};

const MIB: u64 = 1 << 20;

impl Run<'_> {
    pub fn change_settings(&mut self) {
        let Some(caching) = &self.subject.caching else { return };
        let extreme = self.context.rng.one_in(16) && !self.context.skips("extremes");
        let settings =
            if extreme { extreme_settings(&mut self.context.rng) } else { draw_settings(&mut self.context.rng) };
        self.context.step(format!("settings {}", settings.to_conf_string()));
        // They may change the limits.
        self.limits = [None; DEVICES];
        caching.set_settings(settings).unwrap();
        let stream = self.machine.stream(0, self.context.rng.below(self.streams));
        caching.set_stream_class(stream.id(), self.context.rng.pick(&["", "main", "other"]));
    }

    pub fn change_limits(&mut self) {
        let device = device_id(self.context.rng.below(self.devices));
        let fraction = self.context.rng.pick(&[1.0, 1.0, 0.7, 0.3]);
        self.context.step(format!("the memory fraction of {device} is {fraction}"));
        self.subject.allocator.set_memory_fraction(device, fraction).unwrap();
        if let Some(caching) = &self.subject.caching {
            let cap = self.context.rng.one_in(2).then(|| self.context.rng.pick(&[60, 100, 500]) * MIB);
            self.context.step(format!("the cap of {device} is {cap:?}"));
            caching.set_memory_cap(device, cap).unwrap();
            let total = self.machine.sim.mem_info(device).unwrap().bytes_total;
            let limit = cap.unwrap_or(u64::MAX).min((total as f64 * fraction).ceil() as u64);
            // Reserved memory stays reserved, and an expandable segment is mapped in chunks, as in PyTorch: the last
            // chunk may exceed the limit.
            let reserved = caching.stats(device).unwrap().reserved_bytes.all.current;
            let is_exact = !caching.settings().expandable_segments;
            self.limits[device.0 as usize] = is_exact.then_some(limit.max(reserved));
        }
    }

    pub fn switch_caching(&mut self) {
        let Some(caching) = &self.subject.caching else { return };
        if self.context.skips("caching") {
            return;
        }
        // Mostly on.
        let on = !self.context.rng.one_in(3);
        self.context.step(format!("caching {on}"));
        caching.set_caching(on).unwrap();
    }

    /// Peer access cannot be disabled again.
    pub fn enable_peers(&mut self) {
        let Some(caching) = &self.subject.caching else { return };
        if self.peers || !self.context.rng.one_in(2) {
            return;
        }
        self.context.step("peer access");
        let both = || {
            caching.enable_peer_access(DeviceId(1), DeviceId(0))?;
            caching.enable_peer_access(DeviceId(0), DeviceId(1))
        };
        self.peers = self.machine.call(self.context, both) == Outcome::Done(());
    }
}
