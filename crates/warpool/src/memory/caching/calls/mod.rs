//! The calls of [`CachingAllocator`](super::CachingAllocator), by subject.

mod allocate_at;
mod allocator;
mod annotate;
mod checkpoint;
mod direct;
mod mapped_parts;
mod peer_access;
mod pools;
