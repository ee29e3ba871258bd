//! The pinned host allocator on the simulated machine: sizes, places, waiting, caps, settings, counters, graphs.

mod common;

#[path = "host/caps.rs"]
mod caps;
#[path = "host/graphs.rs"]
mod graphs;
#[path = "host/hot.rs"]
mod hot;
#[path = "host/lab.rs"]
mod lab;
#[path = "host/leaving.rs"]
mod leaving;
#[path = "host/places.rs"]
mod places;
#[path = "host/settings.rs"]
mod settings;
#[path = "host/shown.rs"]
mod shown;
#[path = "host/waiting.rs"]
mod waiting;
