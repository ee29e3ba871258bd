//! The upstream of a stable pool, and of a pool whose memory carries a tag. Every segment is a range of reserved
//! addresses, backed by one physical allocation, of which nothing is ever moved or mapped elsewhere.
//!
//! The memory of a tag can be released and created again while the addresses stay. Each segment records what it has:
//! physical memory, a mapping, its contents. So after a call that failed or panicked half-way,
//! [`Tags::wake`](super::Tags::wake) can restore whatever is missing. Without a tag nobody makes such calls.
//!
//! A segment that the pool freed is dismantled here, one driver call at a time. Calls that fail, or that a capture
//! forbids, are left to the next call.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use warpool_driver::{
    Access, DeviceAccess, DeviceId, DevicePtr, Driver, ErrorCode, HostPtr, PhysicalId, PhysicalOptions, ShareKind,
    StreamId,
};

use super::core::AllocatorCore;
use super::left_segments::{LeftSegment, LeftSegments};
use super::report::RangeEvent;
use super::stream_fence;
use super::{Asleep, DeviceAllocator, HostBlock, MemPoolId, PoolSleep, SegmentKind, Upstream};
use crate::capture::RelaxedMode;
use crate::unwind::OnUnwind;
use crate::{Device, Error, Result, lock};

/// Reserved addresses are a multiple of this.
const RESERVE_STEP: u64 = 2 << 20;

pub(crate) struct MappedSegments {
    /// The tag that the memory carries; empty if it carries none.
    pub(crate) tag: Arc<str>,
    pub(crate) device: Device,
    /// Addresses and sizes of segments are multiples of this: of the granularity of physical memory and of multicast.
    step: u64,
    options: PhysicalOptions,
    serves: OnceLock<Serves>,
    state: Mutex<State>,
    /// Held while segments and physical memory are returned to the driver, so that each is returned once.
    returning: Mutex<()>,
    /// Held while a segment is mapped or unmapped, and while a peer gets access: so it gets that to every mapping.
    mapping: Mutex<()>,
}

/// Whose segments these are.
enum Serves {
    /// A pool of a tag.
    Tag(Weak<dyn DeviceAllocator>, MemPoolId),
    /// A stable pool.
    Stable(Arc<AllocatorCore>),
}

/// The state of a sleeping pool.
#[derive(Clone, Debug)]
pub(crate) struct Sleeping {
    pub(crate) keeps_contents: bool,
    pub(crate) since_us: i64,
    /// The contents; empty if they were discarded.
    pub(crate) saved: Vec<Arc<HostBlock>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) enum Phase {
    #[default]
    Awake,
    /// A call is changing the state.
    Changing,
    Asleep(Sleeping),
}

#[derive(Default)]
struct State {
    phase: Phase,
    segments: BTreeMap<u64, Segment>,
    /// Physical memory that could not be released.
    unreleased: Vec<(PhysicalId, u64)>,
    peers: Vec<DeviceId>,
    /// Whether copies that could not be waited for may still use the segments, and host memory with their contents.
    used_by_copies: bool,
}

/// Where a range of a segment is in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SavedRange {
    pub(crate) ptr: u64,
    pub(crate) bytes: u64,
    pub(crate) host: HostPtr,
}

/// Where the contents of a segment are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// In its physical memory.
    Present,
    /// In host memory.
    Saved(Vec<SavedRange>),
    /// Nowhere.
    Discarded,
}

#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) ptr: u64,
    pub(crate) bytes: u64,
    /// The kind of requests that the segment serves; known when it is put to sleep.
    pub(crate) kind: SegmentKind,
    stream: StreamId,
    pub(crate) physical: Option<PhysicalId>,
    pub(crate) is_mapped: bool,
    /// Whether the mapping can be used.
    pub(crate) has_access: bool,
    pub(crate) contents: Contents,
    owner: Owner,
}

/// Who owns a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The call that creates it.
    Maker,
    Pool,
    /// No owner: it has to be dismantled.
    Nobody,
}

impl MappedSegments {
    /// The segments of a pool whose memory carries a tag.
    pub(crate) fn new(tag: Arc<str>, device: &Device) -> Self {
        let properties = device.properties();
        Self {
            tag,
            device: device.clone(),
            step: RESERVE_STEP.max(properties.granularity).max(properties.multicast_granularity),
            options: PhysicalOptions {
                share: properties.share_posix_fd.then_some(ShareKind::PosixFd),
                rdma: properties.rdma,
            },
            serves: OnceLock::new(),
            state: Mutex::default(),
            returning: Mutex::default(),
            mapping: Mutex::default(),
        }
    }

