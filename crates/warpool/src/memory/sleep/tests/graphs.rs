//! Graphs over memory that sleeps.

use warpool_driver::{
    CaptureMode, CaptureState, Captures as _, Devices as _, GraphExecId, GraphId, Graphs as _, InstantiateOptions,
    Streams as _,
};

use super::machine::{DEVICE, Kind, MIB, Machine};
use crate::memory::Route;
use crate::memory::sleep::Keep;

impl Machine {
    /// Captures what `body` launches on a stream, with requests of the capture routed to a tag.
    pub fn capture(&self, stream: usize, tag: &str, body: impl FnOnce()) -> (GraphId, GraphExecId) {
        let (pools, id) = (self.allocator.pools().unwrap(), self.streams[stream].id());
        pools.capture_began(DEVICE).unwrap();
        self.sim.capture_begin(id, CaptureMode::Relaxed).unwrap();
        let CaptureState::Active(capture) = self.sim.capture_state(id).unwrap() else { panic!("it captures") };
        let scope = self.tag(tag).route(Route::Capture(capture)).unwrap();
        body();
        drop(scope);
        let graph = self.sim.capture_end(id).unwrap();
        pools.capture_ended(DEVICE).unwrap();
        (graph, self.sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap())
    }

    pub fn destroy(&self, (graph, exec): (GraphId, GraphExecId)) {
        self.sim.device_synchronize(DEVICE).unwrap();
        self.sim.graph_exec_destroy(exec).unwrap();
        self.sim.graph_destroy(graph).unwrap();
    }
}

#[test]
fn graphs_work_again_after_waking() {
    for kind in Kind::ALL {
        let machine = Machine::new(kind, 256 * MIB);
        let [weights, out] = ["weights", "kv"].map(|tag| machine.allocate(tag, 10 * MIB, 0).unwrap());
        machine.write(&weights, 11, 0);
        // A block that the capture allocates and frees is the graph's at every replay.
        let graph = machine.capture(0, "graphs", || {
            let scratch = machine.untagged(4 * MIB, 0).unwrap();
            machine.expect(&weights, 11, 0);
            machine.write(&scratch, 5, 0);
            machine.expect(&scratch, 5, 0);
            machine.write(&out, 12, 0);
            machine.allocator.free(scratch).unwrap();
        });
        let info = machine.tag("graphs").info();
        assert!(info.bytes_device >= 4 * MIB, "{info:?}");
        for keep in [Keep::Host, Keep::Host, Keep::Discard] {
            let kept = if keep == Keep::Host { &["weights", "kv", "graphs"][..] } else { &["graphs", "kv"] };
            machine.sleep(kept, keep).unwrap();
            assert_eq!(machine.tag("graphs").info().bytes_device, 0, "graphs' memory sleeps too");
            let other = machine.untagged(200 * MIB, 1).unwrap();
            machine.write(&other, 99, 1);
            machine.allocator.free(other).unwrap();
            machine.wake(&["weights", "kv", "graphs"]).unwrap();
            machine.write(&out, 1, 0);
            machine.sim.graph_launch(graph.1, machine.streams[0].id()).unwrap();
            machine.expect(&out, 12, 0);
        }
        machine.sim.stream_synchronize(machine.streams[0].id()).unwrap();
        machine.destroy(graph);
        machine.allocator.free(weights).unwrap();
        machine.allocator.free(out).unwrap();
        assert_eq!(machine.finish(), None, "{kind:?}");
    }
}

/// Replays write into what the capture freed: that is not free for others, even if memory runs out.
#[test]
fn free_segments_of_graphs_stay_when_memory_runs_out() {
    for kind in Kind::ALL {
        let machine = Machine::new(kind, 256 * MIB);
        let out = machine.allocate("kv", 10 * MIB, 0).unwrap();
        let graph = machine.capture(0, "graphs", || {
            let scratch = machine.untagged(100 * MIB, 0).unwrap();
            machine.write(&scratch, 5, 0);
            machine.expect(&scratch, 5, 0);
            machine.write(&out, 12, 0);
            machine.allocator.free(scratch).unwrap();
        });
        let found = machine.untagged(200 * MIB, 1);
        assert!(matches!(found, Err(crate::Error::OutOfMemory(_))), "{found:?}");
        assert!(machine.tag("graphs").info().bytes_device >= 100 * MIB);
        machine.sim.graph_launch(graph.1, machine.streams[0].id()).unwrap();
        machine.expect(&out, 12, 0);
        machine.sim.stream_synchronize(machine.streams[0].id()).unwrap();
        machine.destroy(graph);
        machine.allocator.free(out).unwrap();
        assert_eq!(machine.finish(), None, "{kind:?}");
    }
}
