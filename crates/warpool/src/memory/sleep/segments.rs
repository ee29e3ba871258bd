//! The memory of one tag on one device: the upstream of its pool. Every segment is a range of reserved addresses,
//! backed by one physical allocation, so the memory can be released and created again while the addresses stay.
//!
//! Each segment records what it has: physical memory, a mapping, its contents. So after a call that failed or panicked
//! half-way, [`Tags::wake`](super::Tags::wake) can restore whatever is missing.
//!
//! A segment that the pool freed is dismantled here, one driver call at a time. Calls that fail, or that a capture
//! forbids, are left to the next call.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use warpool_driver::{
    Access, DeviceAccess, DeviceId, DevicePtr, Driver, ErrorCode, PhysicalId, PhysicalOptions, StreamId,
};

use super::copies::SavedRange;
use crate::capture::RelaxedMode;
use crate::memory::stream_fence;
use crate::memory::{Asleep, DeviceAllocator, HostBlock, MemPoolId, PoolSleep, SegmentKind, Upstream};
use crate::unwind::OnUnwind;
use crate::{Device, Error, Result, lock};

/// Reserved addresses are a multiple of this.
const RESERVE_STEP: u64 = 2 << 20;

pub(super) struct TagSegments {
    pub(super) tag: Arc<str>,
    pub(super) device: Device,
    granularity: u64,
    options: PhysicalOptions,
    /// The allocator and the pool that this is the upstream of.
    owner: OnceLock<(Weak<dyn DeviceAllocator>, MemPoolId)>,
    state: Mutex<State>,
    /// Held while segments and physical memory are returned to the driver, so that each is returned once.
    returning: Mutex<()>,
}

/// The state of a sleeping pool.
#[derive(Clone, Debug)]
pub(super) struct Sleeping {
    pub(super) keeps_contents: bool,
    pub(super) since_us: i64,
    /// The contents; empty if they were discarded.
    pub(super) saved: Vec<Arc<HostBlock>>,
}

#[derive(Clone, Debug, Default)]
pub(super) enum Phase {
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

/// Where the contents of a segment are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// In its physical memory.
    Present,
    /// In host memory.
    Saved(Vec<SavedRange>),
    /// Nowhere.
    Discarded,
}

#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) ptr: u64,
    pub(super) bytes: u64,
    /// The kind of requests that the segment serves; known when it is put to sleep.
    pub(super) kind: SegmentKind,
    stream: StreamId,
    pub(super) physical: Option<PhysicalId>,
    pub(super) is_mapped: bool,
    /// Whether the mapping can be used.
    pub(super) has_access: bool,
    pub(super) contents: Contents,
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

impl TagSegments {
    pub(super) fn new(tag: Arc<str>, device: &Device) -> Self {
        let properties = device.properties();
        Self {
            tag,
            device: device.clone(),
            granularity: properties.granularity.max(1),
            options: PhysicalOptions { share: None, rdma: properties.rdma },
            owner: OnceLock::new(),
            state: Mutex::default(),
            returning: Mutex::default(),
        }
    }

    pub(super) fn set_owner(&self, allocator: &Arc<dyn DeviceAllocator>, pool: MemPoolId) {
        // Set once, by the call that created both.
        let _ = self.owner.set((Arc::downgrade(allocator), pool));
    }

    fn driver(&self) -> &dyn Driver {
        &**self.device.instance().driver()
    }

    pub(super) fn phase(&self) -> Phase {
        lock(&self.state).phase.clone()
    }

