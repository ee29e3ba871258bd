//! `warpool bench driver`: what a handful of calls cost the host, on whichever driver.
//! The calls are those that an allocator or a stream pool makes on its hot path.

use std::time::{Duration, Instant};

use serde_json::json;
use warpool_driver::{
    Access, DeviceAccess, DeviceId, DevicePtr, Driver, EventId, EventOptions, EventScope, FunctionId, Granularity,
    KernelMirror, KernelSource, LaunchShape, PhysicalId, PhysicalOptions, Result as DriverResult, StreamId,
    StreamOptions,
};

use super::measure::ns_each;
use super::{Args, Row, Rows};
use crate::driver::{self, NAMES};
use crate::output::{CommandError, Result, Verdict};

/// How many calls are timed in one go; the device catches up in between, outside the time.
const BATCH: u64 = 500;

/// The kernels of the benchmarks: one that does nothing, and one that writes a number.
pub const KERNELS: KernelSource = KernelSource {
    name: "bench",
    cuda: r#"
extern "C" __global__ void warpool_bench_empty() {}
extern "C" __global__ void warpool_bench_set(unsigned int* out, unsigned int value) { *out = value; }
"#,
    mirrors: &[
        KernelMirror { name: "warpool_bench_empty", run: |_| Ok(()), nanos: None },
        KernelMirror {
            name: "warpool_bench_set",
            run: |scope| {
                let (out, value) = (scope.arg_ptr(0)?, scope.arg_u32(1)?);
                scope.memory.write(out, &value.to_le_bytes())
            },
            nanos: None,
        },
    ],
};

pub fn run(args: &Args, rows: &mut Rows<'_>) -> Result<Verdict> {
    let Some(name) = args.driver.as_deref() else {
        return Err(CommandError::Usage(format!("'bench driver' needs --driver: one of {}", NAMES.join(", "))));
    };
    let driver = driver::open(name, &args.sim, 0)?;
    let device = driver::device(&*driver, args.device)?;
    let calls = args.ops.unwrap_or(100_000);
    // As the threads of a framework have it; without, each call sets a context and puts back what was.
    driver.set_current_device(device)?;
    let bench = Setup::new(&*driver, device)?;

    for (case, call) in CASES {
        bench.measure(case, calls, *call, rows)?;
    }
    match &bench.mapping {
        // Mapping costs a thousand times what the others do.
        Some(_) => bench.measure("vm_map, set_access and unmap of 2 MiB", calls.div_ceil(100), map_cycle, rows)?,
        None => rows.remark("left out: vm_map, since the device has no virtual memory".to_owned()),
    }
    bench.close()?;
    Ok(Verdict::Success)
}

type Case = fn(&Setup<'_>) -> DriverResult<()>;

const CASES: &[(&str, Case)] = &[
    ("event_record", |bench| bench.driver.event_record(bench.event, bench.stream, EventScope::Plain)),
    ("event_query", |bench| bench.driver.event_query(bench.event).map(drop)),
    ("kernel_launch of an empty kernel", |bench| {
        // SAFETY: the kernel is empty and takes nothing.
        unsafe { bench.driver.kernel_launch(bench.kernel, LaunchShape::ONE, &[], bench.stream) }
    }),
    ("capture_state", |bench| bench.driver.capture_state(bench.stream).map(drop)),
    ("mem_info", |bench| bench.driver.mem_info(bench.device).map(drop)),
];

fn map_cycle(bench: &Setup<'_>) -> DriverResult<()> {
    let Some(mapping) = &bench.mapping else { return Ok(()) };
    let access = [DeviceAccess { device: bench.device, access: Access::ReadWrite }];
    bench.driver.vm_map(mapping.range, mapping.physical)?;
    bench.driver.vm_set_access(mapping.range, mapping.bytes, &access)?;
    bench.driver.vm_unmap(mapping.range, mapping.bytes)
}

/// What the calls work with.
struct Setup<'a> {
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

impl<'a> Setup<'a> {
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

    /// Times `calls` calls in batches. On a driver with a clock of its own, says what that thinks of it, too.
    fn measure(&self, case: &'static str, calls: u64, call: Case, rows: &mut Rows<'_>) -> Result<()> {
        let mut elapsed = Duration::ZERO;
        let mut modelled = Duration::ZERO;
        let mut left = calls;
        while left > 0 {
            let batch = left.min(BATCH);
            let (begun, begun_modelled) = (Instant::now(), self.driver.now());
            for _ in 0..batch {
                call(self)?;
            }
            elapsed += begun.elapsed();
            modelled += self.driver.now().saturating_sub(begun_modelled);
            self.driver.stream_synchronize(self.stream)?;
            left -= batch;
        }
        let mut row = Row { case, ns: ns_each(elapsed, calls), extra: Vec::new(), besides: String::new() };
        if self.driver.kind() == "sim" {
            let modelled = ns_each(modelled, calls);
            row.extra.push(("modelled_ns", json!(modelled)));
            row.besides = format!("modelled {modelled:.0} ns");
        }
        rows.add(row)
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
