//! From CUDA's numbers to the contract's errors. A [`Site`] stands for one call of the contract that is under way: it
//! knows the call's name, so that every error carries it.

use warpool_driver::{Call, DriverError, ErrorCode, Result};

use crate::callback;

/// A call of the contract that is under way.
#[derive(Clone, Copy)]
pub(crate) struct Site {
    call: &'static str,
}

/// Begins a call. Inside a host callback none may begin: some would deadlock, and CUDA forbids them all.
pub(crate) fn enter(call: Call) -> Result<Site> {
    enter_named(call.name())
}

/// The same for a method that is this backend's own.
pub(crate) fn enter_named(call: &'static str) -> Result<Site> {
    let site = Site { call };
    if callback::is_running() { Err(site.error(ErrorCode::NotPermitted)) } else { Ok(site) }
}

impl Site {
    /// Work of our own in the name of a call.
    pub(crate) const fn of(call: Call) -> Self {
        Self { call: call.name() }
    }

    /// Takes the number that a CUDA function returned.
    pub(crate) fn check(self, number: u32) -> Result<()> {
        match number {
            0 => Ok(()),
            number => Err(self.error(ErrorCode::from_number(number))),
        }
    }

    /// The same for a question: whether it is done.
    pub(crate) fn check_done(self, number: u32) -> Result<bool> {
        if number == ErrorCode::NotReady.number() { Ok(false) } else { self.check(number).map(|()| true) }
    }

    /// A failure of this call.
    pub(crate) const fn error(self, code: ErrorCode) -> DriverError {
        DriverError::new(self.call, code)
    }

    /// A failure of this call, saying more.
    pub(crate) fn explain(self, code: ErrorCode, detail: impl Into<String>) -> DriverError {
        self.error(code).with_detail(detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_results_under_the_name_of_the_call() {
        let site = enter(Call::MemAlloc).expect("no callback runs here");
        assert_eq!(site.check(0), Ok(()));
        assert_eq!(site.check(2), Err(DriverError::new("mem_alloc", ErrorCode::OutOfMemory)));
        assert_eq!(site.check(4242), Err(DriverError::new("mem_alloc", ErrorCode::Unknown(4242))));
    }

    #[test]
    fn not_ready_is_an_answer_where_one_asks() {
        let site = enter(Call::EventQuery).expect("no callback runs here");
        assert_eq!(site.check_done(0), Ok(true));
        assert_eq!(site.check_done(600), Ok(false));
        assert_eq!(site.check_done(700), Err(site.error(ErrorCode::IllegalAddress)));
    }
}
