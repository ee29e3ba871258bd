//! Recordings that a program writes about itself: when memory runs out, on a signal, by a call, at the end, or when
//! much of a device is in use. A recording is a snapshot with the last events and their call stacks, and beside it what
//! `explain` says about it.
//!
//! The events are the allocator's own history (`warpool::memory::report`), which is on from the start. If the program
//! records a history itself (`torch.cuda.memory._record_memory_history`), that one is in effect until it is stopped.
//!
//! The rules: nothing here runs with a lock of an allocator. Only a call of the program waits for a recording that is
//! being written; a request that runs out of memory does not. A failure is a sentence, and changes nothing else.

mod answer;
mod files;
mod python;
mod watcher;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use warpool::memory::report::{HistoryOptions, Snapshot, StackLevel};
use warpool::memory::settings::{RecordMode, RecordSettings};
use warpool::memory::{DeviceAllocator, OomReport};
use warpool_driver::DeviceId;
use warpool_trace::bytes_text::text;

use crate::error::{Error, Result};
use crate::snapshot;
use answer::Answer;
use python::PythonStacks;
pub use python::{PythonInterface, PythonObject};
use watcher::Watcher;

/// The folder of recordings if none is chosen.
const FOLDER: &str = "warpool-records";

/// Why a recording is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    OutOfMemory,
    Call,
    Signal,
    Above,
    Exit,
}

impl Reason {
    /// In the names of files.
    const fn name(self) -> &'static str {
        match self {
            Self::OutOfMemory => "oom",
            Self::Call => "call",
            Self::Signal => "signal",
            Self::Above => "above",
            Self::Exit => "exit",
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::OutOfMemory => "out of memory",
            Self::Call => "by a call",
            Self::Signal => "by a signal",
            Self::Above => "above the share of record_above",
            Self::Exit => "at the end",
        }
    }
}

/// What is recorded.
pub(crate) trait Program: Sync {
    /// Its recorder.
    fn recorder(&self) -> &Recorder;
    /// Its allocator.
    fn allocator(&self) -> &dyn DeviceAllocator;
    /// The settings in effect.
    fn settings(&self) -> RecordSettings;
    /// The state of every device and the history, with call stacks.
    fn snapshot(&self) -> Result<Snapshot>;
    /// Whether it records a history itself.
    fn has_own_history(&self) -> bool;
    /// What to add to the driver's clock.
    fn epoch_us(&self) -> i64;
    /// The devices that were used so far.
    fn devices_in_use(&self) -> Vec<DeviceId>;
}

/// Finds the program of this process; `None` in a forked child.
pub(crate) type FindProgram = fn() -> Option<&'static dyn Program>;

/// The recorder of a program.
#[derive(Debug)]
pub(crate) struct Recorder {
    on: AtomicBool,
    pub(crate) python: Arc<PythonStacks>,
    place: Mutex<Place>,
    /// The last recording; held while one is written.
    last: Mutex<Option<Last>>,
    /// How many recordings this process has written to the folder.
    numbers: AtomicU32,
    watcher: Watcher,
}

/// Where recordings go, and whose they are.
#[derive(Clone, Debug, Default)]
struct Place {
    folder: Option<PathBuf>,
    rank: u64,
}

#[derive(Debug)]
struct Last {
    at: Instant,
    /// `None` if it could not be written.
    path: Option<PathBuf>,
}

/// A recording that was made.
struct Made {
    path: std::result::Result<PathBuf, String>,
    answers: std::result::Result<Vec<Answer>, String>,
}

impl Recorder {
    /// A recorder that is off. `find` finds the program, for a thread that writes recordings of it.
    pub(crate) fn new(find: FindProgram) -> Self {
        Self {
            on: AtomicBool::new(false),
            python: Arc::default(),
            place: Mutex::default(),
            last: Mutex::default(),
            numbers: AtomicU32::new(0),
            watcher: Watcher::new(find),
        }
    }

    /// Whether events are kept for recordings.
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Recordings go to this folder from here on.
    pub(crate) fn set_folder(&self, folder: &Path) -> std::io::Result<()> {
        // The program may change the current folder later.
        self.place().folder = Some(std::path::absolute(folder)?);
        Ok(())
    }

    /// The rank of the process in its job.
    pub(crate) fn set_rank(&self, rank: u64) {
        self.place().rank = rank;
    }

