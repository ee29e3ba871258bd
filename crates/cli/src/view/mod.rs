//! `warpool view`: a recording as a page for the browser; many as a heat map (`heat_map.rs`).

mod heat_map;

use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use serde_json::{Value, json};
use warpool_report::view::Page;
use warpool_report::view::{figures, page};
use warpool_trace::RecordingFormat;
use warpool_trace::explain::{ExplainOptions, Frameworks};
use warpool_trace::timeline::{TimelineOptions, timelines};

use crate::capacity::CapacityArgs;
use crate::files::{expand, name_without_endings, short_names};
use crate::inputs::{self, in_parallel, replay_error, show_progress};
use crate::output::{self, CommandError, Output, Result, Verdict};
use crate::ranks::JobArgs;
use crate::size;

/// Writes a page for the browser: memory over time, and who holds it at any moment
///
/// The page is one HTML file, which needs no network and no server. It shows allocated and cached memory and
/// fragmentation over time; the segments and blocks, a flame graph and the largest holders at the cursor; allocations
/// as bands; events and regions that the program named; search by frame; out-of-memory events and retries; stacks to
/// pin and copy. Of several recordings (the ranks of a job) it is a heat map of their memory over time; a click opens
/// one. Record with stacks to see who holds memory: torch.cuda.memory._record_memory_history(). `warpool diff
/// A B -o FILE` compares two recordings in a page.
#[derive(Debug, clap::Args)]
#[command(after_help = "A report that exists is replaced; any other file is not.\n\
    Exit status: 0 success, 2 the file cannot be read, or the page cannot be written.\n\n\
    Examples:\n  \
    warpool view oom.pickle -o report.html\n  \
    warpool view train.pickle --device 0\n  \
    warpool view snapshots/ -o ranks.html --pages\n  \
    warpool view oom.pickle --json")]
pub struct Args {
    /// The recording, or several, or a folder or pattern of them; `-` is the standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The page to write [default: the name of the recording with .html, or ranks.html, in the current folder]
    #[arg(short, long, value_name = "PAGE")]
    output: Option<PathBuf>,
    /// Only this device [default: all; the page has a choice]
    #[arg(long, value_name = "NUMBER")]
    device: Option<u32>,
    /// Of several recordings, also write the page of each, in a folder beside the heat map; a click leads there
    #[arg(long)]
    pages: bool,
    #[command(flatten)]
    jobs: JobArgs,
    #[command(flatten)]
    capacity: CapacityArgs,
    /// A package or a part of a path whose code is not your own, beside torch and its companions; may be repeated
    #[arg(long, value_name = "NAME")]
    framework: Vec<String>,
    /// Leave out the advice, which takes replays
    #[arg(long)]
    no_fits: bool,
    /// The most memory of this machine that it may take, for example 16GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory_limit: Option<u64>,
    /// One JSON object: what was written, and the figures that the page shows
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, quiet: bool, output: &mut Output) -> Result<Verdict> {
    let files = expand(&args.files)?;
    let [file] = files.as_slice() else { return heat_map::run(args, &files, quiet, output) };
    let name = short_names(&files).remove(0);
    let to = args.output.clone().unwrap_or_else(|| default_output(file));
    let mut made = Err(String::new());
    let work = |file: &Path, bar: &ProgressBar| make(file, &name, args, args.memory_limit, bar);
    in_parallel(&files, quiet, work, |_, result| {
        made = result;
        Ok(())
    })?;
    let (page, devices) = made.map_err(|error| CommandError::Usage(output::printable(&error)))?;
    let bytes = page.write(&to).map_err(CommandError::Usage)?;
    output.object(&json!({
        "file": file.to_string_lossy(),
        "page": to.to_string_lossy(),
        "page_bytes": bytes,
        "devices": devices,
    }))?;
    output.line(format!("{}: {}", output::printable(&to.display().to_string()), size::format(bytes)))?;
    if !quiet {
        output.line("Open it in a browser.")?;
    }
    Ok(Verdict::Success)
}

/// The page, and the figures of its devices.
fn make(
    file: &Path,
    name: &str,
    args: &Args,
    memory_limit: Option<u64>,
    bar: &ProgressBar,
) -> std::result::Result<(Page, Vec<Value>), String> {
    let opened = inputs::open(file, true, memory_limit, bar)?;
    inputs::begin(bar, "replaying");
    let frameworks = Frameworks::default().with(&args.framework);
    let options = TimelineOptions {
        explain: ExplainOptions {
            capacity: args.capacity.bytes(),
            frameworks: frameworks.clone(),
            not_of_pytorch: opened.recording.format == RecordingFormat::RmmLog,
            skips_fits: args.no_fits,
            memory_limit: Some(opened.memory_limit),
            progress: Some(&|progress| show_progress(bar, progress)),
            ..ExplainOptions::default()
        },
        ..TimelineOptions::default()
    };
    let snapshot = &opened.recording.snapshot;
    let mut found = timelines(snapshot, &options).map_err(|error| replay_error(file, &error))?;
    if let Some(device) = args.device {
        let numbers: Vec<String> = found.iter().map(|timeline| timeline.device.to_string()).collect();
        found.retain(|timeline| timeline.device == device);
        if found.is_empty() {
            let message = format!("there is no device {device} in it, only {}", numbers.join(", "));
            return Err(inputs::with_file(file, message));
        }
    }
    inputs::begin(bar, "writing");
    let page = page(name, &mut found, snapshot, &frameworks);
    Ok((page, found.iter().map(figures).collect()))
}

/// The name of a recording with `.html`, in the current folder.
fn default_output(file: &Path) -> PathBuf {
    PathBuf::from(format!("{}.html", name_without_endings(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_named_after_the_recording() {
        for (file, page) in [
            ("a/oom.pickle.xz", "oom.html"),
            ("x.native.pickle", "x.native.html"),
            ("log.csv", "log.html"),
            ("saved.pt", "saved.html"),
            ("ranks.tar.bz2", "ranks.html"),
            ("-", "recording.html"),
            (".pickle", "recording.html"),
        ] {
            assert_eq!(default_output(Path::new(file)), PathBuf::from(page));
        }
    }
}
