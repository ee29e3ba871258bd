//! Texts that a thread has set for its history entries: the program's metadata, and its compiled regions.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// The texts of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EntryTexts {
    pub(crate) user_metadata: Option<Arc<str>>,
    pub(crate) compile_context: Option<Arc<str>>,
}

impl EntryTexts {
    pub(crate) const NONE: Self = Self { user_metadata: None, compile_context: None };

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.user_metadata.is_none() && self.compile_context.is_none()
    }
}

#[derive(Default)]
struct ThreadTexts {
    user_metadata: Option<Arc<str>>,
    compile_contexts: Vec<Arc<str>>,
}

thread_local! {
    /// Whether the thread has any text: it has no destructor, so that reading it is one load.
    static HAS_ANY: Cell<bool> = const { Cell::new(false) };
    static TEXTS: RefCell<ThreadTexts> =
        const { RefCell::new(ThreadTexts { user_metadata: None, compile_contexts: Vec::new() }) };
}

/// Changes the thread's texts. At the end of the thread they may already be destroyed; entries have none then.
fn change<R>(change: impl FnOnce(&mut ThreadTexts) -> R) -> Option<R> {
    let changed = TEXTS.try_with(|texts| {
        let mut texts = texts.borrow_mut();
        let result = change(&mut texts);
        HAS_ANY.set(texts.user_metadata.is_some() || !texts.compile_contexts.is_empty());
        result
    });
    changed.ok()
}

/// Whether entries that the calling thread causes have texts.
#[inline]
pub(crate) fn has_entry_texts() -> bool {
    HAS_ANY.get()
}

/// The texts of entries that the calling thread causes.
#[inline]
pub(crate) fn entry_texts() -> EntryTexts {
    if has_entry_texts() { collect() } else { EntryTexts::NONE }
}

#[cold]
fn collect() -> EntryTexts {
    let collected = TEXTS.try_with(|texts| {
        let texts = texts.borrow();
        EntryTexts {
            user_metadata: texts.user_metadata.clone(),
            compile_context: texts.compile_contexts.last().cloned(),
        }
    });
    collected.unwrap_or_default()
}

/// Sets the metadata of entries that the calling thread causes from now on; an empty text is none.
pub fn set_user_metadata(text: &str) {
    set(if text.is_empty() { None } else { Some(text.into()) });
}

fn set(text: Option<Arc<str>>) {
    change(|texts| texts.user_metadata = text);
}

/// The metadata of entries that the calling thread causes.
#[must_use]
pub fn user_metadata() -> Option<Arc<str>> {
    entry_texts().user_metadata
}

/// Runs `act` with `text` as metadata instead of the program's.
pub(crate) fn with_metadata<R>(text: &str, act: impl FnOnce() -> R) -> R {
    /// Restores the program's metadata when dropped, also by a panic.
    struct Restore(Option<Arc<str>>);

    impl Drop for Restore {
        fn drop(&mut self) {
            set(self.0.take());
        }
    }

    let _restore = Restore(user_metadata());
    set_user_metadata(text);
    act()
}

/// Enters a compiled region: its name is in entries that the calling thread causes.
pub fn push_compile_context(name: &str) {
    change(|texts| texts.compile_contexts.push(name.into()));
}

/// Leaves the compiled region that was entered last.
pub fn pop_compile_context() {
    // Dropped after the borrow.
    let _left = change(|texts| texts.compile_contexts.pop());
}
