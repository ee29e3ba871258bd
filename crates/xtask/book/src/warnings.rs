//! What mdBook warns of, collected instead of logged.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use tracing_core::field::{Field, Visit};
use tracing_core::span::{Attributes, Id, Record};
use tracing_core::{Event, Level, Metadata, Subscriber, dispatcher};

/// The warnings and errors so far.
#[derive(Clone, Debug, Default)]
pub struct Warnings(Arc<Mutex<Vec<String>>>);

/// Collects from now on, in this process.
pub fn collect() -> Warnings {
    let warnings = Warnings::default();
    dispatcher::set_global_default(dispatcher::Dispatch::new(warnings.clone())).expect("it is the only one");
    warnings
}

impl Warnings {
    /// Returns and forgets them.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().expect("nothing panics with it"))
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(format!("{}:", event.metadata().target()));
        event.record(&mut text);
        self.0.lock().expect("nothing panics with it").push(text.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, " {value:?}");
    }
}
