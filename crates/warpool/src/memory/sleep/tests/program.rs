//! Random programs: blocks with and without tags on several streams, graphs over them, sleep and wake of any tags, with
//! limits, faults and memory that runs out. A naive model knows which tags sleep and what every block contains.

use std::collections::{BTreeMap, BTreeSet};

use warpool_driver::decorate::FaultPlan;
use warpool_driver::sim::{Latencies, SimConfig};
use warpool_driver::{Call, ErrorCode, GraphExecId, GraphId, Streams as _};
use warpool_testing::{FailingSeed, Rng};

use super::machine::{DEVICE, Kind, MIB, Machine};
use crate::memory::{Allocation, Keep, MemPoolId, PinnedSettings};
use crate::{Error, Result};

const TAGS: [&str; 3] = ["weights", "kv", "graphs"];
const STREAMS: usize = 3;

/// How often each operation was made.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    /// The rarest.
    pub fn least(&self) -> u64 {
        const ALL: [&str; 12] = [
            "allocated",
            "refused",
            "freed",
            "freed asleep",
            "slept",
            "discarded",
            "woken",
            "sleep failed",
            "wake failed",
            "captured",
            "replayed",
            "limited",
        ];
        ALL.iter().map(|what| self.0.get(what).copied().unwrap_or(0)).min().unwrap_or(0)
    }
}

struct Block {
    allocation: Allocation,
    /// `None` without a tag.
    tag: Option<usize>,
    stream: usize,
    contents: u32,
}

/// A graph that checks the contents of one block and writes those of another.
struct Graph {
    handles: (GraphId, GraphExecId),
    input: usize,
    output: usize,
    writes: u32,
}

struct Run<'a> {
    machine: &'a Machine,
    rng: Rng,
    tally: &'a mut Tally,
    failing: FailingSeed,
    blocks: BTreeMap<usize, Block>,
    graphs: Vec<Graph>,
    asleep: BTreeMap<usize, Keep>,
    next: usize,
}

/// Runs the program of a seed. Returns the first defect that the simulation saw.
pub fn defect_of(seed: u64, tally: &mut Tally) -> Option<String> {
    let mut rng = Rng::new(seed);
    let mut config = SimConfig::default().with_seed(seed);
    config.track_suballocations = rng.one_in(2);
    config.queue_depth = rng.pick(&[3, 20, 1024]);
    config.latencies = if rng.one_in(2) { Latencies::flat(0) } else { Latencies::h200() };
    let cap_bytes = if rng.one_in(4) { Some(rng.pick(&[8, 24, 60]) * MIB) } else { None };
    let pinned = PinnedSettings { cap_bytes, ..PinnedSettings::default() };
    let machine = Machine::with(rng.pick(&Kind::ALL), config, rng.pick(&[80, 120, 240]) * MIB, pinned);
    let mut run = Run {
        machine: &machine,
        rng,
        tally,
        failing: FailingSeed::new(seed),
        blocks: BTreeMap::new(),
        graphs: Vec::new(),
        asleep: BTreeMap::new(),
        next: 1,
    };
    for _ in 0..run.rng.u64_in(20..=60) {
        run.step();
        if let Some(defect) = run.machine.sim.hazards().first() {
            return Some(defect.to_string());
        }
    }
    run.end();
    drop(run);
    machine.finish()
}

