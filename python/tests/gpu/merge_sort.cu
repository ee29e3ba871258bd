// Sorts with CUB's merge sort, whose temporary memory is overwritten before each call: no allocator takes part.
//
//     nvcc -O2 -std=c++17 -arch=native -I CCCL/cub -I CCCL/thrust -I CCCL/libcudacxx/include merge_sort.cu
//     ./a.out SECONDS WORD        # several at once, e.g. with 0x3f800000 (the float 1), which is no position, and 0
//
// Up to CCCL 3.0.2 a sort may read positions in that memory before they are written (NVIDIA/cccl#5297). PyTorch 2.11
// has CCCL 3.0.1. Exit status: 0 all sorts are right, 1 some are not, or failed.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include <cub/cub.cuh>

namespace {

constexpr int COUNT = 1 << 20;
constexpr int SORTS_BETWEEN_CHECKS = 20;

struct Less {
    __device__ bool operator()(long a, long b) const { return a < b; }
};

__global__ void overwrite(unsigned* words, size_t count, unsigned word) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) words[i] = word;
}

__global__ void shuffle(long* keys, long* values) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < COUNT; i += gridDim.x * blockDim.x) {
        keys[i] = i * 2654435761u % COUNT;
        values[i] = i;
    }
}

__global__ void count_unsorted(const long* keys, unsigned* unsorted) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i + 1 < COUNT; i += gridDim.x * blockDim.x) {
        if (keys[i] > keys[i + 1]) atomicAdd(unsorted, 1u);
    }
}

struct Totals {
    std::atomic<long> sorts{0}, unsorted{0};
    std::atomic<int> error{cudaSuccess};
};

void sort_until(std::chrono::steady_clock::time_point end, unsigned word, Totals& totals) {
    cudaStream_t stream;
    long *keys, *values;
    unsigned* unsorted;
    size_t bytes = 0;
    void* temporary;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMalloc(&keys, COUNT * sizeof(long));
    cudaMalloc(&values, COUNT * sizeof(long));
    cudaMalloc(&unsorted, sizeof(unsigned));
    cub::DeviceMergeSort::SortPairs(nullptr, bytes, keys, values, COUNT, Less{}, stream);
    cudaMalloc(&temporary, bytes);
    while (std::chrono::steady_clock::now() < end && totals.error == cudaSuccess) {
        cudaMemsetAsync(unsorted, 0, sizeof(unsigned), stream);
        for (int i = 0; i < SORTS_BETWEEN_CHECKS; ++i) {
            shuffle<<<256, 256, 0, stream>>>(keys, values);
            overwrite<<<256, 256, 0, stream>>>(static_cast<unsigned*>(temporary), bytes / sizeof(unsigned), word);
            cub::DeviceMergeSort::SortPairs(temporary, bytes, keys, values, COUNT, Less{}, stream);
            count_unsorted<<<256, 256, 0, stream>>>(keys, unsorted);
        }
        unsigned found = 0;
        cudaMemcpyAsync(&found, unsorted, sizeof(unsigned), cudaMemcpyDeviceToHost, stream);
        const cudaError_t error = cudaStreamSynchronize(stream);
        if (error != cudaSuccess) {
            totals.error = error;
            return;
        }
        totals.sorts += SORTS_BETWEEN_CHECKS;
        totals.unsorted += found > 0;
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: %s SECONDS WORD\n", argv[0]);
        return 2;
    }
    const auto seconds = std::chrono::seconds(std::atol(argv[1]));
    const auto word = static_cast<unsigned>(std::strtoul(argv[2], nullptr, 0));
    const auto end = std::chrono::steady_clock::now() + seconds;
    Totals totals;
    std::thread other([&] { sort_until(end, word, totals); });
    sort_until(end, word, totals);
    other.join();
    const auto error = static_cast<cudaError_t>(totals.error.load());
    std::printf("CUB %d, %#x: %ld sorts, not sorted in %ld of %ld checks, %s\n", CUB_VERSION, word,
                totals.sorts.load(), totals.unsorted.load(), totals.sorts / SORTS_BETWEEN_CHECKS,
                cudaGetErrorName(error));
    return error != cudaSuccess || totals.unsorted > 0;
}
