//! Placement of blocks and pages: short scripts in, pictures of the addresses out. Each test is a rule of
//! `docs/design/placement.md`, which names the test.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, DevicePtr, Streams as _};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{BlockState, SegmentInfo, SnapshotOptions};
use warpool::memory::{DeviceAllocator, MemPoolId, PagedAllocator, Settings};
use warpool::{Device, Instance, Stream};

use crate::sizes::{bytes, short};

const DEVICE: DeviceId = DeviceId(0);

/// A machine that runs scripts.
///
/// Steps: `a=10M` allocates under a name, `b=10M@2` on the second stream; `free a`; `wait` for all streams; `trim`;
/// `pause`, whatever is submitted to the first stream from then on waits; `pages 2`, new pages have two slots, instead
/// of one. Sizes have the units K and M. A picture has a line for each stream that has pages, blocks by address, each
/// with its name or `.` if free, and `_` for the holes between them.
struct Script {
    sim: Arc<SimDriver>,
    device: Device,
    paged: PagedAllocator,
    streams: Vec<Stream>,
    named: BTreeMap<String, Allocation>,
}

impl Script {
    fn new(capacity: u64) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_capacity(capacity)));
        let instance = Instance::new(sim.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let streams = (0..3).map(|_| device.pool_stream().unwrap()).collect();
        let paged = PagedAllocator::new(&instance, Settings::default()).unwrap();
        paged.set_page_sizes(u64::MAX, u64::MAX);
        Self { sim, device, paged, streams, named: BTreeMap::new() }
    }

    fn run(&mut self, steps: &str) {
        for step in steps.split(';').map(str::trim).filter(|step| !step.is_empty()) {
            if let Some((name, size)) = step.split_once('=') {
                let (size, stream) = size.split_once('@').unwrap_or((size, "1"));
                let stream = &self.streams[stream.parse::<usize>().unwrap() - 1];
                let request = Request::new(DEVICE, stream.id(), bytes(size));
                self.named.insert(name.to_owned(), self.paged.allocate_raw(request).unwrap());
            } else if let Some(name) = step.strip_prefix("free ") {
                self.paged.free(self.named.remove(name).expect("it was allocated")).unwrap();
            } else if step == "wait" {
                self.device.synchronize().unwrap();
            } else if step == "pause" {
                self.sim.pause_stream(self.streams[0].id()).unwrap();
            } else if step == "pages 2" {
                self.paged.set_page_sizes(0, u64::MAX);
            } else {
                assert_eq!(step, "trim", "unknown step");
                self.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
            }
            self.paged.check();
        }
        assert_eq!(self.sim.hazards(), []);
    }

    fn draw(&self) -> String {
        let mut segments = self.paged.snapshot(SnapshotOptions::default()).unwrap().segments;
        segments.sort_by_key(|segment| segment.address);
        let lines = (1..).zip(&self.streams).filter_map(|(number, stream)| {
            let raw = self.sim.stream_handle(stream.id()).unwrap().raw.0;
            let of_stream: Vec<_> = segments.iter().filter(|segment| segment.stream == raw).collect();
            (!of_stream.is_empty()).then(|| format!("{number}: {}", self.draw_stream(&of_stream)))
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    fn draw_stream(&self, segments: &[&SegmentInfo]) -> String {
        let (mut drawn, mut end) = (String::new(), None);
        for segment in segments {
            match end.map(|end| segment.address - end) {
                None | Some(0) => {}
                // Blocks up to 1 MiB have addresses of their own.
                Some(gap) if gap > 1 << 29 => drawn.push(' '),
                Some(gap) => write!(drawn, "_{}_", short(gap)).unwrap(),
            }
            for block in &segment.blocks {
                let named = |(_, allocation): &(&String, &Allocation)| allocation.ptr == DevicePtr(block.address);
                let name = match block.state {
                    BlockState::Inactive => ".",
                    _ => self.named.iter().find(named).map_or("?", |(name, _)| name),
                };
                write!(drawn, "[{name} {}]", short(block.size)).unwrap();
            }
            end = Some(segment.address + segment.total_size);
        }
        drawn
    }
}

/// The picture after all steps, and what was done with pages: created, taken, taken back, mapped, unmapped.
fn check(steps: &str, picture: &str, done: [u64; 5]) {
    let mut script = Script::new(1 << 30);
    script.run(steps);
    let totals = script.paged.page_stats(DEVICE).unwrap().totals;
    let totals = [totals.created, totals.taken, totals.taken_back, totals.mapped, totals.unmapped];
    assert_eq!((script.draw().as_str(), totals), (picture, done), "{steps}");
}

#[test]
fn the_smallest_free_block_that_fits_is_cut() {
    check("a=5M; b=1.5M; free a; c=2M", "1: [c 2M][. 3M][b 1536K][. 1536K]", [4, 0, 0, 4, 0]);
    // Whether or not it was freed last.
    for order in ["free a; free b", "free b; free a"] {
        let steps = format!("a=6M; x=2M; b=4M; y=2M; {order}; c=4M");
        check(&steps, "1: [. 6M][x 2M][c 4M][y 2M]", [7, 0, 0, 7, 0]);
    }
}

#[test]
fn small_blocks_have_addresses_of_their_own() {
    check("a=500K; b=500K; c=2M", "1: [a 500K][b 500K][. 1048K] [c 2M]", [2, 0, 0, 2, 0]);
}

#[test]
fn neighbours_share_a_page() {
    check("a=5M; b=5M", "1: [a 5M][b 5M]", [5, 0, 0, 5, 0]);
}

#[test]
fn free_pages_are_mapped_elsewhere_before_memory_grows() {
    check("a=4M; b=4M; c=4M; free a; free c; d=8M", "1: [b 4M][d 8M]", [6, 2, 0, 8, 0]);
}

#[test]
fn the_smallest_free_block_gives_its_pages_first() {
    let picture = "1: [x 2M]_2M_[. 6M][y 2M]\n2: [c 6M]";
    check("a=4M; x=2M; b=8M; y=2M; free a; free b; c=6M@2", picture, [8, 3, 0, 11, 0]);
}

#[test]
fn own_pages_come_before_those_of_other_streams_and_new_ones_last() {
    check("a=4M@2; b=4M; c=2M; free a; free b; d=6M", "1: [c 2M][d 6M]\n2: [. 2M]", [5, 3, 0, 8, 0]);
    check("a=4M@2; b=4M; c=2M; free a; free b; d=10M", "1: [c 2M][d 10M]", [6, 4, 0, 10, 0]);
}

#[test]
fn a_page_that_is_still_mapped_is_taken_back_without_a_driver_call() {
    check("a=8M; free a; b=8M@2; free b; c=8M", "1: [c 8M]", [4, 8, 4, 8, 0]);
}

/// Beside `e`, one page more would be mapped; where `b` was, the first and the last page are shared, and none is new.
#[test]
fn a_window_that_needs_no_new_page_comes_before_one_that_needs_fewer_calls() {
    let picture = "1: [a 5M][f 5M][c 5M][d 7M]";
    check("a=5M; b=5M; c=5M; free b; d=7M; e=4M; free e; f=5M", picture, [11, 4, 0, 15, 2]);
}

#[test]
fn a_trim_leaves_only_pages_in_use_and_their_addresses_serve_again() {
    let steps = "a=8M; b=2M; free a; c=10M; free c; wait; trim";
    check(steps, "1: [b 2M]", [6, 4, 0, 10, 9]);
    check(&format!("{steps}; d=8M"), "1: [d 8M][b 2M]", [10, 4, 0, 14, 9]);
}

#[test]
fn sizes_are_rounded_to_512_bytes() {
    check("a=1; b=1000", "1: [a 512][b 1K][. 2095616]", [1, 0, 0, 1, 0]);
}

#[test]
fn free_neighbours_are_merged_and_keep_their_pages() {
    for order in ["free a; free b", "free b; free a"] {
        check(&format!("a=2M; b=2M; x=2M; {order}; c=4M"), "1: [c 4M][x 2M]", [3, 0, 0, 3, 0]);
    }
}

#[test]
fn of_equal_windows_the_lowest_is_filled() {
    let picture = "1: [c 2M][x 2M]_2M_[y 2M]";
    check("a=2M; x=2M; b=2M; y=2M; free a; free b; wait; trim; c=2M", picture, [5, 0, 0, 5, 2]);
}

/// Before `x` one page is mapped and another one taken back; after it one is mapped, and `b` has the other: one driver
/// call and two slots each.
#[test]
fn of_windows_of_equal_cost_the_one_that_needs_the_fewest_pages_is_filled() {
    let holes = "a=4M; x=2M; b=2M; c=2M; y=2M; free a; free c; wait; trim";
    let old_mapping = "d=2M; free d; e=2M@2; free e";
    check(&format!("{holes}; {old_mapping}; free b; f=4M"), "1: [x 2M][f 4M][y 2M]", [7, 2, 0, 9, 3]);
}

/// Before `x` the mapping of a page that `c` has would have to be undone: two calls. After it nothing is mapped: one.
#[test]
fn an_old_mapping_that_has_to_be_undone_costs_two_calls() {
    let hole = "a=2M; x=2M; b=2M; y=2M; free b; wait; trim";
    check(&format!("{hole}; free a; c=4M; d=2M"), "1: [x 2M][d 2M][y 2M][c 4M]", [6, 1, 0, 7, 1]);
}

/// Beside the free part of a page that `x` has, one slot less is needed. `c` has the page that is still mapped there.
#[test]
fn a_mapping_is_undone_once_its_stream_has_passed() {
    let script = "a=3M; x=5M; free a; c=4M; d=3M";
    check(script, "1: [d 3M][x 5M][c 4M]", [6, 1, 0, 7, 1]);
    check(&format!("pause; {script}"), "1: [. 1M][x 5M][c 4M][d 3M][. 1M]", [7, 1, 0, 8, 0]);
}

/// Where `a` was, pages are still mapped that another stream has free: no driver call. But `b` and `c` are enough.
#[test]
fn pages_of_other_streams_do_not_count_if_those_of_this_one_are_enough() {
    let own = "a=4M; x=2M; b=2M; y=2M; c=2M; z=2M; free a; e=4M@2; free e";
    let picture = "1: [x 2M]_2M_[y 2M]_2M_[z 2M][f 4M]\n2: [. 4M]";
    check(&format!("{own}; free b; free c; f=4M"), picture, [7, 4, 0, 11, 0]);
    let picture = "1: [f 4M][x 2M][. 2M][y 2M][c 2M][z 2M]";
    check(&format!("{own}; free b; f=4M"), picture, [7, 4, 2, 9, 0]);
}

#[test]
fn other_streams_give_pages_in_the_order_of_their_heaps() {
    check("a=2M@3; b=2M@2; free a; free b; c=2M", "1: [c 2M]\n2: [. 2M]", [2, 1, 0, 3, 0]);
}

#[test]
fn large_pages_of_all_streams_come_before_smaller_ones() {
    let picture = "1: [. 4M]\n3: [c 4M]";
    check("a=4M; pages 2; b=4M@2; free a; free b; c=4M@3", picture, [3, 1, 0, 4, 0]);
}

#[test]
fn windows_begin_and_end_at_multiples_of_the_size_of_a_new_page() {
    check("pages 2; a=2M; b=6M; c=2M", "1: [a 2M][b 6M][c 2M][. 2M]", [3, 0, 0, 3, 0]);
}

/// Reserved memory after a request.
#[test]
fn new_pages_have_4_mib_and_8_mib_beyond_16_gib_of_reserved_memory() {
    for (steps, reserved) in [
        ("a=2M", "4M"),
        ("a=5M", "8M"),
        ("a=1K", "2M"),
        // A page for the gap beside the one that is taken.
        ("a=1K; b=2M; free a; c=4M@2", "8M"),
        ("a=16380M; b=2M", "16G"),
        ("a=16G; b=2M", "16392M"),
    ] {
        let mut script = Script::new(20 << 30);
        script.paged.set_page_sizes(0, 16 << 30);
        script.run(steps);
        assert_eq!(short(script.paged.page_stats(DEVICE).unwrap().reserved_bytes), reserved, "{steps}");
    }
}

/// The first page is moved to 20 addresses, the second to 19, and so on.
#[test]
fn a_page_is_mapped_at_16_addresses_at_most() {
    // No block before the next one fits where mappings were undone.
    let moves = |round: u32| format!("a{round}={}M; x{round}=44M; free a{round}", 2 * round);
    let steps: Vec<_> = (1..=20).map(moves).collect();
    let mut script = Script::new(2 << 30);
    // The next request that needs pages undoes mappings.
    script.run(&format!("{}; y=44M", steps.join("; ")));
    assert_eq!(script.paged.page_stats(DEVICE).unwrap().totals.unmapped, 4 + 3 + 2 + 1);
}

/// What a reader of `docs/design/placement.md` predicted, who knew nothing else.
#[test]
fn the_page_alone_predicts_placements() {
    check("a=3M; b=5M; free a; c=2.5M", "1: [c 2560K][. 512K][b 5M]", [4, 0, 0, 4, 0]);
    check("a=4M; b=2M; free a; d=8M", "1: [b 2M][d 8M]", [5, 2, 0, 7, 0]);
    check("a=4M; b=2M; free a; c=4M@2", "1: [b 2M]\n2: [c 4M]", [3, 2, 0, 5, 0]);
    check("a=500K; b=600K; c=700K; free a; d=500K", "1: [d 500K][b 600K][c 700K][. 248K]", [1, 0, 0, 1, 0]);
    check("a=4M; x=2M; free a; b=4M@2; free b; c=4M", "1: [c 4M][x 2M]", [3, 4, 2, 5, 0]);
    check("a=3M; b=3M; c=2M; free b; d=5M", "1: [a 3M][. 1M]_2M_[c 2M][d 5M][. 1M]", [6, 1, 0, 7, 0]);
    check("a=2M; b=2M; c=2M; d=2M; free a; free c; e=3M", "1: [b 2M]_2M_[d 2M][e 3M][. 1M]", [4, 2, 0, 6, 0]);
    check("a=6M@2; x=2M; free a; b=3M; c=3M", "1: [x 2M][b 3M][c 3M]", [4, 3, 0, 7, 0]);
}
