//! The tags of the process's allocator, and the scopes that C callers have opened.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::ThreadId;

use warpool::memory::pools::{PoolOptions, PrivatePools};
use warpool::memory::report::Snapshot;
use warpool::memory::sleep::{Keep, SleepReport, Tag, TagInfo, TagScope};
use warpool::memory::{DeviceAllocator, HostAllocator, MemPoolId, Tags};
use warpool::{Device, Error as WarpoolError};
use warpool_driver::DeviceId;

use crate::allocator;
use crate::error::{Error, Result};

/// How many bytes a tag's name has at most.
pub(crate) const NAME_BYTES_MAX: usize = 63;

/// Created by the first call that needs it, since most programs have no tags.
#[derive(Debug, Default)]
pub(crate) struct ProcessTags {
    tags: OnceLock<Tags>,
    scopes: Mutex<Scopes>,
}

#[derive(Debug, Default)]
struct Scopes {
    next: u64,
    open: BTreeMap<u64, OpenScope>,
}

#[derive(Debug)]
struct OpenScope {
    thread: ThreadId,
    device: DeviceId,
    tag: String,
    _scope: TagScope,
}

impl ProcessTags {
    fn get(&self, allocator: &Arc<dyn DeviceAllocator>, host: &HostAllocator) -> Result<&Tags> {
        if let Some(tags) = self.tags.get() {
            return Ok(tags);
        }
        let tags = match Tags::new(allocator, host) {
            Err(WarpoolError::Unsupported { .. }) => {
                return Err(Error::CannotSleep { backend: allocator::backend(&**allocator) });
            }
            other => other?,
        };
        Ok(self.tags.get_or_init(|| tags))
    }

    /// The tag with that name.
    pub(crate) fn tag(
        &self,
        allocator: &Arc<dyn DeviceAllocator>,
        host: &HostAllocator,
        device: &Device,
        name: &str,
    ) -> Result<Tag> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(Error::TagName { length: name.len() });
        }
        Ok(self.get(allocator, host)?.tag(device, name)?)
    }

    /// Opens a scope for the calling thread.
    pub(crate) fn begin(
        &self,
        allocator: &Arc<dyn DeviceAllocator>,
        host: &HostAllocator,
        device: &Device,
        tag: &str,
    ) -> Result<u64> {
        let scope = self.tag(allocator, host, device, tag)?.enter()?;
        let mut scopes = self.scopes.lock().unwrap_or_else(PoisonError::into_inner);
        scopes.next += 1;
        let number = scopes.next;
        let (thread, tag) = (std::thread::current().id(), tag.to_owned());
        scopes.open.insert(number, OpenScope { thread, device: device.id(), tag, _scope: scope });
        Ok(number)
    }

    /// The tag that requests of the calling thread on a device carry.
    pub(crate) fn current(&self, device: DeviceId) -> Option<String> {
        // Most programs have none.
        self.tags.get()?;
        let thread = std::thread::current().id();
        let scopes = self.scopes.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = scopes.open.values().rfind(|open| (open.thread, open.device) == (thread, device));
        newest.map(|open| open.tag.clone())
    }

    /// Makes a pool for PyTorch. If the calling thread is in the scope of a tag and the pool has no upstream of its
    /// own, its memory carries the tag, as does the memory of graphs captured in such a scope.
    pub(crate) fn make_pool(
        &self,
        pools: &dyn PrivatePools,
        device: &Device,
        options: PoolOptions,
    ) -> Result<MemPoolId> {
        match (self.tags.get(), self.current(device.id())) {
            (Some(tags), Some(tag)) if options.upstream.is_none() => Ok(tags.make_pool(device, &tag, |upstream| {
                pools.create_pool(device.id(), PoolOptions { upstream: Some(upstream), ..options })
            })?),
            _ => Ok(pools.create_pool(device.id(), options)?),
        }
    }

    /// Makes a pool for a graph. Its memory carries the tag, if there is one.
    pub(crate) fn make_graph_pool(
        &self,
        pools: &dyn PrivatePools,
        device: &Device,
        tag: Option<&str>,
    ) -> Result<MemPoolId> {
        match (self.tags.get(), tag) {
            (Some(tags), Some(tag)) => Ok(tags.make_pool(device, tag, |upstream| {
                pools.create_pool(device.id(), PoolOptions { upstream: Some(upstream), ..PoolOptions::default() })
            })?),
            _ => Ok(pools.create_graph_pool(device.id())?),
        }
    }

    pub(crate) fn end(&self, scope: u64) -> Result<()> {
        let closed = self.scopes.lock().unwrap_or_else(PoisonError::into_inner).open.remove(&scope);
        closed.map(drop).ok_or(Error::TagNotOpen)
    }

    /// All tags if none are named. Without any tag there is nothing to do.
    fn with<R>(&self, tags: Option<&[&str]>, call: impl FnOnce(&Tags, &[&str]) -> warpool::Result<R>) -> Result<R>
    where
        R: Default,
    {
        let Some(all) = self.tags.get() else {
            return match tags.and_then(<[&str]>::first) {
                Some(&tag) => Err(WarpoolError::UnknownTag { tag: tag.to_owned(), known: Vec::new() }.into()),
                None => Ok(R::default()),
            };
        };
        let names = all.names();
        let every: Vec<&str> = names.iter().map(String::as_str).collect();
        Ok(call(all, tags.unwrap_or(&every))?)
    }

    pub(crate) fn prepare(&self, tags: Option<&[&str]>) -> Result<u64> {
        self.with(tags, Tags::prepare)
    }

    pub(crate) fn sleep(&self, tags: Option<&[&str]>, keep: Keep) -> Result<SleepReport> {
        self.with(tags, |all, tags| all.sleep(tags, keep))
    }

    pub(crate) fn wake(&self, tags: Option<&[&str]>) -> Result<SleepReport> {
        self.with(tags, Tags::wake)
    }

    pub(crate) fn info(&self) -> Vec<TagInfo> {
        self.tags.get().map(Tags::info).unwrap_or_default()
    }

    /// Adds the times at which tags fell asleep and woke.
    pub(crate) fn add_to(&self, snapshot: &mut Snapshot) {
        if let Some(tags) = self.tags.get() {
            tags.add_to(snapshot);
        }
    }
}
