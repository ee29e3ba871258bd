//! Hints to the processor's cache.

#![cfg_attr(
    all(target_arch = "x86_64", not(miri)),
    expect(unsafe_code, reason = "the instruction is not safe to call")
)]

/// Begins to load what is at this address, whatever that is, so that a later access need not wait for it.
#[inline(always)]
pub(super) fn prefetch<T>(at: *const T) {
    // SAFETY: a prefetch reads nothing that the program could see, and addresses where nothing is do no harm.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}
