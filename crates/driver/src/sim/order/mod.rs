//! The hazard detector's view of order: vector clocks, who accessed memory, and the log of accesses that no order
//! protects. Nothing here depends on virtual time.

mod accessor;
mod clock;
mod hazard;
mod names;
mod node_order;

pub use accessor::{Accessor, HappensBefore, Operation};
pub use clock::{Epoch, TimelineId, VectorClock};
pub use hazard::{Hazard, HazardKind, HazardLog, HazardRange, RangeBase};
pub use node_order::{NodeInstance, NodeOrder};
