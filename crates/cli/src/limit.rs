//! `warpool limit`: asks a running process for another limit. The process decides; this command waits for its answer.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::builder::ValueParser;
use serde_json::json;
use warpool::share::{LimitAnswer, OtherPage};

use crate::output::{CommandError, Output, Result, Verdict};
use crate::{size, top};

/// A process looks for requests four times per second.
const PATIENCE: Duration = Duration::from_secs(3);

/// Limits what a running process of this user may reserve on a device
///
/// The process applies it at its next allocation from the driver; memory that it has already stays until it frees it.
/// Processes started with WARPOOL_PUBLISH=read-only do not accept it (docs/top.md).
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 the limit holds, 1 the process refused or did not answer, 2 wrong usage, or there \
    is no such process.\n\n\
    Examples:\n  \
    warpool limit 4711 40GiB\n  \
    warpool limit 4711 none --device 1"
)]
pub struct Args {
    /// The process
    pid: u32,
    /// The limit, such as 40GiB, or none
    #[arg(value_name = "SIZE", value_parser = ValueParser::new(limit))]
    limit: Limit,
    /// The device, as the process numbers them
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// The folder of the pages [default: WARPOOL_PAGES, or /dev/shm/warpool-UID]
    #[arg(long, value_name = "DIR")]
    pages: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug)]
struct Limit(Option<u64>);

fn limit(text: &str) -> std::result::Result<Limit, String> {
    if text == "none" { Ok(Limit(None)) } else { size::parse(text).map(|bytes| Limit(Some(bytes))) }
}

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    let listing = top::folder(args.pages.as_ref())?.list()?;
    let usage = |message: String| Err(CommandError::Usage(message));
    let pages: Vec<&OtherPage> = listing.pages.iter().filter(|page| page.identity().pid == args.pid).collect();
    let Some(page) = pages.first() else {
        return usage(format!("process {} publishes no page: warpool top lists those that do", args.pid));
    };
    let devices = page.identity().devices.len();
    if args.device as usize >= devices {
        return usage(format!("process {} has {devices} devices, and no device {}", args.pid, args.device));
    }
    let (device, begun) = (args.device as usize, Instant::now());
    let request = page.request_limit(device, args.limit.0);
    let answer = loop {
        match page.limit_answer(device, request) {
            None if begun.elapsed() < PATIENCE && page.is_alive() => std::thread::sleep(Duration::from_millis(20)),
            answer => break answer,
        }
    };
    let bytes = request.bytes();
    let shown = bytes.map_or_else(|| "no limit".to_owned(), |bytes| format!("a limit of {}", size::format(bytes)));
    let (outcome, text) = match answer {
        Some(LimitAnswer::Applied) => ("applied", format!("process {} has {shown} on device {device}", args.pid)),
        Some(LimitAnswer::NotAllowed) => {
            ("refused", format!("process {} does not let others change its limits", args.pid))
        }
        Some(_) => {
            ("unsupported", format!("the allocator of process {} has no limit that changes at run time", args.pid))
        }
        None if !page.is_alive() => ("ended", format!("process {} ended", args.pid)),
        None => ("no answer", format!("process {} did not answer; it may be stopped, and apply it later", args.pid)),
    };
    output.object(&json!({ "pid": args.pid, "device": device, "bytes_limit": bytes, "outcome": outcome }))?;
    output.line(&text)?;
    Ok(if outcome == "applied" { Verdict::Success } else { Verdict::Failure })
}
