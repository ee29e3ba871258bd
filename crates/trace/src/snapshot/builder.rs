//! Builds a snapshot from the containers of a pickle, as they are filled.
//! There is one arena per kind of container; containers refer to one another by number.

use warpool::memory::report::{RecordedSettings, SegmentInfo, Snapshot, Texts};

use super::accounts::{self, AccountDraft};
use super::annotations::{self, AnnotationDraft};
use super::entries::Entries;
use super::fields::RecordedFields;
use super::invalid::Invalid;
use super::lists::{EntryList, Lists, add};
use super::renumber::renumber;
use super::schema::Keyword;
use super::segments::{BlockDraft, BlockHistoryDraft, SegmentDraft};
use super::settings::{self, Divisions};
use super::texts::TextTable;
use crate::budget::Budget;
use crate::pickle::{DictKind, ListKind, Value};

/// A snapshot while its pickle is read.
pub(crate) struct Builder {
    texts: TextTable,
    lists: Lists,
    entries: Entries,
    segments: Vec<SegmentDraft>,
    blocks: Vec<BlockDraft>,
    block_histories: Vec<BlockHistoryDraft>,
    settings: Vec<RecordedSettings>,
    divisions: Vec<Divisions>,
    annotations: Vec<AnnotationDraft>,
    accounts: Vec<AccountDraft>,
    root: RootDraft,
    fields: RecordedFields,
    budget: Budget,
}

/// The keys of the root that were read; containers by number.
#[derive(Default)]
struct RootDraft {
    segments: Option<Vec<SegmentInfo>>,
    host_segments: Option<Vec<SegmentInfo>>,
    traces: Option<Vec<u32>>,
    host_trace: Option<u32>,
    settings: Option<u32>,
    annotations: Vec<u32>,
    accounts: Vec<u32>,
}

impl Builder {
    pub(crate) fn new(keeps_stacks: bool, budget: &Budget) -> Self {
        Self {
            texts: TextTable::new(budget),
            lists: Lists::new(keeps_stacks, budget),
            entries: Entries::new(budget),
            segments: Vec::new(),
            blocks: Vec::new(),
            block_histories: Vec::new(),
            settings: Vec::new(),
            divisions: Vec::new(),
            annotations: Vec::new(),
            accounts: Vec::new(),
            root: RootDraft::default(),
            fields: RecordedFields::ALL,
            budget: budget.clone(),
        }
    }

    /// Whether call stacks are read.
    pub(crate) fn keeps_stacks(&self) -> bool {
        self.lists.stacks.is_kept()
    }

