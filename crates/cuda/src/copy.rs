//! Copies and fills.
//!
//! Every range is checked (`range_check.rs`) and every copy states its direction. CUDA could infer it from the
//! addresses, but takes an unknown address for ordinary host memory, and would write there. Pinned ranges cannot be
//! unpinned between the check and the copy's start.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};
use warpool_driver::{Address, Call, Copies, DeviceId, DevicePtr, ErrorCode, Pattern, Result, StreamId};

use crate::CudaDriver;
use crate::host::pointer_to;
use crate::stream::{Stream, StreamKind};

impl Copies for CudaDriver {
    fn copy(&self, dst: Address, src: Address, bytes: u64, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::Copy)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        let mut checked = self.check_ranges(site);
        checked.address(dst, bytes)?;
        checked.address(src, bytes)?;
        let _work = self.begin_work(site, &stream, stream.lock_work());
        let (count, queue) = (bytes as usize, stream.raw.raw());
        site.check(match (dst, src) {
            (Address::Device(dst), Address::Device(src)) => {
                // SAFETY: both ranges are device memory or pinned; the stream is live.
                unsafe { (self.api.memcpy_dtod_async)(dst.0, src.0, count, queue) }
            }
            (Address::Device(dst), Address::Host(src)) => {
                // SAFETY: as above; the source is pinned, and unpinning it waits for the stream.
                unsafe { (self.api.memcpy_htod_async)(dst.0, pointer_to(src), count, queue) }
            }
            (Address::Host(dst), Address::Device(src)) => {
                // SAFETY: as above; the target is pinned, and unpinning it waits for the stream.
                unsafe { (self.api.memcpy_dtoh_async)(pointer_to(dst), src.0, count, queue) }
            }
            (Address::Host(dst), Address::Host(src)) => {
                // SAFETY: both are pinned; with unified addressing CUDA takes them as they are.
                unsafe { (self.api.memcpy_async)(dst.0, src.0, count, queue) }
            }
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
        let site = self.enter(Call::Copy2d)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        if width > dst_pitch.min(src_pitch) {
            let detail = format!("rows of {width} bytes at pitches of {dst_pitch} and {src_pitch}");
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        // From the first byte of the first row to the last byte of the last one.
        let extent = |pitch: u64| match rows.checked_sub(1) {
            Some(gaps) if width > 0 => gaps.checked_mul(pitch).and_then(|bytes| bytes.checked_add(width)),
            _ => Some(0),
        };
        let too_large = || site.error(ErrorCode::InvalidValue);
        let mut checked = self.check_ranges(site);
        checked.address(dst, extent(dst_pitch).ok_or_else(too_large)?)?;
        checked.address(src, extent(src_pitch).ok_or_else(too_large)?)?;
        if width == 0 || rows == 0 {
            return Ok(());
        }
        let copy = rows_copy((dst, dst_pitch), (src, src_pitch), width, rows);
        let _work = self.begin_work(site, &stream, stream.lock_work());
        // SAFETY: all rows are device memory or pinned, and unpinning waits for the stream; CUDA reads the structure
        // before it returns; the stream is live.
        site.check(unsafe { (self.api.memcpy_2d_async)(&raw const copy, stream.raw.raw()) })
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
        let site = self.enter(Call::CopyPeer)?;
        let stream = self.stream(site, stream)?;
        let (to, from) = (self.context_of(site, dst_device)?, self.context_of(site, src_device)?);
        let _current = self.on_stream(site, &stream)?;
        let mut checked = self.check_ranges(site);
        checked.device(dst, bytes)?;
        checked.device(src, bytes)?;
        let _work = self.begin_work(site, &stream, stream.lock_work());
        // SAFETY: both ranges are device memory or pinned; contexts and stream are live.
        site.check(unsafe {
            (self.api.memcpy_peer_async)(dst.0, to.raw(), src.0, from.raw(), bytes as usize, stream.raw.raw())
        })
    }

    fn fill(&self, dst: DevicePtr, pattern: Pattern, count: u64, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::Fill)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        let bytes = count.checked_mul(pattern.bytes()).ok_or_else(|| site.error(ErrorCode::InvalidValue))?;
        let mut checked = self.check_ranges(site);
        checked.device(dst, bytes)?;
        let _work = self.begin_work(site, &stream, stream.lock_work());
        let (count, queue) = (count as usize, stream.raw.raw());
        site.check(match pattern {
            // SAFETY: the range is device memory or pinned, and the stream is live; the same for the other two.
            Pattern::U8(value) => unsafe { (self.api.memset_d8_async)(dst.0, value, count, queue) },
            // SAFETY: as above.
            Pattern::U16(value) => unsafe { (self.api.memset_d16_async)(dst.0, value, count, queue) },
            // SAFETY: as above.
            Pattern::U32(value) => unsafe { (self.api.memset_d32_async)(dst.0, value, count, queue) },
        })
    }

    fn upload(&self, device: DeviceId, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        let site = self.enter(Call::Upload)?;
        let _current = self.on_device(site, device)?;
        let mut checked = self.check_ranges(site);
        checked.device(dst, bytes.len() as u64)?;
        let from = bytes.as_ptr().cast::<c_void>();
        // SAFETY: the slice is readable; the target is device memory or pinned.
        site.check(unsafe { (self.api.memcpy_htod)(dst.0, from, bytes.len()) })?;
        // CUDA returns as soon as the bytes are staged; a non-blocking stream could still read the old ones. Waiting is
        // allowed while other streams capture: the copy was, and nothing else is waited for.
        let _relaxed = self.relax_capture_mode(site)?;
        let queue = Stream::default_of(device, StreamKind::Legacy).raw;
        // SAFETY: the default stream of the current context.
        site.check(unsafe { (self.api.stream_synchronize)(queue.raw()) })
    }

    fn download(&self, device: DeviceId, src: DevicePtr, into: &mut [u8]) -> Result<()> {
        let site = self.enter(Call::Download)?;
        let _current = self.on_device(site, device)?;
        let mut checked = self.check_ranges(site);
        checked.device(src, into.len() as u64)?;
        let to = into.as_mut_ptr().cast::<c_void>();
        // SAFETY: the slice is writable, and CUDA has written it on return; the source is device memory or pinned.
        site.check(unsafe { (self.api.memcpy_dtoh)(to, src.0, into.len()) })
    }
}

/// A 2D copy as CUDA takes it.
fn rows_copy(
    (dst, dst_pitch): (Address, u64),
    (src, src_pitch): (Address, u64),
    width: u64,
    rows: u64,
) -> CUDA_MEMCPY2D {
    let parts = |address| match address {
        Address::Device(ptr) => (CUmemorytype::CU_MEMORYTYPE_DEVICE, ptr::null_mut(), ptr.0),
        Address::Host(ptr) => (CUmemorytype::CU_MEMORYTYPE_HOST, pointer_to(ptr), 0),
    };
    let ((src_type, src_host, src_device), (dst_type, dst_host, dst_device)) = (parts(src), parts(dst));
    CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: src_type,
        srcHost: src_host.cast_const(),
        srcDevice: src_device,
        srcArray: ptr::null_mut(),
        srcPitch: src_pitch as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: dst_type,
        dstHost: dst_host,
        dstDevice: dst_device,
        dstArray: ptr::null_mut(),
        dstPitch: dst_pitch as usize,
        WidthInBytes: width as usize,
        Height: rows as usize,
    }
}
