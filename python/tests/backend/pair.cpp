// Pairs of an allocation and its free through PyTorch's classes, for counting instructions: `pair WHAT SIZE COUNT`.
// WHAT is raw (raw_alloc and raw_delete), turns (the same, but two blocks live in turns, of SIZE and of twice that, so
// that none is requested again right after its free), owned (allocate, and the deleter), pinned or nothing (an empty
// loop). Prints the calls of the CUDA runtime that a pair makes.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdio>
#include <cstdlib>
#include <string>

extern "C" int warpool_backend_install();
extern "C" const char* warpool_backend_error();
extern long runtime_calls;

namespace caching = c10::cuda::CUDACachingAllocator;

// The part whose instructions count.
extern "C" __attribute__((noinline)) void measured(const std::string& what, size_t size, long count) {
    auto* host = at::getHostAllocator(at::kCUDA);
    auto* device = caching::get();
    void* before = what[0] == 't' ? device->raw_alloc(2 * size) : nullptr;
    for (long i = 0; i < count; ++i) {
        if (what[0] == 'r') {
            device->raw_delete(device->raw_alloc(size));
        } else if (what[0] == 't') {
            void* next = device->raw_alloc(i % 2 == 0 ? size : 2 * size);
            device->raw_delete(before);
            before = next;
        } else if (what[0] == 'o') {
            device->allocate(size);
        } else if (what[0] == 'p') {
            host->allocate(size);
        }
    }
    device->raw_delete(before);
}

int main(int argc, char** argv) {
    if (argc != 4 || warpool_backend_install() != 0) {
        std::fprintf(stderr, "usage: pair raw|turns|owned|pinned|nothing SIZE COUNT; %s\n", warpool_backend_error());
        return 2;
    }
    caching::init(1);
    const std::string what = argv[1];
    const size_t size = std::strtoull(argv[2], nullptr, 10);
    const long count = std::strtol(argv[3], nullptr, 10);
    const auto before = runtime_calls;
    measured(what, size, count);
    std::printf("%.1f calls of the CUDA runtime per pair\n", static_cast<double>(runtime_calls - before) / count);
    return 0;
}
