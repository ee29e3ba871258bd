// Converts plain data of the C interface to PyTorch's types, and back.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <functional>
#include <memory>

#include "errors.h"
#include "versions.h"
#include "warpool_torch.h"

namespace warpool_torch {

inline warpool_pool_id pool_id(c10::MempoolId_t id) {
    return {id.first, id.second};
}

inline c10::MempoolId_t mempool_id(warpool_pool_id id) {
    return {id.graph, id.user};
}

inline c10::CachingAllocator::Stat stat(const warpool_stat& values) {
    c10::CachingAllocator::Stat stat;
    stat.current = values.current;
    stat.peak = values.peak;
    stat.allocated = values.allocated;
    stat.freed = values.freed;
    return stat;
}

inline c10::CachingAllocator::StatArray stat_array(const warpool_stat_by_kind& values) {
    return {stat(values.all), stat(values.small_pool), stat(values.large_pool)};
}

// A function object as the argument of C callbacks, and how it is deleted. The C interface deletes it, also if the call
// that takes it fails.
template <typename T>
void* user_data(T value) {
    return new T(std::move(value));
}

template <typename T>
void delete_user(void* user) {
    delete static_cast<T*>(user);
}

// Calls `act` for a callback of the C interface; if it throws, returns `failed`.
template <typename R, typename F>
R without_exception(R failed, F&& act) noexcept {
    try {
        return act();
    } catch (...) {
        return failed;
    }
}

// The same for a callback whose failure makes the current call fail, which then throws the exception.
template <typename R, typename F>
R guarded(R failed, F&& act) noexcept {
    try {
        return act();
    } catch (...) {
        keep_exception();
        return failed;
    }
}

}  // namespace warpool_torch
