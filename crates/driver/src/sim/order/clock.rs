//! Vector clocks.
//!
//! A timeline is a totally ordered sequence of work: every stream has one, and the host has timeline 0. An epoch is a
//! position on a timeline. A vector clock contains for every timeline the last epoch that is known to be done; work
//! that starts with a clock is ordered after everything that the clock covers. Two operations are unordered if neither
//! is covered by the other's clock, whatever the virtual time says.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::sim::steps;

/// Names a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimelineId(pub u32);

impl TimelineId {
    /// The host's timeline.
    pub const HOST: Self = Self(0);
}

/// A position on a timeline: operation number `seq`, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epoch {
    pub timeline: TimelineId,
    pub seq: u64,
}

/// For every timeline, the number of the last operation known to be done.
///
/// A tree whose nodes are shared between clocks. Copying a clock takes one step, and joining or comparing two takes one
/// step per node that differs. Most clocks are a recent copy of another, with a few entries of their own.
#[derive(Clone, Debug, Default)]
pub struct VectorClock {
    root: Option<Arc<Node>>,
    /// The levels of inner nodes.
    height: u32,
}

/// How many entries a leaf has, and how many children an inner node.
const FANOUT: usize = 1 << BITS;
const BITS: u32 = 5;

/// A part of a clock. What is missing is 0.
#[derive(Clone, Debug)]
enum Node {
    Leaf([u64; FANOUT]),
    Inner([Option<Arc<Self>>; FANOUT]),
}

impl Node {
    fn new(height: u32) -> Self {
        if height == 0 { Self::Leaf([0; FANOUT]) } else { Self::Inner([const { None }; FANOUT]) }
    }

    /// Whether every entry is at least that of `other`, a node of the same height.
    fn covers(&self, other: &Self) -> bool {
        steps::count();
        match (self, other) {
            (Self::Leaf(mine), Self::Leaf(theirs)) => theirs.iter().zip(mine).all(|(theirs, mine)| theirs <= mine),
            (Self::Inner(mine), Self::Inner(theirs)) => mine.iter().zip(theirs).all(|pair| match pair {
                (_, None) => true,
                (None, Some(theirs)) => theirs.is_zero(),
                (Some(mine), Some(theirs)) => Arc::ptr_eq(mine, theirs) || mine.covers(theirs),
            }),
            _ => unreachable!("nodes of one height"),
        }
    }

    fn is_zero(&self) -> bool {
        steps::count();
        match self {
            Self::Leaf(entries) => entries.iter().all(|&entry| entry == 0),
            Self::Inner(children) => children.iter().flatten().all(|child| child.is_zero()),
        }
    }

    /// Makes every entry at least that of `theirs`, a node of the same height. Shares it if it has all that is needed.
    fn join(mine: &mut Arc<Self>, theirs: &Arc<Self>) {
        if Arc::ptr_eq(mine, theirs) || mine.covers(theirs) {
            return;
        }
        if theirs.covers(mine) {
            *mine = Arc::clone(theirs);
            return;
        }
        match (Arc::make_mut(mine), &**theirs) {
            (Self::Leaf(mine), Self::Leaf(theirs)) => {
                mine.iter_mut().zip(theirs).for_each(|(mine, &theirs)| *mine = (*mine).max(theirs));
            }
            (Self::Inner(mine), Self::Inner(theirs)) => {
                for (mine, theirs) in mine.iter_mut().zip(theirs) {
                    match (mine, theirs) {
                        (_, None) => {}
                        (mine @ None, Some(theirs)) => *mine = Some(Arc::clone(theirs)),
                        (Some(mine), Some(theirs)) => Self::join(mine, theirs),
                    }
                }
            }
            _ => unreachable!("nodes of one height"),
        }
    }
}

