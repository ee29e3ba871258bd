//! `warpool defects`: the planted defects of a test build, one JSON object each. `xtask defects` reads them.

use serde_json::json;
use warpool::defect::Defect;

use crate::output::{Output, Result, Verdict};

pub fn run(output: &mut Output) -> Result<Verdict> {
    for &defect in Defect::ALL {
        output.object(&json!({
            "number": defect as u32,
            "name": format!("{defect:?}"),
            "rule": defect.rule(),
        }))?;
    }
    Ok(Verdict::Success)
}
