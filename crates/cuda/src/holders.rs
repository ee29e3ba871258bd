//! Who knows a stream beyond a call: handles of libraries that point at it, and executables that were last launched on
//! it.
//!
//! The rule: none knows a stream that is gone. Whoever takes a stream away makes them leave it first, and has the
//! stream's row alone meanwhile, so that nobody can come to it. Whoever comes to a stream or leaves it has his own row
//! alone. So one that has its row alone can rely on the stream that it knows, without looking the stream up.
//!
//! Default streams never go, and nobody is noted for them.

use std::collections::BTreeSet;
use std::sync::Mutex;

use warpool_driver::{GraphExecId, HandleId, Result, StreamId};

use crate::CudaDriver;
use crate::error::Site;
use crate::stream::{Stream, StreamKind};
use crate::table::lock;

/// One that knows a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Holder {
    Handle(HandleId),
    Exec(GraphExecId),
}

/// Who knows which stream.
#[derive(Default)]
pub(crate) struct Holders(Mutex<BTreeSet<(StreamId, Holder)>>);

impl Holders {
    /// Notes that `holder` went over from one stream to another.
    pub(crate) fn went(&self, holder: Holder, from: Option<StreamId>, to: Option<StreamId>) {
        let mut holders = lock(&self.0);
        if let Some(stream) = from {
            holders.remove(&(stream, holder));
        }
        if let Some(stream) = to {
            holders.insert((stream, holder));
        }
    }

    fn of(&self, stream: StreamId) -> Vec<Holder> {
        let first = (stream, Holder::Handle(HandleId(0)));
        let holders = lock(&self.0);
        holders.range(first..).take_while(|(known, _)| *known == stream).map(|&(_, holder)| holder).collect()
    }

    /// How many are noted, for tests.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        lock(&self.0).len()
    }
}

/// Whether a stream goes at some time, so that those who know it must be noted.
pub(crate) fn may_go(stream: &Stream) -> bool {
    matches!(stream.kind, StreamKind::Own | StreamKind::Adopted)
}

impl CudaDriver {
    /// Makes everybody leave a stream that is about to go. The caller has the stream's row alone. If it stays after
    /// all, executables come back to it by themselves; handles must be pointed at it again.
    pub(crate) fn leave_stream(&self, site: Site<'_>, stream: StreamId) -> Result<()> {
        for holder in self.holders.of(stream) {
            match holder {
                Holder::Handle(handle) => self.handle_leaves(site, handle, stream)?,
                Holder::Exec(exec) => self.exec_leaves(exec, stream),
            }
            self.holders.went(holder, Some(stream), None);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_of_one_stream_are_told_from_those_of_others() {
        let holders = Holders::default();
        let all = [Holder::Handle(HandleId(7)), Holder::Handle(HandleId(u64::MAX)), Holder::Exec(GraphExecId(1))];
        for holder in all {
            holders.went(holder, None, Some(StreamId(5)));
        }
        holders.went(all[0], None, Some(StreamId(6)));
        assert_eq!(holders.of(StreamId(5)), all);
        holders.went(all[1], Some(StreamId(5)), Some(StreamId(6)));
        assert_eq!((holders.of(StreamId(5)), holders.of(StreamId(4))), (vec![all[0], all[2]], vec![]));
        assert_eq!(holders.of(StreamId(6)), all[..2]);
    }
}
