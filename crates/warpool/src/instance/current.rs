//! What each thread has as its current device, and as its current stream on each device, and the guards that change
//! it for a while.
//!
//! A thread starts with device 0 and the default streams, and never sees what another thread set. Reading takes no
//! lock. All of it lives in Warpool: the driver's own notion of a current device is neither read nor changed, since
//! every call of the contract names its device ([`Device::bind_to_thread`] is there for foreign code).
//!
//! The rule: a thread's notes hold plain ids. They keep nothing alive, so a thread that ends (or a process that
//! exits) makes no driver call. When the notes are already gone, as they are for code that runs in the destructor of
//! another thread-local variable, reading gives the starting values and setting does nothing.
//!
//! # Guards dropped out of order
//! A guard remembers what it covered. Dropped in the usual order, last made first, it uncovers just that. A guard
//! that is dropped while a later one covers the same thing leaves the later one in force, and
//! bequeaths it what to uncover. So the order does not matter: once all are gone, all is as before the first.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use warpool_driver::{DeviceId, StreamId};

use super::InstanceKey;
use crate::{Device, Instance, Result, Stream};

thread_local! {
    // One entry per Instance that this thread changed anything for; most programs have one, so a search is a glance.
    static NOTES: RefCell<Vec<ThreadNotes>> = const { RefCell::new(Vec::new()) };
}

/// One thread's notes about one `Instance`.
struct ThreadNotes {
    instance: InstanceKey,
    /// Dead once the `Instance` is: then these notes are stale.
    alive: Weak<()>,
    device: DeviceId,
    /// By device. `None` is the default stream.
    streams: Vec<Option<StreamId>>,
    /// What live guards cover, oldest first.
    covered: Vec<Covered>,
    next_scope: u64,
}

/// One thing that a guard covers.
struct Covered {
    scope: u64,
    before: Setting,
}

/// A thing that can be current, with its value.
#[derive(Clone, Copy)]
enum Setting {
    Device(DeviceId),
    Stream(DeviceId, Option<StreamId>),
}

impl Setting {
    fn is_about_the_same(self, other: Self) -> bool {
        match (self, other) {
            (Self::Device(_), Self::Device(_)) => true,
            (Self::Stream(a, _), Self::Stream(b, _)) => a == b,
            _ => false,
        }
    }
}

impl ThreadNotes {
    fn new(instance: &Instance) -> Self {
        Self {
            instance: instance.key(),
            alive: Arc::downgrade(instance.alive()),
            device: DeviceId(0),
            streams: vec![None; instance.device_count() as usize],
            covered: Vec::new(),
            next_scope: 0,
        }
    }

    /// Makes `setting` current and returns what was.
    fn replace(&mut self, setting: Setting) -> Setting {
        match setting {
            Setting::Device(new) => Setting::Device(std::mem::replace(&mut self.device, new)),
            Setting::Stream(device, new) => {
                Setting::Stream(device, std::mem::replace(&mut self.streams[device.0 as usize], new))
            }
        }
    }

    fn enter(&mut self, settings: &[Setting]) -> u64 {
        let scope = self.next_scope;
        self.next_scope += 1;
        for &setting in settings {
            let before = self.replace(setting);
            self.covered.push(Covered { scope, before });
        }
        scope
    }

    fn leave(&mut self, scope: u64) {
        // Newest first. In the usual order all of them are at the end, and the search for a later one looks at nothing.
        for at in (0..self.covered.len()).rev() {
            if self.covered[at].scope > scope {
                continue;
            }
            if self.covered[at].scope < scope {
                break;
            }
            let before = self.covered.remove(at).before;
            match self.covered[at..].iter_mut().find(|later| later.before.is_about_the_same(before)) {
                Some(later) => later.before = before,
                None => drop(self.replace(before)),
            }
        }
    }
}

/// Reads this thread's notes about `instance`; `None` if it has none, and everything is as at the start.
fn read<T>(instance: &Instance, look: impl FnOnce(&ThreadNotes) -> T) -> Option<T> {
    NOTES
        .try_with(|notes| notes.borrow().iter().find(|entry| entry.instance == instance.key()).map(look))
        .ok()
        .flatten()
}

/// Changes this thread's notes about `instance`; `None` if the thread is past having any.
fn change<T>(instance: &Instance, act: impl FnOnce(&mut ThreadNotes) -> T) -> Option<T> {
    NOTES
        .try_with(|notes| {
            let notes = &mut *notes.borrow_mut();
            if let Some(entry) = notes.iter_mut().find(|entry| entry.instance == instance.key()) {
                return act(entry);
            }
            notes.retain(|entry| entry.alive.strong_count() > 0);
            notes.push(ThreadNotes::new(instance));
            act(notes.last_mut().expect("pushed just now"))
        })
        .ok()
}

impl Instance {
    /// The calling thread's current device; device 0 until it is set.
    #[must_use]
    pub fn current_device(&self) -> Device {
        Device::known(self, self.current_device_id())
    }

    /// The same, as an id.
    #[must_use]
    pub fn current_device_id(&self) -> DeviceId {
        read(self, |notes| notes.device).unwrap_or(DeviceId(0))
    }

    /// The calling thread's current stream on its current device.
    pub fn current_stream(&self) -> Result<Stream> {
        self.current_device().current_stream()
    }
}

impl Device {
    /// Makes it the calling thread's current device, until changed again. Makes no driver call.
    pub fn make_current(&self) {
        change(self.instance(), |notes| notes.replace(Setting::Device(self.id())));
    }

    /// Makes it the calling thread's current device until the guard is dropped.
    #[must_use = "dropping the guard restores the device that was current"]
    pub fn enter(&self) -> DeviceGuard {
        DeviceGuard { _scope: Scope::enter(self.instance(), &[Setting::Device(self.id())]) }
    }

