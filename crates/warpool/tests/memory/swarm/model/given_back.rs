//! What callers give back to the model: uses by other streams, marks, and captures that must be over first.

use warpool::driver::StreamId;

use super::{Mark, Model, Piece, Standing};

impl Model {
    /// Where the piece is that starts at an address and is not free.
    pub(super) fn place(&self, at: u64) -> (usize, usize) {
        let places = self.segments.iter().enumerate().flat_map(|(index, segment)| {
            segment.pieces.iter().enumerate().map(move |(place, piece)| (index, place, piece))
        });
        let active = |piece: &Piece| matches!(piece.standing, Standing::Taken | Standing::Waiting);
        let mut found = places.filter(|(_, _, piece)| piece.at == at && active(piece));
        let (segment, place, _) = found.next().unwrap_or_else(|| panic!("the model has nothing at {at:#x}"));
        (segment, place)
    }

    pub fn record_use(&mut self, at: u64, stream: StreamId) {
        let captures = self.capturing == Some(stream);
        let (segment, place) = self.place(at);
        if self.segments[segment].stream == stream {
            return;
        }
        let piece = &mut self.segments[segment].pieces[place];
        let list = if captures { &mut piece.uses_in_capture } else { &mut piece.uses };
        if !list.contains(&stream) {
            list.push(stream);
        }
    }

    /// Takes a piece back. `later`: by a destructor, which calls no driver.
    pub fn free(&mut self, at: u64, later: bool) {
        let (segment, place) = self.place(at);
        let piece = &mut self.segments[segment].pieces[place];
        assert_eq!(piece.standing, Standing::Taken, "the model's {at:#x} is not given out");
        piece.standing = Standing::Waiting;
        if piece.uses.is_empty() && piece.uses_in_capture.is_empty() {
            self.complete(at);
        } else if later {
            self.unmarked.push(at);
        } else {
            self.finish(at);
        }
    }

    pub(super) fn finish(&mut self, at: u64) {
        let (segment, place) = self.place(at);
        let own = self.segments[segment].stream;
        let piece = &mut self.segments[segment].pieces[place];
        let all = [own].into_iter().chain(piece.uses.clone()).chain(piece.uses_in_capture.clone());
        if all.into_iter().any(|stream| self.capturing == Some(stream)) {
            self.deferred.push(at);
            return;
        }
        piece.uses_in_capture.clear();
        let uses = std::mem::take(&mut piece.uses);
        for &stream in &uses {
            let marked = self.marked.entry(stream).or_default();
            self.marks.push(Mark { stream, place: *marked, at });
            *marked += 1;
        }
        if uses.is_empty() {
            self.complete(at);
        }
    }

    pub(super) fn complete(&mut self, at: u64) {
        let (segment, place) = self.place(at);
        let piece = &mut self.segments[segment].pieces[place];
        piece.standing = Standing::Free;
        piece.uses.clear();
        piece.uses_in_capture.clear();
        self.join(segment, place);
    }

    /// Marks what destructors gave back, the last first: nothing depends on that order, but it shows in what passes
    /// first. Then what captures deferred, as far as they are over.
    pub(super) fn mark_leftovers(&mut self) {
        for at in std::mem::take(&mut self.unmarked).into_iter().rev() {
            self.finish(at);
        }
        for at in std::mem::take(&mut self.deferred) {
            self.finish(at);
        }
    }

    /// Looks after what was given back.
    pub fn reap(&mut self) {
        self.mark_leftovers();
        let passed = self.passed.clone();
        self.settle(|mark| mark.place < passed.get(&mark.stream).copied().unwrap_or(0));
    }

    pub(super) fn wait_for_all(&mut self) {
        self.mark_leftovers();
        self.settle(|_| true);
    }

    pub(super) fn settle(&mut self, passed: impl Fn(&Mark) -> bool) {
        let (gone, kept): (Vec<Mark>, Vec<Mark>) = self.marks.iter().partition(|mark| passed(mark));
        self.marks = kept;
        let mut done: Vec<u64> = gone.into_iter().map(|mark| mark.at).collect();
        done.sort_unstable();
        done.dedup();
        for at in done {
            if !self.marks.iter().any(|mark| mark.at == at) {
                self.complete(at);
            }
        }
    }
}
