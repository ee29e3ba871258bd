//! The tags of an allocator: [`Tags`], [`Tag`], and scopes in which requests carry one.

use std::fmt;
use std::sync::Arc;

use warpool_driver::DeviceId;

use super::elastic::{self, TagElastic};
use super::report::{Keep, SleepReport, TagInfo, TagState};
use super::shared::{Shared, TagPool, TagPools};
use super::{going, waking};
use crate::error::SleepCall;
use crate::memory::elastic::{ElasticLayout, ElasticMemory};
use crate::memory::mapped_segments::{MappedSegments, Phase, Sleeping};
use crate::memory::{
    HostAllocator, MemPool, MemPoolId, PoolOptions, Route, ScopeId, SharedAllocator, Snapshot, Upstream,
};
use crate::{Device, Error, Result, Stream, lock};

/// The tags of an allocator, and their memory. Cheap to clone; clones share the same tags.
///
/// A program has one `Tags` per allocator. Its tags exist as long as it does. When the last clone is dropped, their
/// pools are released like any [`MemPool`], and sleeping memory stays asleep until its blocks are freed.
#[derive(Clone)]
pub struct Tags(Arc<Shared>);

impl Tags {
    /// The tags of `allocator`, with pinned memory of `host` for contents. [`Error::Unsupported`] if its pools cannot
    /// sleep, as with allocators without a cache.
    pub fn new(allocator: &impl SharedAllocator, host: &HostAllocator) -> Result<Self> {
        let allocator = allocator.to_dyn();
        let instance = allocator.instance();
        instance.expect_same(host.instance(), "the host allocator")?;
        let unsupported = Error::Unsupported { allocator: allocator.name(), what: "memory that sleeps" };
        match allocator.pools() {
            Ok(pools) if pools.sleep().is_some() => {}
            Ok(_) | Err(Error::Unsupported { .. }) => return Err(unsupported),
            Err(error) => return Err(error),
        }
        Ok(Self(Arc::new(Shared::new(allocator, host.clone()))))
    }

    /// The tag with that name on a device, created if necessary. [`Error::Unsupported`] on a device without virtual
    /// memory management.
    pub fn tag(&self, device: &Device, name: &str) -> Result<Tag> {
        let shared = &self.0;
        let instance = shared.allocator.instance();
        instance.expect_own_process("tag")?;
        instance.expect_same(device.instance(), "the device")?;
        if !device.properties().virtual_memory {
            let what = "memory that sleeps: the device has no virtual memory management";
            return Err(Error::Unsupported { allocator: shared.allocator.name(), what });
        }
        let key = (name.to_owned(), device.id());
        let mut by_name = lock(&shared.by_name);
        let pool = match by_name.get(&key) {
            Some(pools) => pools.pool.clone(),
            None => {
                let segments = Arc::new(MappedSegments::new(name.into(), device));
                let options = PoolOptions { upstream: Some(segments.clone()), ..PoolOptions::default() };
                let pool = MemPool::new(&shared.allocator, device, options)?;
                segments.set_owner(&shared.allocator, pool.id());
                let own = Arc::new(TagPool { id: pool.id(), segments });
                by_name.insert(key.clone(), TagPools::new(pool.clone(), own));
                pool
            }
        };
        Ok(Tag { shared: Arc::clone(shared), key, pool })
    }

    /// Creates a pool whose memory carries the tag, in addition to the tag's own pool: `create` must create it with the
    /// upstream that it is given. The caller owns the pool; the tag does not keep it alive. [`Error::TagAsleep`] if the
    /// tag is asleep.
    pub fn make_pool(
        &self,
        device: &Device,
        name: &str,
        create: impl FnOnce(Arc<dyn Upstream>) -> Result<MemPoolId>,
    ) -> Result<MemPoolId> {
        let tag = self.tag(device, name)?;
        // Keeps other calls from changing the tag's state.
        let _one = lock(&self.0.changing);
        if tag.info().state != TagState::Awake {
            return Err(Error::TagAsleep { tag: name.to_owned() });
        }
        let segments = Arc::new(MappedSegments::new(name.into(), device));
        let id = create(segments.clone())?;
        segments.set_owner(&self.0.allocator, id);
        if let Some(pools) = lock(&self.0.by_name).get_mut(&tag.key) {
            pools.others.push(Arc::new(TagPool { id, segments }));
        }
        Ok(id)
    }

