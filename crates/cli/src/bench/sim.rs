//! `warpool bench sim`: how much work the simulated GPU gets through, and whether its memory stays flat meanwhile.
//! Every case queues work on streams and lets it complete; an operation is one call, or one node of a graph.

use std::time::{Duration, Instant};

use serde_json::json;
use warpool_driver::sim::SimDriver;
use warpool_driver::{
    CaptureMode, Captures, Copies, DeviceId, DevicePtr, Devices, EventId, EventOptions, EventScope, Events, FunctionId,
    GraphExecId, Graphs, InstantiateOptions, KernelArg, Kernels, LaunchShape, Memory, Pattern, Result as DriverResult,
    StreamId, StreamOptions, Streams,
};

use super::driver::KERNELS;
use super::measure::{bytes_resident, ns_each};
use super::{Args, Row, Rows};
use crate::driver;
use crate::output::{CommandError, Result, Verdict};
use crate::size;

const STREAMS: usize = 4;
/// Each stream has a page of its own to work on.
const PAGE: u64 = 4096;
/// How many kernels are in the graph.
const NODES: u64 = 10;
/// How much memory may grow by and still count as flat, in percent.
const FLAT_PERCENT: u64 = 5;

pub fn run(args: &Args, rows: &mut Rows<'_>) -> Result<Verdict> {
    if let Some(name) = args.driver.as_deref().filter(|&name| name != "sim") {
        return Err(CommandError::Usage(format!(
            "'bench sim' measures the driver 'sim', not '{name}'; see 'bench driver'"
        )));
    }
    let sim = SimDriver::new(args.sim.config(0));
    let device = driver::device(&sim, args.device)?;
    let ops = args.ops.unwrap_or(1_000_000);
    let bench = Setup::new(&sim, device)?;

    for (case, run) in CASES {
        let (done, elapsed) = bench.time(ops, *run)?;
        rows.add(Row { case, ns: ns_each(elapsed, done), extra: Vec::new(), besides: String::new() })?;
    }
    flat(&bench, ops, rows)
}

