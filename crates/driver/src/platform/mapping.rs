//! Zeroed memory of this process that is aligned to a page. Where the system maps memory it provides a page when that
//! is first accessed. Elsewhere it is memory of the global allocator.

pub(crate) use target::Mapping;

#[cfg(any(unix, windows))]
mod target {
    use std::io;

    use memmap2::{MmapOptions, MmapRaw};

    /// An anonymous mapping, private to this process.
    #[derive(Debug)]
    pub(crate) struct Mapping(MmapRaw);

    impl Mapping {
        /// Maps `bytes` bytes, at most `isize::MAX`.
        pub(crate) fn new(bytes: usize) -> io::Result<Self> {
            Ok(Self(MmapRaw::from(MmapOptions::new().len(bytes).map_anon()?)))
        }

        /// Its start.
        pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
            self.0.as_mut_ptr()
        }

        /// Requests huge pages for a part of it. On failure, and where that cannot be requested, the system provides
        /// small ones.
        pub(crate) fn advise_huge(&self, offset: usize, bytes: usize) {
            #[cfg(all(target_os = "linux", not(miri)))]
            let _ = self.0.advise_range(memmap2::Advice::HugePage, offset, bytes);
            #[cfg(not(all(target_os = "linux", not(miri))))]
            let _ = (offset, bytes);
        }
    }
}

#[cfg(not(any(unix, windows)))]
mod target {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::io;
    use std::ptr::NonNull;

    const PAGE: usize = 4096;

    /// Memory of the global allocator.
    #[derive(Debug)]
    pub(crate) struct Mapping {
        start: NonNull<u8>,
        layout: Layout,
    }

    // SAFETY: as a mapping: it owns its memory and accesses none of it.
    unsafe impl Send for Mapping {}
    // SAFETY: as above.
    unsafe impl Sync for Mapping {}

    impl Mapping {
        pub(crate) fn new(bytes: usize) -> io::Result<Self> {
            let layout = Layout::from_size_align(bytes, PAGE).ok().filter(|layout| layout.size() > 0);
            let layout = layout.ok_or(io::ErrorKind::InvalidInput)?;
            // SAFETY: the size is not 0.
            let start = unsafe { alloc_zeroed(layout) };
            let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
            Ok(Self { start, layout })
        }

        pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
            self.start.as_ptr()
        }

        pub(crate) fn advise_huge(&self, _offset: usize, _bytes: usize) {}
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: it came from `alloc_zeroed` with this layout, and nothing uses it any more.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}
