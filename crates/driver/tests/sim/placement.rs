//! Placed memory: a replay gets exactly the recorded addresses, or an error that says why not.

use crate::fixture::DEVICE;
use warpool_driver::sim::{HazardKind, SimConfig, SimDriver};
use warpool_driver::*;

/// Addresses of recorded programs: expandable segments are at low addresses, others at addresses where the process has
/// its libraries.
const LOW: DevicePtr = DevicePtr(0x3_0200_0000);
const HIGH: DevicePtr = DevicePtr(140_645_482_102_784);
const MIB: u64 = 1 << 20;

fn gpu() -> SimDriver {
    SimDriver::new(SimConfig::default())
}

fn placed(gpu: &SimDriver, ptr: DevicePtr, bytes: u64) -> Result<DevicePtr> {
    gpu.place_next_alloc(DEVICE, ptr)?;
    gpu.mem_alloc(DEVICE, bytes)
}

/// The detail of an error that must be `InvalidValue`.
fn refusal<T: std::fmt::Debug>(outcome: Result<T>) -> String {
    let error = outcome.expect_err("it must not work");
    assert_eq!(error.code, ErrorCode::InvalidValue, "{error}");
    error.to_string()
}

#[test]
fn allocations_are_placed_anywhere_and_without_gaps() -> Result<()> {
    let gpu = gpu();
    for base in [LOW, HIGH, DevicePtr(512), DevicePtr((1 << 47) - 512), DevicePtr(1 << 48)] {
        // Without gaps, and with odd sizes.
        for (offset, bytes) in [(0, 512), (1024, 100), (512, 1), (1536, 3 * MIB)] {
            assert_eq!(placed(&gpu, base.offset(offset), bytes)?, base.offset(offset));
        }
        gpu.mem_free(base.offset(512))?;
        gpu.mem_free(base.offset(1536))?;
    }
    assert_eq!(gpu.object_counts().allocations, 10);
    Ok(())
}

#[test]
fn placed_memory_can_be_used() -> Result<()> {
    let gpu = gpu();
    let (low, high) = (placed(&gpu, LOW, 4096)?, placed(&gpu, HIGH, 4096)?);
    gpu.upload(DEVICE, low, &[1, 2, 3])?;
    gpu.copy(Address::Device(high), Address::Device(low), 3, gpu.stream_default(DEVICE)?)?;
    let mut back = [0; 3];
    gpu.download(DEVICE, high, &mut back)?;
    assert_eq!((back, gpu.hazards()), ([1, 2, 3], Vec::new()));
    Ok(())
}

#[test]
fn a_placement_is_for_one_allocation_on_its_device() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default().with_devices(2));
    gpu.place_next_alloc(DEVICE, LOW)?;
    assert_ne!(gpu.mem_alloc(DeviceId(1), 512)?, LOW);
    assert_eq!(gpu.mem_alloc(DEVICE, 512)?, LOW);
    assert_ne!(gpu.mem_alloc(DEVICE, 512)?, LOW.offset(512));
    gpu.place_next_alloc(DEVICE, HIGH)?;
    gpu.place_next_alloc(DEVICE, LOW.offset(512))?;
    assert_eq!(gpu.mem_alloc(DEVICE, 512)?, LOW.offset(512), "the later placement counts");
    gpu.place_next_alloc(DEVICE, HIGH)?;
    gpu.place_next_reserve(HIGH)?;
    gpu.clear_placements();
    assert_ne!(gpu.mem_alloc(DEVICE, 512)?, HIGH);
    assert_ne!(gpu.vm_reserve(2 * MIB, 0, None)?, HIGH);
    Ok(())
}

#[test]
fn placing_over_live_memory_is_refused_and_uses_up_the_placement() -> Result<()> {
    let gpu = gpu();
    placed(&gpu, LOW, 1024)?;
    let before = gpu.mem_info(DEVICE)?;
    for (offset, bytes) in [(0, 512), (512, 512), (1024 - 512, 4096)] {
        let why = refusal(placed(&gpu, LOW.offset(offset), bytes));
        assert!(why.contains(&format!("an allocation of 1024 bytes at {LOW} is live")), "{why}");
    }
    let below = DevicePtr(LOW.0 - 512);
    assert!(refusal(placed(&gpu, below, 1024)).contains("is live"));
    assert_eq!(gpu.mem_info(DEVICE)?, before, "a refused allocation takes no memory");
    assert_ne!(gpu.mem_alloc(DEVICE, 512)?, below, "the placement is used up");

    gpu.place_next_reserve(HIGH)?;
    gpu.vm_reserve(4 * MIB, 0, None)?;
    assert!(refusal(placed(&gpu, HIGH.offset(2 * MIB), 512)).contains("a reservation of 4194304 bytes"));
    assert!(refusal(placed(&gpu, DevicePtr((1 << 56) - 512), 1024)).contains("beyond the address space"));
    Ok(())
}

#[test]
fn an_allocation_without_memory_leaves_the_placement() -> Result<()> {
    let gpu = SimDriver::new(SimConfig::default().with_capacity(1 << 30));
    gpu.place_next_alloc(DEVICE, LOW)?;
    assert!(gpu.mem_alloc(DEVICE, 2 << 30).is_err_and(|error| error.is_out_of_memory()));
    assert_eq!(gpu.mem_alloc(DEVICE, MIB)?, LOW);
    Ok(())
}

#[test]
fn impossible_placements_are_refused() {
    let gpu = gpu();
    for ptr in [DevicePtr(0), LOW.offset(256)] {
        assert!(refusal(gpu.place_next_alloc(DEVICE, ptr)).contains("multiple of 512"));
        assert!(refusal(gpu.place_next_reserve(ptr)).contains("multiple of 2097152"));
    }
    let error = gpu.place_next_alloc(DeviceId(7), LOW).expect_err("there is one device");
    assert_eq!(error.code, ErrorCode::InvalidDevice);
}