    /// Does what the settings say from here on; `before` are the previous ones.
    pub(crate) fn apply(
        &self,
        program: &dyn Program,
        settings: &RecordSettings,
        before: &RecordSettings,
    ) -> Result<()> {
        let on = settings.mode == RecordMode::Oom;
        if on && self.place().folder.is_none() {
            self.set_folder(Path::new(FOLDER)).map_err(|source| Error::RecordFolder { source })?;
        }
        let was_on = self.on.swap(on, Ordering::Relaxed);
        if (was_on != on || (on && settings.events_max != before.events_max)) && !program.has_own_history() {
            self.set_history(program, on.then_some(settings))?;
        }
        self.watcher.apply(program, on.then_some(settings)).map_err(|source| Error::RecordWatcher { source })
    }

    /// The program stopped a history of its own: the recorder's is in effect again, if it is on.
    pub(crate) fn resume(&self, program: &dyn Program) -> Result<()> {
        if self.is_on() { self.set_history(program, Some(&program.settings())) } else { Ok(()) }
    }

    /// The program collects no call stacks of its own any more.
    pub(crate) fn resume_stacks(&self, program: &dyn Program) {
        if self.is_on() {
            let stacks = Arc::clone(&self.python);
            program.allocator().observers().set_stack_hook(Some(Arc::new(move || stacks.collect())));
        }
    }

    fn set_history(&self, program: &dyn Program, settings: Option<&RecordSettings>) -> Result<()> {
        let options = settings.map(|settings| HistoryOptions {
            entries_max: usize::try_from(settings.events_max).unwrap_or(usize::MAX),
            // Frees have the stack of the allocation, which costs nothing.
            stacks: StackLevel::Alloc,
            skip: Vec::new(),
            epoch_us: program.epoch_us(),
        });
        if options.is_none() {
            program.allocator().observers().set_stack_hook(None);
        }
        self.resume_stacks(program);
        Ok(program.allocator().record_history(options)?)
    }

