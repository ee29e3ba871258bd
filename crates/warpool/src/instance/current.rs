//! The current device of each thread, its current stream on each device, and the guards that change them for a scope.
//!
//! A thread starts with device 0 and the default streams; what other threads set has no effect on it. Reading takes no
//! lock. All of it is kept by Warpool: the driver's own current device is neither read nor changed, since every call of
//! the contract names its device ([`Device::bind_to_thread`] is for other libraries).
//!
//! A thread's entry holds plain ids. It keeps nothing alive, so a thread that ends (or a process that exits) makes no
//! driver call. Once the thread-local variable is destroyed, as it is for code that runs in the destructor of another
//! one, reading returns the initial values and setting does nothing.
//!
//! # Guards dropped out of order
//! A guard stores the value that it replaced. When guards are dropped last-in first-out, each restores its value. A
//! guard that is dropped while a later one for the same setting is alive leaves the current value alone, and passes its
//! stored value to that later guard. So the order does not matter: once all are dropped, everything is as before the
//! first.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use warpool_driver::{DeviceId, StreamId};

use super::device::Device;
use super::stream::Stream;
use super::{Instance, InstanceKey};
use crate::Result;

thread_local! {
    // One entry per Instance for which this thread changed anything; most programs have one, so a search is short.
    static CURRENT: RefCell<Vec<Current>> = const { RefCell::new(Vec::new()) };
}

/// The current device and streams of one thread for one `Instance`.
struct Current {
    instance: InstanceKey,
    /// Dead once the `Instance` is dropped; the entry is stale then.
    alive: Weak<()>,
    device: DeviceId,
    /// By device. `None` is the default stream.
    streams: Vec<Option<StreamId>>,
    /// The values that live guards replaced, oldest first.
    replaced: Vec<Replaced>,
    next_guard: u64,
}

/// A value that a guard replaced.
struct Replaced {
    guard: u64,
    before: Setting,
}

/// A setting with its value.
#[derive(Clone, Copy)]
enum Setting {
    Device(DeviceId),
    Stream(DeviceId, Option<StreamId>),
}

impl Setting {
    fn is_same_setting(self, other: Self) -> bool {
        match (self, other) {
            (Self::Device(_), Self::Device(_)) => true,
            (Self::Stream(a, _), Self::Stream(b, _)) => a == b,
            _ => false,
        }
    }
}

impl Current {
    fn new(instance: &Instance) -> Self {
        Self {
            instance: instance.key(),
            alive: Arc::downgrade(&instance.shared.alive),
            device: DeviceId(0),
            streams: vec![None; instance.device_count() as usize],
            replaced: Vec::new(),
            next_guard: 0,
        }
    }

    /// Makes `setting` current and returns the value before.
    fn replace(&mut self, setting: Setting) -> Setting {
        match setting {
            Setting::Device(new) => Setting::Device(std::mem::replace(&mut self.device, new)),
            Setting::Stream(device, new) => {
                Setting::Stream(device, std::mem::replace(&mut self.streams[device.0 as usize], new))
            }
        }
    }

    fn enter(&mut self, settings: &[Setting]) -> u64 {
        let guard = self.next_guard;
        self.next_guard += 1;
        for &setting in settings {
            let before = self.replace(setting);
            self.replaced.push(Replaced { guard, before });
        }
        guard
    }

    fn leave(&mut self, guard: u64) {
        // Newest first. In last-in first-out order all of them are at the end, and the search for a later one is empty.
        for at in (0..self.replaced.len()).rev() {
            if self.replaced[at].guard > guard {
                continue;
            }
            if self.replaced[at].guard < guard {
                break;
            }
            let before = self.replaced.remove(at).before;
            match self.replaced[at..].iter_mut().find(|later| later.before.is_same_setting(before)) {
                Some(later) => later.before = before,
                None => drop(self.replace(before)),
            }
        }
    }
}

/// Reads this thread's entry for `instance`; `None` if it has none, and every setting is at its initial value.
fn read<T>(instance: &Instance, read: impl FnOnce(&Current) -> T) -> Option<T> {
    CURRENT
        .try_with(|current| current.borrow().iter().find(|entry| entry.instance == instance.key()).map(read))
        .ok()
        .flatten()
}

/// Changes this thread's entry for `instance`; `None` if the thread-local variable is destroyed.
fn change<T>(instance: &Instance, change: impl FnOnce(&mut Current) -> T) -> Option<T> {
    CURRENT
        .try_with(|current| {
            let entries = &mut *current.borrow_mut();
            if let Some(entry) = entries.iter_mut().find(|entry| entry.instance == instance.key()) {
                return change(entry);
            }
            entries.retain(|entry| entry.alive.strong_count() > 0);
            entries.push(Current::new(instance));
            change(entries.last_mut().expect("pushed just now"))
        })
        .ok()
}

