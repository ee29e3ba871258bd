//! An explanation in sentences (`prose.rs`), in tables (`tables.rs`) and as JSON (`object.rs`).

mod object;
mod prose;
mod tables;

pub(crate) use object::holder_object;
pub use object::{advice_object, categories_list, object};
pub use prose::{headline, moment_name, sentences};
pub use tables::{AdviceText, Table, advice_texts, tables};
