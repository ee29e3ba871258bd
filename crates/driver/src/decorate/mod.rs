//! Drivers around drivers.
