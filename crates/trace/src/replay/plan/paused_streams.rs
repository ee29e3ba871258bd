//! Streams in place of those that a recording does not name. A block whose free completed later than it was requested
//! had been used by other streams; the recording has only the event at which it became free. Such a block gets one use
//! on a *paused stream*: its work completes when the replay reaches that event.
//!
//! Work of a stream completes in order, so blocks share a paused stream only if they became free in the order of their
//! frees. As few streams as possible are used.

use std::collections::BTreeMap;

/// The number of a paused stream.
pub(in crate::replay) type PausedStream = u16;

/// The use of a block on a paused stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::replay) struct PausedUse {
    pub stream: PausedStream,
    /// Its number among the uses of the stream, from 1.
    pub position: u32,
}

/// Assigns each block a use. `completed` is the event at which each block became free, in the order of their frees;
/// `None` is never. Returns the uses and the number of streams; `None` if there would be more than 65,535.
pub(super) fn assign(completed: &[Option<u32>]) -> Option<(Vec<PausedUse>, usize)> {
    // The streams by the event at which their last use completes.
    let mut by_last: BTreeMap<u32, PausedStream> = BTreeMap::new();
    let mut uses_of: Vec<u32> = Vec::new();
    let mut never: Option<PausedStream> = None;
    let uses = completed.iter().map(|completed| {
        // The stream that completes last before this event, so that others stay available for earlier events.
        let found = match completed {
            Some(event) => by_last.range(..event).next_back().map(|(&last, &stream)| (Some(last), stream)),
            None => never.map(|stream| (None, stream)),
        };
        let (last, stream) = match found {
            Some(found) => found,
            None => {
                uses_of.push(0);
                (None, PausedStream::try_from(uses_of.len() - 1).ok()?)
            }
        };
        last.map(|last| by_last.remove(&last));
        match completed {
            Some(event) => drop(by_last.insert(*event, stream)),
            None => never = Some(stream),
        }
        uses_of[usize::from(stream)] += 1;
        Some(PausedUse { stream, position: uses_of[usize::from(stream)] })
    });
    let uses = uses.collect::<Option<_>>()?;
    Some((uses, uses_of.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_of_a_stream_complete_in_order() {
        let cases: [(&[Option<u32>], &[PausedStream]); 5] = [
            (&[], &[]),
            (&[Some(1), Some(2), Some(3)], &[0, 0, 0]),
            (&[Some(3), Some(2), Some(4)], &[0, 1, 0]),
            (&[Some(5), None, Some(6), None], &[0, 1, 0, 1]),
            (&[Some(9), Some(1), Some(2), Some(10)], &[0, 1, 1, 0]),
        ];
        for (completed, streams) in cases {
            let uses = assign(completed).unwrap().0;
            assert_eq!(uses.iter().map(|paused| paused.stream).collect::<Vec<_>>(), streams, "{completed:?}");
        }
    }

    #[test]
    fn uses_are_numbered_per_stream() {
        let uses = assign(&[Some(3), Some(2), Some(4), None]).unwrap().0;
        assert_eq!(uses.iter().map(|paused| paused.position).collect::<Vec<_>>(), [1, 1, 2, 1]);
    }
}
