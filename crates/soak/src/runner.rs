//! Runs campaigns in turn, watches for programs that do not end and for memory that grows, and stops at the first
//! violation.

use std::ops::ControlFlow;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::campaign::Campaign;
use crate::caught::{Caught, caught};
use crate::context::Context;
use crate::counts::{Counts, Kinds};
use crate::options::{Length, Options};
use crate::resident::{self, FlatMemory, Resident};
use crate::rng::program_seed;
use crate::steps::Steps;

/// How long a campaign runs before the next one has its turn.
const TURN: Duration = Duration::from_millis(500);
/// A program that takes longer hangs. All take far less than a second, except in debug builds.
const STALLED: Duration = Duration::from_secs(180);
/// The longest warm-up; a quarter of the run, if that is shorter.
const WARM_UP: Duration = Duration::from_secs(300);
/// The least number of turns whose lowest reading of resident memory counts; with more campaigns, one turn of each.
const WINDOW_MIN: usize = 4;

/// The state of a run after a program.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The campaign of the last program.
    pub campaign: Campaign,
    /// The counts of all programs so far.
    pub counts: Counts,
    /// Resident memory after the last turn; 0 if unknown.
    pub bytes_resident: u64,
    /// The time so far.
    pub elapsed: Duration,
}

/// The result of one campaign.
#[derive(Clone, Debug)]
pub struct CampaignReport {
    /// The campaign.
    pub campaign: Campaign,
    /// The counts of its programs.
    pub counts: Counts,
    /// What else they did.
    pub kinds: Kinds,
    /// The time that they took.
    pub elapsed: Duration,
}

/// A program that found a defect.
#[derive(Clone, Debug)]
pub struct Violation {
    /// Its campaign.
    pub campaign: Campaign,
    /// The seed of the run.
    pub seed: u64,
    /// Its number: with the seed and the campaign it gives the program.
    pub program: u64,
    /// What is wrong.
    pub message: String,
    /// The last steps of the program.
    pub steps: Vec<String>,
    /// Whether a second run of the program found the same; `None` if it was not run again.
    pub reproduced: Option<bool>,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// By campaign.
    pub campaigns: Vec<CampaignReport>,
    /// The first violation; the run ended with it.
    pub violation: Option<Violation>,
    /// The memory of this process.
    pub resident: Resident,
    /// The time in all.
    pub elapsed: Duration,
}

impl Report {
    /// The counts of all campaigns.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.campaigns.iter().fold(Counts::default(), |mut all, campaign| {
            all += campaign.counts;
            all
        })
    }
}

/// The program that runs now: the index of its campaign, and its number.
type Running = Arc<Mutex<(usize, u64)>>;

/// The message of the running thread after each program.
struct Ended {
    turn: usize,
    program: u64,
    counts: Counts,
    kinds: Kinds,
    elapsed: Duration,
    failed: Option<String>,
    /// Resident memory, now and at most, if this was the last program of a turn. Measured before the next one begins.
    resident: Option<(u64, u64)>,
}

