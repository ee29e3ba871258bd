/* A CUDA driver for tests: one device, whose memory is counted. Built as libcuda.so.1, and with -DNVML as
 * libnvidia-ml.so.1, which asks the other. As the real one it gives a context its memory, loads kernels at their first
 * launch, takes 2 MiB for small allocations to share, and keeps what its pool has reserved. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define TOTAL (8192 * MIB)

#ifdef NVML

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;

static unsigned long long own(void) {
  void *cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  unsigned long long (*used)(void) = cuda ? (unsigned long long (*)(void))dlsym(cuda, "fake_own") : 0;
  return used ? used() : 0;
}

static unsigned long long others(void) {
  const char *text = getenv("FAKE_OTHERS_MIB");
  return (text ? strtoull(text, 0, 10) : 0) * MIB;
}

int nvmlInit_v2(void) { return getenv("FAKE_NO_NVML") ? 999 : 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (strcmp(uuid, "GPU-01020304-0506-0708-090a-0b0c0d0e0f10")) return 6;
  *device = (void *)1;
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_t *memory) {
  if (memory->version != (sizeof *memory | 2 << 24)) return 25;
  (void)device;
  memory->total = TOTAL + 100 * MIB;
  memory->reserved = 100 * MIB;
  memory->used = own() + others();
  memory->free = TOTAL - memory->used;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *infos) {
  (void)device;
  if (*count < 2) return 7;
  *count = 0;
  if (getenv("FAKE_HIDDEN")) return 0;
  infos[(*count)++] = (process_t){.pid = getpid(), .used = own()};
  if (others()) infos[(*count)++] = (process_t){.pid = 4242, .used = others()};
  return 0;
}

#else

typedef uint64_t ptr_t;

static unsigned long long used, pool;
static int context, small, calls;
static __thread int current;
static int loaded[256];

unsigned long long fake_own(void) { return used + pool; }
int fake_calls(void) { return calls; }

static unsigned long long others(void) {
  const char *text = getenv("FAKE_OTHERS_MIB");
  return (text ? strtoull(text, 0, 10) : 0) * MIB;
}

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  const char *text = getenv("FAKE_UUID"); /* 32 digits */
  for (int i = 0; i < 16; i++) {
    unsigned byte = i + 1;
    if (text) sscanf(text + 2 * i, "%2x", &byte);
    uuid[i] = byte;
  }
  return device;
}
int cuCtxGetDevice(int *device) { *device = 0; return current ? 0 : 201; }
int cuDevicePrimaryCtxRetain(void **made, int device) {
  if (!context++) __atomic_fetch_add(&used, 500 * MIB, __ATOMIC_SEQ_CST);
  *made = &context;
  return device;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  if (!--context) used = pool = 0;
  return device;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = context > 0;
  return device;
}
int cuCtxSetCurrent(void *made) { current = made != 0; return 0; }
int cuCtxPushCurrent_v2(void *made) { current += made != 0; return 0; }
int cuCtxPopCurrent_v2(void **made) { *made = &context; current--; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  if (!current) return 201;
  *total = TOTAL;
  *free = TOTAL - used - pool - others();
  return 0;
}

