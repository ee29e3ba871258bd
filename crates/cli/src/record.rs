//! `warpool record`: runs a command with Warpool's recorder on and with the shared object that counts whose device
//! memory is whose, and shows afterwards what was counted and where recordings are. Nothing is counted here.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::{env, fs, io};

use serde_json::json;
use warpool_report::account::{Injected, InjectedDevice, object, text};

use crate::output::{self, CommandError, Output, Result, Verdict};

/// The shared object, and the variable that names another.
const LIBRARY: &str = "libwarpool_inject.so";
const VARIABLE: &str = "WARPOOL_INJECT_LIBRARY";

/// Run a command, record its GPU memory, and show whose it was
///
/// The command runs with a shared object that is loaded before CUDA's driver (LD_PRELOAD, Linux). It counts what each
/// library takes from the driver, and what contexts, modules, kernels and graphs take; when the command has ended, the
/// account of the moment when most was in use is shown, on stderr. A program that calls warpool.torch.enable() also
/// keeps its last events, and writes them when memory runs out (docs/recording.md).
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: that of COMMAND, 128 and the number of the signal that ended it, or 2 if it cannot be \
    started like this.\n\n\
    Examples:\n  \
    warpool record -- python train.py\n  \
    warpool record --json -- torchrun --nproc-per-node 8 train.py"
)]
pub struct Args {
    /// The command, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
    /// The folder of recordings [default: WARPOOL_RECORD_DIR, or warpool-records]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The shared object [default: WARPOOL_INJECT_LIBRARY, or the one beside this command or in its wheel]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// One JSON object on stdout; what the command prints goes to stderr
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, quiet: bool, output: &mut Output) -> Result<Verdict> {
    if !cfg!(target_os = "linux") {
        return usage("warpool record needs Linux: elsewhere nothing can be loaded before CUDA's driver".to_owned());
    }
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let library = library(args.library.as_deref())?;
    check_program(program)?;
    let folder = records(args.dir.as_deref())?;
    let counted = Scratch::new()?;
    let before = recordings(&folder);
    let mut command = Command::new(program);
    command.args(arguments).env("LD_PRELOAD", preload(&library)).env("WARPOOL_ACCOUNT_DIR", &counted.0);
    command.env("WARPOOL_RECORD_DIR", &folder).env("WARPOOL_CONF", conf(&env::var("WARPOOL_CONF").unwrap_or_default()));
    if args.json {
        command.stdout(stderr()?);
    }
    // An interrupt is the command's; this waits for it.
    let _ = ctrlc::set_handler(|| ());
    let started = command.spawn();
    let status = started
        .and_then(|mut child| child.wait())
        .map_err(|error| CommandError::Usage(format!("{} cannot be started: {error}", Path::new(program).display())))?;
    let accounts = accounts(&counted.0);
    let written: Vec<PathBuf> = recordings(&folder).difference(&before).cloned().collect();
    let code = exit_code(status);
    let processes = accounts
        .iter()
        .map(|(pid, devices)| json!({ "pid": pid, "devices": devices.iter().map(object).collect::<Vec<_>>() }));
    output.object(&json!({
        "exit_status": code,
        "library": library.display().to_string(),
        "processes": processes.collect::<Vec<_>>(),
        "recordings": written.iter().map(|path| path.display().to_string()).collect::<Vec<_>>(),
    }))?;
    if !args.json {
        show(&accounts, &written, &library, quiet);
    }
    Ok(Verdict::Status(code))
}

fn usage<T>(message: String) -> Result<T> {
    Err(CommandError::Usage(message))
}

/// What was counted in each process that used a device.
type Accounts = Vec<(u64, Vec<warpool::memory::report::DeviceAccount>)>;

fn show(accounts: &Accounts, written: &[PathBuf], library: &Path, quiet: bool) {
    for (pid, devices) in accounts {
        output::message(format_args!("warpool record: process {pid}, when most was in use"));
        devices.iter().for_each(|device| output::message(text(device).trim_end()));
    }
    if accounts.is_empty() {
        output::message(
            "warpool record: no process of the command used CUDA, or none found its driver as a shared library",
        );
    }
    for path in written {
        output::message(format_args!("Recording: {}", path.display()));
    }
    if !quiet {
        if written.is_empty() {
            let why = "memory did not run out, or the program does not call warpool.torch.enable()";
            output::message(format_args!("No recording was written: {why}."));
        }
        output::message(format_args!("Counted by {}.", library.display()));
    }
}

/// Where the shared object is.
fn library(named: Option<&Path>) -> Result<PathBuf> {
    let variable = env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    let found = match named.map(Path::to_owned).or(variable) {
        Some(named) if named.is_file() => named,
        Some(named) => return usage(format!("{} is not a file", named.display())),
        None => {
            let places = places();
            let Some(found) = places.iter().find(|place| place.is_file()) else {
                let looked: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
                return usage(format!(
                    "{LIBRARY} is missing (looked for {}): install the wheel, or build it with `cargo build --release \
                     -p warpool-inject` and name it with --library",
                    looked.join(", ")
                ));
            };
            found.clone()
        }
    };
    let found = found.canonicalize().unwrap_or(found);
    // The loader separates names by both.
    if found.as_os_str().to_string_lossy().contains([' ', ':']) {
        return usage(format!("{} cannot be preloaded: its path has a space or a colon", found.display()));
    }
    Ok(found)
}