    /// The names of all tags, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = lock(&self.0.by_name).keys().map(|(name, _)| name.clone()).collect();
        names.dedup();
        names
    }

    /// Puts the memory of tags to sleep, on all devices, all of it or none. Contents are copied to the host or dropped,
    /// physical memory is released to the driver, and addresses stay. Waits for all work of the devices first. Work
    /// that is launched during the call, or while the tags are asleep, must not use that memory.
    ///
    /// Tags that are already asleep are left as they are, except that [`Keep::Discard`] drops contents that they have
    /// on the host. [`Error::Sleep`] tells what was missing, and in which state the tags are.
    pub fn sleep(&self, tags: &[&str], keep: Keep) -> Result<SleepReport> {
        let _one = lock(&self.0.changing);
        let (pools, elastic) = self.select(tags, SleepCall::Sleep)?;
        let leaving = elastic::save(&self.0.host, &elastic, keep)?;
        let mut report = going::sleep(&self.0, &pools, keep)?;
        elastic::fall_asleep(leaving, &elastic, keep, &mut report);
        self.0.reuse_pinned();
        Ok(report)
    }

    /// Wakes the memory of tags, on all devices, all of it or none: at the same addresses, with the contents, or zeroed
    /// if they were discarded. Contents of blocks that were free are undefined. Tags that are awake are left as they
    /// are. [`Error::Sleep`] tells what was missing; the tags stay asleep then.
    pub fn wake(&self, tags: &[&str]) -> Result<SleepReport> {
        let _one = lock(&self.0.changing);
        let (pools, elastic) = self.select(tags, SleepCall::Wake)?;
        let mut brought = SleepReport::default();
        let waking = elastic::bring_back(&elastic, &mut brought)?;
        let mut report = waking::wake(&self.0, &pools)?;
        elastic::awake(waking);
        self.0.reuse_pinned();
        report.bytes_device += brought.bytes_device;
        report.bytes_copied += brought.bytes_copied;
        Ok(report)
    }

    /// Pins the host memory that [`sleep`](Self::sleep) with [`Keep::Host`] needs for the current memory of the tags,
    /// and leaves it in the cache of the host allocator. The first sleep then need not pin, which takes several times
    /// as long as its copies. Returns the number of bytes. Other requests for pinned memory may use the cache
    /// meanwhile.
    ///
    /// It enqueues no work, and may run in a thread of its own; other calls of `Tags` wait for it. It fails during a
    /// capture, as `sleep` does. [`Error::Sleep`] if there is not enough pinned memory; memory that was pinned stays in
    /// the cache.
    pub fn prepare(&self, tags: &[&str]) -> Result<u64> {
        let _one = lock(&self.0.changing);
        let (pools, elastic) = self.select(tags, SleepCall::Sleep)?;
        going::prepare(&self.0, &pools, &elastic)
    }

    /// The pools of tags, each once, and their elastic memory.
    fn select(&self, tags: &[&str], call: SleepCall) -> Result<Selected> {
        let instance = self.0.allocator.instance();
        instance.expect_own_process("sleep or wake")?;
        if instance.has_captures() || self.0.pool_sleep().has_captures() {
            return Err(Error::SleepInCapture { call });
        }
        if let Some(unknown) = tags.iter().find(|tag| !lock(&self.0.by_name).keys().any(|(name, _)| name == *tag)) {
            return Err(Error::UnknownTag { tag: (*unknown).to_owned(), known: self.names() });
        }
        let mut by_name = lock(&self.0.by_name);
        let (mut pools, mut elastic) = (Vec::new(), Vec::new());
        for (_, of_tag) in by_name.iter_mut().filter(|((name, _), _)| tags.contains(&name.as_str())) {
            pools.extend(of_tag.all());
            elastic.extend(of_tag.elastic());
        }
        Ok((pools, elastic))
    }

    /// Every tag on every device.
    #[must_use]
    pub fn info(&self) -> Vec<TagInfo> {
        lock(&self.0.by_name).values_mut().map(info).collect()
    }

    /// Adds the times when tags were put to sleep and woken to a snapshot, as annotations.
    pub fn add_to(&self, snapshot: &mut Snapshot) {
        snapshot.annotations.extend(lock(&self.0.times).iter().cloned());
    }
}

/// The pools of tags, and their elastic memory.
type Selected = (Vec<Arc<TagPool>>, Vec<Arc<TagElastic>>);

