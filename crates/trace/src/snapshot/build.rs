//! Takes the containers of a pickle as they are filled, and keeps what a snapshot needs of them.
//! One arena per kind; containers refer to one another by number. Lists are taken over once: a pickle that refers to
//! one list from many places could otherwise ask for any amount of memory.

use warpool::memory::{BlockInfo, RecordedSettings, SegmentInfo, TraceEntry};

use super::record::{AnnotationDraft, BlockDraft, PastDraft, SegmentDraft};
use super::stacks::Stacks;
use super::texts::TextTable;
use crate::Known;
use crate::pickle::{DictKind, ListKind, Value};

/// What is wrong with a container, and where inside it.
#[derive(Debug)]
pub(crate) struct Wrong {
    /// The rest of the path, as in `.blocks[2]`; often empty.
    pub(crate) inside: String,
    pub(crate) what: String,
}

impl Wrong {
    pub(super) fn new(what: impl Into<String>) -> Self {
        Self { inside: String::new(), what: what.into() }
    }

    pub(super) fn missing(key: &str) -> Self {
        Self::new(format!("the key `{key}` is missing"))
    }

    pub(super) fn within(mut self, place: &str) -> Self {
        self.inside.insert_str(0, place);
        self
    }
}

/// All that has been seen of a snapshot.
pub(crate) struct Builder {
    pub(crate) texts: TextTable,
    pub(super) stacks: Stacks,
    pub(super) known: Known,

    pub(super) root: RootDraft,
    pub(super) entries: Vec<TraceEntry>,
    /// Which keys each entry has.
    pub(super) entries_seen: Vec<u8>,
    pub(super) segments: Vec<SegmentDraft>,
    pub(super) blocks: Vec<BlockDraft>,
    pub(super) pasts: Vec<PastDraft>,
    pub(super) settings: Vec<RecordedSettings>,
    pub(super) divisions: Vec<Vec<(String, i64)>>,
    pub(super) annotations: Vec<AnnotationDraft>,

    pub(super) segment_lists: Vec<Once<SegmentInfo>>,
    pub(super) block_lists: Vec<Once<BlockInfo>>,
    pub(super) history_lists: Vec<Option<u32>>,
    pub(super) traces_lists: Vec<Once<u32>>,
    pub(super) trace_lists: Vec<TraceList>,
    pub(super) annotation_lists: Vec<Once<u32>>,
}

/// The lists and dicts of the whole, by number.
#[derive(Default)]
pub(super) struct RootDraft {
    pub(super) segments: Option<Vec<SegmentInfo>>,
    pub(super) host_segments: Option<Vec<SegmentInfo>>,
    pub(super) traces: Option<Vec<u32>>,
    pub(super) host_trace: Option<u32>,
    pub(super) settings: Option<u32>,
    pub(super) annotations: Vec<u32>,
}

/// A list that one holder may take.
pub(super) struct Once<T> {
    items: Vec<T>,
    taken: bool,
}

impl<T> Once<T> {
    fn new() -> Self {
        Self { items: Vec::new(), taken: false }
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// What is in it. An empty list may be shared.
    pub(super) fn take(&mut self) -> Result<Vec<T>, Wrong> {
        if self.taken {
            return Err(Wrong::new("it refers to a list that belongs to another place"));
        }
        self.taken = !self.items.is_empty();
        Ok(std::mem::take(&mut self.items))
    }

    fn push(&mut self, item: T) -> Result<(), Wrong> {
        if self.taken {
            return Err(Wrong::new("the list grows after it was used"));
        }
        self.items.push(item);
        Ok(())
    }
}

/// A trace: numbers of entries, nearly always one run of them.
#[derive(Default)]
pub(super) struct TraceList {
    pub(super) runs: Vec<std::ops::Range<u32>>,
    pub(super) length: usize,
    pub(super) taken: bool,
}

impl TraceList {
    /// Marks it as used. An empty one may be shared.
    fn take(&mut self) -> Result<(), Wrong> {
        if self.taken {
            return Err(Wrong::new("it refers to a trace that belongs to another place"));
        }
        self.taken = self.length > 0;
        Ok(())
    }

