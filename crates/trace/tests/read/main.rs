//! Reading recordings of every form, damaged ones included, and writing snapshots.

#[path = "../common/mod.rs"]
mod common;

mod archives;
mod damage;
mod formats;
mod host_memory;
mod rmm;
mod write;
