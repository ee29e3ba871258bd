// Memory that is shared with other processes.
#include "convert.h"
#include "current.h"
#include "device_allocator.h"

namespace warpool_torch {

// How PyTorch's own allocator writes the handles of mapped memory, which processes without Warpool read.
#if WARPOOL_TORCH_AT_LEAST(2, 13)
constexpr uint8_t handle_version = 3;
#else
constexpr uint8_t handle_version = 2;
#endif

c10::cuda::CUDACachingAllocator::ShareableHandle DeviceAllocator::shareIpcHandle(void* ptr) {
    c10::cuda::CUDACachingAllocator::ShareableHandle shared{};
    const auto write = [](void* user, const uint8_t* handle, size_t length, size_t offset) {
        guarded(0, [&] {
            auto& shared = *static_cast<c10::cuda::CUDACachingAllocator::ShareableHandle*>(user);
            shared.offset = static_cast<ptrdiff_t>(offset);
            shared.handle.assign(reinterpret_cast<const char*>(handle), length);
            return 0;
        });
    };
    check(warpool_share(ptr, handle_version, write, &shared));
    if (shared.handle.empty()) {
        throw_last_error();
    }
    return shared;
}

std::shared_ptr<void> DeviceAllocator::getIpcDevPtr(std::string handle) {
    void* ptr = nullptr;
    const auto device = current_device();
    check(warpool_open_shared(device, reinterpret_cast<const uint8_t*>(handle.data()), handle.size(), &ptr));
    return {ptr, [](void* opened) { warpool_close_shared(opened); }};
}

}  // namespace warpool_torch
