//! Call stacks as a tree, outermost frames first: for flame graphs, and to store many stacks that share their callers.

use rustc_hash::FxHashMap;
use std::sync::Arc;

use warpool::memory::report::{Frame, StackId};

use crate::stacks::{CallSite, Frameworks, readable, short_path};

/// A call, below its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackNode {
    /// Its caller, which has a smaller number; `None` for an outermost frame.
    pub parent: Option<u32>,
    /// The frame, by its number in [`StackTree::frames`].
    pub frame: u32,
}

/// Call stacks as a tree.
#[derive(Clone, Debug, Default)]
pub struct StackTree {
    /// Each different frame once.
    pub frames: Vec<Frame>,
    /// Whether a frame only calls another function and is not useful to a reader.
    pub passes_through: Vec<bool>,
    /// The calls.
    pub nodes: Vec<StackNode>,
    /// The call sites of the stacks, each distinct one once.
    pub sites: Vec<CallSite>,
    /// For each stack, its innermost call in `nodes` and its call site in `sites`.
    pub stacks: Vec<(u32, u32)>,
    numbers: FxHashMap<StackId, Option<u32>>,
    frame_numbers: FxHashMap<Frame, u32>,
    node_numbers: FxHashMap<(Option<u32>, u32), u32>,
    site_numbers: FxHashMap<CallSite, u32>,
}

impl StackTree {
    /// Adds a stack of a snapshot, and returns its number in [`stacks`](Self::stacks); `None` if it is empty or does
    /// not exist.
    pub fn add(&mut self, stacks: &[Arc<[Frame]>], id: StackId, frameworks: &Frameworks) -> Option<u32> {
        if let Some(&number) = self.numbers.get(&id) {
            return number;
        }
        let number = stacks.get(id.index()).and_then(|stack| self.add_new(stack, frameworks));
        self.numbers.insert(id, number);
        number
    }

    /// A file without the folder that packages are installed in.
    #[must_use]
    pub fn short_path(file: &str) -> &str {
        short_path(file)
    }

    fn add_new(&mut self, stack: &[Frame], frameworks: &Frameworks) -> Option<u32> {
        let site = CallSite::of(stack, frameworks)?;
        let mut node = None;
        for frame in readable(stack).iter().rev() {
            let frame = number(&mut self.frame_numbers, frame, &mut self.frames, Frame::clone);
            node = Some(number(&mut self.node_numbers, &(node, frame), &mut self.nodes, |&(parent, frame)| {
                StackNode { parent, frame }
            }));
        }
        for frame in &self.frames[self.passes_through.len()..] {
            self.passes_through.push(CallSite::passes_through(frame));
        }
        let site = number(&mut self.site_numbers, &site, &mut self.sites, CallSite::clone);
        // A stack of plumbing alone becomes one node with the call.
        let node = node.unwrap_or_else(|| {
            let call = &self.sites[site as usize].call;
            let frame = Frame { name: call.clone(), filename: String::new(), line: 0 };
            let frame = number(&mut self.frame_numbers, &frame, &mut self.frames, Frame::clone);
            self.passes_through.resize(self.frames.len(), false);
            number(&mut self.node_numbers, &(None, frame), &mut self.nodes, |&(parent, frame)| StackNode {
                parent,
                frame,
            })
        });
        self.stacks.push((node, site));
        u32::try_from(self.stacks.len() - 1).ok()
    }
}

/// The number of a value in a list, to which it is added if it is not there.
fn number<K: Clone + Eq + std::hash::Hash, V>(
    numbers: &mut FxHashMap<K, u32>,
    key: &K,
    list: &mut Vec<V>,
    make: impl FnOnce(&K) -> V,
) -> u32 {
    if let Some(&number) = numbers.get(key) {
        return number;
    }
    let number = u32::try_from(list.len()).expect("stacks are numbered with 32 bits");
    list.push(make(key));
    numbers.insert(key.clone(), number);
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_share_their_callers() {
        let frame = |name: &str| Frame { name: name.to_owned(), filename: "train.py".to_owned(), line: 7 };
        let stack = |names: &[&str]| -> Arc<[Frame]> { names.iter().map(|name| frame(name)).collect() };
        let stacks = [stack(&["relu", "forward", "main"]), stack(&["drop", "forward", "main"]), stack(&[])];
        let id = |index| StackId::new(index).unwrap();
        let mut tree = StackTree::default();
        let frameworks = Frameworks::default();
        assert_eq!(tree.add(&stacks, id(0), &frameworks), Some(0));
        assert_eq!(tree.add(&stacks, id(1), &frameworks), Some(1));
        assert_eq!(tree.add(&stacks, id(1), &frameworks), Some(1), "it is there already");
        assert_eq!(tree.add(&stacks, id(2), &frameworks), None, "without frames");
        assert_eq!(tree.add(&stacks, id(9), &frameworks), None, "there is none");
        assert_eq!((tree.nodes.len(), tree.frames.len(), tree.stacks.len()), (4, 4, 2));
        let parents: Vec<Option<u32>> = tree.nodes.iter().map(|node| node.parent).collect();
        assert_eq!(parents, [None, Some(0), Some(1), Some(1)]);
    }
}
