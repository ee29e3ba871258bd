//! The conditions of a replay as JSON.

use serde_json::{Value, json};
use warpool_trace::replay::InForce;

/// What was in force, as JSON.
pub fn in_force_object(in_force: &InForce) -> Value {
    json!({
        "settings": in_force.settings,
        "settings_recorded": in_force.settings_recorded,
        "changes": in_force.changes.iter().map(|change| json!({
            "key": change.key,
            "recorded": change.recorded,
            "used": change.used,
        })).collect::<Vec<_>>(),
        "allocator": in_force.allocator.name(),
        "allocator_recorded": in_force.allocator_recorded.name(),
        "device_bytes_total": in_force.device_bytes_total,
        "device_assumed": in_force.device_assumed,
        "bytes_available": in_force.bytes_available,
        "memory_limit_bytes": in_force.memory_limit,
        "memory_limit_origin": in_force.limit_origin.name(),
        "memory_limit_lifted_bytes": in_force.limit_lifted,
    })
}
