// PyTorch's allocator of pinned memory over Warpool's C interface.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "versions.h"

namespace warpool_torch {

class HostAllocator final : public at::HostAllocator {
public:
    c10::DataPtr allocate(size_t bytes) override;
    c10::DeleterFnPtr raw_deleter() const override;
    void copy_data(void* dest, const void* src, size_t bytes) const override;
    bool record_event(void* ptr, void* block, c10::Stream stream) override;
    void empty_cache() override;
    at::HostStats get_stats() override;
    void reset_accumulated_stats() override;
    void reset_peak_stats() override;
    void begin_allocate_to_pool(c10::MempoolId_t pool, std::function<bool(c10::Stream)> filter) WARPOOL_SINCE_2_11;
    void end_allocate_to_pool(c10::MempoolId_t pool) WARPOOL_SINCE_2_11;
    void release_pool(c10::MempoolId_t pool) WARPOOL_SINCE_2_11;
#if WARPOOL_TORCH_AT_LEAST(2, 14)
    void record_history(
        bool enabled,
        c10::CachingDeviceAllocator::CreateContextFn context_recorder,
        size_t max_entries,
        c10::CachingDeviceAllocator::RecordContext when,
        bool clear_history) override;
    bool is_history_enabled() const override;
    std::vector<c10::CachingDeviceAllocator::HostSegmentInfo> get_segments() override;
    std::vector<c10::CachingDeviceAllocator::TraceEntry> get_traces() override;
#endif
};

// The instance of this process; never deleted.
HostAllocator& host_allocator();

}  // namespace warpool_torch
