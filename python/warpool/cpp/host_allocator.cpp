#include "host_allocator.h"

#include <c10/cuda/CUDAStream.h>

#include "convert.h"
#include "current.h"

namespace warpool_torch {

namespace {

using Filter = std::function<bool(c10::Stream)>;

void free_pinned(void* block) {
    warpool_pinned_free(block);
}

// `stream` points to a c10::Stream; NULL is the current one.
int filter_accepts(void* user, const void* stream) {
    return guarded(-1, [&] {
        const auto given = stream != nullptr ? *static_cast<const c10::Stream*>(stream)
                                             : c10::cuda::getCurrentCUDAStream().unwrap();
        return (*static_cast<Filter*>(user))(given) ? 1 : 0;
    });
}

at::DurationStat duration(const warpool_duration& values) {
    at::DurationStat stat;
    stat.total = values.total;
    stat.max = values.max;
    stat.min = values.min;
    stat.count = values.count;
    return stat;
}

}  // namespace

HostAllocator& host_allocator() {
    static auto* allocator = new HostAllocator();
    return *allocator;
}

c10::DataPtr HostAllocator::allocate(size_t bytes) {
    warpool_pinned_block pinned{};
    check(warpool_pinned_allocate(bytes, nullptr, &pinned));
    return {pinned.ptr, pinned.block, &free_pinned, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr HostAllocator::raw_deleter() const {
    // A block is freed by its context, not by its address.
    return nullptr;
}

void HostAllocator::copy_data(void* dest, const void* src, size_t bytes) const {
    default_copy_data(dest, src, bytes);
}

bool HostAllocator::record_event(void* ptr, void* block, c10::Stream stream) {
    (void)block;
    const c10::cuda::CUDAStream cuda_stream(stream);
    int found = 0;
    check(warpool_pinned_record_use(ptr, cuda_stream.device_index(), handle_of(cuda_stream), &stream, &found));
    return found != 0;
}

void HostAllocator::empty_cache() {
    check(warpool_pinned_empty_cache());
}

at::HostStats HostAllocator::get_stats() {
    warpool_pinned_stats_values values{};
    check(warpool_pinned_stats(&values));
    at::HostStats stats;
#if WARPOOL_TORCH_AT_LEAST(2, 10)
    stats.allocations = stat(values.allocations);
    stats.allocated_bytes = stat(values.allocated_bytes);
    stats.active_requests = stat(values.active_requests);
    stats.active_bytes = stat(values.active_bytes);
#else
    stats.segment = stat(values.allocations);
    stats.reserved_bytes = stat(values.allocated_bytes);
    stats.allocation = stat(values.active_requests);
    stats.allocated_bytes = stat(values.active_bytes);
#endif
    stats.host_alloc_time = duration(values.host_alloc_time);
    stats.host_free_time = duration(values.host_free_time);
    stats.num_host_alloc = values.num_host_alloc;
    stats.num_host_free = values.num_host_free;
    return stats;
}

void HostAllocator::reset_accumulated_stats() {
    check(warpool_pinned_reset_accumulated_stats());
}

void HostAllocator::reset_peak_stats() {
    check(warpool_pinned_reset_peak_stats());
}

void HostAllocator::begin_allocate_to_pool(c10::MempoolId_t pool, Filter filter) {
    check(warpool_pinned_pool_begin(
        pool_id(pool), &filter_accepts, user_data(std::move(filter)), &delete_user<Filter>));
}

void HostAllocator::end_allocate_to_pool(c10::MempoolId_t pool) {
    check(warpool_pinned_pool_end(pool_id(pool)));
}

void HostAllocator::release_pool(c10::MempoolId_t pool) {
    check(warpool_pinned_pool_release(pool_id(pool)));
}

}  // namespace warpool_torch
