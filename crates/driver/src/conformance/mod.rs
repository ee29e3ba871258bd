//! One suite over every driver.
