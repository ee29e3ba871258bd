//! Running a thread on one core after another: where others use the machine too, cores differ in speed, and a thread
//! that is not moved stays on the one that it happened to start on.

/// The cores that this thread may run on. Dropped, it may run on all of them again.
pub use system::Cores;

#[cfg(target_os = "linux")]
mod system {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    pub struct Cores {
        allowed: CpuSet,
        numbers: Vec<usize>,
    }

    impl Cores {
        /// Of the calling thread.
        pub fn allowed() -> Self {
            // Where the system does not tell, there is none to choose.
            let allowed = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
            let numbers = (0..CpuSet::MAX_CPU).filter(|&number| allowed.is_set(number)).collect();
            Self { allowed, numbers }
        }

        pub fn count(&self) -> usize {
            self.numbers.len()
        }

        /// Moves the calling thread to one of them. Where the system refuses, the thread stays: it measures all the
        /// same.
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
