//! What the allocator asked of the driver in one step, and what the driver answered.

use std::sync::{Mutex, PoisonError};

use warpool::driver::decorate::{Arguments, Hook, Outcome, Value};
use warpool::driver::{Call, Driver, Result};

/// One call about memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Alloc { bytes: u64, given: Option<u64> },
    Free { ptr: u64 },
    Reserve { bytes: u64, given: Option<u64> },
    FreeRange { ptr: u64, bytes: u64 },
    Create { bytes: u64, given: bool },
    Map { ptr: u64 },
    Unmap { ptr: u64, bytes: u64 },
}

/// The calls of one step. The model takes out what it expects; nothing may be left.
#[derive(Debug, Default)]
pub struct Script(Vec<Asked>);

impl Script {
    fn take(&mut self, what: &str, mut is_it: impl FnMut(&Asked) -> bool) -> Asked {
        let at = self.0.iter().position(&mut is_it).unwrap_or_else(|| panic!("{what} is missing in {:x?}", self.0));
        self.0.remove(at)
    }

    /// A plain allocation; `None` if the driver had no memory.
    pub fn alloc(&mut self, wanted: u64) -> Option<u64> {
        match self.take("an allocation", |asked| matches!(asked, Asked::Alloc { .. })) {
            Asked::Alloc { bytes, given } if bytes == wanted => given,
            other => panic!("a segment of {wanted} bytes was expected, not {other:x?}"),
        }
    }

    pub fn free(&mut self, wanted: u64) {
        self.take(&format!("the free of {wanted:#x}"), |asked| matches!(asked, Asked::Free { ptr } if *ptr == wanted));
    }

    /// Addresses; `None` if the driver had none.
    pub fn reserve(&mut self, wanted: u64) -> Option<u64> {
        match self.take("a reservation", |asked| matches!(asked, Asked::Reserve { .. })) {
            Asked::Reserve { bytes, given } if bytes == wanted => given,
            other => panic!("addresses for {wanted} bytes were expected, not {other:x?}"),
        }
    }

    pub fn free_range(&mut self, ptr: u64, bytes: u64) {
        self.take(&format!("the end of the range {ptr:#x}"), |asked| *asked == Asked::FreeRange { ptr, bytes });
    }

    /// Chunks, created one by one and then mapped; `None` if one could not be had.
    pub fn map(&mut self, start: u64, bytes: u64, chunk: u64) -> Option<()> {
        for _ in 0..bytes / chunk {
            match self.take("a chunk", |asked| matches!(asked, Asked::Create { .. })) {
                Asked::Create { bytes, given } if bytes == chunk => given.then_some(())?,
                other => panic!("a chunk of {chunk} bytes was expected, not {other:x?}"),
            }
        }
        for ptr in (start..start + bytes).step_by(usize::try_from(chunk).expect("chunks fit")) {
            self.take(&format!("a mapping at {ptr:#x}"), |asked| *asked == Asked::Map { ptr });
        }
        Some(())
    }

    pub fn unmap(&mut self, ptr: u64, bytes: u64) {
        let what = format!("unmapping {bytes} bytes at {ptr:#x}");
        self.take(&what, |asked| *asked == Asked::Unmap { ptr, bytes });
    }

    pub fn expect_done(&self) {
        assert!(self.0.is_empty(), "the driver was asked for more than expected: {:x?}", self.0);
    }
}

/// Listens to a driver.
#[derive(Debug, Default)]
pub struct Listener(Mutex<Vec<Asked>>);

impl Listener {
    /// What was asked since the last time.
    pub fn script(&self) -> Script {
        Script(std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl Hook for Listener {
    type CallState = [u64; 2];

    fn before(&self, _: &dyn Driver, _: Call, arguments: Arguments<'_>) -> Result<[u64; 2]> {
        let mut numbers = arguments.iter().filter_map(|(_, value)| match value {
            Value::Number(number) => Some(*number),
            Value::Device(ptr) => Some(ptr.0),
            _ => None,
        });
        let mut next = || numbers.next().unwrap_or(0);
        Ok([next(), next()])
    }

    fn after(&self, _: &dyn Driver, call: Call, [first, second]: [u64; 2], outcome: Outcome<'_>) {
        let given = match outcome {
            Ok(Value::Device(ptr)) => Some(ptr.0),
            _ => None,
        };
        let asked = match call {
            Call::MemAlloc => Asked::Alloc { bytes: first, given },
            Call::MemFree => Asked::Free { ptr: first },
            Call::VmReserve => Asked::Reserve { bytes: first, given },
            Call::VmFreeRange => Asked::FreeRange { ptr: first, bytes: second },
            Call::VmCreate => Asked::Create { bytes: first, given: outcome.is_ok() },
            Call::VmMap => Asked::Map { ptr: first },
            Call::VmUnmap => Asked::Unmap { ptr: first, bytes: second },
            _ => return,
        };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(asked);
    }

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}
