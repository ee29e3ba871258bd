//! Registered memory: a use is a hazard as soon as other memory, or none, is at the addresses.

use warpool_driver::sim::{HazardKind, SimConfig, SimDriver};
use warpool_driver::{
    Access, Copies as _, DeviceAccess, DeviceId, DevicePtr, Devices as _, ErrorCode, Memory as _, PhysicalOptions,
    Result, StreamId, StreamOptions, Streams as _, VirtualMemory as _,
};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

/// A device with four mapped pieces of 2 MiB.
struct Fixture {
    gpu: SimDriver,
    stream: StreamId,
    base: DevicePtr,
}

impl Fixture {
    fn new() -> Result<Self> {
        let gpu = SimDriver::new(SimConfig::default());
        let stream = gpu.stream_create(DEVICE, StreamOptions::default())?;
        let base = gpu.vm_reserve(8 * MIB, 0, None)?;
        let fixture = Self { gpu, stream, base };
        (0..4).try_for_each(|piece| fixture.map(piece))?;
        Ok(fixture)
    }

    fn piece(&self, piece: u64) -> DevicePtr {
        self.base.offset(piece * 2 * MIB)
    }

    fn map(&self, piece: u64) -> Result<()> {
        let physical = self.gpu.vm_create(DEVICE, 2 * MIB, PhysicalOptions::default())?;
        self.gpu.vm_map(self.piece(piece), physical)?;
        let access = [DeviceAccess { device: DEVICE, access: Access::ReadWrite }];
        self.gpu.vm_set_access(self.piece(piece), 2 * MIB, &access)?;
        self.gpu.vm_release(physical)
    }

    fn unmap(&self, piece: u64) -> Result<()> {
        self.gpu.vm_unmap(self.piece(piece), 2 * MIB)
    }

    /// The hazards so far, after all work.
    fn hazards(&self) -> Result<Vec<HazardKind>> {
        self.gpu.device_synchronize(DEVICE)?;
        let kinds = self.gpu.hazards().iter().map(|hazard| hazard.kind).collect();
        self.gpu.clear_hazards();
        Ok(kinds)
    }
}

#[test]
fn registered_memory_is_written_as_by_a_fill() -> Result<()> {
    let it = Fixture::new()?;
    let registered = it.gpu.register_memory(it.base, 8 * MIB, "all")?;
    it.gpu.write_registered(registered, MIB, 6 * MIB, 5, it.stream)?;
    assert_eq!(it.hazards()?, []);
    let mut byte = [0];
    for at in [MIB, 7 * MIB - 1] {
        it.gpu.download(DEVICE, it.base.offset(at), &mut byte)?;
        assert_eq!(byte, [5]);
    }
    // It takes part in the order of streams.
    let other = it.gpu.stream_create(DEVICE, StreamOptions::default())?;
    it.gpu.write_registered(registered, 0, 64, 5, other)?;
    it.gpu.write_registered(registered, 0, 64, 5, it.stream)?;
    assert_eq!(it.hazards()?, [HazardKind::Race]);
    Ok(())
}

#[test]
fn memory_that_left_and_memory_that_came_are_both_stale() -> Result<()> {
    let it = Fixture::new()?;
    let registered = it.gpu.register_memory(it.base, 8 * MIB, "the cache")?;
    it.unmap(1)?;
    it.gpu.write_registered(registered, 2 * MIB, 64, 1, it.stream)?;
    assert_eq!(it.hazards()?, [HazardKind::StaleRegistration]);
    it.map(1)?;
    it.gpu.write_registered(registered, 0, 8 * MIB, 1, it.stream)?;
    it.gpu.device_synchronize(DEVICE)?;
    let hazard = it.gpu.hazards().remove(0);
    assert_eq!(hazard.kind, HazardKind::StaleRegistration);
    let range = hazard.range.expect("it is about memory");
    assert_eq!((range.offset, range.bytes), (it.piece(1).0, 6 * MIB));
    assert!(hazard.why.contains("\"the cache\"") && hazard.why.contains("left its address by call"), "{}", hazard.why);
    let stale = it.gpu.stale_registrations();
    assert!(stale.len() == 1 && stale[0].0 == registered, "{stale:?}");
    // Parts that stayed are not.
    it.gpu.clear_hazards();
    it.gpu.write_registered(registered, 0, 2 * MIB, 1, it.stream)?;
    it.gpu.write_registered(registered, 4 * MIB, 4 * MIB, 1, it.stream)?;
    assert_eq!(it.hazards()?, []);
    // Registered again, nothing is.
    it.gpu.deregister_memory(registered)?;
    let again = it.gpu.register_memory(it.base, 8 * MIB, "the cache")?;
    it.gpu.write_registered(again, 0, 8 * MIB, 1, it.stream)?;
    assert_eq!(it.hazards()?, []);
    Ok(())
}

