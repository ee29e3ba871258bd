//! Writes a snapshot as PyTorch does: the same keys in the same order, as a pickle of protocol 2.
//! Every reader of snapshots accepts protocol 2: Python's pickle without PyTorch, and the viewers.
//! Texts and call stacks are written once and then referred to through the memo; nothing else is in the memo.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};

use warpool::memory::MemPoolId;
use warpool::memory::report::{
    Action, Annotation, BlockInfo, DeviceAccount, RecordedSettings, SegmentInfo, Snapshot, StackId, TraceEntry,
};

use super::schema::Keyword;
use crate::pickle::opcode as op;

/// Elements per APPENDS, which a reader keeps on its stack; as in Python's pickler.
const BATCH: usize = 1000;

/// Writes a snapshot in the format of `torch.cuda.memory._dump_snapshot`.
///
/// # Errors
/// Those of the writer.
///
/// # Panics
/// If an entry refers to a text or stack that the snapshot does not have.
pub fn write_snapshot(snapshot: &Snapshot, writer: impl Write) -> io::Result<()> {
    let mut pickler = Pickler {
        out: BufWriter::with_capacity(64 << 10, writer),
        snapshot,
        memo_length: 0,
        texts: HashMap::new(),
        stacks: vec![None; snapshot.stacks.len()],
    };
    pickler.out.write_all(&[op::PROTO, 2])?;
    pickler.root()?;
    pickler.out.write_all(&[op::STOP])?;
    pickler.out.flush()
}

struct Pickler<'s, W: Write> {
    out: BufWriter<W>,
    snapshot: &'s Snapshot,
    /// Objects in the reader's memo.
    memo_length: u32,
    texts: HashMap<&'s str, u32>,
    stacks: Vec<Option<u32>>,
}

/// The value of a field.
#[derive(Clone, Copy)]
enum Value<'s> {
    Int(i128),
    Bool(bool),
    Float(f64),
    Text(&'s str),
    Pool(MemPoolId),
    Stack(Option<StackId>),
}

impl<'s, W: Write> Pickler<'s, W> {
    fn root(&mut self) -> io::Result<()> {
        let snapshot = self.snapshot;
        self.begin_dict()?;
        self.key(Keyword::Segments)?;
        self.list(&snapshot.segments, Self::segment)?;
        self.key(Keyword::DeviceTraces)?;
        self.list(&snapshot.traces, |pickler, trace| pickler.list(trace, Self::entry))?;
        self.key(Keyword::AllocatorSettings)?;
        self.settings(&snapshot.settings)?;
        self.key(Keyword::ExternalAnnotations)?;
        self.list(&snapshot.annotations, Self::annotation)?;
        if let Some(segments) = &snapshot.host_segments {
            self.key(Keyword::HostSegments)?;
            self.list(segments, Self::segment)?;
        }
        if let Some(trace) = &snapshot.host_traces {
            self.key(Keyword::HostTraces)?;
            self.list(trace, Self::entry)?;
        }
        if !snapshot.accounts.is_empty() {
            self.key(Keyword::WarpoolAccount)?;
            self.accounts(&snapshot.accounts)?;
        }
        self.end_dict()
    }

    /// Rows, each with its device, in one list: readers that do not know it see plain dicts.
    fn accounts(&mut self, accounts: &'s [DeviceAccount]) -> io::Result<()> {
        self.out.write_all(&[op::EMPTY_LIST, op::MARK])?;
        for account in accounts {
            let of_device = [
                (Keyword::Device, Value::Int(account.device.into())),
                (Keyword::TotalBytes, Value::Int(account.total.into())),
                (Keyword::UsedBytes, Value::Int(account.used.into())),
            ];
            for row in &account.rows {
                self.begin_dict()?;
                self.fields(of_device)?;
                self.fields([
                    (Keyword::Owner, Value::Text(&row.owner)),
                    (Keyword::What, Value::Text(&row.what)),
                    (Keyword::Bytes, Value::Int(row.bytes.into())),
                    (Keyword::KnownBy, Value::Text(&row.known_by)),
                ])?;
                self.end_dict()?;
            }
            for remark in &account.remarks {
                self.begin_dict()?;
                self.fields(of_device)?;
                self.fields([(Keyword::Remark, Value::Text(remark))])?;
                self.end_dict()?;
            }
        }
        self.out.write_all(&[op::APPENDS])
    }

