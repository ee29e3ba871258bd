//! `warpool bench NAME`: measures costs on this machine, each next to a baseline measured in the same run.
//! A benchmark is a file with a `run` function and an entry in [`BENCHMARKS`]; `measure.rs` has the timing.

mod alloc;
mod cores;
mod driver;
mod graph;
mod handles;
mod host;
mod kernels;
mod measure;
mod record;
mod scale;
mod sim;
mod sleep;
mod typed;

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use indicatif::ProgressBar;
use serde_json::{Value, json};
use warpool_driver::Driver;
use warpool_driver::sim::{SimConfig, SimDriver};

use crate::driver::{NAMES, SimArgs};
use crate::output::{self, CommandError, Output, Result, Verdict};
use measure::{MUTEX_BASELINE, Measurement};

/// Measures costs, next to a baseline from the same run
///
/// The baseline is locking and unlocking an uncontended mutex. `bench graph` compares with the driver's own graph
/// launch instead, and `bench typed` with the raw calls that typed ones replace. `bench scale` compares with the same
/// operation beside a tenth as many streams, blocks or pools (a ratio of at most 1.5), with a tenth of the work, per
/// page or event (2.5), or on one thread instead of sixteen (6); a larger ratio is exit status 1. It counts the
/// processor time of one thread, and for several threads the elapsed time, as each row says. `bench alloc` without
/// `--ops` measures one thread on one core after another, since the cores of a shared machine differ. `bench typed`
/// also compares the raw calls with themselves: the distance of those ratios from 1 is the noise of the run. `bench
/// host` measures allocate-free pairs on one thread and on all threads. Every thread times itself, and the slowest one
/// counts. The baseline is measured by the same threads, each with its own mutex. The fastest of 25 rounds of each is
/// reported. Each thread also has one block of every size cached. First pinnings are compared with the driver's own
/// allocation, by the fastest of 9 rounds of each. `bench sleep` compares with plain copies of the same bytes between
/// the device and pinned memory, by the fastest of 5 rounds of each. `bench record` compares with the same without a
/// history, and the longest pair while a snapshot is taken with the longest pair in the same time without one.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("Benchmarks:\n{}\n\n\
    Exit status: 0 success, 1 a limit was exceeded (memory grows, unexpected calls), 2 it could not be run.\n\n\
    Examples:\n  \
    warpool bench sim\n  \
    warpool bench sim --ops 10000000 --json\n  \
    warpool bench driver --driver cuda\n  \
    warpool bench alloc --driver sim\n  \
    warpool bench alloc --driver sim --recording snapshot.pickle.xz\n  \
    warpool bench handles --driver sim\n  \
    warpool bench host --driver sim\n  \
    warpool bench record --driver sim\n  \
    warpool bench sleep --driver cuda\n  \
    warpool bench typed --driver sim\n  \
    warpool bench scale\n  \
    warpool bench graph --driver cuda --json", list()))]
pub struct Args {
    /// The benchmark to run; see the list below
    #[arg(value_name = "BENCHMARK")]
    name: String,
    /// The driver to measure: sim or cuda; not needed for `bench sim` and `bench scale`
    #[arg(long, value_name = "NAME")]
    driver: Option<String>,
    /// The device to measure
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Number of operations per case [default: 1000000, and for one thread of `alloc` half a second more on all cores;
    /// 100000 for driver calls]; for `scale` the largest n, for `sleep` MiB of memory, for `record` entries of the
    /// history
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    ops: Option<u64>,
    /// For `alloc`: a recording, whose allocations and frees are made by each allocator; may be given several times
    #[arg(long = "recording", value_name = "FILE")]
    recordings: Vec<PathBuf>,
    #[command(flatten)]
    sim: SimArgs,
    /// One JSON object per case
    #[arg(long)]
    pub json: bool,
}

impl Args {
    /// The driver's name, which all benchmarks but `sim` and `scale` require.
    fn driver_name(&self) -> Result<&str> {
        self.driver.as_deref().ok_or_else(|| {
            CommandError::Usage(format!("'bench {}' needs --driver: one of {}", self.name, NAMES.join(", ")))
        })
    }

    /// Opens the driver. The simulated GPU tracks no suballocations: a real driver does not either, and the hazard
    /// detector is not what is measured.
    fn open_driver(&self) -> Result<Arc<dyn Driver>> {
        match self.driver_name()? {
            "sim" => Ok(Arc::new(SimDriver::new(self.untracked_sim()))),
            name => crate::driver::open(name, &self.sim, 0),
        }
    }

