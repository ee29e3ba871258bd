//! A recording as a page for the browser. `sections.rs` and `columns.rs` encode the data, `page.rs` joins it with the
//! sources in `crates/report/page`, `figures.rs` has the figures as JSON.

mod columns;
mod figures;
mod page;
mod sections;

use serde_json::json;
use warpool::memory::report::Snapshot;
use warpool_trace::explain::Frameworks;
use warpool_trace::timeline::Timeline;

pub use figures::object as figures;
pub use page::{Page, inline_sources};
use sections::device_part;
pub use sections::{DevicePart, Section};

/// No page is larger: beyond that it keeps fewer of the small allocations, and samples less often.
pub const BYTES_MAX: usize = 30_000_000;
/// More than the size of the page without its data.
const SOURCES_BYTES: usize = 200_000;

/// The page of a recording. If it would be too large, detail of the timelines is left out.
#[must_use]
pub fn page(title: &str, timelines: &mut [Timeline], snapshot: &Snapshot, frameworks: &Frameworks) -> Page {
    let (mut sections, mut devices) = (Vec::new(), Vec::new());
    for part in device_parts(timelines, snapshot, frameworks, BYTES_MAX) {
        sections.extend(part.sections);
        devices.push(part.info);
    }
    Page { title: title.to_owned(), manifest: json!({ "title": title, "devices": devices }), sections }
}

/// The parts of all devices, with less detail until they are small enough together. Encoding takes most of the time, so
/// the number of halvings is estimated, and the result is encoded again.
pub fn device_parts(
    found: &mut [Timeline],
    snapshot: &Snapshot,
    frameworks: &Frameworks,
    bytes_max: usize,
) -> Vec<DevicePart> {
    let room = bytes_max.saturating_sub(SOURCES_BYTES);
    loop {
        let part = |timeline: &Timeline| device_part(timeline, snapshot, frameworks);
        let parts: Vec<DevicePart> = found.iter().map(part).collect();
        let bytes: usize = parts.iter().map(DevicePart::bytes).sum();
        if bytes <= room || !found.iter().any(Timeline::can_reduce) {
            return parts;
        }
        let detail: usize = parts.iter().map(DevicePart::bytes_of_detail).sum();
        for _ in 0..halvings(detail, room.saturating_sub(bytes - detail)) {
            found.iter_mut().for_each(Timeline::reduce);
        }
    }
}

/// How often `bytes` are halved until they are in `room`; at least once. Half of the entries take a little more than
/// half of the bytes, so it may not be enough.
fn halvings(bytes: usize, room: usize) -> u32 {
    (1..usize::BITS).find(|&times| bytes >> times <= room).unwrap_or(usize::BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detail_is_halved_as_often_as_needed() {
        for (bytes, room, expected) in [(100, 99, 1), (100, 50, 1), (100, 49, 2), (100, 200, 1), (1000, 10, 7)] {
            assert_eq!(halvings(bytes, room), expected, "{bytes} in {room}");
        }
        assert_eq!(halvings(100, 0), 7, "until nothing is left");
    }
}
