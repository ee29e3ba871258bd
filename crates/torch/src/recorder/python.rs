//! Call stacks of a Python program, for recordings. The interpreter's own functions walk the frames of the calling
//! thread; Python passes their addresses, so that nothing is linked against a version of Python.
//!
//! A stack costs one number. Each different stack is stored once, as the numbers of its frames, and each different
//! frame once, as texts; [`PythonStacks::expand`] turns numbers into frames for a snapshot. What is stored has an upper
//! bound: beyond it, new stacks are not recorded.
//!
//! The rules: the interpreter is entered only on threads that it knows already, since others have no Python frames, and
//! never with the lock of the tables. Nothing that may run Python code is done with that lock either.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{ptr, thread};

use rustc_hash::{FxHashMap, FxHashSet};
use warpool::memory::report::{Frame, Snapshot, Stack};

use crate::backend::context_of;

/// An object of Python, a `PyObject *`.
pub type PythonObject = *mut c_void;

/// Functions of the interpreter, by their names there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PythonInterface {
    /// `PyGILState_GetThisThreadState`.
    pub this_thread: extern "C" fn() -> *mut c_void,
    /// `PyGILState_Ensure`.
    pub ensure: extern "C" fn() -> c_int,
    /// `PyGILState_Release`.
    pub release: extern "C" fn(state: c_int),
    /// `PyThreadState_GetFrame`.
    pub thread_frame: extern "C" fn(thread: *mut c_void) -> PythonObject,
    /// `PyFrame_GetBack`.
    pub frame_back: extern "C" fn(frame: PythonObject) -> PythonObject,
    /// `PyFrame_GetCode`.
    pub frame_code: extern "C" fn(frame: PythonObject) -> PythonObject,
    /// `PyFrame_GetLasti`; before Python 3.11, `PyFrame_GetLineNumber`.
    pub frame_position: extern "C" fn(frame: PythonObject) -> c_int,
    /// `PyFrame_GetLineNumber`.
    pub frame_line: extern "C" fn(frame: PythonObject) -> c_int,
    /// `PyObject_GetAttrString`.
    pub attribute: extern "C" fn(object: PythonObject, name: *const c_char) -> PythonObject,
    /// `PyUnicode_AsUTF8AndSize`.
    pub text: extern "C" fn(object: PythonObject, bytes: *mut isize) -> *const c_char,
    /// `PyErr_Fetch`.
    pub take_error: extern "C" fn(*mut PythonObject, *mut PythonObject, *mut PythonObject),
    /// `PyErr_Restore`.
    pub set_error: extern "C" fn(PythonObject, PythonObject, PythonObject),
    /// `Py_DecRef`.
    pub drop: extern "C" fn(object: PythonObject),
}

/// Frames of a stack, innermost first; outer ones are left out.
const DEPTH_MAX: usize = 128;

/// Different stacks and frames. With 40 frames each, stacks take 300 bytes, and frames 150.
const STACKS_MAX: usize = 100_000;
const FRAMES_MAX: usize = 100_000;

/// Below this many stacks none is dropped.
const STACKS_KEPT_MIN: usize = 4096;

/// How long a removal waits for threads that are collecting a stack.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The name of the only frame of a stack that stands for a number, its line.
const NUMBERED: &str = "python";

thread_local! {
    /// Whether this thread is collecting a stack: what that allocates has none.
    static COLLECTING: Cell<bool> = const { Cell::new(false) };
    static WALK: RefCell<Walk> = const { RefCell::new(Walk { frames: Vec::new(), numbers: Vec::new() }) };
}

/// The stacks of the program.
#[derive(Default)]
pub(crate) struct PythonStacks {
    tables: Mutex<Tables>,
    /// The functions of the interpreter; null while there is none. What it points to is never freed: they are few.
    interface: AtomicPtr<PythonInterface>,
    /// The number of threads that collect, or are about to check whether there is an interpreter.
    collecting: AtomicUsize,
}

/// Where a frame is: its code object, and the position in it.
type Place = (usize, c_int);

/// A frame of the calling thread, with references to its objects.
struct Walked {
    frame: PythonObject,
    code: PythonObject,
    position: c_int,
    /// Whether the reference to `code` is the tables' from now on.
    is_kept: bool,
}

#[derive(Default)]
struct Walk {
    frames: Vec<Walked>,
    numbers: Vec<u32>,
}

#[derive(Default)]
struct Tables {
    numbers: FxHashMap<Place, u32>,
    frames: Vec<StoredFrame>,
    /// Code objects that are kept alive, so that no other gets the address of one.
    codes: FxHashSet<usize>,
    texts: FxHashSet<Arc<str>>,
    stacks: FxHashMap<Arc<[u32]>, Stack>,
    /// The frames of each stack, by its number.
    by_number: Vec<Option<Arc<[u32]>>>,
    unused_numbers: Vec<u32>,
    /// At this many stacks, those without another reference are dropped.
    limit: usize,
}

