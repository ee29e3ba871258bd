//! Prints what is in a recording, and the time and memory that reading it took.
//!
//! `cargo run --release -p warpool-trace --example summary -- FILE [--stacks] [--rewrite OUT]`

use std::error::Error;
use std::fs::File;
use std::time::Instant;

use warpool::memory::report::Action;
use warpool_trace::{ReadOptions, read_file, write_snapshot};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("usage: summary FILE [--stacks] [--rewrite OUT]")?;
    let (mut stacks, mut rewrite) = (false, None);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--stacks" => stacks = true,
            "--rewrite" => rewrite = Some(arguments.next().ok_or("--rewrite needs a file")?),
            _ => return Err(format!("unknown argument {argument}").into()),
        }
    }
    let start = Instant::now();
    let recording = read_file(&file, &ReadOptions { stacks, ..ReadOptions::default() })?;
    let seconds = start.elapsed().as_secs_f64();
    let snapshot = &recording.snapshot;

    let entries = || snapshot.traces.iter().flatten();
    println!("events {}", entries().count());
    for action in Action::ALL {
        let with_action = || entries().filter(|entry| entry.action == action);
        let bytes: u128 = with_action().map(|entry| u128::from(entry.size)).sum();
        let addresses: u128 = with_action().map(|entry| u128::from(entry.addr)).sum();
        println!("{} {} size {bytes} addr {addresses}", action.name(), with_action().count());
    }
    println!("stream {}", entries().map(|entry| u128::from(entry.stream)).sum::<u128>());
    println!("time {}", entries().map(|entry| i128::from(entry.time_us)).sum::<i128>());
    let blocks = || snapshot.segments.iter().flat_map(|segment| &segment.blocks);
    println!(
        "segments {} size {}",
        snapshot.segments.len(),
        snapshot.segments.iter().map(|s| s.total_size).sum::<u64>()
    );
    println!("blocks {} requested {}", blocks().count(), blocks().map(|block| block.requested_size).sum::<u64>());
    println!("annotations {}", snapshot.annotations.len());
    println!("frames {}", entries().filter_map(|e| e.stack).map(|id| snapshot.stacks[id.index()].len()).sum::<usize>());

    let megabytes = recording.bytes_decompressed as f64 / 1e6;
    let parsing = seconds - recording.input_time.as_secs_f64();
    eprintln!("{megabytes:.1} MB in {seconds:.3} s, {:.0} MB/s", megabytes / seconds);
    eprintln!("without input and decompression {parsing:.3} s, {:.0} MB/s", megabytes / parsing);
    eprintln!("{:?}", recording.fields);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    eprintln!("{}", status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("peak memory unknown"));
    if let Some(path) = rewrite {
        write_snapshot(snapshot, File::create(path)?)?;
    }
    Ok(())
}