    fn segment(&mut self, segment: &'s SegmentInfo) -> io::Result<()> {
        self.begin_dict()?;
        self.fields([
            (Keyword::Device, Value::Int(segment.device.into())),
            (Keyword::Address, Value::Int(segment.address.into())),
            (Keyword::TotalSize, Value::Int(segment.total_size.into())),
            (Keyword::AllocatedSize, Value::Int(segment.allocated_size.into())),
            (Keyword::ActiveSize, Value::Int(segment.active_size.into())),
            (Keyword::RequestedSize, Value::Int(segment.requested_size.into())),
            (Keyword::Stream, Value::Int(segment.stream.into())),
            (Keyword::SegmentType, Value::Text(segment.kind.name())),
            (Keyword::SegmentPoolId, Value::Pool(segment.pool)),
            (Keyword::IsExpandable, Value::Bool(segment.is_expandable)),
            (Keyword::Frames, Value::Stack(segment.stack)),
        ])?;
        if segment.is_elastic {
            self.fields([(Keyword::IsElastic, Value::Bool(true))])?;
        }
        self.key(Keyword::Blocks)?;
        self.list(&segment.blocks, Self::block)?;
        self.end_dict()
    }

    fn block(&mut self, block: &'s BlockInfo) -> io::Result<()> {
        self.dict([
            (Keyword::Address, Value::Int(block.address.into())),
            (Keyword::Size, Value::Int(block.size.into())),
            (Keyword::RequestedSize, Value::Int(block.requested_size.into())),
            (Keyword::State, Value::Text(block.state.name())),
            (Keyword::Frames, Value::Stack(block.stack)),
        ])
    }

    fn entry(&mut self, entry: &'s TraceEntry) -> io::Result<()> {
        let texts = &self.snapshot.texts;
        let text = |text: Option<_>, absent: Keyword| Value::Text(text.map_or(absent.text(), |text| texts.get(text)));
        let addr = if entry.action == Action::Oom { Keyword::DeviceFree } else { Keyword::Addr };
        self.begin_dict()?;
        self.fields([
            (Keyword::Action, Value::Text(entry.action.name())),
            (addr, Value::Int(entry.addr.into())),
            (Keyword::Size, Value::Int(entry.size.into())),
            (Keyword::Stream, Value::Int(entry.stream.into())),
            (Keyword::TimeUs, Value::Int(entry.time_us.into())),
            (Keyword::CompileContext, text(entry.compile_context, Keyword::NotApplicable)),
            (Keyword::UserMetadata, text(entry.user_metadata, Keyword::Empty)),
        ])?;
        self.optional_fields([
            (Keyword::PoolId, entry.pool.map(Value::Pool)),
            (Keyword::Frames, entry.stack.map(|stack| Value::Stack(Some(stack)))),
            (Keyword::ForwardFrames, entry.forward_stack.map(|stack| Value::Stack(Some(stack)))),
        ])?;
        self.end_dict()
    }

    fn settings(&mut self, settings: &'s RecordedSettings) -> io::Result<()> {
        let int = |value: Option<i64>| value.map(|value| Value::Int(value.into()));
        let bool = |value: Option<bool>| value.map(Value::Bool);
        self.begin_dict()?;
        self.optional_fields([
            (Keyword::Conf, settings.conf.as_deref().map(Value::Text)),
            (Keyword::MaxSplitSize, int(settings.max_split_size)),
            (Keyword::GarbageCollectionThreshold, settings.garbage_collection_threshold.map(Value::Float)),
            (Keyword::ExpandableSegments, bool(settings.expandable_segments)),
            (Keyword::PinnedNumRegisterThreads, int(settings.pinned_num_register_threads)),
            (Keyword::ReleaseLockOnCudamalloc, bool(settings.release_lock_on_cudamalloc)),
            (Keyword::PinnedUseCudaHostRegister, bool(settings.pinned_use_cuda_host_register)),
            (Keyword::GraphCaptureRecordStreamReuse, bool(settings.graph_capture_record_stream_reuse)),
            (Keyword::MaxRoundThreshold, int(settings.max_round_threshold)),
            (Keyword::MaxCachedSize, int(settings.max_cached_size)),
        ])?;
        if let Some(divisions) = &settings.roundup_power2_divisions {
            self.key(Keyword::RoundupPower2Divisions)?;
            self.begin_dict()?;
            for (size, division) in divisions {
                self.text(size)?;
                self.int((*division).into())?;
            }
            self.end_dict()?;
        }
        self.end_dict()
    }

    fn annotation(&mut self, annotation: &'s Annotation) -> io::Result<()> {
        self.dict([
            (Keyword::Stage, Value::Text(&annotation.stage)),
            (Keyword::Name, Value::Text(&annotation.name)),
            (Keyword::Device, Value::Int(annotation.device.into())),
            (Keyword::TimeUs, Value::Int(annotation.time_us.into())),
        ])
    }

