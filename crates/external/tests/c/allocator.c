/* An allocator written for PyTorch's CUDAPluggableAllocator, with every hook.
 *
 * Its memory comes from an upstream that the test sets; without one, from cuMemAlloc in the current context. It counts
 * the allocated bytes, logs its hooks, and caches nothing. Thread-safe. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

typedef struct CUstream_st *cudaStream_t;
typedef struct { uint64_t first, second; } pool_id;

typedef void *(*upstream_alloc)(void *user, ssize_t size, int device, cudaStream_t stream);
typedef void (*upstream_free)(void *user, void *ptr, ssize_t size, int device, cudaStream_t stream);

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static upstream_alloc alloc_hook;
static upstream_free free_hook;
static void *upstream_user;
static ssize_t bytes_live;
static ssize_t bytes_limit = -1;
static char log_text[4096];

static void log_line(const char *line) {
    pthread_mutex_lock(&log_lock);
    if (strlen(log_text) + strlen(line) + 2 < sizeof log_text) {
        strcat(log_text, line);
        strcat(log_text, "\n");
    }
    pthread_mutex_unlock(&log_lock);
}

/* For the test. */
void demo_set_upstream(upstream_alloc alloc, upstream_free free, void *user) {
    alloc_hook = alloc;
    free_hook = free;
    upstream_user = user;
}
void demo_set_limit(ssize_t bytes) { bytes_limit = bytes; }
ssize_t demo_bytes_live(void) { return __atomic_load_n(&bytes_live, __ATOMIC_SEQ_CST); }
size_t demo_read_log(char *into, size_t room) {
    pthread_mutex_lock(&log_lock);
    size_t length = strlen(log_text);
    if (length < room) {
        memcpy(into, log_text, length + 1);
        log_text[0] = 0;
    }
    pthread_mutex_unlock(&log_lock);
    return length;
}

static void *cuda_alloc(ssize_t size) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int (*alloc)(uint64_t *, size_t) = cuda ? (int (*)(uint64_t *, size_t))dlsym(cuda, "cuMemAlloc_v2") : NULL;
    uint64_t ptr = 0;
    return alloc && alloc(&ptr, (size_t)size) == 0 ? (void *)(uintptr_t)ptr : NULL;
}

static void cuda_free(void *ptr) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int (*release)(uint64_t) = cuda ? (int (*)(uint64_t))dlsym(cuda, "cuMemFree_v2") : NULL;
    if (release) release((uint64_t)(uintptr_t)ptr);
}

/* What PyTorch calls. */
void *demo_malloc(ssize_t size, int device, cudaStream_t stream) {
    if (bytes_limit >= 0 && demo_bytes_live() + size > bytes_limit) return NULL;
    void *ptr = alloc_hook ? alloc_hook(upstream_user, size, device, stream) : cuda_alloc(size);
    if (ptr) __atomic_add_fetch(&bytes_live, size, __ATOMIC_SEQ_CST);
    return ptr;
}

void demo_free(void *ptr, ssize_t size, int device, cudaStream_t stream) {
    __atomic_sub_fetch(&bytes_live, size, __ATOMIC_SEQ_CST);
    if (free_hook) free_hook(upstream_user, ptr, size, device, stream);
    else cuda_free(ptr);
}

void demo_init(int device_count) {
    char line[64];
    snprintf(line, sizeof line, "init %d", device_count);
    log_line(line);
}

void demo_reset(void) { log_line("reset"); }

void demo_memory_fraction(double fraction, int device) {
    char line[64];
    snprintf(line, sizeof line, "fraction %g of %d", fraction, device);
    log_line(line);
}

void *demo_base_alloc(void *ptr, size_t *size) {
    *size = 12345;
    return (void *)((uintptr_t)ptr & ~(uintptr_t)0xff);
}

void demo_record_stream(void *ptr, cudaStream_t stream) {
    char line[96];
    snprintf(line, sizeof line, "%#lx used by %#lx", (unsigned long)(uintptr_t)ptr, (unsigned long)(uintptr_t)stream);
    log_line(line);
}

static void log_pool(const char *what, int device, pool_id id) {
    char line[96];
    snprintf(line, sizeof line, "%s (%lu, %lu) on %d", what, (unsigned long)id.first, (unsigned long)id.second, device);
    log_line(line);
}

/* The filter is a std::function by hidden pointer: readable, and all zeros. */
void demo_begin_pool(int device, pool_id id, void *filter) {
    static const char zeros[32];
    log_pool(memcmp(filter, zeros, sizeof zeros) == 0 ? "begin" : "begin with a filter", device, id);
}
void demo_end_pool(int device, pool_id id) { log_pool("end", device, id); }
void demo_release_pool(int device, pool_id id) { log_pool("release", device, id); }
