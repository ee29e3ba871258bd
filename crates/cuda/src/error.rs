//! From CUDA's numbers to the contract's errors. A [`Site`] stands for one call of the contract that is under way: it
//! knows the call's name, so that every error carries it, and notes refusals that break captures.

use warpool_driver::{Call, DriverError, ErrorCode, Result};

use crate::CudaDriver;
use crate::blame::Blame;
use crate::callback;

/// A call of the contract that is under way.
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    call: &'static str,
    blame: &'a Blame,
}

impl CudaDriver {
    /// Begins a call. Inside a host callback none may begin: some would deadlock, and CUDA forbids them all.
    pub(crate) fn enter(&self, call: Call) -> Result<Site<'_>> {
        self.enter_named(call.name())
    }

    /// The same for a method that is this backend's own.
    pub(crate) fn enter_named(&self, call: &'static str) -> Result<Site<'_>> {
        let site = Site { call, blame: &self.blame };
        if callback::is_running() { Err(site.error(ErrorCode::NotPermitted)) } else { Ok(site) }
    }

    /// Work of our own in the name of a call.
    pub(crate) const fn site(&self, call: Call) -> Site<'_> {
        Site { call: call.name(), blame: &self.blame }
    }
}

impl Site<'_> {
    /// Takes the number that a CUDA function returned.
    pub(crate) fn check(self, number: u32) -> Result<()> {
        match number {
            0 => Ok(()),
            number => Err(self.refused(ErrorCode::from_number(number))),
        }
    }

    /// The same for a question: whether it is done.
    pub(crate) fn check_done(self, number: u32) -> Result<bool> {
        if number == ErrorCode::NotReady.number() { Ok(false) } else { self.check(number).map(|()| true) }
    }

    /// The same for a function that breaks no capture, whatever it says.
    pub(crate) fn check_harmless(self, number: u32) -> Result<()> {
        match number {
            0 => Ok(()),
            number => Err(self.error(ErrorCode::from_number(number))),
        }
    }

    /// A failure of this call.
    pub(crate) const fn error(self, code: ErrorCode) -> DriverError {
        DriverError::new(self.call, code)
    }

    /// A failure of this call, saying more.
    pub(crate) fn explain(self, code: ErrorCode, detail: impl Into<String>) -> DriverError {
        self.error(code).with_detail(detail)
    }

    /// A failure of this call that CUDA reported. If a capture is the reason, it is remembered.
    #[cold]
    pub(crate) fn refused(self, code: ErrorCode) -> DriverError {
        let error = self.error(code);
        if error.is_capture_forbidden() {
            self.broke_capture(code);
        }
        error
    }

    /// Notes that this call most likely broke a capture.
    pub(crate) fn broke_capture(self, code: ErrorCode) {
        self.blame.note(self.call, code);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn numbers_become_results_under_the_name_of_the_call() {
        let driver = fake::driver();
        let site = driver.enter(Call::MemAlloc).expect("no callback runs here");
        assert_eq!(site.check(0), Ok(()));
        assert_eq!(site.check(2), Err(DriverError::new("mem_alloc", ErrorCode::OutOfMemory)));
        assert_eq!(site.check(4242), Err(DriverError::new("mem_alloc", ErrorCode::Unknown(4242))));
    }

    #[test]
    fn not_ready_is_an_answer_where_one_asks() {
        let driver = fake::driver();
        let site = driver.enter(Call::EventQuery).expect("no callback runs here");
        assert_eq!(site.check_done(0), Ok(true));
        assert_eq!(site.check_done(600), Ok(false));
        assert_eq!(site.check_done(700), Err(site.error(ErrorCode::IllegalAddress)));
    }

    #[test]
    fn only_refusals_for_the_sake_of_a_capture_are_remembered() {
        let driver = fake::driver();
        let site = driver.enter(Call::MemAlloc).expect("no callback runs here");
        let start = driver.blame.mark();
        let _ = (site.check(2), site.check_harmless(906), site.check(901), site.check_done(600), site.check(909));
        assert_eq!(driver.blame.mark(), start);
        let _ = (site.check(900), site.check_done(908));
        assert_ne!(driver.blame.mark(), start);
    }
}
