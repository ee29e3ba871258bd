//! Which graphs use an object that must outlive them.
//!
//! A graph does not keep the modules of its kernels loaded. So a capture, its graph and the graph's executables share
//! one token, and an object that they use keeps weak references to it: while any of them exists, the object must stay.

use std::sync::{Arc, Mutex, Weak};

use crate::sync::lock;

/// A capture, its graph, and the graph's executables.
#[derive(Clone, Default)]
pub(crate) struct GraphFamily(Arc<()>);

/// The families that use an object.
#[derive(Default)]
pub(crate) struct GraphUsers(Mutex<Vec<Weak<()>>>);

impl GraphUsers {
    /// Adds a family.
    pub(crate) fn add(&self, family: &GraphFamily) {
        let mut users = lock(&self.0);
        let token = Arc::downgrade(&family.0);
        if !users.iter().any(|known| known.ptr_eq(&token)) {
            users.retain(|known| known.strong_count() > 0);
            users.push(token);
        }
    }

    /// Whether a family exists that uses the object.
    pub(crate) fn exist(&self) -> bool {
        lock(&self.0).iter().any(|known| known.strong_count() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_exist_as_long_as_a_member_of_their_family() {
        let (users, [a, b]) = (GraphUsers::default(), [GraphFamily::default(), GraphFamily::default()]);
        assert!(!users.exist());
        users.add(&a);
        users.add(&a);
        users.add(&b);
        assert_eq!(lock(&users.0).len(), 2);
        let member = a.clone();
        drop((a, b));
        assert!(users.exist());
        drop(member);
        assert!(!users.exist());
        users.add(&GraphFamily::default());
        assert_eq!(lock(&users.0).len(), 1, "dead families are dropped");
    }
}
