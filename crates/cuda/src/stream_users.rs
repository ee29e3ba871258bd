//! Which library handles are set to a stream, and which executables are bound to it.
//!
//! The rule: none refers to a destroyed stream. A call that destroys a stream unbinds its users first, while it holds
//! the stream exclusively, so that no other can be bound. A call that binds or unbinds a user holds the user
//! exclusively. So a call that holds a user exclusively can use its stream without finding it by id.
//!
//! Default streams are never destroyed, and their users are not registered.

use std::collections::BTreeSet;
use std::sync::Mutex;

use warpool_driver::{GraphExecId, HandleId, Result, StreamId};

use crate::CudaDriver;
use crate::error::CallSite;
use crate::sync::lock;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StreamUser {
    Handle(HandleId),
    Exec(GraphExecId),
}

#[derive(Default)]
pub(crate) struct StreamUsers(Mutex<BTreeSet<(StreamId, StreamUser)>>);

impl StreamUsers {
    /// Registers that `user` changed from one stream to another.
    pub(crate) fn rebind(&self, user: StreamUser, from: Option<StreamId>, to: Option<StreamId>) {
        let mut users = lock(&self.0);
        if let Some(stream) = from {
            users.remove(&(stream, user));
        }
        if let Some(stream) = to {
            users.insert((stream, user));
        }
    }

    fn of(&self, stream: StreamId) -> Vec<StreamUser> {
        let first = (stream, StreamUser::Handle(HandleId(0)));
        let users = lock(&self.0);
        users.range(first..).take_while(|(known, _)| *known == stream).map(|&(_, user)| user).collect()
    }

    /// How many are registered.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        lock(&self.0).len()
    }
}

impl CudaDriver {
    /// Unbinds all users of a stream that is about to be destroyed, and that the caller holds exclusively. If it is not
    /// destroyed after all, executables bind again by themselves; handles must be set to it again.
    pub(crate) fn unbind_stream(&self, site: CallSite<'_>, stream: StreamId) -> Result<()> {
        for user in self.stream_users.of(stream) {
            match user {
                StreamUser::Handle(handle) => self.unbind_handle(site, handle, stream)?,
                StreamUser::Exec(exec) => self.unbind_exec(exec, stream),
            }
            self.stream_users.rebind(user, Some(stream), None);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_stream() {
        let users = StreamUsers::default();
        let all =
            [StreamUser::Handle(HandleId(7)), StreamUser::Handle(HandleId(u64::MAX)), StreamUser::Exec(GraphExecId(1))];
        for user in all {
            users.rebind(user, None, Some(StreamId(5)));
        }
        users.rebind(all[0], None, Some(StreamId(6)));
        assert_eq!(users.of(StreamId(5)), all);
        users.rebind(all[1], Some(StreamId(5)), Some(StreamId(6)));
        assert_eq!((users.of(StreamId(5)), users.of(StreamId(4))), (vec![all[0], all[2]], vec![]));
        assert_eq!(users.of(StreamId(6)), all[..2]);
    }
}
