//! `warpool bench NAME`: what things cost on this machine, each next to a baseline measured in the same run.
//! A benchmark is a function in a file of its own and a line in [`BENCHES`]; how time is taken stands in `measure.rs`.

mod alloc;
mod driver;
mod graph;
mod handles;
mod host;
mod host_cold;
mod measure;
mod sim;

use indicatif::ProgressBar;
use serde_json::{Value, json};

use crate::driver::SimArgs;
use crate::output::{self, CommandError, Output, Result, Verdict};
use measure::Baseline;

/// Measures what things cost, next to a baseline taken in the same run
///
/// The baseline is the cheapest thing that a lock can do: taking and releasing a mutex that nobody else wants.
/// `bench graph` compares with a bare launch instead. `bench host` takes pairs from one and from all threads: every
/// thread times itself, the slowest one counts, and the baseline is taken by the same threads in the same way, each
/// with its own mutex; of both the quickest of 25 rounds counts. Each thread has one block of every size cached
/// besides. First pinnings it compares with the driver's own allocation, by the quickest of 7 rounds each.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("Benchmarks:\n{}\n\n\
    Exit status: 0, 1 if a limit was passed (memory that grows, calls that should not be made), 2 if it could not be run.\n\n\
    Examples:\n  \
    warpool bench sim\n  \
    warpool bench sim --ops 10000000 --json\n  \
    warpool bench driver --driver cuda\n  \
    warpool bench alloc --driver sim\n  \
    warpool bench handles --driver sim\n  \
    warpool bench host --driver sim\n  \
    warpool bench graph --driver cuda --json", listed()))]
pub struct Args {
    /// The benchmark to run; the list is below
    #[arg(value_name = "BENCHMARK")]
    name: String,
    /// The driver to measure: sim or cuda; not needed for `bench sim`
    #[arg(long, value_name = "NAME")]
    driver: Option<String>,
    /// The device to measure
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// How many operations each case runs [default: 1000000; 100000 for calls to a driver]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    ops: Option<u64>,
    #[command(flatten)]
    sim: SimArgs,
    /// One JSON object per case
    #[arg(long)]
    pub json: bool,
}

/// A benchmark that can be asked for.
struct Bench {
    name: &'static str,
    about: &'static str,
    run: fn(&Args, &mut Rows<'_>) -> Result<Verdict>,
}

const BENCHES: &[Bench] = &[
    Bench { name: "sim", about: "what the simulated GPU does per second, and whether its memory grows", run: sim::run },
    Bench { name: "driver", about: "what calls to a driver cost the host", run: driver::run },
    Bench { name: "alloc", about: "what allocating and freeing device memory costs the host", run: alloc::run },
    Bench { name: "graph", about: "what replaying a graph costs the host, beside the launch alone", run: graph::run },
    Bench {
        name: "handles",
        about: "what it costs to come by a library's handle, and that it makes no call",
        run: handles::run,
    },
    Bench {
        name: "host",
        about: "what pinned host memory costs the host, cached and for the first time",
        run: host::run,
    },
];

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    let Some(bench) = BENCHES.iter().find(|bench| bench.name == args.name) else {
        let names: Vec<&str> = BENCHES.iter().map(|bench| bench.name).collect();
        return Err(CommandError::Usage(format!(
            "there is no benchmark '{}': choose one of {}",
            args.name,
            names.join(", ")
        )));
    };
    let mut rows = Rows {
        bench: bench.name,
        baseline: Baseline::measure(),
        baseline_name: Baseline::NAME,
        output,
        shown: Vec::new(),
        remarks: Vec::new(),
        spinner: output::spinner("cases measured"),
    };
    rows.spinner.set_message("the baseline");
    let verdict = (bench.run)(args, &mut rows)?;
    rows.finish()?;
    Ok(verdict)
}

fn listed() -> String {
    BENCHES.iter().map(|bench| format!("  {:8} {}", bench.name, bench.about)).collect::<Vec<_>>().join("\n")
}

/// One measured case.
struct Row {
    case: &'static str,
    /// What one operation took.
    ns: f64,
    /// More keys of the JSON object.
    extra: Vec<(&'static str, Value)>,
    /// More for people, in the last column.
    besides: String,
}

/// The rows of a benchmark: objects are written at once, the table and the remarks below it at the end.
struct Rows<'a> {
    bench: &'static str,
    baseline: Baseline,
    /// What it is; a benchmark may choose its own.
    baseline_name: &'static str,
    output: &'a mut Output,
    shown: Vec<[String; 5]>,
    remarks: Vec<String>,
    spinner: ProgressBar,
}

impl Rows<'_> {
    fn add(&mut self, row: Row) -> Result<()> {
        self.spinner.set_message(row.case);
        self.spinner.inc(1);
        let ratio = row.ns / self.baseline.ns;
        let per_second = 1e9 / row.ns;
        let mut object = json!({
            "bench": self.bench,
            "case": row.case,
            "ns": row.ns,
            "baseline": self.baseline_name,
            "baseline_ns": self.baseline.ns,
            "ratio": ratio,
            "ops_per_second": per_second,
        });
        for (key, value) in row.extra {
            object[key] = value;
        }
        self.spinner.suspend(|| self.output.object(&object))?;
        self.shown.push([
            row.case.to_owned(),
            format!("{:.1}", row.ns),
            format!("{ratio:.2}"),
            format!("{per_second:.0}"),
            row.besides,
        ]);
        Ok(())
    }

    /// A sentence for people, below the table.
    fn remark(&mut self, remark: String) {
        self.remarks.push(remark);
    }

    fn finish(self) -> Result<()> {
        self.spinner.finish_and_clear();
        let mut table = output::table(&["case", ">ns", ">x baseline", ">per second", "besides"]);
        table.add_rows(self.shown);
        let title = format!("bench {}, against {} at {:.1} ns", self.bench, self.baseline_name, self.baseline.ns);
        self.output.table(&title, &table)?;
        for remark in self.remarks {
            self.output.line(remark)?;
        }
        Ok(())
    }
}
