//! A thread that writes recordings on a signal, or when more than a share of a device is in use. It sleeps until one of
//! both may be so: a signal handler does no more than set a flag and write a byte, and so does an allocation that made
//! segments larger.
//!
//! The thread is started with the first setting that needs it, and never ends. It takes no lock while it waits.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use signal_hook::SigId;
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::low_level::{pipe, unregister};
use warpool::memory::report::{Action, ObserverId, Tracker};
use warpool::memory::settings::{RecordSettings, RecordSignal};

use super::{FindProgram, Program, Reason};

/// Between two looks at the devices' memory.
const PAUSE: Duration = Duration::from_millis(50);

/// What is watched.
#[derive(Debug)]
pub(super) struct Watcher {
    find: FindProgram,
    shared: Arc<Shared>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct Shared {
    /// A signal came.
    signalled: Arc<AtomicBool>,
    /// Segments became larger.
    grew: AtomicBool,
    /// The share as bits of a number; 0 is none.
    above: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// The end to which a byte is written; `None` before the start of the thread.
    wake: Option<UnixStream>,
    signal: Option<(RecordSignal, [SigId; 2])>,
    tracker: Option<ObserverId>,
}

impl Watcher {
    /// Watches nothing.
    pub(super) fn new(find: FindProgram) -> Self {
        Self { find, shared: Arc::default(), state: Mutex::default() }
    }

    /// Watches what the settings ask for, and nothing else.
    pub(super) fn apply(&self, program: &dyn Program, settings: Option<&RecordSettings>) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let above = settings.and_then(|settings| settings.above);
        self.shared.above.store(above.unwrap_or(0.0).to_bits(), Ordering::Relaxed);
        let signal = settings.and_then(|settings| settings.signal);
        if (above.is_some() || signal.is_some()) && state.wake.is_none() {
            state.wake = Some(self.start()?);
        }
        if signal != state.signal.map(|(signal, _)| signal) {
            if let Some((_, ids)) = state.signal.take() {
                for id in ids {
                    unregister(id);
                }
            }
            if let (Some(signal), Some(wake)) = (signal, &state.wake) {
                state.signal = Some((signal, self.register(signal, wake)?));
            }
        }
        let observers = program.allocator().observers();
        match (above, state.tracker) {
            (Some(_), None) => {
                let wake = state.wake.as_ref().expect("it was started").try_clone()?;
                let tracker = self.tracker(wake);
                state.tracker = Some(observers.attach_tracker(&[Action::SegmentAlloc, Action::SegmentMap], tracker));
            }
            (None, Some(tracker)) => {
                observers.detach(tracker);
                state.tracker = None;
            }
            _ => {}
        }
        Ok(())
    }

    /// The flag first: the byte has the thread look at it.
    fn register(&self, signal: RecordSignal, wake: &UnixStream) -> io::Result<[SigId; 2]> {
        let number = match signal {
            RecordSignal::Usr1 => SIGUSR1,
            RecordSignal::Usr2 => SIGUSR2,
        };
        let flag = signal_hook::flag::register(number, Arc::clone(&self.shared.signalled))?;
        let byte = pipe::register(number, wake.try_clone()?).inspect_err(|_| {
            unregister(flag);
        })?;
        Ok([flag, byte])
    }

    fn tracker(&self, wake: UnixStream) -> Tracker {
        let shared = Arc::clone(&self.shared);
        Arc::new(move |_, _| {
            if !shared.grew.swap(true, Ordering::Relaxed) {
                // Full, it wakes the thread too.
                let _ = (&wake).write(&[0]);
            }
        })
    }

    fn start(&self) -> io::Result<UnixStream> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        let (find, shared) = (self.find, Arc::clone(&self.shared));
        thread::Builder::new().name("warpool-record".to_owned()).spawn(move || watch(find, &shared, woken))?;
        Ok(wake)
    }
}

fn watch(find: FindProgram, shared: &Shared, mut woken: UnixStream) {
    // The devices that were above the share at the last look.
    let mut above: Vec<bool> = Vec::new();
    let mut bytes = [0; 64];
    while let Ok(1..) = woken.read(&mut bytes) {
        // A forked child has no such thread, but its handler writes to the same socket; the flags are its own.
        let Some(program) = find() else { return };
        if shared.signalled.swap(false, Ordering::SeqCst) {
            report(program, Reason::Signal);
        }
        if shared.grew.swap(false, Ordering::SeqCst) {
            let share = f64::from_bits(shared.above.load(Ordering::Relaxed));
            let now = devices_above(program, share);
            if now.iter().enumerate().any(|(device, &now)| now && !above.get(device).copied().unwrap_or(false)) {
                report(program, Reason::Above);
            }
            above = now;
            thread::sleep(PAUSE);
        }
    }
}

fn report(program: &dyn Program, reason: Reason) {
    match program.recorder().record_by_itself(program, reason) {
        Ok(Some(path)) => tracing::warn!("recorded ({}): {}", reason.words(), path.display()),
        Ok(None) => {}
        Err(sentence) => tracing::warn!("not recorded ({}): {sentence}", reason.words()),
    }
}

/// For each device in use, whether more than a share of its memory is used, by this process and others.
fn devices_above(program: &dyn Program, share: f64) -> Vec<bool> {
    let instance = program.allocator().instance();
    let driver = instance.driver();
    let is_above = |device| {
        let Ok(memory) = driver.mem_info(device) else { return false };
        let used = memory.bytes_total.saturating_sub(memory.bytes_free);
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let is_above = share > 0.0 && used as f64 > share * memory.bytes_total as f64;
        is_above
    };
    let used = program.devices_in_use();
    instance.devices().map(|device| used.contains(&device.id()) && is_above(device.id())).collect()
}