/// A network card would still write to it, but the driver promises nothing.
#[test]
fn the_same_physical_memory_mapped_again_is_stale() -> Result<()> {
    let it = Fixture::new()?;
    let physical = it.gpu.vm_create(DEVICE, 2 * MIB, PhysicalOptions::default())?;
    let access = [DeviceAccess { device: DEVICE, access: Access::ReadWrite }];
    it.unmap(0)?;
    let map = || it.gpu.vm_map(it.base, physical).and_then(|()| it.gpu.vm_set_access(it.base, 2 * MIB, &access));
    map()?;
    let registered = it.gpu.register_memory(it.base, 2 * MIB, "one piece")?;
    it.unmap(0)?;
    map()?;
    it.gpu.write_registered(registered, 0, 64, 1, it.stream)?;
    assert_eq!(it.hazards()?, [HazardKind::StaleRegistration]);
    Ok(())
}

/// What counts is when the write runs, not when it is queued.
#[test]
fn a_write_that_is_queued_already_becomes_stale() -> Result<()> {
    let it = Fixture::new()?;
    let registered = it.gpu.register_memory(it.base, 8 * MIB, "all")?;
    it.gpu.pause_stream(it.stream)?;
    it.gpu.write_registered(registered, 0, 64, 1, it.stream)?;
    it.unmap(0)?;
    it.gpu.resume_stream(it.stream)?;
    assert_eq!(it.hazards()?, [HazardKind::StaleRegistration]);
    Ok(())
}

#[test]
fn freed_allocations_are_stale_even_at_the_same_address() -> Result<()> {
    let it = Fixture::new()?;
    let memory = it.gpu.mem_alloc(DEVICE, 2 * MIB)?;
    let registered = it.gpu.register_memory(memory, 2 * MIB, "one allocation")?;
    it.gpu.mem_free(memory)?;
    it.gpu.place_next_alloc(DEVICE, memory)?;
    assert_eq!(it.gpu.mem_alloc(DEVICE, 2 * MIB)?, memory);
    it.gpu.write_registered(registered, 0, 64, 1, it.stream)?;
    assert_eq!(it.hazards()?, [HazardKind::StaleRegistration]);
    Ok(())
}

#[test]
fn wrong_ranges_and_ended_registrations_are_errors() -> Result<()> {
    let it = Fixture::new()?;
    let code = |result: Result<()>| result.map_err(|error| error.code);
    let register = |ptr, bytes| it.gpu.register_memory(ptr, bytes, "wrong").map(drop);
    assert_eq!(code(register(it.base, 0)), Err(ErrorCode::InvalidValue));
    assert_eq!(code(register(it.base, 9 * MIB)), Err(ErrorCode::InvalidValue), "beyond what is mapped");
    let registered = it.gpu.register_memory(it.base, 8 * MIB, "all")?;
    assert_eq!(it.gpu.object_counts().registrations, 1);
    let beyond = it.gpu.write_registered(registered, 8 * MIB, 1, 1, it.stream);
    assert_eq!(code(beyond), Err(ErrorCode::InvalidValue));
    it.gpu.deregister_memory(registered)?;
    assert_eq!(code(it.gpu.deregister_memory(registered)), Err(ErrorCode::InvalidHandle));
    let ended = it.gpu.write_registered(registered, 0, 1, 1, it.stream);
    assert_eq!(code(ended), Err(ErrorCode::InvalidHandle));
    assert_eq!(it.hazards()?, [HazardKind::UseAfterDestroy]);
    assert_eq!(it.gpu.object_counts().registrations, 0);
    Ok(())
}
