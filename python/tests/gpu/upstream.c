// A user's allocator for a MemPool: the driver's own functions, found at run time, and how often they were called.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

static int allocated, freed;

static void* driver_function(const char* name) {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver == NULL ? NULL : dlsym(driver, name);
}

void* upstream_alloc(ptrdiff_t size, int device, void* stream) {
    (void)device;
    (void)stream;
    int (*alloc)(uint64_t*, size_t) = (int (*)(uint64_t*, size_t))driver_function("cuMemAlloc_v2");
    uint64_t address = 0;
    if (alloc == NULL || alloc(&address, (size_t)size) != 0) {
        return NULL;
    }
    ++allocated;
    return (void*)address;
}

void upstream_free(void* ptr, ptrdiff_t size, int device, void* stream) {
    (void)size;
    (void)device;
    (void)stream;
    int (*release)(uint64_t) = (int (*)(uint64_t))driver_function("cuMemFree_v2");
    if (release != NULL && release((uint64_t)ptr) == 0) {
        ++freed;
    }
}

int upstream_allocated(void) {
    return allocated;
}

int upstream_freed(void) {
    return freed;
}
