//! Changes that a reader can make, as the page lists them: what, how to apply it, and what it gives.

use serde_json::{Value, json};
use warpool_trace::explain::{Change, Explanation, Fit};

use crate::bytes_text::text;

/// The list for the page. Each has `title`, `detail`, `apply` (a line to copy, or null), `fits` (null if that was not
/// replayed), `bytes_saved` and `margin_bytes` (null if unknown).
pub fn advice_list(explanation: &Explanation) -> Vec<Value> {
    explanation.fits.iter().map(of_fit).collect()
}

fn of_fit(fit: &Fit) -> Value {
    let title = match fit.change {
        Change::Settings => format!("Set {}", fit.set),
        Change::Limit => "Lift the memory limit".to_owned(),
        Change::Allocator => "Use the paged allocator".to_owned(),
        Change::Others => "Use the device alone".to_owned(),
        Change::Device => format!("Use a device of {}", fit.set),
    };
    let orders = &fit.orders;
    let result = match fit.fits {
        true => "fits in every order of addresses",
        false => "does not fit in every order of addresses",
    };
    json!({
        "title": title,
        "detail": format!("Replayed: {result}; reserves {} at its peak.", text(orders.peak_reserved_bytes_most)),
        "apply": (!fit.variable.is_empty()).then(|| format!("export {}={}", fit.variable, fit.set)),
        "fits": fit.fits,
        "bytes_saved": Value::Null,
        "margin_bytes": orders.margin_bytes_least.filter(|_| fit.fits),
    })
}