impl Run<'_> {
    fn step(&mut self) {
        match self.rng.below(20) {
            0..6 => self.allocate(),
            6..9 => self.free(),
            9..11 => self.check_one(),
            11..14 => self.sleep(),
            14..17 => self.wake(),
            17 => self.capture(),
            18 => self.replay(),
            _ => self.limit_or_trim(),
        }
        self.machine.check();
        for (at, tag) in TAGS.iter().enumerate() {
            assert_eq!(self.machine.is_asleep(tag), self.asleep.contains_key(&at), "{tag}");
        }
        let stats = self.machine.allocator.stats(DEVICE).unwrap();
        let physical: u64 = self.machine.tags.info().iter().map(|info| info.bytes_device).sum();
        let tagged: u64 = self.machine.tags.info().iter().map(|info| info.bytes).sum();
        assert!(stats.asleep_bytes.all.current + physical >= tagged, "what does not sleep is there");
    }

    fn allocate(&mut self) {
        let tag = if self.rng.one_in(4) { None } else { Some(self.rng.below(TAGS.len())) };
        let bytes = self.rng.pick(&[100, 5000, MIB, 3 * MIB, 12 * MIB, 30 * MIB]);
        let stream = self.rng.below(STREAMS);
        let outcome = match tag {
            Some(tag) => self.machine.allocate(TAGS[tag], bytes, stream),
            None => self.machine.untagged(bytes, stream),
        };
        self.failing.push(format!("allocate {bytes} for {tag:?} on {stream}: {}", outcome.is_ok()));
        let is_asleep = tag.is_some_and(|tag| self.asleep.contains_key(&tag));
        match outcome {
            Ok(allocation) => {
                assert!(!is_asleep, "a sleeping tag serves no request");
                let (number, contents) = (self.next, self.next as u32);
                self.next += 1;
                self.machine.write(&allocation, contents, stream);
                self.blocks.insert(number, Block { allocation, tag, stream, contents });
                self.tally.count("allocated");
            }
            Err(Error::TagAsleep { .. }) => {
                assert!(is_asleep, "an awake tag serves requests");
                self.tally.count("refused");
            }
            Err(Error::OutOfMemory(_)) => assert!(!is_asleep),
            Err(error) => panic!("{error}"),
        }
    }

    /// A block that no graph uses.
    fn pick(&mut self) -> Option<usize> {
        let used: BTreeSet<usize> = self.graphs.iter().flat_map(|graph| [graph.input, graph.output]).collect();
        let free: Vec<usize> = self.blocks.keys().copied().filter(|number| !used.contains(number)).collect();
        if free.is_empty() { None } else { Some(self.rng.pick(&free)) }
    }

    fn is_asleep(&self, number: usize) -> bool {
        self.blocks[&number].tag.is_some_and(|tag| self.asleep.contains_key(&tag))
    }

    fn free(&mut self) {
        let Some(number) = self.pick() else { return };
        self.failing.push(format!("free {number}"));
        self.tally.count(if self.is_asleep(number) { "freed asleep" } else { "freed" });
        let block = self.blocks.remove(&number).unwrap();
        self.machine.allocator.free(block.allocation).unwrap();
    }

    fn check_one(&mut self) {
        let numbers: Vec<usize> = self.blocks.keys().copied().filter(|&number| !self.is_asleep(number)).collect();
        if !numbers.is_empty() {
            let number = self.rng.pick(&numbers);
            self.check(number);
        }
    }

    fn check(&self, number: usize) {
        let block = &self.blocks[&number];
        self.machine.expect(&block.allocation, block.contents, block.stream);
    }

    fn some_tags(&mut self) -> Vec<usize> {
        let mut tags: Vec<usize> = (0..TAGS.len()).filter(|_| self.rng.one_in(2)).collect();
        tags.retain(|&tag| self.machine.tags.names().contains(&TAGS[tag].to_owned()));
        tags
    }

    /// Makes a call in which driver calls may fail.
    fn faulty<T>(&mut self, call: impl FnOnce(&Machine) -> Result<T>) -> (Result<T>, bool) {
        let code = self.rng.pick(&[ErrorCode::OutOfMemory, ErrorCode::Unknown(999)]);
        let kinds = [Call::VmCreate, Call::VmMap, Call::VmSetAccess, Call::VmUnmap, Call::VmRelease, Call::Copy];
        let plan = match self.rng.below(10) {
            0 => FaultPlan::new().fail_nth_of_all(1 + self.rng.u64_below(60), code),
            1 => FaultPlan::new().fail_fraction(&kinds, 0.1, self.rng.u64(), code),
            2 => FaultPlan::new().fail_fraction(&[self.rng.pick(&kinds)], 1.0, 0, code),
            _ => FaultPlan::new(),
        };
        let before = self.machine.faulty.injected().len();
        self.machine.faulty.set_plan(plan);
        let outcome = call(self.machine);
        self.machine.faulty.clear_plan();
        (outcome, self.machine.faulty.injected().len() > before)
    }

    fn sleep(&mut self) {
        let tags = self.some_tags();
        let keep = if self.rng.one_in(3) { Keep::Discard } else { Keep::Host };
        let names: Vec<&str> = tags.iter().map(|&tag| TAGS[tag]).collect();
        let (outcome, faulted) = self.faulty(|machine| machine.sleep(&names, keep));
        self.failing.push(format!("sleep {names:?}, {keep:?}: {:?}", outcome.as_ref().err()));
        match outcome {
            Ok(report) => {
                for &tag in &tags {
                    let was = self.asleep.get(&tag).copied();
                    // A tag that is already asleep keeps its contents, unless they are discarded now.
                    let now = if was == Some(Keep::Discard) { Keep::Discard } else { keep };
                    self.asleep.insert(tag, now);
                    let discards = now == Keep::Discard && was != Some(Keep::Discard);
                    let of_tag = self.blocks.values_mut().filter(|block| discards && block.tag == Some(tag));
                    of_tag.for_each(|block| block.contents = 0);
                }
                assert!(faulted || report.bytes_not_returned == 0 || !report.unchanged.is_empty());
                self.tally.count(if keep == Keep::Host { "slept" } else { "discarded" });
            }
            Err(Error::Sleep(failure)) => {
                self.tally.count("sleep failed");
                if !failure.is_undone {
                    assert!(faulted, "{failure}");
                    for tag in tags {
                        self.asleep.entry(tag).or_insert(keep);
                        // All contents are there: the memory was not released.
                        self.asleep_with_contents(tag);
                    }
                }
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Wakes a tag at once that is asleep although the sleep failed.
    fn asleep_with_contents(&mut self, tag: usize) {
        self.failing.push(format!("wake {} after a failure", TAGS[tag]));
        if self.machine.wake(&[TAGS[tag]]).is_ok() {
            self.asleep.remove(&tag);
        }
    }

    fn wake(&mut self) {
        let tags = self.some_tags();
        let names: Vec<&str> = tags.iter().map(|&tag| TAGS[tag]).collect();
        let (outcome, _) = self.faulty(|machine| machine.wake(&names));
        self.failing.push(format!("wake {names:?}: {:?}", outcome.as_ref().err()));
        match outcome {
            Ok(report) => {
                self.tally.count(if report.changed.is_empty() { "awake already" } else { "woken" });
                self.asleep.retain(|tag, _| !tags.contains(tag));
            }
            Err(Error::Sleep(_)) => self.tally.count("wake failed"),
            Err(error) => panic!("{error}"),
        }
        let awake: Vec<usize> = self.blocks.keys().copied().filter(|&number| !self.is_asleep(number)).collect();
        awake.into_iter().for_each(|number| self.check(number));
    }

    fn capture(&mut self) {
        let graphs_sleep = self.asleep.contains_key(&2);
        let (Some(input), Some(output)) = (self.pick(), self.pick()) else { return };
        if self.graphs.len() >= 3 || graphs_sleep || input == output {
            return;
        }
        let writes = 1000 + self.next as u32;
        self.next += 1;
        self.failing.push(format!("capture: {input} to {output}"));
        let stream = self.rng.below(STREAMS);
        // Everything that the graph uses was written before, in the order of any stream.
        warpool_driver::Devices::device_synchronize(&*self.machine.sim, DEVICE).unwrap();
        let handles = self.machine.capture(stream, "graphs", || {
            let scratch = self.machine.untagged(MIB, stream).ok();
            let (from, to) = (&self.blocks[&input], &self.blocks[&output]);
            self.machine.expect(&from.allocation, from.contents, stream);
            if let Some(scratch) = scratch {
                self.machine.write(&scratch, 77, stream);
                self.machine.expect(&scratch, 77, stream);
                self.machine.allocator.free(scratch).unwrap();
            }
            self.machine.write(&to.allocation, writes, stream);
        });
        self.graphs.push(Graph { handles, input, output, writes });
        self.tally.count("captured");
    }

    fn replay(&mut self) {
        let Some(at) = self.graphs.len().checked_sub(1).map(|last| self.rng.below(last + 1)) else { return };
        let Graph { handles, input, output, writes } = self.graphs[at];
        if self.is_asleep(input) || self.is_asleep(output) || self.asleep.contains_key(&2) {
            return;
        }
        // The graph checks what its input contained when it was captured.
        let captured_with = self.blocks[&input].contents;
        self.failing.push(format!("replay of {input} to {output}"));
        warpool_driver::Devices::device_synchronize(&*self.machine.sim, DEVICE).unwrap();
        if captured_with == input as u32 {
            let stream = self.machine.streams[self.rng.below(STREAMS)].id();
            self.machine.sim.graph_launch(handles.1, stream).unwrap();
            self.machine.sim.stream_synchronize(stream).unwrap();
            self.blocks.get_mut(&output).unwrap().contents = writes;
            self.tally.count("replayed");
        }
    }

    fn limit_or_trim(&mut self) {
        if self.rng.one_in(2) {
            let cap = self.rng.pick(&[None, Some(60 * MIB), Some(100 * MIB)]);
            self.failing.push(format!("cap {cap:?}"));
            self.machine.set_cap(cap);
            self.tally.count("limited");
        } else {
            self.failing.push("trim".to_owned());
            self.machine.allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        }
    }

    /// Wakes and checks everything, and frees it.
    fn end(&mut self) {
        self.machine.set_cap(None);
        let untagged: Vec<usize> =
            self.blocks.iter().filter(|(_, block)| block.tag.is_none()).map(|(&number, _)| number).collect();
        warpool_driver::Devices::device_synchronize(&*self.machine.sim, DEVICE).unwrap();
        self.graphs.drain(..).for_each(|graph| self.machine.destroy(graph.handles));
        for number in untagged {
            self.check(number);
            let block = self.blocks.remove(&number).unwrap();
            self.machine.allocator.free(block.allocation).unwrap();
        }
        // One after the other, those that are awake first: there may be more memory than the device has.
        let names = self.machine.tags.names();
        let mut order: Vec<usize> = (0..TAGS.len()).filter(|&tag| names.contains(&TAGS[tag].to_owned())).collect();
        order.sort_by_key(|tag| self.asleep.contains_key(tag));
        for tag in order {
            let name = TAGS[tag];
            self.failing.push(format!("wake {name} at the end"));
            self.machine.wake(&[name]).unwrap();
            self.asleep.remove(&tag);
            let of_tag = self.blocks.iter().filter(|(_, block)| block.tag == Some(tag));
            for number in of_tag.map(|(&number, _)| number).collect::<Vec<_>>() {
                self.check(number);
                let block = self.blocks.remove(&number).unwrap();
                self.machine.allocator.free(block.allocation).unwrap();
            }
            self.machine.sleep(&[name], Keep::Discard).unwrap();
        }
    }
}
