//! The model's segments that grow: where there is room, what is mapped, what is unmapped.

use super::super::script::Script;
use super::{MIB, Model, Piece, Standing, Want};

impl Model {
    pub(super) fn could_grow_to(&self, (segment, at): (usize, usize)) -> u64 {
        let pieces = &self.segments[segment].pieces;
        let behind = pieces.get(at + 1).filter(|piece| piece.standing == Standing::Unmapped);
        pieces[at].size + behind.map_or(0, |piece| piece.size)
    }

    /// The lowest place of growing segments with room: free or unmapped pieces one behind the other, one of the first
    /// two unmapped.
    pub(super) fn room(&self, want: &Want) -> Option<(usize, usize)> {
        let usable = |piece: &Piece| matches!(piece.standing, Standing::Free | Standing::Unmapped);
        let mut places = Vec::new();
        for (index, segment) in self.segments.iter().enumerate() {
            if segment.chunk.is_none()
                || (segment.pool, segment.small, segment.stream) != (want.pool, want.small, want.stream)
            {
                continue;
            }
            for (at, piece) in segment.pieces.iter().enumerate() {
                if piece.standing == Standing::Unmapped {
                    let first = if at > 0 && usable(&segment.pieces[at - 1]) { at - 1 } else { at };
                    let room: u64 =
                        segment.pieces[first..].iter().take_while(|piece| usable(piece)).map(|piece| piece.size).sum();
                    if room >= want.size {
                        places.push((piece.at, (index, first)));
                    }
                }
            }
        }
        places.into_iter().min().map(|(_, place)| place)
    }

    pub(super) fn grow(&mut self, want: &Want, script: &mut Script) -> Option<(usize, usize)> {
        let (segment, mut at) = match self.room(want) {
            Some(place) => place,
            None => {
                let chunk = if want.small { 2 * MIB } else { self.rules.large_segment };
                let most = self.bytes_total + self.bytes_total / 8;
                let bytes = self.rules.reserve.unwrap_or(most).min(most).div_ceil(chunk) * chunk;
                if bytes < want.size {
                    return None;
                }
                let base = script.reserve(bytes)?;
                self.add_segment(want, base, bytes, Some(chunk));
                (self.segments.len() - 1, 0)
            }
        };
        if self.segments[segment].pieces[at].standing == Standing::Unmapped {
            let bytes = want.size.min(self.segments[segment].pieces[at].size);
            at = self.map(segment, at, bytes, script)?;
        }
        while self.segments[segment].pieces[at].size < want.size {
            let missing = want.size - self.segments[segment].pieces[at].size;
            let bytes = missing.min(self.segments[segment].pieces[at + 1].size);
            at = self.map(segment, at + 1, bytes, script)?;
        }
        Some((segment, at))
    }

    /// Maps the start of an unmapped piece, and says which free piece that is part of then.
    pub(super) fn map(&mut self, segment: usize, at: usize, bytes: u64, script: &mut Script) -> Option<usize> {
        let chunk = self.segments[segment].chunk.expect("it grows");
        let bytes = bytes.div_ceil(chunk) * chunk;
        let start = self.segments[segment].pieces[at].at;
        script.map(start, bytes, chunk)?;
        let pieces = &mut self.segments[segment].pieces;
        if pieces[at].size > bytes {
            let behind = Piece::new(start + bytes, pieces[at].size - bytes, Standing::Unmapped);
            pieces[at].size = bytes;
            pieces.insert(at + 1, behind);
        }
        pieces[at].standing = Standing::Free;
        Some(self.join(segment, at))
    }

    /// Unmaps the whole chunks inside free pieces.
    pub(super) fn unmap(&mut self, segment: usize, script: &mut Script) {
        let (base, chunk) = (self.segments[segment].pieces[0].at, self.segments[segment].chunk.expect("it grows"));
        let free: Vec<u64> = self.segments[segment]
            .pieces
            .iter()
            .filter(|piece| piece.standing == Standing::Free)
            .map(|piece| piece.at)
            .collect();
        for start in free {
            let pieces = &mut self.segments[segment].pieces;
            let at = pieces.iter().position(|piece| piece.at == start).expect("it is there");
            let end = start + pieces[at].size;
            let first = base + (start - base).div_ceil(chunk) * chunk;
            let last = base + (end - base) / chunk * chunk;
            if first >= last {
                continue;
            }
            script.unmap(first, last - first);
            let parts = [
                (start, first - start, Standing::Free),
                (first, last - first, Standing::Unmapped),
                (last, end - last, Standing::Free),
            ];
            let born = self.searches_of(self.segments[segment].pool, self.segments[segment].small);
            let parts = parts
                .into_iter()
                .filter(|&(_, size, _)| size > 0)
                .map(|(at, size, standing)| Piece { born, ..Piece::new(at, size, standing) });
            let pieces = &mut self.segments[segment].pieces;
            pieces.splice(at..=at, parts);
            let at = pieces.iter().position(|piece| piece.at == first).expect("it is there");
            self.join(segment, at);
        }
    }
}
