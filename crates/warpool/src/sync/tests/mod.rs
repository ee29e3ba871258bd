mod capture_gate;
pub(crate) mod models;
mod sequence;
mod spin_lock;
