// Allocating and freeing, statistics, limits, streams. The hot path is allocate and free_block.
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>

#include "convert.h"
#include "current.h"
#include "device_allocator.h"
#include "errors.h"
#include "warpool_torch.h"

namespace warpool_torch {

using c10::cuda::CUDAStream;
namespace caching = c10::cuda::CUDACachingAllocator;

namespace {

std::atomic<bool> started{false};
std::atomic<bool> caching_on{true};

c10::Device cuda_device(int index) {
    return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)};
}

// Whether the calling thread has a profiler, which may record memory. Makes one call less than
// c10::memoryProfilingEnabled.
bool has_profiler() {
    return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr;
}

// Reports to PyTorch's profiler that `bytes` were allocated, or freed if it is negative.
C10_NOINLINE void report_to_profiler(void* ptr, int64_t bytes, int device) {
    warpool_device_stats_values stats{};
    if (warpool_device_stats(device, &stats, nullptr, nullptr) == 0) {
        c10::reportMemoryUsageToProfiler(
            ptr,
            bytes,
            static_cast<size_t>(stats.allocated_bytes.all.current),
            static_cast<size_t>(stats.reserved_bytes.all.current),
            cuda_device(device));
    }
}

C10_NOINLINE void report_allocated(void* ptr) {
    warpool_block_description block{};
    if (ptr != nullptr && c10::memoryProfilingEnabled() && warpool_describe_block(ptr, &block) == 0) {
        report_to_profiler(ptr, static_cast<int64_t>(block.bytes), block.device);
    }
}

C10_NOINLINE void report_out_of_memory(size_t bytes, int device) {
    warpool_device_stats_values stats{};
    if (warpool_device_stats(device, &stats, nullptr, nullptr) == 0) {
        c10::reportOutOfMemoryToProfiler(
            static_cast<int64_t>(bytes),
            static_cast<size_t>(stats.allocated_bytes.all.current),
            static_cast<size_t>(stats.reserved_bytes.all.current),
            cuda_device(device));
    }
}

[[noreturn]] C10_NOINLINE void allocation_failed(size_t bytes, int device) {
    if (warpool_last_error_is_out_of_memory() && c10::memoryProfilingEnabled()) {
        // A failure of the statistics would replace the error.
        try {
            throw_last_error();
        } catch (...) {
            report_out_of_memory(bytes, device);
            throw;
        }
    }
    throw_last_error();
}

void* allocate_on(size_t bytes, int device, cudaStream_t stream) {
    void* ptr = warpool_allocate(bytes, device, stream);
    if (C10_UNLIKELY(ptr == nullptr && bytes != 0)) {
        allocation_failed(bytes, device);
    }
    if (C10_UNLIKELY(has_profiler())) {
        report_allocated(ptr);
    }
    if (const auto* trace = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(trace != nullptr)) {
        (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
    }
    return ptr;
}

C10_NOINLINE void free_observed(void* ptr) {
    if (const auto* trace = c10::impl::GPUTrace::get_trace(); trace != nullptr) {
        (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
    }
    warpool_block_description block{};
    const bool profiled =
        ptr != nullptr && c10::memoryProfilingEnabled() && warpool_describe_block(ptr, &block) == 0;
    warpool_free_block(ptr);
    if (profiled) {
        report_to_profiler(ptr, -static_cast<int64_t>(block.bytes), block.device);
    }
}

// The deleter of every allocation. A failure is logged by the call: destructors cannot throw.
void free_block(void* ptr) {
    if (C10_UNLIKELY(has_profiler() || c10::impl::GPUTrace::get_trace() != nullptr)) {
        free_observed(ptr);
        return;
    }
    warpool_free_block(ptr);
}

}  // namespace

std::atomic<bool> only_device{false};

void set_device_count(int count) {
    only_device.store(count == 1, std::memory_order_relaxed);
}

DeviceAllocator& device_allocator() {
    static auto* allocator = new DeviceAllocator();
    return *allocator;
}

c10::DataPtr DeviceAllocator::allocate(size_t bytes) {
    const auto [device, stream] = current();
    void* ptr = allocate_on(bytes, device, stream);
    return {ptr, ptr, &free_block, cuda_device(device)};
}

c10::DeleterFnPtr DeviceAllocator::raw_deleter() const {
    return &free_block;
}

void DeviceAllocator::copy_data(void* dest, const void* src, size_t bytes) const {
    C10_CUDA_CHECK(cudaMemcpy(dest, src, bytes, cudaMemcpyDeviceToDevice));
}

bool DeviceAllocator::initialized() {
    return started.load(std::memory_order_acquire);
}

void DeviceAllocator::init(int device_count) {
    if (device_count > 0) {
        check(warpool_start());
        set_device_count(device_count);
        started.store(true, std::memory_order_release);
    }
}

void* DeviceAllocator::raw_alloc(size_t bytes) {
    if (bytes == 0) {
        return nullptr;
    }
    const auto [device, stream] = current();
    return allocate_on(bytes, device, stream);
}

void* DeviceAllocator::raw_alloc_with_stream(size_t bytes, cudaStream_t stream) {
    if (bytes == 0) {
        return nullptr;
    }
    return allocate_on(bytes, current_device(), stream);
}

void DeviceAllocator::raw_delete(void* ptr) {
    free_block(ptr);
}

void DeviceAllocator::emptyCache(c10::MempoolId_t pool) {
    const auto [device, stream] = current();
    check(warpool_trim(pool_id(pool), device, stream));
}

std::pair<size_t, size_t> DeviceAllocator::getMemoryInfo(c10::DeviceIndex device) {
    std::pair<size_t, size_t> info;
    check(warpool_memory_info(device, &info.first, &info.second));
    return info;
}

double DeviceAllocator::getMemoryFraction(c10::DeviceIndex device) {
    double fraction = 1.0;
    check(warpool_get_memory_fraction(device, &fraction));
    return fraction;
}

void DeviceAllocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
    check(warpool_set_memory_fraction(fraction, device));
}