/// Describes a tag on one device.
fn info(of_tag: &mut TagPools) -> TagInfo {
    let (pools, elastic) = (of_tag.all(), of_tag.elastic());
    let own = &pools[0];
    let state = match own.segments.phase() {
        Phase::Awake | Phase::Changing => TagState::Awake,
        Phase::Asleep(Sleeping { keeps_contents, since_us, .. }) => {
            let keep = if keeps_contents { Keep::Host } else { Keep::Discard };
            TagState::Asleep { keep, since_us }
        }
    };
    let (tag, device) = own.name();
    let mut info = TagInfo { tag, device, pool: own.id, state, segments: 0, bytes: 0, bytes_device: 0, bytes_host: 0 };
    for pool in pools {
        let segments = pool.segments.segments();
        info.segments += segments.len() as u64;
        info.bytes += segments.iter().map(|segment| segment.bytes).sum::<u64>();
        info.bytes_device += pool.segments.bytes_physical();
        if let Phase::Asleep(Sleeping { saved, .. }) = pool.segments.phase() {
            info.bytes_host += saved.iter().map(|block| block.bytes()).sum::<u64>();
        }
    }
    for elastic in elastic {
        let [bytes, bytes_device, bytes_host] = elastic.bytes();
        info.bytes += bytes;
        info.bytes_device += bytes_device;
        info.bytes_host += bytes_host;
    }
    info
}

impl fmt::Debug for Tags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.info()).finish()
    }
}

/// A tag on a device, and its memory.
#[derive(Clone)]
pub struct Tag {
    shared: Arc<Shared>,
    key: (String, DeviceId),
    pool: MemPool,
}

impl Tag {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.key.0
    }

    /// Its private pool, for requests that name their pool, and for graphs whose memory should carry the tag.
    #[must_use]
    pub fn pool(&self) -> &MemPool {
        &self.pool
    }

    /// A description of its memory.
    ///
    /// # Panics
    /// Never: the tag exists as long as this handle does.
    #[must_use]
    pub fn info(&self) -> TagInfo {
        let mut by_name = lock(&self.shared.by_name);
        info(by_name.get_mut(&self.key).expect("tags are not removed"))
    }

    /// Elastic memory that carries the tag: asleep, its committed blocks have no memory. [`Error::TagAsleep`] if the
    /// tag is asleep.
    pub fn elastic(&self, layout: ElasticLayout, stream: &Stream) -> Result<Arc<ElasticMemory>> {
        let shared = &self.shared;
        // Keeps other calls from changing the tag's state.
        let _one = lock(&shared.changing);
        if self.info().state != TagState::Awake {
            return Err(Error::TagAsleep { tag: self.name().to_owned() });
        }
        let memory = Arc::new(ElasticMemory::new(&shared.allocator, layout, stream)?.with_label(self.name()));
        let device = Device::from_id(shared.allocator.instance(), self.pool.device_id());
        if memory.device_id() != device.id() {
            let (owner, device) = (memory.device_id(), device.id());
            return Err(Error::StreamDevice { device, stream: stream.id(), owner });
        }
        if let Some(of_tag) = lock(&shared.by_name).get_mut(&self.key) {
            of_tag.add_elastic(TagElastic::new(self.name().into(), &device, &memory));
        }
        Ok(memory)
    }

    /// Until the scope is dropped, requests of the calling thread on the tag's device carry the tag. Scopes may be
    /// nested, and open in any number of threads; the newest applies.
    pub fn enter(&self) -> Result<TagScope> {
        self.route(Route::Thread(std::thread::current().id()))
    }

    /// Until the scope is dropped, requests that match `route` carry the tag.
    pub fn route(&self, route: Route) -> Result<TagScope> {
        let pool = self.pool();
        let scope = self.shared.pool_sleep().open_scope(pool.device_id(), pool.id(), route)?;
        Ok(TagScope { tag: self.clone(), scope })
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tag {:?} of {}", self.name(), self.pool.device_id())
    }
}

/// An open scope of a tag. Dropping it closes it, without a driver call.
#[must_use = "dropping the scope ends the tag"]
pub struct TagScope {
    tag: Tag,
    scope: ScopeId,
}

impl Drop for TagScope {
    fn drop(&mut self) {
        if self.tag.shared.allocator.instance().is_inherited() {
            return;
        }
        let pool = self.tag.pool();
        self.tag.shared.pool_sleep().close_scope(pool.device_id(), pool.id(), self.scope);
    }
}

impl fmt::Debug for TagScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "scope of {:?}", self.tag)
    }
}
