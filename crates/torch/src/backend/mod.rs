//! The operations of PyTorch's own allocator class beyond allocating and freeing: pools with PyTorch's ids and filters,
//! call stacks that PyTorch collects, annotations, pinned memory, and memory of other processes. The C++ layer
//! (`python/warpool/cpp`) calls it through `abi/`.

mod annotations;
mod contexts;
mod direct;
mod filter;
mod pinned;
mod relaxed;
mod routing;
mod sharing;
mod upstream;

pub(crate) use annotations::Annotations;
pub(crate) use contexts::{CollectContext, Contexts, ReleaseContext, context_of};
pub(crate) use direct::Direct;
pub(crate) use filter::Filter;
pub(crate) use pinned::PinnedMemory;
pub(crate) use routing::Routing;
pub(crate) use sharing::{MappedBlock, Sharing};
pub(crate) use upstream::CallbackUpstream;
