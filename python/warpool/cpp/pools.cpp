// Memory pools, their checkpoints, and pools whose segments come from a user's allocator.
#include <c10/cuda/CUDAGuard.h>

#include "convert.h"
#include "device_allocator.h"

namespace warpool_torch {

namespace caching = c10::cuda::CUDACachingAllocator;

namespace {

using StreamFilter = std::function<bool(cudaStream_t)>;

int filter_accepts(void* user, const void* stream) {
    return guarded(-1, [&] {
        auto* handle = static_cast<cudaStream_t>(const_cast<void*>(stream));
        return (*static_cast<StreamFilter*>(user))(handle) ? 1 : 0;
    });
}

void* allocate_segment(void* user, size_t bytes, int device, void* stream) {
    return without_exception<void*>(nullptr, [&] {
        const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
        return (*static_cast<PoolSource*>(user))->raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream));
    });
}

int free_segment(void* user, void* ptr, int device) {
    return without_exception(1, [&] {
        const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
        (*static_cast<PoolSource*>(user))->raw_delete(ptr);
        return 0;
    });
}

// A checkpoint of a pool.
struct PoolState : caching::AllocatorState {
    explicit PoolState(warpool_checkpoint_state* checkpoint) : checkpoint(checkpoint) {}
    PoolState(const PoolState&) = delete;
    PoolState& operator=(const PoolState&) = delete;
    ~PoolState() override {
        warpool_delete_checkpoint(checkpoint);
    }
    warpool_checkpoint_state* checkpoint;
};

// The blocks that a restore freed and allocated, and their device.
struct Delta {
    caching::CheckpointDelta delta;
    c10::Device device;
    c10::DeleterFnPtr deleter;
};

}  // namespace

void DeviceAllocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool, StreamFilter filter) {
    check(warpool_pool_begin(
        device, pool_id(pool), &filter_accepts, user_data(std::move(filter)), &delete_user<StreamFilter>));
}

void DeviceAllocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) {
    check(warpool_pool_end(device, pool_id(pool)));
}

void DeviceAllocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) {
    check(warpool_pool_release(device, pool_id(pool)));
}

int DeviceAllocator::getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) {
    return warpool_pool_uses(device, pool_id(pool));
}

void DeviceAllocator::createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool, PoolSource allocator) {
    if (allocator == nullptr) {
        check(warpool_pool_create(device, pool_id(pool)));
        return;
    }
    check(warpool_pool_create_from(
        device,
        pool_id(pool),
        &allocate_segment,
        &free_segment,
        user_data(std::move(allocator)),
        &delete_user<PoolSource>));
}

#if !WARPOOL_TORCH_AT_LEAST(2, 11)
void DeviceAllocator::setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool) {
    setUseOnOOM(device, pool, true);
}
#endif

void DeviceAllocator::setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) {
    check(warpool_pool_use_on_oom(device, pool_id(pool), use_on_oom ? 1 : 0));
}

void DeviceAllocator::setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) {
    check(warpool_pool_no_split(device, pool_id(pool)));
}

bool DeviceAllocator::checkPoolLiveAllocations(
    c10::DeviceIndex device,
    c10::MempoolId_t pool,
    const std::unordered_set<void*>& expected) {
    const std::vector<void*> live(expected.begin(), expected.end());
    int equal = 0;
    check(warpool_pool_has_exactly(device, pool_id(pool), live.data(), live.size(), &equal));
    return equal != 0;
}

std::shared_ptr<caching::AllocatorState> DeviceAllocator::getCheckpointState(
    c10::DeviceIndex device,
    c10::MempoolId_t pool) {
    warpool_checkpoint_state* checkpoint = nullptr;
    check(warpool_checkpoint(device, pool_id(pool), &checkpoint));
    return std::make_shared<PoolState>(checkpoint);
}

caching::CheckpointDelta DeviceAllocator::setCheckpointPoolState(
    c10::DeviceIndex device,
    std::shared_ptr<caching::AllocatorState> state) {
    const auto saved = std::dynamic_pointer_cast<PoolState>(state);
    TORCH_CHECK(saved != nullptr, "the state is not a checkpoint of Warpool's: it came from another allocator");
    Delta delta{{}, {c10::DeviceType::CUDA, device}, raw_deleter()};
    const auto freed = [](void* user, void* ptr) {
        guarded(0, [&] {
            static_cast<Delta*>(user)->delta.ptrs_freed.push_back(ptr);
            return 0;
        });
    };
    const auto allocated = [](void* user, void* ptr) {
        guarded(0, [&] {
            auto& delta = *static_cast<Delta*>(user);
            delta.delta.dataptrs_allocd.emplace_back(ptr, ptr, delta.deleter, delta.device);
            return 0;
        });
    };
    check_filled([&] { return warpool_restore(saved->checkpoint, freed, allocated, &delta); });
    return std::move(delta.delta);
}

}  // namespace warpool_torch
