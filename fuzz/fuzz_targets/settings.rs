//! Parses any text as a settings string: no panic. What is accepted is accepted again as recorded, and its size rules
//! hold.

#![no_main]

use libfuzzer_sys::fuzz_target;
use warpool::memory::settings::lint;
use warpool::memory::{Settings, SizeRules};

fuzz_target!(|text: &str| {
    let checked = lint(text);
    let Ok(settings) = Settings::parse(text) else { return };
    assert!(checked.effective.is_some(), "accepted, but not explained");
    let recorded = Settings::from_recorded(&settings.recorded()).expect("accepted before");
    assert_eq!(recorded.large_segment_bytes, settings.large_segment_bytes);
    // A recording holds this limit as a signed number, as PyTorch's do. A larger one is recorded as none: no request is
    // that large.
    let limit = settings.max_split_bytes.filter(|bytes| i64::try_from(*bytes).is_ok());
    assert_eq!(recorded.max_split_bytes, limit);
    assert_eq!(recorded.expandable_segments, settings.expandable_segments);
    let updated = settings.updated(text).expect("accepted before");
    assert_eq!(updated.large_segment_bytes, settings.large_segment_bytes);
    let rules = SizeRules::new(&settings);
    for bytes in [0, 1, 512, 513, 1 << 20, (1 << 20) + 1, 10 << 20, 1 << 32, SizeRules::REQUEST_TOO_LARGE - 1] {
        let size = rules.round(bytes);
        assert!(size >= bytes && size >= 512, "{bytes} became {size}");
        assert!(rules.segment(size) >= size.min(1 << 20), "a segment for {size}");
    }
});
