// Failures of the C interface as PyTorch's exceptions, and exceptions of PyTorch's callbacks, which must not cross the
// C interface.
#pragma once

namespace warpool_torch {

// Throws the last error of this thread: c10::OutOfMemoryError if it is that, else c10::Error. If a callback of PyTorch
// threw during the call, with the text of that exception.
[[noreturn]] void throw_last_error();

// Throws if the status of a call is a failure.
inline void check(int status) {
    if (__builtin_expect(status != 0, 0)) {
        throw_last_error();
    }
}

// Keeps the text of the exception that is being handled until the current call of the C interface on this thread
// returns.
void keep_exception() noexcept;

// Forgets what callbacks of earlier calls kept.
void forget_kept() noexcept;

// Throws the exception that a callback kept, if any.
void throw_kept();

// Makes a call with callbacks that fill a container, and throws if it fails or if one of them kept an exception: the
// container is not complete then.
template <typename Call>
void check_filled(Call&& call) {
    forget_kept();
    check(call());
    throw_kept();
}

}  // namespace warpool_torch
