//! `warpool bench sim`: throughput of the simulated GPU, and whether its memory grows meanwhile.
//! Every case submits work to streams and waits for it; an operation is one call, or one node of a graph.

use std::time::{Duration, Instant};

use serde_json::json;
use warpool_driver::sim::SimDriver;
use warpool_driver::{
    CaptureMode, Captures, Copies, DeviceId, DevicePtr, Devices, EventId, EventOptions, EventScope, Events, FunctionId,
    GraphExecId, Graphs, InstantiateOptions, KernelArg, Kernels, LaunchShape, Memory, Pattern, Result as DriverResult,
    StreamId, StreamOptions, Streams,
};

use super::kernels::KERNELS;
use super::measure::{Measurement, bytes_resident, mutex_median, ns_each};
use super::{Args, Report, Row};
use crate::driver;
use crate::output::{CommandError, Result, Verdict};
use crate::size;

const STREAMS: usize = 4;
/// The memory of each stream.
const PAGE: u64 = 4096;
/// Kernels in the graph.
const NODES: u64 = 10;
/// Memory that grows by less than this counts as flat.
const FLAT_PERCENT: u64 = 5;

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    if let Some(name) = args.driver.as_deref().filter(|&name| name != "sim") {
        return Err(CommandError::Usage(format!(
            "'bench sim' measures the driver 'sim', not '{name}'; use 'bench driver'"
        )));
    }
    let sim = SimDriver::new(args.sim.config(0));
    let device = driver::device(&sim, args.device)?;
    let ops = args.ops.unwrap_or(1_000_000);
    let context = BenchContext::new(&sim, device)?;
    let baseline_ns = mutex_median();

    for (case, run) in CASES {
        let (done, elapsed) = context.time(ops, *run)?;
        report.add(Row::new(*case, Measurement { ns: ns_each(elapsed, done), baseline_ns }))?;
    }
    memory_growth(&context, ops, baseline_ns, report)
}

/// Submits one round of operations and returns their number.
type Case = fn(&BenchContext<'_>) -> DriverResult<u64>;

const CASES: &[(&str, Case)] = &[
    ("fills of 64 bytes on one stream", fills),
    ("copies of 64 bytes on one stream", copies),
    ("event record and query", events),
    ("kernels on 4 streams with events between", kernels),
    ("graph launches of 10 kernels, per kernel", graph_launches),
];

fn fills(context: &BenchContext<'_>) -> DriverResult<u64> {
    context.sim.fill(context.pages[0], Pattern::U8(1), 64, context.streams[0])?;
    Ok(1)
}

fn copies(context: &BenchContext<'_>) -> DriverResult<u64> {
    context.sim.copy(context.pages[1].into(), context.pages[0].into(), 64, context.streams[0])?;
    Ok(1)
}

fn events(context: &BenchContext<'_>) -> DriverResult<u64> {
    context.sim.event_record(context.events[0], context.streams[0], EventScope::Plain)?;
    context.sim.event_query(context.events[0])?;
    Ok(2)
}

/// A kernel on each stream, which the next stream's kernel waits for.
fn kernels(context: &BenchContext<'_>) -> DriverResult<u64> {
    for this in 0..STREAMS {
        let next = (this + 1) % STREAMS;
        context.launch(this)?;
        context.sim.event_record(context.events[this], context.streams[this], EventScope::Plain)?;
        context.sim.stream_wait_event(context.streams[next], context.events[this], EventScope::Plain)?;
    }
    Ok(3 * STREAMS as u64)
}

fn graph_launches(context: &BenchContext<'_>) -> DriverResult<u64> {
    context.sim.graph_launch(context.graph, context.streams[0])?;
    Ok(NODES)
}

/// Fills, copies, kernels and events on every stream.
fn mixed(context: &BenchContext<'_>) -> DriverResult<u64> {
    for (&stream, &page) in context.streams.iter().zip(&context.pages) {
        context.sim.fill(page, Pattern::U8(1), 64, stream)?;
        context.sim.copy(page.offset(1024).into(), page.into(), 64, stream)?;
    }
    Ok(2 * STREAMS as u64 + kernels(context)?)
}

/// Runs mixed work, and compares the resident memory of the process early on and at the end.
fn memory_growth(context: &BenchContext<'_>, ops: u64, baseline_ns: f64, report: &mut Report<'_>) -> Result<Verdict> {
    let early = (ops / 2).clamp(1, 1_000_000);
    let (first, mut elapsed) = context.time(early, mixed)?;
    let resident_early = bytes_resident();
    let (rest, more) = context.time(ops.saturating_sub(first).max(1), mixed)?;
    let resident = bytes_resident();
    elapsed += more;

    let ops = first + rest;
    let ns = ns_each(elapsed, ops);
    let mut fields = vec![("ops", json!(ops))];
    let mut verdict = Verdict::Success;
    match (resident_early, resident) {
        (Some(before), Some(after)) => {
            let is_flat = after.saturating_sub(before) * 100 < before * FLAT_PERCENT;
            fields.extend([
                ("ops_early", json!(first)),
                ("bytes_resident_early", json!(before)),
                ("bytes_resident", json!(after)),
                ("flat", json!(is_flat)),
            ]);
            report.remark(format!(
                "memory {}: {} resident after {first} operations, {} after {ops}",
                if is_flat { "is flat" } else { "GROWS" },
                size::format(before),
                size::format(after),
            ));
            verdict = if is_flat { Verdict::Success } else { Verdict::Failure };
        }
        _ => report.remark("memory: the system does not report resident memory".to_owned()),
    }
    let row = Row::new("everything on 4 streams", Measurement { ns, baseline_ns });
    report.add(Row { fields, details: format!("{ops} operations"), ..row })?;
    Ok(verdict)
}

/// The setup of the cases; dropped together with the simulated GPU.
struct BenchContext<'a> {
    sim: &'a SimDriver,
    device: DeviceId,
    streams: Vec<StreamId>,
    events: Vec<EventId>,
    pages: Vec<DevicePtr>,
    kernel: FunctionId,
    graph: GraphExecId,
}

impl<'a> BenchContext<'a> {
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

    /// Runs rounds until at least `ops` operations are submitted, and waits for them. Returns their number and time.
    fn time(&self, ops: u64, round: Case) -> DriverResult<(u64, Duration)> {
        let start = Instant::now();
        let mut done = 0;
        while done < ops {
            done += round(self)?;
        }
        self.sim.device_synchronize(self.device)?;
        Ok((done, start.elapsed()))
    }
}

fn launch(sim: &SimDriver, kernel: FunctionId, page: DevicePtr, stream: StreamId) -> DriverResult<()> {
    sim.kernel_launch(kernel, LaunchShape::ONE, &[KernelArg::Ptr(page), KernelArg::U32(1)], stream)
}
