//! Copies and fills.
//!
//! Every copy says its direction. CUDA could find it out from the addresses, but would then take an unknown one for
//! ordinary host memory, and write there. The pinned ranges are held during the call, so that none is freed between the
//! check and the copy's start.

use std::ffi::c_void;

use warpool_driver::{Address, Call, Copies, DeviceId, DevicePtr, Pattern, Result, StreamId};

use crate::CudaDriver;
use crate::host::{check_pinned, pointer_to};
use crate::stream::{Stream, StreamKind};

impl Copies for CudaDriver {
    fn copy(&self, dst: Address, src: Address, bytes: u64, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::Copy)?;
        let stream = self.stream(site, stream)?;
        let pinned = self.pinned.hold();
        for side in [dst, src] {
            if let Address::Host(ptr) = side {
                check_pinned(site, &pinned, ptr, bytes)?;
            }
        }
        let _current = self.on_stream(site, &stream)?;
        let (count, queue) = (bytes as usize, stream.raw.raw());
        site.check(match (dst, src) {
            (Address::Device(dst), Address::Device(src)) => {
                // SAFETY: addresses of the device, which CUDA checks.
                unsafe { (self.api.memcpy_dtod_async)(dst.0, src.0, count, queue) }
            }
            (Address::Device(dst), Address::Host(src)) => {
                // SAFETY: the source is pinned, and freeing it waits for the device; CUDA checks the target.
                unsafe { (self.api.memcpy_htod_async)(dst.0, pointer_to(src), count, queue) }
            }
            (Address::Host(dst), Address::Device(src)) => {
                // SAFETY: the target is pinned, and freeing it waits for the device; CUDA checks the source.
                unsafe { (self.api.memcpy_dtoh_async)(pointer_to(dst), src.0, count, queue) }
            }
            (Address::Host(dst), Address::Host(src)) => {
                // SAFETY: both are pinned; with unified addressing they are addresses for CUDA as they are.
                unsafe { (self.api.memcpy_async)(dst.0, src.0, count, queue) }
            }
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
        let site = self.enter(Call::CopyPeer)?;
        let stream = self.stream(site, stream)?;
        let (to, from) = (self.context_of(site, dst_device)?, self.context_of(site, src_device)?);
        let _current = self.on_stream(site, &stream)?;
        // SAFETY: live contexts, and addresses of the devices, which CUDA checks.
        site.check(unsafe {
            (self.api.memcpy_peer_async)(dst.0, to.raw(), src.0, from.raw(), bytes as usize, stream.raw.raw())
        })
    }

    fn fill(&self, dst: DevicePtr, pattern: Pattern, count: u64, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::Fill)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        let (count, queue) = (count as usize, stream.raw.raw());
        site.check(match pattern {
            // SAFETY: an address of the device, which CUDA checks, as for the other two.
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
        let from = bytes.as_ptr().cast::<c_void>();
        // SAFETY: the slice is readable; CUDA checks the address on the device.
        site.check(unsafe { (self.api.memcpy_htod)(dst.0, from, bytes.len()) })?;
        // CUDA returns as soon as the bytes are staged; a stream that ignores the default one could still see the old.
        // Waiting is allowed in spite of other streams' captures: the copy was, and nothing else is waited for.
        let _relaxed = self.relax(site)?;
        let queue = Stream::default_of(device, StreamKind::Legacy).raw;
        // SAFETY: the default stream of the current context.
        site.check(unsafe { (self.api.stream_synchronize)(queue.raw()) })
    }

    fn download(&self, device: DeviceId, src: DevicePtr, into: &mut [u8]) -> Result<()> {
        let site = self.enter(Call::Download)?;
        let _current = self.on_device(site, device)?;
        let to = into.as_mut_ptr().cast::<c_void>();
        // SAFETY: the slice is writable and CUDA is done with it on return; CUDA checks the address on the device.
        site.check(unsafe { (self.api.memcpy_dtoh)(to, src.0, into.len()) })
    }
}