    /// A list of frames; one list object per stack.
    fn stack(&mut self, stack: Option<StackId>) -> io::Result<()> {
        let Some(number) = stack.map(StackId::index) else { return self.out.write_all(&[op::EMPTY_LIST]) };
        if let Some(object) = self.stacks[number] {
            return self.get_from_memo(object);
        }
        let snapshot = self.snapshot;
        self.list(&snapshot.stacks[number], |pickler, frame| {
            pickler.dict([
                (Keyword::Name, Value::Text(&frame.name)),
                (Keyword::Filename, Value::Text(&frame.filename)),
                (Keyword::Line, Value::Int(frame.line.into())),
            ])
        })?;
        self.stacks[number] = Some(self.memoize()?);
        Ok(())
    }

    fn dict<const N: usize>(&mut self, fields: [(Keyword, Value<'s>); N]) -> io::Result<()> {
        self.begin_dict()?;
        self.fields(fields)?;
        self.end_dict()
    }

    fn fields<const N: usize>(&mut self, fields: [(Keyword, Value<'s>); N]) -> io::Result<()> {
        self.optional_fields(fields.map(|(key, value)| (key, Some(value))))
    }

    /// Those that have a value.
    fn optional_fields<const N: usize>(&mut self, fields: [(Keyword, Option<Value<'s>>); N]) -> io::Result<()> {
        for (key, value) in fields {
            let Some(value) = value else { continue };
            self.key(key)?;
            match value {
                Value::Int(value) => self.int(value)?,
                Value::Bool(value) => self.out.write_all(&[if value { op::NEWTRUE } else { op::NEWFALSE }])?,
                Value::Float(value) => {
                    self.out.write_all(&[op::BINFLOAT])?;
                    self.out.write_all(&value.to_be_bytes())?;
                }
                Value::Text(text) => self.text(text)?,
                Value::Pool(pool) => {
                    self.int(pool.graph.into())?;
                    self.int(pool.user.into())?;
                    self.out.write_all(&[op::TUPLE2])?;
                }
                Value::Stack(stack) => self.stack(stack)?,
            }
        }
        Ok(())
    }

    fn begin_dict(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::EMPTY_DICT, op::MARK])
    }

    fn end_dict(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::SETITEMS])
    }

    fn list<T>(&mut self, items: &'s [T], write: impl Fn(&mut Self, &'s T) -> io::Result<()>) -> io::Result<()> {
        self.out.write_all(&[op::EMPTY_LIST])?;
        for batch in items.chunks(BATCH) {
            self.out.write_all(&[op::MARK])?;
            for item in batch {
                write(self, item)?;
            }
            self.out.write_all(&[op::APPENDS])?;
        }
        Ok(())
    }

    fn key(&mut self, key: Keyword) -> io::Result<()> {
        self.text(key.text())
    }

    fn text(&mut self, text: &'s str) -> io::Result<()> {
        if let Some(&object) = self.texts.get(text) {
            return self.get_from_memo(object);
        }
        let length = u32::try_from(text.len()).map_err(io::Error::other)?;
        self.out.write_all(&[op::BINUNICODE])?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(text.as_bytes())?;
        let object = self.memoize()?;
        self.texts.insert(text, object);
        Ok(())
    }

    /// An integer in its shortest form.
    fn int(&mut self, value: i128) -> io::Result<()> {
        if let Ok(value) = u8::try_from(value) {
            self.out.write_all(&[op::BININT1, value])
        } else if let Ok(value) = u16::try_from(value) {
            self.out.write_all(&[op::BININT2])?;
            self.out.write_all(&value.to_le_bytes())
        } else if let Ok(value) = i32::try_from(value) {
            self.out.write_all(&[op::BININT])?;
            self.out.write_all(&value.to_le_bytes())
        } else {
            // Two's complement, in as few bytes as keep the sign.
            let significant = 128 - if value < 0 { value.leading_ones() } else { value.leading_zeros() };
            let length = significant as usize / 8 + 1;
            self.out.write_all(&[op::LONG1, length as u8])?;
            self.out.write_all(&value.to_le_bytes()[..length])
        }
    }

    /// Puts the last object into the reader's memo. Returns its number.
    fn memoize(&mut self) -> io::Result<u32> {
        let object = self.memo_length;
        self.memo_length += 1;
        match u8::try_from(object) {
            Ok(object) => self.out.write_all(&[op::BINPUT, object])?,
            Err(_) => {
                self.out.write_all(&[op::LONG_BINPUT])?;
                self.out.write_all(&object.to_le_bytes())?;
            }
        }
        Ok(object)
    }

    /// Refers to an object in the memo.
    fn get_from_memo(&mut self, object: u32) -> io::Result<()> {
        match u8::try_from(object) {
            Ok(object) => self.out.write_all(&[op::BINGET, object]),
            Err(_) => {
                self.out.write_all(&[op::LONG_BINGET])?;
                self.out.write_all(&object.to_le_bytes())
            }
        }
    }
}
