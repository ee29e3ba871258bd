//! CUDA's result codes as errors of the contract. A [`CallSite`] stands for one call of the contract: it puts the
//! call's name into every error, and records errors that invalidate captures.

use warpool_driver::{Call, DriverError, ErrorCode, Result, fork};

use crate::CudaDriver;
use crate::callback;
use crate::capture_errors::CaptureErrors;

/// A call of the contract in progress.
#[derive(Clone, Copy)]
pub(crate) struct CallSite<'a> {
    call: &'static str,
    capture_errors: &'a CaptureErrors,
}

impl CudaDriver {
    /// Begins a call. `NotPermitted` inside a host callback: CUDA forbids every call there, and some would deadlock.
    /// `NotInitialized` in a forked child, before any lock is taken.
    pub(crate) fn enter(&self, call: Call) -> Result<CallSite<'_>> {
        self.enter_named(call.name())
    }

    /// The same for a method that only this backend has.
    pub(crate) fn enter_named(&self, call: &'static str) -> Result<CallSite<'_>> {
        let site = CallSite { call, capture_errors: &self.capture_errors };
        if !self.origin.is_here() {
            return Err(fork::error(call));
        }
        if callback::is_running() { Err(site.error(ErrorCode::NotPermitted)) } else { Ok(site) }
    }

    /// For work that this backend does by itself, reported as `call`.
    pub(crate) const fn site(&self, call: Call) -> CallSite<'_> {
        CallSite { call: call.name(), capture_errors: &self.capture_errors }
    }
}

impl CallSite<'_> {
    /// Converts the number that a CUDA function returned.
    pub(crate) fn check(self, number: u32) -> Result<()> {
        match number {
            0 => Ok(()),
            number => Err(self.refused(ErrorCode::from_number(number))),
        }
    }

    /// The same for a query: whether the work is done.
    pub(crate) fn check_done(self, number: u32) -> Result<bool> {
        if number == ErrorCode::NotReady.number() { Ok(false) } else { self.check(number).map(|()| true) }
    }

    /// The same for a function that invalidates no capture, whatever it returns.
    pub(crate) fn check_harmless(self, number: u32) -> Result<()> {
        match number {
            0 => Ok(()),
            number => Err(self.error(ErrorCode::from_number(number))),
        }
    }

    /// An error of this call.
    pub(crate) const fn error(self, code: ErrorCode) -> DriverError {
        DriverError::new(self.call, code)
    }

    /// An error of this call, with a detail.
    pub(crate) fn explain(self, code: ErrorCode, detail: impl Into<String>) -> DriverError {
        self.error(code).with_detail(detail)
    }

    /// An error that CUDA returned. Recorded if a capture is the reason.
    #[cold]
    pub(crate) fn refused(self, code: ErrorCode) -> DriverError {
        let error = self.error(code);
        if error.is_capture_forbidden() {
            self.invalidated_capture(code);
        }
        error
    }

    /// Records that this call has probably invalidated a capture.
    pub(crate) fn invalidated_capture(self, code: ErrorCode) {
        self.capture_errors.record(self.call, code);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_cuda;

    #[test]
    fn numbers_become_results_with_the_name_of_the_call() {
        let driver = fake_cuda::driver();
        let site = driver.enter(Call::MemAlloc).expect("not in a callback");
        assert_eq!(site.check(0), Ok(()));
        assert_eq!(site.check(2), Err(DriverError::new("mem_alloc", ErrorCode::OutOfMemory)));
        assert_eq!(site.check(4242), Err(DriverError::new("mem_alloc", ErrorCode::Unknown(4242))));
    }

    #[test]
    fn not_ready_is_no_error_of_a_query() {
        let driver = fake_cuda::driver();
        let site = driver.enter(Call::EventQuery).expect("not in a callback");
        assert_eq!(site.check_done(0), Ok(true));
        assert_eq!(site.check_done(600), Ok(false));
        assert_eq!(site.check_done(700), Err(site.error(ErrorCode::IllegalAddress)));
    }

    #[test]
    fn only_errors_that_a_capture_caused_are_recorded() {
        let driver = fake_cuda::driver();
        let site = driver.enter(Call::MemAlloc).expect("not in a callback");
        let start = driver.capture_errors.count();
        let _ = (site.check(2), site.check_harmless(906), site.check(901), site.check_done(600), site.check(909));
        assert_eq!(driver.capture_errors.count(), start);
        let _ = (site.check(900), site.check_done(908));
        assert_ne!(driver.capture_errors.count(), start);
    }
}
