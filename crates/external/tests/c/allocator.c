/* An allocator as one writes it for PyTorch's CUDAPluggableAllocator, with every hook.
 *
 * Its memory comes from a source that the test sets; without one, from the CUDA driver, by cuMemAlloc in the current context.
 * It counts what it is asked for, and caches nothing. Calls may come from several threads. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

typedef struct CUstream_st *cudaStream_t;
typedef struct { uint64_t first, second; } pool_id;

typedef void *(*source_alloc)(void *user, ssize_t size, int device, cudaStream_t stream);
typedef void (*source_free)(void *user, void *ptr, ssize_t size, int device, cudaStream_t stream);

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static source_alloc give;
static source_free take;
static void *source_user;
static ssize_t bytes_live;
static ssize_t bytes_limit = -1;
static char words[4096];

static void note(const char *word) {
    pthread_mutex_lock(&gate);
    if (strlen(words) + strlen(word) + 2 < sizeof words) {
        strcat(words, word);
        strcat(words, "\n");
    }
    pthread_mutex_unlock(&gate);
}

/* For the test. */
void demo_set_source(source_alloc alloc, source_free free, void *user) {
    give = alloc;
    take = free;
    source_user = user;
}
void demo_set_limit(ssize_t bytes) { bytes_limit = bytes; }
ssize_t demo_bytes_live(void) { return __atomic_load_n(&bytes_live, __ATOMIC_SEQ_CST); }
size_t demo_read_words(char *into, size_t room) {
    pthread_mutex_lock(&gate);
    size_t length = strlen(words);
    if (length < room) {
        memcpy(into, words, length + 1);
        words[0] = 0;
    }
    pthread_mutex_unlock(&gate);
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
    void *ptr = give ? give(source_user, size, device, stream) : cuda_alloc(size);
    if (ptr) __atomic_add_fetch(&bytes_live, size, __ATOMIC_SEQ_CST);
    return ptr;
}

void demo_free(void *ptr, ssize_t size, int device, cudaStream_t stream) {
    __atomic_sub_fetch(&bytes_live, size, __ATOMIC_SEQ_CST);
    if (take) take(source_user, ptr, size, device, stream);
    else cuda_free(ptr);
}

void demo_init(int device_count) {
    char word[64];
    snprintf(word, sizeof word, "init %d", device_count);
    note(word);
}

void demo_reset(void) { note("reset"); }

void demo_memory_fraction(double fraction, int device) {
    char word[64];
    snprintf(word, sizeof word, "fraction %g of %d", fraction, device);
    note(word);
}

void *demo_base_alloc(void *ptr, size_t *size) {
    *size = 12345;
    return (void *)((uintptr_t)ptr & ~(uintptr_t)0xff);
}

void demo_record_stream(void *ptr, cudaStream_t stream) {
    char word[96];
    snprintf(word, sizeof word, "%#lx used by %#lx", (unsigned long)(uintptr_t)ptr, (unsigned long)(uintptr_t)stream);
    note(word);
}

static void note_pool(const char *what, int device, pool_id id) {
    char word[96];
    snprintf(word, sizeof word, "%s (%lu, %lu) on %d", what, (unsigned long)id.first, (unsigned long)id.second, device);
    note(word);
}

/* The filter is a std::function by hidden pointer: it may be looked at, and is all zeros. */
void demo_begin_pool(int device, pool_id id, void *filter) {
    static const char zeros[32];
    note_pool(memcmp(filter, zeros, sizeof zeros) == 0 ? "begin" : "begin with a filter", device, id);
}
void demo_end_pool(int device, pool_id id) { note_pool("end", device, id); }
void demo_release_pool(int device, pool_id id) { note_pool("release", device, id); }