    fn push(&mut self, entry: u32) {
        match self.runs.last_mut() {
            Some(run) if run.end == entry => run.end += 1,
            _ => self.runs.push(entry..entry + 1),
        }
        self.length += 1;
    }
}

/// Puts a new item into an arena. Returns its number.
fn add<T>(arena: &mut Vec<T>, item: T) -> Result<u32, Wrong> {
    // The last number is never given, so that a run of entries can end behind any of them.
    let number = u32::try_from(arena.len()).ok().filter(|&number| number < u32::MAX);
    let number = number.ok_or_else(|| Wrong::new("too many objects for one recording"))?;
    arena.push(item);
    Ok(number)
}

impl Builder {
    /// An empty one. `stacks` says whether call stacks are kept.
    pub(crate) fn new(stacks: bool) -> Self {
        Self {
            texts: TextTable::new(),
            stacks: Stacks::new(stacks),
            known: Known::EVERYTHING,
            root: RootDraft::default(),
            entries: Vec::new(),
            entries_seen: Vec::new(),
            segments: Vec::new(),
            blocks: Vec::new(),
            pasts: Vec::new(),
            settings: Vec::new(),
            divisions: Vec::new(),
            annotations: Vec::new(),
            segment_lists: Vec::new(),
            block_lists: Vec::new(),
            history_lists: Vec::new(),
            traces_lists: Vec::new(),
            trace_lists: Vec::new(),
            annotation_lists: Vec::new(),
        }
    }

    pub(crate) fn keeps_stacks(&self) -> bool {
        self.stacks.kept()
    }

    /// A new, empty dict. Returns its number.
    #[inline]
    pub(crate) fn open_dict(&mut self, kind: DictKind) -> Result<u32, Wrong> {
        match kind {
            DictKind::Entry => {
                self.entries_seen.push(0);
                add(&mut self.entries, super::record::BLANK_ENTRY)
            }
            DictKind::Segment => add(&mut self.segments, SegmentDraft::default()),
            DictKind::Block => add(&mut self.blocks, BlockDraft::default()),
            DictKind::Past => add(&mut self.pasts, PastDraft::default()),
            DictKind::Frame => self.stacks.open_frame(),
            DictKind::Settings => add(&mut self.settings, RecordedSettings::default()),
            DictKind::Divisions => add(&mut self.divisions, Vec::new()),
            DictKind::Annotation => add(&mut self.annotations, AnnotationDraft::default()),
            DictKind::Root | DictKind::Skipped => Ok(0),
        }
    }

    /// A new, empty list. Returns its number.
    pub(crate) fn open_list(&mut self, kind: ListKind) -> Result<u32, Wrong> {
        match kind {
            ListKind::Segments => add(&mut self.segment_lists, Once::new()),
            ListKind::Blocks => add(&mut self.block_lists, Once::new()),
            ListKind::History => add(&mut self.history_lists, None),
            ListKind::Traces => add(&mut self.traces_lists, Once::new()),
            ListKind::Trace => add(&mut self.trace_lists, TraceList::default()),
            ListKind::Frames => self.stacks.open_list(),
            ListKind::Annotations => add(&mut self.annotation_lists, Once::new()),
            ListKind::Skipped => Ok(0),
        }
    }

    /// Adds keys and values, in turns, to a dict. Unknown keys are ignored.
    #[inline]
    pub(crate) fn set_items(&mut self, kind: DictKind, number: u32, pairs: &[Value]) -> Result<(), Wrong> {
        if kind == DictKind::Skipped {
            return Ok(());
        }
        if kind == DictKind::Entry {
            return self.set_entry(number, pairs);
        }
        for pair in pairs.chunks_exact(2) {
            let (Value::Text(key), value) = (pair[0], pair[1]) else { continue };
            self.set(kind, number, key, value).map_err(|wrong| match wrong.inside.is_empty() {
                true => Wrong::new(format!("`{}`: {}", self.texts.short(key), wrong.what)),
                false => wrong,
            })?;
        }
        Ok(())
    }

