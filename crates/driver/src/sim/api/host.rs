//! Pinned host memory of the simulated machine: real memory of this process, with a history.

use crate::sim::SimDriver;
use crate::sim::memory::{Bytes, Gone, HostBytes, Region, Tomb, Toucher};
use crate::sim::order::{Actor, Label, Order};
use crate::sim::world::World;
use crate::{Call, DeviceId, DevicePtr, ErrorCode, HostMemory, HostOptions, HostPtr, HostRange, Result, StreamId};

impl HostMemory for SimDriver {
    fn host_alloc(&self, device: DeviceId, bytes: u64, _options: HostOptions) -> Result<HostPtr> {
        self.call(Call::HostAlloc, |world| {
            world.device(device)?;
            if bytes == 0 {
                return world.fail(ErrorCode::InvalidValue, "0 bytes cannot be pinned");
            }
            let Some(host) = HostBytes::allocate(bytes) else {
                return world.fail(ErrorCode::OutOfMemory, "the host does not have that much memory");
            };
            let start = host.start();
            if !world.memory.space.is_free(start, bytes) {
                return world.fail(ErrorCode::OutOfMemory, "device memory was placed where the host has its own");
            }
            world.spend(bytes);
            world.pin(device, start, bytes, Bytes::Host(host), false);
            Ok(HostPtr(start))
        })
    }

    fn host_free(&self, ptr: HostPtr) -> Result<()> {
        let world = self.enter(Call::HostFree)?;
        match world.memory.space.regions.get(&ptr.0) {
            Some((_, Region::Pinned { registered: false, .. })) => self.unpin(world, ptr),
            _ => world.fail(ErrorCode::InvalidValue, format!("{ptr} starts no pinned allocation")),
        }
    }

    fn host_register(&self, device: DeviceId, range: HostRange, _options: HostOptions) -> Result<()> {
        self.call(Call::HostRegister, |world| {
            world.device(device)?;
            let (start, bytes) = (range.ptr().0, range.bytes());
            if !world.config.devices[device.0 as usize].properties.host_registration {
                return world.fail(ErrorCode::NotSupported, format!("{device} cannot pin memory where it is"));
            }
            if bytes == 0 {
                return world.fail(ErrorCode::InvalidValue, "0 bytes cannot be pinned");
            }
            if !world.memory.space.is_free(start, bytes) {
                return world.fail(
                    ErrorCode::HostMemoryAlreadyRegistered,
                    format!("some of {ptr} is pinned", ptr = range.ptr()),
                );
            }
            let Some(kept) = range.claim() else {
                return world.fail(
                    ErrorCode::HostMemoryAlreadyRegistered,
                    format!("another driver has {ptr} pinned", ptr = range.ptr()),
                );
            };
            world.spend(bytes);
            world.pin(device, start, bytes, Bytes::Host(HostBytes::borrowed(kept)), true);
            Ok(())
        })
    }

    fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        let world = self.enter(Call::HostUnregister)?;
        match world.memory.space.region_at(ptr.0) {
            Some((start, _, Region::Pinned { registered: true, .. })) if start == ptr.0 => self.unpin(world, ptr),
            Some((_, _, Region::Pinned { .. })) => {
                world.fail(ErrorCode::InvalidValue, format!("{ptr} does not start a registered range"))
            }
            _ => world.fail(ErrorCode::HostMemoryNotRegistered, format!("{ptr} is not pinned")),
        }
    }

    fn host_device_ptr(&self, device: DeviceId, ptr: HostPtr) -> Result<DevicePtr> {
        self.call(Call::HostDevicePtr, |world| {
            world.device(device)?;
            if !world.memory.is_pinned(ptr.0, 1) {
                return world.fail(ErrorCode::InvalidValue, format!("{ptr} is not pinned"));
            }
            Ok(DevicePtr(ptr.0))
        })
    }

    fn host_read(&self, ptr: HostPtr, into: &mut [u8]) -> Result<()> {
        self.call(Call::HostRead, |world| {
            world.check_pinned(ptr, into.len() as u64)?;
            world.spend(into.len() as u64);
            world.as_host(Label::HostRead, |world, by| {
                let read = world.memory.read(DevicePtr(ptr.0), into, by);
                debug_assert!(read.is_ok(), "the range was checked");
            });
            Ok(())
        })
    }

    fn host_write(&self, ptr: HostPtr, bytes: &[u8]) -> Result<()> {
        self.call(Call::HostWrite, |world| {
            world.check_pinned(ptr, bytes.len() as u64)?;
            world.spend(bytes.len() as u64);
            world.as_host(Label::HostWrite, |world, by| {
                let written = world.memory.write(DevicePtr(ptr.0), bytes, by);
                debug_assert!(written.is_ok(), "the range was checked");
            });
            Ok(())
        })
    }
}

impl SimDriver {
    /// Waits for the device that a range was pinned for, then unpins it.
    fn unpin(&self, mut world: std::sync::MutexGuard<'_, World>, ptr: HostPtr) -> Result<()> {
        let device = world.pinned_for(ptr);
        world.device(device)?;
        let mut world = self.wait_for_device(world, device);
        world.device(device)?;
        match world.memory.space.regions.remove(&ptr.0) {
            Some((bytes, Region::Pinned { piece, .. })) => {
                let pinned_by = world.memory.piece(piece).pinned_by;
                let at = world.calls;
                world.memory.drop_piece(piece);
                world.pinned_device.remove(&ptr.0);
                world.memory.space.bury(Tomb { start: ptr.0, bytes, gone: Gone::Freed, at, pinned_by });
                world.spend(bytes);
                Ok(())
            }
            _ => world.fail(ErrorCode::InvalidValue, format!("{ptr} was unpinned by another thread meanwhile")),
        }
    }
}

impl World {
    fn pin(&mut self, device: DeviceId, start: u64, bytes: u64, contents: Bytes, registered: bool) {
        let piece = self.memory.add_piece(bytes, None, contents);
        self.memory.piece_mut(piece).pinned_by = Some(self.calls);
        self.memory.space.insert(start, bytes, Region::Pinned { piece, registered });
        self.pinned_device.insert(start, device);
    }

    fn pinned_for(&self, ptr: HostPtr) -> DeviceId {
        self.pinned_device.get(&ptr.0).copied().expect("every pinned range has its device")
    }

    fn check_pinned(&self, ptr: HostPtr, bytes: u64) -> Result<()> {
        if self.memory.is_pinned(ptr.0, bytes) {
            return Ok(());
        }
        self.fail(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not pinned"))
    }

    /// Touches memory as the host.
    fn as_host(&mut self, label: Label, body: impl FnOnce(&mut Self, &Toucher<'_>)) {
        let stamp = self.host_stamp();
        let base = self.host.clone();
        let who = Actor { label, stamp, point: None, stream: StreamId(0), at: self.calls };
        let order = Order { stamp, base: &base, graph: None };
        let by = Toucher { device: DeviceId(0), who, order, now: self.clock, everywhere: true };
        body(self, &by);
    }
}
