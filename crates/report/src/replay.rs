//! The conditions of a replay as JSON.

use serde_json::{Value, json};
use warpool_trace::cards::DeviceOrigin;
use warpool_trace::replay::InForce;

/// What was in force, as JSON.
#[must_use]
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
        "device_origin": in_force.device_origin.name(),
        "device_name": in_force.device_name,
        "device_assumed": in_force.device_origin == DeviceOrigin::Unknown,
        "device_bytes_simulated": in_force.device_bytes_simulated,
        "bytes_available": in_force.bytes_available,
        "memory_limit_bytes": in_force.memory_limit,
        "memory_limit_origin": in_force.limit_origin.name(),
        "memory_limit_lifted_bytes": in_force.limit_lifted,
    })
}