impl VectorClock {
    /// The number of the last operation of `timeline` known to be done; 0 if none is.
    #[inline]
    pub fn get(&self, timeline: TimelineId) -> u64 {
        let index = timeline.0 as usize;
        let Some(mut node) = self.root.as_ref().filter(|_| index < self.capacity()) else { return 0 };
        let mut height = self.height;
        loop {
            match &**node {
                Node::Leaf(entries) => return entries[index % FANOUT],
                Node::Inner(children) => match &children[child_of(index, height)] {
                    Some(child) => node = child,
                    None => return 0,
                },
            }
            height -= 1;
        }
    }

    /// Whether `epoch` is known to be done.
    #[inline]
    pub fn covers(&self, epoch: Epoch) -> bool {
        self.get(epoch.timeline) >= epoch.seq
    }

    /// Whether everything that `other` covers is covered here.
    pub fn covers_all(&self, other: &Self) -> bool {
        let Some(theirs) = &other.root else { return true };
        let Some(mine) = &self.root else { return theirs.is_zero() };
        if Arc::ptr_eq(mine, theirs) {
            return true;
        }
        match self.height.cmp(&other.height) {
            Ordering::Equal => mine.covers(theirs),
            // Only the lowest entries of the higher tree are in the other.
            Ordering::Greater => lowest(mine, self.height - other.height).is_some_and(|mine| mine.covers(theirs)),
            Ordering::Less => {
                let mut theirs = theirs;
                for _ in self.height..other.height {
                    let Node::Inner(children) = &**theirs else { unreachable!("higher than a leaf") };
                    steps::count();
                    if !children[1..].iter().flatten().all(|child| child.is_zero()) {
                        return false;
                    }
                    let Some(child) = &children[0] else { return true };
                    theirs = child;
                }
                mine.covers(theirs)
            }
        }
    }

    /// Covers `epoch` from now on. Returns whether it was not covered before.
    pub fn add(&mut self, epoch: Epoch) -> bool {
        if self.covers(epoch) {
            return false;
        }
        let index = epoch.timeline.0 as usize;
        while index >= self.capacity() {
            self.grow();
        }
        let mut height = self.height;
        let mut node = self.root.get_or_insert_with(|| Arc::new(Node::new(height)));
        loop {
            steps::count();
            match Arc::make_mut(node) {
                Node::Leaf(entries) => {
                    entries[index % FANOUT] = epoch.seq;
                    return true;
                }
                Node::Inner(children) => {
                    let child = &mut children[child_of(index, height)];
                    height -= 1;
                    node = child.get_or_insert_with(|| Arc::new(Node::new(height)));
                }
            }
        }
    }

    /// Covers everything that `other` covers from now on.
    pub fn join(&mut self, other: &Self) {
        let Some(theirs) = &other.root else { return };
        while self.root.is_some() && self.height < other.height {
            self.grow();
        }
        let Some(mine) = &mut self.root else {
            *self = other.clone();
            return;
        };
        let mut node = mine;
        for height in (other.height..self.height).rev() {
            steps::count();
            let Node::Inner(children) = Arc::make_mut(node) else { unreachable!("higher than a leaf") };
            node = children[0].get_or_insert_with(|| Arc::new(Node::new(height)));
        }
        Node::join(node, theirs);
    }

    /// How many timelines there is room for.
    fn capacity(&self) -> usize {
        FANOUT << (BITS * self.height)
    }

    /// One level more.
    fn grow(&mut self) {
        self.height += 1;
        if let Some(root) = self.root.take() {
            let mut children = [const { None }; FANOUT];
            children[0] = Some(root);
            self.root = Some(Arc::new(Node::Inner(children)));
        }
    }
}

impl PartialEq for VectorClock {
    fn eq(&self, other: &Self) -> bool {
        self.covers_all(other) && other.covers_all(self)
    }
}

impl Eq for VectorClock {}

/// The child of an inner node at `height` that has the entry of that index.
fn child_of(index: usize, height: u32) -> usize {
    index >> (BITS * height) & (FANOUT - 1)
}