#[test]
fn freed_addresses_can_be_reused_at_once_and_only_they_leave_the_quarantine() -> Result<()> {
    let gpu = gpu();
    let whole = placed(&gpu, LOW, 4096)?;
    gpu.mem_free(whole)?;
    // The middle is live again; the rest stays in quarantine.
    let middle = placed(&gpu, LOW.offset(1024), 1024)?;
    let stream = gpu.stream_default(DEVICE)?;
    gpu.fill(middle, Pattern::U8(1), 1024, stream)?;
    gpu.device_synchronize(DEVICE)?;
    assert_eq!(gpu.hazards(), []);
    for offset in [0, 2048] {
        let refused = gpu.fill(LOW.offset(offset), Pattern::U8(1), 512, stream);
        assert!(refused.is_err(), "the memory was freed");
    }
    let kinds: Vec<_> = gpu.hazards().iter().map(|hazard| hazard.kind).collect();
    assert_eq!(kinds, [HazardKind::UseAfterFree; 2], "{:?}", gpu.hazards());
    for _ in 0..1000 {
        gpu.mem_free(middle)?;
        assert_eq!(placed(&gpu, middle, 1024)?, middle);
    }
    Ok(())
}

#[test]
fn reservations_are_placed() -> Result<()> {
    let gpu = gpu();
    for ptr in [LOW, HIGH, DevicePtr(1 << 47)] {
        gpu.place_next_reserve(ptr)?;
        // The hint is ignored.
        assert_eq!(gpu.vm_reserve(160 << 30, 0, Some(DevicePtr(1 << 50)))?, ptr);
        let physical = gpu.vm_create(DEVICE, 2 * MIB, PhysicalOptions::default())?;
        gpu.vm_map(ptr.offset(20 * MIB), physical)?;
        let access = [DeviceAccess { device: DEVICE, access: Access::ReadWrite }];
        gpu.vm_set_access(ptr.offset(20 * MIB), 2 * MIB, &access)?;
        gpu.upload(DEVICE, ptr.offset(20 * MIB), &[7])?;
        gpu.vm_unmap(ptr.offset(20 * MIB), 2 * MIB)?;
        gpu.vm_release(physical)?;
        gpu.place_next_reserve(ptr.offset(2 * MIB))?;
        assert!(refusal(gpu.vm_reserve(2 * MIB, 0, None)).contains("a reservation of"));
        gpu.vm_free_range(ptr, 160 << 30)?;
        gpu.place_next_reserve(ptr)?;
        assert_eq!(gpu.vm_reserve(2 * MIB, 0, None)?, ptr, "and again at once");
        gpu.vm_free_range(ptr, 2 * MIB)?;
    }
    gpu.place_next_reserve(LOW)?;
    assert!(refusal(gpu.vm_reserve(2 * MIB, 1 << 40, None)).contains("not aligned"));
    Ok(())
}

#[test]
fn hints_are_followed_above_process_addresses_if_free() -> Result<()> {
    let gpu = gpu();
    let free = DevicePtr(1 << 50);
    assert_eq!(gpu.vm_reserve(2 * MIB, 0, Some(free))?, free);
    assert_ne!(gpu.vm_reserve(2 * MIB, 0, Some(free))?, free);
    assert_ne!(gpu.vm_reserve(2 * MIB, 0, Some(LOW))?, LOW);
    Ok(())
}

#[test]
fn pinned_memory_does_not_overlap_memory_placed_at_process_addresses() -> Result<()> {
    let gpu = gpu();
    gpu.place_next_reserve(LOW)?;
    let everything = (1 << 47) - LOW.0;
    gpu.vm_reserve(everything, 0, None)?;
    let error = gpu.host_alloc(DEVICE, 4096, HostOptions::default()).expect_err("these addresses are in use");
    assert!(error.is_out_of_memory() && error.to_string().contains("was placed"), "{error}");
    gpu.vm_free_range(LOW, everything)?;
    let pinned = gpu.host_alloc(DEVICE, 4096, HostOptions::default())?;
    let unit = DevicePtr(pinned.0 / 512 * 512);
    assert!(refusal(placed(&gpu, unit, 512)).contains("pinned host memory"));
    Ok(())
}

#[test]
fn scattered_addresses_are_in_the_range_and_depend_on_the_seed() -> Result<()> {
    let range = LOW..LOW.offset(64 << 30);
    let addresses = |seed: u64| -> Result<Vec<DevicePtr>> {
        let gpu = gpu();
        assert_eq!(placed(&gpu, LOW, 4 * MIB)?, LOW);
        gpu.scatter_addresses(seed, range.clone());
        let mut found = (0..32).map(|_| gpu.mem_alloc(DEVICE, 20 * MIB)).collect::<Result<Vec<_>>>()?;
        assert_eq!(placed(&gpu, HIGH, 2 * MIB)?, HIGH, "placements come first");
        found.push(gpu.vm_reserve(64 * MIB, 0, None)?);
        assert!(found.iter().all(|ptr| range.contains(ptr) && ptr.0.is_multiple_of(2 * MIB)), "{found:?}");
        Ok(found)
    };
    let (one, two) = (addresses(1)?, addresses(2)?);
    assert_eq!(one, addresses(1)?, "the same seed gives the same addresses");
    assert_ne!(one, two);
    assert!(!one.is_sorted() && !two.is_sorted());
    // A range without room: upwards.
    let gpu = gpu();
    gpu.scatter_addresses(3, LOW..LOW.offset(MIB));
    assert!(gpu.mem_alloc(DEVICE, 2 * MIB)?.0 >= 1 << 47);
    Ok(())
}
