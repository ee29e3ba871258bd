//! What a piece of work does when its time has come.

use std::panic::AssertUnwindSafe;
use std::sync::PoisonError;

use crate::sim::memory::{Broken, Memory, Toucher};
use crate::sim::order::{Actor, Frontier, HazardKind, Order, Point, Stamp};
use crate::sim::work::{ExecGraph, Op, Work};
use crate::sim::world::World;
use crate::{ConditionalId, DeviceId, DevicePtr, ErrorCode, KernelFault, KernelMemory, KernelScope, Pattern, StreamId};

/// Work in its place: who does it, and what it knows about the others.
pub struct Scene<'a> {
    pub device: DeviceId,
    pub stream: StreamId,
    pub stamp: Stamp,
    pub at: u64,
    pub base: &'a Frontier,
    pub graph: Option<(&'a ExecGraph, Point)>,
    pub now: u64,
}

impl<'a> Scene<'a> {
    fn toucher(&self, work: &Work) -> Toucher<'a> {
        let point = self.graph.map(|(_, point)| point);
        let who = Actor { label: work.label(), stamp: self.stamp, point, stream: self.stream, at: self.at };
        let order = Order { stamp: self.stamp, base: self.base, graph: self.graph };
        let everywhere = !matches!(work, Work::Kernel(_));
        Toucher { device: self.device, who, order, now: self.now, everywhere }
    }
}

impl World {
    /// Does the first piece of work of a stream.
    pub fn execute(&mut self, device: DeviceId, stream: StreamId, op: &Op, stamp: Stamp, now: u64) {
        let scene = Scene { device, stream, stamp, at: op.at, base: &op.base, graph: None, now };
        self.perform(&op.work, &scene, &mut Vec::new());
    }

    /// Does a piece of work. Nothing happens any more on a broken device.
    pub fn perform(&mut self, work: &Work, scene: &Scene<'_>, flags: &mut Vec<(ConditionalId, u32)>) {
        if let Work::Record(event) = work {
            self.reach(*event, scene.stamp, scene.now);
        }
        if self.devices[scene.device.0 as usize].broken.is_some() {
            return;
        }
        let by = scene.toucher(work);
        let memory = &mut self.memory;
        let mut code = ErrorCode::IllegalAddress;
        let done = match work {
            Work::Fill { dst, pattern, count } => {
                let bytes = count * pattern.bytes();
                match pattern {
                    Pattern::U8(value) => memory.fill(*dst, &[*value], bytes, &by),
                    Pattern::U16(value) => memory.fill(*dst, &value.to_le_bytes(), bytes, &by),
                    Pattern::U32(value) => memory.fill(*dst, &value.to_le_bytes(), bytes, &by),
                }
            }
            Work::Copy { dst, src, bytes } => memory.copy(*dst, *src, *bytes, &by),
            Work::Upload { dst, data } => memory.write(*dst, data, &by),
            Work::Download { src, into } => {
                let mut into = into.lock().unwrap_or_else(PoisonError::into_inner);
                memory.read(*src, &mut into, &by)
            }
            Work::Kernel(kernel) => {
                let mut view = View { memory, by, flags, broken: None };
                let mut scope = KernelScope { shape: kernel.shape, args: &kernel.args, memory: &mut view };
                // A panic is the device's assert: it breaks the device, not the simulation.
                let outcome = crate::sim::without_driver(|| {
                    std::panic::catch_unwind(AssertUnwindSafe(|| (kernel.mirror.run)(&mut scope)))
                });
                match (outcome, view.broken) {
                    (Err(_), _) => {
                        code = ErrorCode::Assert;
                        Err(Broken(true))
                    }
                    (_, Some(broken)) => Err(broken),
                    // It gave up by itself: on a real device it would have gone astray.
                    (Ok(Err(fault)), None) => {
                        let operation = view.by.who.to_string();
                        view.memory.log.plain(HazardKind::KernelFault, operation, fault.to_string(), scene.now);
                        Err(Broken(true))
                    }
                    (Ok(Ok(())), None) => Ok(()),
                }
            }
            Work::PoolAlloc { ptr, bytes, pool } => {
                self.run_pool_alloc(*ptr, *bytes, *pool, &by);
                Ok(())
            }
            Work::PoolFree { ptr } => {
                self.run_pool_free(*ptr, &by);
                Ok(())
            }
            Work::Marker
            | Work::Record(_)
            | Work::Callback(_)
            | Work::Launch(_)
            | Work::EventWait(_)
            | Work::Conditional { .. } => Ok(()),
        };
        if done == Err(Broken(true)) {
            self.devices[scene.device.0 as usize].broken = Some(code);
        }
    }
}

/// Memory as a running kernel sees it.
struct View<'a> {
    memory: &'a mut Memory,
    by: Toucher<'a>,
    flags: &'a mut Vec<(ConditionalId, u32)>,
    /// The worst that it has done. One that only strayed into a pool's free memory goes on.
    broken: Option<Broken>,
}

impl View<'_> {
    fn settle(&mut self, outcome: Result<(), Broken>) -> Result<(), KernelFault> {
        match outcome {
            Ok(()) => Ok(()),
            Err(Broken(false)) => {
                self.broken = self.broken.or(Some(Broken(false)));
                Ok(())
            }
            Err(broken) => {
                self.broken = Some(broken);
                Err(KernelFault::new("the device may not touch that address"))
            }
        }
    }
}

impl KernelMemory for View<'_> {
    fn read(&mut self, ptr: DevicePtr, into: &mut [u8]) -> Result<(), KernelFault> {
        let outcome = self.memory.read(ptr, into, &self.by);
        self.settle(outcome)
    }

    fn write(&mut self, ptr: DevicePtr, bytes: &[u8]) -> Result<(), KernelFault> {
        let outcome = self.memory.write(ptr, bytes, &self.by);
        self.settle(outcome)
    }

    fn set_conditional(&mut self, conditional: ConditionalId, value: u32) -> Result<(), KernelFault> {
        match self.flags.iter_mut().find(|(flag, _)| *flag == conditional) {
            Some((_, flag)) => {
                *flag = value;
                Ok(())
            }
            None => Err(KernelFault::new(format!("{conditional} is not of this graph"))),
        }
    }
}
