//! An explanation in sentences (`prose.rs`), in tables (`tables.rs`) and as JSON (`object.rs`), and many of them in one
//! table (`ranks.rs`).

mod object;
mod prose;
mod ranks;
mod tables;

pub use object::{advice_object, categories_list, object};
pub use prose::{headline, moment_name, sentences};
pub use ranks::{Rank, outliers, ranks_table};
pub use tables::{AdviceText, Table, advice_texts, tables};
