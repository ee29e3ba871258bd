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
