//! `warpool top`: what the processes of this user publish about their GPU memory, live on a terminal, as a table, as
//! JSON lines, or for Prometheus. `warpool::share` reads the pages and adds them up, `warpool_report::top` has JSON and
//! metrics; here are arguments, the terminal and the server.

mod app;
mod screen;
mod serve;
mod table;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use warpool::share::{Board, BoardOrder, PageDirectory, now_us};
use warpool_driver::{DeviceId, DeviceProperties, Driver};
use warpool_report::top;

use crate::driver::{self, SimArgs};
use crate::output::{CommandError, Output, Result, Verdict};

/// A process writes its page within this time once it is asked; a stopped one does not.
const ANSWER: Duration = Duration::from_secs(1);

/// Shows the GPU memory of all processes of this user that run with Warpool
///
/// Every process with Warpool publishes a page of counters (docs/top.md). Without --once, --json or --metrics this is
/// an interactive screen: arrows select a process, Enter shows one in detail, s sorts, q quits, ? lists all keys.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 success, 1 --driver failed, 2 wrong usage, no terminal, or the pages cannot be \
    read.\n\n\
    Examples:\n  \
    warpool top\n  \
    warpool top --once\n  \
    warpool top --json\n  \
    warpool top --metrics 127.0.0.1:9400"
)]
pub struct Args {
    /// Print one table and end
    #[arg(long)]
    once: bool,
    /// Print once, one JSON object per process and device, card, and unreadable page
    #[arg(long)]
    pub json: bool,
    /// Serve http://ADDRESS/metrics in the OpenMetrics format, for example 127.0.0.1:9400
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["once", "json"])]
    metrics: Option<SocketAddr>,
    /// Sort by reserved, allocated, asleep, rate, pid or command
    #[arg(long, value_name = "KEY", default_value = "reserved", value_parser = parse_order)]
    sort: BoardOrder,
    /// Seconds between two readings of the screen, from 0.1 to 60
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    interval: Duration,
    /// The folder of the pages [default: WARPOOL_PAGES, or /dev/shm/warpool-UID]
    #[arg(long, value_name = "DIR")]
    pages: Option<PathBuf>,
    /// Ask this driver what is used of each card: sim or cuda. It makes a context on each
    #[arg(long, value_name = "NAME")]
    driver: Option<String>,
    #[command(flatten)]
    sim: SimArgs,
}

fn parse_order(text: &str) -> std::result::Result<BoardOrder, String> {
    let names = BoardOrder::ALL.map(BoardOrder::name).join(", ");
    BoardOrder::ALL.into_iter().find(|order| order.name() == text).ok_or_else(|| format!("choose one of {names}"))
}

fn parse_interval(text: &str) -> std::result::Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=60.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("it is a number of seconds from 0.1 to 60".to_owned()),
    }
}

/// The folder of the pages.
pub fn folder(argument: Option<&PathBuf>) -> Result<PageDirectory> {
    let variable = || std::env::var_os("WARPOOL_PAGES").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let path = argument.cloned().or_else(variable).unwrap_or_else(PageDirectory::default_path);
    Ok(PageDirectory::open(&path)?)
}

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    let source = Source::open(args)?;
    if let Some(address) = args.metrics {
        serve::run(address, &|| Ok(top::metrics(&source.board()?)))?;
    } else if args.json {
        for object in top::objects(&source.board()?, args.sort) {
            output.object(&object)?;
        }
    } else if args.once {
        table::show(&source.board()?, args.sort, output)?;
    } else {
        screen::run(&|| source.board(), args.sort, args.interval)?;
    }
    Ok(Verdict::Success)
}

/// Where boards come from.
struct Source {
    pages: PageDirectory,
    driver: Option<(Arc<dyn Driver>, Vec<(DeviceId, DeviceProperties)>)>,
}

impl Source {
    fn open(args: &Args) -> Result<Self> {
        let pages = folder(args.pages.as_ref())?;
        let Some(name) = &args.driver else {
            return Ok(Self { pages, driver: None });
        };
        let driver = driver::open(name, &args.sim, 0)?;
        let devices = (0..driver.device_count()?).map(DeviceId);
        let devices = devices.map(|device| Ok((device, driver.device_properties(device)?))).collect::<Result<_>>()?;
        Ok(Self { pages, driver: Some((driver, devices)) })
    }

    /// Fresh values of every process.
    fn board(&self) -> Result<Board> {
        let listing = self.pages.list()?;
        listing.refresh(ANSWER);
        let mut board = Board::read(listing);
        if let Some((driver, devices)) = &self.driver {
            for (device, properties) in devices {
                board.add_driver(properties.uuid, &properties.name, driver.mem_info(*device)?, now_us());
            }
        }
        Ok(board)
    }
}

/// A usage error that names what is missing.
fn usage(message: impl Into<String>) -> CommandError {
    CommandError::Usage(message.into())
}