    /// The number of a text, or what is wrong with its bytes.
    #[inline]
    pub(crate) fn intern(&mut self, bytes: &[u8]) -> Result<u32, &'static str> {
        self.texts.intern_bytes(bytes)
    }

    /// The text of that number, for messages.
    pub(crate) fn shortened_text(&self, number: u32) -> String {
        self.texts.shortened(number)
    }

    /// The length of a list.
    pub(crate) fn length(&self, kind: ListKind, number: u32) -> usize {
        self.lists.length(kind, number)
    }

    /// A new, empty dict. Returns its number.
    #[inline]
    pub(crate) fn open_dict(&mut self, kind: DictKind) -> Result<u32, Invalid> {
        let budget = &self.budget;
        match kind {
            DictKind::Entry => self.entries.open(),
            DictKind::Segment => add(budget, &mut self.segments, SegmentDraft::default()),
            DictKind::Block => add(budget, &mut self.blocks, BlockDraft::default()),
            DictKind::BlockHistory => add(budget, &mut self.block_histories, BlockHistoryDraft::default()),
            DictKind::Frame => self.lists.stacks.open_frame(),
            DictKind::Settings => add(budget, &mut self.settings, RecordedSettings::default()),
            DictKind::Divisions => add(budget, &mut self.divisions, Vec::new()),
            DictKind::Annotation => add(budget, &mut self.annotations, AnnotationDraft::default()),
            DictKind::Account => add(budget, &mut self.accounts, AccountDraft::default()),
            DictKind::Root | DictKind::Skipped => Ok(0),
        }
    }

    /// A new, empty list. Returns its number.
    pub(crate) fn open_list(&mut self, kind: ListKind) -> Result<u32, Invalid> {
        self.lists.open(kind)
    }

    /// Adds keys and values, in turn, to a dict. Unknown keys are ignored.
    #[inline]
    pub(crate) fn set_items(&mut self, kind: DictKind, number: u32, pairs: &[Value]) -> Result<(), Invalid> {
        if kind == DictKind::Skipped {
            return Ok(());
        }
        if kind == DictKind::Entry {
            return self.entries.set(number, pairs, &self.texts, &mut self.lists);
        }
        for pair in pairs.chunks_exact(2) {
            let (Value::Text(key), value) = (pair[0], pair[1]) else { continue };
            self.set(kind, number, key, value).map_err(|invalid| invalid.of_key(&self.texts.shortened(key)))?;
        }
        Ok(())
    }

    /// Appends values to a list.
    pub(crate) fn append(&mut self, kind: ListKind, number: u32, values: &[Value]) -> Result<(), Invalid> {
        if kind == ListKind::Skipped {
            return Ok(());
        }
        for &value in values {
            if let Err(invalid) = self.push(kind, number, value) {
                return Err(invalid.within(&format!("[{}]", self.length(kind, number))));
            }
        }
        Ok(())
    }

    /// The snapshot with `root` as its root, and which fields it has.
    pub(crate) fn finish(mut self, root: Value) -> Result<(Snapshot, RecordedFields), Invalid> {
        match root {
            Value::Dict(DictKind::Root, _) => {}
            Value::List(ListKind::Segments, list) => {
                self.root.segments = Some(self.lists.segments[list as usize].take()?);
            }
            _ => {
                return Err(Invalid::unexpected("a dict with the key `segments`, or a list of segments", root));
            }
        }
        let Some(segments) = self.root.segments.take() else {
            return Err(Invalid::new("the key `segments` is missing: this pickle is not a memory snapshot"));
        };
        let annotations = annotations::complete(&self.root.annotations, &self.annotations, &self.texts, &self.budget)?;
        let accounts = accounts::complete(&self.root.accounts, &self.accounts, &self.texts, &self.budget)?;
        let mut fields = self.fields;
        fields.traces = self.root.traces.is_some();
        fields.times = self.entries.all_have_time();

        let devices = self.root.traces.take().unwrap_or_default();
        let host = self.root.host_trace;
        let traces: Vec<&EntryList> =
            devices.iter().chain(host.as_ref()).map(|&trace| &self.lists.traces[trace as usize]).collect();
        let mut traces = self.entries.into_traces(&traces)?;
        let host_traces = host.and_then(|_| traces.pop());
        fields.trace_pools = traces.iter().flatten().all(|entry| entry.pool.is_some());

        let settings = self.root.settings.map(|number| std::mem::take(&mut self.settings[number as usize]));
        let mut snapshot = Snapshot {
            segments,
            traces,
            settings: settings.unwrap_or_default(),
            annotations,
            host_segments: self.root.host_segments.take(),
            host_traces,
            accounts,
            texts: Texts::default(),
            stacks: Vec::new(),
        };
        renumber(&mut snapshot, &self.texts, &self.lists.stacks, &self.budget)?;
        Ok((snapshot, fields))
    }

    /// Sets one key of a dict.
    fn set(&mut self, kind: DictKind, number: u32, key: u32, value: Value) -> Result<(), Invalid> {
        let index = number as usize;
        let keyword = Keyword::of(key);
        match kind {
            DictKind::Root => self.set_root(keyword, value),
            DictKind::Segment => self.segments[index].set(keyword, value, &mut self.lists),
            DictKind::Block => self.blocks[index].set(keyword, value, &mut self.lists),
            DictKind::BlockHistory => self.block_histories[index].set(keyword, value, &mut self.lists),
            DictKind::Frame => self.lists.stacks.set(number, keyword, value),
            DictKind::Annotation => self.annotations[index].set(keyword, value),
            DictKind::Account => self.accounts[index].set(keyword, value),
            DictKind::Settings => {
                let Self { settings, texts, divisions, budget, .. } = self;
                settings::set(&mut settings[index], keyword, value, texts, divisions, budget)
            }
            DictKind::Divisions => {
                settings::set_division(&mut self.divisions[index], self.texts.get(key), value, &self.budget)
            }
            DictKind::Entry => self.entries.set(number, &[Value::Text(key), value], &self.texts, &mut self.lists),
            DictKind::Skipped => Ok(()),
        }
    }

    fn set_root(&mut self, key: Option<Keyword>, value: Value) -> Result<(), Invalid> {
        let (root, lists) = (&mut self.root, &mut self.lists);
        match (key, value) {
            (Some(Keyword::Segments), Value::List(ListKind::Segments, list)) => {
                root.segments = Some(lists.segments[list as usize].take()?);
            }
            (Some(Keyword::HostSegments), Value::List(ListKind::Segments, list)) => {
                root.host_segments = Some(lists.segments[list as usize].take()?);
            }
            (Some(Keyword::DeviceTraces), Value::List(ListKind::Traces, list)) => {
                root.traces = Some(lists.trace_lists[list as usize].take()?);
            }
            (Some(Keyword::HostTraces), Value::List(ListKind::Trace, list)) => root.host_trace = Some(list),
            (Some(Keyword::AllocatorSettings), Value::Dict(DictKind::Settings, dict)) => root.settings = Some(dict),
            (Some(Keyword::ExternalAnnotations), Value::List(ListKind::Annotations, list)) => {
                root.annotations = lists.annotations[list as usize].take()?;
            }
            (Some(Keyword::WarpoolAccount), Value::List(ListKind::Account, list)) => {
                root.accounts = lists.accounts[list as usize].take()?;
            }
            (Some(Keyword::Segments), _) if lists.is_empty_list(value) => root.segments = Some(Vec::new()),
            (Some(Keyword::HostSegments), _) if lists.is_empty_list(value) => root.host_segments = Some(Vec::new()),
            (Some(Keyword::DeviceTraces), _) if lists.is_empty_list(value) => root.traces = Some(Vec::new()),
            (Some(Keyword::ExternalAnnotations | Keyword::WarpoolAccount), _) if lists.is_empty_list(value) => {}
            // Without a host allocator these are None.
            (Some(Keyword::HostSegments | Keyword::HostTraces), Value::None) => {}
            (
                Some(
                    Keyword::Segments
                    | Keyword::DeviceTraces
                    | Keyword::AllocatorSettings
                    | Keyword::ExternalAnnotations
                    | Keyword::WarpoolAccount
                    | Keyword::HostSegments
                    | Keyword::HostTraces,
                ),
                _,
            ) => return Err(Invalid::container(value)),
            _ => {}
        }
        Ok(())
    }

    #[inline]
    fn push(&mut self, kind: ListKind, number: u32, value: Value) -> Result<(), Invalid> {
        let index = number as usize;
        let (lists, budget) = (&mut self.lists, &self.budget);
        match (kind, value) {
            (ListKind::Trace, Value::Dict(DictKind::Entry, entry)) => {
                self.entries.check(entry)?;
                lists.traces[index].push(budget, entry)
            }
            (ListKind::Traces, Value::List(ListKind::Trace, trace)) => {
                lists.traces[trace as usize].claim()?;
                lists.trace_lists[index].push(budget, trace)
            }
            (ListKind::Trace, Value::List(ListKind::Trace, part)) => {
                let runs = lists.traces[part as usize].take()?;
                Ok(runs.into_iter().try_for_each(|run| lists.traces[index].append(budget, run))?)
            }
            (ListKind::Segments, Value::Dict(DictKind::Segment, segment)) => {
                let draft = &mut self.segments[segment as usize];
                self.fields.segment_pools &= draft.has_pool();
                lists.segments[index].push(budget, draft.take()?)
            }
            (ListKind::Blocks, Value::Dict(DictKind::Block, block)) => {
                let draft = &self.blocks[block as usize];
                self.fields.block_addresses &= draft.has_address();
                self.fields.requested_sizes &= draft.has_requested_size();
                lists.blocks[index].push(budget, draft.complete(&self.block_histories)?)
            }
            (ListKind::BlockHistory, Value::Dict(DictKind::BlockHistory, history)) => {
                lists.block_histories[index].get_or_insert(history);
                Ok(())
            }
            (ListKind::Frames, Value::Dict(DictKind::Frame, frame)) => lists.stacks.append(number, frame),
            (ListKind::Annotations, Value::Dict(DictKind::Annotation, annotation)) => {
                lists.annotations[index].push(budget, annotation)
            }
            (ListKind::Account, Value::Dict(DictKind::Account, row)) => lists.accounts[index].push(budget, row),
            (ListKind::Pool, number) => lists.pools[index].push(number),
            _ => Err(Invalid::container(value)),
        }
    }
}
