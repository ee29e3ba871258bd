// PyTorch's allocator of CUDA memory over Warpool's C interface. Every function converts its arguments and makes one
// call; decisions are made there.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include "versions.h"

namespace warpool_torch {

// The upstream of a pool, as PyTorch passes it. In earlier versions the pool does not own it.
#if WARPOOL_TORCH_AT_LEAST(2, 11)
using PoolSource = std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator>;
#else
using PoolSource = c10::cuda::CUDACachingAllocator::CUDAAllocator*;
#endif

class DeviceAllocator final : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
public:
    // c10::Allocator
    c10::DataPtr allocate(size_t bytes) override;
    c10::DeleterFnPtr raw_deleter() const override;
    void copy_data(void* dest, const void* src, size_t bytes) const override;

    // c10::DeviceAllocator
    bool initialized() override;
    void emptyCache(c10::MempoolId_t pool) override;
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
    void resetAccumulatedStats(c10::DeviceIndex device) override;
    void resetPeakStats(c10::DeviceIndex device) override;
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) WARPOOL_SINCE_2_10;

    // Memory
    void* raw_alloc(size_t bytes) override;
    void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override;
    void raw_delete(void* ptr) override;
    void init(int device_count) override;
    double getMemoryFraction(c10::DeviceIndex device) override;
    void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
#if WARPOOL_TORCH_AT_LEAST(2, 10)
    std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> getExpandableSegmentSizes(
        c10::DeviceIndex device) override;
#endif
    c10::DataPtr allocateWithAddress(size_t bytes, void* address) WARPOOL_SINCE_2_13;
    void enable(bool value) override;
    bool isEnabled() const override;
    void cacheInfo(c10::DeviceIndex device, size_t* largest) override;
    void* getBaseAllocation(void* ptr, size_t* size) override;
    using CUDAAllocator::recordStream;
    void recordStream(const c10::DataPtr& ptr, c10::cuda::CUDAStream stream) override;
    std::string name() override;

    // Pools
    void beginAllocateToPool(
        c10::DeviceIndex device,
        c10::MempoolId_t pool,
        std::function<bool(cudaStream_t)> filter) override;
    void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
    void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
    int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override;
    void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool, PoolSource allocator) override;
#if !WARPOOL_TORCH_AT_LEAST(2, 11)
    void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool) override;
#endif
    void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) WARPOOL_SINCE_2_11;
    void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) WARPOOL_SINCE_2_10;
    bool checkPoolLiveAllocations(
        c10::DeviceIndex device,
        c10::MempoolId_t pool,
        const std::unordered_set<void*>& expected) override;
    std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> getCheckpointState(
        c10::DeviceIndex device,
        c10::MempoolId_t pool) override;
    c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
        c10::DeviceIndex device,
        std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state) override;

    // Snapshots, history, observers
#if !WARPOOL_TORCH_AT_LEAST(2, 11)
    c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(c10::MempoolId_t pool) override;
#endif
    c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(
        c10::MempoolId_t pool,
        bool include_traces) WARPOOL_SINCE_2_11;
    bool isHistoryEnabled() override;
#if !WARPOOL_TORCH_AT_LEAST(2, 11)
    void recordHistory(
        bool enabled,
        c10::cuda::CUDACachingAllocator::CreateContextFn context_recorder,
        size_t max_entries,
        c10::cuda::CUDACachingAllocator::RecordContext when,
        bool clear_history) override;
#endif
    void recordHistory(
        bool enabled,
        c10::cuda::CUDACachingAllocator::CreateContextFn context_recorder,
        size_t max_entries,
        c10::cuda::CUDACachingAllocator::RecordContext when,
        bool clear_history,
        const std::vector<std::string>& skip_actions) WARPOOL_SINCE_2_11;
    void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override;
    void pushCompileContext(std::string& name) override;
    void popCompileContext() override;
    bool supportsUserMetadata() WARPOOL_SINCE_2_14;
    void setUserMetadata(const std::string& metadata) WARPOOL_SINCE_2_10;
    std::string getUserMetadata() WARPOOL_SINCE_2_10;
    void annotateMemory(const void* ptr, const std::string& metadata) WARPOOL_SINCE_2_14;
    std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* ptr) WARPOOL_SINCE_2_12;
    void attachOutOfMemoryObserver(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer) override;
#if WARPOOL_TORCH_AT_LEAST(2, 12)
    void attachOomRejectionObserver(c10::cuda::CUDACachingAllocator::OomRejectionObserver observer) override;
#endif
    void attachAllocatorTraceTracker(c10::cuda::CUDACachingAllocator::AllocatorTraceTracker tracker) override;

    // Other devices and processes
    c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* ptr) override;
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
    void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex owner) override;
    cudaError_t memcpyAsync(
        void* dst,
        int dst_device,
        const void* src,
        int src_device,
        size_t bytes,
        cudaStream_t stream,
        bool p2p_enabled) override;
};

// The instance of this process; never deleted.
DeviceAllocator& device_allocator();

}  // namespace warpool_torch
