//! The program's labels for streams and memory, and the source lines of its calls. Only used in messages.

use std::collections::BTreeMap;
use std::panic::Location;

use rustc_hash::FxHashMap;

use super::accessor::Accessor;
use crate::{DevicePtr, StreamId};

/// How many calls' lines are kept: the latest ones.
const LINES_MAX: usize = 65_536;

/// Labels of streams and memory, and lines of calls.
#[derive(Debug, Default)]
pub struct Names {
    streams: FxHashMap<StreamId, Box<str>>,
    /// Labelled ranges by their start; they do not overlap.
    memory: BTreeMap<u64, (u64, Box<str>)>,
    lines: BTreeMap<u64, &'static Location<'static>>,
}

impl Names {
    pub fn set_stream(&mut self, stream: StreamId, label: &str) {
        self.streams.insert(stream, label.into());
    }

    pub fn set_memory(&mut self, ptr: DevicePtr, bytes: u64, label: &str) {
        self.forget_memory(ptr, bytes);
        self.memory.insert(ptr.0, (ptr.0.saturating_add(bytes), label.into()));
    }

    /// Called when other memory is placed there. Freed memory keeps its label until then, so that a use after free
    /// shows it.
    pub fn forget_memory(&mut self, ptr: DevicePtr, bytes: u64) {
        let end = ptr.0.saturating_add(bytes);
        while let Some((&start, _)) = self.memory.range(..end).next_back().filter(|(_, (to, _))| *to > ptr.0) {
            self.memory.remove(&start);
        }
    }

    pub fn set_line(&mut self, call: u64, line: &'static Location<'static>) {
        self.lines.insert(call, line);
        if self.lines.len() > LINES_MAX {
            self.lines.pop_first();
        }
    }

    /// The label of the memory at `ptr`.
    pub fn of_memory(&self, ptr: DevicePtr) -> Option<&str> {
        let (_, (end, label)) = self.memory.range(..=ptr.0).next_back()?;
        (ptr.0 < *end).then_some(&**label)
    }

    /// An operation with the label of its stream and the line that queued it.
    pub fn describe(&self, by: &Accessor) -> String {
        let mut text = by.to_string();
        if let Some(label) = self.streams.get(&by.stream).filter(|_| !by.is_host()) {
            text += &format!(" {label:?}");
        }
        if let Some(line) = self.lines.get(&by.queued_at) {
            text += &format!(" ({}:{})", line.file(), line.line());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_covers_its_range_until_another_takes_its_place() {
        let mut names = Names::default();
        names.set_memory(DevicePtr(100), 50, "first");
        names.set_memory(DevicePtr(200), 50, "second");
        let label = |names: &Names, at| names.of_memory(DevicePtr(at)).map(str::to_owned);
        assert_eq!(label(&names, 99), None);
        assert_eq!(label(&names, 149).as_deref(), Some("first"));
        assert_eq!(label(&names, 150), None);
        assert_eq!(label(&names, 200).as_deref(), Some("second"));
        names.forget_memory(DevicePtr(140), 61);
        assert_eq!((label(&names, 100), label(&names, 249)), (None, None));
    }

    #[test]
    fn the_latest_lines_are_kept() {
        let mut names = Names::default();
        let line = Location::caller();
        (0..LINES_MAX as u64 + 10).for_each(|call| names.set_line(call, line));
        assert_eq!(names.lines.len(), LINES_MAX);
        assert!(!names.lines.contains_key(&9) && names.lines.contains_key(&10));
    }
}
