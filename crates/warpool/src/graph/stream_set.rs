//! A set of streams that only grows, so that reading it takes no lock.

use std::sync::OnceLock;

use warpool_driver::StreamId;

/// A linked list, searched from the front: most graphs are replayed on one or two streams.
#[derive(Default)]
pub(super) struct StreamSet {
    first: OnceLock<Box<Node>>,
}

struct Node {
    stream: StreamId,
    next: OnceLock<Box<Self>>,
}

impl StreamSet {
    #[inline]
    pub(super) fn contains(&self, stream: StreamId) -> bool {
        let mut link = &self.first;
        while let Some(node) = link.get() {
            if node.stream == stream {
                return true;
            }
            link = &node.next;
        }
        false
    }

    pub(super) fn insert(&self, stream: StreamId) {
        let mut link = &self.first;
        // Two threads may insert the same stream twice. That is harmless.
        loop {
            let node = link.get_or_init(|| Box::new(Node { stream, next: OnceLock::new() }));
            if node.stream == stream {
                return;
            }
            link = &node.next;
        }
    }
}

impl Drop for StreamSet {
    fn drop(&mut self) {
        // Node by node: dropped recursively, a long list would overflow the stack.
        let mut link = self.first.take();
        while let Some(mut node) = link {
            link = node.next.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_streams_are_found_and_dropped_on_a_small_stack() {
        let set = StreamSet::default();
        let streams = 0..20_000;
        // Each appended to the last, as `insert` would after searching the whole list.
        let mut link = &set.first;
        for stream in streams.clone().map(StreamId) {
            link = &link.get_or_init(|| Box::new(Node { stream, next: OnceLock::new() })).next;
        }
        set.insert(StreamId(streams.end));
        set.insert(StreamId(7));
        assert!([0, 7, streams.end - 1, streams.end].into_iter().all(|stream| set.contains(StreamId(stream))));
        assert!(!set.contains(StreamId(streams.end + 1)));
        std::thread::Builder::new().stack_size(64 << 10).spawn(|| drop(set)).unwrap().join().unwrap();
    }
}
