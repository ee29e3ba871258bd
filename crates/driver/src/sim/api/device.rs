//! Devices, contexts and peers of the simulated machine.

use std::cell::Cell;

use crate::sim::SimDriver;
use crate::sim::world::World;
use crate::{Call, DeviceId, DeviceProperties, Devices, ErrorCode, RawHandle, Result, StreamId};

impl Devices for SimDriver {
    fn device_count(&self) -> Result<u32> {
        self.call(Call::DeviceCount, |world| Ok(world.devices.len() as u32))
    }

    fn device_properties(&self, device: DeviceId) -> Result<DeviceProperties> {
        self.call(Call::DeviceProperties, |world| {
            world.device_any(device)?;
            Ok(world.config.devices[device.0 as usize].properties.clone())
        })
    }

    fn context_retain(&self, device: DeviceId) -> Result<RawHandle> {
        self.call(Call::ContextRetain, |world| {
            world.device_any(device)?;
            world.devices[device.0 as usize].retained += 1;
            Ok(RawHandle(0x4000_0000 + u64::from(device.0) * 0x1000))
        })
    }

    fn context_release(&self, device: DeviceId) -> Result<()> {
        self.call(Call::ContextRelease, |world| {
            world.device_any(device)?;
            let state = &mut world.devices[device.0 as usize];
            match state.retained.checked_sub(1) {
                Some(left) => {
                    state.retained = left;
                    Ok(())
                }
                None => world.fail(ErrorCode::InvalidContext, "released more often than retained"),
            }
        })
    }

    fn context_is_active(&self, device: DeviceId) -> Result<bool> {
        self.call(Call::ContextIsActive, |world| {
            let state = world.device_any(device)?;
            Ok(state.context || state.retained > 0)
        })
    }

    fn current_device(&self) -> Result<Option<DeviceId>> {
        self.call(Call::CurrentDevice, |world| Ok(world.thread_devices.get(&std::thread::current().id()).copied()))
    }

    fn set_current_device(&self, device: DeviceId) -> Result<()> {
        self.call(Call::SetCurrentDevice, |world| {
            world.device(device)?;
            world.thread_devices.insert(std::thread::current().id(), device);
            Ok(())
        })
    }

    fn device_synchronize(&self, device: DeviceId) -> Result<()> {
        let mut world = self.enter(Call::DeviceSynchronize)?;
        world.device(device)?;
        world.forbid_on_capturing_device(device)?;
        self.wait_for_device(world, device).device(device).map(drop)
    }

    fn peer_can_access(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        self.call(Call::PeerCanAccess, |world| world.are_peers(device, peer))
    }

    fn peer_enable(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.call(Call::PeerEnable, |world| {
            if !world.are_peers(device, peer)? {
                return world.fail(ErrorCode::PeerAccessUnsupported, format!("{device} cannot reach {peer}"));
            }
            world.device(device)?;
            world.device(peer)?;
            let peers = &mut world.memory.peers[device.0 as usize];
            if peers.contains(&peer) {
                return Err(world.error(ErrorCode::PeerAccessAlreadyEnabled));
            }
            peers.push(peer);
            Ok(())
        })
    }

    fn peer_disable(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.call(Call::PeerDisable, |world| {
            world.device_any(peer)?;
            world.device(device)?;
            let peers = &mut world.memory.peers[device.0 as usize];
            match peers.iter().position(|&other| other == peer) {
                Some(index) => {
                    peers.swap_remove(index);
                    Ok(())
                }
                None => Err(world.error(ErrorCode::PeerAccessNotEnabled)),
            }
        })
    }
}

impl SimDriver {
    /// Waits until all work of a device is done.
    pub(in crate::sim) fn wait_for_device<'a>(
        &'a self,
        mut world: std::sync::MutexGuard<'a, World>,
        device: DeviceId,
    ) -> std::sync::MutexGuard<'a, World> {
        let retired = std::mem::take(&mut world.devices[device.0 as usize].retired);
        world.host_learns_all(&retired);
        // Only the streams with something new since the last time: most have nothing, and a program may have a hundred.
        let news = |&stream: &StreamId| {
            let state = world.stream(stream);
            (state.changes != state.changes_waited_for).then(|| (stream, state.changes, world.last_of(stream)))
        };
        let last: Vec<_> = world.devices[device.0 as usize].streams.iter().filter_map(news).collect();
        let passed = Cell::new(0);
        let mut world = self.wait(world, last.iter().map(|&(_, _, (_, stamp))| stamp), |world| {
            let rest = &last[passed.get()..];
            let done = rest.iter().take_while(|&&(_, _, (_, stamp))| world.is_done(stamp)).count();
            passed.set(passed.get() + done);
            done == rest.len()
        });
        for (stream, changes, (base, stamp)) in last {
            world.host_learns(&base, stamp);
            // It may be gone by now.
            if let Some(state) = world.streams.get_mut(stream.0) {
                state.changes_waited_for = changes;
            }
        }
        world.settle_pools(device);
        world
    }
}

impl World {
    fn are_peers(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        self.device_any(device)?;
        self.device_any(peer)?;
        Ok(self.config.devices[device.0 as usize].properties.peers.contains(&peer))
    }
}
