//! Explanations: parts that add up, verdicts on one program for each case, attribution, tuning, and timelines.

#[path = "../common/mod.rs"]
mod common;

mod hostile;
mod parts;
mod program;
mod timeline;
mod tuning;
mod verdicts;
