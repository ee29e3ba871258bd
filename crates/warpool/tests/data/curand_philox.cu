// Makes curand_philox.txt anew: what curand's Philox gives at places that are easy to get wrong. See README.md beside it.
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>
#include <curand_kernel.h>

struct Place { unsigned long long seed, subsequence, offset; };

static const Place PLACES[] = {
    {0, 0, 0},
    {67280421310721ull, 0, 0},
    {67280421310721ull, 0, 4},
    {67280421310721ull, 1, 0},
    {67280421310721ull, 12345, 8},
    {42, 0, 0},
    {42, 7, 1024},
    {~0ull, 0, 0},
    {~0ull, ~0ull, 0},
    {1, 0xffffffffull, 0x3fffffffcull},            // the last block before the counter's first word is full
    {1, 0x100000000ull, 0xfffffffcull},
    {0x123456789abcdef0ull, 0xfedcba9876543210ull, 0x7ffffffffffffff0ull},
    {42, 3, 0xfffffffffffffff0ull},                // the end of all offsets, and beyond
    {5, 5, 1},                                     // inside a block
    {5, 5, 2},
    {5, 5, 3},
};
static const int COUNT = sizeof(PLACES) / sizeof(PLACES[0]);
static const int WORDS = 16;

static __device__ void put(unsigned int *out, float4 four) {
    out[0] = __float_as_uint(four.x);
    out[1] = __float_as_uint(four.y);
    out[2] = __float_as_uint(four.z);
    out[3] = __float_as_uint(four.w);
}

// One thread per place: words, uniforms, normals, each from the place on.
__global__ void draw(const Place *places, unsigned int *out) {
    Place place = places[threadIdx.x];
    out += 3 * WORDS * threadIdx.x;
    curandStatePhilox4_32_10_t state;
    curand_init(place.seed, place.subsequence, place.offset, &state);
    for (int i = 0; i < WORDS; i += 4) {
        uint4 four = curand4(&state);
        out[i] = four.x;
        out[i + 1] = four.y;
        out[i + 2] = four.z;
        out[i + 3] = four.w;
    }
    curand_init(place.seed, place.subsequence, place.offset, &state);
    for (int i = 0; i < WORDS; i += 4) put(out + WORDS + i, curand_uniform4(&state));
    curand_init(place.seed, place.subsequence, place.offset, &state);
    for (int i = 0; i < WORDS; i += 4) put(out + 2 * WORDS + i, curand_normal4(&state));
}

int main() {
    Place *places;
    unsigned int *out;
    if (cudaMallocManaged(&places, sizeof(PLACES)) != cudaSuccess) return 1;
    if (cudaMallocManaged(&out, COUNT * 3 * WORDS * sizeof(unsigned int)) != cudaSuccess) return 1;
    memcpy(places, PLACES, sizeof(PLACES));
    draw<<<1, COUNT>>>(places, out);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    for (int at = 0; at < COUNT; ++at) {
        printf("%016llx %016llx %016llx", places[at].seed, places[at].subsequence, places[at].offset);
        for (int i = 0; i < 3 * WORDS; ++i) printf(" %08x", out[3 * WORDS * at + i]);
        printf("\n");
    }
    return 0;
}
