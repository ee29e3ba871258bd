//! Runs a program on the simulated driver and collects everything observable.

use warpool_driver::sim::{Hazard, HazardKind, HazardRange, RangeBase, SimDriver};
use warpool_driver::*;

use super::effects::mix;
use super::model::Outcome;
use super::program::{
    ARENA_BYTES, EVENTS, FIXED, GraphPlan, GraphStep, NON_BLOCKING, Operation, PINNED, POOL_BYTES, Program, STREAMS,
    Span, Step,
};

const DEVICE: DeviceId = DeviceId(0);
const PAGE: u64 = 2 << 20;

static KERNELS: KernelSource = KernelSource {
    name: "swarm",
    cuda: "",
    host_kernels: &[
        HostKernel::new("mix", |k| {
            let (to, n, from, m, salt) = (k.arg_ptr(0)?, k.arg_u32(1)?, k.arg_ptr(2)?, k.arg_u32(3)?, k.arg_u32(4)?);
            let (mut bytes, mut source) = (vec![0; n as usize], vec![0; m as usize]);
            k.memory.read(from, &mut source)?;
            k.memory.read(to, &mut bytes)?;
            mix(&mut bytes, &source, salt);
            k.memory.write(to, &bytes)
        }),
        HostKernel::new("countdown", |k| {
            let (counter, flag) = (k.arg_ptr(0)?, k.arg_conditional(1)?);
            let left = k.read_u32(counter, 1)?[0].saturating_sub(1);
            k.write_u32(counter, &[left])?;
            k.memory.set_conditional(flag, left)
        }),
    ],
};

/// The results of a run.
pub struct Run {
    pub outcomes: Vec<Outcome>,
    pub hazards: Vec<Hazard>,
    pub reads: Vec<(usize, Vec<u8>)>,
    /// The final contents of all arenas; `None` if freed.
    pub contents: Vec<Option<Vec<u8>>>,
    /// The step that made each call, by the number of the call.
    step_of_call: Vec<usize>,
    /// The addresses of the arenas: address, arena.
    views: Vec<(u64, usize)>,
}

impl Run {
    pub fn step_of(&self, call: usize) -> Option<usize> {
        self.step_of_call.get(call).copied()
    }

    /// The bytes of an arena that an entry of the log is about.
    pub fn span_of(&self, hazard: &Hazard) -> Option<Span> {
        let HazardRange { base, offset, bytes: len } = hazard.range?;
        if base != RangeBase::Address {
            return Some(Span { arena: PINNED, view: 0, start: offset, len });
        }
        let &(base, arena) = self.views.iter().find(|&&(base, _)| (base..base + POOL_BYTES).contains(&offset))?;
        Some(Span { arena, view: 0, start: offset - base, len })
    }
}

struct Runner<'a> {
    gpu: &'a SimDriver,
    streams: Vec<StreamId>,
    body: StreamId,
    events: Vec<EventId>,
    graph_events: Vec<EventId>,
    mix: FunctionId,
    countdown: FunctionId,
    /// The addresses of each arena.
    arenas: Vec<Vec<u64>>,
    pool: PoolId,
    execs: Vec<GraphExecId>,
    calls: usize,
    run: Run,
}

/// Runs `program` on a new driver.
pub fn run(program: &Program, gpu: &SimDriver) -> Result<Run> {
    let mut runner = Runner::new(gpu)?;
    for (at, step) in program.steps.iter().enumerate() {
        let outcome = runner.step(at, step)?;
        runner.run.outcomes.push(outcome);
        runner.run.step_of_call.resize(runner.calls + 1, at);
    }
    runner.finish(program)
}

