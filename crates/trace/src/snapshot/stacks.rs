//! Call stacks while they are read: frames, lists of frames, and each different stack once.
//! If they are not wanted, nothing comes here.

use std::collections::HashMap;
use std::sync::Arc;

use warpool::memory::{Frame, StackId};

use super::build::Wrong;
use super::texts::TextTable;

/// What the texts of all stacks may take. Few bytes of a pickle can repeat a long name many times.
const BYTES_MAX: usize = 1 << 30;

/// Frames and lists of them.
pub(super) struct Stacks {
    kept: bool,
    frames: Vec<FrameDraft>,
    lists: Vec<FrameList>,
    /// Each different stack, as numbers of different frames.
    stacks: Vec<Arc<[u32]>>,
    stack_numbers: HashMap<Arc<[u32]>, StackId>,
    /// Each different frame.
    distinct: Vec<FrameDraft>,
    frame_numbers: HashMap<FrameDraft, u32>,
}

/// A frame: its texts by number.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct FrameDraft {
    pub(super) name: Option<u32>,
    pub(super) filename: Option<u32>,
    pub(super) line: Option<u64>,
}

enum FrameList {
    Open(Vec<u32>),
    /// It has been used, and is known by this number.
    Closed(StackId),
}

impl Stacks {
    pub(super) fn new(kept: bool) -> Self {
        Self {
            kept,
            frames: Vec::new(),
            lists: Vec::new(),
            stacks: Vec::new(),
            stack_numbers: HashMap::new(),
            distinct: Vec::new(),
            frame_numbers: HashMap::new(),
        }
    }

    pub(super) fn kept(&self) -> bool {
        self.kept
    }

    pub(super) fn open_frame(&mut self) -> Result<u32, Wrong> {
        self.frames.push(FrameDraft::default());
        number_of_last(self.frames.len())
    }

    pub(super) fn frame(&mut self, number: u32) -> &mut FrameDraft {
        &mut self.frames[number as usize]
    }

    pub(super) fn open_list(&mut self) -> Result<u32, Wrong> {
        self.lists.push(FrameList::Open(Vec::new()));
        number_of_last(self.lists.len())
    }

    pub(super) fn length(&self, list: u32) -> usize {
        match &self.lists[list as usize] {
            FrameList::Open(frames) => frames.len(),
            FrameList::Closed(stack) => self.stacks[stack.0 as usize].len(),
        }
    }

    /// Adds a frame to a list.
    pub(super) fn push(&mut self, list: u32, frame: u32) -> Result<(), Wrong> {
        let frame = self.frames[frame as usize];
        for (key, present) in
            [("name", frame.name.is_some()), ("filename", frame.filename.is_some()), ("line", frame.line.is_some())]
        {
            if !present {
                return Err(Wrong::missing(key));
            }
        }
        let FrameList::Open(frames) = &mut self.lists[list as usize] else {
            return Err(Wrong::new("the stack grows after it was used"));
        };
        let number = match self.frame_numbers.get(&frame) {
            Some(&number) => number,
            None => {
                self.distinct.push(frame);
                let number = number_of_last(self.distinct.len())?;
                self.frame_numbers.insert(frame, number);
                number
            }
        };
        frames.push(number);
        Ok(())
    }

    /// The stack that a list is; `None` if it is empty.
    pub(super) fn close(&mut self, list: u32) -> Result<Option<StackId>, Wrong> {
        let list = &mut self.lists[list as usize];
        let frames = match list {
            FrameList::Closed(stack) => return Ok(Some(*stack)),
            FrameList::Open(frames) if frames.is_empty() => return Ok(None),
            FrameList::Open(frames) => frames,
        };
        let stack = match self.stack_numbers.get(frames.as_slice()) {
            Some(&stack) => stack,
            None => {
                let frames: Arc<[u32]> = frames.as_slice().into();
                self.stacks.push(Arc::clone(&frames));
                let stack = StackId(number_of_last(self.stacks.len())?);
                self.stack_numbers.insert(frames, stack);
                stack
            }
        };
        *list = FrameList::Closed(stack);
        Ok(Some(stack))
    }

    /// How many different stacks there are.
    pub(super) fn len(&self) -> usize {
        self.stacks.len()
    }

    /// The stacks of those numbers, with their texts.
    pub(super) fn spelled_out(&self, order: &[StackId], texts: &TextTable) -> Result<Vec<Arc<[Frame]>>, Wrong> {
        let mut bytes = 0_usize;
        let mut spell = |number: &u32| {
            let frame = self.distinct[*number as usize];
            let text = |text: Option<u32>| texts.get(text.expect("only whole frames are distinct ones"));
            let (name, filename) = (text(frame.name), text(frame.filename));
            bytes += size_of::<Frame>() + name.len() + filename.len();
            if bytes > BYTES_MAX {
                return Err(Wrong::new("the call stacks take more than 1 GiB: read it without stacks"));
            }
            Ok(Frame { name: name.into(), filename: filename.into(), line: frame.line.unwrap_or(0) })
        };
        order.iter().map(|stack| self.stacks[stack.0 as usize].iter().map(&mut spell).collect()).collect()
    }
}

fn number_of_last(length: usize) -> Result<u32, Wrong> {
    u32::try_from(length - 1).map_err(|_| Wrong::new("too many call stacks for one recording"))
}
