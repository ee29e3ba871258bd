//! Device memory from anybody's functions: a Rust type, closures, or C functions written for PyTorch.
//!
//! - [`ExternalAllocator`] is what they have to offer: two functions, and hooks that may be there.
//! - [`PluggableAllocator`] makes a device allocator of a plug. It caches nothing, and keeps all books.
//! - [`ExternalUpstream`] makes it the source of one pool of a caching allocator.
//! - [`CurrentAllocator`] is the place for the program's one allocator, plugged or not.

mod allocator;
mod claims;
mod closures;
mod current;
mod fetch;
mod plug;
mod pools;
mod release;
mod upstream;

pub use allocator::PluggableAllocator;
pub use closures::FnAllocator;
pub use current::CurrentAllocator;
pub use plug::{BaseAllocation, ExternalAllocator, Handled, RawStream};
pub use upstream::ExternalUpstream;
