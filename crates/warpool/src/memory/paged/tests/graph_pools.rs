//! Graphs and the pages of their pools, step by step.

use warpool_driver::{CaptureMode, CaptureState, Captures as _, Graphs as _, InstantiateOptions, Streams as _};

use super::machine::{DEVICE, MIB, Machine};
use crate::memory::{Allocation, DeviceAllocator as _, MemPoolId, PrivatePools as _, Request, Route, Settings};

/// In a capture a page moves from block to block, at ever new addresses: a replay uses all of them.
#[test]
fn addresses_of_a_captured_graph_stay_mapped() {
    let machine = Machine::with_capacity(400 * MIB, 1, Settings::default());
    let (paged, sim, stream) = (&machine.paged, &machine.sim, &machine.streams[0]);
    let pool = paged.create_graph_pool(DEVICE).unwrap();
    let allocate = |mib: u64| paged.allocate_raw(Request::new(DEVICE, stream.id(), mib * MIB)).unwrap();
    paged.capture_began(DEVICE).unwrap();
    sim.capture_begin(stream.id(), CaptureMode::Global).unwrap();
    let CaptureState::Active(capture) = sim.capture_state(stream.id()).unwrap() else { panic!("it captures") };
    paged.begin_routing(DEVICE, pool, Route::Capture(capture)).unwrap();
    // Each is larger than the free addresses before it, and a live block is between it and the next.
    let mut between: Vec<Allocation> = Vec::new();
    for round in 0..8 {
        let block = allocate(4 + 2 * round);
        machine.write_tag(&block, 1 + round as u32, stream);
        machine.check_tag(&block, 1 + round as u32, stream);
        between.push(allocate(2));
        paged.free(block).unwrap();
    }
    let graph = sim.capture_end(stream.id()).unwrap();
    paged.end_routing(DEVICE, pool).unwrap();
    paged.capture_ended(DEVICE).unwrap();
    let exec = sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap();
    // Work outside of captures that allocates from the pool, as warm-up runs do, moves pages on.
    for mib in [24, 30, 36, 42] {
        let request = Request { pool: Some(pool), ..Request::new(DEVICE, stream.id(), mib * MIB) };
        let block = paged.allocate_raw(request).unwrap();
        between.push(paged.allocate_raw(Request { bytes: 2 * MIB, ..request }).unwrap());
        paged.free(block).unwrap();
        sim.stream_synchronize(stream.id()).unwrap();
    }
    for _ in 0..2 {
        sim.graph_launch(exec, stream.id()).unwrap();
    }
    sim.stream_synchronize(stream.id()).unwrap();
    assert_eq!(machine.defect(), None);
    paged.check();
    sim.graph_exec_destroy(exec).unwrap();
    sim.graph_destroy(graph).unwrap();
    between.into_iter().for_each(|block| paged.free(block).unwrap());
    paged.release_pool(DEVICE, pool).unwrap();
    paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!(machine.finish(), None);
}
