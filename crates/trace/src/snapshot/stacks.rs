//! Call stacks while a pickle is read: frames, lists of frames, and each different stack once.
//! If stacks are not read, nothing is added here.

use std::collections::HashMap;
use std::sync::Arc;

use warpool::memory::report::{Frame, StackId};

use super::convert::{text, unsigned};
use super::invalid::Invalid;
use super::schema::Keyword;
use super::texts::TextTable;
use crate::budget::{Budget, bytes_of};
use crate::pickle::Value;

/// The memory of a distinct frame, and of a distinct stack, beside its own bytes: table entries, also while the tables
/// grow.
const FRAME_BYTES: u64 = 256;
const STACK_BYTES: u64 = 256;

/// The memory of a copied text beside its own bytes.
const TEXT_BYTES: u64 = 16;

/// Frames and lists of frames.
pub(super) struct StackTable {
    is_kept: bool,
    frames: Vec<FrameDraft>,
    lists: Vec<FrameList>,
    /// Each different stack, as numbers in `distinct_frames`.
    stacks: Vec<Arc<[u32]>>,
    stack_numbers: HashMap<Arc<[u32]>, StackId>,
    distinct_frames: Vec<FrameDraft>,
    frame_numbers: HashMap<FrameDraft, u32>,
    budget: Budget,
}

/// The keys of a frame that were read; texts by number.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
struct FrameDraft {
    name: Option<u32>,
    filename: Option<u32>,
    line: Option<u64>,
}

enum FrameList {
    Open(Vec<u32>),
    /// It was used, as this stack.
    Closed(StackId),
}

impl StackTable {
    pub(super) fn new(is_kept: bool, budget: &Budget) -> Self {
        Self {
            is_kept,
            frames: Vec::new(),
            lists: Vec::new(),
            stacks: Vec::new(),
            stack_numbers: HashMap::new(),
            distinct_frames: Vec::new(),
            frame_numbers: HashMap::new(),
            budget: budget.clone(),
        }
    }

    /// Whether stacks are read.
    pub(super) fn is_kept(&self) -> bool {
        self.is_kept
    }

    pub(super) fn open_frame(&mut self) -> Result<u32, Invalid> {
        self.budget.reserve_one(&mut self.frames)?;
        self.frames.push(FrameDraft::default());
        number_of_last(self.frames.len())
    }

    /// Sets one key of a frame.
    pub(super) fn set(&mut self, frame: u32, key: Option<Keyword>, value: Value) -> Result<(), Invalid> {
        let frame = &mut self.frames[frame as usize];
        match key {
            Some(Keyword::Name) => frame.name = Some(text(value)?),
            Some(Keyword::Filename) => frame.filename = Some(text(value)?),
            Some(Keyword::Line) => frame.line = Some(unsigned(value)?),
            _ => {}
        }
        Ok(())
    }

    pub(super) fn open_list(&mut self) -> Result<u32, Invalid> {
        self.budget.reserve_one(&mut self.lists)?;
        self.lists.push(FrameList::Open(Vec::new()));
        number_of_last(self.lists.len())
    }

    pub(super) fn list_length(&self, list: u32) -> usize {
        match &self.lists[list as usize] {
            FrameList::Open(frames) => frames.len(),
            FrameList::Closed(stack) => self.stacks[stack.index()].len(),
        }
    }

    /// Appends a frame to a list.
    pub(super) fn append(&mut self, list: u32, frame: u32) -> Result<(), Invalid> {
        let frame = self.frames[frame as usize];
        for (key, present) in
            [("name", frame.name.is_some()), ("filename", frame.filename.is_some()), ("line", frame.line.is_some())]
        {
            if !present {
                return Err(Invalid::missing(key));
            }
        }
        let FrameList::Open(frames) = &mut self.lists[list as usize] else {
            return Err(Invalid::appended("stack"));
        };
        let number = match self.frame_numbers.get(&frame) {
            Some(&number) => number,
            None => {
                self.budget.take(FRAME_BYTES)?;
                self.distinct_frames.push(frame);
                let number = number_of_last(self.distinct_frames.len())?;
                self.frame_numbers.insert(frame, number);
                number
            }
        };
        self.budget.reserve_one(frames)?;
        frames.push(number);
        Ok(())
    }

    /// The stack of a list, which takes no more frames from now on; `None` if it is empty.
    pub(super) fn close(&mut self, list: u32) -> Result<Option<StackId>, Invalid> {
        let list = &mut self.lists[list as usize];
        let frames = match list {
            FrameList::Closed(stack) => return Ok(Some(*stack)),
            FrameList::Open(frames) if frames.is_empty() => return Ok(None),
            FrameList::Open(frames) => frames,
        };
        let stack = match self.stack_numbers.get(frames.as_slice()) {
            Some(&stack) => stack,
            None => {
                self.budget.take(STACK_BYTES + bytes_of::<u32>(frames.len()))?;
                let frames: Arc<[u32]> = frames.as_slice().into();
                self.stacks.push(Arc::clone(&frames));
                let stack = StackId::new(number_of_last(self.stacks.len())? as usize).ok_or_else(too_many)?;
                self.stack_numbers.insert(frames, stack);
                stack
            }
        };
        *list = FrameList::Closed(stack);
        Ok(Some(stack))
    }

    /// The number of different stacks.
    pub(super) fn len(&self) -> usize {
        self.stacks.len()
    }

    /// The stacks of those numbers, with their texts.
    pub(super) fn with_texts(&self, order: &[StackId], texts: &TextTable) -> Result<Vec<Arc<[Frame]>>, Invalid> {
        // Each repeats its texts.
        let frame = |number: &u32| {
            let frame = self.distinct_frames[*number as usize];
            let text = |text: Option<u32>| texts.get(text.expect("checked when the frame was appended"));
            let (name, filename) = (text(frame.name), text(frame.filename));
            // Twice the frame: a stack is collected and then copied into its place.
            self.budget.take(2 * size_of::<Frame>() as u64 + 2 * TEXT_BYTES + (name.len() + filename.len()) as u64)?;
            Ok(Frame { name: name.into(), filename: filename.into(), line: frame.line.unwrap_or(0) })
        };
        order.iter().map(|stack| self.stacks[stack.index()].iter().map(frame).collect()).collect()
    }
}

fn number_of_last(length: usize) -> Result<u32, Invalid> {
    u32::try_from(length - 1).map_err(|_| too_many())
}

fn too_many() -> Invalid {
    Invalid::new("too many call stacks for one recording")
}
