//! Copies and fills.

use std::sync::{Arc, Mutex, PoisonError};

use super::range_check::{RangeUse, check_range};
use crate::sim::cost::Route;
use crate::sim::driver::SimDriver;
use crate::sim::order::{HazardKind, Operation};
use crate::sim::refuse::{refuse, unnamed};
use crate::sim::state::SimState;
use crate::sim::work::Work;
use crate::{Address, Call, Copies, DeviceId, DevicePtr, ErrorCode, Pattern, Result, StreamId};

impl Copies for SimDriver {
    fn copy(&self, dst: Address, src: Address, bytes: u64, stream: StreamId) -> Result<()> {
        self.submit(Call::Copy, stream, |state, stream| {
            let dst = check_address(state, dst, bytes, stream, true)?;
            let src = check_address(state, src, bytes, stream, false)?;
            log_overlap(state, dst, src, bytes, stream);
            state.spend(bytes);
            let route = route(state, dst, src);
            Ok((Work::Copy { dst, src, bytes }, state.config.work.copy_nanos(bytes, route)))
        })
    }

    fn copy_2d(
        &self,
        dst: Address,
        dst_pitch: u64,
        src: Address,
        src_pitch: u64,
        width: u64,
        rows: u64,
        stream: StreamId,
    ) -> Result<()> {
        self.submit(Call::Copy2d, stream, |state, stream| {
            if width > dst_pitch.min(src_pitch) {
                let detail = format!("rows of {width} bytes at pitches of {dst_pitch} and {src_pitch}");
                return refuse(ErrorCode::InvalidValue, detail);
            }
            // From the first byte of the first row to the last byte of the last one.
            let extent = |pitch: u64| match rows.checked_sub(1) {
                Some(gaps) if width > 0 => gaps.checked_mul(pitch).and_then(|bytes| bytes.checked_add(width)),
                _ => Some(0),
            };
            let (Some(dst_bytes), Some(src_bytes)) = (extent(dst_pitch), extent(src_pitch)) else {
                return Err(unnamed(ErrorCode::InvalidValue));
            };
            let dst = check_address(state, dst, dst_bytes, stream, true)?;
            let src = check_address(state, src, src_bytes, stream, false)?;
            let bytes = width.saturating_mul(rows);
            state.spend(bytes);
            let route = route(state, dst, src);
            let work = Work::Copy2d { dst, dst_pitch, src, src_pitch, width, rows };
            Ok((work, state.config.work.copy_nanos(bytes, route)))
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
        self.submit(Call::CopyPeer, stream, |state, stream| {
            state.use_device(dst_device)?;
            state.use_device(src_device)?;
            check_range(state, (dst, bytes), RangeUse::write(dst_device, stream, Operation::Copy))?;
            check_range(state, (src, bytes), RangeUse::read(src_device, stream, Operation::Copy))?;
            log_overlap(state, dst, src, bytes, stream);
            state.spend(bytes);
            Ok((Work::Copy { dst, src, bytes }, state.config.work.copy_nanos(bytes, Route::Peer)))
        })
    }

    fn fill(&self, dst: DevicePtr, pattern: Pattern, count: u64, stream: StreamId) -> Result<()> {
        self.submit(Call::Fill, stream, |state, stream| {
            let Some(bytes) = count.checked_mul(pattern.bytes()) else {
                return Err(unnamed(ErrorCode::InvalidValue));
            };
            if !dst.0.is_multiple_of(pattern.bytes()) {
                return refuse(ErrorCode::InvalidValue, format!("{dst} is not aligned to the pattern"));
            }
            let device = state.scheduler.streams.get(stream).device;
            check_range(state, (dst, bytes), RangeUse::write(device, stream, Operation::Fill))?;
            state.spend(bytes);
            Ok((Work::Fill { dst, pattern, count }, state.config.work.fill_nanos(bytes)))
        })
    }

    fn upload(&self, device: DeviceId, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.copy_synchronously(Call::Upload, device, bytes.len() as u64, |state, stream| {
            check_range(state, (dst, bytes.len() as u64), RangeUse::write(device, stream, Operation::Copy))?;
            Ok(Work::Upload { dst, data: Arc::from(bytes) })
        })
    }

    fn download(&self, device: DeviceId, src: DevicePtr, into: &mut [u8]) -> Result<()> {
        let read = Arc::new(Mutex::new(vec![0; into.len()]));
        self.copy_synchronously(Call::Download, device, into.len() as u64, |state, stream| {
            check_range(state, (src, into.len() as u64), RangeUse::read(device, stream, Operation::Copy))?;
            Ok(Work::Download { src, into: Arc::clone(&read) })
        })?;
        into.copy_from_slice(&read.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }
}

impl SimDriver {
    /// A copy of ordinary host memory in the legacy default stream, which the host waits for.
    fn copy_synchronously(
        &self,
        call: Call,
        device: DeviceId,
        bytes: u64,
        prepare: impl FnOnce(&mut SimState, StreamId) -> Result<Work>,
    ) -> Result<()> {
        self.waiting_call(call, |mut state| {
            state.use_device(device)?;
            let stream = state.scheduler.streams.legacy(device);
            state.forbid_implicit_wait(stream)?;
            let work = prepare(&mut state, stream)?;
            state.spend(bytes);
            let nanos = state.config.work.copy_nanos(bytes, Route::Host);
            let mut state = self.wait_for_queue(state, stream)?;
            let at = state.call_number();
            let point = state.scheduler.enqueue(stream, work, nanos, Vec::new(), at);
            let epoch = point.epoch;
            let mut state = self.wait(state, std::iter::once(epoch), |state| state.scheduler.is_done(epoch));
            state.scheduler.streams.host_observed(&point);
            state.use_device(device)
        })
    }
}

/// The path of a copy.
fn route(state: &SimState, dst: DevicePtr, src: DevicePtr) -> Route {
    match (state.memory.device_at(dst), state.memory.device_at(src)) {
        (Some(to), Some(from)) if to == from => Route::OnDevice,
        (Some(_), Some(_)) => Route::Peer,
        _ => Route::Host,
    }
}

/// Checks the source or target of a copy, and returns it as a device address.
fn check_address(
    state: &mut SimState,
    address: Address,
    bytes: u64,
    stream: StreamId,
    write: bool,
) -> Result<DevicePtr> {
    match address {
        Address::Device(ptr) => {
            let device = state.scheduler.streams.get(stream).device;
            check_range(state, (ptr, bytes), RangeUse { device, write, stream, operation: Operation::Copy })?;
            Ok(ptr)
        }
        Address::Host(ptr) if bytes == 0 || state.memory.is_pinned(ptr, bytes) => Ok(DevicePtr(ptr.0)),
        Address::Host(ptr) => refuse(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not pinned")),
    }
}

/// Logs a copy whose source and target overlap: its result is undefined.
fn log_overlap(state: &mut SimState, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: StreamId) {
    if dst.0 < src.0.saturating_add(bytes) && src.0 < dst.0.saturating_add(bytes) {
        let operation = format!("copy #{} in {stream}", state.call_number());
        let why = format!("source {src} and target {dst} overlap: both have {bytes} bytes");
        state.hazards.add(HazardKind::OverlappingCopy, operation, why, state.scheduler.now());
    }
}