/// A case queues work: one round of operations, of which it returns the number.
type Case = fn(&Setup<'_>) -> DriverResult<u64>;

const CASES: &[(&str, Case)] = &[
    ("fills of 64 bytes on one stream", fills),
    ("copies of 64 bytes on one stream", copies),
    ("event record and query", events),
    ("kernels on 4 streams with events between", kernels),
    ("graph launches of 10 kernels, per kernel", graph_launches),
];

fn fills(bench: &Setup<'_>) -> DriverResult<u64> {
    bench.sim.fill(bench.pages[0], Pattern::U8(1), 64, bench.streams[0])?;
    Ok(1)
}

fn copies(bench: &Setup<'_>) -> DriverResult<u64> {
    bench.sim.copy(bench.pages[1].into(), bench.pages[0].into(), 64, bench.streams[0])?;
    Ok(1)
}

fn events(bench: &Setup<'_>) -> DriverResult<u64> {
    bench.sim.event_record(bench.events[0], bench.streams[0], EventScope::Plain)?;
    bench.sim.event_query(bench.events[0])?;
    Ok(2)
}

/// A kernel on each stream, which the next stream's kernel waits for.
fn kernels(bench: &Setup<'_>) -> DriverResult<u64> {
    for this in 0..STREAMS {
        let next = (this + 1) % STREAMS;
        bench.launch(this)?;
        bench.sim.event_record(bench.events[this], bench.streams[this], EventScope::Plain)?;
        bench.sim.stream_wait_event(bench.streams[next], bench.events[this], EventScope::Plain)?;
    }
    Ok(3 * STREAMS as u64)
}

fn graph_launches(bench: &Setup<'_>) -> DriverResult<u64> {
    bench.sim.graph_launch(bench.graph, bench.streams[0])?;
    Ok(NODES)
}

/// A bit of everything on every stream; what a program under way looks like.
fn mixed(bench: &Setup<'_>) -> DriverResult<u64> {
    for (&stream, &page) in bench.streams.iter().zip(&bench.pages) {
        bench.sim.fill(page, Pattern::U8(1), 64, stream)?;
        bench.sim.copy(page.offset(1024).into(), page.into(), 64, stream)?;
    }
    Ok(2 * STREAMS as u64 + kernels(bench)?)
}

/// Queues all the operations and looks at the memory of the process once early and once at the end.
fn flat(bench: &Setup<'_>, ops: u64, rows: &mut Rows<'_>) -> Result<Verdict> {
    let early = (ops / 2).clamp(1, 1_000_000);
    let (first, mut elapsed) = bench.time(early, mixed)?;
    let resident_early = bytes_resident();
    let (rest, more) = bench.time(ops.saturating_sub(first).max(1), mixed)?;
    let resident = bytes_resident();
    elapsed += more;

    let ops = first + rest;
    let ns = ns_each(elapsed, ops);
    let mut extra = vec![("ops", json!(ops))];
    let mut verdict = Verdict::Success;
    match (resident_early, resident) {
        (Some(before), Some(after)) => {
            let flat = after.saturating_sub(before) * 100 < before * FLAT_PERCENT;
            extra.extend([
                ("ops_early", json!(first)),
                ("bytes_resident_early", json!(before)),
                ("bytes_resident", json!(after)),
                ("flat", json!(flat)),
            ]);
            rows.remark(format!(
                "memory {}: {} resident after {first} operations, {} after {ops}",
                if flat { "is flat" } else { "GROWS" },
                size::show(before),
                size::show(after),
            ));
            verdict = if flat { Verdict::Success } else { Verdict::Failure };
        }
        _ => rows.remark("memory: the system does not say how much is resident".to_owned()),
    }
    rows.add(Row { case: "everything on 4 streams", ns, extra, besides: format!("{ops} operations") })?;
    Ok(verdict)
}

/// What the cases work with. It goes with its simulated device.
struct Setup<'a> {
    sim: &'a SimDriver,
    device: DeviceId,
    streams: Vec<StreamId>,
    events: Vec<EventId>,
    pages: Vec<DevicePtr>,
    kernel: FunctionId,
    graph: GraphExecId,
}

impl<'a> Setup<'a> {
    fn new(sim: &'a SimDriver, device: DeviceId) -> DriverResult<Self> {
        let module = sim.module_load(device, &KERNELS)?;
        let kernel = sim.function_get(module, "warpool_bench_set")?;
        let streams: Vec<_> =
            (0..STREAMS).map(|_| sim.stream_create(device, StreamOptions::default())).collect::<DriverResult<_>>()?;
        let events =
            (0..STREAMS).map(|_| sim.event_create(device, EventOptions::default())).collect::<DriverResult<_>>()?;
        let pages: Vec<_> = (0..STREAMS).map(|_| sim.mem_alloc(device, PAGE)).collect::<DriverResult<_>>()?;

        sim.capture_begin(streams[0], CaptureMode::Global)?;
        for _ in 0..NODES {
            launch(sim, kernel, pages[0], streams[0])?;
        }
        let template = sim.capture_end(streams[0])?;
        let graph = sim.graph_instantiate(template, InstantiateOptions::default())?;
        sim.graph_destroy(template)?;
        Ok(Self { sim, device, streams, events, pages, kernel, graph })
    }

    fn launch(&self, stream: usize) -> DriverResult<()> {
        launch(self.sim, self.kernel, self.pages[stream], self.streams[stream])
    }

    /// Runs rounds until there were `ops` operations, and waits for all of them. Returns how many there were.
    fn time(&self, ops: u64, round: Case) -> DriverResult<(u64, Duration)> {
        let begun = Instant::now();
        let mut done = 0;
        while done < ops {
            done += round(self)?;
        }
        self.sim.device_synchronize(self.device)?;
        Ok((done, begun.elapsed()))
    }
}

fn launch(sim: &SimDriver, kernel: FunctionId, page: DevicePtr, stream: StreamId) -> DriverResult<()> {
    sim.kernel_launch(kernel, LaunchShape::ONE, &[KernelArg::Ptr(page), KernelArg::U32(1)], stream)
}
