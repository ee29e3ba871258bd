//! Random programs on the simulated device, judged by a naive account of their order that shares no code with it.
//!
//! Half of the programs are correct by construction, the others leave waits out. For each, on machines with several
//! seeds:
//! - no clash by the judge's account: the log is empty, and all that was read and all that memory holds in the end is
//!   exactly as it must be;
//! - else: the log is not empty, and every entry is one of the judge's clashes, over bytes of that clash.
//!
//! What the log may leave out. It remembers for each byte the last write and the reads since. A clash with something
//! older is not reported by itself, but then whatever took its place clashes with one of the two. So every byte that is
//! clashed over is in some entry. Two things weaken that to "some entry somewhere": work that hit freed memory stops
//! there, and notes of an allocator hide what follows from a clash with them. A clash with a note that a later note
//! replaced while the work was still queued may be missed altogether.
//!
//! `WARPOOL_SWARM_SEED=n` runs the one program of that seed, `WARPOOL_SWARM_COUNT=n` that many from the first on.

#[path = "swarm/effect.rs"]
mod effect;
#[path = "swarm/judge.rs"]
mod judge;
#[path = "swarm/listing.rs"]
mod listing;
#[path = "swarm/machine.rs"]
mod machine;
#[path = "swarm/program.rs"]
mod program;

use judge::{About, Judge, Name, Quarrel};
use machine::Run;
use program::{Dice, Program, Step};
use warpool_driver::sim::{Hazard, HazardKind, Latencies, SimConfig, SimDriver};

const PROGRAMS: u64 = 10_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
}

#[test]
fn programs_are_judged_alike() {
    let seeds = match number("WARPOOL_SWARM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("WARPOOL_SWARM_COUNT").unwrap_or(PROGRAMS),
    };
    let (mut right, mut wrong) = (0, 0);
    for seed in seeds.clone() {
        let program = Program::draw(seed);
        if check(&program) { right += 1 } else { wrong += 1 }
    }
    println!("{right} correct and {wrong} wrong programs");
    assert!(seeds.end - seeds.start < 1000 || (right > 100 && wrong > 100), "{right} correct, {wrong} wrong");
}

/// Shows the program if the device itself panics.
struct Alarm<'a>(&'a Program);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Runs a program on several machines. Says whether it was correct.
fn check(program: &Program) -> bool {
    let _alarm = Alarm(program);
    let mut correct = true;
    for luck in 0..2 {
        let mut dice = Dice(program.seed ^ (luck << 32) ^ 0x5eed);
        let run = run(program, dice.next());
        let judge = Judge::of(&program.steps, &run.outcomes);
        if let Err(complaint) = compare(program, &run, &judge) {
            let log: Vec<String> = run.hazards.iter().map(ToString::to_string).collect();
            panic!("{complaint}\nluck {luck}\nthe log: {log:#?}\nthe judge: {:#?}", judge.quarrels);
        }
        correct &= judge.quarrels.is_empty();
    }
    correct
}

fn run(program: &Program, seed: u64) -> Run {
    let mut dice = Dice(seed);
    let mut config = SimConfig::default().with_seed(seed);
    config.queue_depth = [1, 2, 5, 1024][dice.roll(4)];
    config.latencies = match dice.roll(3) {
        0 => Latencies::flat(0),
        1 => Latencies::flat(2_000),
        _ => Latencies::h200(),
    };
    let gpu = SimDriver::new(config);
    machine::run(program, &gpu).unwrap_or_else(|error| panic!("{error}"))
}

fn compare(program: &Program, run: &Run, judge: &Judge) -> Result<(), String> {
    if let Some(step) = judge.wrongly_refused {
        return Err(format!("step {step} was refused for no reason"));
    }
    for hazard in &run.hazards {
        if !judge.quarrels.iter().any(|quarrel| explains(quarrel, hazard, run, judge)) {
            return Err(format!("a false accusation: {hazard}"));
        }
    }
    if judge.quarrels.is_empty() {
        return contents(program, run, judge);
    }
    let must = judge.quarrels.iter().filter(|quarrel| must_show(quarrel, program)).collect::<Vec<_>>();
    if let Some(missed) = must.first()
        && run.hazards.is_empty()
    {
        return Err(format!("nothing was noticed of {missed:?}"));
    }
    let weak =
        program.steps.iter().any(|step| matches!(step, Step::HandOut(..) | Step::Return(_) | Step::PoolFree { .. }));
    if !weak {
        for quarrel in must {
            let shown = |at| run.hazards.iter().any(|hazard| covers(hazard, run, quarrel.span.arena, at));
            if let Some(at) = (quarrel.span.start..quarrel.span.start + quarrel.span.len).find(|&at| !shown(at)) {
                return Err(format!("no entry covers byte {at} of {quarrel:?}"));
            }
        }
    }
    Ok(())
}

