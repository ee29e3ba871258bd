//! Checks over any driver: one file per subject of the contract.

pub(crate) mod capture;
pub(crate) mod capture_rules;
pub(crate) mod conditionals;
pub(crate) mod copies;
pub(crate) mod devices;
pub(crate) mod errors;
pub(crate) mod events;
mod exec_params;
pub(crate) mod graphs;
pub(crate) mod host_memory;
pub(crate) mod kernels;
pub(crate) mod libraries;
pub(crate) mod memory;
pub(crate) mod pools;
pub(crate) mod streams;
pub(crate) mod virtual_memory;
