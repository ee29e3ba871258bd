//! An explanation in sentences (`prose.rs`) and as JSON (`object.rs`).

mod object;
mod prose;

pub use object::object;
pub use prose::{headline, sentences};