impl Instance {
    /// The calling thread's current device; device 0 until it is set.
    #[must_use]
    pub fn current_device(&self) -> Device {
        Device::from_id(self, self.current_device_id())
    }

    /// The id of the calling thread's current device.
    #[must_use]
    pub fn current_device_id(&self) -> DeviceId {
        read(self, |current| current.device).unwrap_or(DeviceId(0))
    }

    /// The calling thread's current stream on its current device.
    pub fn current_stream(&self) -> Result<Stream> {
        self.current_device().current_stream()
    }
}

impl Device {
    /// Makes it the calling thread's current device, until changed again. Makes no driver call.
    pub fn make_current(&self) {
        change(self.instance(), |current| current.replace(Setting::Device(self.id())));
    }

    /// Makes it the calling thread's current device until the guard is dropped.
    #[must_use = "dropping the guard restores the device that was current"]
    pub fn enter(&self) -> DeviceGuard {
        DeviceGuard { _guard: Guard::enter(self.instance(), &[Setting::Device(self.id())]) }
    }

    /// The calling thread's current stream on this device; the default stream until it is set.
    pub fn current_stream(&self) -> Result<Stream> {
        Ok(Stream::from_id(self, self.current_stream_id()?))
    }

    /// The id of the calling thread's current stream on this device. After the first call on a device it cannot fail.
    pub fn current_stream_id(&self) -> Result<StreamId> {
        match read(self.instance(), |current| current.streams[self.id().0 as usize]).flatten() {
            Some(id) => Ok(id),
            None => self.instance().default_stream_id(self.id()),
        }
    }
}

impl Stream {
    /// Makes it the calling thread's current stream on its device, until changed again. The current device does not
    /// change. Makes no driver call.
    pub fn make_current(&self) {
        change(self.instance(), |current| current.replace(self.as_setting()));
    }

    /// Makes it the current stream of its device, and its device the current device, until the guard is dropped.
    #[must_use = "dropping the guard restores the stream and the device that were current"]
    pub fn enter(&self) -> StreamGuard {
        StreamGuard { _guard: Guard::enter(self.instance(), &[Setting::Device(self.device_id()), self.as_setting()]) }
    }

    fn as_setting(&self) -> Setting {
        Setting::Stream(self.device_id(), Some(self.id()))
    }
}

/// Restores settings when dropped.
#[derive(Debug)]
struct Guard {
    instance: InstanceKey,
    /// `None` if the thread-local variable was destroyed already.
    guard: Option<u64>,
    /// The settings are the thread's own, so the guard must not leave it.
    _not_send: PhantomData<Rc<()>>,
}

impl Guard {
    fn enter(instance: &Instance, settings: &[Setting]) -> Self {
        Self {
            instance: instance.key(),
            guard: change(instance, |current| current.enter(settings)),
            _not_send: PhantomData,
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(guard) = self.guard else { return };
        // There is no entry if the thread is ending, or if the Instance is gone and its settings are irrelevant.
        let _ = CURRENT.try_with(|current| {
            if let Some(entry) = current.borrow_mut().iter_mut().find(|entry| entry.instance == self.instance) {
                entry.leave(guard);
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
    _guard: Guard,
}

/// Restores the current stream of a device, and the current device, when dropped, also by a panic. See
/// [`Stream::enter`].
#[derive(Debug)]
pub struct StreamGuard {
    _guard: Guard,
}

/// Makes several streams current, each on its own device, until dropped. The current device does not change. If two
/// streams are of one device, the later one is current.
#[derive(Debug)]
pub struct MultiStreamGuard {
    _guards: Vec<Guard>,
}

impl MultiStreamGuard {
    /// Makes `streams` current on their devices.
    #[must_use = "dropping the guard restores the streams that were current"]
    pub fn enter<'a>(streams: impl IntoIterator<Item = &'a Stream>) -> Self {
        Self {
            _guards: streams
                .into_iter()
                .map(|stream| Guard::enter(stream.instance(), &[stream.as_setting()]))
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
    fn check(script: &str, devices: &str) {
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
        assert_eq!(seen, devices, "{script}");
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
    fn entries_of_dropped_instances_are_removed() {
        for _ in 0..10 {
            two_devices().device(1).unwrap().make_current();
        }
        let instance = two_devices();
        instance.device(1).unwrap().make_current();
        assert_eq!(CURRENT.with(|current| current.borrow().len()), 1);
        assert_eq!(instance.current_device().index(), 1);
    }

    #[test]
    fn a_guard_may_outlive_its_instance() {
        let instance = two_devices();
        let guard = instance.device(1).unwrap().enter();
        drop(instance);
        let other = two_devices();
        other.device(1).unwrap().make_current();
        drop(guard);
        assert_eq!(other.current_device().index(), 1);
    }
}
