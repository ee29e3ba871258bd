//! From what was read to a `Snapshot`: traces are cut out of the arena of entries, and texts and stacks get their
//! final numbers.
//! The numbers follow the order of the snapshot, not that of the file, so a snapshot that is written and read again is
//! the same.

use warpool::memory::{Annotation, SegmentInfo, Snapshot, StackId, TextId, Texts, TraceEntry};

use super::build::{Builder, TraceList, Wrong};
use super::record::ENTRY_HAS_TIME;
use crate::Known;
use crate::pickle::{DictKind, ListKind, Value};

/// What the texts of annotations may take. Few bytes of a pickle can repeat a long name many times.
const ANNOTATION_BYTES_MAX: usize = 256 << 20;

impl Builder {
    /// The snapshot that the pickle is, and what it tells.
    pub(crate) fn finish(mut self, whole: Value) -> Result<(Snapshot, Known), Wrong> {
        match whole {
            Value::Dict(DictKind::Root, _) => {}
            Value::List(ListKind::Segments, list) => {
                self.root.segments = Some(self.segment_lists[list as usize].take()?);
            }
            _ => {
                let what = "expected a dict with the key `segments`, or a list of segments";
                return Err(Wrong::new(format!("{what}, found {}", whole.describe())));
            }
        }
        let Some(segments) = self.root.segments.take() else {
            return Err(Wrong::new("the key `segments` is missing: this pickle is no memory snapshot"));
        };
        let annotations = self.spell_annotations()?;
        self.known.traces = self.root.traces.is_some();
        self.known.times = self.entries_seen.iter().all(|seen| seen & ENTRY_HAS_TIME != 0);

        let devices = self.root.traces.take().unwrap_or_default();
        let host = self.root.host_trace;
        let mut traces = self.cut_traces(&devices, host);
        let host_traces = host.and_then(|_| traces.pop());
        self.known.trace_pools = traces.iter().flatten().all(|entry| entry.pool.is_some());

        let settings = self.root.settings.map(|number| std::mem::take(&mut self.settings[number as usize]));
        let mut snapshot = Snapshot {
            segments,
            traces,
            settings: settings.unwrap_or_default(),
            annotations,
            host_segments: self.root.host_segments.take(),
            host_traces,
            texts: Texts::default(),
            stacks: Vec::new(),
        };
        self.renumber(&mut snapshot)?;
        Ok((snapshot, self.known))
    }

    fn spell_annotations(&self) -> Result<Vec<Annotation>, Wrong> {
        let mut bytes = 0;
        let spell = |(place, &number): (usize, &u32)| {
            let annotation = self.annotation(number);
            let annotation = annotation.map_err(|wrong| wrong.within(&format!(".external_annotations[{place}]")))?;
            bytes += annotation.name.len() + annotation.stage.len();
            if bytes > ANNOTATION_BYTES_MAX {
                return Err(Wrong::new("the texts of the annotations take more than 256 MiB"));
            }
            Ok(annotation)
        };
        self.root.annotations.iter().enumerate().map(spell).collect()
    }

    /// The entries of each device's trace, and last those of the host's.
    fn cut_traces(&mut self, devices: &[u32], host: Option<u32>) -> Vec<Vec<TraceEntry>> {
        self.entries_seen = Vec::new();
        let lists: Vec<&TraceList> =
            devices.iter().chain(host.as_ref()).map(|&list| &self.trace_lists[list as usize]).collect();
        let mut traces = Vec::with_capacity(lists.len());
        // From the last on, since a trace that is the end of the arena can be split off, and the first one is then
        // the arena itself. Only a pickle that shares entries between traces needs copies.
        for (place, list) in lists.iter().enumerate().rev() {
            let is_end = match list.runs[..] {
                [ref run] => {
                    let start = run.start;
                    let free = |list: &&TraceList| list.runs.iter().all(|run| run.end <= start);
                    run.end as usize == self.entries.len() && lists[..place].iter().all(free)
                }
                _ => false,
            };
            traces.push(if is_end && list.runs[0].start == 0 {
                std::mem::take(&mut self.entries)
            } else if is_end {
                self.entries.split_off(list.runs[0].start as usize)
            } else {
                let mut trace = Vec::with_capacity(list.length);
                for run in &list.runs {
                    trace.extend_from_slice(&self.entries[run.start as usize..run.end as usize]);
                }
                trace
            });
        }
        traces.reverse();
        traces
    }

    /// Gives texts and stacks the numbers of the snapshot, by the order in which it names them.
    fn renumber(&self, snapshot: &mut Snapshot) -> Result<(), Wrong> {
        let mut texts = Texts::default();
        let mut text_numbers: Vec<Option<TextId>> = vec![None; self.texts.len()];
        let mut text = |text: &mut Option<TextId>| {
            if let Some(TextId(old)) = *text {
                let new = text_numbers[old as usize].get_or_insert_with(|| texts.intern(self.texts.get(old)));
                *text = Some(*new);
            }
        };
        let mut order: Vec<StackId> = Vec::new();
        let mut stack_numbers: Vec<Option<StackId>> = vec![None; self.stacks.len()];
        let mut stack = |stack: &mut Option<StackId>| {
            if let Some(StackId(old)) = *stack {
                let new = stack_numbers[old as usize].get_or_insert_with(|| {
                    order.push(StackId(old));
                    StackId(order.len() as u32 - 1)
                });
                *stack = Some(*new);
            }
        };
        let mut of_segments = |segments: &mut [SegmentInfo]| {
            for segment in segments {
                stack(&mut segment.stack);
                segment.blocks.iter_mut().for_each(|block| stack(&mut block.stack));
            }
        };
        of_segments(&mut snapshot.segments);
        of_segments(snapshot.host_segments.as_deref_mut().unwrap_or_default());
        for entry in snapshot.traces.iter_mut().chain(&mut snapshot.host_traces).flatten() {
            text(&mut entry.compile_context);
            text(&mut entry.user_metadata);
            stack(&mut entry.stack);
            stack(&mut entry.forward_stack);
        }
        snapshot.texts = texts;
        snapshot.stacks = self.stacks.spelled_out(&order, &self.texts)?;
        Ok(())
    }
}
