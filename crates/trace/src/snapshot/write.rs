//! Writes a snapshot as PyTorch does: the same keys in the same order, as a pickle of protocol 2.
//! Every reader of snapshots accepts protocol 2: Python's pickle without PyTorch, and the viewers.
//! Texts and call stacks are written once and then referred to through the memo; nothing else is in the memo.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};

use warpool::memory::{
    Action, Annotation, BlockInfo, MemPoolId, RecordedSettings, SegmentInfo, Snapshot, StackId, TraceEntry,
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
        self.end_dict()
    }

    fn segment(&mut self, segment: &'s SegmentInfo) -> io::Result<()> {
        self.begin_dict()?;
        self.key(Keyword::Device)?;
        self.int(segment.device.into())?;
        for (key, value) in [
            (Keyword::Address, segment.address),
            (Keyword::TotalSize, segment.total_size),
            (Keyword::AllocatedSize, segment.allocated_size),
            (Keyword::ActiveSize, segment.active_size),
            (Keyword::RequestedSize, segment.requested_size),
            (Keyword::Stream, segment.stream),
        ] {
            self.key(key)?;
            self.int(value.into())?;
        }
        self.key(Keyword::SegmentType)?;
        self.text(segment.kind.name())?;
        self.key(Keyword::SegmentPoolId)?;
        self.pool(segment.pool)?;
        self.key(Keyword::IsExpandable)?;
        self.bool(segment.is_expandable)?;
        self.key(Keyword::Frames)?;
        self.stack(segment.stack)?;
        self.key(Keyword::Blocks)?;
        self.list(&segment.blocks, Self::block)?;
        self.end_dict()
    }

    fn block(&mut self, block: &'s BlockInfo) -> io::Result<()> {
        self.begin_dict()?;
        self.key(Keyword::Address)?;
        self.int(block.address.into())?;
        self.key(Keyword::Size)?;
        self.int(block.size.into())?;
        self.key(Keyword::RequestedSize)?;
        self.int(block.requested_size.into())?;
        self.key(Keyword::State)?;
        self.text(block.state.name())?;
        self.key(Keyword::Frames)?;
        self.stack(block.stack)?;
        self.end_dict()
    }

    fn entry(&mut self, entry: &'s TraceEntry) -> io::Result<()> {
        let texts = &self.snapshot.texts;
        self.begin_dict()?;
        self.key(Keyword::Action)?;
        self.text(entry.action.name())?;
        self.key(if entry.action == Action::Oom { Keyword::DeviceFree } else { Keyword::Addr })?;
        self.int(entry.addr.into())?;
        self.key(Keyword::Size)?;
        self.int(entry.size.into())?;
        self.key(Keyword::Stream)?;
        self.int(entry.stream.into())?;
        self.key(Keyword::TimeUs)?;
        self.int(entry.time_us.into())?;
        self.key(Keyword::CompileContext)?;
        self.text(entry.compile_context.map_or(Keyword::NotApplicable.text(), |text| texts.get(text)))?;
        self.key(Keyword::UserMetadata)?;
        self.text(entry.user_metadata.map_or(Keyword::Empty.text(), |text| texts.get(text)))?;
        if let Some(pool) = entry.pool {
            self.key(Keyword::PoolId)?;
            self.pool(pool)?;
        }
        for (key, stack) in [(Keyword::Frames, entry.stack), (Keyword::ForwardFrames, entry.forward_stack)] {
            if stack.is_some() {
                self.key(key)?;
                self.stack(stack)?;
            }
        }
        self.end_dict()
    }

    fn settings(&mut self, settings: &'s RecordedSettings) -> io::Result<()> {
        self.begin_dict()?;
        if let Some(conf) = &settings.conf {
            self.key(Keyword::Conf)?;
            self.text(conf)?;
        }
        self.optional_int(Keyword::MaxSplitSize, settings.max_split_size)?;
        if let Some(threshold) = settings.garbage_collection_threshold {
            self.key(Keyword::GarbageCollectionThreshold)?;
            self.out.write_all(&[op::BINFLOAT])?;
            self.out.write_all(&threshold.to_be_bytes())?;
        }
        self.optional_bool(Keyword::ExpandableSegments, settings.expandable_segments)?;
        self.optional_int(Keyword::PinnedNumRegisterThreads, settings.pinned_num_register_threads)?;
        self.optional_bool(Keyword::ReleaseLockOnCudamalloc, settings.release_lock_on_cudamalloc)?;
        self.optional_bool(Keyword::PinnedUseCudaHostRegister, settings.pinned_use_cuda_host_register)?;
        self.optional_bool(Keyword::GraphCaptureRecordStreamReuse, settings.graph_capture_record_stream_reuse)?;
        self.optional_int(Keyword::MaxRoundThreshold, settings.max_round_threshold)?;
        self.optional_int(Keyword::MaxCachedSize, settings.max_cached_size)?;
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
        self.begin_dict()?;
        self.key(Keyword::Stage)?;
        self.text(&annotation.stage)?;
        self.key(Keyword::Name)?;
        self.text(&annotation.name)?;
        self.key(Keyword::Device)?;
        self.int(annotation.device.into())?;
        self.key(Keyword::TimeUs)?;
        self.int(annotation.time_us.into())?;
        self.end_dict()
    }

    /// A list of frames; one list object per stack.
    fn stack(&mut self, stack: Option<StackId>) -> io::Result<()> {
        let Some(StackId(number)) = stack else { return self.out.write_all(&[op::EMPTY_LIST]) };
        if let Some(object) = self.stacks[number as usize] {
            return self.get_from_memo(object);
        }
        let snapshot = self.snapshot;
        self.list(&snapshot.stacks[number as usize], |pickler, frame| {
            pickler.begin_dict()?;
            pickler.key(Keyword::Name)?;
            pickler.text(&frame.name)?;
            pickler.key(Keyword::Filename)?;
            pickler.text(&frame.filename)?;
            pickler.key(Keyword::Line)?;
            pickler.int(frame.line.into())?;
            pickler.end_dict()
        })?;
        self.stacks[number as usize] = Some(self.memoize()?);
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

    fn optional_int(&mut self, key: Keyword, value: Option<i64>) -> io::Result<()> {
        let Some(value) = value else { return Ok(()) };
        self.key(key)?;
        self.int(value.into())
    }

    fn optional_bool(&mut self, key: Keyword, value: Option<bool>) -> io::Result<()> {
        let Some(value) = value else { return Ok(()) };
        self.key(key)?;
        self.bool(value)
    }

    fn bool(&mut self, value: bool) -> io::Result<()> {
        self.out.write_all(&[if value { op::NEWTRUE } else { op::NEWFALSE }])
    }

    fn pool(&mut self, pool: MemPoolId) -> io::Result<()> {
        self.int(pool.graph.into())?;
        self.int(pool.user.into())?;
        self.out.write_all(&[op::TUPLE2])
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