impl<'a> Runner<'a> {
    fn new(gpu: &'a SimDriver) -> Result<Self> {
        let mut calls = 0;
        let mut made = |n| calls += n;
        let module = gpu.module_load(DEVICE, &KERNELS)?;
        let (mix, countdown) = (gpu.function_get(module, "mix")?, gpu.function_get(module, "countdown")?);
        made(3);
        let mut streams = vec![gpu.stream_default(DEVICE)?, gpu.stream_per_thread(DEVICE)?];
        for index in 2..STREAMS {
            streams
                .push(gpu.stream_create(DEVICE, StreamOptions { non_blocking: index >= NON_BLOCKING, priority: 0 })?);
        }
        let body = gpu.stream_create(DEVICE, StreamOptions::default())?;
        made(STREAMS + 1);
        let events =
            (0..EVENTS).map(|_| gpu.event_create(DEVICE, EventOptions::default())).collect::<Result<Vec<_>>>()?;
        let graph_events = (0..3).map(|_| gpu.event_create(DEVICE, EventOptions::default())).collect::<Result<_>>()?;
        let pool = gpu.pool_default(DEVICE)?;
        made(EVENTS + 4);
        let plain = gpu.mem_alloc(DEVICE, ARENA_BYTES)?;
        let physical = gpu.vm_create(DEVICE, PAGE, PhysicalOptions::default())?;
        let pinned = gpu.host_alloc(DEVICE, ARENA_BYTES, HostOptions::default())?;
        made(3);
        let mut mapped = Vec::new();
        for _ in 0..2 {
            let ptr = gpu.vm_reserve(PAGE, 0, None)?;
            gpu.vm_map(ptr, physical)?;
            gpu.vm_set_access(ptr, PAGE, &[DeviceAccess { device: DEVICE, access: Access::ReadWrite }])?;
            made(3);
            mapped.push(ptr.0);
        }
        let arenas = vec![vec![plain.0], mapped, vec![pinned.0]];
        let views =
            arenas.iter().enumerate().flat_map(|(arena, views)| views.iter().map(move |&at| (at, arena))).collect();
        let run = Run {
            outcomes: Vec::new(),
            hazards: Vec::new(),
            reads: Vec::new(),
            contents: Vec::new(),
            step_of_call: vec![usize::MAX; calls + 1],
            views,
        };
        let execs = Vec::new();
        Ok(Self { gpu, streams, body, events, graph_events, mix, countdown, arenas, pool, execs, calls, run })
    }

    fn step(&mut self, at: usize, step: &Step) -> Result<Outcome> {
        let gpu = self.gpu;
        self.calls += 1;
        let mut outcome = Outcome::default();
        match step {
            Step::Work(stream, operation) => match self.operation(operation, self.streams[*stream]) {
                Err(error) if error.code == ErrorCode::InvalidValue => outcome.refused = true,
                other => other?,
            },
            Step::Record { event, stream } => {
                gpu.event_record(self.events[*event], self.streams[*stream], EventScope::Plain)?;
            }
            Step::Wait { stream, event } => {
                gpu.stream_wait_event(self.streams[*stream], self.events[*event], EventScope::Plain)?;
            }
            Step::EventSync(event) => gpu.event_synchronize(self.events[*event])?,
            Step::EventQuery(event) => outcome.done = gpu.event_query(self.events[*event])?,
            Step::StreamSync(stream) => gpu.stream_synchronize(self.streams[*stream])?,
            Step::StreamQuery(stream) => outcome.done = gpu.stream_query(self.streams[*stream])?,
            Step::DeviceSync => gpu.device_synchronize(DEVICE)?,
            Step::HostRead(span) => {
                let mut bytes = vec![0; span.len as usize];
                gpu.host_read(HostPtr(self.ptr(span).0), &mut bytes)?;
                self.run.reads.push((at, bytes));
            }
            Step::HostWrite(span, value) => {
                gpu.host_write(HostPtr(self.ptr(span).0), &vec![*value; span.len as usize])?;
            }
            Step::Upload(span, value) => gpu.upload(DEVICE, self.ptr(span), &vec![*value; span.len as usize])?,
            Step::Download(span) => {
                let mut bytes = vec![0; span.len as usize];
                gpu.download(DEVICE, self.ptr(span), &mut bytes)?;
                self.run.reads.push((at, bytes));
            }
            Step::PoolAlloc { stream, .. } => {
                let ptr = gpu.pool_alloc(self.pool, POOL_BYTES, self.streams[*stream])?;
                self.run.views.push((ptr.0, self.arenas.len()));
                self.arenas.push(vec![ptr.0]);
            }
            Step::PoolFree { arena, stream } => {
                gpu.pool_free(DevicePtr(self.arenas[*arena][0]), self.streams[*stream])?;
            }
            Step::Capture(plan) => {
                self.calls -= 1;
                self.capture(plan)?;
            }
            Step::Launch { graph, stream } => gpu.graph_launch(self.execs[*graph], self.streams[*stream])?,
            Step::Suballocate(span, stream) => gpu.suballocated(self.ptr(span), span.len, self.streams[*stream]),
            Step::FreeSuballocation(span) => gpu.suballocation_freed(self.ptr(span), span.len),
            Step::Replace(stream) => {
                gpu.stream_destroy(self.streams[*stream])?;
                let options = StreamOptions { non_blocking: *stream >= NON_BLOCKING, priority: 0 };
                self.streams[*stream] = gpu.stream_create(DEVICE, options)?;
                self.calls += 1;
            }
        }
        Ok(outcome)
    }

