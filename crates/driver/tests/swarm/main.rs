//! Random programs on the simulated driver, compared with a naive model of their order that shares no code with it.
//!
//! Half of the programs are correct by construction, the others omit waits. For each, on drivers with several seeds:
//! - if the model has no conflicts, the log is empty, and everything read and the final contents of memory are as the
//!   model says;
//! - otherwise the log is not empty, and every entry is one of the model's conflicts, over bytes of that conflict.
//!
//! What the log may omit: it keeps for each byte the last write and the reads since. A conflict with an older access is
//! not reported, but then the access that replaced it conflicts with one of the two. So every byte of a conflict is in
//! some entry. Two things weaken that to "there is some entry": an operation stops at freed memory, and a conflict with
//! an allocator's report hides what follows from it. A conflict with a report that a later report replaced while the
//! operation was still queued may be missed.
//!
//! `WARPOOL_SWARM_SEED=n` runs the one program of that seed, `WARPOOL_SWARM_COUNT=n` that many from the first on.

mod display;
mod effects;
mod model;
mod program;
mod runner;
#[path = "../common/scale.rs"]
mod scale;

use fastrand::Rng;
use model::{Conflict, ConflictKind, Model, Name};
use program::{Program, Step};
use runner::Run;
use scale::{number, scaled};
use warpool_driver::sim::{Hazard, HazardKind, Latencies, SimConfig, SimDriver};

#[test]
fn hazards_and_contents_agree_with_the_model() {
    let seeds = match number("WARPOOL_SWARM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("WARPOOL_SWARM_COUNT").unwrap_or_else(|| scaled(1000)),
    };
    let (mut correct, mut wrong) = (0, 0);
    for seed in seeds.clone() {
        let program = Program::generate(seed);
        if check(&program) { correct += 1 } else { wrong += 1 }
    }
    println!("{correct} correct and {wrong} wrong programs");
    assert!(seeds.end - seeds.start < 1000 || (correct > 100 && wrong > 100), "{correct} correct, {wrong} wrong");
}

/// Prints the program if the test panics.
struct PrintOnPanic<'a>(&'a Program);

impl Drop for PrintOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Runs a program with several seeds. Returns whether it was correct.
fn check(program: &Program) -> bool {
    let _print = PrintOnPanic(program);
    let mut correct = true;
    for round in 0..2 {
        let seed = Rng::with_seed(program.seed ^ (round << 32) ^ 0x5eed).u64(..);
        let run = run(program, seed);
        let model = Model::of(&program.steps, &run.outcomes);
        if let Err(difference) = compare(program, &run, &model) {
            let log: Vec<String> = run.hazards.iter().map(ToString::to_string).collect();
            panic!("{difference}\ndriver seed {seed}\nthe log: {log:#?}\nthe model: {:#?}", model.conflicts);
        }
        correct &= model.conflicts.is_empty();
    }
    correct
}

fn run(program: &Program, seed: u64) -> Run {
    let mut rng = Rng::with_seed(seed);
    let mut config = SimConfig::default().with_seed(seed);
    config.queue_depth = [1, 2, 5, 1024][rng.usize(..4)];
    config.latencies = match rng.usize(..3) {
        0 => Latencies::flat(0),
        1 => Latencies::flat(2_000),
        _ => Latencies::h200(),
    };
    let gpu = SimDriver::new(config);
    runner::run(program, &gpu).unwrap_or_else(|error| panic!("{error}"))
}

fn compare(program: &Program, run: &Run, model: &Model) -> Result<(), String> {
    if let Some(step) = model.refused_without_reason {
        return Err(format!("step {step} was refused without a reason"));
    }
    for hazard in &run.hazards {
        if !model.conflicts.iter().any(|conflict| explains(conflict, hazard, run, model)) {
            return Err(format!("a false hazard: {hazard}"));
        }
    }
    if model.conflicts.is_empty() {
        return contents(program, run, model);
    }
    let must = model.conflicts.iter().filter(|conflict| must_show(conflict, program)).collect::<Vec<_>>();
    if let Some(missed) = must.first()
        && run.hazards.is_empty()
    {
        return Err(format!("not detected: {missed:?}"));
    }
    let is_weak = program
        .steps
        .iter()
        .any(|step| matches!(step, Step::Suballocate(..) | Step::FreeSuballocation(_) | Step::PoolFree { .. }));
    if !is_weak {
        for conflict in must {
            let shown = |at| run.hazards.iter().any(|hazard| covers(hazard, run, conflict.span.arena, at));
            if let Some(at) = (conflict.span.start..conflict.span.start + conflict.span.len).find(|&at| !shown(at)) {
                return Err(format!("no entry covers byte {at} of {conflict:?}"));
            }
        }
    }
    Ok(())
}

