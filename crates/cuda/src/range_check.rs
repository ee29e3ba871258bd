//! Checks that the memory of a call exists, and is device memory or pinned host memory.
//!
//! Without the check a wrong address would be accessed: where devices can access ordinary host memory (HMM, Grace),
//! that is any memory of the process. Memory that this driver allocated, mapped or pinned is found in one lookup. For
//! other addresses CUDA is queried, so that memory of other libraries works.

use std::sync::RwLockReadGuard;

use cudarc::driver::sys::CUpointer_attribute_enum as Attribute;
use warpool_driver::{Address, DevicePtr, ErrorCode, HostPtr, Result};

use crate::CudaDriver;
use crate::device_ranges::Lookup;
use crate::error::CallSite;
use crate::host::Pinned;
use crate::range_map::RangeMap;
use crate::sync::read;

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: u64 = 1;
const DEVICE: u64 = 2;

/// The checks of one call. Pinned memory that was checked stays pinned until this is dropped.
pub(crate) struct RangeCheck<'a> {
    driver: &'a CudaDriver,
    site: CallSite<'a>,
    pinned: Option<RwLockReadGuard<'a, RangeMap<Pinned>>>,
}

impl CudaDriver {
    /// Starts the checks of a call. A context must be current.
    pub(crate) const fn check_ranges<'a>(&'a self, site: CallSite<'a>) -> RangeCheck<'a> {
        RangeCheck { driver: self, site, pinned: None }
    }

    /// Whether all of a range is device memory, by CUDA's account. A context must be current.
    pub(crate) fn is_cuda_memory(&self, ptr: DevicePtr, bytes: u64) -> bool {
        let attribute = |attribute| self.pointer_attribute(ptr, attribute);
        let is_device = attribute(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) == Some(DEVICE)
            || attribute(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED).is_some_and(|managed| managed != 0);
        let end = ptr.0.checked_add(bytes);
        let range = attribute(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
            .zip(attribute(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE));
        is_device && range.zip(end).is_some_and(|((start, size), end)| start <= ptr.0 && end - start <= size)
    }

    fn pointer_attribute(&self, ptr: DevicePtr, attribute: Attribute) -> Option<u64> {
        // Attributes have 4 or 8 bytes; the machine is little-endian.
        let mut value = 0_u64;
        // SAFETY: CUDA writes at most 8 bytes to `value`. Any address may be queried.
        let code = unsafe { (self.api.pointer_get_attribute)((&raw mut value).cast(), attribute, ptr.0) };
        (code == 0).then_some(value)
    }
}

impl RangeCheck<'_> {
    /// `InvalidValue` unless the range is device memory or pinned, according to the address.
    pub(crate) fn address(&mut self, address: Address, bytes: u64) -> Result<()> {
        match address {
            Address::Device(ptr) => self.device(ptr, bytes),
            Address::Host(ptr) => self.host(ptr, bytes),
        }
    }

    /// `InvalidValue` unless the range is device memory, or pinned memory by its device address.
    pub(crate) fn device(&mut self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        match self.driver.device_ranges.find(ptr.0, bytes) {
            Lookup::Inside => Ok(()),
            Lookup::Overruns(end) => {
                let detail = format!("{bytes} bytes at {ptr}: the memory ends at {end:#x}");
                Err(self.site.explain(ErrorCode::InvalidValue, detail))
            }
            Lookup::Unknown => self.unknown_device(ptr, bytes),
        }
    }

