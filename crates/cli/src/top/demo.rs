//! A process with a page: `warpool __page FOLDER`, which only tests and the example of the book start. It uses memory
//! of the simulated GPU, publishes, and does what the lines of its standard input say, until that ends.

use std::io::{self, BufRead as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use warpool::Instance;
use warpool::memory::sleep::Keep;
use warpool::memory::{Allocate as _, DeviceAllocator, HostAllocator, PagedAllocator, PinnedSettings, Settings, Tags};
use warpool::share::{PageDirectory, PageOptions, PublishOptions, Publisher, TagSource};

use crate::driver;
use crate::output::{Result, Verdict};

/// The name of the command, which is not in the help.
pub const NAME: &str = "__page";

const MIB: u64 = 1 << 20;

/// A process with a page, for tests
#[derive(Debug, clap::Args)]
pub struct Args {
    folder: PathBuf,
    /// MiB of a tag, and of one of two streams
    #[arg(default_value_t = 40)]
    mib: u64,
    /// What it calls itself
    #[arg(long, default_value = "demo")]
    command: String,
    #[arg(long)]
    read_only: bool,
}

pub fn run(args: &Args) -> Result<Verdict> {
    let instance = Instance::new(driver::open("sim", &driver::SimArgs::default(), 0)?)?;
    let device = instance.device(0)?;
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(PagedAllocator::new(&instance, Settings::default())?);
    let host = HostAllocator::new(&instance, PinnedSettings::default());
    let tags = Tags::new(&allocator, &host)?;
    let options = PageOptions { command: args.command.clone() };
    let page = Arc::new(PageDirectory::open(&args.folder)?.publish(&instance, &options)?);
    let source: TagSource = Arc::new({
        let tags = tags.clone();
        move || tags.info()
    });
    let options = PublishOptions { accepts_limits: !args.read_only, host: Some(host), tags: Some(source) };
    let streams = [device.lease_stream()?, device.lease_stream()?];
    let _tagged = {
        let _scope = tags.tag(&device, "weights")?.enter()?;
        allocator.allocate(args.mib * MIB, &streams[0])?
    };
    let _plain = allocator.allocate(args.mib * MIB, &streams[1])?;
    let publisher = Publisher::start(&page, &allocator, options)?;
    say("published")?;
    for line in io::stdin().lock().lines() {
        match line?.as_str() {
            "oom" => say(if allocator.allocate(1 << 50, &streams[0]).is_err() { "out of memory" } else { "enough" })?,
            "sleep" => {
                streams[0].synchronize()?;
                tags.sleep(&["weights"], Keep::Discard)?;
                say("asleep")?;
            }
            "allocate" => say(if allocator.allocate(200 * MIB, &streams[1]).is_ok() { "enough" } else { "refused" })?,
            other => say(&format!("unknown: {other}"))?,
        }
        publisher.write_now();
    }
    Ok(Verdict::Success)
}

fn say(line: &str) -> Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