/// Runs campaigns. Calls `on_progress` after every program, and ends the run if that breaks.
///
/// # Panics
/// If `campaigns` is empty.
pub fn run(options: &Options, on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>) -> Report {
    assert!(!options.campaigns.is_empty(), "a run needs a campaign");
    // If one program is run alone, all its steps are kept.
    let steps = Steps::new(if matches!(options.length, Length::One(_)) { 100_000 } else { 60 });
    let (begin, running) = (Instant::now(), Running::default());
    let (sender, receiver) = mpsc::channel();
    let programs = {
        let (options, steps, running) = (options.clone(), steps.clone(), running.clone());
        std::thread::spawn(move || run_programs(&options, &steps, &running, begin, &sender))
    };
    let mut run = Run::new(options, begin);
    loop {
        match receiver.recv_timeout(STALLED) {
            Ok(ended) => {
                if !run.add(ended, &steps, on_progress) {
                    break;
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                // The thread cannot be ended; it stays until the process ends.
                let message = format!("the program did not end within {} s: a deadlock or a loop", STALLED.as_secs());
                run.stalled(message, &running, &steps);
                return run.finish();
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    drop(receiver);
    // It only panics if this crate is wrong: programs are caught.
    programs.join().expect("the thread that runs the programs");
    run.finish()
}

/// Runs programs until the length is reached, a program fails, or the receiver is gone.
fn run_programs(options: &Options, steps: &Steps, running: &Running, begin: Instant, sender: &mpsc::Sender<Ended>) {
    let first = if let Length::One(program) = options.length { program } else { 0 };
    let mut next = vec![first; options.campaigns.len()];
    loop {
        for (turn, &campaign) in options.campaigns.iter().enumerate() {
            let turn_begin = Instant::now();
            loop {
                let program = next[turn];
                next[turn] += 1;
                *running.lock().unwrap_or_else(PoisonError::into_inner) = (turn, program);
                let program_begin = Instant::now();
                let (counts, kinds, failed) = run_program(options, campaign, program, steps);
                let elapsed = program_begin.elapsed();
                let has_failed = failed.is_some();
                let is_last = !matches!(options.length, Length::Time(_)) || turn_begin.elapsed() >= TURN;
                let resident = is_last.then(|| resident::in_use().unwrap_or_default());
                if sender.send(Ended { turn, program, counts, kinds, elapsed, failed, resident }).is_err() || has_failed
                {
                    return;
                }
                let Length::Time(length) = options.length else { break };
                if begin.elapsed() >= length {
                    return;
                }
                if is_last {
                    break;
                }
            }
        }
        let is_done = match options.length {
            Length::Time(_) => false,
            Length::Programs(count) => next[0] >= count,
            Length::One(_) => true,
        };
        if is_done {
            return;
        }
    }
}

/// Runs one program. Returns what it did, and what is wrong.
fn run_program(options: &Options, campaign: Campaign, program: u64, steps: &Steps) -> (Counts, Kinds, Option<String>) {
    steps.clear();
    let seed = program_seed(options.seed, campaign as u64, program);
    let mut context = Context::new(seed, steps.clone(), &options.skip, options.broken);
    let failed = match caught(|| campaign.run(&mut context)) {
        Ok(()) => None,
        Err(Caught::Failed(message)) => Some(message),
        Err(Caught::Injected) => Some("a panic of a callback reached the end of the program".to_owned()),
    };
    context.counts.programs += u64::from(failed.is_none());
    (context.counts, context.kinds, failed)
}

/// The results received so far.
struct Run<'a> {
    options: &'a Options,
    begin: Instant,
    campaigns: Vec<CampaignReport>,
    violation: Option<Violation>,
    memory: FlatMemory,
    checks_memory: bool,
}

impl<'a> Run<'a> {
    fn new(options: &'a Options, begin: Instant) -> Self {
        let campaigns = options
            .campaigns
            .iter()
            .map(|&campaign| CampaignReport {
                campaign,
                counts: Counts::default(),
                kinds: Kinds::new(),
                elapsed: Duration::ZERO,
            })
            .collect();
        let (warm_up, checks_memory) = match options.length {
            Length::Time(length) => (WARM_UP.min(length / 4), true),
            _ => (Duration::ZERO, false),
        };
        let window = options.campaigns.len().max(WINDOW_MIN);
        let memory = FlatMemory::new(resident::in_use().unwrap_or_default(), warm_up, window);
        Self { options, begin, campaigns, violation: None, memory, checks_memory }
    }

    /// Adds a program that ended. Returns whether the run goes on.
    fn add(&mut self, ended: Ended, steps: &Steps, on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>) -> bool {
        let Ended { turn, program, counts, kinds, elapsed, failed, resident } = ended;
        let report = &mut self.campaigns[turn];
        let campaign = report.campaign;
        report.counts += counts;
        kinds.into_iter().for_each(|(kind, times)| *report.kinds.entry(kind).or_default() += times);
        report.elapsed += elapsed;
        if let Some(message) = failed {
            let shown = steps.to_vec();
            let again = campaign.is_deterministic().then(|| run_program(self.options, campaign, program, steps).2);
            let reproduced = again.map(|again| again.as_ref() == Some(&message));
            self.violation =
                Some(Violation { campaign, seed: self.options.seed, program, message, steps: shown, reproduced });
            return false;
        }
        let elapsed = self.begin.elapsed();
        let flat = resident.map_or(Ok(()), |reading| self.memory.add(reading, elapsed));
        let mut counts = Counts::default();
        self.campaigns.iter().for_each(|report| counts += report.counts);
        let flow = on_progress(&Progress { campaign, counts, bytes_resident: self.memory.resident().end, elapsed });
        if let Err(message) = flat
            && self.checks_memory
        {
            let steps = Vec::new();
            self.violation =
                Some(Violation { campaign, seed: self.options.seed, program, message, steps, reproduced: None });
            return false;
        }
        flow.is_continue()
    }

    fn stalled(&mut self, message: String, running: &Running, steps: &Steps) {
        let (turn, program) = *running.lock().unwrap_or_else(PoisonError::into_inner);
        let (campaign, steps) = (self.campaigns[turn].campaign, steps.to_vec());
        self.violation =
            Some(Violation { campaign, seed: self.options.seed, program, message, steps, reproduced: None });
    }

    fn finish(self) -> Report {
        Report {
            campaigns: self.campaigns,
            violation: self.violation,
            resident: self.memory.resident(),
            elapsed: self.begin.elapsed(),
        }
    }
}