    fn ptr(&self, span: &Span) -> DevicePtr {
        DevicePtr(self.arenas[span.arena][span.view] + span.start)
    }

    fn operation(&self, operation: &Operation, stream: StreamId) -> Result<()> {
        match operation {
            Operation::Fill { to, value } if to.start % 4 == 0 && to.len % 4 == 0 => {
                let pattern = Pattern::U32(u32::from_le_bytes([*value; 4]));
                self.gpu.fill(self.ptr(to), pattern, to.len / 4, stream)
            }
            Operation::Fill { to, value } => self.gpu.fill(self.ptr(to), Pattern::U8(*value), to.len, stream),
            Operation::Copy { to, from } => {
                let end = |span: &Span| match span.arena {
                    PINNED => Address::Host(HostPtr(self.ptr(span).0)),
                    _ => Address::Device(self.ptr(span)),
                };
                self.gpu.copy(end(to), end(from), to.len, stream)
            }
            Operation::Mix { to, from, salt } => {
                let args = [
                    self.ptr(to).into(),
                    KernelArg::U32(to.len as u32),
                    self.ptr(from).into(),
                    KernelArg::U32(from.len as u32),
                    KernelArg::U32(*salt),
                ];
                self.gpu.kernel_launch(self.mix, LaunchShape::ONE, &args, stream)
            }
        }
    }

    fn capture(&mut self, plan: &GraphPlan) -> Result<()> {
        let gpu = self.gpu;
        let modes = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
        let branch = |index: usize| self.streams[plan.branches[index]];
        let conditionals = plan.steps.iter().filter(|step| matches!(step, GraphStep::Conditional { .. })).count();
        let counters = gpu.mem_alloc(DEVICE, 4 * conditionals.max(1) as u64)?;
        let mut counter = counters;
        gpu.capture_begin(branch(0), modes[plan.mode])?;
        self.calls += 2;
        for step in &plan.steps {
            self.calls += 1;
            match step {
                GraphStep::Work(to, operation) => self.operation(operation, branch(*to))?,
                GraphStep::Record { event, branch: from } => {
                    gpu.event_record(self.graph_events[*event], branch(*from), EventScope::Plain)?;
                }
                GraphStep::Wait { branch: to, event } => {
                    gpu.stream_wait_event(branch(*to), self.graph_events[*event], EventScope::Plain)?;
                }
                GraphStep::Conditional { branch: on, is_while, runs, body } => {
                    gpu.fill(counter, Pattern::U32(*runs), 1, branch(*on))?;
                    let flag = gpu.conditional_create(branch(*on), *runs)?;
                    let kind = if *is_while { ConditionalKind::While } else { ConditionalKind::If };
                    gpu.conditional_begin(branch(*on), flag, kind, self.body, modes[plan.mode])?;
                    let args = [counter.into(), KernelArg::Conditional(flag)];
                    gpu.kernel_launch(self.countdown, LaunchShape::ONE, &args, self.body)?;
                    for operation in body {
                        self.operation(operation, self.body)?;
                    }
                    let inner = gpu.capture_end(self.body)?;
                    gpu.graph_destroy(inner)?;
                    self.calls += 5 + body.len();
                    counter = counter.offset(4);
                }
            }
        }
        let graph = gpu.capture_end(branch(0))?;
        let exec = gpu.graph_instantiate(graph, InstantiateOptions::default())?;
        gpu.graph_destroy(graph)?;
        self.calls += 3;
        self.execs.push(exec);
        Ok(())
    }

    fn finish(mut self, program: &Program) -> Result<Run> {
        let gpu = self.gpu;
        gpu.device_synchronize(DEVICE)?;
        self.run.hazards = gpu.hazards();
        // The programs report blocks of any range and use memory regardless of them; accesses beyond a block have tests
        // of their own.
        self.run.hazards.retain(|hazard| hazard.kind != HazardKind::BlockOverrun);
        let freed = |arena: usize| {
            program.steps.iter().any(|step| matches!(step, Step::PoolFree { arena: a, .. } if *a == arena))
        };
        for (arena, views) in self.arenas.iter().enumerate() {
            let mut bytes = vec![0; ARENA_BYTES as usize];
            match arena {
                PINNED => gpu.host_read(HostPtr(views[0]), &mut bytes)?,
                _ if arena >= FIXED && freed(arena) => {
                    self.run.contents.push(None);
                    continue;
                }
                _ => gpu.download(DEVICE, DevicePtr(views[0]), &mut bytes)?,
            }
            self.run.contents.push(Some(bytes));
        }
        Ok(self.run)
    }
}
