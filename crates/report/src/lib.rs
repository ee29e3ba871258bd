//! Answers about recordings, as sentences, JSON objects and pages for the browser. The command and the Python functions
//! show the same answers, so both get them from here. Nothing is computed here: that is `warpool-trace`.

#![deny(unsafe_code)]

pub mod diff;
pub mod explain;
pub mod moment;
pub mod replay;
pub mod size;
pub mod tune;
pub mod view;

pub use warpool_trace::bytes_text;