/// A conflict with an allocator's report is detected for certain only if no later report replaced it.
fn must_show(conflict: &Conflict, program: &Program) -> bool {
    let reported = conflict.second.0.max(conflict.first.0);
    match conflict.kind {
        ConflictKind::Order | ConflictKind::Free => true,
        ConflictKind::Freed | ConflictKind::Reused => {
            let replaces = |step: &Step| match step {
                Step::Suballocate(span, _) | Step::FreeSuballocation(span) => span.overlaps(&conflict.span),
                _ => false,
            };
            !program.steps[reported + 1..].iter().any(replaces)
        }
    }
}

fn covers(hazard: &Hazard, run: &Run, arena: usize, at: u64) -> bool {
    let span = run.span_of(hazard);
    span.is_some_and(|span| span.arena == arena && (span.start..span.start + span.len).contains(&at))
}

/// Whether an entry of the log is about a conflict, over its bytes.
fn explains(conflict: &Conflict, hazard: &Hazard, run: &Run, model: &Model) -> bool {
    let named: Option<Vec<Name>> = hazard.operations.iter().map(|operation| name(operation, run)).collect();
    let Some(named) = named else { return false };
    let Some(span) = run.span_of(hazard) else { return false };
    if span.arena != conflict.span.arena {
        return false;
    }
    let both = match named[..] {
        [a, b] => (a, b) == (conflict.first, conflict.second) || (b, a) == (conflict.first, conflict.second),
        [a] => a == conflict.first || a == conflict.second,
        _ => false,
    };
    let is_kind = match hazard.kind {
        HazardKind::Race | HazardKind::HostRace => named.len() == 2 && conflict.kind == ConflictKind::Order,
        HazardKind::UseAfterFree if named.len() == 2 => conflict.kind == ConflictKind::Free,
        HazardKind::UseAfterFree => {
            named[0].1.is_none() && matches!(conflict.kind, ConflictKind::Free | ConflictKind::Freed)
        }
        HazardKind::GraphUsesFreedMemory => {
            named[0].1.is_some() && matches!(conflict.kind, ConflictKind::Free | ConflictKind::Freed)
        }
        HazardKind::ReusedInFlight => conflict.kind == ConflictKind::Reused,
        _ => false,
    };
    if !both || !is_kind {
        return false;
    }
    if named.len() == 1 {
        return span.overlaps(&conflict.span);
    }
    // One entry may cover several conflicts of the same two: its first and last bytes must be bytes of some.
    let same = |other: &&Conflict| {
        (other.first, other.second) == (conflict.first, conflict.second) && other.span.arena == span.arena
    };
    let within = |at: u64| {
        model
            .conflicts
            .iter()
            .filter(same)
            .any(|other| (other.span.start..other.span.start + other.span.len).contains(&at))
    };
    within(span.start) && within(span.start + span.len - 1)
}

/// The operation that an entry names: by the number of its call, and of its node in a graph.
fn name(operation: &str, run: &Run) -> Option<Name> {
    let after = |key: &str| -> Option<usize> {
        let rest = &operation[operation.find(key)? + key.len()..];
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let step = run.step_of(after("#")?)?;
    Some((step, after("(node ").map(|node| node as u32)))
}

fn contents(program: &Program, run: &Run, model: &Model) -> Result<(), String> {
    if run.reads != model.reads {
        return Err(format!("the host read {:?}, not {:?}", run.reads, model.reads));
    }
    for arena in 0..program.arenas {
        if let Some(bytes) = &run.contents[arena]
            && bytes != model.contents(arena)
        {
            return Err(format!("arena {arena} contains {bytes:?}, not {:?}", model.contents(arena)));
        }
    }
    Ok(())
}

#[test]
fn the_same_seed_gives_the_same_log() {
    for seed in 0..scaled(50) {
        let program = Program::generate(seed);
        let log = |run: Run| run.hazards.iter().map(|hazard| (hazard.kind, hazard.why.clone())).collect::<Vec<_>>();
        assert_eq!(log(run(&program, seed)), log(run(&program, seed)), "{program}");
    }
}
