//! A simulated driver with streams, memory and a few kernels.

use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::*;

pub const DEVICE: DeviceId = DeviceId(0);

/// Kernels with their host implementations, of which only these run here.
pub static KERNELS: KernelSource = KernelSource {
    name: "fixture",
    cuda: r#"
extern "C" __global__ void add(unsigned* p, unsigned n, unsigned v) {
    for (unsigned i = 0; i < n; i++) p[i] += v;
}
extern "C" __global__ void sum(unsigned* out, const unsigned* p, unsigned n) {
    for (unsigned i = 0; i < n; i++) *out += p[i];
}
"#,
    host_kernels: &[
        HostKernel::new("add", |k| {
            let (p, n, v) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_u32(2)?);
            let values: Vec<u32> = k.read_u32(p, n as usize)?.iter().map(|x| x.wrapping_add(v)).collect();
            k.write_u32(p, &values)
        }),
        HostKernel::new("sum", |k| {
            let (out, p, n) = (k.arg_ptr(0)?, k.arg_ptr(1)?, k.arg_u32(2)?);
            let total = k.read_u32(p, n as usize)?.iter().fold(0u32, |a, &b| a.wrapping_add(b));
            let before = k.read_u32(out, 1)?[0];
            k.write_u32(out, &[before.wrapping_add(total)])
        }),
    ],
};

/// A driver with two streams, an event, and memory of 4 KiB.
pub struct Fixture {
    pub gpu: SimDriver,
    pub one: StreamId,
    pub two: StreamId,
    pub event: EventId,
    pub memory: DevicePtr,
    pub add: FunctionId,
    sum: FunctionId,
}

pub const BYTES: u64 = 4096;
pub const WORDS: u32 = 1024;

impl Fixture {
    pub fn new(config: SimConfig) -> Result<Self> {
        let gpu = SimDriver::new(config);
        let one = gpu.stream_create(DEVICE, StreamOptions::default())?;
        let two = gpu.stream_create(DEVICE, StreamOptions::default())?;
        let event = gpu.event_create(DEVICE, EventOptions::default())?;
        let memory = gpu.mem_alloc(DEVICE, BYTES)?;
        let module = gpu.module_load(DEVICE, &KERNELS)?;
        let (add, sum) = (gpu.function_get(module, "add")?, gpu.function_get(module, "sum")?);
        Ok(Self { gpu, one, two, event, memory, add, sum })
    }

    /// Fills the memory.
    pub fn fill(&self, value: u8, stream: StreamId) -> Result<()> {
        self.gpu.fill(self.memory, Pattern::U8(value), BYTES, stream)
    }

    /// Adds to `n` words at `ptr`.
    pub fn add(&self, ptr: DevicePtr, n: u32, value: u32, stream: StreamId) -> Result<()> {
        let args = [ptr.into(), KernelArg::U32(n), KernelArg::U32(value)];
        self.gpu.kernel_launch(self.add, LaunchShape::ONE, &args, stream)
    }

    /// Adds the sum of `n` words at `ptr` to the word at `out`.
    pub fn sum(&self, out: DevicePtr, ptr: DevicePtr, n: u32, stream: StreamId) -> Result<()> {
        self.gpu.kernel_launch(self.sum, LaunchShape::ONE, &[out.into(), ptr.into(), KernelArg::U32(n)], stream)
    }

    /// Orders what is queued in `after` from now on after what is in `before`.
    pub fn order(&self, before: StreamId, after: StreamId) -> Result<()> {
        self.gpu.event_record(self.event, before, EventScope::Plain)?;
        self.gpu.stream_wait_event(after, self.event, EventScope::Plain)
    }

    /// Maps new physical memory of 2 MiB at new addresses.
    pub fn mapped(&self) -> Result<(DevicePtr, PhysicalId)> {
        let physical = self.gpu.vm_create(DEVICE, 2 << 20, PhysicalOptions::default())?;
        Ok((self.map(physical)?, physical))
    }

    pub fn map(&self, physical: PhysicalId) -> Result<DevicePtr> {
        let ptr = self.gpu.vm_reserve(2 << 20, 0, None)?;
        self.gpu.vm_map(ptr, physical)?;
        self.gpu.vm_set_access(ptr, 2 << 20, &[DeviceAccess { device: DEVICE, access: Access::ReadWrite }])?;
        Ok(ptr)
    }

    /// Captures what `body` does on the first stream, and instantiates the graph.
    pub fn capture(&self, body: impl FnOnce() -> Result<()>) -> Result<GraphExecId> {
        self.gpu.capture_begin(self.one, CaptureMode::Relaxed)?;
        body()?;
        let graph = self.gpu.capture_end(self.one)?;
        self.gpu.graph_instantiate(graph, InstantiateOptions::default())
    }
}