#[derive(Clone)]
struct StoredFrame {
    name: Arc<str>,
    file: Arc<str>,
    line: u32,
}

impl PythonStacks {
    /// Sets the functions of the interpreter, or removes them. After a removal no other thread enters the interpreter,
    /// unless it has been in it for longer than [`REMOVE_TIMEOUT`].
    pub(crate) fn set(&self, interface: Option<PythonInterface>) {
        let interface = interface.map_or(ptr::null_mut(), |interface| Box::into_raw(Box::new(interface)));
        self.interface.store(interface, Ordering::SeqCst);
        let start = Instant::now();
        let own = usize::from(COLLECTING.get());
        while self.collecting.load(Ordering::SeqCst) > own && start.elapsed() < REMOVE_TIMEOUT {
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// The stack of the calling thread; `None` if it has no Python frames.
    pub(crate) fn collect(&self) -> Option<Stack> {
        if COLLECTING.replace(true) {
            return None;
        }
        self.collecting.fetch_add(1, Ordering::SeqCst);
        let _end = OnDrop(|| {
            self.collecting.fetch_sub(1, Ordering::SeqCst);
            COLLECTING.set(false);
        });
        // SAFETY: null, or from `Box::into_raw` in `set` and never freed.
        let python = unsafe { self.interface.load(Ordering::SeqCst).as_ref() }?;
        if (python.this_thread)().is_null() {
            return None;
        }
        let state = (python.ensure)();
        let _release = OnDrop(|| (python.release)(state));
        WALK.try_with(|walk| {
            // Not borrowed by this thread: see `COLLECTING`.
            let mut walk = walk.borrow_mut();
            walk.frames_of_thread(python);
            let stack = self.intern(python, &mut walk);
            walk.drop_references(python);
            stack
        })
        .ok()
        .flatten()
    }

    /// The shared stack of a walk.
    fn intern(&self, python: &PythonInterface, walk: &mut Walk) -> Option<Stack> {
        if walk.frames.is_empty() {
            return None;
        }
        let mut tables = self.lock();
        if !tables.number(walk) && tables.frames.len() < FRAMES_MAX {
            drop(tables);
            let described = describe(python, &walk.frames);
            tables = self.lock();
            tables.add_frames(&mut walk.frames, &described);
            tables.number(walk);
        }
        tables.stack(&walk.numbers)
    }

    /// Replaces the numbers of stacks by their frames, and stacks that only PyTorch can read by none. The texts are
    /// copied without the lock, for which threads that hold the interpreter's lock may wait.
    pub(crate) fn expand(&self, snapshot: &mut Snapshot) {
        let tables = self.lock();
        let frames_of = |stack| number_of(stack).and_then(|number| tables.by_number.get(number)?.clone());
        let stacks: Vec<Option<Arc<[u32]>>> = snapshot.stacks.iter().map(frames_of).collect();
        drop(tables);
        let numbers: FxHashSet<u32> = stacks.iter().flatten().flat_map(|frames| frames.iter().copied()).collect();
        let tables = self.lock();
        let stored = |number: u32| (number, tables.frames[number as usize].clone());
        let stored: Vec<(u32, StoredFrame)> = numbers.into_iter().map(stored).collect();
        drop(tables);
        let frames: FxHashMap<u32, Frame> =
            stored.iter().map(|(number, stored)| (*number, stored.to_frame())).collect();
        for (stack, numbers) in snapshot.stacks.iter_mut().zip(stacks) {
            if let Some(numbers) = numbers {
                *stack = numbers.iter().map(|number| frames[number].clone()).collect();
            } else if !context_of(stack).is_null() {
                *stack = Arc::new([]);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PythonStacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tables = self.lock();
        write!(f, "{} call stacks of {} frames", tables.stacks.len(), tables.frames.len())
    }
}

/// The number that a stack stands for.
fn number_of(stack: &Stack) -> Option<usize> {
    match &stack[..] {
        [Frame { name, filename, line }] if name == NUMBERED && filename.is_empty() => usize::try_from(*line).ok(),
        _ => None,
    }
}

impl Walk {
    fn frames_of_thread(&mut self, python: &PythonInterface) {
        self.frames.clear();
        let mut frame = (python.thread_frame)((python.this_thread)());
        while !frame.is_null() {
            if self.frames.len() == DEPTH_MAX {
                (python.drop)(frame);
                break;
            }
            let (code, position) = ((python.frame_code)(frame), (python.frame_position)(frame));
            self.frames.push(Walked { frame, code, position, is_kept: false });
            frame = (python.frame_back)(frame);
        }
    }

    /// May run Python code, by which the thread may allocate.
    fn drop_references(&mut self, python: &PythonInterface) {
        for Walked { frame, code, is_kept, .. } in self.frames.drain(..) {
            (python.drop)(frame);
            if !is_kept {
                (python.drop)(code);
            }
        }
    }
}

/// Names, files and lines.
fn describe(python: &PythonInterface, frames: &[Walked]) -> Vec<StoredFrame> {
    // The program may be handling an exception, which the calls below would replace.
    let mut error = [ptr::null_mut(); 3];
    let [kind, value, trace] = &mut error;
    (python.take_error)(kind, value, trace);
    let text = |object: PythonObject, name: &CStr| -> Arc<str> {
        let value = (python.attribute)(object, name.as_ptr());
        if value.is_null() {
            return "?".into();
        }
        let mut bytes = 0;
        let start = (python.text)(value, &raw mut bytes);
        let text = match usize::try_from(bytes) {
            Ok(bytes) if !start.is_null() => {
                // SAFETY: Python says so, and `value` keeps them.
                String::from_utf8_lossy(unsafe { std::slice::from_raw_parts(start.cast::<u8>(), bytes) }).into()
            }
            _ => "?".into(),
        };
        (python.drop)(value);
        text
    };
    let described = frames.iter().map(|walked| StoredFrame {
        name: text(walked.code, c"co_name"),
        file: text(walked.code, c"co_filename"),
        line: u32::try_from((python.frame_line)(walked.frame)).unwrap_or(0),
    });
    let described: Vec<_> = described.collect();
    // Drops an error of these calls.
    let [kind, value, trace] = error;
    (python.set_error)(kind, value, trace);
    described
}

impl StoredFrame {
    fn to_frame(&self) -> Frame {
        Frame { name: self.name.to_string(), filename: self.file.to_string(), line: self.line.into() }
    }
}

impl Tables {
    /// Looks up the numbers of the frames, up to the first that is not known; false if there is such a one.
    fn number(&mut self, walk: &mut Walk) -> bool {
        walk.numbers.clear();
        for walked in &walk.frames {
            match self.numbers.get(&(walked.code.addr(), walked.position)) {
                Some(&number) => walk.numbers.push(number),
                None => return false,
            }
        }
        true
    }

    /// Adds the frames that are not known. A reference to a new code object is kept.
    fn add_frames(&mut self, walked: &mut [Walked], described: &[StoredFrame]) {
        for (walked, described) in walked.iter_mut().zip(described) {
            let place = (walked.code.addr(), walked.position);
            if self.frames.len() >= FRAMES_MAX || self.numbers.contains_key(&place) {
                continue;
            }
            let (name, file) = (self.shared_text(&described.name), self.shared_text(&described.file));
            self.numbers.insert(place, self.frames.len() as u32);
            self.frames.push(StoredFrame { name, file, line: described.line });
            walked.is_kept = self.codes.insert(walked.code.addr());
        }
    }

    fn shared_text(&mut self, text: &Arc<str>) -> Arc<str> {
        match self.texts.get(text) {
            Some(known) => Arc::clone(known),
            None => {
                self.texts.insert(Arc::clone(text));
                Arc::clone(text)
            }
        }
    }

    /// The stack with these frames; `None` if there are none, or no room for another stack.
    fn stack(&mut self, frames: &[u32]) -> Option<Stack> {
        if frames.is_empty() {
            return None;
        }
        if let Some(stack) = self.stacks.get(frames) {
            return Some(Arc::clone(stack));
        }
        if self.stacks.len() >= self.limit.max(STACKS_KEPT_MIN) {
            self.drop_unused();
        }
        if self.stacks.len() >= STACKS_MAX {
            return None;
        }
        let number = self.unused_numbers.pop().unwrap_or_else(|| {
            self.by_number.push(None);
            (self.by_number.len() - 1) as u32
        });
        let frames: Arc<[u32]> = frames.into();
        let stack: Stack =
            Arc::new([Frame { name: NUMBERED.to_owned(), filename: String::new(), line: number.into() }]);
        self.by_number[number as usize] = Some(Arc::clone(&frames));
        self.stacks.insert(frames, Arc::clone(&stack));
        Some(stack)
    }

    fn drop_unused(&mut self) {
        let Self { stacks, by_number, unused_numbers, .. } = self;
        stacks.retain(|_, stack| {
            let is_used = Arc::strong_count(stack) > 1;
            if !is_used && let Some(number) = number_of(stack) {
                by_number[number] = None;
                unused_numbers.push(number as u32);
            }
            is_used
        });
        // Full tables are not searched again for each new stack.
        self.limit = (stacks.len() * 2).min(stacks.len() + STACKS_MAX / 10);
    }
}

/// Calls a function at the end of a scope.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
