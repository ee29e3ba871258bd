//! Call stacks for readers: `site.rs` finds the program's line and the frames worth showing, `native.rs` classifies the
//! frames of compiled code.

mod native;
mod site;

pub(crate) use native::is_backward_of;
pub use site::{CallSite, Frameworks, readable};
pub(crate) use site::{autograd_node, is_python, operator, operators, short_path};
