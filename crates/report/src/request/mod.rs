//! Requests for answers: a command (`explain`, `replay`, `tune`, `diff`, `view`, `summarize`, `merge`) with its
//! options, named as those of the command line, and recordings, which are files, bytes, or streams of the caller. The
//! Python functions and the page in the browser ask this way.
//!
//! The request is JSON. The answer is JSON with the same objects as the command's `--json`, and for pages also HTML.

mod answer;
mod call;
mod command;
mod error;
mod input;
mod options;
mod work;

pub use call::Call;
pub use error::Error;
pub use input::{Source, Stream};
pub use work::{Stage, Work};
