//! A machine for the small part of pickle that memory snapshots are written in.
//!
//! It executes nothing: there are no globals, no calls, no classes, and every opcode outside the list is refused by
//! name. It builds no tree of objects either. Whenever a container is opened, the stack tells where in the snapshot
//! that is; its contents go to the [`Builder`](crate::snapshot::Builder) as soon as they are complete, and the stack
//! and the memo hold only a kind and a number.

mod machine;
pub(crate) mod opcode;
mod place;
mod value;

pub(crate) use machine::Machine;
pub(crate) use value::{DictKind, ListKind, Value};
