#include "errors.h"

#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <utility>

#include "warpool_torch.h"

namespace warpool_torch {

namespace {

// The kept part of an exception. Not a std::exception_ptr: with newer compilers it needs a newer libstdc++ than some
// systems have on which PyTorch runs.
struct Kept {
    std::string text;
    bool out_of_memory;
};

thread_local std::optional<Kept> kept;

std::string last_error() {
    std::string text(warpool_last_error(nullptr, 0) + 1, '\0');
    text.resize(warpool_last_error(text.data(), text.size()));
    return text;
}

}  // namespace

void throw_last_error() {
    const auto thrown = std::exchange(kept, std::nullopt).value_or(
        Kept{last_error(), warpool_last_error_is_out_of_memory() != 0});
    TORCH_CHECK_WITH(OutOfMemoryError, !thrown.out_of_memory, thrown.text);
    TORCH_CHECK(false, thrown.text);
}

void forget_kept() noexcept {
    kept.reset();
}

void throw_kept() {
    if (kept.has_value()) {
        throw_last_error();
    }
}

void keep_exception() noexcept {
    try {
        throw;
    } catch (const c10::OutOfMemoryError& error) {
        kept = {error.what_without_backtrace(), true};
    } catch (const c10::Error& error) {
        kept = {error.what_without_backtrace(), false};
    } catch (const std::exception& error) {
        kept = {error.what(), false};
    } catch (...) {
        kept = {"an exception of an unknown type", false};
    }
}

}  // namespace warpool_torch
