// Memory that is shared with other processes.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

#include "convert.h"
#include "device_allocator.h"

namespace warpool_torch {

c10::cuda::CUDACachingAllocator::ShareableHandle DeviceAllocator::shareIpcHandle(void* ptr) {
    warpool_shared_block shared{};
    check(warpool_share(ptr, &shared));
    const auto* bytes = reinterpret_cast<const char*>(shared.handle);
    return {static_cast<ptrdiff_t>(shared.offset), std::string(bytes, sizeof(shared.handle))};
}

std::shared_ptr<void> DeviceAllocator::getIpcDevPtr(std::string handle) {
    c10::DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    void* ptr = nullptr;
    check(warpool_open_shared(device, reinterpret_cast<const uint8_t*>(handle.data()), handle.size(), &ptr));
    return {ptr, [](void* opened) { warpool_close_shared(opened); }};
}

}  // namespace warpool_torch
