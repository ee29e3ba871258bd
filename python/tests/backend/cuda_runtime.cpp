// The few functions of the CUDA runtime that libc10_cuda and the C++ layer call here, for one device and its default
// stream. The program's own definitions come before those of libcudart, which would look for a driver.
#include <cuda_runtime_api.h>

// How often the current device was asked for or set.
long runtime_calls = 0;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
    ++runtime_calls;
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
    ++runtime_calls;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

cudaError_t cudaPeekAtLastError() {
    return cudaSuccess;
}

}  // extern "C"
