// The calling thread's current device and stream, without the calls of the CUDA runtime that PyTorch's functions make:
// getting a stream's handle takes three calls there (its device is made current meanwhile).
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>

#include "warpool_torch.h"

namespace warpool_torch {

struct Current {
    c10::DeviceIndex device;
    cudaStream_t stream;
};

// Sets the number of devices. If there is one, it is the current one.
void set_device_count(int count);

// Whether there is one device. False as long as it is not known.
extern std::atomic<bool> only_device;

inline c10::DeviceIndex current_device() {
    c10::DeviceIndex device = 0;
    if (C10_UNLIKELY(!only_device.load(std::memory_order_relaxed))) {
        C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    }
    return device;
}

// A stream's handle. PyTorch's id of a stream has the same handle as long as the process lives: streams of its pools
// are never destroyed, and the id of any other is the handle. The default stream's are 0 and NULL on every device.
inline cudaStream_t handle_of(c10::cuda::CUDAStream stream) {
    if (C10_LIKELY(stream.id() == 0)) {
        return nullptr;
    }
    struct Known {
        c10::StreamId id;
        c10::DeviceIndex device;
        cudaStream_t handle;
    };
    thread_local Known known{0, -1, nullptr};
    if (C10_UNLIKELY(known.id != stream.id() || known.device != stream.device_index())) {
        known = {stream.id(), stream.device_index(), stream.stream()};
        if (reinterpret_cast<c10::StreamId>(known.handle) != known.id) {
            warpool_keep_stream(known.device, known.handle);
        }
    }
    return known.handle;
}

inline Current current() {
    const auto device = current_device();
    return {device, handle_of(c10::cuda::getCurrentCUDAStream(device))};
}

}  // namespace warpool_torch
