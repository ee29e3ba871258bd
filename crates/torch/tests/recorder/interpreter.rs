//! An interpreter whose frames a test chooses: the functions that Python passes to Warpool, without Python.
//!
//! A thread has a stack of code objects, each with a position. References are counted, and the lock of the interpreter
//! is checked: frames may be read only between `ensure` and `release`.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use warpool_torch::{PythonInterface, PythonObject};

/// Frames and texts that were given out and not dropped; codes that Warpool keeps are counted too.
pub static REFERENCES: AtomicI64 = AtomicI64::new(0);
/// How often a name was asked for.
pub static DESCRIBED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The frames of this thread, innermost first, as (code, line); `None` if the interpreter does not know the thread.
    static FRAMES: RefCell<Option<Vec<(usize, c_int)>>> = const { RefCell::new(None) };
    static HOLDS_LOCK: Cell<bool> = const { Cell::new(false) };
}

/// The texts of codes, null-terminated, by their addresses as objects. They stay.
static TEXTS: Mutex<BTreeMap<usize, &'static CStr>> = Mutex::new(BTreeMap::new());

/// Addresses of codes begin here, those of texts and frames elsewhere.
const CODES: usize = 1 << 40;
const NAMES: usize = 1 << 41;
const FILES: usize = 1 << 42;

/// Runs `act` on a thread of the interpreter with these frames.
pub fn with_frames<R>(frames: Vec<(usize, c_int)>, act: impl FnOnce() -> R) -> R {
    let before = FRAMES.replace(Some(frames));
    let result = act();
    FRAMES.set(before);
    result
}

pub fn interface() -> PythonInterface {
    PythonInterface {
        this_thread,
        ensure,
        release,
        thread_frame,
        frame_back,
        frame_code,
        frame_position,
        frame_line,
        attribute,
        text,
        take_error,
        set_error,
        drop: drop_reference,
    }
}

/// The frame at a depth of this thread. Depths begin at 1: null is no frame.
fn frame(depth: usize) -> (usize, c_int) {
    assert!(HOLDS_LOCK.get(), "frames are read with the interpreter's lock");
    FRAMES.with_borrow(|frames| frames.as_ref().expect("a thread of the interpreter")[depth - 1])
}

fn given(address: usize) -> PythonObject {
    REFERENCES.fetch_add(1, Ordering::Relaxed);
    std::ptr::without_provenance_mut(address)
}

fn at_depth(depth: usize) -> PythonObject {
    let count = FRAMES.with_borrow(|frames| frames.as_ref().map_or(0, Vec::len));
    if depth <= count { given(depth) } else { std::ptr::null_mut() }
}

extern "C" fn this_thread() -> *mut c_void {
    let known = FRAMES.with_borrow(Option::is_some);
    std::ptr::without_provenance_mut(usize::from(known))
}

extern "C" fn ensure() -> c_int {
    assert!(FRAMES.with_borrow(Option::is_some), "unknown threads are not made known");
    c_int::from(HOLDS_LOCK.replace(true))
}

extern "C" fn release(state: c_int) {
    HOLDS_LOCK.set(state != 0);
}

extern "C" fn thread_frame(_thread: *mut c_void) -> PythonObject {
    assert!(HOLDS_LOCK.get());
    at_depth(1)
}

extern "C" fn frame_back(frame: PythonObject) -> PythonObject {
    at_depth(frame.addr() + 1)
}

extern "C" fn frame_code(object: PythonObject) -> PythonObject {
    given(CODES + frame(object.addr()).0)
}

extern "C" fn frame_position(object: PythonObject) -> c_int {
    frame(object.addr()).1
}

extern "C" fn frame_line(object: PythonObject) -> c_int {
    frame(object.addr()).1
}

extern "C" fn attribute(object: PythonObject, name: *const c_char) -> PythonObject {
    assert!(HOLDS_LOCK.get());
    DESCRIBED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: Warpool passes null-terminated texts.
    let base = match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"co_name" => NAMES,
        b"co_filename" => FILES,
        name => panic!("{name:?}"),
    };
    given(base + object.addr() - CODES)
}

extern "C" fn text(object: PythonObject, bytes: *mut isize) -> *const c_char {
    let (kind, code) = match object.addr() {
        address if address >= FILES => ("/home/me/project/package/module", address - FILES),
        address => ("method", address - NAMES),
    };
    let make = || -> &'static CStr {
        let text = format!("{kind}_{code}{}", if kind == "method" { "" } else { ".py" });
        Box::leak(CString::new(text).expect("no zero").into_boxed_c_str())
    };
    let text = *TEXTS.lock().expect("no panic with the lock").entry(object.addr()).or_insert_with(make);
    // SAFETY: Warpool passes a place for the size.
    unsafe { bytes.write(text.count_bytes() as isize) };
    text.as_ptr()
}

extern "C" fn take_error(_: *mut PythonObject, _: *mut PythonObject, _: *mut PythonObject) {}

extern "C" fn set_error(_: PythonObject, _: PythonObject, _: PythonObject) {}

extern "C" fn drop_reference(object: PythonObject) {
    assert!(HOLDS_LOCK.get(), "references are dropped with the interpreter's lock");
    assert!(!object.is_null());
    REFERENCES.fetch_sub(1, Ordering::Relaxed);
}
