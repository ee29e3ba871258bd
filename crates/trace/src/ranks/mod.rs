//! Many recordings of one job: a small [`Summary`] of each, and a report over all of them.
//!
//! A summary has what the report needs and nothing else, so it can be made where the recording is, and sent. The report
//! ([`Ranks`]) is a function of the *set* of summaries: their order, how often each comes and in which parts they
//! arrive make no difference.
//!
//! ```no_run
//! use warpool_trace::explain::ExplainOptions;
//! use warpool_trace::ranks::{Ranks, Summary, summarize};
//! use warpool_trace::{ReadOptions, read_file};
//!
//! let mut summaries = Vec::new();
//! for file in ["rank0.pickle", "rank1.pickle"] {
//!     match read_file(file, &ReadOptions { stacks: true, ..ReadOptions::default() }) {
//!         Ok(recording) => summaries.extend(summarize(&recording.snapshot, file, &ExplainOptions::default())?),
//!         Err(error) => summaries.push(Summary::unreadable(file, error.to_string())),
//!     }
//! }
//! let ranks = Ranks::new(summaries);
//! println!("{} groups of equal ranks", ranks.groups.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `summary.rs` makes a summary, `identity.rs` finds which rank it is of, `natural.rs` is the order of names,
//! `report.rs` compares, and `gate.rs` bounds the memory of recordings that are read at once. How summaries are written
//! is not here.

mod gate;
mod identity;
mod natural;
mod report;
mod summary;

pub use gate::MemoryGate;
pub use identity::Identity;
pub use natural::natural_order;
pub use report::{Difference, Group, More, RankRow, Ranks, TOLERANCE_PERCENT, short_names};
pub use summary::{COLUMNS, Column, Figures, HOLDERS_MAX, Summary, explain_and_summarize, summarize};