    /// `InvalidValue` unless the range is pinned.
    pub(crate) fn host(&mut self, ptr: HostPtr, bytes: u64) -> Result<()> {
        if bytes == 0 || self.is_pinned(ptr.0, bytes) {
            return Ok(());
        }
        Err(self.site.explain(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not pinned")))
    }

    #[cold]
    fn unknown_device(&mut self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        if self.is_pinned(ptr.0, bytes) || self.driver.is_cuda_memory(ptr, bytes) {
            return Ok(());
        }
        // Registered memory may have another address on the device.
        if self.driver.pointer_attribute(ptr, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) == Some(HOST)
            && let Some(host) = self.driver.pointer_attribute(ptr, Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER)
            && self.is_pinned(host, bytes)
        {
            return Ok(());
        }
        let detail = format!("{bytes} bytes at {ptr} are not memory of a device, nor pinned by this driver");
        Err(self.site.explain(ErrorCode::InvalidValue, detail))
    }

    fn is_pinned(&mut self, address: u64, bytes: u64) -> bool {
        let pinned = self.pinned.get_or_insert_with(|| read(&self.driver.pinned));
        pinned.containing(address, bytes).is_some()
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::{Copies, Driver, HostMemory, HostOptions, Memory, Pattern, StreamOptions, Streams};

    use super::*;
    use crate::fake_cuda::{self, DEVICE as FIRST};

    fn code(result: Result<()>) -> Option<ErrorCode> {
        result.err().map(|error| error.code)
    }

    #[test]
    fn copies_and_fills_check_their_ranges() -> Result<()> {
        let driver = fake_cuda::driver();
        let stream = driver.stream_create(FIRST, StreamOptions::default())?;
        let (ptr, next) = (driver.mem_alloc(FIRST, 4096)?, driver.mem_alloc(FIRST, 4096)?);
        assert_eq!(ptr.offset(4096), next, "two adjacent allocations");
        let pinned = driver.host_alloc(FIRST, 4096, HostOptions::default())?;
        let ordinary = vec![0_u8; 4096];
        let outside = DevicePtr(ordinary.as_ptr().addr() as u64);
        let refused = Some(ErrorCode::InvalidValue);

        for (address, bytes, expected) in [
            (ptr, 4096, None),
            (ptr.offset(4095), 1, None),
            (ptr, 4097, refused),
            (ptr.offset(4095), 2, refused),
            (DevicePtr(pinned.0), 4096, None),
            (DevicePtr(pinned.0), 4097, refused),
            (outside, 16, refused),
            (outside, 0, None),
            (ptr, u64::MAX, refused),
        ] {
            let check = |result| assert_eq!(code(result), expected, "{bytes} bytes at {address}");
            check(driver.fill(address, Pattern::U8(1), bytes, stream));
            check(driver.copy(address.into(), address.into(), bytes, stream));
            check(driver.copy_peer(address, FIRST, address, FIRST, bytes, stream));
            if bytes < 8192 {
                check(driver.upload(FIRST, address, &vec![0; bytes as usize]));
                check(driver.download(FIRST, address, &mut vec![0; bytes as usize]));
            }
        }
        assert_eq!(code(driver.fill(ptr, Pattern::U32(1), 1024, stream)), None);
        assert_eq!(code(driver.fill(ptr, Pattern::U32(1), 1025, stream)), refused);
        assert_eq!(code(driver.fill(ptr, Pattern::U16(1), u64::MAX, stream)), refused);
        assert_eq!(code(driver.copy(HostPtr(outside.0).into(), ptr.into(), 16, stream)), refused);
        assert_eq!(code(driver.copy(pinned.offset(16).into(), ptr.into(), 4096, stream)), refused);

        driver.mem_free(ptr)?;
        assert_eq!(code(driver.fill(ptr, Pattern::U8(1), 1, stream)), refused);
        driver.host_free(pinned)?;
        assert_eq!(code(driver.fill(DevicePtr(pinned.0), Pattern::U8(1), 1, stream)), refused);
        Ok(())
    }

    #[test]
    fn memory_of_others_is_found_by_cuda() -> Result<()> {
        let driver = fake_cuda::driver();
        let stream = driver.stream_create(FIRST, StreamOptions::default())?;
        assert!(!driver.is_device_memory(DevicePtr(1), 1), "CUDA is not queried without a context");
        let own = driver.mem_alloc(FIRST, 256)?;
        let device = fake_cuda::foreign_memory(4096, DEVICE);
        let host = fake_cuda::foreign_memory(4096, HOST);
        for (address, bytes, works) in [
            (own, 256, true),
            (own, 257, false),
            (device, 4096, true),
            (device.offset(1), 4095, true),
            (device.offset(1), 4096, false),
            (host, 16, false),
        ] {
            assert_eq!(code(driver.fill(address, Pattern::U8(1), bytes, stream)).is_none(), works, "{bytes} {address}");
            assert_eq!(driver.is_device_memory(address, bytes), works);
        }
        Ok(())
    }
}
