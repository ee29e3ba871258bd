//! The effect of work on memory.

use std::panic::AssertUnwindSafe;
use std::sync::PoisonError;

use super::host_code::run_host_code;
use super::item::{KernelWork, Work};
use crate::sim::memory::{AccessContext, IllegalAccess, Memory};
use crate::sim::order::HazardKind;
use crate::{ConditionalId, DevicePtr, ErrorCode, KernelFault, KernelMemory, KernelScope, Pattern};

/// Executes work. An error breaks the device.
pub fn execute(
    work: &Work,
    by: &mut AccessContext<'_>,
    memory: &mut Memory,
    flags: &mut Vec<(ConditionalId, u32)>,
) -> Result<(), ErrorCode> {
    let done = match work {
        Work::Fill { dst, pattern, count } => {
            let bytes = count * pattern.bytes();
            match pattern {
                Pattern::U8(value) => memory.fill(*dst, &[*value], bytes, by),
                Pattern::U16(value) => memory.fill(*dst, &value.to_le_bytes(), bytes, by),
                Pattern::U32(value) => memory.fill(*dst, &value.to_le_bytes(), bytes, by),
            }
        }
        Work::Copy { dst, src, bytes } => memory.copy(*dst, *src, *bytes, by),
        &Work::Copy2d { dst, dst_pitch, src, src_pitch, width, rows } => (0..rows)
            .try_for_each(|row| memory.copy(dst.offset(row * dst_pitch), src.offset(row * src_pitch), width, by)),
        Work::Upload { dst, data } => memory.write(*dst, data, by),
        Work::Download { src, into } => {
            let mut into = into.lock().unwrap_or_else(PoisonError::into_inner);
            memory.read(*src, &mut into, by)
        }
        &Work::WriteRegistered { registration, offset, bytes, value } => {
            memory.write_registered(registration, offset, bytes, value, by)
        }
        Work::Kernel(kernel) => return run_kernel(kernel, by, memory, flags),
        Work::PoolAlloc { ptr, bytes, pool } => {
            memory.run_pool_alloc(*ptr, *bytes, *pool, by);
            Ok(())
        }
        Work::PoolFree { ptr } => {
            memory.run_pool_free(*ptr, by);
            Ok(())
        }
        Work::Marker
        | Work::Record(_)
        | Work::Callback(_)
        | Work::Launch(_)
        | Work::EventWait(_)
        | Work::Conditional { .. } => Ok(()),
    };
    match done {
        Err(IllegalAccess { fatal: true }) => Err(ErrorCode::IllegalAddress),
        _ => Ok(()),
    }
}

/// Runs the host implementation of a kernel.
fn run_kernel(
    kernel: &KernelWork,
    by: &mut AccessContext<'_>,
    memory: &mut Memory,
    flags: &mut Vec<(ConditionalId, u32)>,
) -> Result<(), ErrorCode> {
    let mut view = KernelView { memory, by, flags, illegal: None };
    let mut scope = KernelScope { shape: kernel.shape, args: &kernel.args, memory: &mut view };
    // A panic is a failed assertion of the device: it breaks the device, not the simulation.
    let outcome = run_host_code(|| std::panic::catch_unwind(AssertUnwindSafe(|| (kernel.host.run)(&mut scope))));
    let KernelView { by, illegal, .. } = view;
    match (outcome, illegal) {
        (Err(_), _) => Err(ErrorCode::Assert),
        (_, Some(IllegalAccess { fatal: true })) => Err(ErrorCode::IllegalAddress),
        (_, Some(IllegalAccess { fatal: false })) | (Ok(Ok(())), None) => Ok(()),
        // It returned an error of its own: on a real device it would access wrong memory.
        (Ok(Err(fault)), None) => {
            by.hazards.add(HazardKind::KernelFault, by.accessor.to_string(), fault.to_string(), by.now);
            Err(ErrorCode::IllegalAddress)
        }
    }
}

/// Memory as a running kernel sees it.
struct KernelView<'a, 'b> {
    memory: &'a mut Memory,
    by: &'a mut AccessContext<'b>,
    flags: &'a mut Vec<(ConditionalId, u32)>,
    /// The worst access so far. A kernel that only accessed freed memory of a pool continues.
    illegal: Option<IllegalAccess>,
}

impl KernelView<'_, '_> {
    fn check(&mut self, outcome: Result<(), IllegalAccess>) -> Result<(), KernelFault> {
        match outcome {
            Ok(()) => Ok(()),
            Err(survived @ IllegalAccess { fatal: false }) => {
                self.illegal = self.illegal.or(Some(survived));
                Ok(())
            }
            Err(illegal) => {
                self.illegal = Some(illegal);
                Err(KernelFault::new("the device may not access that address"))
            }
        }
    }
}

impl KernelMemory for KernelView<'_, '_> {
    fn read(&mut self, ptr: DevicePtr, into: &mut [u8]) -> Result<(), KernelFault> {
        let outcome = self.memory.read(ptr, into, self.by);
        self.check(outcome)
    }

    fn write(&mut self, ptr: DevicePtr, bytes: &[u8]) -> Result<(), KernelFault> {
        let outcome = self.memory.write(ptr, bytes, self.by);
        self.check(outcome)
    }

    fn set_conditional(&mut self, conditional: ConditionalId, value: u32) -> Result<(), KernelFault> {
        match self.flags.iter_mut().find(|(flag, _)| *flag == conditional) {
            Some((_, flag)) => {
                *flag = value;
                Ok(())
            }
            None => Err(KernelFault::new(format!("{conditional} does not belong to this graph"))),
        }
    }
}