    /// The segments of a stable pool.
    pub(crate) fn stable(core: &Arc<AllocatorCore>, device: &Device) -> Self {
        let segments = Self::new("".into(), device);
        let _ = segments.serves.set(Serves::Stable(Arc::clone(core)));
        segments
    }

    pub(crate) fn set_owner(&self, allocator: &Arc<dyn DeviceAllocator>, pool: MemPoolId) {
        // Set once, by the call that created both.
        let _ = self.serves.set(Serves::Tag(Arc::downgrade(allocator), pool));
    }

    fn driver(&self) -> &dyn Driver {
        &**self.device.instance().driver()
    }

    pub(crate) fn phase(&self) -> Phase {
        lock(&self.state).phase.clone()
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        let is_awake = matches!(phase, Phase::Awake);
        // Dropped without the lock.
        let _before = std::mem::replace(&mut lock(&self.state).phase, phase);
        let instance = self.device.instance();
        for segment in self.segments() {
            if is_awake {
                instance.remove_asleep(segment.ptr);
            } else {
                instance.add_asleep(segment.ptr, segment.bytes, &self.tag);
            }
        }
    }

    /// All segments that the pool has, by address.
    pub(crate) fn segments(&self) -> Vec<Segment> {
        lock(&self.state).segments.values().filter(|one| one.owner == Owner::Pool).cloned().collect()
    }

    /// Changes a segment.
    pub(crate) fn change(&self, ptr: u64, change: impl FnOnce(&mut Segment)) {
        if let Some(segment) = lock(&self.state).segments.get_mut(&ptr) {
            change(segment);
        }
    }

    /// Bytes of its physical memory, mapped or not.
    pub(crate) fn bytes_physical(&self) -> u64 {
        let state = lock(&self.state);
        let unreleased: u64 = state.unreleased.iter().map(|&(_, bytes)| bytes).sum();
        let present = state.segments.values().filter(|segment| segment.physical.is_some());
        present.map(|segment| segment.bytes).sum::<u64>() + unreleased
    }

    /// Bytes of its segments without memory.
    pub(crate) fn asleep(&self) -> Asleep {
        let mut asleep = Asleep { tag: Arc::clone(&self.tag), ..Asleep::default() };
        for segment in self.segments().iter().filter(|segment| segment.physical.is_none()) {
            match segment.kind {
                SegmentKind::Small => asleep.bytes_small += segment.bytes,
                SegmentKind::Large => asleep.bytes_large += segment.bytes,
            }
        }
        asleep
    }

    /// Maps a segment's physical memory, with access for the device and its peers.
    pub(crate) fn map(&self, segment: &Segment) -> Result<()> {
        let physical = segment.physical.expect("only memory that is there is mapped");
        let _one = lock(&self.mapping);
        if !segment.is_mapped {
            self.driver().vm_map(DevicePtr(segment.ptr), physical)?;
            self.change(segment.ptr, |segment| segment.is_mapped = true);
        }
        if !segment.has_access {
            self.driver().vm_set_access(DevicePtr(segment.ptr), segment.bytes, &self.access())?;
            self.change(segment.ptr, |segment| segment.has_access = true);
        }
        Ok(())
    }

    /// Sets whether copies of a failed call may still use the segments.
    pub(crate) fn set_used_by_copies(&self, used_by_copies: bool) {
        lock(&self.state).used_by_copies = used_by_copies;
    }

    pub(crate) fn is_used_by_copies(&self) -> bool {
        lock(&self.state).used_by_copies
    }

    /// Waits for the copies of a call that failed, if there may be any.
    pub(crate) fn wait_for_copies(&self) -> Result<()> {
        if self.is_used_by_copies() {
            self.device.synchronize()?;
            self.set_used_by_copies(false);
        }
        Ok(())
    }

    pub(crate) fn unmap(&self, segment: &Segment) -> Result<()> {
        self.wait_for_copies()?;
        let _one = lock(&self.mapping);
        self.driver().vm_unmap(DevicePtr(segment.ptr), segment.bytes)?;
        self.change(segment.ptr, |segment| (segment.is_mapped, segment.has_access) = (false, false));
        Ok(())
    }

    /// Creates physical memory for a segment.
    pub(crate) fn create(&self, segment: &Segment) -> Result<()> {
        let physical = self.driver().vm_create(self.device.id(), segment.bytes, self.options)?;
        self.change(segment.ptr, |segment| segment.physical = Some(physical));
        Ok(())
    }

    /// Releases a segment's physical memory. If the driver call fails, later calls retry it.
    pub(crate) fn release(&self, ptr: u64) {
        let _once = lock(&self.returning);
        self.list_release(ptr);
        self.release_listed();
    }