#if WARPOOL_TORCH_AT_LEAST(2, 10)
std::vector<caching::StreamSegmentSize> DeviceAllocator::getExpandableSegmentSizes(c10::DeviceIndex device) {
    std::vector<caching::StreamSegmentSize> sizes;
    const auto add = [](void* user, void* stream, bool is_small, size_t bytes) {
        guarded(0, [&] {
            auto& sizes = *static_cast<std::vector<caching::StreamSegmentSize>*>(user);
            sizes.emplace_back(static_cast<cudaStream_t>(stream), is_small, bytes);
            return 0;
        });
    };
    check_filled([&] { return warpool_expandable_sizes(device, add, &sizes); });
    return sizes;
}
#endif

c10::DataPtr DeviceAllocator::allocateWithAddress(size_t bytes, void* address) {
    const auto [device, stream] = current();
    check(warpool_allocate_at(bytes, device, stream, address));
    return {address, address, &free_block, cuda_device(device)};
}

void DeviceAllocator::enable(bool value) {
    check(warpool_set_caching(value ? 1 : 0));
    caching_on.store(value, std::memory_order_relaxed);
}

bool DeviceAllocator::isEnabled() const {
    return caching_on.load(std::memory_order_relaxed);
}

void DeviceAllocator::cacheInfo(c10::DeviceIndex device, size_t* largest) {
    size_t available = 0;
    check(warpool_largest_available(device, &available));
    *largest = std::max(*largest, available);
}

void* DeviceAllocator::getBaseAllocation(void* ptr, size_t* size) {
    void* base = warpool_base_alloc(ptr, size);
    if (base == nullptr) {
        throw_last_error();
    }
    return base;
}

void DeviceAllocator::recordStream(const c10::DataPtr& ptr, CUDAStream stream) {
    // Memory of another process or another allocator is not ordered here.
    if (ptr.get() == nullptr || ptr.get_deleter() != &free_block) {
        return;
    }
    check(warpool_record_use(ptr.get(), stream.device_index(), handle_of(stream)));
}

std::string DeviceAllocator::name() {
    return "warpool";
}

c10::CachingDeviceAllocator::DeviceStats DeviceAllocator::getDeviceStats(c10::DeviceIndex device) {
    c10::CachingDeviceAllocator::DeviceStats stats;
    warpool_device_stats_values values{};
#if WARPOOL_TORCH_AT_LEAST(2, 13)
    const auto add_pool = [](void* user, warpool_pool_id pool, const warpool_stat_by_kind* reserved) {
        guarded(0, [&] {
            auto& stats = *static_cast<c10::CachingDeviceAllocator::DeviceStats*>(user);
            stats.reserved_bytes_by_private_pools[{pool.graph, pool.user}] = stat_array(*reserved);
            return 0;
        });
    };
    check_filled([&] { return warpool_device_stats(device, &values, add_pool, &stats); });
#else
    check(warpool_device_stats(device, &values, nullptr, nullptr));
#endif
#if WARPOOL_TORCH_AT_LEAST(2, 12)
    stats.num_oom_rejections = values.num_oom_rejections;
#endif
    stats.allocation = stat_array(values.allocation);
    stats.segment = stat_array(values.segment);
    stats.active = stat_array(values.active);
    stats.inactive_split = stat_array(values.inactive_split);
    stats.allocated_bytes = stat_array(values.allocated_bytes);
    stats.reserved_bytes = stat_array(values.reserved_bytes);
    stats.active_bytes = stat_array(values.active_bytes);
    stats.inactive_split_bytes = stat_array(values.inactive_split_bytes);
    stats.requested_bytes = stat_array(values.requested_bytes);
    stats.oversize_allocations = stat(values.oversize_allocations);
    stats.oversize_segments = stat(values.oversize_segments);
    stats.num_alloc_retries = values.num_alloc_retries;
    stats.num_ooms = values.num_ooms;
    stats.num_sync_all_streams = values.num_sync_all_streams;
    stats.num_device_alloc = values.num_device_alloc;
    stats.num_device_free = values.num_device_free;
    stats.max_split_size = values.max_split_size;
    return stats;
}

void DeviceAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
    check(warpool_reset_accumulated_stats(device));
}

void DeviceAllocator::resetPeakStats(c10::DeviceIndex device) {
    check(warpool_reset_peak_stats(device));
}

void DeviceAllocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex owner) {
    check(warpool_enable_peer_access(device, owner));
}

cudaError_t DeviceAllocator::memcpyAsync(
    void* dst,
    int dst_device,
    const void* src,
    int src_device,
    size_t bytes,
    cudaStream_t stream,
    bool p2p_enabled) {
    if (p2p_enabled || dst_device == src_device || !warpool_maps_memory()) {
        return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream);
    }
    // A plain copy cannot read mapped memory of a device without peer access.
    return cudaMemcpyPeerAsync(dst, dst_device, src, src_device, bytes, stream);
}

}  // namespace warpool_torch