    pub(super) fn set_phase(&self, phase: Phase) {
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
    pub(super) fn segments(&self) -> Vec<Segment> {
        lock(&self.state).segments.values().filter(|one| one.owner == Owner::Pool).cloned().collect()
    }

    /// Changes a segment.
    pub(super) fn change(&self, ptr: u64, change: impl FnOnce(&mut Segment)) {
        if let Some(segment) = lock(&self.state).segments.get_mut(&ptr) {
            change(segment);
        }
    }

    /// Bytes of its physical memory, mapped or not.
    pub(super) fn bytes_physical(&self) -> u64 {
        let state = lock(&self.state);
        let unreleased: u64 = state.unreleased.iter().map(|&(_, bytes)| bytes).sum();
        let present = state.segments.values().filter(|segment| segment.physical.is_some());
        present.map(|segment| segment.bytes).sum::<u64>() + unreleased
    }

    /// Bytes of its segments without memory.
    pub(super) fn asleep(&self) -> Asleep {
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
    pub(super) fn map(&self, segment: &Segment) -> Result<()> {
        let physical = segment.physical.expect("only memory that is there is mapped");
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
    pub(super) fn set_used_by_copies(&self, used_by_copies: bool) {
        lock(&self.state).used_by_copies = used_by_copies;
    }

    pub(super) fn is_used_by_copies(&self) -> bool {
        lock(&self.state).used_by_copies
    }

    /// Waits for the copies of a call that failed, if there may be any.
    pub(super) fn wait_for_copies(&self) -> Result<()> {
        if self.is_used_by_copies() {
            self.device.synchronize()?;
            self.set_used_by_copies(false);
        }
        Ok(())
    }

    pub(super) fn unmap(&self, segment: &Segment) -> Result<()> {
        self.wait_for_copies()?;
        self.driver().vm_unmap(DevicePtr(segment.ptr), segment.bytes)?;
        self.change(segment.ptr, |segment| (segment.is_mapped, segment.has_access) = (false, false));
        Ok(())
    }

    /// Creates physical memory for a segment.
    pub(super) fn create(&self, segment: &Segment) -> Result<()> {
        let physical = self.driver().vm_create(self.device.id(), segment.bytes, self.options)?;
        self.change(segment.ptr, |segment| segment.physical = Some(physical));
        Ok(())
    }

    /// Releases a segment's physical memory. If the driver call fails, later calls retry it.
    pub(super) fn release(&self, ptr: u64) {
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

    /// Lets another device access it, now and in the future.
    pub(super) fn add_peer(&self, peer: DeviceId) -> Result<()> {
        if peer == self.device.id() || lock(&self.state).peers.contains(&peer) {
            return Ok(());
        }
        let access = [DeviceAccess { device: peer, access: Access::ReadWrite }];
        for segment in self.segments().iter().filter(|segment| segment.has_access) {
            self.driver().vm_set_access(DevicePtr(segment.ptr), segment.bytes, &access)?;
        }
        lock(&self.state).peers.push(peer);
        Ok(())
    }

    /// Does what earlier calls could not: dismantles segments that the pool freed, and releases memory.
    pub(super) fn collect(&self) {
        let _once = lock(&self.returning);
        self.release_listed();
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
        let told = || {
            let allocator = self.owner.get().and_then(|(allocator, _)| allocator.upgrade());
            allocator.is_some_and(|allocator| {
                let pools = allocator.pools().ok();
                pools.and_then(|pools| pools.sleep()).is_some_and(PoolSleep::has_captures)
            })
        };
        self.device.instance().has_captures() || told()
    }

    /// Tells the allocator how much memory is asleep, after memory of the sleeping pool was freed or released.
    pub(super) fn count_asleep(&self) {
        if let Some((allocator, pool)) = self.owner.get()
            && let Some(allocator) = allocator.upgrade()
            && let Ok(pools) = allocator.pools()
            && let Some(sleep) = pools.sleep()
        {
            // This fails only for a device that does not exist.
            let _ = sleep.set_asleep(self.device.id(), *pool, Some(self.asleep()));
        }
    }
}

impl Upstream for TagSegments {
    fn allocate(&self, device: DeviceId, bytes: u64, stream: StreamId) -> Result<Option<DevicePtr>> {
        debug_assert_eq!(device, self.device.id(), "a tag has one pool per device");
        if !matches!(lock(&self.state).phase, Phase::Awake) {
            return Err(Error::TagAsleep { tag: self.tag.to_string() });
        }
        self.collect();
        let Some(bytes) = bytes.checked_next_multiple_of(RESERVE_STEP.max(self.granularity)) else { return Ok(None) };
        let ptr = match self.driver().vm_reserve(bytes, 0, None) {
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

    /// Never fails: memory that cannot be returned to the driver now is returned later.
    fn free(&self, ptr: DevicePtr, _: u64, _: DeviceId, stream: StreamId) -> Result<()> {
        self.change(ptr.0, |segment| (segment.owner, segment.stream) = (Owner::Nobody, stream));
        if matches!(self.phase(), Phase::Asleep(_)) {
            self.count_asleep();
        }
        self.collect();
        Ok(())
    }

    fn takes_free_segments(&self) -> bool {
        true
    }
}
