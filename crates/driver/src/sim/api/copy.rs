//! Copies and fills of the simulated machine.

use std::sync::{Arc, Mutex, PoisonError};

use crate::sim::SimDriver;
use crate::sim::cost::Route;
use crate::sim::memory::{Fault, Region};
use crate::sim::order::{Actor, HazardKind, Label, Stamp};
use crate::sim::work::Work;
use crate::sim::world::World;
use crate::{Address, Call, Copies, DeviceId, DevicePtr, ErrorCode, Pattern, Result, StreamId};

impl Copies for SimDriver {
    fn copy(&self, dst: Address, src: Address, bytes: u64, stream: StreamId) -> Result<()> {
        self.submit(Call::Copy, stream, |world, stream| {
            let dst = world.copy_end(dst, bytes, stream, true)?;
            let src = world.copy_end(src, bytes, stream, false)?;
            world.note_overlap(dst, src, bytes, stream);
            world.spend(bytes);
            let route = world.route(dst, src);
            Ok((Work::Copy { dst, src, bytes }, world.config.work.copy_nanos(bytes, route)))
        })
    }

    fn copy_peer(
        &self,
        dst: DevicePtr,
        dst_device: DeviceId,
        src: DevicePtr,
        src_device: DeviceId,
        bytes: u64,
        stream: StreamId,
    ) -> Result<()> {
        self.submit(Call::CopyPeer, stream, |world, stream| {
            world.device(dst_device)?;
            world.device(src_device)?;
            world.check_range(dst, bytes, dst_device, true, stream)?;
            world.check_range(src, bytes, src_device, false, stream)?;
            world.note_overlap(dst, src, bytes, stream);
            world.spend(bytes);
            Ok((Work::Copy { dst, src, bytes }, world.config.work.copy_nanos(bytes, Route::Peer)))
        })
    }

    fn fill(&self, dst: DevicePtr, pattern: Pattern, count: u64, stream: StreamId) -> Result<()> {
        self.submit(Call::Fill, stream, |world, stream| {
            let Some(bytes) = count.checked_mul(pattern.bytes()) else {
                return Err(world.error(ErrorCode::InvalidValue));
            };
            if !dst.0.is_multiple_of(pattern.bytes()) {
                return world.fail(ErrorCode::InvalidValue, format!("{dst} is not aligned to the pattern"));
            }
            let device = world.stream(stream).device;
            world.check_range(dst, bytes, device, true, stream)?;
            world.spend(bytes);
            Ok((Work::Fill { dst, pattern, count }, world.config.work.fill_nanos(bytes)))
        })
    }

    fn upload(&self, device: DeviceId, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.synchronous(Call::Upload, device, |world, stream| {
            world.check_range(dst, bytes.len() as u64, device, true, stream)?;
            world.spend(bytes.len() as u64);
            Ok(Work::Upload { dst, data: Arc::from(bytes) })
        })
    }

    fn download(&self, device: DeviceId, src: DevicePtr, into: &mut [u8]) -> Result<()> {
        let landing = Arc::new(Mutex::new(vec![0; into.len()]));
        self.synchronous(Call::Download, device, |world, stream| {
            world.check_range(src, into.len() as u64, device, false, stream)?;
            world.spend(into.len() as u64);
            Ok(Work::Download { src, into: Arc::clone(&landing) })
        })?;
        into.copy_from_slice(&landing.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }
}

impl SimDriver {
    /// Work in the legacy default stream that the host waits for.
    fn synchronous(
        &self,
        call: Call,
        device: DeviceId,
        prepare: impl FnOnce(&mut World, StreamId) -> Result<Work>,
    ) -> Result<()> {
        let mut world = self.enter(call)?;
        let stream = world.device(device)?.legacy;
        world.forbid_implicit(stream)?;
        let work = prepare(&mut world, stream)?;
        let nanos = match &work {
            Work::Upload { data, .. } => world.config.work.copy_nanos(data.len() as u64, Route::Host),
            Work::Download { into, .. } => {
                let bytes = into.lock().unwrap_or_else(PoisonError::into_inner).len();
                world.config.work.copy_nanos(bytes as u64, Route::Host)
            }
            _ => 0,
        };
        let mut world = self.wait_for_room(world, stream)?;
        let stamp = world.enqueue(stream, work, nanos, Vec::new());
        let base = Arc::clone(&world.stream(stream).base);
        let mut world = self.wait(world, std::iter::once(stamp), |world| world.is_done(stamp));
        world.host_learns(&base, stamp);
        world.device(device).map(drop)
    }
}

impl World {
    /// One end of a copy, as an address that the device knows.
    fn copy_end(&mut self, end: Address, bytes: u64, stream: StreamId, write: bool) -> Result<DevicePtr> {
        let device = self.stream(stream).device;
        match end {
            Address::Device(ptr) => {
                self.check_range(ptr, bytes, device, write, stream)?;
                Ok(ptr)
            }
            Address::Host(ptr) if bytes == 0 || self.memory.is_pinned(ptr.0, bytes) => Ok(DevicePtr(ptr.0)),
            Address::Host(ptr) => self.fail(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not pinned")),
        }
    }

    /// Logs a copy onto itself: what comes out is not defined.
    fn note_overlap(&mut self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: StreamId) {
        if dst.0 < src.0.saturating_add(bytes) && src.0 < dst.0.saturating_add(bytes) {
            let operation = format!("copy #{} in {stream}", self.calls);
            let why = format!("source {src} and target {dst} share some of the {bytes} bytes");
            self.memory.log.plain(HazardKind::OverlappingCopy, operation, why, self.clock);
        }
    }

    /// Checks that a range can be used by a copy or fill. Using what is gone is a hazard besides.
    fn check_range(
        &mut self,
        ptr: DevicePtr,
        bytes: u64,
        device: DeviceId,
        write: bool,
        stream: StreamId,
    ) -> Result<()> {
        if let Some((start, size, Region::OfGraph { .. })) = self.memory.space.region_at(ptr.0)
            && ptr.0.checked_add(bytes).is_some_and(|end| end <= start + size)
        {
            // Its memory comes and goes with the graph: checked when it runs.
            return Ok(());
        }
        let Err((fault, from)) = self.memory.check(ptr, bytes, device, write, true) else { return Ok(()) };
        let why = match fault {
            Fault::Nothing => "belongs to nothing",
            Fault::Denied => "may not be touched by this device",
            Fault::Gone(_) => "is gone",
        };
        if let Fault::Gone(_) = fault {
            let label = if self.call == Call::Fill { Label::Fill } else { Label::Copy };
            let state = self.stream(stream);
            let stamp = Stamp { lane: state.lane, seq: state.tail + 1 };
            let who = Actor { label, stamp, point: None, stream, at: self.calls };
            self.memory.fault(fault, from, bytes - (from.0 - ptr.0), &who, self.clock);
        }
        self.fail(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr}: {from} {why}"))
    }

    fn route(&self, dst: DevicePtr, src: DevicePtr) -> Route {
        let owner =
            |ptr: DevicePtr| self.memory.space.locate(ptr).and_then(|place| self.memory.piece(place.piece).device);
        match (owner(dst), owner(src)) {
            (Some(to), Some(from)) if to == from => Route::OnDevice,
            (Some(_), Some(_)) => Route::Peer,
            _ => Route::Host,
        }
    }
}
