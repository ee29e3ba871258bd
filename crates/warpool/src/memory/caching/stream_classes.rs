//! Classes of streams, which decide the sizes of their expandable segments.
//!
//! There is no notification when a stream is destroyed. So whenever the number of entries has doubled since the last
//! check, the driver is asked which streams still exist: the amortized cost of a call is constant.

use std::collections::BTreeMap;
use std::sync::Mutex;

use warpool_driver::{Driver, ErrorCode, StreamId};

use crate::lock;

/// The first check is made at twice this number.
const CHECKED_MIN: usize = 32;

#[derive(Default)]
pub(super) struct StreamClasses(Mutex<Classes>);

#[derive(Default)]
struct Classes {
    by_stream: BTreeMap<StreamId, String>,
    /// How many there were after the last check.
    checked: usize,
}

impl StreamClasses {
    /// The class of a stream, if it has one.
    pub(super) fn get(&self, stream: StreamId) -> Option<String> {
        lock(&self.0).by_stream.get(&stream).cloned()
    }

    /// Sets the class of a stream; an empty one removes it. Occasionally removes the classes of destroyed streams.
    pub(super) fn set(&self, driver: &dyn Driver, stream: StreamId, class: &str) {
        let to_check = lock(&self.0).set(stream, class);
        if to_check.is_empty() {
            return;
        }
        let is_destroyed = |stream: &StreamId| {
            driver.stream_handle(*stream).is_err_and(|error| error.code == ErrorCode::InvalidHandle)
        };
        let destroyed: Vec<StreamId> = to_check.into_iter().filter(is_destroyed).collect();
        lock(&self.0).remove(&destroyed);
    }
}

impl Classes {
    /// Returns the streams to be checked, usually none.
    fn set(&mut self, stream: StreamId, class: &str) -> Vec<StreamId> {
        if class.is_empty() {
            self.by_stream.remove(&stream);
            return Vec::new();
        }
        self.by_stream.insert(stream, class.to_owned());
        if self.by_stream.len() < 2 * self.checked.max(CHECKED_MIN) {
            return Vec::new();
        }
        self.checked = self.by_stream.len();
        self.by_stream.keys().copied().collect()
    }

    fn remove(&mut self, destroyed: &[StreamId]) {
        for stream in destroyed {
            self.by_stream.remove(stream);
        }
        self.checked = self.by_stream.len();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use warpool_driver::decorate::Counting;
    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{Call, DeviceId, StreamOptions, Streams as _};

    use super::*;

    /// Issue 12: the classes of destroyed streams were never removed.
    #[test]
    fn classes_of_destroyed_streams_are_removed() {
        let driver = Counting::new(Arc::new(SimDriver::new(SimConfig::default())));
        let create = || driver.stream_create(DeviceId(0), StreamOptions::default()).expect("streams are not limited");
        let classes = StreamClasses::default();
        let kept: Vec<_> = (0..100).map(|_| create()).collect();
        kept.iter().for_each(|&stream| classes.set(&driver, stream, "kept"));
        for _ in 0..10_000 {
            let stream = create();
            classes.set(&driver, stream, "passing");
            assert_eq!(classes.get(stream).as_deref(), Some("passing"));
            driver.stream_destroy(stream).expect("the stream exists");
        }
        assert!(kept.iter().all(|&stream| classes.get(stream).as_deref() == Some("kept")));
        let (count, asked) = (lock(&classes.0).by_stream.len(), driver.count(Call::StreamHandle).calls);
        assert!(count <= 2 * kept.len() + 1, "{count} classes for {} streams", kept.len());
        assert!(asked <= 3 * 10_100, "the driver was asked {asked} times");
    }
}
