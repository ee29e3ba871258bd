//! Who is ordered before whom, and the log of accesses that no order protects.

mod accessor;
mod clock;
mod hazard;

pub use accessor::{Actor, Label, Order, Point};
pub use clock::{Frontier, HOST, Stamp};
pub use hazard::{Hazard, HazardKind, HazardLog, HazardRange, RangeBase};
