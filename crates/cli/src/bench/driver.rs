//! `warpool bench driver`: host time of driver calls that an allocator or a stream pool makes often.

use std::time::{Duration, Instant};

use serde_json::json;
use warpool_driver::{
    Access, DeviceAccess, DeviceId, DevicePtr, Driver, EventId, EventOptions, EventScope, FunctionId, Granularity,
    LaunchShape, PhysicalId, PhysicalOptions, Result as DriverResult, StreamId, StreamOptions,
};

use super::kernels::KERNELS;
use super::measure::{Measurement, mutex_median, ns_each};
use super::{Args, Report, Row};
use crate::driver;
use crate::output::{Result, Verdict};

/// Calls that are timed at once; the stream is synchronized in between, untimed.
const BATCH: u64 = 500;

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    let driver = driver::open(args.driver_name()?, &args.sim, 0)?;
    let device = driver::device(&*driver, args.device)?;
    let calls = args.ops.unwrap_or(100_000);
    // As in the threads of a framework. Otherwise each call would push and pop the context.
    driver.set_current_device(device)?;
    let context = BenchContext::new(&*driver, device)?;
    let baseline_ns = mutex_median();

    for (case, call) in CASES {
        context.measure(case, calls, *call, baseline_ns, report)?;
    }
    match &context.mapping {
        Some(_) => {
            // Mapping takes about a thousand times as long as the others.
            let (case, calls) = ("vm_map, set_access and unmap of 2 MiB", calls.div_ceil(100));
            context.measure(case, calls, map_cycle, baseline_ns, report)?;
        }
        None => report.remark("skipped: vm_map, since the device has no virtual memory".to_owned()),
    }
    context.close()?;
    Ok(Verdict::Success)
}

type Case = fn(&BenchContext<'_>) -> DriverResult<()>;

const CASES: &[(&str, Case)] = &[
    ("event_record", |context| context.driver.event_record(context.event, context.stream, EventScope::Plain)),
    ("event_query", |context| context.driver.event_query(context.event).map(drop)),
    ("kernel_launch of an empty kernel", |context| {
        // SAFETY: the kernel is empty and takes nothing.
        unsafe { context.driver.kernel_launch(context.kernel, LaunchShape::ONE, &[], context.stream) }
    }),
    ("capture_state", |context| context.driver.capture_state(context.stream).map(drop)),
    ("mem_info", |context| context.driver.mem_info(context.device).map(drop)),
];

fn map_cycle(context: &BenchContext<'_>) -> DriverResult<()> {
    let Some(mapping) = &context.mapping else { return Ok(()) };
    let access = [DeviceAccess { device: context.device, access: Access::ReadWrite }];
    context.driver.vm_map(mapping.range, mapping.physical)?;
    context.driver.vm_set_access(mapping.range, mapping.bytes, &access)?;
    context.driver.vm_unmap(mapping.range, mapping.bytes)
}

/// The setup of the cases.
struct BenchContext<'a> {
    driver: &'a dyn Driver,
    device: DeviceId,
    stream: StreamId,
    event: EventId,
    module: warpool_driver::ModuleId,
    kernel: FunctionId,
    mapping: Option<Mapping>,
}

struct Mapping {
    range: DevicePtr,
    physical: PhysicalId,
    bytes: u64,
}

impl<'a> BenchContext<'a> {
    fn new(driver: &'a dyn Driver, device: DeviceId) -> DriverResult<Self> {
        let mapping = if driver.device_properties(device)?.virtual_memory {
            let bytes = driver.vm_granularity(device, Granularity::Minimum)?;
            let range = driver.vm_reserve(bytes, 0, None)?;
            let physical = driver.vm_create(device, bytes, PhysicalOptions::default())?;
            Some(Mapping { range, physical, bytes })
        } else {
            None
        };
        let module = driver.module_load(device, &KERNELS)?;
        Ok(Self {
            driver,
            device,
            stream: driver.stream_create(device, StreamOptions::default())?,
            event: driver.event_create(device, EventOptions::default())?,
            module,
            kernel: driver.function_get(module, "warpool_bench_empty")?,
            mapping,
        })
    }

    /// Times `calls` calls in batches. On the simulated GPU the modelled time is reported too.
    fn measure(
        &self,
        case: &'static str,
        calls: u64,
        call: Case,
        baseline_ns: f64,
        report: &mut Report<'_>,
    ) -> Result<()> {
        let mut elapsed = Duration::ZERO;
        let mut modelled = Duration::ZERO;
        let mut left = calls;
        while left > 0 {
            let batch = left.min(BATCH);
            let (start, start_modelled) = (Instant::now(), self.driver.now());
            for _ in 0..batch {
                call(self)?;
            }
            elapsed += start.elapsed();
            modelled += self.driver.now().saturating_sub(start_modelled);
            self.driver.stream_synchronize(self.stream)?;
            left -= batch;
        }
        let mut row = Row::new(case, Measurement { ns: ns_each(elapsed, calls), baseline_ns });
        if self.driver.kind() == "sim" {
            let modelled = ns_each(modelled, calls);
            row.fields.push(("modelled_ns", json!(modelled)));
            row.details = format!("modelled {modelled:.0} ns");
        }
        report.add(row)
    }

    fn close(self) -> DriverResult<()> {
        self.driver.stream_synchronize(self.stream)?;
        self.driver.event_destroy(self.event)?;
        self.driver.stream_destroy(self.stream)?;
        self.driver.module_unload(self.module)?;
        if let Some(mapping) = self.mapping {
            self.driver.vm_release(mapping.physical)?;
            // SAFETY: the stream's work has finished, and nothing is mapped there.
            unsafe { self.driver.vm_free_range(mapping.range, mapping.bytes) }?;
        }
        Ok(())
    }
}
