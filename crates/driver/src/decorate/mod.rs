//! Decorators: drivers around drivers. Each adds one thing; several can be combined.
//!
//! - [`Counting`]: counts calls and failures, and measures time.
//! - [`Recording`]: logs calls with arguments and results; two logs can be compared.
//! - [`Faulty`]: injects faults, to test error paths.
//!
//! Each is a [`Hooked`] driver with its own [`Hook`]; only `hooked.rs` forwards the contract.
//!
//! ```
//! use std::sync::Arc;
//! use warpool_driver::decorate::{Counting, FaultPlan, Faulty};
//! use warpool_driver::sim::{SimConfig, SimDriver};
//! use warpool_driver::{Call, DeviceId, ErrorCode, Memory};
//!
//! let sim = Arc::new(SimDriver::new(SimConfig::default()));
//! let plan = FaultPlan::new().fail_nth(Call::MemAlloc, 2, ErrorCode::OutOfMemory);
//! let driver = Counting::new(Arc::new(Faulty::new(sim, plan)));
//!
//! assert!(driver.mem_alloc(DeviceId(0), 4096).is_ok());
//! assert!(driver.mem_alloc(DeviceId(0), 4096).unwrap_err().is_out_of_memory());
//! assert_eq!((driver.count(Call::MemAlloc).calls, driver.count(Call::MemAlloc).errors), (2, 1));
//! ```
//!
//! ```
//! # use std::sync::Arc;
//! use warpool_driver::decorate::{
//!     Arguments, Counts, Difference, Faults, Hook, Hooked, Log, LogEntry, Outcome, Recorder, Recording,
//! };
//! use warpool_driver::sim::{SimConfig, SimDriver};
//! use warpool_driver::{Call, DeviceId, Driver, DriverError, ErrorCode, Memory, Result};
//!
//! # fn main() -> warpool_driver::Result<()> {
//! // Two runs of one program make the same calls.
//! let run = |bytes: u64| {
//!     let driver = Recording::new(Arc::new(SimDriver::new(SimConfig::default())));
//!     let _ = driver.mem_alloc(DeviceId(0), bytes);
//!     driver.log()
//! };
//! let (first, second): (Log, Log) = (run(4096), run(4096));
//! assert_eq!(first.diff(&second), None);
//! let difference: Difference = first.diff(&run(8192)).expect("other bytes");
//! let entry: &LogEntry = difference.left.as_ref().expect("both made a call");
//! assert_eq!(entry.call, Call::MemAlloc);
//!
//! /// A hook of your own sees every call before and after the driver does. This one allows no allocation.
//! struct NoMemory;
//!
//! impl Hook for NoMemory {
//!     type CallState = ();
//!
//!     fn before(&self, _: &dyn Driver, call: Call, _: Arguments<'_>) -> Result<()> {
//!         match call {
//!             Call::MemAlloc => Err(DriverError::new("mem_alloc", ErrorCode::OutOfMemory)),
//!             _ => Ok(()),
//!         }
//!     }
//!
//!     fn after(&self, _: &dyn Driver, _: Call, (): (), _: Outcome<'_>) {}
//!
//!     fn suballocation(&self, _: Call, _: Arguments<'_>) {}
//! }
//!
//! let driver = Hooked::with_hook(Arc::new(SimDriver::new(SimConfig::default())), NoMemory);
//! assert!(driver.mem_alloc(DeviceId(0), 4096).unwrap_err().is_out_of_memory());
//!
//! // The hooks of the three above:
//! let hooks: (Option<&Counts>, Option<&Faults>, Option<&Recorder>) = (None, None, None);
//! # Ok(())
//! # }
//! ```

mod counting;
mod faulty;
mod hooked;
mod log;
mod recording;
mod value;

pub use counting::{CallCount, Counting, Counts};
pub use faulty::{FaultPlan, Faults, Faulty, InjectedFault};
pub use hooked::{Arguments, Hook, Hooked, Outcome};
pub use log::{Difference, Log, LogEntry};
pub use recording::{Recorder, Recording};
pub use value::Value;
