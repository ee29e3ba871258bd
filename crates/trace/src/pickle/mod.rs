//! The part of the pickle format that memory snapshots use: opcodes, and values.
//! There are no globals, calls or classes among them, so nothing here can execute anything.

pub(crate) mod opcode;
mod value;

pub(crate) use value::{DictKind, ListKind, Value};