    fn list_release(&self, ptr: u64) {
        let mut state = lock(&self.state);
        let Some(segment) = state.segments.get_mut(&ptr) else { return };
        if let Some(physical) = segment.physical.take() {
            let bytes = segment.bytes;
            state.unreleased.push((physical, bytes));
        }
    }

    /// Releases the listed memory. Entries that fail stay listed. The caller holds `returning`.
    fn release_listed(&self) {
        let listed = lock(&self.state).unreleased.clone();
        for (physical, _) in listed {
            match self.driver().vm_release(physical) {
                Ok(()) => lock(&self.state).unreleased.retain(|&(other, _)| other != physical),
                Err(error) => tracing::warn!(%error, "physical memory could not be released; it is retried"),
            }
        }
    }

    /// The devices that have access to it: its own and the peers.
    fn access(&self) -> Vec<DeviceAccess> {
        let peers = lock(&self.state).peers.clone();
        let devices = std::iter::once(self.device.id()).chain(peers);
        devices.map(|device| DeviceAccess { device, access: Access::ReadWrite }).collect()
    }

    /// Does what earlier calls could not: dismantles segments that the pool freed, and releases memory.
    pub(crate) fn collect(&self) {
        let _once = lock(&self.returning);
        self.release_listed();
        if let Some(left) = self.device.instance().extensions().get::<LeftSegments>()
            && !self.has_captures()
            && let Err(error) = left.free(self.driver())
        {
            tracing::warn!(%error, "segments of a pool that is gone could not be returned; it is retried");
        }
        if matches!(lock(&self.state).phase, Phase::Changing) {
            return;
        }
        let is_freed = |segment: &&Segment| segment.owner == Owner::Nobody;
        let freed: Vec<Segment> = lock(&self.state).segments.values().filter(is_freed).cloned().collect();
        for segment in freed {
            match self.undo(&segment) {
                Ok(true) => {
                    lock(&self.state).segments.remove(&segment.ptr);
                    self.device.instance().remove_asleep(segment.ptr);
                }
                // A capture is active: left to a later call.
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "a segment could not be returned to the driver; it is retried"),
            }
        }
    }

    /// Returns a segment to the driver: mapping, memory, addresses. `false` if a capture forbids waiting for its work.
    #[expect(unsafe_code, reason = "the driver cannot check that no work uses the addresses")]
    fn undo(&self, segment: &Segment) -> Result<bool> {
        let ptr = DevicePtr(segment.ptr);
        if segment.is_mapped {
            if !self.wait_for(segment.stream)? {
                return Ok(false);
            }
            self.unmap(segment)?;
        }
        self.list_release(segment.ptr);
        self.release_listed();
        // SAFETY: the pool freed the segment, so the work of its other users is done; its own stream was waited for
        // just now, or all work of the device was when the memory was put to sleep. Nothing is mapped here.
        unsafe { self.driver().vm_free_range(ptr, segment.bytes)? };
        Ok(true)
    }

    /// Waits for the work of a stream, and for copies that may use the segments. `false` if a capture forbids it.
    fn wait_for(&self, stream: StreamId) -> Result<bool> {
        let driver = self.driver();
        if self.is_used_by_copies() {
            if self.has_captures() {
                return Ok(false);
            }
            self.wait_for_copies()?;
        }
        let device = self.device.id();
        if self.device.instance().keeps_stream(device, stream)? {
            return stream_fence::synchronize(self.device.instance(), stream);
        }
        // Its owner may have destroyed it.
        if self.has_captures() {
            return Ok(false);
        }
        RelaxedMode::run(driver, || Ok(driver.device_synchronize(device)?))?;
        Ok(true)
    }

    fn has_captures(&self) -> bool {
        let told = match self.serves.get() {
            Some(Serves::Tag(allocator, _)) => allocator.upgrade().is_some_and(|allocator| {
                let pools = allocator.pools().ok();
                pools.and_then(|pools| pools.sleep()).is_some_and(PoolSleep::has_captures)
            }),
            Some(Serves::Stable(core)) => core.has_captures(),
            None => false,
        };
        told || self.device.instance().has_captures()
    }

    /// Tells the range observers of a pool of a tag, before a segment falls asleep and after it woke.
    pub(crate) fn tell(&self, event: RangeEvent, segment: &Segment) {
        if let Some(Serves::Tag(allocator, _)) = self.serves.get()
            && let Some(allocator) = allocator.upgrade()
        {
            let (ptr, bytes) = (DevicePtr(segment.ptr), segment.bytes);
            allocator.observers().range_changes(self.device.id(), event, ptr, bytes);
        }
    }

    /// Tells the allocator how much memory is asleep, after memory of the sleeping pool was freed or released.
    pub(crate) fn count_asleep(&self) {
        if let Some(Serves::Tag(allocator, pool)) = self.serves.get()
            && let Some(allocator) = allocator.upgrade()
            && let Ok(pools) = allocator.pools()
            && let Some(sleep) = pools.sleep()
        {
            // This fails only for a device that does not exist.
            let _ = sleep.set_asleep(self.device.id(), *pool, Some(self.asleep()));
        }
    }
}

