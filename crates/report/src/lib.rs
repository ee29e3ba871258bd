//! Answers about recordings, as sentences, JSON objects and pages for the browser. The command, the Python functions
//! and the page in the browser show the same answers, so all get them from here. [`request`] has the commands as
//! functions from JSON to JSON. Nothing is computed here but sums ([`account`]): that is `warpool-trace`. [`top`] has
//! what running processes publish, from `warpool`.

#![deny(unsafe_code)]

pub mod account;
pub mod diff;
pub mod explain;
pub mod moment;
pub mod ranks;
pub mod replay;
pub mod request;
pub mod size;
pub mod top;
pub mod tune;
pub mod view;

pub use warpool_trace::bytes_text;
