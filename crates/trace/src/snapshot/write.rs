//! Writes a snapshot as PyTorch would: the same keys in the same order, as a pickle of protocol 2.
//! Protocol 2 is the oldest that every reader of snapshots takes: Python's pickle without PyTorch, and the viewers.
//! Texts and call stacks are written once and then referred to; nothing else is remembered.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};

use warpool::memory::{
    Action, Annotation, BlockInfo, MemPoolId, RecordedSettings, SegmentInfo, Snapshot, StackId, TraceEntry,
};

use super::schema::Word;
use crate::pickle::opcode as op;

/// Elements that wait on a reader's stack at once; Python's pickler has the same.
const BATCH: usize = 1000;

/// Writes a snapshot in the format of `torch.cuda.memory._dump_snapshot`.
///
/// # Errors
/// Those of the writer.
///
/// # Panics
/// If the snapshot names texts or stacks that it does not have.
pub fn write_snapshot(snapshot: &Snapshot, writer: impl Write) -> io::Result<()> {
    let mut pickler = Pickler {
        out: BufWriter::with_capacity(64 << 10, writer),
        snapshot,
        remembered: 0,
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
    /// How many objects a reader remembers by now.
    remembered: u32,
    texts: HashMap<&'s str, u32>,
    stacks: Vec<Option<u32>>,
}

impl<'s, W: Write> Pickler<'s, W> {
    fn root(&mut self) -> io::Result<()> {
        let snapshot = self.snapshot;
        self.begin_dict()?;
        self.key(Word::Segments)?;
        self.list(&snapshot.segments, Self::segment)?;
        self.key(Word::DeviceTraces)?;
        self.list(&snapshot.traces, |pickler, trace| pickler.list(trace, Self::entry))?;
        self.key(Word::AllocatorSettings)?;
        self.settings(&snapshot.settings)?;
        self.key(Word::ExternalAnnotations)?;
        self.list(&snapshot.annotations, Self::annotation)?;
        if let Some(segments) = &snapshot.host_segments {
            self.key(Word::HostSegments)?;
            self.list(segments, Self::segment)?;
        }
        if let Some(trace) = &snapshot.host_traces {
            self.key(Word::HostTraces)?;
            self.list(trace, Self::entry)?;
        }
        self.end_dict()
    }

    fn segment(&mut self, segment: &'s SegmentInfo) -> io::Result<()> {
        self.begin_dict()?;
        self.key(Word::Device)?;
        self.int(segment.device.into())?;
        for (key, value) in [
            (Word::Address, segment.address),
            (Word::TotalSize, segment.total_size),
            (Word::AllocatedSize, segment.allocated_size),
            (Word::ActiveSize, segment.active_size),
            (Word::RequestedSize, segment.requested_size),
            (Word::Stream, segment.stream),
        ] {
            self.key(key)?;
            self.int(value.into())?;
        }
        self.key(Word::SegmentType)?;
        self.text(segment.kind.name())?;
        self.key(Word::SegmentPoolId)?;
        self.pool(segment.pool)?;
        self.key(Word::IsExpandable)?;
        self.bool(segment.is_expandable)?;
        self.key(Word::Frames)?;
        self.stack(segment.stack)?;
        self.key(Word::Blocks)?;
        self.list(&segment.blocks, Self::block)?;
        self.end_dict()
    }

    fn block(&mut self, block: &'s BlockInfo) -> io::Result<()> {
        self.begin_dict()?;
        self.key(Word::Address)?;
        self.int(block.address.into())?;
        self.key(Word::Size)?;
        self.int(block.size.into())?;
        self.key(Word::RequestedSize)?;
        self.int(block.requested_size.into())?;
        self.key(Word::State)?;
        self.text(block.state.name())?;
        self.key(Word::Frames)?;
        self.stack(block.stack)?;
        self.end_dict()
    }

    fn entry(&mut self, entry: &'s TraceEntry) -> io::Result<()> {
        let texts = &self.snapshot.texts;
        self.begin_dict()?;
        self.key(Word::Action)?;
        self.text(entry.action.name())?;
        self.key(if entry.action == Action::Oom { Word::DeviceFree } else { Word::Addr })?;
        self.int(entry.addr.into())?;
        self.key(Word::Size)?;
        self.int(entry.size.into())?;
        self.key(Word::Stream)?;
        self.int(entry.stream.into())?;
        self.key(Word::TimeUs)?;
        self.int(entry.time_us.into())?;
        self.key(Word::CompileContext)?;
        self.text(entry.compile_context.map_or(Word::NotApplicable.text(), |text| texts.get(text)))?;
        self.key(Word::UserMetadata)?;
        self.text(entry.user_metadata.map_or(Word::Empty.text(), |text| texts.get(text)))?;
        if let Some(pool) = entry.pool {
            self.key(Word::PoolId)?;
            self.pool(pool)?;
        }
        for (key, stack) in [(Word::Frames, entry.stack), (Word::ForwardFrames, entry.forward_stack)] {
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
            self.key(Word::Conf)?;
            self.text(conf)?;
        }
        self.optional_int(Word::MaxSplitSize, settings.max_split_size)?;
        if let Some(threshold) = settings.garbage_collection_threshold {
            self.key(Word::GarbageCollectionThreshold)?;
            self.out.write_all(&[op::BINFLOAT])?;
            self.out.write_all(&threshold.to_be_bytes())?;
        }
        self.optional_bool(Word::ExpandableSegments, settings.expandable_segments)?;
        self.optional_int(Word::PinnedNumRegisterThreads, settings.pinned_num_register_threads)?;
        self.optional_bool(Word::ReleaseLockOnCudamalloc, settings.release_lock_on_cudamalloc)?;
        self.optional_bool(Word::PinnedUseCudaHostRegister, settings.pinned_use_cuda_host_register)?;
        self.optional_bool(Word::GraphCaptureRecordStreamReuse, settings.graph_capture_record_stream_reuse)?;
        self.optional_int(Word::MaxRoundThreshold, settings.max_round_threshold)?;
        self.optional_int(Word::MaxCachedSize, settings.max_cached_size)?;
        if let Some(divisions) = &settings.roundup_power2_divisions {
            self.key(Word::RoundupPower2Divisions)?;
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
        self.key(Word::Stage)?;
        self.text(&annotation.stage)?;
        self.key(Word::Name)?;
        self.text(&annotation.name)?;
        self.key(Word::Device)?;
        self.int(annotation.device.into())?;
        self.key(Word::TimeUs)?;
        self.int(annotation.time_us.into())?;
        self.end_dict()
    }

    /// A list of frames; the same list object for the same stack.
    fn stack(&mut self, stack: Option<StackId>) -> io::Result<()> {
        let Some(StackId(number)) = stack else { return self.out.write_all(&[op::EMPTY_LIST]) };
        if let Some(object) = self.stacks[number as usize] {
            return self.recall(object);
        }
        let snapshot = self.snapshot;
        self.list(&snapshot.stacks[number as usize], |pickler, frame| {
            pickler.begin_dict()?;
            pickler.key(Word::Name)?;
            pickler.text(&frame.name)?;
            pickler.key(Word::Filename)?;
            pickler.text(&frame.filename)?;
            pickler.key(Word::Line)?;
            pickler.int(frame.line.into())?;
            pickler.end_dict()
        })?;
        self.stacks[number as usize] = Some(self.remember()?);
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

    fn key(&mut self, key: Word) -> io::Result<()> {
        self.text(key.text())
    }

    fn text(&mut self, text: &'s str) -> io::Result<()> {
        if let Some(&object) = self.texts.get(text) {
            return self.recall(object);
        }
        let length = u32::try_from(text.len()).map_err(io::Error::other)?;
        self.out.write_all(&[op::BINUNICODE])?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(text.as_bytes())?;
        let object = self.remember()?;
        self.texts.insert(text, object);
        Ok(())
    }

    fn optional_int(&mut self, key: Word, value: Option<i64>) -> io::Result<()> {
        let Some(value) = value else { return Ok(()) };
        self.key(key)?;
        self.int(value.into())
    }

    fn optional_bool(&mut self, key: Word, value: Option<bool>) -> io::Result<()> {
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

    /// An integer in the shortest form.
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
            // Two's complement, as few bytes as show the sign.
            let significant = 128 - if value < 0 { value.leading_ones() } else { value.leading_zeros() };
            let length = significant as usize / 8 + 1;
            self.out.write_all(&[op::LONG1, length as u8])?;
            self.out.write_all(&value.to_le_bytes()[..length])
        }
    }

    /// Lets readers remember what was just written. Returns its number.
    fn remember(&mut self) -> io::Result<u32> {
        let object = self.remembered;
        self.remembered += 1;
        match u8::try_from(object) {
            Ok(object) => self.out.write_all(&[op::BINPUT, object])?,
            Err(_) => {
                self.out.write_all(&[op::LONG_BINPUT])?;
                self.out.write_all(&object.to_le_bytes())?;
            }
        }
        Ok(object)
    }

    /// The object of that number again.
    fn recall(&mut self, object: u32) -> io::Result<()> {
        match u8::try_from(object) {
            Ok(object) => self.out.write_all(&[op::BINGET, object]),
            Err(_) => {
                self.out.write_all(&[op::LONG_BINGET])?;
                self.out.write_all(&object.to_le_bytes())
            }
        }
    }
}