/// The first node `levels` levels below `node`.
fn lowest(node: &Arc<Node>, levels: u32) -> Option<&Arc<Node>> {
    (0..levels).try_fold(node, |node, _| match &**node {
        Node::Inner(children) => children[0].as_ref(),
        Node::Leaf(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(timeline: u32, seq: u64) -> Epoch {
        Epoch { timeline: TimelineId(timeline), seq }
    }

    fn clock(epochs: &[(u32, u64)]) -> VectorClock {
        let mut clock = VectorClock::default();
        for &(timeline, seq) in epochs {
            clock.add(epoch(timeline, seq));
        }
        clock
    }

    #[test]
    fn clock_covers_epochs_up_to_its_own() {
        let clock = clock(&[(1, 5), (3, 2)]);
        assert!(clock.covers(epoch(1, 5)));
        assert!(!clock.covers(epoch(1, 6)));
        assert!(!clock.covers(epoch(2, 1)));
        assert!(!clock.covers(epoch(9, 1)));
    }

    #[test]
    fn join_takes_the_later_epoch_of_each_timeline() {
        let mut a = clock(&[(1, 5), (2, 1)]);
        let b = clock(&[(1, 3), (2, 4), (4, 1)]);
        assert!(!a.covers_all(&b));
        a.join(&b);
        assert_eq!(a, clock(&[(1, 5), (2, 4), (4, 1)]));
        assert!(a.covers_all(&b));
        assert!(!a.add(epoch(2, 4)), "covered already");
    }

    #[test]
    fn clocks_of_many_timelines_are_as_a_list_of_numbers_would_be() {
        let mut random = 1_u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for timelines in [3_u64, 31, 33, 1_100, 40_000] {
            let mut clocks = vec![(VectorClock::default(), std::collections::BTreeMap::<u32, u64>::new()); 4];
            for _ in 0..if cfg!(miri) { 20 } else { 400 } {
                let (to, from) = (draw(4) as usize, draw(4) as usize);
                if draw(3) == 0 {
                    let (clock, list) = clocks[from].clone();
                    clocks[to].0.join(&clock);
                    for (timeline, seq) in list {
                        let entry = clocks[to].1.entry(timeline).or_default();
                        *entry = seq.max(*entry);
                    }
                } else {
                    let (timeline, seq) = (draw(timelines) as u32, draw(9));
                    let entry = clocks[to].1.entry(timeline).or_default();
                    let is_new = seq > *entry;
                    *entry = seq.max(*entry);
                    assert_eq!(clocks[to].0.add(epoch(timeline, seq)), is_new);
                }
                let (clock, list) = &clocks[to];
                assert!(list.iter().all(|(&timeline, &seq)| clock.get(TimelineId(timeline)) == seq));
                let (other, others) = &clocks[from];
                let covers = others.iter().all(|(timeline, seq)| list.get(timeline).copied().unwrap_or(0) >= *seq);
                assert_eq!(clock.covers_all(other), covers, "{timelines} timelines");
            }
        }
    }

    #[test]
    fn a_clock_that_differs_in_little_is_joined_in_few_steps() {
        let mut steps = [0, 0];
        let sizes = if cfg!(miri) { [100, 1_000] } else { [10_000, 100_000] };
        for (steps, timelines) in steps.iter_mut().zip(sizes) {
            let mut all = clock(&(0..timelines).map(|timeline| (timeline, 1)).collect::<Vec<_>>());
            let (mut stale, before) = (all.clone(), steps::steps_taken());
            all.add(epoch(timelines / 2, 2));
            stale.add(epoch(3, 5));
            assert!(!stale.covers_all(&all));
            stale.join(&all);
            assert!(stale.covers_all(&all) && !all.covers_all(&stale));
            *steps = steps::steps_taken() - before;
        }
        assert!(steps[1] < 60 && steps[1] <= steps[0] * 3 / 2, "{steps:?}");
    }
}
