//! The driver calls of the allocator in one step, with their results.

use std::sync::{Mutex, PoisonError};

use warpool::driver::decorate::{Arguments, Hook, Outcome, Value};
use warpool::driver::{Call, Driver, Result};

/// One memory call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DriverCall {
    Alloc { bytes: u64, returned: Option<u64> },
    Free { ptr: u64 },
    Reserve { bytes: u64, returned: Option<u64> },
    FreeRange { ptr: u64, bytes: u64 },
    Create { bytes: u64, returned: bool },
    Map { ptr: u64 },
    Unmap { ptr: u64, bytes: u64 },
}

/// The calls of one step. The model removes the calls that it expects; none may be left.
#[derive(Debug, Default)]
pub struct DriverCalls(Vec<DriverCall>);

impl DriverCalls {
    fn take(&mut self, what: &str, mut matches: impl FnMut(&DriverCall) -> bool) -> DriverCall {
        let at = self.0.iter().position(&mut matches).unwrap_or_else(|| panic!("{what} is missing in {:x?}", self.0));
        self.0.remove(at)
    }

    /// An allocation; `None` if the driver was out of memory.
    pub fn alloc(&mut self, expected: u64) -> Option<u64> {
        match self.take("an allocation", |call| matches!(call, DriverCall::Alloc { .. })) {
            DriverCall::Alloc { bytes, returned } if bytes == expected => returned,
            other => panic!("a segment of {expected} bytes was expected, not {other:x?}"),
        }
    }

    pub fn free(&mut self, expected: u64) {
        self.take(
            &format!("the free of {expected:#x}"),
            |call| matches!(call, DriverCall::Free { ptr } if *ptr == expected),
        );
    }

    /// A reservation of addresses; `None` if there were none.
    pub fn reserve(&mut self, expected: u64) -> Option<u64> {
        match self.take("a reservation", |call| matches!(call, DriverCall::Reserve { .. })) {
            DriverCall::Reserve { bytes, returned } if bytes == expected => returned,
            other => panic!("addresses for {expected} bytes were expected, not {other:x?}"),
        }
    }

    pub fn free_range(&mut self, ptr: u64, bytes: u64) {
        self.take(&format!("the end of the range {ptr:#x}"), |call| *call == DriverCall::FreeRange { ptr, bytes });
    }

    /// Chunks, created one by one and then mapped; `None` if one could not be created.
    pub fn map(&mut self, start: u64, bytes: u64, chunk: u64) -> Option<()> {
        for _ in 0..bytes / chunk {
            match self.take("a chunk", |call| matches!(call, DriverCall::Create { .. })) {
                DriverCall::Create { bytes, returned } if bytes == chunk => returned.then_some(())?,
                other => panic!("a chunk of {chunk} bytes was expected, not {other:x?}"),
            }
        }
        for ptr in (start..start + bytes).step_by(usize::try_from(chunk).expect("chunks fit")) {
            self.take(&format!("a mapping at {ptr:#x}"), |call| *call == DriverCall::Map { ptr });
        }
        Some(())
    }

    pub fn unmap(&mut self, ptr: u64, bytes: u64) {
        let what = format!("unmapping {bytes} bytes at {ptr:#x}");
        self.take(&what, |call| *call == DriverCall::Unmap { ptr, bytes });
    }

    pub fn expect_done(&self) {
        assert!(self.0.is_empty(), "unexpected driver calls: {:x?}", self.0);
    }
}

/// Records the memory calls of a driver.
#[derive(Debug, Default)]
pub struct CallRecorder(Mutex<Vec<DriverCall>>);

impl CallRecorder {
    /// The calls since the last time.
    pub fn take(&self) -> DriverCalls {
        DriverCalls(std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl Hook for CallRecorder {
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
        let returned = match outcome {
            Ok(Value::Device(ptr)) => Some(ptr.0),
            _ => None,
        };
        let call = match call {
            Call::MemAlloc => DriverCall::Alloc { bytes: first, returned },
            Call::MemFree => DriverCall::Free { ptr: first },
            Call::VmReserve => DriverCall::Reserve { bytes: first, returned },
            Call::VmFreeRange => DriverCall::FreeRange { ptr: first, bytes: second },
            Call::VmCreate => DriverCall::Create { bytes: first, returned: outcome.is_ok() },
            Call::VmMap => DriverCall::Map { ptr: first },
            Call::VmUnmap => DriverCall::Unmap { ptr: first, bytes: second },
            _ => return,
        };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}
