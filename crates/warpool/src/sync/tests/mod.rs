mod capture_gate;
pub(crate) mod models;
mod spin_lock;
