//! Many recordings of one job: the report as sentences and tables (`prose.rs`), as JSON (`object.rs`) and as a page
//! (`page.rs`), and the parts that summaries travel in (`part.rs`).

mod object;
mod page;
mod part;
mod prose;

pub use object::object;
pub use page::{Link, page};
pub use part::{PartError, parse_part, part};
pub use prose::{headline, sentences, tables};