    fn untracked_sim(&self) -> SimConfig {
        self.sim.config(0).without_suballocation_tracking()
    }
}

struct Benchmark {
    name: &'static str,
    about: &'static str,
    run: fn(&Args, &mut Report<'_>) -> Result<Verdict>,
}

const BENCHMARKS: &[Benchmark] = &[
    Benchmark { name: "sim", about: "throughput of the simulated GPU, and whether its memory grows", run: sim::run },
    Benchmark { name: "driver", about: "host time of driver calls", run: driver::run },
    Benchmark { name: "alloc", about: "host time of allocating and freeing device memory", run: alloc::run },
    Benchmark {
        name: "graph",
        about: "host time of replaying a graph, next to the driver's launch alone",
        run: graph::run,
    },
    Benchmark {
        name: "handles",
        about: "host time of getting a library handle, and that it makes no calls",
        run: handles::run,
    },
    Benchmark {
        name: "host",
        about: "host time of pinned memory: cached, and pinned for the first time",
        run: host::run,
    },
    Benchmark {
        name: "record",
        about: "host time of a history that is always on, and how long a snapshot delays others",
        run: record::run,
    },
    Benchmark {
        name: "sleep",
        about: "memory of a tag to sleep and back, next to plain pinned copies",
        run: sleep::run,
    },
    Benchmark {
        name: "typed",
        about: "host time of typed memory and launches, next to the raw calls",
        run: typed::run,
    },
    Benchmark {
        name: "scale",
        about: "growth of costs with what is idle (streams, blocks, pools, segments), with work, and with threads",
        run: scale::run,
    },
];

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    let Some(benchmark) = BENCHMARKS.iter().find(|benchmark| benchmark.name == args.name) else {
        let names: Vec<&str> = BENCHMARKS.iter().map(|benchmark| benchmark.name).collect();
        let message = format!("unknown benchmark '{}': choose one of {}", args.name, names.join(", "));
        return Err(CommandError::Usage(message));
    };
    let mut report = Report::new(benchmark.name, output);
    let verdict = (benchmark.run)(args, &mut report)?;
    report.finish()?;
    Ok(verdict)
}

fn list() -> String {
    let lines = BENCHMARKS.iter().map(|benchmark| format!("  {:8} {}", benchmark.name, benchmark.about));
    lines.collect::<Vec<_>>().join("\n")
}

/// One measured case.
struct Row {
    case: Cow<'static, str>,
    measurement: Measurement,
    /// The name of the baseline.
    baseline: &'static str,
    /// Additional keys of the JSON object.
    fields: Vec<(&'static str, Value)>,
    /// The last column of the table.
    details: String,
}

impl Row {
    /// A case compared with an uncontended mutex.
    fn new(case: impl Into<Cow<'static, str>>, measurement: Measurement) -> Self {
        Self { case: case.into(), measurement, baseline: MUTEX_BASELINE, fields: Vec::new(), details: String::new() }
    }
}

/// The rows of a benchmark: JSON objects are written at once, the table and the remarks below it at the end.
struct Report<'a> {
    benchmark: &'static str,
    output: &'a mut Output,
    /// Name and nanoseconds of the first row's baseline, for the title.
    baseline: Option<(&'static str, f64)>,
    cells: Vec<[String; 5]>,
    remarks: Vec<String>,
    spinner: ProgressBar,
}

impl<'a> Report<'a> {
    fn new(benchmark: &'static str, output: &'a mut Output) -> Self {
        let spinner = output::spinner("cases measured");
        spinner.set_message("none");
        Self { benchmark, output, baseline: None, cells: Vec::new(), remarks: Vec::new(), spinner }
    }

    fn add(&mut self, row: Row) -> Result<()> {
        self.spinner.set_message(row.case.clone());
        self.spinner.inc(1);
        let Measurement { ns, baseline_ns } = row.measurement;
        let (ratio, per_second) = (row.measurement.ratio(), 1e9 / ns);
        let mut object = json!({
            "bench": self.benchmark,
            "case": row.case,
            "ns": ns,
            "baseline": row.baseline,
            "baseline_ns": baseline_ns,
            "ratio": ratio,
            "ops_per_second": per_second,
        });
        for (key, value) in row.fields {
            object[key] = value;
        }
        self.spinner.suspend(|| self.output.object(&object))?;
        self.baseline.get_or_insert((row.baseline, baseline_ns));
        self.cells.push([
            row.case.into_owned(),
            format!("{ns:.1}"),
            format!("{ratio:.2}"),
            format!("{per_second:.0}"),
            row.details,
        ]);
        Ok(())
    }

    /// Adds a line below the table.
    fn remark(&mut self, remark: String) {
        self.remarks.push(remark);
    }

    fn finish(self) -> Result<()> {
        self.spinner.finish_and_clear();
        let mut table = output::table(&["case", ">ns", ">x baseline", ">per second", "details"]);
        table.add_rows(self.cells);
        let (name, ns) = self.baseline.unwrap_or((MUTEX_BASELINE, 0.0));
        self.output.table(&format!("bench {}, baseline: {name}, {ns:.1} ns", self.benchmark), &table)?;
        for remark in self.remarks {
            self.output.line(remark)?;
        }
        Ok(())
    }
}