impl Drop for MappedSegments {
    /// Leaves what could not be returned to the driver to later calls.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let is_empty = state.segments.is_empty() && state.unreleased.is_empty();
        if is_empty || self.device.instance().is_inherited() {
            return;
        }
        let (device, unreleased) = (self.device.id(), std::mem::take(&mut state.unreleased));
        let of_segment = |segment: &Segment| LeftSegment {
            device,
            physical: segment.physical,
            addresses: Some((segment.ptr, segment.bytes)),
            is_mapped: segment.is_mapped,
        };
        let of_physical =
            |(physical, _)| LeftSegment { device, physical: Some(physical), addresses: None, is_mapped: false };
        let left = self.device.instance().extensions().get_or_init(LeftSegments::default);
        left.add(state.segments.values().map(of_segment).chain(unreleased.into_iter().map(of_physical)));
    }
}

impl Upstream for MappedSegments {
    fn allocate(&self, device: DeviceId, bytes: u64, stream: StreamId) -> Result<Option<DevicePtr>> {
        debug_assert_eq!(device, self.device.id(), "a tag has one pool per device");
        if !matches!(lock(&self.state).phase, Phase::Awake) {
            return Err(Error::TagAsleep { tag: self.tag.to_string() });
        }
        self.collect();
        let Some(bytes) = bytes.checked_next_multiple_of(self.step) else { return Ok(None) };
        // The driver aligns to powers of two.
        let align = if self.step.is_power_of_two() { self.step } else { 0 };
        let ptr = match self.driver().vm_reserve(bytes, align, None) {
            Ok(ptr) => ptr,
            Err(error) if error.code == ErrorCode::OutOfMemory => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let segment = Segment {
            ptr: ptr.0,
            bytes,
            kind: SegmentKind::Large,
            stream,
            physical: None,
            is_mapped: false,
            has_access: false,
            contents: Contents::Present,
            owner: Owner::Maker,
        };
        lock(&self.state).segments.insert(ptr.0, segment.clone());
        let set_owner = |owner| self.change(ptr.0, |segment| segment.owner = owner);
        let unwinds = OnUnwind::new(|| set_owner(Owner::Nobody));
        let outcome = self.create(&segment).and_then(|()| {
            let created = lock(&self.state).segments[&ptr.0].clone();
            self.map(&created)
        });
        unwinds.disarm();
        match outcome {
            Ok(()) => {
                set_owner(Owner::Pool);
                Ok(Some(ptr))
            }
            Err(error) => {
                set_owner(Owner::Nobody);
                self.collect();
                match error.driver() {
                    Some(driver) if driver.code == ErrorCode::OutOfMemory => Ok(None),
                    _ => Err(error),
                }
            }
        }
    }

    fn granularity(&self) -> u64 {
        self.step
    }

    fn enable_peer_access(&self, peer: DeviceId) -> Result<()> {
        let _one = lock(&self.mapping);
        if peer == self.device.id() || lock(&self.state).peers.contains(&peer) {
            return Ok(());
        }
        let access = [DeviceAccess { device: peer, access: Access::ReadWrite }];
        let segments: Vec<Segment> = lock(&self.state).segments.values().cloned().collect();
        for segment in segments.iter().filter(|segment| segment.has_access) {
            self.driver().vm_set_access(DevicePtr(segment.ptr), segment.bytes, &access)?;
        }
        lock(&self.state).peers.push(peer);
        Ok(())
    }

    /// Never fails: memory that cannot be returned to the driver now is returned later.
    fn free(&self, ptr: DevicePtr, _: u64, _: DeviceId, stream: StreamId) -> Result<()> {
        self.change(ptr.0, |segment| (segment.owner, segment.stream) = (Owner::Nobody, stream));
        if matches!(self.phase(), Phase::Asleep(_)) {
            self.count_asleep();
        }
        self.collect();
        Ok(())
    }

    /// What others register stays until its pool goes.
    fn takes_free_segments(&self) -> bool {
        !matches!(self.serves.get(), Some(Serves::Stable(_)))
    }
}