/// Where it may be: beside this command, or in the Python package of the wheel that this command is from.
fn places() -> Vec<PathBuf> {
    let command = env::current_exe().and_then(fs::canonicalize).unwrap_or_default();
    let Some(folder) = command.parent() else { return Vec::new() };
    let mut places = vec![folder.join(LIBRARY)];
    for above in [folder.parent(), Some(folder)].into_iter().flatten() {
        places.push(above.join("warpool").join(LIBRARY));
        let pattern = format!("lib/python3*/site-packages/warpool/{LIBRARY}");
        let pattern = format!("{}/{pattern}", glob::Pattern::escape(&above.to_string_lossy()));
        places.extend(glob::glob(&pattern).into_iter().flatten().flatten());
    }
    places
}

/// The value of LD_PRELOAD: the shared object before others.
fn preload(library: &Path) -> OsString {
    let mut value = library.as_os_str().to_owned();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        value.push(":");
        value.push(others);
    }
    value
}

/// WARPOOL_CONF with the recorder on, unless it says something about that.
fn conf(before: &str) -> String {
    let before = before.trim().trim_end_matches(',');
    match before {
        "" => "record:oom".to_owned(),
        _ if before.split(',').any(|part| part.trim().starts_with("record:")) => before.to_owned(),
        _ => format!("{before},record:oom"),
    }
}

/// The folder of recordings, as the program will find it from wherever it goes.
fn records(named: Option<&Path>) -> Result<PathBuf> {
    let variable = env::var_os("WARPOOL_RECORD_DIR").filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = named.map(Path::to_owned).or(variable).unwrap_or_else(|| "warpool-records".into());
    Ok(std::path::absolute(folder)?)
}

fn recordings(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_recording = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("warpool-rank") && name.ends_with(".pickle")
    };
    entries.filter(is_recording).collect()
}

/// What the processes wrote; those that used no device wrote nothing.
fn accounts(folder: &Path) -> Accounts {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let texts = files.filter(|path| path.extension() == Some(OsStr::new("json"))).flat_map(fs::read_to_string);
    let read = texts.flat_map(|text| Injected::parse(&text)).filter(|counted| !counted.devices().is_empty());
    let mut accounts: Accounts = read
        .map(|counted| (counted.pid(), counted.devices().iter().map(InjectedDevice::account_at_most).collect()))
        .collect();
    accounts.sort_by_key(|account| account.0);
    accounts
}

/// An error if nothing can be loaded before the program: a static one has no loader.
fn check_program(program: &OsStr) -> Result<()> {
    let Some(path) = find(program) else { return Ok(()) };
    let Ok(content) = read_start(&path) else { return Ok(()) };
    match has_loader(&content) {
        Some(false) => usage(format!(
            "{} is statically linked: nothing can be loaded before it, so its memory cannot be recorded like this",
            path.display()
        )),
        _ => Ok(()),
    }
}

/// The file of a program, as the system finds it. If there is none, starting it fails.
fn find(program: &OsStr) -> Option<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 {
        return path.is_file().then(|| path.to_owned());
    }
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(path)).find(|path| path.is_file())
}

/// The first bytes of a file: more than the headers of a program.
fn read_start(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(fs::File::open(path)?, 64 << 10), &mut content)?;
    Ok(content)
}

/// Whether a program of 64 bits names a loader (`PT_INTERP`); `None` for another file, such as a script.
fn has_loader(file: &[u8]) -> Option<bool> {
    const INTERPRETER: [u8; 4] = 3u32.to_le_bytes();
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, bytes: usize| {
        let part = file.get(at..at + bytes)?;
        Some(part.iter().rev().fold(0usize, |number, &byte| number << 8 | usize::from(byte)))
    };
    let (first, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let header = |at: usize| file.get(first.checked_add(at.checked_mul(size)?)?..)?.get(..4);
    Some((0..count).any(|at| header(at) == Some(&INTERPRETER)))
}

/// The command's, as a shell reports it.
fn exit_code(status: ExitStatus) -> u8 {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return u8::try_from(128 + signal).unwrap_or(u8::MAX);
    }
    status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Stderr, for what the command prints.
fn stderr() -> Result<Stdio> {
    #[cfg(unix)]
    {
        use std::os::fd::AsFd as _;
        Ok(Stdio::from(io::stderr().as_fd().try_clone_to_owned()?))
    }
    #[cfg(not(unix))]
    Ok(Stdio::inherit())
}

/// An empty folder, until it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let folder = env::temp_dir().join(format!("warpool-record-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        Ok(Self(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recorder_is_on_unless_the_settings_say_otherwise() {
        assert_eq!(conf(""), "record:oom");
        assert_eq!(conf("backend:paged, "), "backend:paged,record:oom");
        assert_eq!(conf("record:off,backend:paged"), "record:off,backend:paged");
        assert_eq!(conf("record_above:0.9"), "record_above:0.9,record:oom");
    }

    #[test]
    fn a_program_names_its_loader_or_not() {
        assert_eq!(has_loader(b"#!/bin/sh"), None);
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64 + 2 * 56, 0);
        (file[32], file[54], file[56]) = (64, 56, 2);
        assert_eq!(has_loader(&file), Some(false));
        file[64 + 56] = 3;
        assert_eq!(has_loader(&file), Some(true));
        // Cut off, or with a position beyond all: no loader, and no panic.
        assert_eq!(has_loader(&file[..100]), Some(false));
        file[32..40].fill(0xff);
        assert_eq!(has_loader(&file), Some(false));
        assert_eq!(has_loader(&file[..20]), None);
    }
}
