//! Planted defects: deliberate mistakes, each of which breaks one rule of the design. They show that tests and `soak`
//! would notice the mistake; `cargo run -p xtask -- defects` runs both with each of them.
//!
//! For test builds only. The cargo feature `planted-defects` compiles them in, and the environment variable
//! `WARPOOL_DEFECT` switches one on by its number. Without the feature [`Defect::is_on`] is the constant `false`, and
//! nothing of this is left in the program. Unit tests can also switch one on in their thread, with `Defect::with`.

#[cfg(test)]
use std::cell::Cell;
#[cfg(feature = "planted-defects")]
use std::sync::OnceLock;

/// Declares the enum, and what is known about each defect: its number, the rule that it breaks, the test that catches
/// it (the test binary and a filter of its names), and the program of `soak` that does (campaign and number, seed 0).
macro_rules! defects {
    ($($number:literal $name:ident: $rule:literal, $test:literal, $soak:literal;)*) => {
        /// A planted defect. The text says what the code does wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Defect {
            $(#[doc = $rule] $name = $number,)*
        }

        #[cfg(feature = "planted-defects")]
        impl Defect {
            /// All of them, by number.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// What the code does wrong.
            #[must_use]
            pub const fn rule(self) -> &'static str {
                match self { $(Self::$name => $rule),* }
            }

            /// The test that catches it: a test binary of this crate, and a filter of test names.
            #[must_use]
            pub const fn test(self) -> &'static str {
                match self { $(Self::$name => $test),* }
            }

            /// The program of `soak` that catches it: its campaign and its number, with seed 0.
            #[must_use]
            pub const fn soak(self) -> &'static str {
                match self { $(Self::$name => $soak),* }
            }
        }
    };
}

defects! {
    1 NoEventBetweenHeaps: "a stream that takes pages of another stream's heap does not wait for that stream",
        "warpool paged::tests::defects::a_missing_event", "";
    2 ForgetsBystanders: "streams that use memory although nobody said so are not waited for",
        "warpool paged::tests::bystanders", "";
    3 UnmapsTooEarly: "an old mapping is undone while its stream may still use it",
        "warpool paged::tests::defects::unmapping_too_early", "";
    4 SleepDoesNotWait: "memory falls asleep while work in streams may still use it",
        "warpool sleep::tests", "";
    5 SleepForgetsBlocks: "the last allocated block of a segment is not copied when it falls asleep",
        "warpool sleep::tests", "";
    6 WakeDoesNotZero: "memory whose contents were discarded is not zeroed when it wakes",
        "warpool sleep::tests", "";
    7 FailedWakeKeepsMemory: "a failed wake keeps the memory that it created",
        "warpool sleep::tests", "";
}

#[cfg(test)]
thread_local! {
    static IN_THREAD: Cell<Option<Defect>> = const { Cell::new(None) };
}

/// The number in `WARPOOL_DEFECT`, read once; 0 is none.
#[cfg(feature = "planted-defects")]
static IN_PROCESS: OnceLock<u32> = OnceLock::new();

impl Defect {
    /// Whether it is switched on: for this process, or by a unit test in this thread.
    #[cfg(any(test, feature = "planted-defects"))]
    pub(crate) fn is_on(self) -> bool {
        #[cfg(test)]
        if IN_THREAD.get() == Some(self) {
            return true;
        }
        #[cfg(feature = "planted-defects")]
        return self as u32 == number_in_process();
        #[cfg(not(feature = "planted-defects"))]
        false
    }

    /// Never: this is no test build.
    #[cfg(not(any(test, feature = "planted-defects")))]
    #[inline(always)]
    pub(crate) const fn is_on(self) -> bool {
        false
    }

    /// Whether a unit test has switched one on in this thread.
    #[cfg(test)]
    pub(crate) fn any_is_on() -> bool {
        IN_THREAD.get().is_some()
    }

    /// Runs `body` with it, in this thread.
    #[cfg(test)]
    pub(crate) fn with<R>(self, body: impl FnOnce() -> R) -> R {
        IN_THREAD.set(Some(self));
        let result = body();
        IN_THREAD.set(None);
        result
    }
}

#[cfg(feature = "planted-defects")]
fn number_in_process() -> u32 {
    *IN_PROCESS.get_or_init(|| {
        let number = std::env::var("WARPOOL_DEFECT").unwrap_or_default();
        let known = |number: &u32| *number == 0 || Defect::ALL.iter().any(|&defect| defect as u32 == *number);
        match number.parse() {
            _ if number.is_empty() => 0,
            Ok(number) if known(&number) => number,
            _ => panic!("WARPOOL_DEFECT must be 0 or the number of a planted defect, not {number:?}"),
        }
    })
}