/// A clash with a note shows for certain only if no later note took its place.
fn must_show(quarrel: &Quarrel, program: &Program) -> bool {
    let noted = quarrel.second.0.max(quarrel.first.0);
    match quarrel.about {
        About::Order | About::Free => true,
        About::Returned | About::HandedOut => !program.steps[noted + 1..]
            .iter()
            .any(|step| matches!(step, Step::HandOut(span, _) | Step::Return(span) if span.overlaps(&quarrel.span))),
    }
}

fn covers(hazard: &Hazard, run: &Run, arena: usize, at: u64) -> bool {
    let span = run.span_of(hazard);
    span.is_some_and(|span| span.arena == arena && (span.start..span.start + span.len).contains(&at))
}

/// Whether a clash is what an entry of the log says, over its bytes.
fn explains(quarrel: &Quarrel, hazard: &Hazard, run: &Run, judge: &Judge) -> bool {
    let named: Option<Vec<Name>> = hazard.operations.iter().map(|operation| name(operation, run)).collect();
    let Some(named) = named else { return false };
    let Some(span) = run.span_of(hazard) else { return false };
    if span.arena != quarrel.span.arena {
        return false;
    }
    let both = match named[..] {
        [a, b] => (a, b) == (quarrel.first, quarrel.second) || (b, a) == (quarrel.first, quarrel.second),
        [a] => a == quarrel.first || a == quarrel.second,
        _ => false,
    };
    let about = match hazard.kind {
        HazardKind::Race | HazardKind::HostRace => named.len() == 2 && quarrel.about == About::Order,
        HazardKind::UseAfterFree if named.len() == 2 => quarrel.about == About::Free,
        HazardKind::UseAfterFree => named[0].1.is_none() && matches!(quarrel.about, About::Free | About::Returned),
        HazardKind::GraphUsesFreedMemory => {
            named[0].1.is_some() && matches!(quarrel.about, About::Free | About::Returned)
        }
        HazardKind::ReusedInFlight => quarrel.about == About::HandedOut,
        _ => false,
    };
    if !both || !about {
        return false;
    }
    if named.len() == 1 {
        return span.overlaps(&quarrel.span);
    }
    // One entry may cover several clashes of the same two: its ends must be ends of some, or lie in them.
    let same = |other: &&Quarrel| {
        (other.first, other.second) == (quarrel.first, quarrel.second) && other.span.arena == span.arena
    };
    let within = |at: u64| {
        judge
            .quarrels
            .iter()
            .filter(same)
            .any(|other| (other.span.start..other.span.start + other.span.len).contains(&at))
    };
    within(span.start) && within(span.start + span.len - 1)
}

/// Which operation an entry names: by the number of its call, and of its node if it is of a graph.
fn name(operation: &str, run: &Run) -> Option<Name> {
    let after = |key: &str| -> Option<usize> {
        let rest = &operation[operation.find(key)? + key.len()..];
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let step = run.step_of(after("#")?)?;
    Some((step, after("(node ").map(|node| node as u32)))
}

fn contents(program: &Program, run: &Run, judge: &Judge) -> Result<(), String> {
    if run.reads != judge.reads {
        return Err(format!("the host read {:?}, not {:?}", run.reads, judge.reads));
    }
    for arena in 0..program.arenas {
        if let Some(bytes) = &run.contents[arena]
            && bytes != judge.contents(arena)
        {
            return Err(format!("arena {arena} holds {bytes:?}, not {:?}", judge.contents(arena)));
        }
    }
    Ok(())
}

#[test]
fn one_seed_gives_one_log() {
    for seed in 0..200 {
        let program = Program::draw(seed);
        let log = |run: Run| run.hazards.iter().map(|hazard| (hazard.kind, hazard.why.clone())).collect::<Vec<_>>();
        assert_eq!(log(run(&program, seed)), log(run(&program, seed)), "{program}");
    }
}
