//! Explanations: parts that add up, verdicts on programs made to be each case, attribution, and tuning.

#[path = "../common/mod.rs"]
mod common;

mod hostile;
mod parts;
mod program;
mod tuning;
mod verdicts;
