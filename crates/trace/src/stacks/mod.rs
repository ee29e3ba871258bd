//! Call stacks as a person reads them: `site.rs` finds the line that tells and the frames worth showing, `native.rs`
//! knows the frames of compiled code.

mod native;
mod site;

pub(crate) use native::is_backward_of;
pub use site::{CallSite, Frameworks, readable};
pub(crate) use site::{autograd_node, is_python, operator, operators, short_path};
