// The few functions of the CUDA runtime that libc10_cuda and the C++ layer call here, for one device and its default
// stream. The program's own definitions come before those of libcudart, which would look for a driver.
#include <cuda_runtime_api.h>

extern "C" {

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
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