    /// The calling thread's current stream on this device; the default stream until it is set.
    pub fn current_stream(&self) -> Result<Stream> {
        Ok(Stream::known(self, self.current_stream_id()?))
    }

    /// The same, as an id. After the first call on a device it cannot fail.
    pub fn current_stream_id(&self) -> Result<StreamId> {
        match read(self.instance(), |notes| notes.streams[self.id().0 as usize]).flatten() {
            Some(id) => Ok(id),
            None => self.instance().default_stream_id(self.id()),
        }
    }
}

impl Stream {
    /// Makes it the calling thread's current stream on its device, until changed again. The current
    /// device stays, also if it is another. Makes no driver call.
    pub fn make_current(&self) {
        change(self.instance(), |notes| notes.replace(self.as_setting()));
    }

    /// Makes it the current stream of its device, and its device the current device, until the guard is dropped.
    #[must_use = "dropping the guard restores the stream and the device that were current"]
    pub fn enter(&self) -> StreamGuard {
        StreamGuard { _scope: Scope::enter(self.instance(), &[Setting::Device(self.device_id()), self.as_setting()]) }
    }

    fn as_setting(&self) -> Setting {
        Setting::Stream(self.device_id(), Some(self.id()))
    }
}

/// What a guard covers, until dropped.
#[derive(Debug)]
struct Scope {
    instance: InstanceKey,
    /// `None` if the thread was past having notes.
    scope: Option<u64>,
    /// The notes are the thread's own, so the guard must not leave it.
    _not_send: PhantomData<Rc<()>>,
}

impl Scope {
    fn enter(instance: &Instance, settings: &[Setting]) -> Self {
        Self {
            instance: instance.key(),
            scope: change(instance, |notes| notes.enter(settings)),
            _not_send: PhantomData,
        }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let Some(scope) = self.scope else { return };
        // No notes: the thread is ending, or the Instance is gone and nobody can ask about it any more.
        let _ = NOTES.try_with(|notes| {
            if let Some(entry) = notes.borrow_mut().iter_mut().find(|entry| entry.instance == self.instance) {
                entry.leave(scope);
            }
        });
    }
}

/// Restores the current device when dropped, also by a panic. See [`Device::enter`].
///
/// Guards stay on their thread:
/// ```compile_fail,E0277
/// # fn on_another_thread(device: &warpool::Device) {
/// let guard = device.enter();
/// std::thread::spawn(move || drop(guard));
/// # }
/// ```
#[derive(Debug)]
pub struct DeviceGuard {
    _scope: Scope,
}

/// Restores the current stream of a device, and the current device, when dropped, also by a panic. See
/// [`Stream::enter`].
#[derive(Debug)]
pub struct StreamGuard {
    _scope: Scope,
}

/// Makes several streams current, each on its own device, until dropped. The current device stays. Of two streams of
/// one device the later one counts.
#[derive(Debug)]
pub struct MultiStreamGuard {
    _scopes: Vec<Scope>,
}

impl MultiStreamGuard {
    /// Makes `streams` current on their devices.
    #[must_use = "dropping the guard restores the streams that were current"]
    pub fn enter<'a>(streams: impl IntoIterator<Item = &'a Stream>) -> Self {
        Self {
            _scopes: streams
                .into_iter()
                .map(|stream| Scope::enter(stream.instance(), &[stream.as_setting()]))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::sim::{SimConfig, SimDriver};

    use super::*;

    fn two_devices() -> Instance {
        Instance::new(Arc::new(SimDriver::new(SimConfig::default().with_devices(2)))).unwrap()
    }

    /// Runs a script of guards over two devices and compares the current device after each step.
    /// `+n`: a guard for device n; `=n`: device n made current; `-k`: the k-th guard dropped.
    fn check(script: &str, picture: &str) {
        let instance = two_devices();
        let mut guards = Vec::new();
        let mut seen = String::new();
        for step in script.split_whitespace() {
            let number: u32 = step[1..].parse().unwrap();
            match &step[..1] {
                "+" => guards.push(Some(instance.device(number).unwrap().enter())),
                "=" => instance.device(number).unwrap().make_current(),
                "-" => drop(guards[number as usize].take().unwrap()),
                other => panic!("no such step: {other}"),
            }
            seen.push_str(&instance.current_device().index().to_string());
        }
        assert_eq!(seen, picture, "{script}");
    }

    #[test]
    fn guards_restore_in_any_order() {
        check("+1 -0", "10");
        check("+1 +0 -1 -0", "1010");
        check("+1 +0 -0 -1", "1000");
        check("=1 +0 +1 -0 -1", "10111");
        check("=1 +0 +0 +0 -1 -0 -2", "1000001");
        check("+1 =0 -0", "100");
        check("+1 +1 =0 -0 -1", "11000");
        check("=1 +0 =1 +0 -0 -1", "101001");
    }

    #[test]
    fn notes_about_gpus_that_are_gone_do_not_pile_up() {
        for _ in 0..10 {
            two_devices().device(1).unwrap().make_current();
        }
        let instance = two_devices();
        instance.device(1).unwrap().make_current();
        assert_eq!(NOTES.with(|notes| notes.borrow().len()), 1);
        assert_eq!(instance.current_device().index(), 1);
    }

    #[test]
    fn a_guard_may_outlive_its_gpu() {
        let instance = two_devices();
        let guard = instance.device(1).unwrap().enter();
        drop(instance);
        let other = two_devices();
        other.device(1).unwrap().make_current();
        drop(guard);
        assert_eq!(other.current_device().index(), 1);
    }
}
