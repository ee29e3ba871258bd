//! `warpool bench host`: host time of pinned memory, cached (`cached.rs`) and pinned for the first time
//! (`first_pinning.rs`).

mod cached;
mod first_pinning;

use super::{Args, Report};
use crate::driver;
use crate::output::{Result, Verdict};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    let driver = args.open_driver()?;
    let device = driver::device(&*driver, args.device)?;
    // Pinning creates no context, but needs one.
    driver.context_retain(device)?;
    driver.set_current_device(device)?;
    let unexpected = cached::measure(&driver, args.ops.unwrap_or(1_000_000), report)?;
    first_pinning::measure(&driver, device, report)?;
    driver.context_release(device)?;
    if unexpected.is_empty() {
        return Ok(Verdict::Success);
    }
    report.remark(format!("made driver calls, but must not: {}", unexpected.join(", ")));
    Ok(Verdict::Failure)
}