    /// Writes a recording because the program asked for it: to `path`, or to the folder. Returns where it is.
    pub(crate) fn record_now(&self, program: &dyn Program, path: Option<&Path>) -> Result<PathBuf> {
        if !self.is_on() {
            return Err(Error::NotRecording);
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let made = self.make(program, Reason::Call, path, None);
        *last = Some(Last { at: Instant::now(), path: made.path.clone().ok() });
        drop(last);
        made.path.map_err(|why| Error::Record { why })
    }

    /// Writes a recording at the end of the program, if the settings say so.
    pub(crate) fn record_at_exit(&self, program: &dyn Program) -> Result<()> {
        if self.is_on() && program.settings().at_exit {
            let made = self.make(program, Reason::Exit, None, None);
            made.path.map_err(|why| Error::Record { why })?;
        }
        Ok(())
    }

    /// Writes a recording without being asked, unless one was written a moment ago. The error is a sentence.
    pub(crate) fn record_by_itself(
        &self,
        program: &dyn Program,
        reason: Reason,
    ) -> std::result::Result<Option<PathBuf>, String> {
        if !self.is_on() {
            return Ok(None);
        }
        let last = match reason {
            // Whoever sends a signal wants a recording. The thread that writes it has nothing else to do.
            Reason::Signal => Some(self.last.lock().unwrap_or_else(PoisonError::into_inner)),
            _ => self.try_last(),
        };
        let Some(mut last) = last else { return Ok(None) };
        let interval = Duration::from_secs(program.settings().interval_s);
        if reason != Reason::Signal && last.as_ref().is_some_and(|last| last.at.elapsed() < interval) {
            return Ok(None);
        }
        let made = self.make(program, reason, None, None);
        *last = Some(Last { at: Instant::now(), path: made.path.clone().ok() });
        made.path.map(Some)
    }

    /// A request of the program ran out of memory: writes a recording, unless one was written a moment ago. Returns
    /// what to add to the text of the exception.
    pub(crate) fn out_of_memory(&self, program: &dyn Program, error: &Error) -> String {
        let Some(mut last) = self.try_last() else {
            return " Warpool is writing a recording at this moment, so this is not recorded.".to_owned();
        };
        let interval = program.settings().interval_s;
        if let Some(Last { at, path }) = &*last
            && at.elapsed() < Duration::from_secs(interval)
        {
            let ago = at.elapsed().as_secs();
            return match path {
                Some(path) => format!(
                    " Not recorded: Warpool's last recording, of {ago} s ago, is {} (record_interval_s:{interval}).",
                    path.display()
                ),
                None => format!(" Not recorded: the last attempt, {ago} s ago, failed (record_interval_s:{interval})."),
            };
        }
        let report = match error {
            Error::Warpool(warpool::Error::OutOfMemory(report)) => Some(&**report),
            _ => None,
        };
        let made = self.make(program, Reason::OutOfMemory, None, report);
        *last = Some(Last { at: Instant::now(), path: made.path.clone().ok() });
        drop(last);
        lines(report, &made)
    }

    /// Writes a snapshot and what `explain` says about it.
    fn make(&self, program: &dyn Program, reason: Reason, path: Option<&Path>, report: Option<&OomReport>) -> Made {
        let settings = program.settings();
        let mut snapshot = match program.snapshot() {
            Ok(snapshot) => snapshot,
            Err(error) => {
                let why = format!("There is no recording: {error}.");
                return Made { path: Err(why.clone()), answers: Err(why) };
            }
        };
        let Place { folder, rank } = self.place().clone();
        let reserved = match path {
            Some(path) => Ok(path.to_owned()),
            None => {
                let folder = folder.unwrap_or_else(|| FOLDER.into());
                files::reserve(&folder, rank, reason.name(), settings.files_max, &self.numbers)
                    .map_err(|error| format!("No recording can be written to {}: {error}.", folder.display()))
            }
        };
        let written =
            reserved.and_then(|to| match snapshot::write_at_most(&mut snapshot, &to, settings.file_bytes_max) {
                Ok(()) => Ok(to),
                Err(error) => {
                    if path.is_none() {
                        files::give_up(&to);
                    }
                    Err(format!("No recording is written: {error}."))
                }
            });
        let snapshot = Arc::new(snapshot);
        let capacity = report.filter(|_| snapshot.traces.len() == 1).map(|report| report.bytes_total);
        let answers = answer::answers(&snapshot, capacity);
        let written = written.and_then(|to| {
            let text = text_of(report, reason, &answers);
            let beside = files::text_beside(&to);
            match fs::write(&beside, text) {
                Ok(()) => Ok(to),
                Err(error) => {
                    let _ = fs::remove_file(&beside);
                    Err(format!("The recording is {}, without its text: {error}.", to.display()))
                }
            }
        });
        Made { path: written, answers }
    }

    /// `None` while a recording is being written.
    fn try_last(&self) -> Option<MutexGuard<'_, Option<Last>>> {
        match self.last.try_lock() {
            Ok(last) => Some(last),
            Err(TryLockError::Poisoned(last)) => Some(last.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The lines that matter, each with what it is about in front, and the file.
fn lines(report: Option<&OomReport>, made: &Made) -> String {
    let device = report.map(|report| report.device.0);
    let of_device =
        |answers: &Vec<Answer>| answers.iter().position(|answer| device.is_none_or(|device| answer.device == device));
    let mut lines = String::new();
    let answer = match &made.answers {
        Ok(answers) => of_device(answers).map(|at| &answers[at]),
        Err(_) => None,
    };
    let why = match (&made.answers, answer) {
        (_, Some(answer)) => answer.headline.as_str(),
        (Err(sentence), _) => sentence,
        (Ok(_), None) => "not known",
    };
    let _ = write!(lines, "\nWhy: {why}");
    if let Some(report) = report {
        let _ = write!(
            lines,
            "\nAsked for: {} on GPU {}\nThen: {} allocated of {} reserved; {} free of {}",
            text(report.bytes_requested),
            report.device.0,
            text(report.bytes_allocated),
            text(report.bytes_reserved),
            text(report.bytes_free),
            text(report.bytes_total),
        );
    }
    if let Some(answer) = answer {
        let holder = answer.holder.as_deref().unwrap_or("nothing was allocated");
        let _ = write!(lines, "\nMost is held by: {holder}");
        let _ = write!(
            lines,
            "\nWhat to do: {}",
            answer.advice.as_deref().unwrap_or("nothing that was tried suffices; see the recording")
        );
    }
    let _ = match &made.path {
        Ok(path) => {
            write!(lines, "\nRecording: {} (explained in {})", path.display(), files::text_beside(path).display())
        }
        Err(sentence) => write!(lines, "\n{sentence}"),
    };
    lines
}

/// The content of the text beside a snapshot.
fn text_of(report: Option<&OomReport>, reason: Reason, answers: &std::result::Result<Vec<Answer>, String>) -> String {
    let mut text = format!("Recorded by Warpool {}: {}.\n\n", env!("CARGO_PKG_VERSION"), reason.words());
    if let Some(report) = report {
        let _ = write!(text, "{report}\n\n");
    }
    match answers {
        Ok(answers) => answers.iter().for_each(|answer| text += &format!("{}\n", answer.text)),
        Err(sentence) => text += &format!("{sentence}\n"),
    }
    text
}
