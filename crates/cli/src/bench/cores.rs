//! Runs a thread on one core after another. On a shared machine, cores differ in speed, and a thread usually stays on
//! the core that it started on.

/// The cores that this thread may run on. When dropped, the thread may run on all of them again.
pub use system::Cores;

#[cfg(target_os = "linux")]
mod system {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    pub struct Cores {
        allowed: CpuSet,
        numbers: Vec<usize>,
    }

    impl Cores {
        /// The cores of the calling thread.
        pub fn allowed() -> Self {
            // If the system does not report them, there is none to choose.
            let allowed = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
            let numbers = (0..CpuSet::MAX_CPU).filter(|&number| allowed.is_set(number)).collect();
            Self { allowed, numbers }
        }

        pub fn count(&self) -> usize {
            self.numbers.len()
        }

        /// Moves the calling thread to one of them. If the system refuses, the thread stays where it is and measures
        /// there.
        pub fn run_on(&self, index: usize) {
            if let Some(&number) = self.numbers.get(index) {
                let mut one = CpuSet::new();
                one.set(number);
                let _ = sched_setaffinity(None, &one);
            }
        }
    }

    impl Drop for Cores {
        fn drop(&mut self) {
            if !self.numbers.is_empty() {
                let _ = sched_setaffinity(None, &self.allowed);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub struct Cores;

    impl Cores {
        pub fn allowed() -> Self {
            Self
        }

        pub fn count(&self) -> usize {
            0
        }

        pub fn run_on(&self, _index: usize) {}
    }
}