int cuMemAlloc_v2(ptr_t *out, size_t bytes) {
  static ptr_t next = 1ull << 40;
  __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
  if (bytes > 4096 * MIB) return 2;
  /* The size is in the address: the fake keeps no table. */
  if (bytes < MIB) {
    if (!__atomic_fetch_add(&small, 1, __ATOMIC_SEQ_CST)) __atomic_fetch_add(&used, 2 * MIB, __ATOMIC_SEQ_CST);
    *out = __atomic_fetch_add(&next, 512, __ATOMIC_SEQ_CST);
  } else {
    unsigned long long taken = (bytes + 2 * MIB - 1) / (2 * MIB);
    __atomic_fetch_add(&used, taken * 2 * MIB, __ATOMIC_SEQ_CST);
    *out = __atomic_fetch_add(&next, 1ull << 32, __ATOMIC_SEQ_CST) << 16 | taken;
  }
  return 0;
}
int cuMemFree_v2(ptr_t address) {
  unsigned taken = address & 0xffff;
  if (address >> 44) {
    __atomic_fetch_sub(&used, taken * 2 * MIB, __ATOMIC_SEQ_CST);
  } else if (__atomic_sub_fetch(&small, 1, __ATOMIC_SEQ_CST) == 0) {
    __atomic_fetch_sub(&used, 2 * MIB, __ATOMIC_SEQ_CST);
  }
  return 0;
}
int cuMemCreate(uint64_t *handle, size_t bytes, const int *properties, unsigned long long flags) {
  static uint64_t next = 1;
  (void)properties, (void)flags;
  used += bytes;
  *handle = next++ << 32 | bytes / MIB;
  return 0;
}
/* A mapped handle keeps its memory. */
static uint64_t mapped, released;
int cuMemMap(ptr_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
  (void)address, (void)bytes, (void)offset, (void)flags;
  mapped = handle;
  return 0;
}
int cuMemUnmap(ptr_t address, size_t bytes) {
  (void)address, (void)bytes;
  if (released == mapped) used -= (mapped & 0xffffffff) * MIB;
  mapped = 0;
  return 0;
}
int cuMemRelease(uint64_t handle) {
  if (handle == mapped) released = handle;
  else used -= (handle & 0xffffffff) * MIB;
  return 0;
}
int cuMemAllocAsync(ptr_t *out, size_t bytes, void *stream) {
  (void)stream;
  *out = 7;
  pool += (bytes + 32 * MIB - 1) / (32 * MIB) * 32 * MIB;
  return 0;
}
int cuDeviceGetDefaultMemPool(void **found, int device) { *found = &pool; return device; }
int cuMemPoolGetAttribute(void *of, int attribute, uint64_t *value) {
  if (of != &pool || attribute != 5) return 1;
  *value = pool;
  return 0;
}
int cuDeviceGetGraphMemAttribute(int device, int attribute, uint64_t *value) {
  if (attribute != 2) return 1;
  *value = 0;
  return device;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int now;
  int before = now;
  now = *mode;
  *mode = before;
  return 0;
}

/* The first launch of a function loads it. All eleven arguments must arrive. */
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  uintptr_t number = (uintptr_t)function;
  if (gx != 1 || gy != 2 || gz != 3 || bx != 4 || by != 5 || bz != 6 || shared != 7) return 1;
  if (stream != (void *)8 || parameters != (void *)9 || extra != (void *)10 || number >= 256) return 1;
  if (!__atomic_exchange_n(&loaded[number], 1, __ATOMIC_SEQ_CST)) __atomic_fetch_add(&used, 4 * MIB, __ATOMIC_SEQ_CST);
  __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
  return 0;
}
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
  (void)graph, (void)flags;
  *exec = (void *)1;
  used += 6 * MIB;
  return 0;
}
int cuGraphExecDestroy(void *exec) { (void)exec; used -= 6 * MIB; return 0; }
int cuModuleLoadData(void **module, const void *image) {
  (void)image;
  *module = (void *)1;
  used += 10 * MIB;
  return 0;
}
/* The first version, which no program of today asks for. */
int cuMemAlloc(unsigned *out, unsigned bytes) { (void)bytes; *out = 1; return 0; }

int cuGetProcAddress_v2(const char *symbol, void **found, int version, unsigned long long flags, int *status) {
  (void)flags;
  *found = 0;
  if (!strcmp(symbol, "cuMemAlloc")) *found = version >= 3020 ? (void *)cuMemAlloc_v2 : (void *)cuMemAlloc;
  else if (!strcmp(symbol, "cuMemFree")) *found = cuMemFree_v2;
  else if (!strcmp(symbol, "cuLaunchKernel")) *found = cuLaunchKernel;
  else if (!strcmp(symbol, "cuGraphInstantiate") && version >= 12000) *found = cuGraphInstantiateWithFlags;
  else if (!strcmp(symbol, "cuMemGetInfo")) *found = cuMemGetInfo_v2;
  else if (!strcmp(symbol, "cuInit")) *found = cuInit;
  else if (!strcmp(symbol, "cuDevicePrimaryCtxRetain")) *found = cuDevicePrimaryCtxRetain;
  else if (!strcmp(symbol, "cuGetProcAddress")) *found = cuGetProcAddress_v2;
  if (status) *status = *found ? 0 : 1;
  return *found ? 0 : 500;
}

#endif