    /// Adds values to a list.
    pub(crate) fn append(&mut self, kind: ListKind, number: u32, values: &[Value]) -> Result<(), Wrong> {
        if kind == ListKind::Skipped {
            return Ok(());
        }
        for &value in values {
            let length = self.length(kind, number);
            self.push(kind, number, value).map_err(|wrong| wrong.within(&format!("[{length}]")))?;
        }
        Ok(())
    }

    #[inline]
    fn push(&mut self, kind: ListKind, number: u32, value: Value) -> Result<(), Wrong> {
        let place = number as usize;
        match (kind, value) {
            (ListKind::Trace, Value::Dict(DictKind::Entry, entry)) => {
                self.check_entry(entry)?;
                let list = &mut self.trace_lists[place];
                if list.taken {
                    return Err(Wrong::new("the trace grows after it was used"));
                }
                list.push(entry);
                Ok(())
            }
            (ListKind::Traces, Value::List(ListKind::Trace, trace)) => {
                self.trace_lists[trace as usize].take()?;
                self.traces_lists[place].push(trace)
            }
            (ListKind::Trace, Value::List(ListKind::Trace, part)) => {
                self.trace_lists[part as usize].take()?;
                let part = std::mem::take(&mut self.trace_lists[part as usize].runs);
                part.into_iter().flatten().for_each(|entry| self.trace_lists[place].push(entry));
                Ok(())
            }
            (ListKind::Segments, Value::Dict(DictKind::Segment, segment)) => {
                let draft = &mut self.segments[segment as usize];
                self.known.segment_pools &= draft.pool.is_some();
                let segment = draft.take()?;
                self.segment_lists[place].push(segment)
            }
            (ListKind::Blocks, Value::Dict(DictKind::Block, block)) => {
                let draft = &self.blocks[block as usize];
                self.known.block_addresses &= draft.address.is_some();
                self.known.requested_sizes &= draft.requested_size.is_some();
                let block = self.complete_block(draft)?;
                self.block_lists[place].push(block)
            }
            (ListKind::History, Value::Dict(DictKind::Past, past)) => {
                // The first tells of the block as it is now.
                self.history_lists[place].get_or_insert(past);
                Ok(())
            }
            (ListKind::Frames, Value::Dict(DictKind::Frame, frame)) => self.stacks.push(number, frame),
            (ListKind::Annotations, Value::Dict(DictKind::Annotation, annotation)) => {
                self.annotation_lists[place].push(annotation)
            }
            (_, Value::Dict(..) | Value::List(..)) => Err(Wrong::new(SHARED)),
            _ => Err(Wrong::new(format!("expected a dict or list as the others, found {}", value.describe()))),
        }
    }

    /// Whether it is a list without elements, which may stand for any other such.
    pub(super) fn is_empty_list(&self, value: Value) -> bool {
        match value {
            Value::List(ListKind::Skipped, _) => false,
            Value::List(kind, number) => self.length(kind, number) == 0,
            _ => false,
        }
    }

    /// How long a list is.
    pub(crate) fn length(&self, kind: ListKind, number: u32) -> usize {
        let place = number as usize;
        match kind {
            ListKind::Segments => self.segment_lists[place].len(),
            ListKind::Blocks => self.block_lists[place].len(),
            ListKind::History => usize::from(self.history_lists[place].is_some()),
            ListKind::Traces => self.traces_lists[place].len(),
            ListKind::Trace => self.trace_lists[place].length,
            ListKind::Frames => self.stacks.length(number),
            ListKind::Annotations => self.annotation_lists[place].len(),
            ListKind::Skipped => 0,
        }
    }
}

/// A container that was made for another place.
pub(super) const SHARED: &str =
    "a container of another kind is expected here, or it is shared with a part that is not read";
