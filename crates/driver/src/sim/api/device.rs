//! Devices, contexts and peers.

use crate::sim::driver::SimDriver;
use crate::sim::refuse::{refuse, unnamed};
use crate::sim::state::SimState;
use crate::{Call, DeviceId, DeviceProperties, Devices, ErrorCode, RawHandle, Result};

impl Devices for SimDriver {
    fn device_count(&self) -> Result<u32> {
        self.call(Call::DeviceCount, |state| Ok(state.config.devices.len() as u32))
    }

    fn device_properties(&self, device: DeviceId) -> Result<DeviceProperties> {
        self.call(Call::DeviceProperties, |state| {
            state.check_device(device)?;
            Ok(state.config.devices[device.0 as usize].properties.clone())
        })
    }

    fn context_retain(&self, device: DeviceId) -> Result<RawHandle> {
        self.call(Call::ContextRetain, |state| {
            state.check_device(device)?;
            state.contexts[device.0 as usize].retained += 1;
            Ok(RawHandle(0x4000_0000 + u64::from(device.0) * 0x1000))
        })
    }

    fn context_release(&self, device: DeviceId) -> Result<()> {
        self.call(Call::ContextRelease, |state| {
            state.check_device(device)?;
            let context = &mut state.contexts[device.0 as usize];
            match context.retained.checked_sub(1) {
                Some(left) => {
                    context.retained = left;
                    Ok(())
                }
                None => refuse(ErrorCode::InvalidContext, "the context was released more often than retained"),
            }
        })
    }

    fn context_is_active(&self, device: DeviceId) -> Result<bool> {
        self.call(Call::ContextIsActive, |state| {
            state.check_device(device)?;
            let context = state.contexts[device.0 as usize];
            Ok(context.used || context.retained > 0)
        })
    }

    fn current_device(&self) -> Result<Option<DeviceId>> {
        self.call(Call::CurrentDevice, |state| Ok(state.current_devices.get(&std::thread::current().id()).copied()))
    }

    fn set_current_device(&self, device: DeviceId) -> Result<()> {
        self.call(Call::SetCurrentDevice, |state| {
            state.use_device(device)?;
            state.current_devices.insert(std::thread::current().id(), device);
            Ok(())
        })
    }

    fn device_synchronize(&self, device: DeviceId) -> Result<()> {
        self.waiting_call(Call::DeviceSynchronize, |mut state| {
            state.use_device(device)?;
            state.forbid_on_capturing_device(device)?;
            self.wait_for_device(state, device).use_device(device)
        })
    }

    fn peer_can_access(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        self.call(Call::PeerCanAccess, |state| are_peers(state, device, peer))
    }

    fn peer_enable(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.call(Call::PeerEnable, |state| {
            if !are_peers(state, device, peer)? {
                return refuse(ErrorCode::PeerAccessUnsupported, format!("{device} cannot reach {peer}"));
            }
            state.use_device(device)?;
            state.use_device(peer)?;
            if !state.memory.enable_peer(device, peer) {
                return Err(unnamed(ErrorCode::PeerAccessAlreadyEnabled));
            }
            Ok(())
        })
    }

    fn peer_disable(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.call(Call::PeerDisable, |state| {
            state.check_device(peer)?;
            state.use_device(device)?;
            if !state.memory.disable_peer(device, peer) {
                return Err(unnamed(ErrorCode::PeerAccessNotEnabled));
            }
            Ok(())
        })
    }
}

fn are_peers(state: &SimState, device: DeviceId, peer: DeviceId) -> Result<bool> {
    state.check_device(device)?;
    state.check_device(peer)?;
    Ok(state.config.devices[device.0 as usize].properties.peers.contains(&peer))
}
