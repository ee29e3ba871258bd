#include "errors.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "warpool_torch.h"

namespace warpool_torch {

namespace {

thread_local std::exception_ptr kept;

std::string last_error() {
    std::string text(warpool_last_error(nullptr, 0) + 1, '\0');
    text.resize(warpool_last_error(text.data(), text.size()));
    return text;
}

}  // namespace

void throw_last_error() {
    if (kept) {
        std::rethrow_exception(std::exchange(kept, nullptr));
    }
    TORCH_CHECK_WITH(OutOfMemoryError, !warpool_last_error_is_out_of_memory(), last_error());
    TORCH_CHECK(false, last_error());
}

void keep_exception() noexcept {
    kept = std::current_exception();
}

}  // namespace warpool_torch
