//! An explanation in sentences (`prose.rs`) and as JSON (`object.rs`).

mod object;
mod prose;

pub use object::{advice_object, categories_list, object};
pub use prose::{headline, moment_name, sentences};
