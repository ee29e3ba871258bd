// Times pairs of an allocation and its free through PyTorch's C++, for speed.py: nanoseconds per pair, with whatever
// allocator PyTorch has.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <chrono>

namespace {

template <typename Pair>
double nanoseconds(long count, Pair&& pair) {
    const auto begun = std::chrono::steady_clock::now();
    for (long i = 0; i < count; ++i) {
        pair();
    }
    const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - begun;
    return elapsed.count() / static_cast<double>(count);
}

}  // namespace

// raw_alloc and raw_delete.
extern "C" __attribute__((visibility("default"))) double raw_pair(size_t bytes, long count) {
    namespace caching = c10::cuda::CUDACachingAllocator;
    return nanoseconds(count, [&] { caching::raw_delete(caching::raw_alloc(bytes)); });
}

// Pinned memory, and its deleter.
extern "C" __attribute__((visibility("default"))) double pinned_pair(size_t bytes, long count) {
    auto* host = at::getHostAllocator(at::kCUDA);
    return nanoseconds(count, [&] { host->allocate(bytes); });
}
